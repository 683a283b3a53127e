"""Products in loops, for matrix units: narrow types, both orientations, edges, epilogues.

The elements are small integers, whose sums every accumulator format represents: results are exact.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def _whole(name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Integers from -3 to 3; for an unsigned type from 128 on, so that a signed interpretation is detected."""
    found = np.rint(tensor(name, shape, "f32", -3, 3))
    return (found + 200 if dtype == "uint8" else found).astype(as_dtype(dtype).numpy)
