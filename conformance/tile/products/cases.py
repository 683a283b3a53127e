"""Products in loops, for matrix units: narrow types, both orientations, edges, epilogues.

The elements are small integers, whose sums every accumulator format represents: results are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile
from tessera.core.types import as_dtype

# A block depth of 128 bytes, which suits matrix units, and another.
DEPTHS = {
    "bf16": (64, 32), "f16": (64, 32), "fp8_e4m3": (128, 64), "fp8_e5m2": (128, 64), "int8": (128, 64),
    "uint8": (128, 64),
}  # fmt: skip
MIXED = (("fp8_e4m3", "fp8_e5m2"), ("fp8_e5m2", "fp8_e4m3"), ("int8", "uint8"), ("uint8", "int8"))
# Blocks of 16-bit results with the sizes of a product: on ptx for sm_90a they leave in rounds of two boxes of 64 x 64
# from a buffer that each round reuses, and a persistent kernel begins the next block meanwhile.
STORED = {(64, 64): (64, 64, 64), (128, 256): (104, 200, 64), (64, 128): (136, 136, 136)}
WHOLE, EDGES = (16, 64, 256), (40, 72, 144)


@ts.kernel
def product(
    a, b, out, M: ts.constexpr, N: ts.constexpr, K: ts.constexpr, BM: ts.constexpr, BN: ts.constexpr,
    BK: ts.constexpr, turned: ts.constexpr,
):  # fmt: skip
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), out.dtype)
    for k in tile.range(0, K, BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        if turned:
            acc += tile.dot(left, tile.transpose(tile.load(b[n : n + BN, k : k + BK], edge="clip")))
        else:
            acc += tile.dot(left, tile.load(b[k : k + BK, n : n + BN], edge="clip"))
    tile.store(out[m : m + BM, n : n + BN], acc, edge="clip")


def cases() -> Iterator[Case]:
    """Each type at sizes that blocks divide and do not divide, in both orientations where the type allows it."""
    for dtype, (deep, flat) in DEPTHS.items():
        yield _make_product((dtype, dtype), True, WHOLE, deep)
        if not dtype.startswith("fp8"):
            yield _make_product((dtype, dtype), False, WHOLE, deep)
            yield _make_product((dtype, dtype), False, EDGES, flat)
    for pair in MIXED:
        deep, flat = DEPTHS[pair[0]]
        yield _make_product(pair, True, WHOLE, deep)
        yield _make_product(pair, False, EDGES, flat)
    for shape, sizes in STORED.items():
        yield _make_stored("bf16", shape, sizes)
    yield _make_stored("f16", (64, 64), STORED[64, 64])
    yield _make_stored("bf16", (64, 64), (264, 64, 136), stages=2)  # each stage and buffer is used again
    yield _make_chained()
    yield _make_continued()
    yield _make_carried(exchanged_sums)
    yield _make_carried(forked_sums)
    yield _make_carried(shared_sums)


def _make_product(pair: tuple[str, str], turned: bool, sizes: tuple[int, int, int], depth: int) -> Case:
    m, n, k = sizes
    kind = pair[0] if pair[0] == pair[1] else f"{pair[0]}-{pair[1]}"
    name = f"tile/products/{kind}-{'turned' if turned else 'plain'}-{m}x{n}x{k}"
    shapes = ((m, k), (n, k) if turned else (k, n))
    left, right = (_whole(f"{name}-{i}", s, d) for i, (s, d) in enumerate(zip(shapes, pair, strict=True)))
    out = np.zeros((m, n), np.int32 if "int" in pair[0] else np.float32)
    constants = {"M": m, "N": n, "K": k, "BM": 64, "BN": 64, "BK": depth, "turned": turned}
    arguments = {"a": left, "b": right, "out": out, **constants}
    return Case(name, lambda: (product, arguments), grid=(-(-m // 64), -(-n // 64)), exact=True)


@ts.kernel
def stored_product(a, b, out, BM: ts.constexpr, BN: ts.constexpr):
    """Each block of results is written once, whole, in the operands' type."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), ts.f32)
    for k in tile.range(0, a.shape[1], 64):
        acc += tile.dot(
            tile.load(a[m : m + BM, k : k + 64], edge="clip"), tile.load(b[k : k + 64, n : n + BN], edge="clip")
        )
    tile.store(out[m : m + BM, n : n + BN], tile.cast(tile.maximum(acc, 0), out.dtype), edge="clip")


