"""Ctrl-C in interpreters, emulators, tuning and checks: each stops soon, and leaves no thread and no file behind."""

import threading

import numpy as np
import pytest
from interrupts import interrupted

import tessera as ts
from tessera import tile
from tessera.runtime.program import prepare

ENDLESS = 10**9


@ts.kernel
def repeat(x: ts.Tensor["N"], y: ts.Tensor["N"], n: int):
    i, acc = tile.program_id(0), 0.0
    for _ in range(n):
        acc += x[i]
    y[i] = acc


@ts.kernel
def repeat_unequally(x: ts.Tensor["N"], y: ts.Tensor["N"], n: int):
    i, acc = tile.program_id(0), 0.0
    for _ in tile.range(i, n + i):
        acc += x[i]
    y[i] = acc


@ts.kernel
def ping(x: ts.Tensor["N"], n: int):
    """Two tiles that take turns."""
    me, bars = tile.local_id(), tile.mbarrier(1, 2)
    tile.barrier()
    if me == 0:
        for k in tile.range(0, n):
            bars[0].arrive()
            bars[1].wait(k % 2)
    else:
        for k in tile.range(0, n):
            bars[0].wait(k % 2)
            x[0] += 1.0
            bars[1].arrive()


def run(level, target):
    x = np.ones(4, np.float32)
    return lambda n: prepare(repeat, (x, x.copy(), n), target, grid=(4,)).run(level, target)


LONG = {
    "the tile interpreter": run("tile", "interp"),
    "loops with bounds of their own in a stream": lambda n: queue(n, repeat_unequally),
    "a stream": lambda n: queue(n),
    "branches as coroutines": lambda n: ping[(1,), 2](np.zeros(1, np.float32), n),
    "the LLVM emulator": run("target", "llvm"),
    "the PTX emulator": run("target", "ptx"),
    "the CSL simulator": run("target", "csl"),
    "the graph interpreter": lambda n: ts.jit(
        lambda x: ts.while_loop(lambda x, i: i < n, lambda x, i: (x + 1.0, i + 1), (x, 0))
    )(np.ones(4, np.float32)),
}


def queue(n, entry=repeat):
    x, stream = np.ones(4, np.float32), ts.Stream()
    with stream:
        entry[(4,)](x, x.copy(), n)
    stream.synchronize()


@pytest.mark.parametrize("run", LONG.values(), ids=LONG)
def test_ctrl_c_stops(run):
    run(2)
    before = set(threading.enumerate())
    with interrupted(0.3):
        run(ENDLESS)
    left = set(threading.enumerate()) - before
    assert not [t for t in left if not t.name.startswith("tessera-stream")]  # a stream's thread is idle
    run(2)


def test_ctrl_c_in_tuning_leaves_the_cache_as_it_was(tmp_path):
    file = tmp_path / "tuned.json"

    @ts.kernel.autotune(space={"B": [2, 4]}, cache=str(file))
    def slow(x: ts.Tensor["N"], n: int, *, B: int = 2):
        i = tile.program_id(0) * B
        for _ in range(n):
            x[i : i + B] += 1.0

    with interrupted(0.3):
        slow[lambda c: (4 // c["B"],)](np.ones(4, np.float32), ENDLESS)
    assert list(tmp_path.iterdir()) == []
    slow[lambda c: (4 // c["B"],)](np.ones(4, np.float32), 2)
    assert file.exists()
