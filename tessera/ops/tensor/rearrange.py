"""Rearranging composites: flip, roll, repeat, split, triangles, one-hot, gathering along an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.shapes import broadcast, normalize_axes, normalize_axis
from tessera.core.size_guards import assume_divisible, suggest_divisor
from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, f32, int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.basic import broadcast_to, cast, full
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.elementwise import equal, greater_equal, less_equal, where
from tessera.ops.tensor.shape import (
    check_index,
    concatenate,
    count_elements,
    expand_dims,
    gather,
    iota,
    reshape,
    slice_,
    stack,
)
from tessera.ops.tensor.shape import pad as padded


@check_arguments
def narrow(x: Any, axis: int, start: Size, stop: Size, step: int = 1) -> Tensor:
    """The elements of `x` from `start` to before `stop` along one axis.

    >>> narrow([1, 2, 3, 4], 0, 1, 3)
    Tensor([2, 3], int64)
    """
    x = as_tensor(x)
    at = normalize_axis(axis, x.ndim) + x.ndim
    low: list[Size] = [0] * x.ndim
    high, by = list(x.shape), [1] * x.ndim
    low[at], high[at], by[at] = start, stop, step
    return slice_(x, start=tuple(low), stop=tuple(high), step=tuple(by))


@check_arguments
def pad(x: Any, width: Any, value: float = 0) -> Tensor:
    """`x` with `value` around it: `width` is a count for all sides, (before, after), or such a pair for each axis.

    >>> pad([1.0, 2.0], (1, 2))
    Tensor([0., 1., 2., 0., 0.], f32)

    Raises:
        ShapeError: `width` does not fit the axes, or a count is below 0.
    """
    x = as_tensor(x)
    try:
        counts = np.asarray(width)
    except ValueError:  # pairs of other lengths
        counts = np.array(None)
    if counts.dtype.kind not in "iu" or counts.ndim > 2 or counts.shape not in ((), (2,), (1, 2), (x.ndim, 2)):
        expected = f"a count, a pair of them, or {x.ndim} pairs"
        raise ShapeError(
            "the widths do not fit the axes", location=user_location(), expected=expected, received=repr(width)
        )
    low, high = np.broadcast_to(counts, (x.ndim, 2)).T.tolist()
    return padded(x, low=tuple(low), high=tuple(high), value=value) if x.ndim else x


@check_arguments
def flip(x: Any, axis: int | Sequence[int] | None = None) -> Tensor:
    """`x` with the elements along `axis` (all axes when None) in the opposite order.

    >>> flip([1, 2, 3])
    Tensor([3, 2, 1], int64)
    """
    x = as_tensor(x)
    for each in normalize_axes(axis, x.ndim):
        if x.shape[each] != 1:
            x = gather(x, x.shape[each] - 1 - iota(shape=(x.shape[each],)), axis=each)
    return x


@check_arguments
def roll(x: Any, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """`x` shifted circularly by `shift` elements along `axis`.

    Without `axis` the tensor is rolled as if it were flat.

    >>> roll([1, 2, 3, 4], 1)
    Tensor([4, 1, 2, 3], int64)
    """
    x = as_tensor(x)
    if axis is None:
        return reshape(roll(reshape(x, shape=(-1,)), shift, 0), shape=x.shape)
    axes = [axis] if isinstance(axis, int) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, int) else list(shift)
    if len(shifts) != len(axes):
        raise ArgumentError(
            "roll needs one shift for each axis", location=user_location(), received=f"{shifts} and {axes}"
        )
    for by, each in zip(shifts, axes, strict=True):
        x = _roll_axis(x, by, each)
    return x


def _roll_axis(x: Tensor, by: int, axis: int) -> Tensor:
    size = x.shape[normalize_axis(axis, x.ndim)]
    cut = (-by) % size if size else 0
    return concatenate([narrow(x, axis, cut, size), narrow(x, axis, 0, cut)], axis=axis) if cut else x


@check_arguments
def repeat(x: Any, repeats: int | Sequence[int], axis: int | None = None) -> Tensor:
    """Each element `repeats` times in a row, along `axis` or along the flattened tensor.

    `repeats` is a number, or one for each index of the axis.

    >>> repeat([1, 2], 2), repeat([1, 2], [0, 3])
    (Tensor([1, 1, 2, 2], int64), Tensor([2, 2, 2], int64))
    """
    x = as_tensor(x)
    if axis is None:
        return repeat(reshape(x, shape=(-1,)), repeats, 0)
    axis = normalize_axis(axis, x.ndim) % x.ndim
    size = x.shape[axis]
    counts = np.asarray(repeats)
    if counts.dtype.kind not in "iu" or counts.ndim > 1 or (counts < 0).any():
        raise ArgumentError("repeat takes counts ≥ 0", location=user_location(), received=repr(repeats))
    counts = counts.reshape(()) if counts.shape == (1,) else counts
    if not counts.ndim:
        lead, rest = x.shape[: axis + 1], x.shape[axis + 1 :]
        spread = broadcast_to(reshape(x, shape=(*lead, 1, *rest)), shape=(*lead, int(counts), *rest))
        return reshape(spread, shape=(*lead[:-1], size * int(counts), *rest))
    if counts.shape != (size,):
        raise ShapeError(
            f"{counts.shape[0]} repeats for axis {axis} of size {size}", location=user_location(),
            expected=f"a count for all, or {size} counts", received=repr(repeats),
        )  # fmt: skip
    return gather(x, Tensor(np.repeat(np.arange(size), counts)), axis=axis)


@check_arguments
def tiled(x: Any, repeats: int | Sequence[int]) -> Tensor:
    """`x` repeated `repeats[i]` times along axis i, as by NumPy's `tile`.

    >>> tiled([1, 2], (2, 2))
    Tensor([[1, 2, 1, 2],
            [1, 2, 1, 2]], int64)
    """
    x = as_tensor(x)
    counts = (repeats,) if isinstance(repeats, int) else tuple(repeats)
    rank = max(len(counts), x.ndim)
    counts = (1,) * (rank - len(counts)) + counts
    shape = (1,) * (rank - x.ndim) + tuple(x.shape)
    pairs = [n for one in shape for n in (1, one)]
    spread = [n for times, one in zip(counts, shape, strict=True) for n in (times, one)]
    out = broadcast_to(reshape(x, shape=tuple(pairs)), shape=tuple(spread))
    return reshape(out, shape=tuple(t * s for t, s in zip(counts, shape, strict=True)))


@check_arguments
def split(x: Any, sections: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
    """`x` split along `axis` into that many equal parts, or into parts of these sizes.

    >>> [part.tolist() for part in split([1, 2, 3, 4], 2)]
    [[1, 2], [3, 4]]

    Raises:
        ShapeError: the sizes of the parts do not add up to that of the axis.
    """
    x = as_tensor(x)
    size = x.shape[normalize_axis(axis, x.ndim)]
    if isinstance(sections, int):
        assume_divisible(size, sections)
    sizes = _section_bounds(size, sections)
    if sum(sizes) != size:
        equal = isinstance(sections, int)
        parts = f"{sections} equal parts" if isinstance(sections, int) else f"parts of sizes {list(sections)}"
        raise ShapeError(
            f"axis {axis} of size {size} cannot be split into {parts}", location=user_location(),
            expected=f"a multiple of {sections}" if equal else f"sizes that add up to {size}",
            suggestion=suggest_divisor(size, sections) if isinstance(sections, int) else None,
        )  # fmt: skip
    ends = np.cumsum([0, *sizes]).tolist()
    return tuple(narrow(x, axis, a, b) for a, b in zip(ends[:-1], ends[1:], strict=True))


def _section_bounds(size: Any, sections: int | Sequence[int]) -> list[int]:
    if isinstance(sections, int) and sections < 1:
        raise ArgumentError(f"{sections} parts", location=user_location(), expected="at least one")
    return [size // sections] * sections if isinstance(sections, int) else list(sections)


@check_arguments
def chunk(x: Any, chunks: int, axis: int = 0) -> tuple[Tensor, ...]:
    """`x` split along `axis` into at most `chunks` parts of one size; the last may be smaller.

    >>> [part.tolist() for part in chunk([1, 2, 3, 4, 5], 2)]
    [[1, 2, 3], [4, 5]]
    """
    x = as_tensor(x)
    size = int(x.shape[normalize_axis(axis, x.ndim)])
    if chunks < 1:
        raise ArgumentError(f"{chunks} chunks", location=user_location(), expected="at least one")
    each = max(1, -(-size // chunks))
    return split(x, [min(each, size - at) for at in range(0, size, each)] or [0], axis)


@composite
def diff(x: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """The differences of neighbours along `axis`, taken `n` times; `prepend` and `append` extend `x` first.

    >>> diff([1, 4, 9])
    Tensor([3, 5], int64)
    """
    x = as_tensor(x)
    before, after = ([] if part is None else [as_tensor(part)] for part in (prepend, append))
    x = concatenate([*before, x, *after], axis=axis) if before or after else x
    for _ in range(n):
        size = x.shape[normalize_axis(axis, x.ndim)]
        x = narrow(x, axis, 1, size) - narrow(x, axis, 0, size - 1)
    return x


@check_arguments
def broadcast_arrays(*tensors: Any) -> tuple[Tensor, ...]:
    """The tensors broadcast to their common shape."""
    listed = [as_tensor(t) for t in tensors]
    try:
        shape = broadcast(*(t.shape for t in listed))
    except ShapeError as error:
        raise error.at(user_location()) from None
    return tuple(broadcast_to(t, shape=shape) for t in listed)


@check_arguments
def meshgrid(*vectors: Any, indexing: str = "xy") -> tuple[Tensor, ...]:
    """For vectors of N, M, … elements, tensors of the points of their grid: [M, N, …] with "xy", [N, M, …] with "ij".

    >>> meshgrid([1, 2], [3, 4, 5])[1].shape
    (3, 2)
    """
    if indexing not in ("xy", "ij"):
        raise ArgumentError(f"unknown indexing {indexing!r}", location=user_location(), expected='"xy" or "ij"')
    rank = len(vectors)
    order = [1, 0, *range(2, rank)] if indexing == "xy" and rank > 1 else list(range(rank))
    return broadcast_arrays(*(_orient_vector(as_tensor(v), order.index(i), rank) for i, v in enumerate(vectors)))


def _orient_vector(vector: Tensor, axis: int, rank: int) -> Tensor:
    if vector.ndim > 1:
        raise ShapeError("meshgrid takes vectors", location=user_location(), received=str(vector.type))
    return reshape(vector, shape=tuple(-1 if i == axis else 1 for i in range(rank)))


@check_arguments
def unbind(x: Any, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices of `x` along `axis`, each without it."""
    x = as_tensor(x)
    at = normalize_axis(axis, x.ndim) + x.ndim
    shape = (*x.shape[:at], *x.shape[at + 1 :])
    return tuple(reshape(part, shape=shape) for part in split(x, [1] * int(x.shape[at]), axis))


