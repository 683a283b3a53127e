"""What debug mode costs over value mode, kernel by kernel, on the same arrays in the same run.

python -m benchmarks.debug_overhead [--cases vadd_1M,...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import tessera as ts
from benchmarks import tile_kernels as kernels
from benchmarks.machine import keep
from benchmarks.timing import measure
from tessera import tile


def _numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape, np.float32)


def vector_add() -> Callable[[], Any]:
    """2^20 elements in blocks of 1024."""
    x, y, out = _numbers(1 << 20), _numbers(1 << 20), np.zeros(1 << 20, np.float32)
    return lambda: kernels.vector_add[(1024,)](x, y, out, BLOCK=1024)


def softmax() -> Callable[[], Any]:
    """1024 rows of 1024."""
    x, out = _numbers(1024, 1024), np.zeros((1024, 1024), np.float32)
    return lambda: kernels.softmax[(1024,)](x, out, COLUMNS=1024)


def matmul() -> Callable[[], Any]:
    """512 cubed in blocks of 64."""
    a, b, out = _numbers(512, 512), _numbers(512, 512), np.zeros((512, 512), np.float32)
    return lambda: kernels.matmul[(8, 8)](a, b, out, BLOCK=64, K=512)


def flash() -> Callable[[], Any]:
    """4 heads of 512 rows of 64."""
    q, k, v = (_numbers(4, 512, 64) for _ in range(3))
    out = np.zeros_like(q)
    return lambda: kernels.flash[(8, 4)](q, k, v, out, BLOCK=64, D=64, SCALE=0.125)


def block_sum() -> Callable[[], Any]:
    """2^16 elements, a group of 128 tiles for each 128 of them, through shared memory."""
    x, out = _numbers(1 << 16), np.zeros(512, np.float32)
    return lambda: kernels.block_sum[(512,), 128](x, out, THREADS=128)


@ts.kernel
def permuted(x, places, out, BLOCK: ts.constexpr):
    """Elements to places that data says: nothing here is regular, so debug mode looks at each of them."""
    start = tile.program_id(0) * BLOCK
    tile.store(out, tile.load(places[start : start + BLOCK]), tile.load(x[start : start + BLOCK]))


def permutation() -> Callable[[], Any]:
    """2^18 elements, each to a place of its own."""
    x, places = _numbers(1 << 18), np.random.default_rng(1).permutation(1 << 18)
    out = np.zeros_like(x)
    return lambda: permuted[(256,)](x, places, out, BLOCK=1024)


@ts.kernel
def staged(x, out, BLOCK: ts.constexpr, STAGES: ts.constexpr):
    """Blocks through shared memory by asynchronous copies, one ahead."""
    rows = tile.alloc_shared((2, BLOCK), ts.f32)
    start = tile.program_id(0) * BLOCK * STAGES
    total = tile.zeros((BLOCK,), ts.f32)
    tile.cp_async(rows[0], x[start : start + BLOCK])
    tile.cp_commit_group()
    for step in tile.static_range(STAGES):
        if step + 1 < STAGES:
            ahead = start + (step + 1) * BLOCK
            tile.cp_async(rows[(step + 1) % 2], x[ahead : ahead + BLOCK])
            tile.cp_commit_group()
            tile.cp_wait_group(1)
        else:
            tile.cp_wait_group(0)
        total += tile.load(rows[step % 2])
    first = tile.program_id(0) * BLOCK
    tile.store(out[first : first + BLOCK], total)


def pipeline() -> Callable[[], Any]:
    """2^18 elements in 64 programs of 8 stages."""
    x, out = _numbers(1 << 18), np.zeros(1 << 15, np.float32)
    return lambda: staged[(64,)](x, out, BLOCK=512, STAGES=8)


@ts.kernel
def counted(x, out, BLOCK: ts.constexpr, STAGES: ts.constexpr):
    """As above, with the copies of each stage counted by an mbarrier."""
    rows, full = tile.alloc_shared((2, BLOCK), ts.f32), tile.mbarrier(1, 2)
    start = tile.program_id(0) * BLOCK * STAGES
    total = tile.zeros((BLOCK,), ts.f32)
    for step in tile.static_range(STAGES + 1):
        if step < STAGES:
            ahead = start + step * BLOCK
            full[step % 2].expect(4 * BLOCK)
            tile.cp_async(rows[step % 2], x[ahead : ahead + BLOCK], barrier=full[step % 2])
            full[step % 2].arrive()
        if step > 0:
            full[(step - 1) % 2].wait((step - 1) // 2 % 2)
            total += tile.load(rows[(step - 1) % 2])
    first = tile.program_id(0) * BLOCK
    tile.store(out[first : first + BLOCK], total)


def mbarrier_pipeline() -> Callable[[], Any]:
    """2^18 elements in 64 programs of 8 stages."""
    x, out = _numbers(1 << 18), np.zeros(1 << 15, np.float32)
    return lambda: counted[(64,)](x, out, BLOCK=512, STAGES=8)


@ts.kernel
def handed_on(x, out, BLOCK: ts.constexpr, ROUNDS: ts.constexpr):
    """One tile fills a ring of two buffers, the others of its group empty it: branches that wait for each other."""
    me, base = tile.local_id(), tile.program_id(0) * ROUNDS
    rows = tile.alloc_shared((2, BLOCK), ts.f32)
    full, empty = tile.mbarrier(1, 2), tile.mbarrier(tile.group_size() - 1, 2)
    tile.barrier()
    if me == 0:
        for k in tile.range(0, ROUNDS):
            empty[k % 2].wait((k // 2 + 1) % 2)
            rows[k % 2, 0:BLOCK] = x[base + k, 0:BLOCK]
            full[k % 2].arrive()
    else:
        total = tile.zeros((BLOCK,))
        for k in tile.range(0, ROUNDS):
            full[k % 2].wait((k // 2) % 2)
            total += rows[k % 2, 0:BLOCK]
            empty[k % 2].arrive()
        out[tile.program_id(0), me, 0:BLOCK] = total


def ring() -> Callable[[], Any]:
    """32 programs of 4 tiles, 16 rounds of 256 elements each."""
    x, out = _numbers(512, 256), np.zeros((32, 4, 256), np.float32)
    return lambda: handed_on[(32,), 4](x, out, BLOCK=256, ROUNDS=16)


@ts.kernel
def by_warps(x, out, THREADS: ts.constexpr):
    """As `block_sum`, warp by warp: each halves its part of shared memory five times, meeting after each."""
    me = tile.local_id()
    cells = tile.alloc_shared((THREADS,), ts.f32)
    cells[me] = x[tile.program_id(0) * THREADS + me]
    tile.warp.sync()
    for step in tile.static_range(5):
        if tile.lane_id() < 16 >> step:
            cells[me] = cells[me] + cells[me + (16 >> step)]
        tile.warp.sync()
    tile.barrier()
    if me == 0:
        total = 0.0
        for warp in tile.static_range(THREADS // 32):
            total += cells[32 * warp]
        out[tile.program_id(0)] = total


def warp_sum() -> Callable[[], Any]:
    """2^16 elements, a group of 128 tiles for each 128 of them, in stretches of 32."""
    x, out = _numbers(1 << 16), np.zeros(512, np.float32)
    return lambda: by_warps[(512,), 128](x, out, THREADS=128)


CASES = {
    "vadd_1M": vector_add,
    "softmax_1024x1024": softmax,
    "matmul_512_b64": matmul,
    "flash_f32": flash,
    "block_reduce_64K": block_sum,
    "warp_reduce_64K": warp_sum,
    "permutation_256K": permutation,
    "async_stages_256K": pipeline,
    "mbarrier_stages_256K": mbarrier_pipeline,
    "mbarrier_ring_128K": ring,
}


def compare(name: str) -> dict[str, Any]:
    """Seconds in value mode, in debug mode, and with advice too; the ratio of the best of the first two."""
    run = CASES[name]()
    value = measure(run)
    with ts.debug.checked() as report:
        debug = measure(run)
    with ts.debug.checked(lint=True):
        lint = measure(run)
    assert not report.findings, "a benchmark's kernel is wrong"
    return {"value": value, "debug": debug, "lint": lint, "ratio": debug["best"] / value["best"]}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="which, between commas")
    options = parser.parse_args()
    found = {name: compare(name) for name in options.cases.split(",")}
    table = Table("case", "value, ms", "debug, ms", "ratio", "with advice, ms")
    for name, row in found.items():
        times = [f"{row[k]['best'] * 1e3:.2f}" for k in ("value", "debug", "lint")]
        table.add_row(name, times[0], times[1], f"{row['ratio']:.1f}", times[2])
    Console().print(table)
    if set(found) == set(CASES):
        keep("debug_overhead", found)


if __name__ == "__main__":
    main()
