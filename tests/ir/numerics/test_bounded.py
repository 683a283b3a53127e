"""Interval arrays: structural NumPy functions move the radius; control operands must be exact."""

import numpy as np
import pytest

from tessera.core.errors import ExecutionError
from tessera.core.types import bf16
from tessera.ir.numerics.interval_arithmetic import (
    IntervalArray,
    absolute_distance,
    interval_ends,
    require_exact,
    select_interval,
    to_interval,
)

X = IntervalArray(np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) / 10)

MOVES = {
    "reshape": lambda a: np.reshape(a, (3, 2)),
    "transpose": np.transpose,
    "broadcast": lambda a: np.broadcast_to(a, (4, 2, 3)),
    "stack": lambda a: np.stack([a, a], axis=1),
    "concatenate": lambda a: np.concatenate([a, a], axis=-1),
    "take": lambda a: np.take(a, [2, 0], axis=1),
    "take_along_axis": lambda a: np.take_along_axis(a, np.array([[1], [0]]), axis=1),
    "expand_dims": lambda a: np.expand_dims(a, 1),
    "pad": lambda a: np.pad(a, 1),
    "copy": np.copy,
    "swapaxes": lambda a: np.swapaxes(a, 0, 1),
    "moveaxis": lambda a: np.moveaxis(a, 0, 1),
    "squeeze": lambda a: np.squeeze(a[:1]),
    "row": lambda a: a[1],
    "slices": lambda a: a[::-1, 1:],
    "mask": lambda a: a[np.array([True, False])],
    "method": lambda a: a.reshape(6, 1).transpose(1, 0).copy(),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_structural_functions_move_both(move):
    out = move(X)
    assert np.array_equal(out.value, move(X.value)) and np.array_equal(out.radius, move(X.radius))
    assert out.shape == np.shape(out) == move(X.value).shape and out.ndim == np.ndim(out) and out.size == np.size(out)


def test_plain_arrays_join_as_exact():
    out = np.concatenate([X, np.ones((1, 3))])
    assert np.array_equal(out.radius[2], np.zeros(3)) and np.array_equal(out.value[2], np.ones(3))


def test_padding_with_a_constant_is_exact():
    out = np.pad(X, 1, constant_values=9.0)
    assert out.value[0, 0] == 9 and out.radius[0, 0] == 0


def test_where_with_an_exact_condition():
    out = np.where(X.value > 2, X, -1.0)
    assert np.array_equal(out.value, np.where(X.value > 2, X.value, -1))
    assert np.array_equal(out.radius, np.where(X.value > 2, X.radius, 0))


def test_choose_covers_both_branches_where_uncertain():
    condition = IntervalArray(np.array([True, True]), np.array([0.0, 1.0]))
    out = select_interval(
        condition, IntervalArray(np.ones(2), np.full(2, 0.1)), IntervalArray(np.full(2, 5.0), np.full(2, 0.2))
    )
    assert out.radius.tolist() == [0.1, 4.2]


def test_setitem_writes_both():
    x = X.copy()
    x[0] = IntervalArray(np.full(3, 7.0), np.full(3, 0.7))
    x[1, 0] = 2.0
    assert x.value[0, 0] == 7 and x.radius[0, 2] == 0.7 and x.radius[1, 0] == 0 and X.value[0, 0] == 0


def test_arithmetic_by_numpy_is_refused():
    for act in (lambda: np.add(X, 1), lambda: np.sum(X)):
        with pytest.raises(TypeError):
            act()


def test_certain():
    assert require_exact(IntervalArray(np.array(3))) == 3 and require_exact(np.array(3)) == 3
    with pytest.raises(ExecutionError, match="a decision rests on a value that rounding may change"):
        require_exact(IntervalArray(np.array(True), np.array(1.0)))


def test_floats_are_held_wide_and_integers_as_they_are():
    assert to_interval(np.ones(2, bf16.numpy)).dtype == np.float64
    assert to_interval(np.ones(2, np.int8)).dtype == np.int8 and to_interval(np.True_).dtype == bool


def test_distance_of_special_values():
    a, b = np.array([np.inf, np.inf, np.nan, np.nan, 1.0]), np.array([np.inf, -np.inf, np.nan, 1.0, 3.0])
    assert absolute_distance(a, b).tolist() == [0, np.inf, 0, np.inf, 2]


def test_ends_reach_outward_even_where_the_sum_rounds():
    low, high = interval_ends(IntervalArray(np.array([1.0, 2.0]), np.array([1e-17, 0.0])))
    assert low[0] < 1 < high[0] and low[1] == high[1] == 2
