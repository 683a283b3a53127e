"""Layer norm forward, and backward in two kernels: sums of the weights' gradients by atomics, then their sum."""

from __future__ import annotations

import tessera as ts
from tessera import tile


@ts.kernel
def forward(x, weight, bias, y, mean, rstd, *, eps: float, BLOCK: int):
    """y = (x - mean) rstd weight + bias, row by row; mean and rstd are saved for the backward pass."""
    row, N = tile.program_id(0), x.shape[1]
    total = tile.zeros((BLOCK,), ts.f32)
    for start in tile.range(0, N, BLOCK):
        total += tile.cast(tile.load(x[row, start : start + BLOCK], edge="clip"), ts.f32)
    mu = tile.sum(total) / N
    total = tile.zeros((BLOCK,), ts.f32)
    for start in tile.range(0, N, BLOCK):
        cols = start + tile.arange(0, BLOCK)
        away = tile.cast(tile.load(x[row, start : start + BLOCK], edge="clip"), ts.f32) - mu
        away = tile.where(cols < N, away, 0.0)
        total += away * away
    scale = tile.rsqrt(tile.sum(total) / N + eps)
    mean[row], rstd[row] = mu, scale
    for start in tile.range(0, N, BLOCK):
        w = tile.cast(tile.load(weight[start : start + BLOCK], edge="clip"), ts.f32)
        b = tile.cast(tile.load(bias[start : start + BLOCK], edge="clip"), ts.f32)
        block = tile.cast(tile.load(x[row, start : start + BLOCK], edge="clip"), ts.f32)
        out = (block - mu) * scale * w + b
        tile.store(y[row, start : start + BLOCK], tile.cast(out, y.dtype), edge="clip")


@ts.kernel
def backward_rows(dy, x, weight, mean, rstd, dx, dw, db, *, BLOCK: int):
    """dx of each row; its terms of the gradients of weight and bias are added to one of S partial sums.

    dw and db are [S, N] and begin at zero: row r adds to sum r mod S, by atomics, since it is shared.
    """
    row, N, sums = tile.program_id(0), x.shape[1], dw.shape[0]
    cols = tile.arange(0, BLOCK)
    mask = cols < N
    g = tile.cast(tile.load(dy[row], cols, mask=mask), ts.f32)
    block = tile.cast(tile.load(x[row], cols, mask=mask), ts.f32)
    w = tile.cast(tile.load(weight, cols, mask=mask), ts.f32)
    scale = rstd[row]
    hat = tile.where(mask, (block - mean[row]) * scale, 0.0)
    wg = w * g
    c1, c2 = tile.sum(hat * wg) / N, tile.sum(wg) / N
    tile.store(dx[row], cols, tile.cast((wg - (hat * c1 + c2)) * scale, dx.dtype), mask=mask)
    part = row % sums
    safe = tile.where(mask, cols, 0)
    tile.atomic_add(dw[part, safe], g * hat, mask=mask)
    tile.atomic_add(db[part, safe], g, mask=mask)


@ts.kernel
def backward_sums(dw, db, weight_grad, bias_grad, *, BM: int, BN: int):
    """The sums of the columns of dw and db."""
    j = tile.program_id(0) * BN
    w, b = tile.zeros((BN,), ts.f32), tile.zeros((BN,), ts.f32)
    for i in tile.range(0, dw.shape[0], BM):
        w += tile.sum(tile.load(dw[i : i + BM, j : j + BN], edge="clip"), axis=0)
        b += tile.sum(tile.load(db[i : i + BM, j : j + BN], edge="clip"), axis=0)
    tile.store(weight_grad[j : j + BN], tile.cast(w, weight_grad.dtype), edge="clip")
    tile.store(bias_grad[j : j + BN], tile.cast(b, bias_grad.dtype), edge="clip")
