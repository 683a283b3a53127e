"""Scans, reductions by a user's function, sorting, histograms, joins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def cumulated(x, out, M: ts.constexpr, N: ts.constexpr):
    block = tile.load(x[0:M, 0:N])
    tile.store(out[0, 0:M, 0:N], tile.cumsum(block))
    tile.store(out[1, 0:M, 0:N], tile.cumsum(block, axis=0))
    tile.store(out[2, 0:M, 0:N], tile.cumprod(block, axis=1))
    tile.store(out[3, 0:M, 0:N], tile.cummax(block))
    tile.store(out[4, 0:M, 0:N], tile.scan(block, "min", axis=-1, reverse=True))


def decayed(a, b, c, d):
    """Compose the maps v -> a v + b and v -> c v + d."""
    return a * c, b * c + d


@ts.kernel
def recurrence(decay, x, out, total, N: ts.constexpr):
    i = tile.program_id(0)
    pair = (tile.load(decay[i, 0:N]), tile.load(x[i, 0:N]))
    _, states = tile.scan(pair, decayed, axis=0)
    _, last = tile.reduce(pair, decayed, axis=0)
    tile.store(out[i, 0:N], states)
    total[i] = last


@ts.kernel
def largest_with_place(x, out, M: ts.constexpr, N: ts.constexpr):
    def better(value, place, other, there):
        take = (other > value) | ((other == value) & (there < place))
        return tile.where(take, other, value), tile.where(take, there, place)

    block = tile.load(x[0:M, 0:N])
    _, place = tile.reduce((block, tile.arange(0, N) + tile.cast(block * 0.0, ts.int64)), better, axis=1)
    tile.store(out[0:M], place)


@ts.kernel
def narrow_sums(x, small, out, counts, N: ts.constexpr):
    tile.store(out[0:N], tile.cumsum(tile.load(x[0:N])))
    tile.store(counts[0:N], tile.cumsum(tile.load(small[0:N])))


@ts.kernel
def ordered(x, out, places, M: ts.constexpr, N: ts.constexpr):
    block = tile.load(x[0:M, 0:N])
    tile.store(out[0, 0:M, 0:N], tile.sort(block))
    tile.store(out[1, 0:M, 0:N], tile.sort(block, axis=0, descending=True))
    tile.store(out[2, 0:M, 0:N], tile.flip(block, axis=1))
    tile.store(places[0:M, 0:N], tile.argsort(block))


@ts.kernel
def counted(x, out, N: ts.constexpr, B: ts.constexpr):
    i = tile.program_id(0)
    tile.store(out[i, 0:B], tile.histogram(tile.load(x[i, 0:N]), B))


@ts.kernel
def interleaved(x, y, out, halves, N: ts.constexpr):
    joined = tile.join(tile.load(x[0:N]), tile.load(y[0:N]))
    tile.store(out[0 : 2 * N], tile.reshape(joined, (2 * N,)))
    even, odd = tile.split(tile.reshape(tile.load(x[0:N]), (N // 2, 2)))
    tile.store(halves[0, 0 : N // 2], even)
    tile.store(halves[1, 0 : N // 2], odd)


@ts.kernel
def tiles_scan(x, out, N: ts.constexpr):
    me = tile.local_id()
    tile.store(out[me, 0:N], tile.cumsum(tile.load(x[me, 0:N])))


def cases() -> Iterator[Case]:
    """Each kernel above, at a few sizes."""
    for rows, columns in ((1, 1), (5, 7), (8, 16), (3, 33)):
        x = tensor(f"scan{columns}", (rows, columns))
        sizes = {"M": rows, "N": columns}
        name = f"{rows}x{columns}"
        yield _make(f"cumulated-{name}", cumulated, {"x": x, "out": np.zeros((5, rows, columns), "f4"), **sizes})
        whole = {"out": np.zeros((3, rows, columns), "f4"), "places": np.zeros((rows, columns), "i8")}
        yield _make(f"ordered-{name}", ordered, {"x": np.round(x * 2), **whole, **sizes}, exact=True)
        place = {"x": np.round(x), "out": np.zeros(rows, "i8"), **sizes}
        yield _make(f"argmax-{name}", largest_with_place, place, exact=True)
    states = {"out": np.zeros((3, 20), "f4"), "total": np.zeros(3, "f4"), "N": 20}
    decay = tensor("decay", (3, 20), "f32", 0.5, 1.0)
    yield _make("recurrence", recurrence, {"decay": decay, "x": tensor("drive", (3, 20)), **states}, (3,))
    narrow = {"x": tensor("narrow", (40,), "f16"), "small": tensor("small", (40,), "int8", -90, 90)}
    yield _make(
        "narrow-sums", narrow_sums, {**narrow, "out": np.zeros(40, "f2"), "counts": np.zeros(40, "i8"), "N": 40}
    )
    numbers = {"x": tensor("counts", (2, 50), "int32", -1, 9), "out": np.zeros((2, 8), "i8"), "N": 50, "B": 8}
    yield _make("histogram", counted, numbers, (2,), exact=True)
    pair = {"x": tensor("left", (12,)), "y": tensor("right", (12,))}
    outs = {"out": np.zeros(24, "f4"), "halves": np.zeros((2, 6), "f4"), "N": 12}
    yield _make("join-and-split", interleaved, {**pair, **outs}, exact=True)
    rows = {"x": tensor("tiles", (4, 9)), "out": np.zeros((4, 9), "f4"), "N": 9}
    yield Case("tile/scans/of-tiles", lambda: (tiles_scan, rows), grid=(1,), group=4)


def _make(name: str, kernel: Any, arguments: Any, grid: Any = (1,), exact: bool = False) -> Case:
    return Case(f"tile/scans/{name}", lambda: (kernel, arguments), grid=grid, exact=exact)
