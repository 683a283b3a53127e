"""Launches on a mesh: elements run their part of the programs on windows of the memories, with the same values."""

import importlib

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.csl.generator import Csl
from tessera.interp.tile import interpreter
from tessera.ir.core import Module
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.verify import verify
from tessera.lower.mesh.launch_programs import partition_kernel
from tessera.lower.mesh.launch_windows import LaunchTiling
from tessera.lower.pipeline import lower
from tessera.runtime.program import prepare

GRIDS = [(2, 2), (1, 3), (4, 4)]
B = 4


@ts.kernel
def shares(x, out):
    i = tile.program_id(0) * B
    e = tile.exp(tile.load(x[i : i + B, :], edge="clip"))
    tile.store(out[i : i + B, :], e / tile.sum(e, axis=1, keepdims=True), edge="clip")


@ts.kernel
def doubled(x, out):
    i = tile.program_id(0) * 8
    tile.store(out[i : i + 8, :4], tile.load(x[i : i + 8, :4], edge="clip") * 2.0, edge="clip")


@ts.kernel
def blur(x, out):
    i = tile.program_id(0) * B
    left, right = (tile.load(x[i + d : i + d + B], edge="clip") for d in (-1, 1))
    tile.store(out[i : i + B], left + right, edge="clip")


@ts.kernel
def filled(x, out):
    i = tile.program_id(0) * B
    ahead = tile.load(x[i + 2 : i + 2 + B], edge="clip", mask=tile.arange(0, B) != 1, other=7.0)
    tile.store(out[i : i + B], ahead, edge="clip")


@ts.kernel
def in_place(x):
    i = tile.program_id(0) * B
    tile.store(x[i : i + B], tile.load(x[i : i + B], edge="clip") + 1.0, edge="clip")
    tile.store(x[i : i + B], tile.load(x[i : i + B], edge="clip") * 2.0, edge="clip")


@ts.kernel
def every_other(x, out):
    i = tile.program_id(0)
    out[i * 2] = x[i] + 1.0


@ts.kernel
def backwards(x, out):
    i = (tile.grid_size(0) - 1 - tile.program_id(0)) * B
    tile.store(out[i : i + B], tile.load(x[i : i + B]) * 3.0)


@ts.kernel
def flattened(x, out):
    i = (tile.program_id(0) * 3 + tile.program_id(1)) * B
    places = i + tile.arange(0, B)
    tile.store(out[places], tile.load(x[places], mask=places < 21), mask=places < 21)


@ts.kernel
def product(a, b, out):
    m, n = tile.program_id(0) * B, tile.program_id(1) * 6
    acc = tile.zeros((B, 6))
    for k in tile.range(0, a.shape[1], B):
        acc = tile.mma(
            tile.load(a[m : m + B, k : k + B], edge="clip"), tile.load(b[k : k + B, n : n + 6], edge="clip"), acc
        )
    tile.store(out[m : m + B, n : n + 6], acc, edge="clip")


@ts.kernel
def histogram(x, bins):
    tile.atomic_add(bins[tile.cast(x[tile.program_id(0)], ts.int32) % 3], 1.0)


@ts.kernel
def rows_below(x, out):
    i = tile.program_id(0) * B
    rows, last = i + tile.arange(0, B), tile.minimum(i + B, x.shape[0])
    total = tile.zeros((B,))
    for j in tile.range(0, last, B):
        cols = j + tile.arange(0, B)
        total += tile.sum(
            tile.where(cols[None, :] <= rows[:, None], tile.load(x[j : j + B], edge="clip")[None, :], 0.0), axis=1
        )
    tile.store(out[i : i + B], total, edge="clip")


def r(*shape):
    return np.random.default_rng(sum(shape)).random(shape, dtype=np.float32)


def z(*shape):
    return np.zeros(shape, np.float32)


CASES = {
    "rows": (shares, (r(26, 5), z(26, 5)), (7,)),
    "halo": (blur, (r(30), z(30)), (8,)),
    "other at the edge": (filled, (r(30), z(30)), (8,)),
    "in place": (in_place, (r(30),), (8,)),
    "gaps": (every_other, (r(9), r(18)), (9,)),
    "backwards": (backwards, (r(24), z(24)), (6,)),
    "two axes of one index": (flattened, (r(21), z(21)), (2, 3)),
    "product": (product, (r(14, 10), r(10, 13), z(14, 13)), (4, 3)),
    "atomics, which are not cut": (histogram, (r(20) * 9, z(3)), (20,)),
    "run-time bound": (rows_below, (r(22), z(22)), (6,)),
}


