"""The kernels that interpreters are compared on, in Tessera's language."""

from __future__ import annotations

import tessera as ts
from tessera import tile


@ts.kernel
def vector_add(x, y, out, BLOCK: ts.constexpr):
    start = tile.program_id(0) * BLOCK
    tile.store(out[start : start + BLOCK], tile.load(x[start : start + BLOCK]) + tile.load(y[start : start + BLOCK]))


@ts.kernel
def softmax(x, out, COLUMNS: ts.constexpr):
    row = tile.program_id(0)
    values = tile.load(x[row, 0:COLUMNS])
    e = ts.exp(values - tile.max(values, axis=0))
    tile.store(out[row, 0:COLUMNS], e / tile.sum(e, axis=0))


@ts.kernel
def matmul(a, b, c, BLOCK: ts.constexpr, K: ts.constexpr):
    m, n = tile.program_id(0) * BLOCK, tile.program_id(1) * BLOCK
    acc = tile.zeros((BLOCK, BLOCK), ts.f32)
    for k in tile.range(0, K, BLOCK):
        acc += tile.dot(tile.load(a[m : m + BLOCK, k : k + BLOCK]), tile.load(b[k : k + BLOCK, n : n + BLOCK]))
    tile.store(c[m : m + BLOCK, n : n + BLOCK], acc)


@ts.kernel
def flash(q, k, v, out, BLOCK: ts.constexpr, D: ts.constexpr, SCALE: ts.constexpr):
    first, head = tile.program_id(0), tile.program_id(1)
    rows = first * BLOCK + tile.arange(0, BLOCK)
    query = tile.load(q[head, first * BLOCK : first * BLOCK + BLOCK, 0:D])
    top = tile.full((BLOCK,), float("-inf"), ts.f32)
    total = tile.zeros((BLOCK,), ts.f32)
    acc = tile.zeros((BLOCK, D), ts.f32)
    for j in tile.range(0, first + 1):
        start = j * BLOCK
        columns = start + tile.arange(0, BLOCK)
        s = tile.dot(query, tile.transpose(tile.load(k[head, start : start + BLOCK, 0:D]))) * SCALE
        s = ts.where(rows[:, None] >= columns[None, :], s, float("-inf"))
        new = ts.maximum(top, tile.max(s, axis=1))
        p = ts.exp(s - new[:, None])
        decay = ts.exp(top - new)
        values = tile.load(v[head, start : start + BLOCK, 0:D])
        total = total * decay + tile.sum(p, axis=1)
        acc = acc * decay[:, None] + tile.dot(tile.cast(p, v.dtype), values)
        top = new
    tile.store(out[head, first * BLOCK : first * BLOCK + BLOCK, 0:D], tile.cast(acc / total[:, None], out.dtype))


@ts.kernel
def block_sum(x, out, THREADS: ts.constexpr):
    block, me = tile.program_id(0), tile.local_id()
    shared = tile.alloc_shared((THREADS,), ts.f32)
    shared[me] = x[block * THREADS + me]
    tile.barrier()
    stride = THREADS // 2
    while stride > 0:
        if me < stride:
            shared[me] = shared[me] + shared[me + stride]
        tile.barrier()
        stride //= 2
    if me == 0:
        out[block] = shared[0]
