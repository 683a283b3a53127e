"""CSL programs of whole tensors: simulated runs stay within the interpreter's bounds."""

import sys

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.csl.generator import Csl
from tessera.core.errors import ArgumentError, ResourceError, UnsupportedOpError
from tessera.interp import bound
from tessera.interp.tile import interpreter
from tessera.ir.printer import print_module
from tessera.runtime import driver

# Where tensors may be split only over rows and columns, products must communicate.
LAYING = sys.modules["tessera.lower.mesh.layout_search"]


def r(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def stencil(x):
    around = [ts.mesh_shift(x, axis=a, shift=s) for a in (0, 1) for s in (-1, 1)]
    return (x + around[0] + around[1] + around[2] + around[3]) / 5.0


def attention(q, k, v):
    return ts.softmax((q @ k.T) * 0.25, axis=-1) @ v


CASES = {
    "chain": (lambda x, y: ts.tanh(ts.exp(x) * y + 1.0), (r(7, 9), r(7, 9))),
    "softmax": (lambda x: ts.softmax(x, axis=-1), (r(6, 10),)),
    "product": (lambda a, b: a @ b, (r(9, 7), r(7, 11))),
    "product-f16": (lambda a, b: a @ b, (r(9, 7, dtype=np.float16), r(7, 11, dtype=np.float16))),
    "matvec": (lambda a, x: a @ x, (r(9, 7), r(7))),
    "mlp": (lambda x, a, b, c: ts.gelu(x @ a + b) @ c, (r(8, 12), r(12, 16), r(16), r(16, 12))),
    "stencil": (stencil, (r(7, 9),)),
    "stencil of a row": (stencil, (r(1, 9),)),
    "attention": (attention, (r(8, 6), r(10, 6), r(10, 6))),
    "least": (lambda x: ts.min(x, axis=0), (r(6, 10),)),
    "whole numbers": (lambda x: ts.where(x % 3 == 0, x // 2, -x), (np.arange(-20, 20, dtype=np.int32).reshape(5, 8),)),
}


def emitted(function, args, grid, **options):
    traced = ts.jit(function).trace(*args).function
    generator = Csl(grid)
    module = driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"]
    return traced, generator, generator.emit(module, options)


def laid(function, args, options):
    generator = Csl().configured(options)
    traced = ts.jit(function).trace(*args).function
    *_, module = (m for _, m in driver.iterate_passes(traced, generator.capabilities.plan))
    return traced, generator, module


GRIDS = [((1, 1), "wse3"), ((1, 3), "wse2"), ((2, 1), "wse3"), ((2, 3), "wse2"), ((4, 4), "wse3")]


@pytest.mark.parametrize(("grid", "arch"), GRIDS)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_interpreter(name, grid, arch):
    function, args = CASES[name]
    traced, generator, artifact = emitted(function, args, grid, arch=arch)
    for found, reference in zip(generator.runtime(artifact).run(args), bound.run(traced, args), strict=True):
        assert bound.compare_with_bound(found, reference).ok


@pytest.mark.parametrize(("side", "arch"), [(2, "wse2"), (2, "wse3"), (4, "wse2"), (4, "wse3")])
def test_cannon_products(side, arch, monkeypatch):
    monkeypatch.setattr(LAYING, "CHOICES", ((0, 1),))
    args = (r(10, 11), r(11, 13))
    traced, generator, module = laid(lambda a, b: a @ b, args, f"{side}x{side},cannon")
    artifact = generator.emit(module, {"arch": arch})
    assert "ring_" in artifact.text("pe_program.csl") and "begin_rotate" in print_module(module)
    assert bound.compare_with_bound(interpreter.run(module, args)[0], bound.run(traced, args)[0]).ok
    assert bound.compare_with_bound(generator.runtime(artifact).run(args)[0], bound.run(traced, args)[0]).ok


def test_emission_is_deterministic():
    function, args = CASES["mlp"]
    assert emitted(function, args, (2, 2))[2].files == emitted(function, args, (2, 2))[2].files


def test_lines_name_their_source():
    text = emitted(*CASES["chain"], (1, 2))[2].text("pe_program.csl")
    assert "test_csl_programs.py:" in text


def test_colors_alternate_with_the_parity_of_coordinates():
    layout = emitted(lambda x: x.sum(), (r(40, 60),), (1, 3))[2].text("layout.csl")
    assert "@set_rectangle(3, 1);" in layout and ".tx = .{EAST}" in layout and "SOUTH" not in layout


def test_memory_errors_state_the_sizes_of_tensors():
    with pytest.raises(ResourceError, match=r"memory exceeded: \d+ KB of arrays needed, 40 KB available") as found:
        emitted(lambda a, b: a @ b, (r(200, 200), r(200, 200)), (1, 1))
    assert "host_a" in found.value.received and "1x1" in found.value.suggestion


def test_two_consecutive_products_fit_in_memory_with_their_panels():
    def program(x, w1, b1, w2, b2):
        return ts.relu(x @ w1 + b1) @ w2 + b2

    emitted(program, (r(64, 128), r(128, 256), r(256), r(256, 32), r(32)), (4, 4))


def test_unsupported_element_types_are_errors():
    with pytest.raises(UnsupportedOpError, match="no element type f64"):
        emitted(lambda x: x + 1.0, (np.zeros((2, 2)),), (1, 1))


@pytest.mark.parametrize("text", ["4", "0x2", "2x2x2", "axb"])
def test_invalid_grids_are_errors(text):
    with pytest.raises(ArgumentError, match="is not a grid"):
        Csl().configured(text)


def test_a_grid_larger_than_a_wafer_is_an_error():
    with pytest.raises(ArgumentError, match="the grid 2000x4 is larger than a wafer") as found:
        Csl().configured("2000x4")
    assert found.value.expected == "at most 1172x762 PEs"


def test_unknown_architectures():
    with pytest.raises(ArgumentError, match="no architecture wse9"):
        emitted(*CASES["chain"], (1, 1), arch="wse9")


def test_neighbours_forward_in_a_chain_with_too_few_queues(monkeypatch):
    monkeypatch.setattr(LAYING, "CHOICES", ((0, 1),))
    args = (r(8, 7), r(7, 10))
    traced, generator, module = laid(lambda a, b: (lambda y: y - y.sum(axis=0) - ts.max(y))(a @ b), args, "3x3")
    artifact = generator.emit(module, {})
    assert "begin_broadcast" in print_module(module) and "echo" not in artifact.text("pe_program.csl")
    (found,) = generator.runtime(artifact).run(args)
    assert bound.compare_with_bound(found, bound.run(traced, args)[0]).ok


def test_queue_errors_state_the_numbers(monkeypatch):
    monkeypatch.setattr(LAYING, "CHOICES", ((0, 1),))

    def program(a, b):
        y = a @ b
        return y.sum(axis=0), y.sum(axis=1)

    _, generator, module = laid(program, (r(9, 8), r(8, 10)), "4x4,cannon")
    with pytest.raises(ResourceError, match="8 queues needed, 6 available") as found:
        generator.emit(module, {})
    assert "ring_" in found.value.received
