"""Tiles of a group that wait for each other at mbarriers, in branches, loops and by themselves: the same everywhere."""

import numpy as np
import pytest
from engines import ENGINES, results

import tessera as ts
from tessera import tile
from tessera.errors import DeadlockError

TILE, *LLVM = ENGINES


@ts.kernel
def chain(x, out, N: ts.constexpr):
    """A barrier for each tile: each waits for its neighbour's, adds its own and hands on."""
    me = tile.local_id()
    total, done = tile.alloc_shared((N,), ts.f32), tile.mbarrier(1, N)
    tile.barrier()
    if me == 0:
        total[0] = x[0]
        done[me].arrive()
    elif me == 1:
        done[me - 1].wait(0)
        total[me] = total[me - 1] + x[me]
        done[me].arrive()
    else:
        if me == 2:
            done[me - 1].wait(0)
            total[me] = total[me - 1] + x[me]
            done[me].arrive()
        else:
            done[me - 1].wait(0)
            total[me] = total[me - 1] + x[me]
            done[me].arrive()
    done[(me + 1) % N].wait(0)
    out[me] = total[(me + 1) % N]


@ts.kernel
def uneven(x, out, N: ts.constexpr):
    """Loops of different lengths on both sides, a `while` with a wait in it, and results that differ by side."""
    me = tile.local_id()
    cell, full, empty = tile.alloc_shared((1,), ts.f32), tile.mbarrier(1), tile.mbarrier(1)
    tile.barrier()
    last = 0.0
    if me == 0:
        for k in tile.range(0, N):
            if k > 0:
                empty.wait((k - 1) % 2)
            cell[0] = x[k] * 2.0
            full.arrive()
            last += x[k]
    elif me == 1:
        k, limit = 0, tile.cast(x[N], ts.int64)
        while k < limit:
            full.wait(k % 2)
            last = last * 0.5 + cell[0]
            empty.arrive()
            k += 1
    out[me] = last


@ts.kernel
def by_rounds(x, out, N: ts.constexpr):
    """Each tile makes as many rounds as its number says, and waits in each for its own barrier."""
    me = tile.local_id()
    own, ready = tile.alloc_shared((4,), ts.f32), tile.mbarrier(1, 4)
    tile.barrier()
    if me > 0:
        for k in tile.range(0, me):
            ready[me].wait(k % 2)
            own[me] = own[me] + x[k]
            out[me] = own[me]
            if k + 1 < me:
                ready[me].arrive()
    else:
        for k in tile.range(1, 4):
            own[k] = x[N - k]
            ready[k].arrive()


@ts.kernel
def shared_by_programs(x, out, N: ts.constexpr):
    """Blocks are kept over a wait, and each program has a ring of its own."""
    me, program = tile.local_id(), tile.program_id(0)
    buffer, full = tile.alloc_shared((N, 8), ts.f32), tile.mbarrier(1, N)
    tile.barrier()
    block = tile.load(x[program, 0:8]) + 1.0
    if me == 1:
        for k in tile.static_range(N):
            buffer[k, 0:8] = block * (k + 1.0)
            full[k].arrive()
    else:
        squares = block * block
        for k in tile.static_range(N):
            full[k].wait(0)
            squares = squares + buffer[k, 0:8]
        if me == 0:
            out[program, 0:8] = squares


@ts.kernel
def relay(x, out, N: ts.constexpr):
    """One branch, in which each tile waits for the one before it."""
    me = tile.local_id()
    total, done = tile.alloc_shared((N,), ts.f32), tile.mbarrier(1, N)
    tile.barrier()
    if me == 0:
        total[0] = x[0]
        done[0].arrive()
    else:
        done[me - 1].wait(0)
        total[me] = total[me - 1] + x[me]
        done[me].arrive()
    out[me] = total[me]


@ts.kernel
def turns(x, out, N: ts.constexpr):
    """Two consumers take turns at one cell."""
    me = tile.local_id()
    cell, turn = tile.alloc_shared((1,), ts.f32), tile.mbarrier(1, 2)
    tile.barrier()
    total = 0.0
    if me == 0:
        cell[0] = x[0]
        turn[0].arrive()
    else:
        for k in tile.range(0, N):
            turn[me - 1].wait(k % 2)
            total = total * 0.5 + cell[0]
            if me == 2:
                cell[0] = cell[0] + 1.0
            turn[2 - me].arrive()
    out[me] = total


CASES = {
    "relay": (relay, {"x": np.arange(1, 5, dtype="f4"), "out": np.zeros(4, "f4"), "N": 4}, (2,), 4),
    "turns": (turns, {"x": np.float32([8]), "out": np.zeros(3, "f4"), "N": 5}, (1,), 3),
    "chain": (chain, {"x": np.arange(1, 5, dtype="f4"), "out": np.zeros(4, "f4"), "N": 4}, (1,), 4),
    "uneven": (uneven, {"x": np.float32([3, 1, 4, 1, 5, 5]), "out": np.zeros(3, "f4"), "N": 5}, (2,), 3),
    "by-rounds": (by_rounds, {"x": np.arange(1, 9, dtype="f4"), "out": np.zeros(4, "f4"), "N": 8}, (1,), 4),
    "programs": (
        shared_by_programs,
        {"x": np.arange(24, dtype="f4").reshape(3, 8), "out": np.zeros((3, 8), "f4"), "N": 3},
        (3,),
        2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_engine_gives_the_same(name):
    kernel, given, grid, group = CASES[name]
    want, *found = ([a.tobytes() for a in outs] for outs in results(kernel, given, grid, group))
    assert all(f == want for f in found)
    assert any(np.frombuffer(w, "f4").any() for w in want)
    assert str(ts.debug.check(kernel[grid, group], **given)) == "no findings"


def test_what_they_compute():
    ((out,),) = results(*CASES["chain"], LLVM[:1])
    np.testing.assert_array_equal(out, [3, 6, 10, 1])
    ((out,),) = results(*CASES["relay"], LLVM[:1])
    np.testing.assert_array_equal(out, [1, 3, 6, 10])
    x = np.arange(24, dtype="f4").reshape(3, 8) + 1
    ((out,),) = results(*CASES["programs"], LLVM[:1])
    np.testing.assert_array_equal(out, x * x + 6 * x)


@ts.kernel
def joined_first(x, out, N: ts.constexpr):
    """Tile 0 arrives behind the branch, and tiles are behind a branch when all are."""
    me = tile.local_id()
    done = tile.mbarrier(1, N)
    tile.barrier()
    if me > 0:
        done[me - 1].wait(0)
    done[me].arrive()
    out[me] = x[me]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_tiles_go_on_behind_a_branch_together(engine):
    with pytest.raises(DeadlockError, match="deadlock"):
        results(joined_first, CASES["chain"][1], (1,), 4, engines=[engine])


@ts.kernel
def own_barrier_never(x):
    me, bars = tile.local_id(), tile.mbarrier(1, 4)
    tile.barrier()
    if me != 2:
        bars[me].arrive()
    bars[me].wait(0)
    x[me] = 1.0


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_the_tile_that_waits_for_ever_is_named(engine):
    with pytest.raises(DeadlockError) as caught:
        results(own_barrier_never, {"x": np.zeros(4, "f4")}, group=4, engines=[engine])
    assert "1 tiles wait, first program (0,), tile 2" in str(caught.value) and "bars[me].wait(0)" in str(caught.value)
