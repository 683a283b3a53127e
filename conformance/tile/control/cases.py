"""Loops and branches with uniform and divergent conditions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def triangle(out):
    me = tile.program_id(0)
    total = 0
    for i in tile.range(0, me + 1):
        total += i
    out[me] = total


@ts.kernel
def collatz(x, out):
    me = tile.program_id(0)
    n, steps = x[me], 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
        steps += 1
    out[me] = steps


@ts.kernel
def branches(x, out):
    me = tile.program_id(0)
    value = x[me]
    if value > 1.0:
        out[me] = value * 2.0
    elif value > 0.0:
        out[me] = -value
    else:
        out[me] = value + 10.0


@ts.kernel
def carried_blocks(x, out, B: ts.constexpr, STEPS: ts.constexpr):
    i = tile.program_id(0) * B
    a, b = tile.load(x[i : i + B]), tile.zeros((B,), ts.f32)
    for step in tile.range(0, STEPS):
        a, b = b + 1.0, a * 0.5 + ts.where(step > 1, 1.0, 0.0)
    tile.store(out[i : i + B], a - b)


@ts.kernel
def nested(out, N: ts.constexpr):
    me = tile.program_id(0)
    total = 0
    for i in tile.range(0, N):
        for j in tile.range(i, N, 2):
            if (i + j + me) % 3 == 0:
                total += i * j
    out[me] = total


@ts.kernel
def downward(out):
    me = tile.program_id(0)
    total = 0
    for i in tile.range(10, me, -1):
        total = total * 2 + i
    out[me] = total


@ts.kernel
def unrolled(x, out, POWERS: ts.constexpr):
    me = tile.program_id(0)
    value, total = x[me], 0.0
    for power in POWERS:
        if power % 2 == 0:
            total += value * power
        else:
            total -= value / power
    out[me] = total


@ts.kernel
def chosen(x, out):
    me = tile.program_id(0)
    value = x[me]
    out[me] = value if value > 0.5 and value < 1.5 or not value > -1.0 else -100.0


def cases() -> Iterator[Case]:
    """Each kernel above on a few programs."""
    x = tensor("control", (12,))
    yield _make("triangle", triangle, {"out": np.zeros(9, "i8")}, (9,), exact=True)
    numbers = np.arange(1, 12, dtype=np.int64)
    yield _make("collatz", collatz, {"x": numbers, "out": np.zeros(11, "i8")}, (11,), exact=True)
    yield _make("branches", branches, {"x": x, "out": np.zeros(12, "f4")}, (12,))
    yield _make(
        "carried-blocks",
        carried_blocks,
        {"x": tensor("c", (48,)), "out": np.zeros(48, "f4"), "B": 16, "STEPS": 5},
        (3,),
    )
    yield _make("nested", nested, {"out": np.zeros(6, "i8"), "N": 7}, (6,), exact=True)
    yield _make("downward", downward, {"out": np.zeros(4, "i8")}, (4,), exact=True)
    yield _make("unrolled", unrolled, {"x": x, "out": np.zeros(12, "f4"), "POWERS": (1, 2, 3, 4)}, (12,))
    yield _make("chosen", chosen, {"x": x, "out": np.zeros(12, "f4")}, (12,))


def _make(name: str, kernel: Any, arguments: dict[str, Any], grid: tuple[int, ...], exact: bool = False) -> Case:
    return Case(f"tile/control/{name}", lambda: (kernel, arguments), grid=grid, exact=exact)
