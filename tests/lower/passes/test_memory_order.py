"""Canonicalisation keeps the order of memory: what is permuted is reduced, and padded, as it lies, and padded tensors
stay narrow."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

import tessera as ts
from tessera.interp import graph
from tessera.lower.passes.canonicalisation import MAX_LIFTED, canonicalise
from tessera.ops.tensor import basic, reduce, shape
from tests.lower.levels import agree, traced

SIZES = (2, 3, 1, 4)
X = np.random.default_rng(0).integers(-8, 9, SIZES).astype(np.float32)
ORDERS = list(permutations(range(len(SIZES))))
AXES = [axes for count in range(1, 5) for axes in combinations(range(4), count)]


def rewrite(function, *arrays):
    """The canonical function, which gives what the function gives."""
    made, arguments = traced(function, *arrays)
    found = canonicalise(made)
    for ours, wanted in zip(graph.run(found, arguments), graph.run(made, arguments), strict=True):
        assert ours.dtype == wanted.dtype
        np.testing.assert_array_equal(ours, wanted)
    return found


def find_source(function, op):
    """The op below the reshapes under an op; None for a parameter of the function."""
    producers = {v: n for n in function.body.nodes for v in n.results}
    node = producers.get(next(n for n in reversed(function.body.nodes) if n.op is op).args[0])
    while node is not None and node.op is shape.reshape:
        node = producers.get(node.args[0])
    return None if node is None else node.op


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_permuted_values_are_reduced_as_they_lie(axes):
    for order in ORDERS:
        kept = bool(order[0] % 2)
        total = rewrite(lambda x: ts.sum(x.permute(*order), axis=axes, keepdims=kept), X)  # noqa: B023
        reduced = {order[a] for a in axes if SIZES[order[a]] > 1}
        if len(reduced) == 1:  # an axis that is kept is one of a norm, whose kernel reads the permuted value
            assert find_source(total, reduce.sum) is (shape.permute if kept else None)


VALUES = {  # each of the first two axes of a permuted array
    "slices": lambda y: y[1:3, ::2] * y[:2, ::2],
    "constants": lambda y: ts.where(y > 2.0, 1.0 - y, 3.0),
    "of two types": lambda y: y.to(ts.f64) * 2.0 + (y + 1.0).to(ts.f64),
    "in two orders": lambda y: y[:3, :3] + y.permute(1, 0, 2)[:3, :3],
}


@pytest.mark.parametrize("name", VALUES)
def test_what_is_computed_of_permuted_values_is_reduced_as_they_lie(name):
    x = np.random.default_rng(1).integers(-8, 9, (3, 5, 4)).astype(np.float32)
    for op in (ts.sum, ts.max):
        program = reduce_turned(op, VALUES[name])
        agree(program, x)
        assert shape.permute not in {n.op for n in find_live(rewrite(program, x))} or name == "in two orders"


@pytest.mark.parametrize("count", [MAX_LIFTED - 1, MAX_LIFTED + 1, 60])
def test_few_ops_are_looked_through(count):
    """Operands are followed one by one, and each op has this one twice: 60 ops would be followed 2^60 times."""

    def compute(y):
        for _ in range(count):
            y = ts.minimum(y, y)
        return y

    found = rewrite(reduce_turned(ts.sum, compute), np.ones((3, 5, 4), np.float32))
    assert (shape.permute in {n.op for n in find_live(found)}) == (count > MAX_LIFTED)


def reduce_turned(op, compute):
    return lambda x: op(compute(x.permute(2, 0, 1)), axis=0)


def find_live(function):
    """The nodes that the results of a function are computed by, its own permutation of results aside."""
    needed, live = set(function.results), []
    for node in reversed(function.body.nodes):
        if not needed.isdisjoint(node.results):
            needed.update(node.args)
            live.append(node)
    return live[1:] if live[0].op is shape.permute else live


def test_constants_keep_their_policy():
    """Those of a sum in memory order are as the others: the sum has operands of one type."""

    def program(x):
        return ts.sum(1.5 - x.to(ts.bf16 @ ts.toward_zero).permute(1, 0), axis=0)

    found = rewrite(program, np.ones((3, 4), np.float32))
    subtraction = [n for n in found.body.nodes if len(n.args) == 2][-1]
    assert len({v.type.policy for v in subtraction.args}) == 1
    agree(program, np.ones((3, 4), np.float32))


def pad_moved(order, inner, value):
    """Padding of an array that is widened, and permuted before or after that."""

    def program(x):
        moved = x.permute(*order).to(ts.f32) if inner else x.to(ts.f32).permute(*order)
        return ts.pad(moved, ((0, 1), (2, 0), (3, 4)), value=value)

    return program


@pytest.mark.parametrize("value", [0.0, -math.inf, math.nan, 3.0, 1e30])
def test_padded_tensors_stay_narrow_and_in_order(value):
    x = np.arange(24).reshape(4, 2, 3).astype(np.float16)
    exact = value == 0 or not math.isfinite(value)  # else f16 may not have it
    for order in permutations(range(3)):
        for inner in (True, False):
            found = rewrite(pad_moved(order, inner, value), x)
            assert find_source(found, shape.pad) is (None if exact else basic.cast)


TYPES = [
    (np.int8, ts.f32, 7),
    (np.int16, ts.f32, -math.inf),
    (float8_e4m3fn, ts.f32, math.inf),
    (np.float16, ts.int64, 70000),
]


@pytest.mark.parametrize(("narrow", "wide", "value"), TYPES)
def test_numbers_that_the_narrow_type_lacks_pad_the_wide_one(narrow, wide, value):
    found = rewrite(lambda x: ts.pad(x.to(wide), ((1, 0), (0, 2)), value=value), np.ones((2, 3), narrow))
    assert find_source(found, shape.pad) is basic.cast
