"""Broadcast routes: asynchronous panels in matrix products and all-gathers, by tasks and by routers."""

import functools
import sys

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.csl.generator import Csl
from tessera.codegen.csl.text.program_files import LOCAL_TASK_IDS
from tessera.interp import bound
from tessera.interp.tile import interpreter
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.runtime import driver


def r(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def laid(function, args, grid):
    traced = ts.jit(function).trace(*args).function
    generator = Csl(grid)
    *_, module = (m for _, m in driver.iterate_passes(traced, generator.capabilities.plan))
    return traced, generator, module


def twice(a, b):
    return (a @ b) @ b


@pytest.fixture
def cut_both_ways(monkeypatch):
    """Force a distribution over rows and columns, whatever its cost, so that products communicate."""
    monkeypatch.setattr(sys.modules["tessera.lower.mesh.layout_search"], "CHOICES", ((0, 1),))


# No size is a multiple of a grid side; where the sides differ, a PE has several turns in a row.
PRODUCTS = {
    "square": (lambda a, b: a @ b, (r(10, 11), r(11, 14)), (3, 3)),
    "turns in a row": (lambda a, b: a @ b, (r(11, 23), r(23, 13)), (2, 3)),
    "f16": (lambda a, b: a @ b, (r(13, 15, dtype=np.float16), r(15, 17, dtype=np.float16)), (4, 4)),
    "two": (lambda a, b: a @ b, (r(5, 7), r(7, 6)), (2, 2)),
    "one after the other": (twice, (r(7, 7), r(7, 7)), (3, 3)),
    "long words": (lambda a, b: a @ b, (np.arange(35).reshape(5, 7), np.arange(28).reshape(7, 4)), (2, 2)),
}


@pytest.mark.usefixtures("cut_both_ways")
@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_use_asynchronously_received_panels(name, arch):
    function, args, grid = PRODUCTS[name]
    traced, generator, module = laid(function, args, grid)
    assert "mesh.begin_broadcast" in print_module(module) and parse_module(print_module(module)) == module
    wanted = bound.run(traced, args)[0]
    assert bound.compare_with_bound(interpreter.run(module, args)[0], wanted).ok
    artifact = generator.emit(module, {"arch": arch})
    assert "task after1()" in artifact.text("pe_program.csl")
    assert bound.compare_with_bound(generator.runtime(artifact).run(args)[0], wanted).ok


@pytest.mark.usefixtures("cut_both_ways")
@pytest.mark.parametrize("options", ["2x2,cannon", "2x2"])
def test_products_one_after_the_other_share_arrays(options):
    """An array is free again when what was sent from it has arrived."""
    generator, args, held = Csl().configured(options), (r(7, 7), r(7, 7)), []
    for count in (3, 4):
        traced = ts.jit(lambda x, w, n=count: functools.reduce(lambda y, _: ts.tanh(y @ w), range(n), x)).trace(*args)
        *_, module = (m for _, m in driver.iterate_passes(traced.function, generator.capabilities.plan))
        held.append(generator.emit(module, {}).text("pe_program.csl").count("= @zeros("))
    assert held[0] == held[1]


@pytest.mark.usefixtures("cut_both_ways")
@pytest.mark.parametrize("seed", ["1", "2"])
def test_results_do_not_depend_on_the_order_of_events(seed, monkeypatch):
    function, args, grid = PRODUCTS["square"]
    traced, generator, module = laid(function, args, grid)
    monkeypatch.setenv("TESSERA_CSL_SEED", seed)
    (found,) = generator.runtime(generator.emit(module, {})).run(args)
    assert bound.compare_with_bound(found, bound.run(traced, args)[0]).ok


def repeated(x, w):
    return ts.scan(lambda c, v: (c @ w * 0.1 + v, c), x, ts.stack([x, x * 2.0, x - 1.0]))[1]


@pytest.mark.usefixtures("cut_both_ways")
@pytest.mark.parametrize("options", ["3x3", "2x2,cannon"])
def test_neighbours_forward_in_a_chain_inside_a_loop(options):
    args, generator = (r(7, 7), r(7, 6)[:, :1] * np.ones(7, np.float32)), Csl().configured(options)
    traced = ts.jit(repeated).trace(*args).function
    *_, module = (m for _, m in driver.iterate_passes(traced, generator.capabilities.plan))
    artifact = generator.emit(module, {})
    assert "mesh.begin_" in print_module(module) and "task " not in artifact.text("pe_program.csl")
    assert bound.compare_with_bound(generator.runtime(artifact).run(args)[0], bound.run(traced, args)[0]).ok


@pytest.mark.usefixtures("cut_both_ways")
def test_panels_are_synchronous_without_memory_for_a_double_buffer():
    _, _, module = laid(lambda a, b: a @ b, (r(120, 125), r(125, 120)), (2, 2))
    text = print_module(module)
    assert '"mesh.broadcast"' in text and "begin_broadcast" not in text


def moved(x):
    return x[::2] * 2.0, ts.concatenate([x.T, x], axis=0)


@pytest.mark.usefixtures("cut_both_ways")
@pytest.mark.parametrize(("grid", "arch"), [((3, 1), "wse2"), ((1, 4), "wse3"), ((3, 2), "wse2")])
def test_all_gather_uses_one_dsd_operation(grid, arch):
    args = (r(7, 7),)
    traced, generator, module = laid(moved, args, grid)
    artifact = generator.emit(module, {"arch": arch})
    assert "by_echo" in artifact.text("pe_program.csl")
    for found, wanted in zip(generator.runtime(artifact).run(args), bound.run(traced, args), strict=True):
        assert bound.compare_with_bound(found, wanted).ok


@pytest.mark.usefixtures("cut_both_ways")
def test_task_ids_differ_from_the_colors_of_the_program():
    _, generator, module = laid(*PRODUCTS["one after the other"])
    text = generator.emit(module, {}).text("pe_program.csl")
    tasks = [int(line.split("(")[1].split(")")[0]) for line in text.split("\n") if "@get_local_task_id" in line]
    assert len(set(tasks)) == len(tasks) > 5 and set(tasks) <= set(LOCAL_TASK_IDS)
    assert not [n for n in tasks if f"@get_color({n})" in text]
