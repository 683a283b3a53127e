"""Kernels of block-quantised products: blocks are dequantised in the program that multiplies them (GGML's formats).

On processors a row of W is one reduction in registers, or is decoded once for many rows of x; on GPUs the lanes of a
warp decode adjacent blocks. Operands are those of `tessera.stdlib.quantised`; `low` may be None.
"""

from __future__ import annotations

from typing import Any

from tessera.core.types import f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile

# mypy: disable-error-code="operator, attr-defined, index"

# Processors.


@kernel
def packed_rows(x, codes, scale, low, out, *, BN: int = 16):
    """out[m] = W x[m] for few rows m: the grid is (ceil(N / BN),); x is [M, blocks, 2, 16], codes [N, 16 · blocks].

    A row of W is one reduction, whose sum stays in a register. The scales are converted once, and the low values are
    multiplied by the sums of the blocks of x: Σ (code · scale + low) x = Σ scale Σ code · x + Σ low Σ x.
    """
    n, rows, count = tile.program_id(0) * BN, x.shape[0], x.shape[1]
    held = tile.alloc_register((BN, count), f32)
    tile.store(held[0:BN, 0:count], tile.cast(tile.load(scale[n : n + BN, 0:count], edge="clip"), f32))
    c = tile.reshape(tile.load(codes[n : n + BN, 0 : count * 16], edge="clip"), (BN, count, 16))
    first, second = (tile.load(x[0:rows, 0:count, half, 0:16]) for half in (0, 1))
    t = tile.cast(c & 15, f32)[None] * first[:, None] + tile.cast(c >> 4, f32)[None] * second[:, None]
    y = tile.sum(tile.sum(t * tile.load(held[0:BN, 0:count])[None, :, :, None], axis=2), axis=2)
    if low is not None:
        totals = tile.alloc_register((rows, count), f32)
        tile.store(totals[0:rows, 0:count], tile.sum(first + second, axis=2))
        below = tile.cast(tile.load(low[n : n + BN, 0:count], edge="clip"), f32)
        y += tile.sum(below[None] * tile.load(totals[0:rows, 0:count])[:, None], axis=2)
    tile.store(out[0:rows, n : n + BN], tile.cast(y, out.dtype), edge="clip")


@kernel
def byte_rows(x, codes, scale, low, out, *, BN: int = 16):
    """As `packed_rows` for codes of one byte: x is [M, blocks, block], codes [N, blocks, block]."""
    n, rows, count, size = tile.program_id(0) * BN, x.shape[0], x.shape[1], x.shape[2]
    held = tile.alloc_register((BN, count), f32)
    tile.store(held[0:BN, 0:count], tile.cast(tile.load(scale[n : n + BN, 0:count], edge="clip"), f32))
    c = tile.load(codes[n : n + BN, 0:count, 0:size], edge="clip")
    v = tile.load(x[0:rows, 0:count, 0:size])
    t = tile.cast(c, f32)[None] * v[:, None] * tile.load(held[0:BN, 0:count])[None, :, :, None]
    y = tile.sum(tile.sum(t, axis=2), axis=2)
    if low is not None:
        totals = tile.alloc_register((rows, count), f32)
        tile.store(totals[0:rows, 0:count], tile.sum(v, axis=2))
        below = tile.cast(tile.load(low[n : n + BN, 0:count], edge="clip"), f32)
        y += tile.sum(below[None] * tile.load(totals[0:rows, 0:count])[:, None], axis=2)
    tile.store(out[0:rows, n : n + BN], tile.cast(y, out.dtype), edge="clip")


