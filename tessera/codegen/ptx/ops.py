"""The ops that this target's passes put into tile functions: layouts handed over, sums of products."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.op import STORAGE, Op
from tessera.ops.control import direct
from tessera.types import SHARED, DType, RefType, TensorType, bf16, bool_, f32, int32


def _op(
    infer: Callable[..., Any], pointwise: bool = False, effects: frozenset[str] = frozenset()
) -> Callable[[Callable[..., Any]], Op]:
    """An op of this target alone: it is not of the Tile level, and no other target sees it."""

    def define(ref: Callable[..., Any]) -> Op:
        parameters = inspect.signature(ref).parameters
        keyword = {k: p for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        operands = tuple(k for k in parameters if k not in keyword)
        name = f"ptx.{ref.__name__}"
        return Op(name, ref, infer, STORAGE, pointwise, direct, None, effects, operands, keyword)

    return define


@_op(lambda x, *, layout: x, pointwise=True)
def relayout(x, *, layout: str):
    """The same block, its elements held by other threads and registers, as `layout` says."""
    return x


def _sum_type(acc: TensorType, a: TensorType, b: TensorType) -> TensorType:
    return acc


@_op(_sum_type)
def multiply_add(acc, a, b):
    """`acc` plus the matrix product of `a` and `b`: their products are added to it one after the other."""
    return acc + np.matmul(np.asarray(a, acc.dtype), np.asarray(b, acc.dtype))


def _loop_type(acc: TensorType, a: RefType, b: RefType, *scalars: TensorType, **_: Any) -> TensorType:
    return acc


@_op(_loop_type)
def product_loop(
    acc, a, b, lower, upper, *starts, step: int, left: tuple, right: tuple, block: tuple, flipped: bool,
    turned: bool = False,
):  # fmt: skip
    """`acc` plus, for each index from `lower` to before `upper` by `step`, a block of `a` times one of `b`.

    `block` is (rows, columns, depth). `left` and `right` say for each axis of `a` and `b` which of `starts` the block
    begins at, or -1 for the index; what lies outside reads as 0. `flipped` says that `b` holds columns as its rows,
    `turned` that `a` holds rows as its columns.
    """
    rows, columns, depth = block
    first, second = (depth, rows) if turned else (rows, depth), (columns, depth) if flipped else (depth, columns)
    total = np.array(acc)
    for index in range(int(lower), int(upper), step):
        x = _block(a, [index if at < 0 else int(starts[at]) for at in left], first)
        y = _block(b, [index if at < 0 else int(starts[at]) for at in right], second)
        total = total + np.matmul(x.T if turned else x, y.T if flipped else y, dtype=total.dtype)
    return total


def _block(array: np.ndarray, starts: list[int], shape: tuple[int, int]) -> np.ndarray:
    """A block of the last two axes; 0 where it lies outside."""
    matrix = array[tuple(starts[:-2])]
    found = np.zeros(shape, matrix.dtype)
    spans = [(max(s, 0), min(s + n, size)) for s, n, size in zip(starts[-2:], shape, matrix.shape, strict=True)]
    if all(low < high for low, high in spans):
        inner = tuple(slice(low - s, high - s) for (low, high), s in zip(spans, starts[-2:], strict=True))
        found[inner] = matrix[tuple(slice(low, high) for low, high in spans)]
    return found


def _slots_type(*, shape: tuple[int, ...], dtype: DType, swizzled: bool = False) -> RefType:
    return RefType(tuple(shape), dtype, SHARED)


@_op(_slots_type, effects=frozenset(("memory",)))
def slots(*, shape: tuple, dtype: DType, swizzled: bool = False):
    """Shared memory for blocks of rows, a slot each. The program itself says by barriers when which is read.

    `swizzled` slots are read by ldmatrix alone: pieces of 16 bytes change places within rows.
    """


def _lying_type(ref: RefType, slot: TensorType, *, flipped: bool) -> TensorType:
    rows, columns = math.prod(ref.shape[1:-1]), ref.shape[-1]  # type: ignore[arg-type]
    return ref.block((columns, rows) if flipped else (rows, columns))  # type: ignore[arg-type]


@_op(_lying_type)
def lying(ref, slot, *, flipped: bool):
    """The rows in a slot, turned around where `flipped`: they stay where they lie, for products to read them there."""
    block = ref[int(slot)].reshape(-1, ref.shape[-1])
    return block.T if flipped else block


def _resident_type(ref: RefType, *starts: TensorType, shape: tuple[int, ...]) -> TensorType:
    return ref.block(shape)


@_op(_resident_type)
def resident(ref, *starts, shape: tuple):
    """A block of the last two axes that stays in memory for as long as a program multiplies by it."""
    return _block(ref, [int(s) for s in starts], shape)


@_op(lambda ref, *starts, shape, same: ref.block(shape))
def supplied(ref, *starts, shape: tuple, same: bool):
    """A block that a copy brought ahead of its program; one that is the `same` for all programs came once."""
    return ref[tuple(slice(int(s), int(s) + n) for s, n in zip(starts, shape, strict=True))]


@_op(lambda x: (), effects=frozenset(("release",)))
def released(x):
    """Nothing: from here on nobody reads a `resident`."""
    return ()


def _streamed_type(left: TensorType, ref: RefType, *rest: TensorType, block: tuple, **_: Any) -> TensorType:
    return left.with_shape((left.shape[0], block[1])).with_dtype(f32)


@_op(_streamed_type)
def streamed(left, ref, *rest, block: tuple, flipped: bool, summed: bool):
    """`left` times a block of `ref`, which begins at the last of `rest`; what is `summed` is added to the first of it.

    `left` is a `resident`, or `pairs`. `block` is (depth, columns); `flipped` says that `ref` holds columns as its
    rows. What lies outside reads as 0.
    """
    starts = [int(s) for s in rest[1 if summed else 0 :]]
    found = _block(ref, starts, block[::-1] if flipped else block)
    right = found.T if flipped else found
    total = np.matmul(np.asarray(left).view(ref.dtype), right, dtype=np.float32)
    return rest[0] + total if summed else total


def _pairs_type(x: TensorType) -> TensorType:
    return x.with_shape((x.shape[0], x.shape[1] // 2)).with_dtype(int32)


@_op(_pairs_type)
def pairs(x):
    """Elements of 16 bits by twos, as words: the first of two neighbours along a row in the lower half."""
    return np.ascontiguousarray(x).view(np.int32)


@_op(lambda x, y, z: x, pointwise=True)
def fused(x, y, z):
    """`x` times `y` plus `z`, rounded once."""
    return np.asarray(np.float64(x) * y + z, x.dtype)


@_op(lambda x: x.with_dtype(bf16), pointwise=True)
def upper(x):
    """The upper half of an f32's bits: it cut to 8 bits of precision, as bf16."""
    bits = np.ascontiguousarray(x).view(np.uint32) >> np.uint32(16)
    return bits.astype(np.uint16).view(bf16.numpy)


@_op(lambda x: x, pointwise=True)
def exp2_flushed(x):
    """Two to the power `x`, where subnormal numbers count as 0."""
    found = np.exp2(x)
    return np.where(found < np.finfo(np.float32).tiny, np.float32(0), found)


@_op(lambda limit, *, shape, steps: TensorType(shape, bool_))
def places_below(limit, *, shape: tuple, steps: tuple):
    """Where the places along the axes, each times its step, add up to less than `limit`."""
    return sum(n * i for n, i in zip(steps, np.indices(shape), strict=True)) < limit


@_op(lambda: (), effects=frozenset(("wait",)))
def awaited():
    """Nothing: what the next of the `streamed` products reads has come."""
    return ()


@_op(lambda x: (), effects=frozenset(("wait",)))
def settled(x):
    """Nothing: a `streamed` product is done."""
    return ()
