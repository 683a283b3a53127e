"""Copies that mbarriers count: memory that they read or write is free when all of them have been waited for."""

import itertools

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.tools.debug import checked

SIZE, COPIES = 8, 3


@ts.kernel
def reuse(x, *, WAITS: int, INTO: bool):
    """Copies of the same elements at one place of the source, some waited for before a write, the others after."""
    held, done = tile.alloc_shared((COPIES, SIZE), ts.f32), tile.mbarrier(1, COPIES)
    tile.barrier()
    for k in tile.range(0, COPIES):
        done[k].expect(4 * SIZE)
    for k in tile.range(0, COPIES):
        tile.cp_async(held[k, 0:SIZE], x[0:SIZE], barrier=done[k])
    for k in tile.range(0, COPIES):
        done[k].arrive()
    for k in tile.static_range(COPIES):
        if WAITS >> k & 1:
            done[k].wait(0)
    if INTO:
        tile.store(held[0:COPIES, 0:SIZE], tile.full((COPIES, SIZE), 1.0))
    else:
        tile.store(x[0:SIZE], tile.full((SIZE,), 1.0))
    for k in tile.static_range(COPIES):
        if not WAITS >> k & 1:
            done[k].wait(0)


@pytest.mark.parametrize("into", [False, True], ids=["what they read", "what they write"])
@pytest.mark.parametrize("waited", [*itertools.product([False, True], repeat=COPIES)], ids=str)
def test_a_write_waits_for_every_copy(waited, into):
    with checked(collect=True) as report:
        waits = sum(w << k for k, w in enumerate(waited))
        reuse[1](np.ones(SIZE, np.float32), WAITS=waits, INTO=into)
    assert bool(list(report)) == (not all(waited))
