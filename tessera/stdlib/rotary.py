"""Rotary position embedding (Su et al. 2021): pairs of features turned by an angle that grows with the position."""

# mypy: disable-error-code="operator, attr-defined, index"

from typing import Any

import numpy as np

from tessera.errors import ArgumentError, ShapeError, outside
from tessera.kernel import kernel, tile
from tessera.stdlib.routine import array, blocks, routine, shaped, wide


@kernel
def rotate(x, cos, sin, out, *, interleaved: bool, BM: int = 64):
    """out[b, s] = x[b, s] turned by the angles of cos[s] and sin[s], on the grid (ceil(S / BM), B).

    x and out are [B, S, D], cos and sin [S, D / 2] of f32 (f64 for f64). Feature i goes with feature i + D/2 or,
    `interleaved`, 2i with 2i + 1.
    """
    first, b = tile.program_id(0) * BM, tile.program_id(1)
    S, half = x.shape[1], x.shape[2] // 2
    rows = (first + tile.arange(0, BM))[:, None]
    i = tile.arange(0, half)[None, :]
    left, right = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
    there = tile.broadcast(rows < S, (BM, half))
    c = tile.load(cos[first : first + BM, :], edge="clip")
    s = tile.load(sin[first : first + BM, :], edge="clip")
    p = tile.cast(tile.load(x[b, rows, left], mask=there), wide(x.dtype))
    q = tile.cast(tile.load(x[b, rows, right], mask=there), wide(x.dtype))
    tile.store(out[b, rows, left], tile.cast(p * c - q * s, out.dtype), mask=there)
    tile.store(out[b, rows, right], tile.cast(q * c + p * s, out.dtype), mask=there)


@routine(rotate)
def rotary_embedding(
    kernel: Any, x: Any, cos: Any = None, sin: Any = None, *, offset: int = 0, base: float = 10000.0,
    interleaved: bool = False,
) -> np.ndarray:  # fmt: skip
    """Rotary position embedding of `x` [..., S, D], whose rows stand at positions offset, offset + 1, …

    `cos` and `sin` are tables [P, D / 2] with a row for each position (P at least offset + S); without them
    the angle of pair i at position p is p · base^(-2i / D). Pairs are (i, i + D/2) or, `interleaved`, (2i, 2i + 1).
    The result has the type and shape of `x`; it is computed in f32 (f64 for f64).

    Raises:
        ArgumentError: one table came without the other, or `offset` is negative.
        DTypeError: an argument is of no float type.
        ShapeError: D is odd, or a table does not fit.

    >>> quarter = np.array([[0.0]], np.float32), np.array([[1.0]], np.float32)
    >>> rotary_embedding(np.array([[3.0, 4.0]], np.float32), *quarter)
    array([[-4.,  3.]], dtype=float32)
    """
    x = array(x, "x")
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ShapeError(
            "features are turned in pairs", location=outside(), expected="[..., S, even D]", received=x.shape
        )
    (length, features), dtype = x.shape[-2:], np.float64 if x.dtype == np.float64 else np.float32
    if offset < 0 or (cos is None) != (sin is None):
        raise ArgumentError("rotary_embedding takes offset >= 0, and both of cos and sin or none", location=outside())
    tables = _tables(offset + length, features, base) if cos is None else (array(cos, "cos"), array(sin, "sin"))
    for name, table in zip(("cos", "sin"), tables, strict=True):
        shaped(table, name, (max(len(table), offset + length), features // 2))
    parts = [np.ascontiguousarray(t[offset : offset + length].astype(dtype)) for t in tables]
    flat = x.reshape(-1, length, features)
    out = np.empty_like(flat)
    if out.size:
        kernel[lambda constants: (blocks(length, constants["BM"]), len(flat))](
            flat, *parts, out, interleaved=interleaved
        )
    return out.reshape(x.shape)


def _tables(length: int, features: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the angles, formed in f64: in f32 those of far positions are off by whole degrees."""
    rates = base ** (-np.arange(0, features, 2, dtype=np.float64) / features)
    angles = np.arange(length, dtype=np.float64)[:, None] * rates
    return np.cos(angles), np.sin(angles)
