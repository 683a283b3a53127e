"""Kernels of symbolic sizes: one Tile module for every size, with grids of sizes, groups of tiles, and masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile

GROUP = 32


@ts.kernel
def scale(x, out, *, BM: int = 16):
    """Masks at the end, and a size as a number."""
    i = tile.program_id(0) * BM
    tile.store(out[i : i + BM], tile.load(x[i : i + BM], edge="clip") * 2.0 + x.shape[0], edge="clip")


@ts.kernel
def multiply(a, b, c, *, BM: int = 16, BN: int = 16, BK: int = 8):
    """A product whose three sizes are symbolic."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    total = tile.zeros((BM, BN), "f32")
    for k in tile.range(0, a.shape[1], BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        total = tile.mma(left, tile.load(b[k : k + BK, n : n + BN], edge="clip"), total)
    tile.store(c[m : m + BM, n : n + BN], total, edge="clip")


@ts.kernel
def sum_rows(x, out):
    """A group of tiles for each row, with partial sums in shared memory."""
    row, me = tile.program_id(0), tile.local_id()
    partial = tile.alloc_shared((GROUP,), ts.f32)
    total = 0.0
    for i in tile.range(me, x.shape[1], GROUP):
        total += x[row, i]
    partial[me] = total
    tile.barrier()
    if me == 0:
        total = 0.0
        for i in tile.range(0, GROUP):
            total += partial[i]
        out[row] = total


@ts.kernel
def choose(x, out, *, BM: int = 8):
    """Branches that sizes decide."""
    i = tile.program_id(0) * BM
    factor = 3.0 if x.shape[0] % 2 else 2.0
    if x.shape[0] > 20 and not x.shape[0] % 3:
        factor = 5.0
    tile.store(out[i : i + BM], tile.load(x[i : i + BM], edge="clip") * factor, edge="clip")


def _cut(*blocks: int) -> Callable[..., tuple[Any, ...]]:
    """A grid that cuts the last argument into such blocks."""
    return lambda *arrays, **_: tuple(tile.cdiv(n, b) for n, b in zip(arrays[-1].shape, blocks, strict=True))


def _make(kernel: Any, shapes: tuple[tuple[int, ...], ...], dynamic: Any, grid: Any, group: int | None = None) -> Case:
    name = f"tile/sizes/{kernel.__name__}-" + "-".join("x".join(map(str, s)) for s in shapes[:-1])
    inputs = [tensor(f"{name}/{i}", shape, "f32") for i, shape in enumerate(shapes[:-1])]
    return Case(name, lambda: (kernel, (*inputs, np.zeros(shapes[-1], "f4"))), grid, group, dynamic=dynamic)


def cases() -> Iterator[Case]:
    """Each kernel at sizes that its blocks divide and do not."""
    vector = {"x": {0: "N"}, "out": {0: "N"}}
    for n in (1, 16, 33):
        yield _make(scale, ((n,), (n,)), vector, _cut(16))
    for n in (4, 5, 24, 27, 50):
        yield _make(choose, ((n,), (n,)), vector, _cut(8))
    product = {"a": {0: "M", 1: "K"}, "b": {0: "K", 1: "N"}, "c": {0: "M", 1: "N"}}
    for m, k, n in ((1, 1, 1), (17, 9, 33), (16, 8, 32)):
        yield _make(multiply, ((m, k), (k, n), (m, n)), product, _cut(16, 16))
    rows = {"x": {0: "M", 1: "N"}, "out": {0: "M"}}
    for m, n in ((1, 1), (3, 100), (5, 32)):
        yield _make(sum_rows, ((m, n), (m,)), rows, _cut(1), GROUP)
