"""Interval arithmetic in midpoint-radius form (Rump 1999): arrays with a rigorous bound on how far any legal
evaluation may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ExecutionError
from tessera.core.types import as_dtype, f64
from tessera.ir.numerics.conversion import convert


class IntervalArray:
    """Reference values and, for each, a radius ≥ 0 within which every legal evaluation lies.

    Floats are held as f64, integers and bools as they are. A radius of inf means that nothing is
    known; on a bool, 1 means that it may be either. NumPy's structural functions (reshape,
    concatenate, take, where, ...) and subscripts work on both arrays at once; arithmetic does not,
    since a radius follows from an op's error rule alone.

    >>> np.concatenate([IntervalArray(np.ones(1), np.full(1, 0.5)), np.zeros(1)])
    IntervalArray([1., 0.], radius=[0.5, 0. ])
    """

    __slots__ = ("radius", "value")
    __array_ufunc__ = None  # np.add(bounded, x) would drop the radius

    def __init__(self, value: Any, radius: Any = None) -> None:
        array = np.asarray(value)
        # Every float format lies inside f64; integers and bools stay.
        wide = array.dtype.isbuiltin == 1 and array.dtype != np.float32 and array.dtype != np.float16
        self.value = array if wide or not as_dtype(array.dtype).is_float else convert(array, f64)
        self.radius = np.zeros(array.shape) if radius is None else np.asarray(radius)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.value.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.value.size

    @property
    def dtype(self) -> np.dtype:
        """The element type of the reference values."""
        return self.value.dtype

    @property
    def exact(self) -> bool:
        """Whether every legal evaluation gives these very values."""
        return not self.radius.any()

    def __getitem__(self, index: Any) -> IntervalArray:
        place = require_exact(index)
        return IntervalArray(self.value[place], np.asarray(self.radius[place]))

    def __setitem__(self, index: Any, new: Any) -> None:
        place, other = require_exact(index), to_interval(new)
        self.value[place], self.radius[place] = other.value, other.radius

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        values, radii = (np.array2string(a, separator=", ") for a in (self.value, self.radius))
        return f"IntervalArray({values}, radius={radii})"

    def reshape(self, *shape: Any) -> IntervalArray:
        """The same elements with another shape."""
        return IntervalArray(self.value.reshape(*shape), self.radius.reshape(*shape))

    def transpose(self, *axes: Any) -> IntervalArray:
        """The same elements with the axes in another order."""
        return IntervalArray(self.value.transpose(*axes), self.radius.transpose(*axes))

    def copy(self) -> IntervalArray:
        """Elements that can be written without changing these."""
        return IntervalArray(self.value.copy(), np.array(self.radius))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function in (np.shape, np.ndim, np.size):
            return function(self.value, *args[1:], **kwargs)
        if function is np.where:
            return select_interval(*args)
        if function not in STRUCTURAL_FUNCTIONS:
            return NotImplemented
        return _apply_structural(function, STRUCTURAL_FUNCTIONS[function], args, kwargs)


# NumPy functions that only move elements, with their array arguments.
STRUCTURAL_FUNCTIONS: dict[Callable[..., Any], tuple[int, ...]] = {
    np.concatenate: (0,),
    np.stack: (0,),
    np.put_along_axis: (0, 2),
    np.copyto: (0, 1),
    np.broadcast_arrays: tuple(range(8)),
    **dict.fromkeys(
        (
            np.reshape, np.ravel, np.transpose, np.swapaxes, np.moveaxis, np.broadcast_to, np.expand_dims, np.squeeze,
            np.pad, np.take, np.take_along_axis, np.copy, np.repeat, np.tile, np.flip, np.roll, np.split, np.compress,
            np.zeros_like, np.empty_like, np.atleast_1d,
        ),
        (0,),
    ),
}  # fmt: skip


def _apply_structural(
    function: Callable[..., Any], places: tuple[int, ...], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    values = function(*(_take_values(a) if i in places else require_exact(a) for i, a in enumerate(args)), **kwargs)
    kept = {k: v for k, v in kwargs.items() if k not in ("constant_values", "dtype")}  # padding has radius 0
    radii = function(*(_take_radii(a) if i in places else require_exact(a) for i, a in enumerate(args)), **kept)
    if isinstance(values, (list, tuple)):
        return type(values)(IntervalArray(v, r) for v, r in zip(values, radii, strict=True))
    return None if values is None else IntervalArray(values, radii)


def _take_values(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)(_take_values(x) for x in item)
    return item.value if isinstance(item, IntervalArray) else item


def _take_radii(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)(_take_radii(x) for x in item)
    return item.radius if isinstance(item, IntervalArray) else np.zeros(np.shape(item))


def to_interval(x: Any) -> IntervalArray:
    """An exact array as an IntervalArray."""
    return x if isinstance(x, IntervalArray) else IntervalArray(x)


def require_exact(x: Any) -> Any:
    """Control operands (an index, a condition, a trip count) as plain arrays, which must be exact.

    Raises:
        ExecutionError: legal evaluations may differ in it.
    """
    if isinstance(x, (list, tuple)):
        return type(x)(require_exact(i) for i in x)
    if isinstance(x, IntervalArray) and not x.exact:
        raise ExecutionError(
            "a decision rests on a value that rounding may change",
            received=f"{int(np.count_nonzero(x.radius))} of {x.size} elements are not certain",
            suggestion="give inputs on which no comparison is this close",
        )
    return x.value if isinstance(x, IntervalArray) else x


def make_interval(value: Any, radius: Any) -> IntervalArray:
    """An IntervalArray of a computed value and radius, with infinities and NaNs made explicit.

    What cannot be computed is not known; an infinity or NaN with a finite radius is itself.
    """
    value = np.asarray(value)
    radius = np.where(np.isnan(radius), np.inf, radius)
    if value.dtype.kind == "f":
        radius = np.where(np.isfinite(value) | np.isinf(radius), radius, 0.0)
    elif value.dtype.kind == "b":
        radius = np.minimum(radius, 1.0)
    return IntervalArray(value, radius if radius.shape == value.shape else np.broadcast_to(radius, value.shape).copy())


def absolute_distance(x: Any, y: Any) -> np.ndarray:
    """|x − y|, where equal infinities and two NaNs are 0 apart, and unequal ones inf."""
    with np.errstate(all="ignore"):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        apart = np.abs(x - y)
        if np.isfinite(apart).all():
            return apart
        apart = np.where(np.isnan(apart), np.inf, apart)
        return np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, apart)


_OUTWARD_STEP, _TINY = 2.0**-51, 2.0**-1074


def interval_ends(x: IntervalArray) -> tuple[Any, ...]:
    """The least and the greatest value a legal evaluation may have; one array where nothing is uncertain."""
    if x.exact:
        return (x.value,)
    if x.value.dtype.kind == "b":
        return (x.value & (x.radius == 0), x.value | (x.radius > 0))
    value, unknown = x.value.astype(np.float64), np.isinf(x.radius)
    with np.errstate(all="ignore"):
        low, high = value - x.radius, value + x.radius
        # The sums round by half an ulp: a step outward of two ulps or more makes up for it and for its own rounding.
        low, high = low - _OUTWARD_STEP * np.abs(low) - _TINY, high + _OUTWARD_STEP * np.abs(high) + _TINY
    sure = x.radius == 0
    low = np.where(sure, value, np.where(unknown, -np.inf, low))
    return low, np.where(sure, value, np.where(unknown, np.inf, high))


def select_interval(condition: Any, x: Any, y: Any) -> IntervalArray:
    """`np.where` on interval operands: where the condition may be either, the radius covers both."""
    c, x, y = to_interval(condition), to_interval(x), to_interval(y)
    value = np.where(c.value, x.value, y.value)
    radius = np.where(c.value, x.radius, y.radius)
    if c.exact:
        return IntervalArray(value, radius)
    other = np.where(c.value, y.radius, x.radius)
    either = np.maximum(radius, absolute_distance(x.value, y.value) + other)
    return make_interval(value, np.where(c.radius > 0, either, radius))