@kernel
def packed_product(xt, codes, scale, low, out, *, BM: int = 32, BN: int = 32, BB: int = 2):
    """out = W x for many columns: the grid is (ceil(N / BN), ceil(M / BM)); xt is [K, M], out [N, M].

    Each step decodes BB blocks of BN rows of W to f32 once, and multiplies them with all BM columns as matrices.
    """
    n, m, count = tile.program_id(0) * BN, tile.program_id(1) * BM, scale.shape[1]
    held, below = tile.alloc_register((BN, count), f32), tile.alloc_register((BN, count), f32)
    tile.store(held[0:BN, 0:count], tile.cast(tile.load(scale[n : n + BN, 0:count], edge="clip"), f32))
    if low is not None:
        tile.store(below[0:BN, 0:count], tile.cast(tile.load(low[n : n + BN, 0:count], edge="clip"), f32))
    decoded = tile.alloc_register((BN, BB, 2, 16), f32)
    acc = tile.zeros((BN, BM), f32)
    for b in tile.range(0, count, BB):
        c = tile.reshape(tile.load(codes[n : n + BN, b * 16 : (b + BB) * 16], edge="clip"), (BN, BB, 16))
        s = tile.load(held[0:BN, b : b + BB], edge="clip")[:, :, None]
        least: Any = 0.0 if low is None else tile.load(below[0:BN, b : b + BB], edge="clip")[:, :, None]
        tile.store(decoded[0:BN, 0:BB, 0, 0:16], tile.cast(c & 15, f32) * s + least)
        tile.store(decoded[0:BN, 0:BB, 1, 0:16], tile.cast(c >> 4, f32) * s + least)
        w = tile.reshape(tile.load(decoded[0:BN, 0:BB, 0:2, 0:16]), (BN, BB * 32))
        acc += tile.dot(w, tile.load(xt[b * 32 : (b + BB) * 32, m : m + BM], edge="clip"))
    tile.store(out[n : n + BN, m : m + BM], tile.cast(acc, out.dtype), edge="clip")


@kernel
def byte_product(xt, codes, scale, low, out, *, BM: int = 32, BN: int = 32, BB: int = 2):
    """As `packed_product` for codes of one byte, [N, blocks, block]."""
    n, m, count, size = tile.program_id(0) * BN, tile.program_id(1) * BM, codes.shape[1], codes.shape[2]
    held, below = tile.alloc_register((BN, count), f32), tile.alloc_register((BN, count), f32)
    tile.store(held[0:BN, 0:count], tile.cast(tile.load(scale[n : n + BN, 0:count], edge="clip"), f32))
    if low is not None:
        tile.store(below[0:BN, 0:count], tile.cast(tile.load(low[n : n + BN, 0:count], edge="clip"), f32))
    decoded = tile.alloc_register((BN, BB, size), f32)
    acc = tile.zeros((BN, BM), f32)
    for b in tile.range(0, count, BB):
        c = tile.cast(tile.load(codes[n : n + BN, b : b + BB, 0:size], edge="clip"), f32)
        s = tile.load(held[0:BN, b : b + BB], edge="clip")[:, :, None]
        least: Any = 0.0 if low is None else tile.load(below[0:BN, b : b + BB], edge="clip")[:, :, None]
        tile.store(decoded[0:BN, 0:BB, 0:size], c * s + least)
        w = tile.reshape(tile.load(decoded[0:BN, 0:BB, 0:size]), (BN, BB * size))
        acc += tile.dot(w, tile.load(xt[b * size : (b + BB) * size, m : m + BM], edge="clip"))
    tile.store(out[n : n + BN, m : m + BM], tile.cast(acc, out.dtype), edge="clip")


# GPUs.


@kernel
def gpu_packed_rows(x, codes, scale, low, out, *, BN: int = 32, BB: int = 1):
    """out[m] = W x[m] for few rows m: the grid is (ceil(N / BN),); x is [M, blocks, 2, 16], codes [N, 16 · blocks].

    Each step decodes BB blocks of BN rows once, and multiplies them with all rows of x.
    """
    n = tile.program_id(0) * BN
    acc = tile.zeros((x.shape[0], BN, BB, 16), f32)
    for b in tile.range(0, x.shape[1], BB):
        c = tile.reshape(tile.load(codes[n : n + BN, b * 16 : (b + BB) * 16], edge="clip"), (BN, BB, 16))
        s = tile.cast(tile.load(scale[n : n + BN, b : b + BB], edge="clip"), f32)[None, :, :, None]
        first = tile.load(x[0 : x.shape[0], b : b + BB, 0, 0:16], edge="clip")[:, None, :, :]
        second = tile.load(x[0 : x.shape[0], b : b + BB, 1, 0:16], edge="clip")[:, None, :, :]
        t = tile.cast(c & 15, f32)[None] * first + tile.cast(c >> 4, f32)[None] * second
        if low is None:
            acc += t * s
        else:
            below = tile.cast(tile.load(low[n : n + BN, b : b + BB], edge="clip"), f32)[None, :, :, None]
            acc += t * s + below * (first + second)
    y = tile.sum(tile.sum(acc, axis=2), axis=2)
    tile.store(out[0 : x.shape[0], n : n + BN], tile.cast(y, out.dtype), edge="clip")


