"""The ops that this target's passes put into tile functions: layouts handed over, sums of products."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.op import STORAGE, Op
from tessera.ops.control import direct
from tessera.types import RefType, TensorType


def _op(infer: Callable[..., Any], pointwise: bool = False) -> Callable[[Callable[..., Any]], Op]:
    """An op of this target alone: it is not of the Tile level, and no other target sees it."""

    def define(ref: Callable[..., Any]) -> Op:
        parameters = inspect.signature(ref).parameters
        keyword = {k: p for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        operands = tuple(k for k in parameters if k not in keyword)
        name = f"ptx.{ref.__name__}"
        return Op(name, ref, infer, STORAGE, pointwise, direct, None, frozenset(), operands, keyword)

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
def product_loop(acc, a, b, lower, upper, *starts, step: int, left: tuple, right: tuple, block: tuple, flipped: bool):
    """`acc` plus, for each index from `lower` to before `upper` by `step`, a block of `a` times one of `b`.

    `block` is (rows, columns, depth). `left` and `right` say for each axis of `a` and `b` which of `starts` the block
    begins at, or -1 for the index; what lies outside reads as 0. `flipped` says that `b` holds columns as its rows.
    """
    rows, columns, depth = block
    second = (columns, depth) if flipped else (depth, columns)
    total = np.array(acc)
    for index in range(int(lower), int(upper), step):
        x = _block(a, [index if at < 0 else int(starts[at]) for at in left], (rows, depth))
        y = _block(b, [index if at < 0 else int(starts[at]) for at in right], second)
        total = total + np.matmul(x, y.T if flipped else y, dtype=total.dtype)
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
