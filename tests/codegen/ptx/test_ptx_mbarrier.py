"""mbarriers on both architectures: transaction bytes, and barriers initialised in loops and branches."""

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked, run_both

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.core.errors import BarrierError
from tessera.runtime.program import prepare


@ts.kernel
def rounds(x, out, N: ts.constexpr):
    """One tile copies, all wait for its bytes, three times over."""
    me, first = tile.local_id(), tile.program_id(0) * N
    buffer, bar = tile.alloc_shared((N,), ts.f32), tile.mbarrier(tile.group_size())
    tile.barrier()
    for k in tile.range(0, 3):
        if me == 0:
            bar.expect(4 * N)
            tile.cp_async(buffer[0:N], x[first : first + N], barrier=bar)
        bar.arrive()
        bar.wait(k % 2)
        out[first + me] = buffer[(me + 1) % N] * 2.0
        tile.barrier()


@ts.kernel
def halves(x, out, N: ts.constexpr):
    """Two copies of half the bytes each by different tiles, the second before its bytes are expected to be all."""
    me = tile.local_id()
    buffer, bar = tile.alloc_shared((2, N), ts.f32), tile.mbarrier(2)
    tile.barrier()
    if me % 32 == 0:
        half = me // 32
        bar.expect(4 * N)
        tile.cp_async(buffer[half, 0:N], x[half, 0:N], barrier=bar)
        bar.arrive()
    bar.wait(0)
    out[me] = buffer[0, me % N] - buffer[1, me % N]


@ts.kernel
def begun_again(x, out, N: ts.constexpr):
    """A new barrier in each round, and one in a branch that half of the programs take."""
    me, i = tile.local_id(), tile.program_id(0)
    room = tile.alloc_shared((N,), ts.f32)
    for k in tile.range(0, 3):
        bar = tile.mbarrier(N)
        room[me] = x[me] + tile.cast(k, ts.f32)
        tile.barrier()
        bar.arrive()
        bar.wait(0)
        out[i, k, me] = room[N - 1 - me]
        tile.barrier()
    if i % 2 == 1:
        last = tile.mbarrier(N)
        room[me] = x[me] * 2.0
        tile.barrier()
        last.arrive()
        last.wait(0)
        out[i, 0, me] = room[N - 1 - me]


@ts.kernel
def never(x):
    """Bytes that are expected and never come, in a barrier that counts them."""
    bar = tile.mbarrier(4)
    tile.barrier()
    bar.expect(4)
    bar.arrive()
    bar.wait(0)
    x[tile.local_id()] = 1.0


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_phase_that_never_completes(arch):
    module = prepare(never, [np.zeros(4, "f4")], grid=(1,), group=4).levels["tile"]
    with pytest.raises(BarrierError, match="no thread can continue"):
        BACKEND.interpreter(emit_checked(module, arch))([np.zeros(4, "f4")])


X = np.random.default_rng(0).random((2, 40), dtype="f4")
PROGRAMS = {
    "rounds": (rounds, [X.reshape(-1)[:16], np.zeros(16, "f4"), 8], (2,), 8),
    "halves": (halves, [X, np.zeros(64, "f4"), 40], (1,), 64),
    "begun-again": (begun_again, [X[0], np.zeros((4, 3, 40), "f4"), 40], (4,), 40),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, arch):
    entry, arguments, grid, group = PROGRAMS[name]
    module = prepare(entry, arguments, grid=grid, group=group).levels["tile"]
    for ours, theirs in run_both(module, [a for a in arguments if isinstance(a, np.ndarray)], arch):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.any()
