"""Mesh cost model: peak memory counts exactly the values that are live at the same time."""

import math
import sys

import numpy as np

import tessera as ts
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.mesh.cost_model import bound_peak_memory, estimate_peak_memory
from tessera.runtime import driver

PIECE = 16 * 16 * 4  # bytes of a tensor, all of which one element holds


def pieces(function, inputs, grid=(1, 1)):
    """How many pieces of 16 x 16 a function takes at most, inputs and outputs too."""
    rows, columns = grid
    args = [np.ones((16 * rows, 16 * columns), np.float32)] * inputs
    traced = ts.jit(function).trace(*args).function
    *_, module = (m for _, m in driver.iterate_passes(traced, LoweringPlan(mesh=grid, flash=False)))
    body = module.functions[1].body
    assert bound_peak_memory(body) >= estimate_peak_memory(body)
    return estimate_peak_memory(body) / PIECE


def test_a_result_is_handed_over_as_it_lies():
    assert pieces(lambda x: ts.exp(x), 1) == 2


def test_what_nothing_needs_any_more_counts_no_more():
    assert pieces(lambda x: ts.exp(ts.exp(ts.exp(ts.exp(x)))), 1) == 3


def test_views_take_nothing():
    assert pieces(lambda x: ts.exp(x.T.reshape(256)), 1) == 2


def test_an_input_that_is_a_result_is_copied():
    assert pieces(lambda x: (x, ts.exp(x)), 1) == 3


def test_what_is_needed_later_counts_on():
    def program(x, y):
        a, b = ts.exp(x), ts.exp(y)
        return a * b + a - b

    assert pieces(program, 2) == 6


def test_what_a_loop_carries_lies_in_one_place():
    assert pieces(lambda x: ts.while_loop(lambda v: ts.sum(v) < 9.0, lambda v: v * 2.0, x), 1) < 4


def test_panels_that_come_beside_a_product_have_two_places(monkeypatch):
    monkeypatch.setattr(sys.modules["tessera.lower.mesh.layout_search"], "CHOICES", ((0, 1),))
    assert math.floor(pieces(lambda x, y: x @ y, 2, (2, 2))) == 2 + 2 * 2 + 1  # and a few indices
