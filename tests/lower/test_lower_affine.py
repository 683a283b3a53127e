"""Affine index expressions: splits, merges and divisions keep the values of indices."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.frontend.jit.tracing import jit
from tessera.lower.indexing_maps import (
    ZERO,
    AccessPoint,
    IndexDigit,
    IndexExpr,
    OpaqueIndex,
    add_exprs,
    delinearise,
    divide_expr,
    find_operand_points,
    linearise,
    make_constant,
    make_index,
    scale_expr,
)
from tessera.lower.schedule_to_tile.tile_emitter import find_block_layout

B, S, H, D = (make_index(i, n) for i, n in enumerate((2, 6, 3, 4)))


def value(expr, place):
    """An expression at an index of the dims."""

    def of(a):
        if isinstance(a, IndexDigit):
            found = place[a.dim] // a.divisor
            return found % a.modulus if a.modulus else found
        sign, inner, by = a.key
        return value(inner, place) // by if sign == "//" else value(inner, place) % by

    return expr.constant + sum(c * of(a) for a, c in expr.terms)


def test_heads_fold():
    merged = add_exprs(scale_expr(H, 4), D)
    assert delinearise(linearise((B, S, merged), (2, 6, 12)), (12, 12)) == (add_exprs(scale_expr(B, 6), S), merged)
    assert delinearise(linearise((add_exprs(scale_expr(B, 6), S), merged), (12, 12)), (2, 6, 3, 4)) == (B, S, H, D)


def test_split_and_joined():
    k = make_index(0, 12)
    high, low = divide_expr(k, 4)
    assert high.is_clean and low.is_clean
    assert add_exprs(scale_expr(high, 4), low) == k


def test_what_does_not_divide_is_opaque():
    quotient, remainder = divide_expr(add_exprs(scale_expr(B, 6), S), 4)
    assert isinstance(quotient.terms[0][0], OpaqueIndex) and remainder.within(0, 4)


def test_an_axis_of_one_has_no_index():
    assert make_index(0, 1) == ZERO and divide_expr(make_index(0, 3), 3) == (ZERO, make_index(0, 3))


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@settings(deadline=None)
@given(sizes, st.integers(1, 30), st.integers(-5, 5))
def test_division_keeps_the_value(shape, by, shift):
    place = add_exprs(linearise([make_index(d, n) for d, n in enumerate(shape)], shape), make_constant(shift))
    quotient, remainder = divide_expr(place, by)
    for i in itertools.product(*map(range, shape)):
        assert (value(quotient, i), value(remainder, i)) == divmod(value(place, i), by)


@settings(deadline=None)
@given(sizes, st.data())
def test_reshape_keeps_the_value(shape, data):
    count = int(np.prod(shape))
    first = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    to = (first, count // first)
    found = delinearise(linearise([make_index(d, n) for d, n in enumerate(shape)], shape), to)
    for place, want in zip(itertools.product(*map(range, shape)), np.ndindex(*to), strict=True):
        assert tuple(value(e, place) for e in found) == want


def test_reshapes_fold_only_the_axes_that_change():
    """The row before, which a guard may leave out, is no multiple of the columns: it stays as it is."""
    node = jit(lambda x: x.reshape(2, 6, 3, 4)).trace(np.zeros((2, 6, 12), np.float32)).function.body.nodes[-1]
    before = add_exprs(S, make_constant(-1))
    (point,) = find_operand_points(node, AccessPoint((B, before, H, D)))
    assert point.is_clean and point.indices == (B, before, add_exprs(scale_expr(H, 4), D))


def test_a_merged_axis_is_one_block():
    found = find_block_layout([B, S, add_exprs(scale_expr(H, 4), D)], (1, 6, 3, 4))
    assert found is not None and found.shape == (1, 6, 12) and found.dims == (1, 2, 3)


def test_a_split_dim_is_a_block():
    high, low = divide_expr(make_index(0, 12), 4)
    found = find_block_layout([high, low], (8,))
    assert found is not None and found.shape == (2, 4) and found.order() == (0, 1)
    assert find_block_layout([high, low], (6,)) is None


def test_what_is_no_block():
    assert find_block_layout([scale_expr(D, 2)], (1, 1, 1, 4)) is None  # a step
    assert find_block_layout([D, D], (1, 1, 1, 4)) is None  # a diagonal
    assert find_block_layout([add_exprs(scale_expr(H, 4), D)], (1, 1, 3, 2)) is None  # rows in part
    assert find_block_layout([IndexExpr(0, ((OpaqueIndex("?", frozenset({0})), 1),))], (2,)) is None


def test_only_adjacent_digits_merge():
    """i // 4 % 3 * 4 + i % 4 is i % 12; with a gap between the digits, or other strides, nothing merges."""
    low, high, far = IndexDigit(0, 24, 1, 4), IndexDigit(0, 24, 4, 3), IndexDigit(0, 24, 8, 3)
    (merged,) = add_exprs(IndexExpr(0, ((low, 1),)), IndexExpr(0, ((high, 4),))).terms
    assert merged == (IndexDigit(0, 24, 1, 12), 1)
    for other, by in ((far, 4), (high, 3), (IndexDigit(1, 24, 4, 3), 4)):
        apart = add_exprs(IndexExpr(0, ((low, 1),)), IndexExpr(0, ((other, by),)))
        assert set(apart.terms) == {(low, 1), (other, by)}
        assert all(value(apart, (i, i)) == i % 4 + by * (i // other.divisor % 3) for i in range(24))
