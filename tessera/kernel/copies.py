"""Buffers, asynchronous copies into them, and barriers."""

from __future__ import annotations

import math
from typing import Any

from tessera.errors import ArgumentError, DTypeError
from tessera.kernel.marks import takes_places
from tessera.kernel.place import Memory, View
from tessera.kernel.subscript import whole
from tessera.kernel.trace import current, emit
from tessera.kernel.transfer import locate
from tessera.ops import tile
from tessera.types import REGISTER, SHARED, DType, as_dtype, f32


def alloc_shared(
    shape: Any, dtype: Any = f32, swizzle: str | None = None, alignment: int = 16, padding: int = 0
) -> View:
    """Memory that the tiles of a group share, without initial value.

    It begins at a multiple of `alignment` bytes. Two ways to lay it out avoid bank conflicts, and change no
    value: `swizzle="xor"` permutes the places within rows, and `padding` leaves so many elements unused after each row.

    Raises:
        ArgumentError: a shape not known while compiling, an alignment that is no power of two, or an unknown swizzle.
    """
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ArgumentError("an alignment is a power of two", expected="16", received=repr(alignment))
    if swizzle not in (None, "", "none", "xor"):
        raise ArgumentError(f'"{swizzle}" is not a swizzle', expected='"xor" or None')
    if not isinstance(padding, int) or padding < 0:
        raise ArgumentError("padding is a number of elements", expected="0 or more", received=repr(padding))
    return _alloc(shape, dtype, SHARED, alignment, "xor" if swizzle == "xor" else "", padding)


def alloc_register(shape: Any = (), dtype: Any = f32) -> View:
    """Memory of one tile's own, without initial value: `alloc_register((8, 8), ts.f32)`, or one element: `(ts.f32)`."""
    if isinstance(shape, DType):
        shape, dtype = (), shape
    return _alloc(shape, dtype, REGISTER)


def _alloc(shape: Any, dtype: Any, space: str, alignment: int = 16, swizzle: str = "", padding: int = 0) -> View:
    sizes = (shape,) if not isinstance(shape, (tuple, list)) else tuple(shape)
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ArgumentError(
            "the shape of a buffer is not known while compiling", expected="positive ints", received=str(sizes),
            suggestion="size it by a constant, such as the block size",
        )  # fmt: skip
    current(f"alloc_{space}")
    attrs = {"shape": sizes, "dtype": as_dtype(dtype), "space": space, "alignment": alignment, "swizzle": swizzle}
    if padding:
        attrs["padding"] = padding
    return whole(Memory(emit(tile.alloc, [], **attrs), f"the {space} buffer"))


@takes_places
def cp_async(dst: Any, src: Any, edge: str = "error", barrier: Any = None) -> None:
    """Begin to copy the block at `src` to `dst`; a later cp_wait_group says that it has arrived.

    With `edge="clip"` what lies outside the source arrives as 0. With a `barrier` (`tile.mbarrier`) the bytes
    of the block count there when it has arrived: `barrier.expect(bytes)` before, `barrier.wait(parity)` after.
    """
    to, source = locate(dst, (), None), locate(src, (), None)
    if to.shape != source.shape and isinstance(source, View):
        source = locate(src, (), to.shape)
    if to.dtype != source.dtype:
        raise DTypeError(
            f"cannot copy {source.dtype} into {to.memory.name}, which holds {to.dtype}",
            expected=str(to.type), received=str(source.type), suggestion="load, cast and store instead",
        )  # fmt: skip
    if isinstance(to, View) and isinstance(source, View) and _aligned(to, source):
        _begin(to, source, edge)
    else:
        to.store(source.load(edge=edge))  # no target copies such a shape by itself: at once, then
    if barrier is not None:
        barrier.copied(math.prod(to.shape) * to.dtype.bits // 8)
        current().uncommitted = False


def _aligned(dst: View, src: View) -> bool:
    """Whether the blocks have the same axes, but for leading ones of size 1."""
    one, other = sorted((dst.full_sizes, src.full_sizes), key=len)
    extra = len(other) - len(one)
    return other[extra:] == one and all(n == 1 for n in other[:extra])


def _begin(dst: View, src: View, edge: str) -> None:
    for view in (dst, src) if edge == "error" else (dst,):
        view.check()
    shape = max((dst.full_sizes, src.full_sizes), key=len)
    emit(tile.async_copy, [dst.memory.ref(), src.memory.ref(), *dst.origin(), *src.origin()], shape=shape, edge=edge)
    current().uncommitted = True


@takes_places
def async_copy(src: Any, dst: Any, size: Any = None, stage: int = 0) -> None:
    """Begin to copy from `src` to `dst`, the first `size` elements of each axis if given; `stage` is a hint."""
    cp_async(locate(dst, (), size), locate(src, (), size))


def cp_commit_group() -> None:
    """Make a group of the copies begun since the last commit."""
    emit(tile.async_commit, [])
    current().uncommitted = False


def cp_wait_group(pending: int = 0) -> None:
    """Wait until at most `pending` committed groups are under way; copies not committed are so first."""
    if current("tile.cp_wait_group").uncommitted:
        cp_commit_group()
    emit(tile.async_wait, [], pending=pending)


def wait_async(stage: int = 0) -> None:
    """Wait until at most `stage` groups of copies are under way."""
    cp_wait_group(stage)


def barrier() -> None:
    """Wait for every tile of the group; what they wrote before is then seen by all."""
    current("tile.barrier")
    emit(tile.barrier, [])


def grid_barrier() -> None:
    """Wait for every tile of every group of the launch; what they wrote before is then seen by all.

    All programs reach it, or none: not under a condition that differs between them. They must all be under way at
    once, so that a target refuses grids larger than it can hold (in the interpreter there is no such limit):
    `for i in tile.range(tile.linear_id(), n, total)` lets a few programs do the work of many.
    """
    current("tile.grid_barrier")
    emit(tile.grid_barrier, [])