def _make_stored(dtype: str, block: tuple[int, int], sizes: tuple[int, int, int], stages: int | None = None) -> Case:
    m, n, k = sizes
    name = f"tile/products/stored-{dtype}-{block[0]}x{block[1]}-{m}x{n}x{k}"
    entry = stored_product if stages is None else stored_product.with_schedule(ts.Schedule(stages=stages))
    left, right = (_signs(f"{name}-{i}", shape, dtype) for i, shape in enumerate(((m, k), (k, n))))
    out = np.zeros((m, n), as_dtype(dtype).numpy)
    arguments = {"a": left, "b": right, "out": out, "BM": block[0], "BN": block[1]}
    return Case(name, lambda: (entry, arguments), grid=(-(-m // block[0]), -(-n // block[1])), exact=True)


@ts.kernel
def chained_products(q, k, v, out):
    """The results of one product of a round are an operand of another, whose sum the next round scales."""
    m = tile.program_id(0) * 64
    left = tile.load(q[m : m + 64, 0:64])
    acc = tile.zeros((64, 64), ts.f32)
    for n in tile.range(0, k.shape[0], 64):
        scores = tile.dot(left, tile.transpose(tile.load(k[n : n + 64, 0:64])))
        kept = tile.cast(tile.minimum(tile.maximum(scores, -2.0), 2.0), q.dtype)
        acc = acc * 0.5 + tile.dot(kept, tile.load(v[n : n + 64, 0:64]))
    tile.store(out[m : m + 64, 0:64], tile.cast(acc, out.dtype))


def _make_chained() -> Case:
    name = "tile/products/chained-bf16"
    left, right, last = (_signs(f"{name}-{i}", s, "bf16") for i, s in enumerate(((64, 64), (128, 64), (128, 64))))
    arguments = {"q": left, "k": right, "v": last, "out": np.zeros((64, 64), np.float32)}
    return Case(name, lambda: (chained_products, arguments), grid=(1,), exact=True)


@ts.kernel
def continued_products(a, b, c, first, left_sums, right_sums):
    """Two sums leave one loop and go on in another; one of them is stored as it was between the loops, too."""
    rows = tile.load(a[0:64, 0:64])
    x, y = tile.zeros((64, 64), ts.f32), tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, b.shape[0], 64):
        x += tile.dot(rows, tile.load(b[k : k + 64, 0:64]))
        y += tile.dot(rows, tile.load(c[k : k + 64, 0:64]))
    between = x
    for k in tile.range(0, b.shape[0], 64):
        x += tile.dot(rows, tile.load(c[k : k + 64, 0:64]))
        y += tile.dot(rows, tile.load(b[k : k + 64, 0:64]))
    tile.store(first[0:64, 0:64], between)
    tile.store(left_sums[0:64, 0:64], x)
    tile.store(right_sums[0:64, 0:64], y)


def _make_continued() -> Case:
    name = "tile/products/continued-bf16"
    a, b, c = (_signs(f"{name}-{i}", s, "bf16") for i, s in enumerate(((64, 64), (128, 64), (128, 64))))
    outs = {k: np.zeros((64, 64), np.float32) for k in ("first", "left_sums", "right_sums")}
    return Case(name, lambda: (continued_products, {"a": a, "b": b, "c": c, **outs}), grid=(1,), exact=True)


@ts.kernel
def exchanged_sums(a, b, c, first, second):
    """Two sums change places in each round: each product adds to the registers that the other one's result needs."""
    rows = tile.load(a[0:64, 0:64])
    x, y = tile.zeros((64, 64), ts.f32), tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, b.shape[0], 64):
        left, right = tile.load(b[k : k + 64, 0:64]), tile.load(c[k : k + 64, 0:64])
        x, y = y + tile.dot(rows, left), x + tile.dot(rows, right)
    tile.store(first[0:64, 0:64], x)
    tile.store(second[0:64, 0:64], y)


@ts.kernel
def forked_sums(a, b, c, first, second):
    """One sum goes on in two products: the first has registers of its own, the second goes on in those of the sum."""
    rows = tile.load(a[0:64, 0:64])
    x, y = tile.zeros((64, 64), ts.f32), tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, b.shape[0], 64):
        y = x + tile.dot(rows, tile.load(b[k : k + 64, 0:64]))
        x = x + tile.dot(rows, tile.load(c[k : k + 64, 0:64]))
    tile.store(first[0:64, 0:64], x)
    tile.store(second[0:64, 0:64], y)


@ts.kernel
def shared_sums(a, b, c, first, second):
    """A sum is kept as it is while the next product of the round goes on from it, and two sums are one."""
    rows = tile.load(a[0:64, 0:64])
    x, y, z = tile.zeros((64, 64), ts.f32), tile.zeros((64, 64), ts.f32), tile.zeros((64, 64), ts.f32)
    for k in tile.range(0, b.shape[0], 64):
        y = z + tile.dot(rows, tile.load(b[k : k + 64, 0:64]))
        z = y + tile.dot(rows, tile.load(c[k : k + 64, 0:64]))
        x = z
    tile.store(first[0:64, 0:64], x + z)
    tile.store(second[0:64, 0:64], y)


def _make_carried(kernel: Any) -> Case:
    name = f"tile/products/{kernel.__name__.replace('_', '-')}-bf16"
    a, b, c = (_signs(f"{name}-{i}", s, "bf16") for i, s in enumerate(((64, 64), (192, 64), (192, 64))))
    outs = {k: np.zeros((64, 64), np.float32) for k in ("first", "second")}
    return Case(name, lambda: (kernel, {"a": a, "b": b, "c": c, **outs}), grid=(1,), exact=True)


def _signs(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """-1, 0 and 1: sums of fewer than 256 products are integers that bf16 represents."""
    return np.rint(tensor(name, shape, "f32", -1, 1)).astype(as_dtype(dtype).numpy)


def _whole(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Integers from -3 to 3; for an unsigned type from 128 on, so that a signed interpretation is detected."""
    found = np.rint(tensor(name, shape, "f32", -3, 3))
    return (found + 200 if dtype == "uint8" else found).astype(as_dtype(dtype).numpy)
