"""Reductions of many short rows: NumPy calls its kernel once for each row, which these spare."""

from __future__ import annotations

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
    order = sorted(range(x.ndim - 1), key=lambda a: -x.strides[a])  # memory may hold the leading axes in any
    level = x.transpose(*order, -1)
    if not level.flags.c_contiguous:
        return ufunc.reduce(x, axis=axis, keepdims=keepdims)
    found = ufunc.reduceat(level.reshape(-1), np.arange(0, x.size, x.shape[-1])).reshape(level.shape[:-1])
    back = found.transpose(*map(order.index, range(len(order))))
    return back[..., None] if keepdims else back


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
