"""Scatters in each mode: equal and negative indices, no indices, several axes of indices, special values, lanes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import edge_values
from tessera.frontend.jit.tracing import Jit

MODES = ("set", "add", "multiply", "min", "max")
# The indices: their values, and the size of the axis.
INDICES: dict[str, tuple[Any, int]] = {
    "once": ([2, 0, 4], 5),
    "equal": ([1, 3, 1, 1], 5),
    "negative": ([-1, 0, -5], 5),
    "none": (np.zeros(0, np.int64), 3),
    "two-axes": ([[0, 1], [1, 2]], 3),
    "single": ([0], 1),
    "many": ([*range(33), 0, 32, 16], 33),
}


def scatter(mode: str, axis: int) -> Callable[..., Any]:
    """The result of a scatter; where it sets floats their signs too, which tell -0 from +0."""

    def program(x: Any, i: Any, u: Any) -> Any:
        if mode == "add":
            out = ts.scatter_add(x, i, u, axis=axis)
        else:
            out = ts.scatter(x, i, u, axis=axis, mode=mode)
        return (out, ts.signbit(out)) if out.dtype.is_float and mode == "set" else out

    return program


def _make(mode: str, indices: str, axis: int, dtype: str, kind: str) -> Case:
    i, size = np.array(INDICES[indices][0], np.int64), INDICES[indices][1]
    shape, places = [3, 3], [3, 3]
    shape[axis], places[axis : axis + 1] = size, i.shape
    x, u = edge_values(kind, 1, tuple(shape), dtype), edge_values(kind, 2, tuple(places), dtype)
    name = f"graph/scatter/{mode}-{indices}-axis{axis}-{dtype}-{kind}"
    return Case(name, lambda: (Jit(scatter(mode, axis)), (x, i, u)), exact=mode in ("set", "min", "max"), unknown=True)


# Slices: the shape of an array, their starts, and their sizes.
SLICES = {
    "inside": ((5, 7), (1, 2), (3, 4)),
    "row": ((4, 6), (3, 0), (1, 6)),
    "column": ((33, 3), (0, 1), (33, 1)),
    "all": ((2, 3), (0, 0), (2, 3)),
    "nothing": ((2, 3), (1, 3), (1, 0)),
    "line": ((40,), (7,), (32,)),
}


def update_slice(start: tuple[int, ...]) -> Callable[..., Any]:
    """The result of an update of a slice, and the signs of floats, which tell -0 from +0."""

    def program(x: Any, new: Any) -> Any:
        out = ts.update_slice(x, new, start=start)
        return (out, ts.signbit(out)) if out.dtype.is_float else out

    return program


def _make_slice(name: str, dtype: str, kind: str) -> Case:
    shape, start, sizes = SLICES[name]
    x, new = edge_values(kind, 1, shape, dtype), edge_values(kind, 2, sizes, dtype)
    label = f"graph/scatter/update_slice-{name}-{dtype}-{kind}"
    return Case(label, lambda: (Jit(update_slice(start)), (x, new)), exact=True, unknown=True)


def cases() -> Iterator[Case]:
    """Each mode with each kind of indices, and slices; special values where they meet."""
    for name in SLICES:
        yield _make_slice(name, "f32", "special")
    for dtype in ("f16", "int32", "int8"):
        yield _make_slice("inside", dtype, "ties" if dtype != "f16" else "zeros")
    for mode in MODES:
        for number, indices in enumerate(INDICES):
            yield _make(mode, indices, number % 2, "f32", "ties")
            yield _make(mode, indices, (number + 1) % 2, "f32", "special")
        for dtype in ("f16", "int32", "int8"):
            yield _make(mode, "equal", 0, dtype, "ties" if dtype != "f16" else "zeros")
        yield _make(mode, "equal", 1, "f32", "zeros")
