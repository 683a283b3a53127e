"""Barriers in memory: producers and consumers, bytes of copies, parities, deadlocks, and debug mode on them."""

import numpy as np
import pytest
from engines import ENGINES, results

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, ExecutionError, RaceError

TILE, *LLVM = ENGINES


@ts.kernel
def ring(x, out, N: ts.constexpr):
    """Tile 0 fills a ring of two buffers, the others empty it."""
    me, base = tile.local_id(), tile.program_id(0) * N * 8
    buffer = tile.alloc_shared((2, 8), ts.f32)
    full, empty = tile.mbarrier(1, 2), tile.mbarrier(tile.group_size() - 1, 2)
    tile.barrier()
    if me == 0:
        for k in tile.range(0, N):
            empty[k % 2].wait((k // 2 + 1) % 2)
            buffer[k % 2, 0:8] = x[base + k * 8 : base + k * 8 + 8]
            full[k % 2].arrive()
    else:
        acc = tile.zeros((8,))
        for k in tile.range(0, N):
            full[k % 2].wait((k // 2) % 2)
            acc = acc + buffer[k % 2, 0:8] * tile.cast(me, ts.f32)
            empty[k % 2].arrive()
        out[tile.program_id(0), me, 0:8] = acc


@pytest.mark.parametrize("n", [1, 2, 5])
def test_producer_and_consumers(n):
    x = np.arange(2 * n * 8, dtype="f4")
    given = {"x": x, "out": np.zeros((2, 4, 8), "f4"), "N": n}
    for (out,) in results(ring, given, (2,), 4):
        np.testing.assert_array_equal(out, x.reshape(2, n, 1, 8).sum(1) * np.arange(4)[:, None])
    assert str(ts.debug.check(ring[(2,), 4], **{**given, "out": np.zeros((2, 4, 8), "f4")})) == "no findings"


@ts.kernel
def rounds(x, out, N: ts.constexpr):
    """One tile copies, all wait for its bytes, three times over."""
    me, first = tile.local_id(), tile.program_id(0) * N
    buffer, bar = tile.alloc_shared((N,), ts.f32), tile.mbarrier(tile.group_size())
    tile.barrier()
    for k in tile.range(0, 3):
        if me == 0:
            tile.mbarrier_expect(bar, 4 * N)
            tile.cp_async(buffer[0:N], x[first : first + N], barrier=bar)
        tile.mbarrier_arrive(bar)
        tile.mbarrier_wait(bar, k % 2)
        out[first + me] = buffer[(me + 1) % N] * 2.0
        tile.barrier()


def test_bytes_of_copies():
    x = np.arange(16, dtype="f4")
    given = {"x": x, "out": np.zeros(16, "f4"), "N": 8}
    for (out,) in results(rounds, given, (2,), 8):
        np.testing.assert_array_equal(out.reshape(2, 8), np.roll(x.reshape(2, 8), -1, 1) * 2)
    with ts.debug.checked():
        results(rounds, given, (2,), 8, [TILE])


@ts.kernel
def too_few(x):
    bar = tile.mbarrier(5)
    tile.barrier()
    bar.arrive()
    bar.wait(0)
    x[tile.local_id()] = 1.0


@ts.kernel
def no_bytes(x):
    bar = tile.mbarrier(4)
    bar.expect(16)
    bar.arrive()
    bar.wait(0)
    x[tile.local_id()] = 1.0


@ts.kernel
def crossed(x):
    one, other = tile.mbarrier(1), tile.mbarrier(1)
    if tile.local_id() == 0:
        one.wait(0)
        other.arrive()
    else:
        other.wait(0)
        one.arrive()
    x[tile.local_id()] = 1.0


@pytest.mark.parametrize(("entry", "engines"), [(too_few, ENGINES), (no_bytes, ENGINES), (crossed, ENGINES)])
def test_deadlocks_are_found(entry, engines):
    for engine in engines:
        with pytest.raises(ExecutionError, match=r"test_mbarriers\.py:\d+:.*deadlock") as caught:
            results(entry, {"x": np.zeros(4, "f4")}, group=4, engines=[engine])
        assert "first program (0,), tile" in str(caught.value)


@ts.kernel
def without_wait(x, out):
    me, buffer, bar = tile.local_id(), tile.alloc_shared((4,), ts.f32), tile.mbarrier(4)
    buffer[me] = x[me]
    bar.arrive()
    out[me] = buffer[3 - me]


def test_a_missing_wait_is_a_race():
    with ts.debug.checked(), pytest.raises(RaceError):
        results(without_wait, {"x": np.zeros(4, "f4"), "out": np.zeros(4, "f4")}, group=4, engines=[TILE])


@ts.kernel
def outer_and_inner(x, out):
    """Branches within a branch: three roles that hand on to each other."""
    me, one, two = tile.local_id(), tile.mbarrier(1), tile.mbarrier(1)
    cell = tile.alloc_shared((2,), ts.f32)
    if me < 2:
        if me == 0:
            two.wait(0)
            out[0] = cell[1] + 1.0
        else:
            one.wait(0)
            cell[1] = cell[0] + 1.0
            two.arrive()
    else:
        cell[0] = x[0]
        one.arrive()


def test_nested_branches():
    for (out,) in results(outer_and_inner, {"x": np.full(1, 5, "f4"), "out": np.zeros(1, "f4")}, group=3):
        assert out[0] == 7


@ts.kernel
def empty_barrier(x):
    tile.mbarrier(0)


@ts.kernel
def no_such_barrier(x):
    tile.mbarrier(1, 2)[2].arrive()


@pytest.mark.parametrize("entry", [empty_barrier, no_such_barrier])
def test_refusals(entry):
    with pytest.raises(ArgumentError):
        results(entry, {"x": np.zeros(4, "f4")}, engines=[TILE])
