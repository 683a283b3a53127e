"""Other parts of the kernel language: inline text, mbarriers, rounding, levels, segments, dropout, block scales."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from conformance.tile.language import policies, prints
from tessera import tile
from tessera.core.errors import ExecutionError
from tessera.stdlib import attention


def magnitude(x):
    return np.abs(x)


def bits(x):
    return x.view(np.int32)


@ts.kernel
def inline_text(x, out, words):
    a = tile.load(x)
    out[...] = tile.inline(
        a, python=magnitude, llvm="{out} = call {t} @llvm.fabs.{s}({t} {0})", ptx="abs.f32 {out}, {0};"
    )
    words[...] = tile.inline(
        a, python=bits, llvm="{out} = bitcast {t0} {0} to {t}", ptx="mov.b32 {out}, {0};", dtype=ts.int32
    )


@ts.kernel
def pipeline(x, out, N: ts.constexpr):
    """One tile copies a row, all wait for its bytes; the parity changes with each row."""
    me, first = tile.local_id(), tile.program_id(0) * 3 * N
    buffer, arrived = tile.alloc_shared((2, N), ts.f32), tile.mbarrier(1, 2)
    tile.barrier()
    for k in tile.range(0, 3):
        if me == 0:
            arrived[k % 2].expect(4 * N)
            tile.cp_async(buffer[k % 2, 0:N], x[first + k * N : first + k * N + N], barrier=arrived[k % 2])
            arrived[k % 2].arrive()
        arrived[k % 2].wait(k // 2)
        out[first + k * N + me] = buffer[k % 2, N - 1 - me] * 2.0
        tile.barrier()


@ts.kernel
def ring(x, out, N: ts.constexpr):
    """Tile 0 fills a ring of two buffers, the others empty it: branches that wait for each other."""
    me = tile.local_id()
    buffer = tile.alloc_shared((2, 8), ts.f32)
    full, empty = tile.mbarrier(1, 2), tile.mbarrier(tile.group_size() - 1, 2)
    tile.barrier()
    if me == 0:
        for k in tile.range(0, N):
            empty[k % 2].wait((k // 2 + 1) % 2)
            buffer[k % 2, 0:8] = x[k, 0:8]
            full[k % 2].arrive()
    else:
        total = tile.zeros((8,))
        for k in tile.range(0, N):
            full[k % 2].wait((k // 2) % 2)
            total = total + buffer[k % 2, 0:8] * tile.cast(me, ts.f32)
            empty[k % 2].arrive()
        out[me - 1, 0:8] = total


@ts.kernel
def never(x):
    bar = tile.mbarrier(9)
    tile.barrier()
    bar.arrive()
    bar.wait(0)
    x[tile.local_id()] = 1.0


@ts.kernel
def stretches(x, out):
    """The two halves of a group take different branches; each quarter has its own barrier."""
    me, quarter = tile.local_id(), tile.cooperative_group(4)
    shared = tile.alloc_shared((16,), ts.f32, padding=1, swizzle="xor", alignment=32)
    shared[me] = x[me]
    if me < 8:
        quarter.sync()
        out[me] = shared[me - me % 4 + (me + 1) % 4]
    else:
        quarter.sync()
        out[me] = shared[me - me % 4 + (me + 2) % 4] * 2.0


@ts.kernel
def roundings(x, half, brain, byte):
    block = tile.load(x)
    tile.store(half, tile.cast(block, ts.f16, rounding="rtz"))
    tile.store(brain, tile.cast(block, ts.bf16, rounding="rtz", saturate=True))
    tile.store(byte, tile.cast(block, ts.int8, saturate=True))


@ts.kernel
def mixed_sums(A, B, wide, narrow, C, D, whole):
    a, b = tile.load(A), tile.load(B)
    tile.store(wide, tile.mma_mixed(a, b, accumulate=ts.f32, saturate=True))
    tile.store(narrow, tile.mma(a, b, accumulate=ts.bf16))
    tile.store(whole, tile.mma_mixed(tile.load(C), tile.load(D), accumulate=ts.int8, saturate=True))


@ts.kernel
def flat_fragments(x, out):
    part, total = tile.fragment.a((4, 6), ts.f32), tile.fragment.c((4, 4), ts.f32)
    tile.load_matrix(part, x[2:], stride=7)
    tile.mma(total, part, tile.transpose(tile.load(part)), total)
    tile.store_matrix(out, total, stride=4)


@ts.kernel
def parts(x, out):
    for part in tile.split(x, shape=(3, 4)):
        out[0:3, 0:4] = tile.load(out[0:3, 0:4]) + tile.load(part)


@ts.kernel
def said(x, out):
    i = tile.program_id(0)
    tile.assert_(tile.load(x[i, :]) < 3.0, "too large")
    out[i] = tile.sum(tile.load(x[i, :]))


@ts.kernel
def four_axes(x, out):
    a, b, c, d = tile.program_id(0), tile.program_id(1), tile.program_id(2), tile.program_id(3)
    out[a, b, c, d] = x[d, c, b, a] * tile.cast(1 + tile.group_id() % 7, ts.f32)


@ts.kernel
def long_axis(out):
    i, j = tile.program_id(0), tile.program_id(1)
    out[i, j] = 2 * i + j


def cases() -> Iterator[Case]:
    """Each kernel above, attention with dropout, prints and policies."""
    x = tensor("language", (21,))
    yield _make("inline", inline_text, (x, np.zeros(21, "f4"), np.zeros(21, "i4")), exact=True)
    yield _make("mbarrier", pipeline, (tensor("pipe", (48,)), np.zeros(48, "f4"), 8), (2,), 8)
    yield _make("mbarrier-ring", ring, (tensor("ring", (5, 8)), np.zeros((3, 8), "f4"), 5), (1,), 4)
    yield _make("mbarrier-deadlock", never, (np.zeros(4, "f4"),), (1,), 4, ExecutionError, ("deadlock", "program (0,)"))
    yield _make("stretches", stretches, (tensor("quarter", (16,)), np.zeros(16, "f4")), (1,), 16)
    wide = tensor("rounded", (40,), low=-9e4, high=9e4)
    empty = tuple(np.zeros(40, d) for d in ("f2", ts.bf16.numpy, "i1"))
    yield _make("roundings", roundings, (wide, *empty))
    yield _make("mixed-sums", mixed_sums, _mixed())
    yield _make("flat-fragments", flat_fragments, (tensor("flat", (40,)), np.zeros((4, 4), "f4")))
    yield _make("split-shape", parts, (tensor("split", (9, 8)), np.zeros((3, 4), "f4")))
    turned = tensor("turned", (3, 2, 5, 4)), np.zeros((4, 5, 2, 3), "f4")
    yield _make("grid-of-four-axes", four_axes, turned, (4, 5, 2, 3))
    yield _make("grid-of-a-long-axis", long_axis, (np.zeros((70_000, 2), "i8"),), (70_000, 2), exact=True)
    yield _make("assertion", said, (tensor("said", (4, 5)), np.zeros(4, "f4")), (4,))
    yield _make(
        "assertion-fails", said, (tensor("said", (4, 5)) + 4, np.zeros(4, "f4")), (4,), None, ExecutionError,
        ("too large", "program (0,), element ("),
    )  # fmt: skip
    q, k, v = (tensor(f"drop{n}", (2, h, s, 8)) for n, h, s in (("q", 4, 9), ("k", 2, 21), ("v", 2, 21)))
    given = {"q": q, "k": k, "v": v, "mask": None, "lengths": None, "out": np.zeros_like(q), "seed": np.array([11])}
    blocks = {"causal": True, "scale": 0.35, "BM": 8, "BN": 8, "p_drop": 0.25}
    yield _make("attention-dropout", attention.attend, {**given, **blocks}, (2, 4, 2))
    yield from prints.cases()
    yield from policies.cases()


def _mixed() -> tuple[np.ndarray, ...]:
    floats = tensor("mixa", (8, 16), "f16"), tensor("mixb", (16, 8), "bf16")
    sums = np.zeros((8, 8), "f4"), np.zeros((8, 8), ts.bf16.numpy)
    integers = tensor("mixc", (8, 16), "int8", -9, 9), tensor("mixd", (16, 8), "int8", -9, 9)
    return (*floats, *sums, *integers, np.zeros((8, 8), "i1"))


def _make(
    name: str, kernel: Any, given: Any, grid: tuple[int, ...] = (1,), group: int | None = None, rejects: Any = None,
    says: tuple[str, ...] = (), exact: bool = False,
) -> Case:  # fmt: skip
    entry = lambda: (kernel, given)  # noqa: E731
    return Case(f"tile/language/{name}", entry, grid, group, exact=exact, rejects=rejects, says=says)
