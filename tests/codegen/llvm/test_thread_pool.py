"""Helper threads: they share launches, sleep, are busy with another job, stop at failures, and end with the process."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.llvm.runtime import thread_pool
from tessera.core.errors import OutOfBoundsError

X = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)


@ts.kernel(target="llvm")
def meet(x: ts.Tensor["N"], rounds: int):
    """Each of two programs waits until the other has come, or for so many rounds."""
    k, come = 0, tile.atomic_add(x[0], 1.0) + 1.0
    while (come < 2.0) & (k < rounds):
        come = tile.atomic_add(x[0], 0.0)
        k += 1
    x[1 + tile.program_id(0)] = come


@ts.kernel(target="llvm")
def repeat(x: ts.Tensor["N"], n: int):
    for _ in range(n):
        x[tile.program_id(0)] += 1.0


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setenv("TESSERA_THREADS", "2")


def compile_sums():
    return ts.jit(lambda x: ts.exp(x).sum(axis=0), target="llvm")


def meets():
    x = np.zeros(3, np.float32)
    meet[(2,)](x, 10**8)
    return x.tolist() == [2.0, 2.0, 2.0]


def test_two_programs_run_at_the_same_time():
    assert all(meets() for _ in range(20))


def test_a_helper_that_sleeps_is_woken():
    for _ in range(3):
        assert meets()
        time.sleep(0.05)  # longer than it looks at its mailbox


def test_short_jobs_wake_no_helper():
    """Of some calls, each long after the one before; on a busy machine a call may take long."""
    function = ts.jit(lambda x: x + 1.0, target="llvm")
    suspended = ctypes.c_int64.from_address(thread_pool._compile_worker().variable("posts") + 8)
    assert meets()
    found = []
    for _ in range(20):
        time.sleep(0.005)
        function(X[:64, :64].copy())
        found.append(suspended.value)
    assert any(found[2:])


def test_calls_beside_a_busy_helper_are_computed_by_their_own_thread():
    function, n = compile_sums(), 10**8
    first = np.asarray(function(X))
    other = threading.Thread(target=lambda: repeat[(2,)](np.zeros(2, np.float32), n))
    other.start()
    calls = 0
    while other.is_alive():
        np.testing.assert_array_equal(np.asarray(function(X)), first)
        calls += 1
    other.join()
    assert calls and meets()


def test_many_callers_share_the_helpers():
    function = compile_sums()
    first, wrong = np.asarray(function(X)), []

    def call():
        own = compile_sums()
        wrong.extend(i for i in range(200) if not np.array_equal(np.asarray(own(X)), first))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and meets()


def test_no_helper_runs_anything_of_a_failed_run():
    """The launches after a failure are never begun, and the next run finds all that it needs."""
    x, good = np.ones((512, 64), np.float32), np.arange(512)
    bad = np.where(good == 7, 1000, good)
    function = ts.jit(lambda x, i: (ts.cumsum(x[i].sum(axis=1)), ts.exp(x).sum(axis=0)), target="llvm")
    wanted = [np.asarray(r).copy() for r in function(x, good)]
    for _ in range(50):
        with pytest.raises(OutOfBoundsError):
            function(x, bad)
        for found, want in zip(function(x, good), wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(found), want)


def test_more_threads_than_processors(monkeypatch):
    first = np.asarray(compile_sums()(X))
    monkeypatch.setenv("TESSERA_THREADS", str(thread_pool.MAX_HELPERS + 9))
    np.testing.assert_array_equal(np.asarray(compile_sums()(X)), first)
    monkeypatch.setenv("TESSERA_THREADS", "1")
    np.testing.assert_array_equal(np.asarray(compile_sums()(X)), first)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_child_has_helpers_of_its_own():
    assert meets()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, b"yes" if meets() and meets() else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 3) == b"yes" and meets()


ENDING = """
import atexit, threading, numpy as np, tessera as ts
function = ts.jit(lambda x: ts.exp(x).sum(axis=0), target="llvm")
x = np.ones((512, 512), np.float32)
atexit.register(lambda: print(np.asarray(function(x))[0] > 1000))
def call():
    for _ in range(300): function(x)
threading.Thread(target=call).start()
{last}
"""


@pytest.mark.parametrize("last", ("", "function(x)", "raise SystemExit(0)"))
def test_a_process_ends_while_helpers_wait(last):
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(last=last)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
