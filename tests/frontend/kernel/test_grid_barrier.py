"""Launches in which all groups meet: on every engine, under debug mode, and what is refused."""

import numpy as np
import pytest
from engines import ENGINES, results

import tessera as ts
from tessera import tile
from tessera.core.errors import BarrierError, ExecutionError, RaceError, ResourceError, UnsupportedOpError

TILE = ENGINES[:1]


@ts.kernel
def normalised(x, parts, out, *, B: int = 16):
    """One launch for what takes two without a meeting: a sum over all blocks, then each block by it."""
    i = tile.program_id(0)
    block = x[i * B : i * B + B]
    parts[i] = tile.sum(block)
    tile.grid_barrier()
    total = tile.sum(parts[0 : tile.num_programs(0)])
    out[i * B : i * B + B] = block / total


@pytest.mark.parametrize("programs", [1, 7, 64])
def test_a_reduction_over_the_whole_grid(programs, rng):
    x = rng.random(16 * programs, dtype="f4")
    arrays = {"x": x, "parts": np.zeros(programs, "f4"), "out": np.zeros_like(x)}
    for parts, out in results(normalised, arrays, grid=programs):
        np.testing.assert_allclose(parts, x.reshape(programs, 16).sum(1), rtol=1e-6)
        np.testing.assert_allclose(out, x / x.sum(dtype="f8"), rtol=1e-5)


@ts.kernel
def ripples(x, y, *, STEPS: int = 6):
    """Jacobi's iteration on a ring: every step reads what the neighbours wrote in the last one, to and fro."""
    me, n = tile.linear_id(), tile.grid.width()
    for _ in tile.range(0, STEPS):
        y[me] = 0.5 * (x[(me + 1) % n] + x[(me + n - 1) % n])
        tile.grid.sync()
        x[me] = y[me]
        tile.grid.sync()


@pytest.mark.parametrize(("grid", "group"), [((8,), None), ((2, 3), 4), ((33,), 2)])
def test_steps_in_a_loop(grid, group, rng):
    n = int(np.prod(grid)) * (group or 1)
    x = rng.random(n, dtype="f4")
    want = x.copy()
    for _ in range(6):
        want = np.float32(0.5) * (np.roll(want, -1) + np.roll(want, 1))
    for found in results(ripples, {"x": x, "y": np.zeros(n, "f4")}, grid=grid, group=group):
        np.testing.assert_array_equal(found[0], want)
    with ts.debug.checked():
        results(ripples, {"x": x, "y": np.zeros(n, "f4")}, grid=grid, group=group, engines=TILE)


@ts.kernel
def kept(x, out):
    """A value read before the barrier stays what it was, though others write its place after it."""
    me, n = tile.program_id(0), tile.num_programs(0)
    mine = tile.load(x[me, 0:8])
    old = tile.load(x[(me + 1) % n, 0:8])
    tile.grid_barrier()
    x[me, 0:8] = mine + 100.0
    tile.grid_barrier()
    out[me, 0:8] = old + x[(me + 1) % n, 0:8]


def test_loads_do_not_move_over_it(rng):
    x = rng.random((16, 8), dtype="f4")
    want = np.roll(x, -1, 0) + (np.roll(x, -1, 0) + np.float32(100))
    for _, out in results(kept, {"x": x, "out": np.zeros_like(x)}, grid=16):
        np.testing.assert_array_equal(out, want)


def test_a_missing_one_is_a_race(rng):
    @ts.kernel
    def missing(x, out):
        i = tile.program_id(0)
        x[i] = 1.0
        tile.grid_barrier()
        x[i] = 2.0
        out[i] = x[(i + 1) % 4]

    with pytest.raises(RaceError) as error, ts.debug.checked():
        results(missing, {"x": np.zeros(4, "f4"), "out": np.zeros(4, "f4")}, grid=4, engines=TILE)
    assert "program (0,)" in str(error.value) and "program (1,)" in str(error.value)


@ts.kernel
def parted(x):
    if tile.program_id(0) < 2:
        tile.grid_barrier()
    x[tile.program_id(0)] = 1.0


@pytest.mark.parametrize("checked", [False, True])
def test_a_parted_barrier(checked):
    run = lambda: results(parted, {"x": np.zeros(4, "f4")}, grid=4, engines=TILE)  # noqa: E731
    with pytest.raises(BarrierError, match=r"reached by program \(0,\) and not by program \(2,\): by 2 of 4"):
        if checked:
            with ts.debug.checked():
                run()
        run()


def test_compiled_programs_that_part_do_not_hang():
    with pytest.raises(BarrierError, match="some programs of parted wait at a grid barrier, and others have ended"):
        results(parted, {"x": np.zeros(4, "f4")}, grid=4, engines=[("device", "llvm")])


def test_an_assertion_before_it_is_what_is_raised():
    @ts.kernel
    def asserted(x):
        tile.assert_(x[tile.program_id(0)] < 3.0, "small")
        tile.grid_barrier()
        x[tile.program_id(0)] = 0.0

    for engine in ENGINES[:2]:
        with pytest.raises(ExecutionError, match="assertion failed: small"):
            results(asserted, {"x": np.arange(4, dtype="f4")}, grid=4, engines=[engine])


def test_grids_too_large_to_be_under_way_at_once():
    x = np.zeros(300, "f4")
    arrays = {"x": x, "y": np.zeros(300, "f4")}
    results(ripples, arrays, grid=300, engines=TILE)  # the interpreter holds any grid
    with pytest.raises(ResourceError, match="ripples has 300 programs that synchronise at a grid barrier"):
        results(ripples, arrays, grid=300, engines=[("device", "llvm")])


def test_a_target_without_it():
    from tessera.codegen.contract import Capabilities, check_resources
    from tessera.runtime.program import prepare

    module = prepare(parted, {"x": np.zeros(4, "f4")}, grid=4).levels["tile"]
    with pytest.raises(UnsupportedOpError, match="the target toy has no grid barrier"):
        check_resources(module, "toy", Capabilities(16, ()))


@pytest.mark.parametrize(("gpu", "advised"), [("T4", True), ("B200", False)])
def test_a_report_says_whether_a_gpu_can_hold_the_grid(gpu, advised):
    x = np.zeros(2000, "f4")
    with ts.debug.kernel_trace(gpu=gpu) as trace:
        ripples[2000](x, x.copy())
    said = "launch fewer groups: 2000 synchronise at a grid barrier, and 320 fit a T4 at once"
    assert (said in trace.reports[0].suggestions()) is advised
