"""Tiles of a group that wait for each other at mbarriers, in branches, loops and by themselves: the same everywhere."""

import numpy as np
import pytest
from engines import ENGINES, results

import tessera as ts
from tessera import tile
from tessera.core.errors import DeadlockError, ExecutionError

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


@ts.kernel
def pairs(x, out, N: ts.constexpr):
    """Each pair of tiles passes a number to and fro, by barriers of its own; blocks and registers are kept."""
    me = tile.local_id()
    pair = me // 2
    cell, keep = tile.alloc_shared((N // 2,), ts.f32), tile.alloc_register((4,), ts.f32)
    to, fro = tile.mbarrier(1, N // 2), tile.mbarrier(1, N // 2)
    block = tile.load(x[0:4]) + me
    tile.barrier()
    total = block * 0.0
    if me % 2 == 0:
        for k in tile.range(0, 3 + pair % 2):
            if k > 0:
                fro[pair].wait((k - 1) % 2)
            cell[pair] = x[me] * (k + 1)
            keep[0:4] = block * k
            to[pair].arrive()
            total += keep[0:4]
    else:
        for k in tile.range(0, 3 + pair % 2):
            to[pair].wait(k % 2)
            total += cell[pair] + block * me
            fro[pair].arrive()
    out[tile.program_id(0), me, 0:4] = total


CASES = {
    "relay-64": (relay, {"x": np.arange(1, 65, dtype="f4"), "out": np.zeros(64, "f4"), "N": 64}, (2,), 64),
    "pairs": (pairs, {"x": np.arange(40, dtype="f4"), "out": np.zeros((2, 40, 4), "f4"), "N": 40}, (2,), 40),
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


def test_large_groups_compute_it_too():
    ((out,),) = results(*CASES["relay-64"], LLVM[:1])
    np.testing.assert_array_equal(out, np.cumsum(CASES["relay-64"][1]["x"]))
    ((out,),) = results(*CASES["pairs"], LLVM[:1])
    x, me, rounds = np.arange(4), np.arange(40)[:, None], 3 + np.arange(40)[:, None] // 2 % 2
    even = (x + me) * rounds * (rounds - 1) / 2
    odd = (me - 1) * rounds * (rounds + 1) / 2 + (x + me) * me * rounds
    np.testing.assert_array_equal(out, [np.where(me % 2 == 0, even, odd)] * 2)


@ts.kernel
def speaking(x):
    me = tile.local_id()
    done = tile.mbarrier(1, 3)
    tile.barrier()
    if me == 0:
        done[0].arrive()
    else:
        done[me - 1].wait(0)
        tile.print("now", x[me])
        assert x[me] < 3.0
        if me < 2:
            done[me].arrive()
    x[me] = 0.0


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_tile_by_itself_is_named(engine, capsys):
    with pytest.raises(ExecutionError, match="program \\(0,\\), tile 2 with 3"):
        results(speaking, {"x": np.float32([1, 2, 3])}, group=3, engines=[engine])
    assert capsys.readouterr().out == "program (0,), tile 1: now 2.0\nprogram (0,), tile 2: now 3.0\n"


@ts.kernel
def by_warps(x, out, N: ts.constexpr):
    """Each stretch of 4 tiles waits for the one before it, and adds what that has; the last one has the total."""
    me, four = tile.local_id(), tile.cooperative_group(4)
    own, total = me // 4, tile.alloc_shared((N // 4,), ts.f32)
    cells, done = tile.alloc_shared((N,), ts.f32), tile.mbarrier(4, N // 4)
    tile.barrier()
    sum = 0.0
    if own == 0:
        cells[me] = x[me] * 2.0
        four.sync()
        sum = four.reduce_sum(cells[me - me % 4 + (me + 1) % 4])
        if four.rank() == 0:
            total[0] = sum
        done[0].arrive()
    else:
        cells[me] = x[me]
        done[own - 1].wait(0)
        sum = four.reduce_sum(cells[me]) + total[own - 1]
        if me % 2 == 1:
            sum = sum + 0.0
        if four.rank() == 0:
            total[own] = sum
        four.sync()
        done[own].arrive()
    out[tile.program_id(0), me] = sum


def test_stretches_go_together_where_they_meet():
    x = np.arange(24, dtype="f4")
    given = {"x": x, "out": np.zeros((3, 24), "f4"), "N": 24}
    (want,), *found = results(by_warps, given, (3,), 24)
    sums = x.reshape(6, 4).sum(axis=1) * np.where(np.arange(6) == 0, 2, 1)
    np.testing.assert_array_equal(want, [np.repeat(np.cumsum(sums), 4)] * 3)
    assert all(f[0].tobytes() == want.tobytes() for f in found)
    assert str(ts.debug.check(by_warps[(3,), 24], **given)) == "no findings"


@ts.kernel
def arrives_behind(x, out, N: ts.constexpr):
    """Each tile but the first waits for the one before it, and all arrive behind the branch."""
    me = tile.local_id()
    total, done = tile.alloc_shared((N,), ts.f32), tile.mbarrier(1, N)
    tile.barrier()
    before = 0.0
    if me > 0:
        done[me - 1].wait(0)
        before = total[me - 1]
    now = before + x[me]
    if now > 20.0:
        now = now - 10.0
    total[me] = now
    if me + 1 < N:
        done[me].arrive()
    tile.barrier()
    out[me] = now + before + total[N - 1]


@ts.kernel
def rounds_behind(x, out, N: ts.constexpr):
    """Two branches with waits in each round of a loop, what they have in common behind each of them."""
    me = tile.local_id()
    cell, full, empty = tile.alloc_shared((1,), ts.f32), tile.mbarrier(1), tile.mbarrier(1)
    tile.barrier()
    total = 0.0
    for k in tile.range(0, N):
        if me == 1:
            full.wait(k % 2)
            total = total * 0.5 + cell[0]
        if me == 0:
            cell[0] = x[k] + total
            total += 1.0
            full.arrive()
        if me == 0:
            empty.wait(k % 2)
        total += x[k]
        if me == 1:
            empty.arrive()
    out[me] = total


BEHIND = {
    "arrivals": (arrives_behind, {"x": np.arange(1, 9, dtype="f4"), "out": np.zeros(8, "f4"), "N": 8}, (2,), 8),
    "rounds": (rounds_behind, {"x": np.float32([3, 1, 4, 1, 5]), "out": np.zeros(2, "f4"), "N": 5}, (1,), 2),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_a_tile_does_behind_a_branch_ends_waits_within_it(name):
    kernel, given, grid, group = BEHIND[name]
    (want,), *found = results(kernel, given, grid, group)
    assert all(f[0].tobytes() == want.tobytes() for f in found) and want.any()
    assert str(ts.debug.check(kernel[grid, group], **given)) == "no findings"


def test_what_those_compute():
    ((out,),) = results(*BEHIND["arrivals"], LLVM[:1])
    total, before = [], 0.0
    for x in range(1, 9):
        total.append(before + x - 10.0 * (before + x > 20.0))
        before = total[-1]
    np.testing.assert_array_equal(out, np.add(total, [0.0, *total[:-1]]) + total[-1])


@ts.kernel
def met_first(x, N: ts.constexpr):
    """Tile 0 arrives behind the branch, and behind a barrier at which the others would have to be."""
    me = tile.local_id()
    done = tile.mbarrier(1, N)
    tile.barrier()
    if me > 0:
        done[me - 1].wait(0)
    tile.barrier()
    done[me].arrive()
    x[me] = 0.0


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_barrier_between_makes_it_a_deadlock(engine):
    with pytest.raises(DeadlockError, match="deadlock"):
        results(met_first, {"x": np.ones(4, "f4"), "N": 4}, (1,), 4, engines=[engine])


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
