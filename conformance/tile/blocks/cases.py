"""Blocks in registers: arithmetic, reductions, products, layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def elementwise(x, y, out, B: ts.constexpr):
    i = tile.program_id(0) * B
    a, b = tile.load(x[i : i + B]), tile.load(y[i : i + B])
    tile.store(out[i : i + B], ts.where(a > b, ts.exp(a) * b, a - b / 3.0))


@ts.kernel
def row_softmax(x, out, C: ts.constexpr):
    row = tile.program_id(0)
    values = tile.load(x[row, 0:C])
    e = ts.exp(values - tile.max(values, axis=0))
    tile.store(out[row, 0:C], e / tile.sum(e, axis=0))


@ts.kernel
def column_sums(x, out, R: ts.constexpr, C: ts.constexpr):
    tile.store(out[0:C], tile.sum(tile.load(x[0:R, 0:C]), axis=0))


@ts.kernel
def extremes(x, low, high, where, R: ts.constexpr, C: ts.constexpr):
    block = tile.load(x[0:R, 0:C])
    tile.store(low[0:R], tile.min(block, axis=1))
    tile.store(high[0:C], tile.max(block, axis=0))
    tile.store(where[0:R], tile.argmax(block, axis=1))


@ts.kernel
def places(x, first, kept, row, R: ts.constexpr, C: ts.constexpr):
    """Where extremes are, along each axis, with the axis dropped and kept."""
    block = tile.load(x[0:R, 0:C])
    tile.store(first[0:C], tile.argmax(block, axis=0))
    tile.store(kept[0:1, 0:C], tile.argmin(block, axis=0, keepdims=True))
    tile.store(row[0:R, 0:1], tile.argmin(block, axis=1, keepdims=True))


@ts.kernel
def product(
    a, b, c, M: ts.constexpr, N: ts.constexpr, K: ts.constexpr, BM: ts.constexpr, BN: ts.constexpr, BK: ts.constexpr
):
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), ts.f32)
    for k in tile.range(0, K, BK):
        left = tile.load(a[m : m + BM, k : k + BK], other=0.0)
        right = tile.load(b[k : k + BK, n : n + BN], other=0.0)
        acc += tile.dot(left, right)
    tile.store(c[m : m + BM, n : n + BN], tile.cast(acc, c.dtype), edge="clip")


@ts.kernel
def transposed(x, out, R: ts.constexpr, C: ts.constexpr):
    tile.store(out[0:C, 0:R], tile.transpose(tile.load(x[0:R, 0:C])))


@ts.kernel
def outer(x, y, out, R: ts.constexpr, C: ts.constexpr):
    a, b = tile.load(x[0:R]), tile.load(y[0:C])
    tile.store(out[0:R, 0:C], a[:, None] * b[None, :] + tile.arange(0, C).to(ts.f32)[None, :])


@ts.kernel
def integers(x, out, B: ts.constexpr):
    i = tile.program_id(0) * B
    v = tile.load(x[i : i + B])
    tile.store(out[i : i + B], (v * 3 - 7) // 4 + v % 5 + (v >> 1) * (v & 6))


def _make_product(name: str, shape: tuple[int, int, int], block: tuple[int, int, int], dtype: str = "f32") -> Case:
    (m, n, k), (bm, bn, bk) = shape, block
    a, b = tensor(f"a{name}", (m, k), dtype), tensor(f"b{name}", (k, n), dtype)
    arguments = {
        "a": a,
        "b": b,
        "c": np.zeros((m, n), a.dtype if dtype != "int8" else np.int32),
        "M": m,
        "N": n,
        "K": k,
        "BM": bm,
        "BN": bn,
        "BK": bk,
    }
    return Case(f"tile/blocks/product-{name}", lambda: (product, arguments), grid=(-(-m // bm), -(-n // bn)))


def cases() -> Iterator[Case]:
    """One case a kernel, several shapes and types where they matter."""
    for dtype in ("f32", "f16", "bf16", "f64"):
        yield _make_vector(dtype)
    for columns in (1, 7, 64, 130):
        yield _make_rows(columns)
    x = tensor("grid", (9, 37))
    yield Case(
        "tile/blocks/column-sums",
        lambda: (column_sums, {"x": x, "out": np.zeros(37, "f4"), "R": 9, "C": 37}),
        grid=(1,),
    )
    yield _make_extremes(x)
    found = {"first": np.zeros(37, "i8"), "kept": np.zeros((1, 37), "i8"), "row": np.zeros((9, 1), "i8")}
    yield Case("tile/blocks/places", lambda: (places, {"x": x, **found, "R": 9, "C": 37}), grid=(1,), exact=True)
    for name, shape, block in (
        ("square", (32, 32, 32), (16, 16, 16)),
        ("odd", (33, 19, 27), (16, 8, 8)),
        ("one-block", (8, 8, 40), (8, 8, 40)),
        ("thin", (3, 70, 5), (4, 32, 8)),
        ("wide-block", (70, 100, 30), (64, 96, 16)),
    ):
        yield _make_product(name, shape, block)
    for dtype in ("bf16", "f16"):
        yield _make_product(dtype, (24, 40, 32), (8, 16, 16), dtype)
    yield Case(
        "tile/blocks/transpose",
        lambda: (transposed, {"x": x, "out": np.zeros((37, 9), "f4"), "R": 9, "C": 37}),
        grid=(1,),
        exact=True,
    )
    yield _make_outer()
    yield _make_integers()


def _make_vector(dtype: str) -> Case:
    x, y = tensor(f"x{dtype}", (96,), dtype), tensor(f"y{dtype}", (96,), dtype)
    return Case(
        f"tile/blocks/elementwise-{dtype}",
        lambda: (elementwise, {"x": x, "y": y, "out": np.zeros_like(x), "B": 32}),
        grid=(3,),
    )


def _make_rows(columns: int) -> Case:
    x = tensor(f"rows{columns}", (6, columns))
    return Case(
        f"tile/blocks/row-softmax-{columns}",
        lambda: (row_softmax, {"x": x, "out": np.zeros_like(x), "C": columns}),
        grid=(6,),
    )


def _make_extremes(x: np.ndarray) -> Case:
    outputs: dict[str, Any] = {"low": np.zeros(9, "f4"), "high": np.zeros(37, "f4"), "where": np.zeros(9, "i8")}
    return Case("tile/blocks/extremes", lambda: (extremes, {"x": x, **outputs, "R": 9, "C": 37}), grid=(1,), exact=True)


def _make_outer() -> Case:
    x, y = tensor("ox", (5,)), tensor("oy", (33,))
    return Case(
        "tile/blocks/outer",
        lambda: (outer, {"x": x, "y": y, "out": np.zeros((5, 33), "f4"), "R": 5, "C": 33}),
        grid=(1,),
    )


def _make_integers() -> Case:
    x = tensor("ints", (64,), "int32", -40, 40)
    return Case(
        "tile/blocks/integers", lambda: (integers, {"x": x, "out": np.zeros_like(x), "B": 16}), grid=(4,), exact=True
    )
