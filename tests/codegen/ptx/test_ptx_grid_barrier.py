"""Grid barriers: cooperative launches compiled to PTX and run by the emulator."""

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.core.errors import BarrierError, ExecutionError, ResourceError
from tessera.runtime.program import prepare


@ts.kernel
def ripples(x, y, *, STEPS: int = 4):
    me, n = tile.linear_id(), tile.grid.width()
    for _ in tile.range(0, STEPS):
        y[me] = 0.5 * (x[(me + 1) % n] + x[(me + n - 1) % n])
        tile.grid.sync()
        x[me] = y[me]
        tile.grid.sync()


@ts.kernel
def blocks(x, parts, out, *, B: int = 48):
    i = tile.program_id(0)
    block = x[i * B : i * B + B]
    parts[i] = tile.sum(block)
    tile.grid_barrier()
    out[i * B : i * B + B] = block / tile.sum(parts[0 : tile.num_programs(0)])


def run(entry, arrays, grid, group=None, arch="sm_80"):
    """The arrays after a run of the text."""
    module = prepare(entry, arrays, grid=grid, group=group).levels["tile"]
    held = [a.copy() for a in arrays]
    BACKEND.interpreter(emit_checked(module, arch))(held)
    return held


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("grid", "group"), [((8,), None), ((2, 3), 4), ((33,), 40)])
def test_stencil_steps(grid, group, arch, rng):
    n = int(np.prod(grid)) * (group or 1)
    x = want = rng.random(n, dtype="f4")
    for _ in range(4):
        want = np.float32(0.5) * (np.roll(want, -1) + np.roll(want, 1))
    found, _ = run(ripples, [x, np.zeros(n, "f4")], grid, group, arch)
    np.testing.assert_array_equal(found, want)


def test_grid_reduction(rng):
    x = rng.random(48 * 300, dtype="f4")
    *_, out = run(blocks, [x, np.zeros(300, "f4"), np.zeros_like(x)], (300,))
    np.testing.assert_allclose(out, x / x.sum(dtype="f8"), rtol=1e-5)


@ts.kernel
def parted(x, first: ts.constexpr, second: ts.constexpr):
    i = tile.program_id(0)
    tile.grid_barrier()
    for _ in tile.range(0, 1 + i % 2 * first):
        x[i] = x[i] + 1.0
        tile.grid_barrier()
    if i % 3 == second:
        tile.grid_barrier()
    x[i] = 0.0


@pytest.mark.parametrize(("first", "second", "column"), [(1, 5, 9), (0, 1, 9)])
def test_divergent_grid_barrier(first, second, column):
    module = prepare(parted, [np.zeros(6, "f4"), first, second], grid=(6,)).levels["tile"]
    with pytest.raises(BarrierError, match=rf"py:\d+:{column}: BarrierError: .* reached by program \(1,\) and not by"):
        BACKEND.interpreter(emit_checked(module))([np.zeros(6, "f4")])


def test_failed_assertion_before_a_grid_barrier():
    @ts.kernel
    def asserted(x):
        tile.assert_(x[tile.program_id(0)] < 3.0, "small")
        tile.grid_barrier()
        x[tile.program_id(0)] = 0.0

    with pytest.raises(ExecutionError, match="assertion failed: small"):
        run(asserted, [np.arange(4, dtype="f4")], (4,))


def test_too_many_resident_programs():
    x, most = np.zeros(5000, "f4"), np.zeros(4224, "f4")
    emit_checked(prepare(ripples, [most, most.copy()], grid=(4224,)).levels["tile"])
    with pytest.raises(ResourceError, match="ripples has 5,000 programs that synchronise[\\s\\S]*at most 4,224 on ptx"):
        run(ripples, [x, x.copy()], (5000,))
    with pytest.raises(ResourceError, match="a cooperative launch of 300 CTAs[\\s\\S]*at most 264 of 1,024 threads"):
        run(ripples, [np.zeros(300 * 1024, "f4"), np.zeros(300 * 1024, "f4")], (300,), 1024)
