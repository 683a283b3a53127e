"""Collapsed kernel bodies: indices of split axes and joined dims are those of the elements before."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.codegen.ptx.generator import PLAN
from tessera.core.symbolic_dim import Dim
from tessera.interp.tile import interpreter
from tessera.lower.graph_to_schedule.kernel_body import _join_dims, _split_at_stride, _split_digits
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


@settings(deadline=None, max_examples=60)
@given(st.sampled_from((2, 4, 8)), st.integers(1, 3), st.integers(-5, 5), st.sampled_from((1, 2, 4)), st.data())
def test_runs_have_the_value_of_their_elements(run, stride, constant, more, data):
    """Of digits that are a whole dim, the number of a run or of several, and the element of a run."""
    extent = run * more * 3
    digits = [IndexDigit(1, extent), IndexDigit(1, extent, run * more), IndexDigit(1, extent, 1, run)]
    terms = data.draw(st.lists(st.sampled_from(digits), unique=True, max_size=3))
    index = walk((A, stride), *((IndexExpr(0, ((d, 1),)), n + 2) for n, d in enumerate(terms)), constant=constant)
    split = _split_digits(index, 1, extent, run)
    assert split is not None
    for a, b in itertools.product(range(SIZES[0]), range(extent)):
        assert value(split, (a, b // run, b % run)) == value(index, (a, b))
    third = IndexExpr(0, ((IndexDigit(1, extent, 3), 1),))
    assert _split_digits(third, 1, extent, run) is None


def find_shapes(function, *args):
    """The shapes of the parameters of each kernel for a GPU."""
    return [[p.type.shape for p in f.params] for f in modules(traced(function, *args)[0], PLAN)["tile"].functions[1:]]


@pytest.mark.parametrize(
    ("shape", "viewed"),
    [((16, 24), (96, 4)), ((9, 4), (9, 4)), ((2, 3, 2, 6), (18, 4)), ((2, 2), (4,))],
)
def test_the_elements_of_a_block_of_random_words_share_it(shape, viewed):
    """Four of them are a dim of their own, where they divide the elements."""
    (found,) = find_shapes(lambda x: ts.dropout(x, 0.5), np.ones(shape, "f4"))
    assert [s for s in found if s] == [viewed, viewed]


def test_numbers_of_f64_share_two_by_two():
    (found,) = find_shapes(lambda x: x + ts.rand((8, 8), dtype=ts.f64), np.ones((8, 8)))
    assert [s for s in found if s] == [(32, 2)] * 2


def test_a_broadcast_mask_keeps_the_dims():
    """Words of some dims alone: an element of another dim shares them anyway."""
    x = np.ones((4, 8, 5), "f4")
    (found,) = find_shapes(lambda x: x * ts.dropout(x[:, :, :1] * 1.0, 0.5), x)
    ts.manual_seed(3)
    got = ts.jit(lambda x: x * ts.dropout(x[:, :, :1] * 1.0, 0.5))(x)
    ts.manual_seed(3)
    np.testing.assert_array_equal(got, x * ts.dropout(ts.Tensor(x[:, :, :1]), 0.5).numpy())
    assert math.prod(next(s for s in found if s)) == x.size


@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from((ts.f32, ts.f64, ts.bf16)), st.booleans())
def test_random_numbers_of_any_shape(shape, dtype, normal):
    """The words of compiled programs, at the tile level as a GPU has it, are those of a call."""
    draw = ts.randn if normal else ts.rand
    function, args = traced(lambda: draw(tuple(shape), dtype=dtype) * 2.0)
    ts.manual_seed(11)
    state = [np.array(11), np.array(0)]
    (got,) = interpreter.run(modules(function, PLAN)["tile"], [*args, *state])
    ts.manual_seed(11)
    want = draw(tuple(shape), dtype=dtype).numpy().astype("f8") * 2.0
    np.testing.assert_allclose(np.asarray(got).astype("f8"), want, rtol=1e-2 if dtype == ts.bf16 else 1e-5, atol=1e-6)


def test_an_index_that_is_a_number_along_joined_dims():
    """Rows are read and numbered as one: their dims become one."""
    x = np.ones((6, 5, 8), "f4")

    def numbered(x):
        return x + ts.reshape(ts.arange(240), (6, 5, 8)).to(ts.f32)

    assert find_shapes(numbered, x) == [[(240,), (240,)]]
    agree(numbered, x)
    assert find_shapes(lambda x: x + ts.arange(8), x) == [[(30, 8), (30, 8)]]
