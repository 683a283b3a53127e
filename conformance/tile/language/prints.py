"""Kernels that print: the lines and the results are the same on every engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from tessera import tile


@ts.kernel
def blocks(x, out):
    i = tile.program_id(0)
    row = tile.load(x[i, :])
    tile.print("row", i, row, row > 1.0)
    out[i, :] = row * 2.0


@ts.kernel
def tiles(x, out):
    me, i = tile.local_id(), tile.program_id(0)
    if me % 3 == 1:
        tile.print(f"tile {me} of {i} holds {x[i, me]}")
    tile.barrier()
    out[i, me] = x[i, 3 - me]


@ts.kernel
def rounds(x, out):
    total = x[0, 0] * 0.0
    for a in tile.range(0, 3):
        tile.print("outer", a)
        n = a
        while n > 0:
            total = total + x[a, n]
            tile.print("inner", n, total)
            n = n - 1
        if a == 1:
            tile.print("one")
        else:
            tile.print("other", tile.cast(x[a, 0:2], ts.bf16))
    out[0, 0] = total


X = np.arange(12, dtype="f4").reshape(3, 4)
LINES = {
    "blocks": (
        "program (0,): row 0 [0., 1., 2., 3.] [False, False,  True,  True]",
        "program (1,): row 1 [4., 5., 6., 7.] [ True,  True,  True,  True]",
        "program (2,): row 2 [ 8.,  9., 10., 11.] [ True,  True,  True,  True]",
    ),
    "tiles": (
        "program (0,), tile 1: tile 1 of 0 holds 1.0", "program (1,), tile 1: tile 1 of 1 holds 5.0",
        "program (2,), tile 1: tile 1 of 2 holds 9.0",
    ),
    "rounds": tuple(
        f"program (0,): {line}"
        for line in (
            "outer 0", "other [0, 1]", "outer 1", "inner 1 5.0", "one", "outer 2", "inner 2 15.0", "inner 1 24.0",
            "other [8, 9]",
        )
    ),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Blocks, tiles of a group, and a program whose loops and branches print."""
    yield _make("blocks", blocks, (3,))
    yield _make("tiles", tiles, (3,), 4)
    yield _make("rounds", rounds, (1,))


def _make(name: str, kernel: Any, grid: tuple[int, ...], group: int | None = None) -> Case:
    arguments = (X, np.zeros_like(X))
    return Case(f"tile/language/print-{name}", lambda: (kernel, arguments), grid, group, lines=LINES[name])
