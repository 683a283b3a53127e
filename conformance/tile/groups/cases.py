"""Groups of tiles: shared memory, barriers, divergence within a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def block_sum(x, out, N: ts.constexpr):
    block, me = tile.program_id(0), tile.local_id()
    shared = tile.alloc_shared((N,), ts.f32)
    shared[me] = x[block * N + me]
    tile.barrier()
    stride = N // 2
    while stride > 0:
        if me < stride:
            shared[me] = shared[me] + shared[me + stride]
        tile.barrier()
        stride //= 2
    if me == 0:
        out[block] = shared[0]


@ts.kernel
def cooperative_reduction(data: ts.Tensor["N", ts.f32]) -> ts.f32:
    shared_sum = tile.alloc_shared((32,), ts.f32)
    local_sum = 0.0
    for i in tile.range(tile.local_id(), N, tile.group_size()):  # noqa: F821
        local_sum += data[i]
    shared_sum[tile.local_id()] = local_sum
    tile.barrier()
    stride = tile.group_size() // 2
    while stride > 0:
        if tile.local_id() < stride:
            shared_sum[tile.local_id()] += shared_sum[tile.local_id() + stride]
        tile.barrier()
        stride //= 2
    return shared_sum[0]


@ts.kernel
def mirrored(x, out, N: ts.constexpr):
    block, me = tile.program_id(0), tile.local_id()
    shared = tile.alloc_shared((N,), ts.f32)
    shared[me] = x[block * N + me] * 2.0
    tile.barrier()
    out[block * N + me] = shared[N - 1 - me]


@ts.kernel
def prefix(x, out, N: ts.constexpr):
    me = tile.local_id()
    buffers = tile.alloc_shared((2, N), ts.f32)
    buffers[0, me] = x[me]
    tile.barrier()
    source, distance = 0, 1
    while distance < N:
        value = buffers[source, me]
        if me >= distance:
            value += buffers[source, me - distance]
        buffers[1 - source, me] = value
        tile.barrier()
        source = 1 - source
        distance *= 2
    out[me] = buffers[source, me]


@ts.kernel
def odd_and_even(out, N: ts.constexpr):
    me = tile.local_id()
    value = me
    if me % 2 == 0:
        value = me * 10
    else:
        for _step in tile.range(0, me):
            value += 1
    out[tile.program_id(0) * N + me] = value


@ts.kernel
def stretched(x, out, W: ts.constexpr):
    me = tile.linear_id()
    part = tile.cooperative_group(W)
    out[me] = part.reduce_sum(x[me]) - part.broadcast(x[me], W - 1) + part.shuffle_down(x[me], 3)


@ts.kernel
def chosen_stretches(x, out, W: ts.constexpr):
    """Conditions that are the same in a stretch, and differ between stretches of a group and between programs."""
    me, part = tile.linear_id(), tile.cooperative_group(W)
    value = x[me]
    if x[me - tile.local_id() % W] > 0.0:
        value = part.reduce_max(value) + part.shuffle_down(value, 1)
        part.sync()
    elif (tile.local_id() // W) % 2 == 0:
        value = part.broadcast(value, W - 1)
    out[me] = value


def cases() -> Iterator[Case]:
    """Each kernel above, at a few group sizes."""
    for size in (2, 8, 32):
        x = tensor(f"sum{size}", (3 * size,))
        yield _make(f"block-sum-{size}", block_sum, {"x": x, "out": np.zeros(3, "f4"), "N": size}, (3,), size)
    yield _make("cooperative-reduction", cooperative_reduction, {"data": tensor("coop", (101,))}, (1,), 32)
    yield _make("mirrored", mirrored, {"x": tensor("mirror", (32,)), "out": np.zeros(32, "f4"), "N": 16}, (2,), 16)
    yield _make("prefix-sum", prefix, {"x": tensor("prefix", (16,)), "out": np.zeros(16, "f4"), "N": 16}, (1,), 16)
    for size, width in ((64, 64), (48, 24), (120, 40), (1024, 64)):
        given = {"x": tensor(f"stretch{size}", (2 * size,)), "out": np.zeros(2 * size, "f4"), "W": width}
        yield _make(f"stretches-of-{width}-in-{size}", stretched, given, (2,), size)
    for size, width in ((8, 2), (48, 12), (64, 16)):
        given = {"x": tensor(f"chosen{size}", (3 * size,)), "out": np.zeros(3 * size, "f4"), "W": width}
        yield _make(f"chosen-stretches-of-{width}-in-{size}", chosen_stretches, given, (3,), size)
    yield _make("odd-and-even", odd_and_even, {"out": np.zeros(16, "i8"), "N": 8}, (2,), 8)


def _make(name: str, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...], group: int) -> Case:
    return Case(f"tile/groups/{name}", lambda: (kernel, arguments), grid=grid, group=group)
