"""Loop unrolling: several rounds load at once, in the order of the rounds; loops that do something else stay."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.runtime import driver
from tessera.runtime.program import prepare


@ts.kernel
def accumulate(x, out, *, stop, step):
    total, last = tile.zeros((128,), "f32"), tile.zeros((128,), "f32")
    for i in tile.range(2, stop, step):
        block = tile.load(x[i, 0:128])
        total, last = total * 0.5 + block, total - last
    tile.store(out[0, 0:128], total)
    tile.store(out[1, 0:128], last)


@ts.kernel
def store_each(x, out, *, rounds):
    for i in tile.range(0, rounds, 1):
        tile.store(out[i, 0:128], tile.load(x[i, 0:128]) + tile.load(out[i, 0:128]))


@ts.kernel
def store_in_order(x, out, *, rounds):
    total = tile.zeros((128,), "f32")
    for i in tile.range(0, rounds, 1):
        total = total + tile.load(x[i, 0:128])
        tile.store(out[0, 0:128], total)
        tile.store(out[0, 0:64], tile.load(x[i, 0:64]))


@ts.kernel
def count_unknown(x, out):
    total = tile.zeros((128,), "f32")
    for i in tile.range(0, tile.cast(x[0, 0], "int64"), 1):
        total = total + tile.load(x[i, 0:128])
    tile.store(out[0, 0:128], total)


def make(kernel, count, **constants):
    x = np.random.default_rng(count).standard_normal((3 * count + 2, 128)).astype("f4")
    x[0, 0] = count
    return prepare(kernel, {"x": x, "out": np.ones((3 * count + 2, 128), "f4"), **constants}, grid=(1,))


def find_loads(text):
    """The loads before the loop, and in it."""
    before, _, rest = text.partition("$loop1:\n")
    loop = rest.partition("bra.uni $loop1;")[0]
    return tuple(len(re.findall(r"ld\.global", part)) for part in (before, loop))


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5, 7, 8, 18])
def test_rounds_keep_their_order(rounds, step):
    program = make(accumulate, rounds, stop=3 + (rounds - 1) * step, step=step)
    wanted, got = (program.run(level, "ptx")[-1] for level in ("tile", "target"))
    np.testing.assert_array_equal(wanted[:2], got[:2])
    text = next(iter(BACKEND.emit(program.lower_for_target("ptx")["tile"], {}).files.values()))
    factor = min(rounds, 4)
    assert find_loads(text) == ((rounds % factor, factor) if factor > 1 else (0, 1))


@pytest.mark.parametrize("kernel", [store_each, store_in_order, count_unknown])
def test_other_loops_stay(kernel):
    program = make(kernel, 6, **({} if kernel is count_unknown else {"rounds": 6}))
    wanted, got = (program.run(level, "ptx")[-1] for level in ("tile", "target"))
    np.testing.assert_array_equal(wanted, got)
    text = next(iter(BACKEND.emit(program.lower_for_target("ptx")["tile"], {}).files.values()))
    assert find_loads(text)[1] == (1 if kernel is count_unknown else 2)


def test_partial_results_of_warps_are_neighbours():
    levels = driver.lower(ts.jit(lambda x: ts.sum(x, axis=0)).trace(np.zeros((900, 1280), "f4")).function, "ptx")
    text = next(iter(BACKEND.emit(levels["tile"], {}).files.values()))
    assert "st.shared.v4.f32" in text and "ld.shared.v4.f32" in text and "st.shared.f32" not in text
