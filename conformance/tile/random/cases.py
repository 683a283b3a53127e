"""Counter-based random numbers: the same bits on every engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera import tile


@ts.kernel
def words(seed, out, N: ts.constexpr):
    i = tile.program_id(0) * N
    tile.store(out[i : i + N], tile.random_bits(seed, i + tile.arange(0, N)))


@ts.kernel
def far_words(start, out, N: ts.constexpr):
    tile.store(out[0:N], tile.random_bits(start[0], start[1] + tile.arange(0, N)))


@ts.kernel
def numbers(seed, out, whole, N: ts.constexpr):
    me = tile.linear_id()
    tile.store(out[me, 0:N], tile.random(seed, me * N + tile.arange(0, N)))
    tile.store(whole[me, 0:N], tile.randint(seed, me * N + tile.arange(0, N), -5, 20))


@ts.kernel
def normals(out, N: ts.constexpr):
    tile.store(out[0:N], tile.randn(11, tile.arange(0, N)))


@ts.kernel
def dropped(x, seed, out, N: ts.constexpr):
    i = tile.program_id(0)
    tile.store(out[i, 0:N], tile.dropout(tile.load(x[i, 0:N]), 0.25, seed))


def cases() -> Iterator[Case]:
    """Each kernel above."""
    for seed in (0, 7, -1, 2**40 + 3):
        yield _make(f"words-{seed}", words, {"seed": seed, "out": np.zeros(40, "i8"), "N": 20}, (2,))
    far = np.array([2**62 + 9, 2**36 - 5])
    yield _make("far-words", far_words, {"start": far, "out": np.zeros(16, "i8"), "N": 16}, (1,))
    outs = {"out": np.zeros((8, 9), "f4"), "whole": np.zeros((8, 9), "i8")}
    yield _make("numbers", numbers, {"seed": 5, **outs, "N": 9}, (2,), 4)
    block = {"x": tensor("dropout", (3, 33), "bf16"), "seed": 3, "out": np.zeros((3, 33), ts.bf16.numpy), "N": 33}
    yield _make("dropout", dropped, block, (3,), None, False)
    yield _make("normals", normals, {"out": np.zeros(64, "f4"), "N": 64}, (1,), None, False)


def _make(name: str, kernel: Any, arguments: Any, grid: Any, group: int | None = None, exact: bool = True) -> Case:
    return Case(f"tile/random/{name}", lambda: (kernel, arguments), grid=grid, group=group, exact=exact)