@pytest.mark.in_turn("budget")
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("budget", [36 << 10, 0])
def test_a_cut_kernel_gives_the_values_of_the_whole_one(name, grid, budget):
    kernel, arrays, programs = CASES[name]
    program = prepare(kernel, arrays, grid=programs)
    cut = partition_kernel(program.levels["tile"], grid, budget)
    verify(cut)
    assert (cut is program.levels["tile"]) == name.startswith("atomics")
    assert print_module(parse_module(print_module(cut))) == print_module(cut)
    found, wanted = [a.copy() for a in arrays], [a.copy() for a in arrays]
    interpreter.run(program.levels["tile"], wanted)
    interpreter.run(cut, found)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)  # a split product may sum in another order


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_gives_the_values_of_the_interpreter(name):
    kernel, arrays, programs = CASES[name]
    program = prepare(kernel, arrays, grid=programs)
    wanted, generator = program.run("tile"), Csl((2, 2))
    arrays = [a.copy() for a in arrays]
    generator.runtime(generator.emit(program.levels["tile"], {})).run(arrays)
    for i, want in zip(program.written, wanted, strict=True):
        np.testing.assert_allclose(arrays[i], want, rtol=1e-5, atol=1e-6)


def emit(f, grid, *arrays):
    generator = Csl(grid)
    *_, (_, module) = lower(Module("graph", (ts.jit(f).trace(*arrays).function,)), generator.capabilities.plan)
    return module, generator.runtime(generator.emit(module, {}))


def blurred(x):
    return ts.launch(blur, (-(-x.shape[0] // B),), x, ts.like(x))


def shared(x):
    return ts.launch(shares, (-(-x.shape[0] // B),), x, ts.like(x))


FUNCTIONS = {
    "alone": (shared, (r(26, 5),)),
    "in the middle": (lambda x: shared(x * 2.0) @ ts.ones((5, 5)) + x, (r(32, 5),)),
    "sizes that are no pieces": (lambda x: shared(x * 2.0) + 1.0, (r(29, 5),)),
    # Programs are split in two to keep all elements busy; the parts of a result lie along one axis.
    "fewer programs than elements": (lambda x: ts.launch(doubled, (2,), x, ts.like(x)) + 1.0, (r(13, 4),)),
    "halos": (lambda x: blurred(x * 2.0) + 1.0, (r(32),)),
    "twice": (lambda x: blurred(blurred(x)), (r(37),)),
    "in a scan": (lambda x: ts.scan(lambda c, _: (blurred(c), c.sum()), x, None, length=3), (r(32),)),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_launches_in_functions_are_cut_too(name, grid):
    function, arrays = FUNCTIONS[name]
    wanted = ts.jit(function)(*arrays)
    module, program = emit(function, grid, *arrays)
    verify(module)
    for run in (program.run, lambda a: interpreter.run(module, a)):
        for found, want in zip(run(list(arrays)), wanted if isinstance(wanted, tuple) else [wanted], strict=True):
            np.testing.assert_allclose(found, want.numpy(), rtol=1e-5)


def test_halos_come_from_the_neighbours():
    module, _ = emit(lambda x: blurred(x * 2.0) + 1.0, (2, 2), r(32))
    names = {n.op.name for n in module.functions[1].body.walk()}
    assert "mesh.shift" in names and "mesh.all_gather" not in names


def test_an_element_holds_less_on_a_larger_mesh():
    sizes = []
    for grid in [(1, 1), (2, 2), (4, 4)]:
        _, program = emit(shared, grid, r(64, 20))
        program.run([r(64, 20)])
        sizes.append(int(dict(program.describe_run())["memory"].split()[2].replace(",", "")))
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2]


@pytest.mark.parametrize("grid", [(2, 2), (4, 4)])
@pytest.mark.parametrize("name", ["softmax", "matmul", "flash_attention"])
def test_examples_fit_although_their_arrays_exceed_an_element(name, grid):
    module = importlib.import_module(f"examples.{name}")
    given = module.inputs(np.random.default_rng(0))
    kernel = getattr(module, name)
    programs = kernel.example.grid(**given)
    program = prepare(kernel, list(given.values()), grid=programs if isinstance(programs, tuple) else (programs,))
    cut = Csl(grid)._partition(program.levels["tile"], {})
    found = [np.array(a) for a in given.values()]
    interpreter.run(cut, found)
    want = program.run("tile")[0]  # a BLAS adds in an order that depends on the shape of the blocks
    np.testing.assert_allclose(found[-1], want, rtol=1e-6, atol=2e-6 * np.abs(want).max())


@ts.kernel
def totals(x, out):
    total = tile.sum(tile.load(x[tile.program_id(0), :]), axis=0)
    tile.atomic_add(out[0], total)


def test_a_launch_that_cannot_be_cut_and_does_not_fit_names_the_line():
    with pytest.raises(ts.errors.UnsupportedOpError, match="several programs access the elements of `out`") as error:
        emit(lambda x: ts.launch(totals, (300,), x * 2.0, ts.zeros((1,)))[0], (2, 2), r(300, 100))
    assert "tile.atomic_add(out[0], total)" in str(error.value)


def test_axes_with_programs_past_the_end():
    tiling = LaunchTiling((7, 4), (2, 2), (4, 2), ())
    assert tiling.padded_axes(8) == [0]  # 4 tiles of 2 programs for 7
    even = LaunchTiling((8, 4), (2, 2), (4, 2), ())
    assert even.padded_axes(4) == [] and even.padded_axes(3) == [0]  # 8 tiles in 3 rounds of 3