def interleave_phases(phases: Mapping[tuple[int, ...], Tensor], first: int) -> Tensor:
    """The elements of tensors in turn along the axes from `first` on: those of phase (p, q) are at s·i + p, t·j + q."""
    while () not in phases:  # along the last axis first: the rows of phases are whole
        joined: dict[tuple[int, ...], list[Tensor]] = {}
        for phase, part in phases.items():
            joined.setdefault(phase[:-1], []).append(part)
        phases = {phase: _interleave(parts, first + len(phase)) for phase, parts in joined.items()}
    return phases[()]


def _interleave(parts: Sequence[Tensor], axis: int) -> Tensor:
    """The elements of some tensors along an axis in turn."""
    if len(parts) == 1:
        return parts[0]
    sizes = parts[0].shape
    return reshape(stack(parts, axis=axis + 1), shape=(*sizes[:axis], sizes[axis] * len(parts), *sizes[axis + 1 :]))


@check_arguments
def tril(x: Any, k: int = 0) -> Tensor:
    """`x` with zeros above diagonal `k` of its last two axes (0 is the main one, 1 the one above).

    >>> tril([[1, 2], [3, 4]])
    Tensor([[1, 0],
            [3, 4]], int64)
    """
    return _select_triangle(x, k, less_equal)


@check_arguments
def triu(x: Any, k: int = 0) -> Tensor:
    """`x` with zeros below diagonal `k` of its last two axes."""
    return _select_triangle(x, k, greater_equal)


