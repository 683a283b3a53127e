"""Reads and writes: blocks, masks, edges, gathers, strides, copies, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def clipped(x, out, B: ts.constexpr):
    i = tile.program_id(0) * B
    tile.store(out[i : i + B], tile.load(x[i : i + B], other=0.0) + 1.0, edge="clip")


@ts.kernel
def clipped_corner(x, out, B: ts.constexpr):
    i, j = tile.program_id(0) * B, tile.program_id(1) * B
    tile.store(out[i : i + B, j : j + B], tile.load(x[i : i + B, j : j + B], other=0.0) * 2.0, edge="clip")


@ts.kernel
def masked(x, out, N: ts.constexpr, B: ts.constexpr):
    offsets = tile.program_id(0) * B + tile.arange(0, B)
    values = tile.load(x, offsets, mask=offsets < N, other=-1.0)
    tile.store(out, offsets, values * values, mask=offsets < N)


@ts.kernel
def replaced(x, out):
    """What a load gives for elements that it leaves out differs between programs; a row has as many as the grid."""
    i = tile.program_id(0)
    row = tile.load(x[i, 1:4], other=tile.cast(i * 10, ts.f32))
    tile.store(out[i, 0:3], row + tile.load(x[i, 0:3], mask=i % 2 == 0, other=tile.cast(i, ts.f32)))


@ts.kernel
def gathered(x, index, out, B: ts.constexpr):
    i = tile.program_id(0) * B
    places = tile.load(index[i : i + B])
    tile.store(out[i : i + B], x[places] + x[0])


@ts.kernel
def reversed_rows(x, out, R: ts.constexpr, C: ts.constexpr):
    rows = (R - 1) - tile.arange(0, R)
    columns = tile.arange(0, C)
    out[rows[:, None], columns[None, :]] = x[tile.arange(0, R)[:, None], columns[None, :]]


@ts.kernel
def doubled(data):
    i = tile.program_id(0)
    data[i] *= 2.0


@ts.kernel
def accumulated(c, a, b, B: ts.constexpr):
    c[0:B, 0:B] += tile.dot(tile.load(a[0:B, 0:B]), tile.load(b[0:B, 0:B]))


@ts.kernel
def buffered(a, b, c, K: ts.constexpr, B: ts.constexpr):
    left = [tile.alloc_shared((B, B), ts.f32), tile.alloc_shared((B, B), ts.f32)]
    right = [tile.alloc_shared((B, B), ts.f32), tile.alloc_shared((B, B), ts.f32)]
    m, n = tile.program_id(0) * B, tile.program_id(1) * B
    write, read = 0, 1
    tile.cp_async(left[write], a[m : m + B, 0:B])
    tile.cp_async(right[write], b[0:B, n : n + B])
    tile.cp_commit_group()
    acc = tile.zeros((B, B), ts.f32)
    for k in tile.range(B, K + B, B):
        write, read = read, write
        tile.cp_wait_group(0)
        tile.barrier()
        if k < K:
            tile.cp_async(left[write], a[m : m + B, k : k + B])
            tile.cp_async(right[write], b[k : k + B, n : n + B])
            tile.cp_commit_group()
        acc += tile.mma(left[read], right[read])
    tile.store(c[m : m + B, n : n + B], acc)


@ts.kernel
def returned(x, B: ts.constexpr):
    i = tile.program_id(0) * B
    return tile.sum(tile.load(x[i : i + B]), axis=0)


def cases() -> Iterator[Case]:
    """Each kernel above, edges at several sizes."""
    for size in (1, 15, 16, 17, 50):
        x = tensor(f"clip{size}", (size,))
        yield _make(f"clipped-{size}", clipped, {"x": x, "out": np.zeros(size, "f4"), "B": 16}, (-(-size // 16),))
    for shape in ((5, 9), (8, 16), (17, 3)):
        x = tensor(f"corner{shape}", shape)
        grid = (-(-shape[0] // 8), -(-shape[1] // 8))
        yield _make(
            f"corner-{shape[0]}x{shape[1]}", clipped_corner, {"x": x, "out": np.zeros(shape, "f4"), "B": 8}, grid
        )
    x = tensor("memory", (50,))
    yield _make("masked", masked, {"x": x, "out": np.zeros(50, "f4"), "N": 50, "B": 32}, (2,))
    yield _make("replaced", replaced, {"x": tensor("replaced", (3, 3)), "out": np.zeros((3, 3), "f4")}, (3,))
    index = tensor("index", (48,), "int32", 0, 49)
    yield _make("gathered", gathered, {"x": x, "index": index, "out": np.zeros(48, "f4"), "B": 16}, (3,))
    grid = tensor("reversed", (6, 20))
    yield _make("reversed-rows", reversed_rows, {"x": grid, "out": np.zeros_like(grid), "R": 6, "C": 20}, (1,))
    yield _make("doubled", doubled, {"data": x}, (50,))
    a, b, c = (tensor(n, (24, 24)) for n in "abc")
    yield _make("accumulated", accumulated, {"c": c[:16, :16].copy(), "a": a, "b": b, "B": 16}, (1,))
    yield _make("double-buffered", buffered, {"a": a, "b": b, "c": np.zeros((24, 24), "f4"), "K": 24, "B": 8}, (3, 3))
    for dtype in ("f16", "bf16", "int8", "uint8", "int16", "bool"):
        yield _make_copy(dtype)
    yield _make("returned", returned, {"x": tensor("r", (40,)), "B": 10}, (4,))


@ts.kernel
def copied(x, out, B: ts.constexpr):
    i = tile.program_id(0) * B
    tile.store(out[i : i + B], tile.load(x[i : i + B]))


def _make_copy(dtype: str) -> Case:
    x = tensor(f"copy{dtype}", (64,), dtype)
    return Case(
        f"tile/memory/copy-{dtype}", lambda: (copied, {"x": x, "out": np.zeros_like(x), "B": 32}), grid=(2,), exact=True
    )


def _make(name: str, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...]) -> Case:
    return Case(f"tile/memory/{name}", lambda: (kernel, arguments), grid=grid)
