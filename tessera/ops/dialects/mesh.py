"""Mesh dialect: programs on a mesh of processing elements, one per element with its own memory; collectives, shifts
and halos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.core.types import REGISTER, RefType, TensorType
from tessera.ir.rules import STORAGE, op
from tessera.ops.dialects.control_flow import refuse_direct_call

# The axis number of data that every program holds whole.
UNSPLIT = -1
REDUCTION_KINDS = ("sum", "max", "min")


def _check_axis(axis: int) -> None:
    if axis not in (0, 1):
        raise ArgumentError("a mesh has two axes", expected="0 (rows) or 1 (columns)", received=str(axis))


def _check_split(ref: RefType, split: tuple[int, ...], shape: tuple) -> None:
    cut = [s for s in split if s != UNSPLIT]
    if len(split) != ref.rank or len(shape) != ref.rank or len(set(cut)) != len(cut):
        raise ShapeError("the pieces do not fit the tensor", received=f"{ref} split {split} into {shape}")


def _infer_read(ref: RefType, *, split: tuple[int, ...], shape: tuple[int, ...]) -> TensorType:
    _check_split(ref, split, shape)
    return ref.block(shape)


@op(infer=_infer_read, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", effects=("read",), name="read")
def read(ref, *, split: tuple, shape: tuple):
    """Read this program's piece, of `shape`, of a tensor in host memory."""


def _infer_write(ref: RefType, value: TensorType, *, split: tuple[int, ...]) -> None:
    _check_split(ref, split, value.shape)
    if value.dtype != ref.dtype:
        raise DTypeError(f"cannot write {value.dtype} into {ref.dtype}", received=str(value))


