"""Kernels that the tests of the debugger step through, and sessions as text. Tests know the lines by number."""

import re

import numpy as np

import tessera as ts
from tessera import tile


def scaled(v, by):
    w = v * by
    return w + 1.0


@ts.kernel
def rows(x, out, *, B: int = 4):
    i = tile.program_id(0)
    total = 0.0
    for step in tile.range(0, 2):
        block = tile.load(x[i * B : i * B + B], mask=tile.arange(0, B) < 3, other=0.0)
        total += tile.sum(block) * step
    if i > 1:
        total = scaled(total, 2.0)
    out[i] = total


@ts.kernel
def exchanged(x, out):
    me = tile.local_id()
    row = tile.alloc_shared((4,), ts.f32)
    row[me] = x[me] * 2.0
    tile.barrier()
    out[me] = row[3 - me]


@ts.kernel
def paused(x, out):
    i = tile.program_id(0)
    y = x[i] * 2.0
    ts.debug.break_here(y > 3.0)
    out[i] = y
    breakpoint()


@ts.kernel
def outside(x, out):
    i = tile.program_id(0)
    out[i] = x[i + 1]


def session(commands, launch, *args, **options):
    """What a session shows, paths shortened, with `$name` in the commands replaced by the line where it stands here."""
    shown = []
    with ts.debug.session(commands, write=shown.append, **options):
        launch(*args)
    return [re.sub(r"> \S*/", "> ", line) for text in shown for line in text.splitlines()]


def ramp(count):
    return np.arange(count, dtype=np.float32), np.zeros(4, np.float32)


@ts.kernel
def overflowing(x, out):
    i = tile.program_id(0)
    y = x[i] * 100.0
    z = tile.exp(y)
    out[i] = z
    w = out[i] - z
    out[i] = w + 1.0
