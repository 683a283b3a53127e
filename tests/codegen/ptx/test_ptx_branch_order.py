"""Branch formation keeps the order of a kernel's accesses, and what other nodes need of a part stays before it."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.ptx.pipeline import list_passes
from tessera.interp.tile import interpreter
from tessera.ops.dialects import control_flow
from tessera.runtime.program import prepare


@ts.kernel
def store_between(x, y, out, old):
    first, second, i = tile.load(x[0:32]), tile.load(y[0:32]), tile.program_id(0)
    tile.store(x[0:32], tile.zeros((32,), ts.f32))
    tile.store(out[0:32], tile.where(i == 0, first, second))


@ts.kernel
def scatter_between(x, y, out, old):
    first, second, i = tile.load(x[0:32]), tile.load(y[0:32]), tile.program_id(0)
    x[tile.cast(tile.load(old[0:32]) * 0.0, ts.int32) + tile.arange(32)] = 0.0
    tile.store(out[0:32], tile.where(i == 0, first, second))


@ts.kernel
def store_in_a_branch_between(x, y, out, old):
    first, second, i = tile.load(x[0:32]), tile.load(y[0:32]), tile.program_id(0)
    if i < 2:
        tile.store(x[0:32], tile.zeros((32,), ts.f32))
    tile.store(out[0:32], tile.where(i == 0, first, second))


@ts.kernel
def atomic_in_a_part(x, y, out, old):
    first, second, i = tile.load(x[0:32]), tile.load(y[0:32]), tile.program_id(0)
    before = tile.atomic_add(old[tile.arange(32)], 1.0)
    tile.store(out[0:32], tile.where(i == 0, first, second + before))


@ts.kernel
def conditions_of_elements(x, y, out, old):
    first, second = tile.load(x[0:32]), tile.load(y[0:32])
    tile.store(out[0:32], tile.where(tile.load(old[0:32]) > 0.0, first, second))


@ts.kernel
def reduced_parts(x, y, out, old):
    first, second, i = tile.load(x[0:32]), tile.load(y[0:32]), tile.program_id(0)
    tile.store(out[0:32], tile.where(i == 0, first - tile.sum(first), second))


@ts.kernel
def part_of_a_result(x, y, out, old):
    i = tile.program_id(0)
    chosen, part = tile.load(old[0:32]), tile.zeros((32,), ts.f32)
    if i == 0:
        first, second = tile.load(x[0:32]), tile.load(y[0:32])
        chosen, part = tile.where(tile.num_programs(0) == 1, first + 1.0, second), first
    tile.store(out[0:32], chosen)
    tile.store(old[0:32], part)


@ts.kernel
def a_part_that_repeats(x, y, out, old):
    first, second, i = tile.load(x[0:1]), tile.load(y[0:32]), tile.program_id(0)
    tile.store(out[0:32], tile.where(i == 0, first, second))


@ts.kernel
def a_condition_that_is_a_part(x, y, out, old):
    """Two programs: in one the condition holds."""
    i = tile.program_id(0)
    first, second = tile.load(x[i]) > 0.0, tile.load(y[i]) > 0.0
    tile.store(out[i], tile.cast(tile.where(first, first, second), ts.f32))


KERNELS = {  # and how many branches they have
    "store_between": (store_between, 0), "scatter_between": (scatter_between, 0),
    "store_in_a_branch_between": (store_in_a_branch_between, 1), "atomic_in_a_part": (atomic_in_a_part, 0),
    "conditions_of_elements": (conditions_of_elements, 0), "reduced_parts": (reduced_parts, 0),
    "part_of_a_result": (part_of_a_result, 1), "a_part_that_repeats": (a_part_that_repeats, 1),
    "a_condition_that_is_a_part": (a_condition_that_is_a_part, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_what_stays_as_it_is(name):
    entry, count = KERNELS[name]
    arrays = [np.random.default_rng(i).standard_normal(32).astype("f4") for i in range(4)]
    given = dict(zip(("x", "y", "out", "old"), arrays, strict=True))
    module, found = prepare(entry, given, "ptx", (2 if name == "a_condition_that_is_a_part" else 1,)).levels["tile"], {}
    for each in list_passes("sm_90a"):
        before, module = module, each.run(module)
        if each.name == "branch formation":
            found = {"before": before, "after": module}
    results = []
    for each in found.values():
        memory = [a.copy() for a in arrays]
        interpreter.run(each, memory)
        results.append(memory)
    for ours, want in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, want)
    assert sum(n.op is control_flow.if_ for n in found["after"].functions[1].body.walk()) == count
