"""Kernels that fuzzing found to be wrong on some engine."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def sorted_beside_product(x, out, total, N: ts.constexpr):
    """The packed operand of a product over one element lies beside the memory of a sort."""
    column = tile.load(x[0:N, 0:1])
    ordered = tile.sort(column, axis=0)
    tile.store(total[0:N], tile.sum(tile.dot(column, tile.transpose(column)), axis=0))
    tile.store(out[0:N, 0:1], ordered)


@ts.kernel
def captured_start(x, out, B: ts.constexpr):
    """The body of a loop reads the value that its carried value starts with: an iteration must not overwrite it."""
    at = tile.program_id(0) * B
    start = tile.load(x[at : at + B])
    value = start
    for _ in tile.range(0, 2):
        value = value * 0.5 + start
    tile.store(out[at : at + B], value)


@ts.kernel
def captured_in_while(x, out, B: ts.constexpr):
    """As above, in a loop with a condition."""
    start = tile.load(x[0:B])
    value, turn = start, 0
    while turn < 3:
        value, turn = value + start, turn + 1
    tile.store(out[0:B], value)


@ts.kernel
def clipped_copy(x, out, B: ts.constexpr):
    """A copy between tensors that may be empty."""
    at = tile.program_id(0) * B
    tile.store(out[at : at + B], tile.load(x[at : at + B], other=0.5), edge="clip")


@ts.kernel
def narrow_sums(x, rows, columns, N: ts.constexpr):
    """Sums of 16-bit floats accumulate in f32."""
    block = tile.load(x[0:8, 0:N])
    tile.store(rows[0:8], tile.sum(block, axis=1))
    tile.store(columns[0:N], tile.sum(block, axis=0))


def _make_copies() -> Iterator[Case]:
    for size in (0, 1, 4):
        arguments = {"x": np.arange(size, dtype="f4"), "out": np.zeros(size, "f4"), "B": 2}
        name = f"tile/found/clipped-copy-{size}"
        yield Case(name, lambda a=arguments: (clipped_copy, a), grid=(2,), exact=True)  # type: ignore[misc]
    for kernel in (captured_start, captured_in_while):
        arguments = {"x": tensor("start", (8,)), "out": np.zeros(8, "f4"), "B": 4}
        grid = (2,) if kernel is captured_start else (1,)
        name = f"tile/found/{kernel.__name__.replace('_', '-')}"
        yield Case(name, lambda k=kernel, a=arguments: (k, a), grid=grid)  # type: ignore[misc]


def cases() -> Iterator[Case]:
    """Each kernel, some at the sizes around a vector."""
    yield from _make_copies()
    for dtype in ("bf16", "f16"):
        x = tensor("narrow", (8, 48), dtype, 0.0, 3.0)
        arguments = {"x": x, "rows": np.zeros(8, x.dtype), "columns": np.zeros(48, x.dtype), "N": 48}
        yield Case(f"tile/found/narrow-sums-{dtype}", lambda a=arguments: (narrow_sums, a), grid=(1,))  # type: ignore[misc]
    for size in (1, 2, 5, 8, 9, 17):
        x = tensor(f"column{size}", (size, 1))
        arguments = {"x": x, "out": np.zeros((size, 1), "f4"), "total": np.zeros(size, "f4"), "N": size}
        name = f"tile/found/sorted-beside-product-{size}"
        yield Case(name, lambda a=arguments: (sorted_beside_product, a), grid=(1,))  # type: ignore[misc]
