"""Constants of a graph: arrays that are known when a program is compiled, and the ops that make them again."""

from __future__ import annotations

import numpy as np

from tessera.core.types import DType
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import broadcast_to, full
from tessera.ops.tensor.shape import concatenate, reshape

MOST_RUNS = 8  # of equal elements in an array that is held as constants


def find_runs(array: np.ndarray) -> list[tuple[int, int]]:
    """The runs of equal elements of a flat array: where each begins and ends; equal bit for bit."""
    bits = np.ascontiguousarray(array).view(np.uint8).reshape(array.size, -1)
    edges = np.flatnonzero((bits[1:] != bits[:-1]).any(axis=1)) + 1
    places = [0, *edges.tolist(), array.size]
    return list(zip(places, places[1:], strict=False))


def find_constant_axes(array: np.ndarray) -> tuple[int, ...]:
    """The axes along which an array does not change."""

    def constant(axis: int) -> bool:
        first = np.take(array, [0], axis)
        return np.broadcast_to(first, array.shape).tobytes() == np.ascontiguousarray(array).tobytes()

    return tuple(a for a in range(array.ndim) if array.shape[a] > 1 and constant(a))


def shorten(array: np.ndarray) -> np.ndarray:
    """An array with one element along each axis along which it does not change."""
    for axis in find_constant_axes(array):
        array = np.take(array, [0], axis)
    return array


def is_short(array: np.ndarray) -> bool:
    """Whether an array can be held as constants: it has few runs of equal elements."""
    return array.size == 0 or len(find_runs(shorten(array).reshape(-1))) <= MOST_RUNS


def make_constant(array: np.ndarray, dtype: DType) -> Tensor:
    """The ops that make an array; a splat is one op."""
    small = shorten(array)
    flat = small.reshape(-1)
    if array.size == 0:
        return full(shape=array.shape, value=0, dtype=dtype)
    parts = [_make_splat(flat[low], high - low, dtype) for low, high in find_runs(flat)]
    if len(parts) == 1:
        return full(shape=array.shape, value=flat[0].item(), dtype=dtype)
    return broadcast_to(reshape(concatenate(parts, axis=0), small.shape), array.shape)


def _make_splat(value: np.generic, count: int, dtype: DType) -> Tensor:
    return full(shape=(count,), value=value.item(), dtype=dtype)