@kernel
def gpu_byte_rows(x, codes, scale, low, out, *, BN: int = 32, BB: int = 1):
    """As `gpu_packed_rows` for codes of one byte: x is [M, blocks, block], codes [N, blocks, block]."""
    n = tile.program_id(0) * BN
    size = x.shape[2]
    acc = tile.zeros((x.shape[0], BN, BB, size), f32)
    for b in tile.range(0, x.shape[1], BB):
        c = tile.load(codes[n : n + BN, b : b + BB, 0:size], edge="clip")
        s = tile.cast(tile.load(scale[n : n + BN, b : b + BB], edge="clip"), f32)[None, :, :, None]
        v = tile.load(x[0 : x.shape[0], b : b + BB, 0:size], edge="clip")[:, None, :, :]
        if low is None:
            acc += tile.cast(c, f32)[None] * v * s
        else:
            below = tile.cast(tile.load(low[n : n + BN, b : b + BB], edge="clip"), f32)[None, :, :, None]
            acc += (tile.cast(c, f32)[None] * s + below) * v
    y = tile.sum(tile.sum(acc, axis=2), axis=2)
    tile.store(out[0 : x.shape[0], n : n + BN], tile.cast(y, out.dtype), edge="clip")


@kernel
def gpu_packed_product(x, codes, scale, low, out, *, BM: int = 64, BN: int = 64, BB: int = 4):
    """out = x Wᵀ for many rows: the grid is (ceil(M / BM), ceil(N / BN)); operands as for `gpu_packed_rows`.

    Each step decodes BB blocks of BN rows to f32, and multiplies them as two matrices, of the low and the high halves.
    """
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), f32)
    for b in tile.range(0, x.shape[1], BB):
        c = tile.reshape(tile.load(codes[n : n + BN, b * 16 : (b + BB) * 16], edge="clip"), (BN, BB, 16))
        s = tile.cast(tile.load(scale[n : n + BN, b : b + BB], edge="clip"), f32)[:, :, None]
        below: Any = 0.0
        if low is not None:
            below = tile.cast(tile.load(low[n : n + BN, b : b + BB], edge="clip"), f32)[:, :, None]
        first = tile.reshape(tile.cast(c & 15, f32) * s + below, (BN, BB * 16))
        second = tile.reshape(tile.cast(c >> 4, f32) * s + below, (BN, BB * 16))
        left = tile.reshape(tile.load(x[m : m + BM, b : b + BB, 0, 0:16], edge="clip"), (BM, BB * 16))
        right = tile.reshape(tile.load(x[m : m + BM, b : b + BB, 1, 0:16], edge="clip"), (BM, BB * 16))
        acc += tile.dot(left, tile.transpose(first)) + tile.dot(right, tile.transpose(second))
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


@kernel
def gpu_byte_product(x, codes, scale, low, out, *, BM: int = 64, BN: int = 64, BB: int = 4):
    """As `gpu_packed_product` for codes of one byte; operands as for `gpu_byte_rows`."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    size = x.shape[2]
    acc = tile.zeros((BM, BN), f32)
    for b in tile.range(0, x.shape[1], BB):
        c = tile.cast(tile.load(codes[n : n + BN, b : b + BB, 0:size], edge="clip"), f32)
        w = c * tile.cast(tile.load(scale[n : n + BN, b : b + BB], edge="clip"), f32)[:, :, None]
        if low is not None:
            w = w + tile.cast(tile.load(low[n : n + BN, b : b + BB], edge="clip"), f32)[:, :, None]
        left = tile.reshape(tile.load(x[m : m + BM, b : b + BB, 0:size], edge="clip"), (BM, BB * size))
        acc += tile.dot(left, tile.transpose(tile.reshape(w, (BN, BB * size))))
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")
