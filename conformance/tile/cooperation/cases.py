"""Warps, blocks and cooperative groups: reductions, votes, shuffles (programming model, chapter 8.3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def warp_primitives(x, out, votes):
    me = tile.local_id()
    value = x[me]
    out[0, me] = tile.warp.reduce_sum(value)
    out[1, me] = tile.warp.reduce_max(value)
    out[2, me] = tile.warp.reduce_min(value)
    out[3, me] = tile.warp.shuffle(value, lane_id=5)
    out[4, me] = tile.warp.butterfly(value, mask=0xF)
    out[5, me] = tile.warp.shuffle_up(value, 3)
    out[6, me] = tile.warp.shuffle_down(value, 2)
    out[7, me] = tile.warp.broadcast(value, 1)
    votes[0, me] = tile.warp.all(value > -3.0)
    votes[1, me] = tile.warp.any(value > 1.9)
    votes[2, me] = tile.warp.ballot(value > 0.0)
    votes[3, me] = tile.warp.match(me % 3)


@ts.kernel
def block_primitives(x, out):
    me, row = tile.local_id(), tile.program_id(0)
    value = x[row, me]
    tile.block.sync()
    group = tile.cooperative_group(size=8)
    out[0, row, me] = tile.block.reduce_sum(value)
    out[1, row, me] = tile.block.reduce_max(value)
    out[2, row, me] = group.reduce(value, op="sum")
    out[3, row, me] = tile.block.broadcast(value, src_thread=0)
    out[4, row, me] = group.shuffle(value, me * 3 + 1)


@ts.kernel
def blocks_of_values(x, out):
    me = tile.local_id()
    row = tile.load(x[me, 0:5])
    tile.store(out[0, me, 0:5], tile.warp.reduce_sum(row))
    tile.store(out[1, me, 0:5], tile.warp.shuffle_up(row))


@ts.kernel
def tree(x, out):
    me = tile.local_id()
    value, step = x[me], tile.group_size() // 2
    while step > 0:
        value += tile.block.shuffle(value, me ^ step)
        step //= 2
    out[me] = value


@ts.kernel
def whole_stretches(x, out):
    me = tile.local_id()
    if me < 8:
        out[me] = tile.cooperative_group(8).reduce(x[me])
    else:
        out[me] = tile.cooperative_group(8).shuffle(x[me], 0)


@ts.kernel
def sides_with_waits(x, out, N: ts.constexpr):
    """A tile writes a cell for another, which reads it: loops of each side of a branch wait, and give results."""
    me = tile.local_id()
    cell, full, empty = tile.alloc_shared((1,), ts.f32), tile.mbarrier(1), tile.mbarrier(1)
    tile.barrier()
    last = 0.0
    if me == 0:
        for k in tile.range(0, N):
            if k > 0:
                empty.wait((k - 1) % 2)
            cell[0] = x[k] * 2.0
            full.arrive()
            last += x[k]
    elif me == 1:
        for k in tile.range(0, N):
            full.wait(k % 2)
            last = last * 0.5 + cell[0]
            empty.arrive()
    out[me] = last


@ts.kernel
def one_after_another(x, out, N: ts.constexpr):
    """Each tile waits at a barrier of its own for the one before it; what a side gives is the same for its tiles."""
    me, done = tile.local_id(), tile.mbarrier(1, N)
    kept = tile.alloc_shared((N,), ts.f32)
    tile.barrier()
    weight = 1.0
    if me > 0:
        done[me - 1].wait(0)
        kept[me] = kept[me - 1] + x[me]
        weight = 2.0
    else:
        kept[me] = x[me]
    done[me].arrive()
    out[me] = kept[me] * weight


def cases() -> Iterator[Case]:
    """Each kernel above, at several group sizes."""
    for size in (16, 32, 64):
        x = {"x": tensor(f"warp{size}", (size,)), "out": np.zeros((8, size), "f4")}
        yield _make(f"warp-{size}", warp_primitives, {**x, "votes": np.zeros((4, size), "i8")}, (1,), size)
    for size in (8, 24, 64):
        arrays = {"x": tensor(f"block{size}", (2, size)), "out": np.zeros((5, 2, size), "f4")}
        yield _make(f"block-{size}", block_primitives, arrays, (2,), size)
    rows = {"x": tensor("rows", (64, 5)), "out": np.zeros((2, 64, 5), "f4")}
    yield _make("blocks-of-values", blocks_of_values, rows, (1,), 64)
    yield _make("tree", tree, {"x": tensor("tree", (16,)), "out": np.zeros(16, "f4")}, (1,), 16)
    yield _make("whole-stretches", whole_stretches, {"x": tensor("part", (16,)), "out": np.zeros(16, "f4")}, (1,), 16)
    alone = {"x": tensor("alone", (1, 1)), "out": np.zeros((5, 1, 1), "f4")}
    for name, kernel in (("sides-with-waits", sides_with_waits), ("one-after-another", one_after_another)):
        yield _make(name, kernel, {"x": tensor(name, (5,)), "out": np.zeros(5, "f4"), "N": 5}, (1,), 5)
    yield _make("one-tile", block_primitives, alone, (1,), 1)


def _make(name: str, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...], group: int) -> Case:
    return Case(f"tile/cooperation/{name}", lambda: (kernel, arguments), grid=grid, group=group)
