"""Mesh lowering of data movement, selection, reduction and control flow gives equal results on every grid."""

import sys

import pytest
from mesh_cases import CASES

import tessera as ts
from tessera.interp import bound
from tessera.interp.tile import interpreter
from tessera.ir.parser import parse_module
from tessera.ir.printer import print_module
from tessera.ir.rewrite import eliminate_dead_nodes
from tessera.ir.verify import verify
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import mesh
from tessera.runtime import driver


@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (2, 1), (2, 2), (2, 3)])
@pytest.mark.parametrize("name", CASES)
def test_every_grid_agrees(name, grid):
    function, args = CASES[name]
    traced = ts.jit(function).trace(*args).function
    *_, module = (m for _, m in driver.iterate_passes(traced, LoweringPlan(mesh=grid, flash=False)))
    verify(module)
    for found, reference in zip(interpreter.run(module, args), bound.run(traced, args), strict=True):
        assert bound.compare_with_bound(found, reference).ok
    assert parse_module(print_module(module)) == module


@pytest.mark.parametrize("name", ["slice", "rows by number", "scan", "concatenate", "pad"])
def test_bounds_of_the_mesh_hold_its_values(name):
    function, args = CASES[name]
    traced = ts.jit(function).trace(*args).function
    *_, module = (m for _, m in driver.iterate_passes(traced, LoweringPlan(mesh=(2, 3), flash=False)))
    for found, reference in zip(interpreter.run(module, args), interpreter.run_with_bounds(module, args), strict=True):
        assert bound.compare_with_bound(found, reference).ok


def test_the_search_takes_the_cheapest_layout_and_estimates_each_once(monkeypatch):
    search, costs = sys.modules["tessera.lower.mesh.layout_search"], {}
    estimate = search._estimate_cost

    def noting(function, shape, choices, chosen, *best):
        splits = tuple(c[i] for c, i in zip(choices, chosen, strict=True))
        assert splits not in costs
        costs[splits] = estimate(function, shape, choices, chosen)
        return costs[splits]

    monkeypatch.setattr(search, "_estimate_cost", noting)
    traced = ts.jit(lambda x: ts.cumsum(x, axis=0)).trace(ts.ones((12, 18))).function
    *_, module = (m for _, m in driver.iterate_passes(traced, LoweringPlan(mesh=(2, 3))))
    (read,) = (n for n in module.functions[1].body.nodes if n.op is mesh.read)
    first, *_ = costs
    best = min(costs, key=costs.get)
    assert costs[best] < costs[first]
    assert read.attrs["split"] == tuple(max(s, mesh.UNSPLIT) for s in best[0])


@pytest.mark.parametrize("name", ["concatenate", "heads", "scan", "while", "cond", "argmax"])
def test_the_search_stops_early_at_choices_that_cannot_win(name, monkeypatch):
    search, lowered = sys.modules["tessera.lower.mesh.layout_search"], []
    function, args = CASES[name]
    traced, plan = ts.jit(function).trace(*args).function, LoweringPlan(mesh=(2, 3), flash=False)
    estimate, bound = search._estimate_cost, search.bound_peak_memory
    monkeypatch.setattr(search, "bound_peak_memory", lambda block: lowered.append(block) or bound(block))
    *_, quick = (m for _, m in driver.iterate_passes(traced, plan))
    some = len(lowered)
    monkeypatch.setattr(search, "_estimate_cost", lambda *given: estimate(*given[:4]))
    *_, whole = (m for _, m in driver.iterate_passes(traced, plan))
    assert print_module(quick) == print_module(whole) and some < len(lowered) - some
    assert all(bound(block) >= search.estimate_peak_memory(eliminate_dead_nodes(block)) for block in lowered)
