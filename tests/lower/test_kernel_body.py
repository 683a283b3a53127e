"""Collapsed kernel bodies: indices of split axes and joined dims are those of the elements before."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.codegen.ptx.generator import PLAN
from tessera.core.symbolic_dim import Dim
from tessera.lower.graph_to_schedule.kernel_body import _join_dims, _split_at_stride
from tessera.lower.indexing_maps import IndexDigit, IndexExpr, add_exprs, make_constant, make_index, scale_expr
from tests.lower.levels import agree, modules, traced
from tests.lower.test_lower_affine import value

SIZES = (3, 4, 5)
A, B, C = (make_index(d, n) for d, n in enumerate(SIZES))


def walk(*terms, constant=0):
    total = make_constant(constant)
    for index, stride in terms:
        total = add_exprs(total, scale_expr(index, stride))
    return total


@pytest.mark.parametrize(
    ("index", "size", "stride"),
    [
        (walk((A, 20), (B, 5), (C, 1)), 60, 20),
        (walk((A, 8), (B, 2), (C, 1), constant=17), 48, None),
        (walk((A, 8), (C, 1), constant=19), 48, 8),
        (walk((A, 8), (C, 1), constant=20), 48, None),
        (walk((A, 8), (C, 1), constant=3), 50, None),
        (walk((A, 16), (C, 2)), 96, None),
        (walk((A, 8), (C, -1), constant=4), 48, None),
        (walk((A, 8)), 48, None),
        (walk((A, 8), (make_index(2, Dim.of("n")), 1)), 48, None),
        (walk((A, 8), (C, Dim.of("n"))), 48, None),
    ],
)
def test_where_an_axis_is_split(index, size, stride):
    found = _split_at_stride(index, size)
    assert (None if found is None else found[0]) == stride
    for place in itertools.product(*map(range, SIZES)) if found is not None else ():
        high, low = (value(part, place) for part in found[1:])
        assert 0 <= low < stride and 0 <= high < size // stride
        assert high * stride + low == value(index, place)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(0, 40), st.integers(-2, 9), st.booleans())
def test_joined_dims_have_the_value_of_both(inner, outer, constant, whole):
    index = walk((A, inner * SIZES[1] if whole else outer), (B, inner), (C, 7), constant=constant)
    joined = _join_dims(index, 0, SIZES[0], SIZES[1])
    assert (joined is not None) == (whole or outer == inner * SIZES[1])
    for a, b, c in itertools.product(*map(range, SIZES)) if joined is not None else ():
        assert value(joined, (a * SIZES[1] + b, None, c)) == value(index, (a, b, c))


def test_dims_that_an_index_divides_are_not_joined():
    half = IndexExpr(0, ((IndexDigit(1, 4, 2), 1),))
    assert _join_dims(add_exprs(scale_expr(A, 4), half), 0, 3, 4) is None


def test_an_epilogue_reads_memory_as_it_lies():
    """A kernel with a product has no view of what it adds to its results."""
    x, w = (np.random.default_rng(0).standard_normal(s).astype("f4") for s in ((16, 512), (8, 64, 64)))

    def by_heads(x):
        return ts.permute(ts.reshape(x, (16, 8, 64)), (1, 0, 2))

    def product(x, w):
        return by_heads(x) @ w + by_heads(ts.exp(x))

    (kernel,) = modules(traced(product, x, w)[0], PLAN)["tile"].functions[1:]
    assert [p.type.shape for p in kernel.params] == [(16, 8, 64), (8, 64, 64), (16, 512), (8, 16, 64)]
    agree(product, x, w, rtol=1e-4)


def test_a_load_with_a_mask_reads_memory_as_it_lies():
    x = np.random.default_rng(0).standard_normal((4, 512)).astype("f4")

    def padded(x):
        return ts.sum(ts.pad(ts.reshape(ts.exp(x), (4, 8, 64)), ((0, 0), (1, 1), (0, 0))), axis=1)

    (kernel,) = modules(traced(padded, x)[0], PLAN)["tile"].functions[1:]
    assert [p.type.shape for p in kernel.params] == [(4, 512), (4, 64)]
    agree(padded, x, rtol=1e-5)
