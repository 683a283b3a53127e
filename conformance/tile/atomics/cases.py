"""Atomic updates of tensors and of shared memory, whose results do not depend on their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile
from tessera.core.types import as_dtype


@ts.kernel
def combined(x, total, N: ts.constexpr):
    i = tile.program_id(0)
    block = tile.load(x[i, 0:N])
    place = tile.arange(0, N) % 3
    tile.atomic_add(total[0, place], block)
    tile.atomic_max(total[1, place], block)
    tile.atomic_min(total[2, place], block, mask=block < 2)


@ts.kernel
def bits(x, words):
    me = tile.linear_id()
    tile.atomic_and(words[0], x[me])
    tile.atomic_or(words[1], x[me])
    tile.atomic_xor(words[2], x[me])


@ts.kernel
def shared_histogram(x, out, B: ts.constexpr, N: ts.constexpr):
    me, counts = tile.local_id(), tile.alloc_shared((B,), ts.int32)
    if me < B:
        counts[me] = 0
    tile.barrier()
    for i in tile.range(me, N, tile.group_size()):
        tile.atomic_add(counts[x[i]], 1)
    tile.barrier()
    if me < B:
        out[me] = counts[me]


@ts.kernel
def extremes(x, most, least):
    i = tile.program_id(0)
    place = tile.arange(0, 15) % 5
    tile.atomic_max(most[place], tile.load(x[i, :]))
    tile.atomic_min(least[place], tile.load(x[i, :]))


@ts.kernel
def tickets(out, order, N: ts.constexpr):
    i = tile.program_id(0)
    seen = tile.atomic_exchange(out[i], i + 1)
    order[i] = seen + tile.atomic_cas(out[i], i + 1, 100) + tile.atomic_cas(out[i], -1, 7)


@ts.kernel
def elected(owner, out):
    me = tile.local_id()
    stretch = me // 4
    if me % 4 == 2:
        tile.atomic_cas(owner[stretch], 0, me)
    tile.barrier()
    out[me] = owner[stretch]


def cases() -> Iterator[Case]:
    """Each kernel above, at a few types."""
    for dtype in ("int32", "int64", "f32", "f64"):
        x = tensor(f"atomic-{dtype}", (4, 20), dtype, -9.0, 9.0)
        rounded = np.round(x.astype("f8")).astype(x.dtype)
        arguments = {"x": rounded, "total": np.zeros((3, 3), x.dtype), "N": 20}
        yield _make(f"combined-{dtype}", combined, arguments, (4,))
        if dtype.startswith("int"):
            words = np.array([-1, 0, 5], x.dtype)
            yield _make(f"bits-{dtype}", bits, {"x": x.reshape(-1)[:32].copy(), "words": words}, (4,), 8)
    for dtype in ("int8", "uint8", "int16", "uint16", "uint32", "uint64", "f16", "bf16"):
        x = np.round(tensor(f"narrow-{dtype}", (4, 20), dtype, 0.0, 2.0).astype("f8")).astype(as_dtype(dtype).numpy)
        arguments = {"x": x, "total": np.zeros((3, 3), x.dtype), "N": 20}
        yield _make(f"combined-{dtype}", combined, arguments, (4,))
    for dtype in ("int4", "int8", "uint8", "uint16", "uint64", "bf16", "fp8_e4m3", "fp8_e5m2", "bool"):
        high = 7.0 if dtype == "int4" else 120.0 if "int" in dtype else 2.0
        x = tensor(f"extreme-{dtype}", (4, 15), dtype, 1.0, high)
        arguments = {"x": x, "most": np.zeros(5, x.dtype), "least": np.full(5, 2, x.dtype)}
        yield _make(f"extremes-{dtype}", extremes, arguments, (4,))
    numbers = tensor("bins", (100,), "int32", 0, 4)
    yield _make(
        "shared-histogram", shared_histogram, {"x": numbers, "out": np.zeros(5, "i4"), "B": 5, "N": 100}, (1,), 32
    )
    yield _make("tickets", tickets, {"out": np.zeros(6, "i8"), "order": np.zeros(6, "i8"), "N": 6}, (6,))
    yield _make("elected", elected, {"owner": np.zeros(4, "i4"), "out": np.zeros(16, "i4")}, (1,), 16)


def _make(name: str, kernel: Any, arguments: Any, grid: Any, group: int | None = None) -> Case:
    return Case(f"tile/atomics/{name}", lambda: (kernel, arguments), grid=grid, group=group, exact=True)
