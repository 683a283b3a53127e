"""Kernels that must be refused, at compile time or run time, and the text of the error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile
from tessera.core.errors import (
    DTypeError,
    ExecutionError,
    OutOfBoundsError,
    ShapeError,
    TesseraError,
    UnknownNameError,
    UnsupportedSyntaxError,
)


@ts.kernel
def reads_outside(x, out):
    i = tile.program_id(0)
    out[i] = x[i + 1]


@ts.kernel
def writes_outside(x, out):
    i = tile.program_id(0)
    out[i * 2] = x[i]


@ts.kernel
def constant_outside(x, out):
    out[0] = x[99]


@ts.kernel
def divergent_barrier(x, out):
    me = tile.local_id()
    if me < 2:
        tile.barrier()
    out[me] = x[me]


@ts.kernel
def unknown_name(x, out):
    out[0] = x[0] + scale  # type: ignore[name-defined]  # noqa: F821


@ts.kernel
def unknown_tile_op(x, out):
    out[0] = tile.lod(x)  # type: ignore[attr-defined]


@ts.kernel
def uses_try(x, out):
    try:
        out[0] = x[0]
    finally:
        pass


@ts.kernel
def store_mismatch(x, out):
    tile.store(out[0:4], tile.cast(tile.load(x[0:4]), ts.f16))


@ts.kernel
def shape_mismatch(x, out):
    tile.store(out[0:4], tile.load(x[0:4]) + tile.load(x[0:3]))


@ts.kernel
def annotated(x: ts.Tensor["M", 8, ts.f32], out):
    out[0] = x[0, 0]


@ts.kernel
def gather_outside(x, out, B: ts.constexpr):
    out[0:B] = x[tile.arange(0, B) * 3]


@ts.kernel
def false_assertion(x, out):
    i = tile.program_id(0)
    tile.assert_(i < 5, "only five programs")
    out[i] = x[i]


@ts.kernel
def half_a_warp(x, out):
    me = tile.local_id()
    if me > 2:
        out[me] = tile.warp.reduce_max(x[me])


@ts.kernel
def carried_type(x, out):
    total = tile.load(x[0:4])
    for _ in range(3):
        total = tile.cast(total, ts.f16)
    tile.store(out[0:4], tile.cast(total, ts.f32))


REFUSED: dict[str, tuple[Any, tuple[int, ...], int | None, type[TesseraError], tuple[str, ...]]] = {
    "reads-outside": (reads_outside, (8,), None, OutOfBoundsError, ("index 8", "axis 0 of x", "out[i] = x[i + 1]")),
    "writes-outside": (writes_outside, (8,), None, OutOfBoundsError, ("axis 0 of out", "out[i * 2] = x[i]")),
    "constant-outside": (constant_outside, (1,), None, OutOfBoundsError, ("99", "x", "cases.py:")),
    "divergent-barrier": (divergent_barrier, (1,), 8, ExecutionError, ("barrier", "tile.barrier()")),
    "assertion": (false_assertion, (8,), None, ExecutionError, ("only five", "program (5,)", "with 5, 5")),
    "half-a-warp": (half_a_warp, (1,), 8, ExecutionError, ("exchange values", "all 8 tiles")),
    "unknown-name": (unknown_name, (1,), None, UnknownNameError, ("scale", "cases.py:")),
    "unknown-tile-op": (unknown_tile_op, (1,), None, UnknownNameError, ("lod", "load")),
    "syntax": (uses_try, (1,), None, UnsupportedSyntaxError, ("try", "cases.py:")),
    "store-dtype": (store_mismatch, (1,), None, DTypeError, ("f16", "f32", "cast")),
    "carried-type": (carried_type, (1,), None, DTypeError, ("total", "f16", "cases.py:")),
    "block-shapes": (shape_mismatch, (1,), None, ShapeError, ("cannot broadcast",)),
}


def cases() -> Iterator[Case]:
    """The kernels of the table, and a few with special arguments."""
    for name, (kernel, grid, group, error, says) in REFUSED.items():
        yield _make(name, kernel, {"x": tensor("x", (8,)), "out": np.zeros(8, "f4")}, grid, group, error, says)
    rows = {"x": tensor("rows", (4, 7)), "out": np.zeros(4, "f4")}
    yield _make("annotation", annotated, rows, (1,), None, ShapeError, ("x", "8", "7"))
    few = {"x": tensor("x", (8,)), "out": np.zeros(8, "f4"), "B": 4}
    yield _make("gather-outside", gather_outside, few, (1,), None, OutOfBoundsError, ("index 9", "axis 0 of x"))


def _make(
    name: str, kernel: Any, arguments: Any, grid: Any, group: Any, error: type[TesseraError], says: tuple[str, ...]
) -> Case:
    return Case(f"tile/errors/{name}", lambda: (kernel, arguments), grid=grid, group=group, rejects=error, says=says)
