"""Kernels over a grid, broken and repaired: bounds, uninitialised memory, races between programs."""

from __future__ import annotations

import tessera as ts
from tessera import tile


@ts.kernel
def next_element(x, out):
    i = tile.program_id(0)
    out[i] = x[i + 1]


@ts.kernel
def next_element_clipped(x, out):
    i = tile.program_id(0)
    tile.store(out[i : i + 1], tile.load(x[i + 1 : i + 2], other=0.0))


@ts.kernel
def previous_element(x, out):
    i = tile.program_id(0)
    out[i] = x[i - 1]


@ts.kernel
def previous_element_guarded(x, out):
    i = tile.program_id(0)
    if i > 0:
        out[i] = x[i - 1]


@ts.kernel
def empty_accumulator(x, out):
    i = tile.program_id(0)
    total = tile.alloc_register((1,), ts.f32)
    total[0] += x[i]
    out[i] = total[0]


@ts.kernel
def zeroed_accumulator(x, out):
    i = tile.program_id(0)
    total = tile.alloc_register((1,), ts.f32)
    total[0] = 0.0
    total[0] += x[i]
    out[i] = total[0]


@ts.kernel
def shifted_in_place(x, out):
    i = tile.program_id(0)
    if i > 0:
        out[i] = out[i - 1] + x[i]


@ts.kernel
def shifted_apart(x, out):
    i = tile.program_id(0)
    if i > 0:
        out[i] = x[i - 1] + x[i]


@ts.kernel
def total(x, out):
    out[0] += x[tile.program_id(0)]


@ts.kernel
def total_atomic(x, out):
    tile.atomic_add(out[0], x[tile.program_id(0)])


@ts.kernel
def overlapping(x, out):
    i = tile.program_id(0)
    if i < 7:
        tile.store(out[i : i + 2], tile.load(x[i : i + 2]) * (i + 1.0))


@ts.kernel
def disjoint(x, out):
    i = tile.program_id(0)
    if i < 4:
        tile.store(out[2 * i : 2 * i + 2], tile.load(x[2 * i : 2 * i + 2]))


@ts.kernel
def own_number(x, out):
    out[0] = x[tile.program_id(0)]


@ts.kernel
def same_number(x, out):
    out[0] = x[0]


@ts.kernel
def count_and_read(x, out):
    tile.atomic_add(out[0], 1.0)
    out[tile.program_id(0)] = x[0] + out[0]


@ts.kernel
def count_and_use(x, out):
    tile.atomic_add(out[0], 1.0)
    tile.atomic_max(out[1], x[tile.program_id(0)])