@op(infer=_infer_write, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", effects=("write",), name="write")
def write(ref, value, *, split: tuple):
    """Write this program's piece of a tensor to host memory; elements past its end are dropped."""


# Windows of memories that a kernel's programs access: element number n (row-major, then by rounds) holds the tile n of
# a grid of tiles, and its window starts at an affine function of the tile's coordinates.


def locate_window(number: Any, first: Sequence[int], steps: Sequence[Sequence[int]], tiles: Sequence[int]) -> list[Any]:
    """The start of a tile's window along each axis; `number` is an integer or an array of them.

    >>> locate_window(3, (0, 5), ((8, 0), (0, 4)), (2, 2))
    [8, 9]
    """
    spans = [math.prod(tiles[axis + 1 :]) for axis in range(len(tiles))]
    # The first coordinate exceeds its tiles for elements without a tile: their windows lie outside the memory.
    places = [number // n if axis == 0 else number // n % tiles[axis] for axis, n in enumerate(spans)]
    return [
        start + sum(s * p for s, p in zip(step, places, strict=True)) for start, step in zip(first, steps, strict=True)
    ]


def _check_window(ref: RefType, shape: tuple, first: tuple, steps: tuple, tiles: tuple) -> None:
    ranks = {len(shape), len(first), len(steps), ref.rank}
    if len(ranks) != 1 or any(len(s) != len(tiles) for s in steps):
        raise ShapeError("the window does not fit the memory", received=f"{ref} from {first} by {steps}")


def _infer_window(ref: RefType, *, shape: tuple, first: tuple, steps: tuple, tiles: tuple) -> RefType:
    _check_window(ref, shape, first, steps, tiles)
    return RefType(tuple(shape), ref.dtype, REGISTER, policy=ref.policy)


@op(infer=_infer_window, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", effects=("read", "memory"))
def window(ref, *, shape: tuple, first: tuple, steps: tuple, tiles: tuple):
    """This program's own memory of `shape` with its window of a tensor in host memory; zeros outside the tensor.

    The window of tile (t0, t1, …) starts along each axis at `first` plus the axis's `steps` times the coordinates.
    """


def _infer_copy_back(dst: RefType, src: RefType, *, first: tuple, steps: tuple, tiles: tuple) -> None:
    _check_window(dst, tuple(src.shape), first, steps, tiles)
    if src.dtype != dst.dtype:
        raise DTypeError(f"cannot copy {src.dtype} into {dst.dtype}", received=str(src))


@op(infer=_infer_copy_back, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", effects=("write",))
def copy_back(dst, src, *, first: tuple, steps: tuple, tiles: tuple):
    """Copy this program's memory to its window of a tensor in host memory; elements outside the tensor are dropped."""


def _infer_all_reduce(x: TensorType, *, axis: int, kind: str) -> TensorType:
    _check_axis(axis)
    if kind not in REDUCTION_KINDS:
        raise ArgumentError(f'"{kind}" is not a reduction', expected=", ".join(REDUCTION_KINDS))
    return x


@op(infer=_infer_all_reduce, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh")
def all_reduce(x, *, axis: int, kind: str = "sum"):
    """The elementwise sum, max or min of `x` over the programs along a mesh axis, for each of them."""


def _infer_broadcast(x: TensorType, number: TensorType, *, axis: int, each: int) -> TensorType:
    _check_axis(axis)
    if number.rank or not number.dtype.is_integer:
        raise DTypeError("the number of a broadcast is an integer scalar", expected="int64", received=str(number))
    if each < 1:
        raise ArgumentError("a program broadcasts at least once in a round", expected="each > 0", received=str(each))
    return x


@op(infer=_infer_broadcast, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="broadcast")
def broadcast(x, number, *, axis: int, each: int = 1):
    """The value `x` of the active program of a mesh axis, sent to every program along it.

    The programs send in the order of their positions, each `each` times in a row. `number` counts the broadcasts from
    0 and is the same for all programs. A program takes part in all broadcasts of a round before it communicates
    otherwise along the axis.
    """


@op(infer=_infer_broadcast, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="begin_broadcast")
def begin_broadcast(x, number, *, axis: int, each: int = 1):
    """Start a `broadcast`; only `arrived` may use the result, and it waits for the data.

    Until then `x` must not change and no other broadcast along the axis may start.
    """


def _infer_arrived(pending: TensorType) -> TensorType:
    return pending


@op(infer=_infer_arrived, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="arrived")
def arrived(pending):
    """Wait for a broadcast or rotation that was started, and give the data that it received."""


def _infer_shift(x: TensorType, *, axis: int, offset: int) -> TensorType:
    _check_axis(axis)
    if offset not in (-1, 1):
        raise ArgumentError("a shift goes to the next program", expected="-1 or 1", received=str(offset))
    return x


@op(infer=_infer_shift, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="shift")
def shift(x, *, axis: int, offset: int):
    """The value `x` of the program `offset` positions before this one along a mesh axis; zeros at the edge."""


@op(infer=_infer_shift, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="rotate")
def rotate(x, *, axis: int, offset: int):
    """A circular `shift`: at one edge the data come from the program at the other edge."""


@op(infer=_infer_shift, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="begin_rotate")
def begin_rotate(x, *, axis: int, offset: int):
    """Start a `rotate`; only `arrived` may use the result, and it waits for the data.

    Until then `x` must not change and no other rotation along the axis may start.
    """


def _infer_panel(x: TensorType, number: TensorType, *, axis: int, count: int) -> TensorType:
    if not -x.rank <= axis < 0 or int(x.shape[axis]) % count:
        raise ShapeError(f"axis {axis} cannot be cut into {count} equal panels", received=str(x))
    sizes: list[Any] = list(x.shape)
    sizes[axis] = int(x.shape[axis]) // count
    return x.with_shape(tuple(sizes))


@op(infer=_infer_panel, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="panel")
def panel(x, number, *, axis: int, count: int):
    """The `number`-th of `count` equal panels of `x` along a (negative) axis."""


def _infer_halo(x: TensorType, edge: TensorType, *, axis: int, offset: int) -> TensorType:
    slab: list[Any] = list(x.shape)
    slab[axis] = 1
    if tuple(edge.shape) != tuple(slab) or edge.dtype != x.dtype or offset not in (-1, 1):
        raise ShapeError("the edge does not fit", expected=str(x.with_shape(tuple(slab))), received=str(edge))
    return x


@op(infer=_infer_halo, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="halo")
def halo(x, edge, *, axis: int, offset: int):
    """`x` shifted by one element up (1) or down (-1) a (negative) axis; `edge` fills the free slice."""


def _infer_all_gather(x: TensorType, *, axis: int, along: int, size: int) -> TensorType:
    _check_axis(along)
    if not -x.rank <= axis < 0 or size < 1:
        raise ShapeError(f"axis {axis} of {size} elements cannot be put together", received=str(x))
    return _resize_axis(x, axis, size)


def _resize_axis(x: TensorType, axis: int, size: int) -> TensorType:
    sizes: list[Any] = list(x.shape)
    sizes[axis] = size
    return x.with_shape(tuple(sizes))


@op(infer=_infer_all_gather, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="all_gather")
def all_gather(x, *, axis: int, along: int, size: int):
    """The values `x` of all programs along a mesh axis, concatenated on a (negative) axis and cut to `size`."""


def _infer_section(
    x: TensorType, *, start: tuple[int, ...], stop: tuple[int, ...], step: tuple[int, ...]
) -> TensorType:
    ranges = [range(a, b, c) for a, b, c in zip(start, stop, step, strict=True)]
    sizes = [int(n) for n in x.shape]
    if len(ranges) != x.rank or any(r and (r[0] < 0 or r[-1] >= n) for r, n in zip(ranges, sizes, strict=False)):
        raise ShapeError(f"the section from {start} to {stop} does not lie in the block", received=str(x))
    return x.with_shape(tuple(map(len, ranges)))


@op(infer=_infer_section, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="section")
def section(x, *, start: tuple, stop: tuple, step: tuple):
    """The elements of a block from `start` to before `stop` by `step` along each axis."""


def _match_except_axis(axis: int, x: TensorType, y: TensorType) -> bool:
    """Whether two blocks differ at most in the length of one axis."""
    return x.dtype == y.dtype and tuple(_resize_axis(x, axis, 0).shape) == tuple(_resize_axis(y, axis, 0).shape)


def _infer_join(*blocks: TensorType, axis: int) -> TensorType:
    first = blocks[0]
    if not all(_match_except_axis(axis, b, first) for b in blocks):
        raise ShapeError(f"blocks cannot be joined along axis {axis}", received=" and ".join(map(str, blocks)))
    return _resize_axis(first, axis, sum(int(b.shape[axis]) for b in blocks))


@op(infer=_infer_join, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="join")
def join(*blocks, axis: int):
    """Blocks one after the other along a (negative) axis."""


def _infer_pick(x: TensorType, indices: TensorType, *, axis: int) -> TensorType:
    at = axis + x.rank
    if not indices.dtype.is_integer or at < 0:
        raise DTypeError("indices are integers", expected="an integer block", received=str(indices))
    return x.with_shape((*x.shape[:at], *indices.shape, *x.shape[at + 1 :]))


@op(infer=_infer_pick, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="pick")
def pick(x, indices, *, axis: int):
    """The slices of a block at `indices` along a (negative) axis; the axes of the indices replace that axis."""


def _infer_put(x: TensorType, slab: TensorType, number: TensorType, *, axis: int) -> TensorType:
    if number.rank or not _match_except_axis(axis, slab, x) or int(slab.shape[axis]) != 1:
        raise ShapeError("the slab does not fit the block", expected=str(_resize_axis(x, axis, 1)), received=str(slab))
    return x


@op(infer=_infer_put, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="put")
def put(x, slab, number, *, axis: int):
    """A block with its `number`-th slab along a (negative) axis replaced; `number` is the same for all programs."""


def _infer_multiply_add(total: TensorType, a: TensorType, b: TensorType) -> TensorType:
    if tuple(total.shape) != (*a.shape[:-1], b.shape[-1]) or a.shape[-1] != b.shape[-2]:
        raise ShapeError("the factors do not fit the total", received=f"{total}, {a} and {b}")
    return total


@op(infer=_infer_multiply_add, coerce=refuse_direct_call, numerics=STORAGE, dialect="mesh", name="multiply_add")
def multiply_add(total, a, b):
    """`total` and the products of matrices `a` and `b` (over leading axes), summed in the type of `total`."""
