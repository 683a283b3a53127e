"""Loop stages: the order of nodes around a looped dim; and the tile sizes of a plan."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera.lower.indexing_maps import analyse_body
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.schedule_to_tile import lowering
from tessera.lower.schedule_to_tile.lowering import cut_tiles, split_into_stages
from tessera.ops.tensor import nn
from tessera.runtime import driver
from tests.lower.levels import modules, traced


def kernel(function, *shapes, plan=None):
    arrays = [np.zeros(s, np.float32) for s in shapes]
    module = modules(traced(function, *arrays)[0], plan or LoweringPlan(programs=1))["schedule"]
    return next(n for n in module.main.body.nodes if n.op.name == "schedule.kernel")


def test_softmax_runs_three_loops():
    node = kernel(nn.softmax, (4, 100), plan=LoweringPlan(row_limit=10))
    (block,) = node.regions
    found = split_into_stages(block, analyse_body(block, node.attrs["dims"]), node.attrs["schedule"]["loop"])
    assert [[n.attrs["kind"] for n in s.ended] for s in found] == [["max"], ["sum"], []]
    assert [[n.op.__name__ for n in s.loop if n.op.name == "ts.exp"] for s in found] == [[], ["exp"], ["exp"]]


def test_without_a_loop_there_is_one_stage():
    node = kernel(nn.softmax, (4, 100))
    (block,) = node.regions
    assert len(split_into_stages(block, analyse_body(block, node.attrs["dims"]), ())) == 1


@pytest.mark.parametrize("n", [96, 100, 384, 1000])
def test_matmul_tiles(n):
    node = kernel(lambda x, y: x @ y, (512, n), (n, 384))
    (m, cols, k), loop = node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    assert (m, cols) == (128, 128)
    assert (k, loop) == ((n, ()) if n <= 512 else (500, (2,)) if n % k == 0 else (512, (2,)))


def test_small_problems_have_programs_for_all():
    tile = kernel(lambda x, y: x @ y, (64, 64), (64, 64), plan=LoweringPlan(programs=4)).attrs["schedule"]["tile"]
    assert math.prod(-(-64 // t) for t in tile[:2]) >= 4


def test_transpose_is_tiled_both_ways():
    assert kernel(lambda x: x.transpose() * 2, (512, 512)).attrs["schedule"]["tile"] == (64, 64)


def test_columns_are_summed_side_by_side():
    schedule = kernel(lambda x: x.sum(axis=0), (4096, 256)).attrs["schedule"]
    assert schedule["tile"] == (64, 128) and schedule["loop"] == (1,)


def test_cut_tiles_keep_the_rest_of_a_schedule():
    plan = LoweringPlan(row_limit=64, peel=True)
    node = kernel(lambda x: x.sum(axis=1), (1, 1000), plan=plan)
    assert node.attrs["schedule"] == {"tile": (1, 50), "loop": (1,), "peel": True}
    assert cut_tiles(node, plan) == {"tile": (1, 25), "loop": (1,), "peel": True}


def test_the_kernels_of_equal_layers_are_lowered_until_no_more_of_their_scopes_are_named(monkeypatch):
    lowered, lower = [], lowering.lower_kernel
    monkeypatch.setattr(lowering, "lower_kernel", lambda node, number: lowered.append(node) or lower(node, number))
    for count in (1, 3, 9):
        lowered.clear()
        model = ts.nn.Sequential(*(ts.nn.Linear(4, 4) for _ in range(count)))
        module = driver.lower(ts.jit(lambda m, x: m(x)).trace(model, np.ones((3, 4), "f4")).function, "llvm")["tile"]
        assert (len(lowered), len(module.functions)) == (min(count, 3), 2)
        assert sum(n.op.name == "host.launch" for n in module.main.body.nodes) == count
    names = {n.loc.scope for n in module.functions[1].body.walk() if n.loc.scope}
    assert names == {"0: Linear or 1: Linear or another"}