def _select_triangle(x: Any, k: int, keeps: Any) -> Tensor:
    x = as_tensor(x)
    if x.ndim < 2:
        raise ShapeError("a triangle needs two axes", location=user_location(), received=str(x.type))
    shape = x.shape[-2:]
    kept = keeps(iota(shape=shape, axis=-1) - iota(shape=shape, axis=-2), k)
    return where(kept, x, full(shape=(), value=0, dtype=x.dtype))


@check_arguments
def one_hot(indices: Any, num_classes: int, dtype: DType = f32) -> Tensor:
    """1 at each index along a new last axis of size `num_classes`, else 0.

    An index outside the classes gives zeros only.

    >>> one_hot([0, 2], 3)
    Tensor([[1., 0., 0.],
            [0., 0., 1.]], f32)
    """
    at = expand_dims(as_tensor(indices), -1)
    return cast(equal(at, iota(shape=(num_classes,), dtype=at.dtype)), dtype=dtype)


@check_arguments
def take_along_axis(x: Any, indices: Any, axis: int = -1) -> Tensor:
    """For each element of `indices`, the element of `x` at that index along `axis` and the same indices elsewhere.

    Shapes: `indices` is like `x` but for `axis`. A negative index counts from the end; an index outside the axis raises
    OutOfBoundsError.

    >>> take_along_axis([[1, 2], [3, 4]], [[1], [0]])
    Tensor([[2],
            [3]], int64)
    """
    x, at = as_tensor(x), as_tensor(indices)
    axis = normalize_axis(axis, x.ndim)
    place = check_index(at, size=x.shape[axis], along=axis + x.ndim)
    linear: Any = full(shape=at.shape, value=0, dtype=int64)
    for each in range(-x.ndim, 0):
        step = count_elements(x.shape[x.ndim + each + 1 :])
        along = place if each == axis else iota(shape=at.shape, axis=each)
        linear = linear + cast(along, dtype=int64) * step
    return gather(reshape(x, shape=(-1,)), linear, axis=0)
