"""Helpers of the host's scripts: 16-bit elements in 32-bit words, and time stamps."""

from __future__ import annotations

import numpy as np

from tessera.errors import ArgumentError


def input_array_to_u32(np_arr: np.ndarray, sentinel: int | None, fast_dim_sz: int) -> np.ndarray:
    """A flat array of 16- or 32-bit elements as the 32-bit words of a copy.

    16-bit elements stand in the lower halves. With a sentinel the upper half is the element's index in rows of
    `fast_dim_sz`; without (None) it is 0.

    >>> [hex(w) for w in input_array_to_u32(np.array([7, 8, 9], np.int16), 1, 2)]
    ['0x7', '0x10008', '0x9']
    """
    if np_arr.ndim != 1:
        raise ArgumentError("the array is not flat", expected="one dimension", received=str(np_arr.shape))
    if np_arr.dtype.itemsize == 4:
        return np_arr.view(np.uint32)
    words = _halves(np_arr).astype(np.uint32)
    if sentinel is None:
        return words
    return words | (np.arange(np_arr.size, dtype=np.uint32) % np.uint32(fast_dim_sz)) << np.uint32(16)


def _halves(array: np.ndarray) -> np.ndarray:
    if array.dtype.itemsize != 2:
        raise ArgumentError("elements are 16 or 32 bits wide", received=str(array.dtype))
    return array.view(np.uint16)


def memcpy_view(arr: np.ndarray, datatype: np.dtype) -> np.ndarray:
    """A view of the elements of `datatype`, 16 or 32 bits wide, in an array of 32-bit words; writes go through.

    >>> memcpy_view(np.array([0x10007, 8], np.uint32), np.dtype(np.int16)).tolist()
    [7, 8]
    """
    kind = np.dtype(datatype)
    if kind.itemsize == 4:
        return arr.view(kind)
    if kind.itemsize != 2:
        raise ArgumentError("elements are 16 or 32 bits wide", received=str(kind))
    return arr.view(kind).reshape(*arr.shape, 2)[..., 0]


def calculate_cycles(timestamp_buf: np.ndarray) -> np.int64:
    """Cycles between the two 48-bit time stamps, start and end, that three 32-bit words hold.

    >>> int(calculate_cycles(np.array([5, 25 << 16, 0], np.uint32)))
    20
    """
    halves = [int(half) for half in np.ascontiguousarray(timestamp_buf).reshape(-1).view(np.uint16)[:6]]
    start, end = (sum(half << 16 * i for i, half in enumerate(part)) for part in (halves[:3], halves[3:]))
    return np.int64(end - start)
