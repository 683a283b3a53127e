"""Reductions of many short rows: NumPy calls its kernel once for each row, which these spare."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

# Rows up to these many elements gain by it. Sums of longer ones are pairwise, which is more exact.
SHORT, UNPAIRED = 1024, 128


def extreme(ufunc: np.ufunc, x: np.ndarray, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    """`ufunc.reduce(x, axis)` for np.maximum or np.minimum.

    >>> extreme(np.maximum, np.float32([[1, 5], [7, 2]] * 8), (-1,), False)[:2]
    array([5., 7.], dtype=float32)
    """
    if not _short_rows(x, axis, SHORT) or x.size < 8 * x.shape[-1]:
        return ufunc.reduce(x, axis=axis, keepdims=keepdims)
    if x.flags.c_contiguous:
        found = ufunc.reduceat(x.reshape(-1), _starts(x.size, x.shape[-1])).reshape(x.shape[:-1])
        return found[..., None] if keepdims else found
    order = sorted(range(x.ndim - 1), key=lambda a: -x.strides[a])  # memory may hold the leading axes in any
    level = x.transpose(*order, -1)
    if not level.flags.c_contiguous:
        return ufunc.reduce(x, axis=axis, keepdims=keepdims)
    back = extreme(ufunc, level, axis, False).transpose(*map(order.index, range(len(order))))
    return back[..., None] if keepdims else back


@lru_cache(maxsize=64)
def _starts(size: int, length: int) -> np.ndarray:
    """Where rows begin."""
    return np.arange(0, size, length)


def total(x: np.ndarray, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    """The sum of floats along `axis`, in their own type; a row's is the same whatever rows are beside it.

    >>> total(np.float32([[1, 5], [7, 2]] * 8), (-1,), False)[:2]
    array([6., 9.], dtype=float32)
    """
    if not _short_rows(x, axis, UNPAIRED):
        return np.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype)
    found = np.einsum("...i->...", x)
    return found[..., None] if keepdims else found


def _short_rows(x: np.ndarray, axis: Any, longest: int) -> bool:
    """Whether the last axis alone is reduced, and its rows are short, and of floats side by side."""
    if axis not in ((-1,), -1) or not 0 < x.shape[-1] <= longest:
        return False
    return x.dtype in (np.float32, np.float64) and x.strides[-1] == x.itemsize
