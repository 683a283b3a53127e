"""Ctrl-C in a launch: it stops soon, leaves no thread in machine code, and the program runs again afterwards."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from interrupts import LIMIT, interrupted, signal_soon

import tessera as ts
from tessera import tile
from tessera.codegen.llvm.runtime.interrupts import MainThread

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
ENDLESS = 10**10


@ts.kernel(target="llvm")
def repeat(x: ts.Tensor["N"], n: int):
    i = tile.program_id(0)
    for _ in range(n):
        x[i] += 1.0


@ts.kernel(target="llvm")
def wait(x: ts.Tensor["N"], n: int):
    i, k = tile.program_id(0), 0
    while k < n:
        x[i] += 1.0
        k += 1


@ts.kernel(target="llvm")
def meet(x: ts.Tensor["N"], n: int):
    i = tile.program_id(0)
    for _ in range(n):
        x[i] += 1.0
        tile.grid_barrier()


@ts.kernel(target="llvm")
def count(x: ts.Tensor["N"]):
    tile.atomic_add(x[0], 1.0)


@ts.jit(target="llvm")
def loop(x, n):
    return ts.while_loop(lambda x, i: i < n, lambda x, i: (x + 1.0, i + 1), (x, 0))[0]


LAUNCHES = {
    "one program": lambda x, n: repeat[(1,)](x, n),
    "several programs": lambda x, n: repeat[(8,)](x, n),
    "a while loop": lambda x, n: wait[(8,)](x, n),
    "a grid barrier": lambda x, n: meet[(4,)](x, n),
    "many programs": lambda x, n: count[(n,)](x),
    "a loop of the host": loop,
}


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread alone")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("threads", ("1", "3"))
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_ctrl_c_stops_a_launch(launch, threads, monkeypatch):
    monkeypatch.setenv("TESSERA_THREADS", threads)
    launch(np.ones(8, np.float32), 3)
    for _ in range(2):
        x = np.ones(8, np.float32)
        sent = signal_soon()
        with pytest.raises(KeyboardInterrupt):
            launch(x, ENDLESS)
        assert time.perf_counter() - sent[0] < LIMIT
        held = x.copy()
        time.sleep(0.02)
        np.testing.assert_array_equal(x, held)  # nobody writes any more
    assert not [t for t in threading.enumerate() if t.name.startswith("tessera-program")]
    x = np.ones(8, np.float32)
    out = launch(x, 5)
    assert (x if out is None else out.numpy()).max() == 6.0 and signal.getsignal(
        signal.SIGINT
    ) is signal.default_int_handler


def test_a_handler_that_returns_lets_the_launch_go_on():
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    x = np.zeros(1, np.float32)
    repeat[(1,)](x, 3)
    sent = signal_soon(0.05)
    while not seen:
        x[:] = 0
        repeat[(1,)](x, 10**6 * 8)
        assert x[0] == 8e6
    assert sent


def test_a_handler_may_raise_its_own_exception():
    def expire(number, frame):
        raise TimeoutError("enough")

    signal.signal(signal.SIGINT, expire)
    signal_soon()
    with pytest.raises(TimeoutError, match="enough"):
        repeat[(1,)](np.ones(8, np.float32), ENDLESS)


def test_a_launch_of_another_thread_is_not_stopped():
    x, done = np.zeros(1, np.float32), []
    repeat[(1,)](x, 1)
    other = threading.Thread(target=lambda: done.append(repeat[(1,)](x, 10**8)))
    other.start()
    signal_soon(0.05)
    with pytest.raises(KeyboardInterrupt):
        while True:
            time.sleep(0.01)
    other.join()
    assert done == [None]


def test_ctrl_c_while_streams_run_stops_them():
    one, other, x, y = ts.Stream(), ts.Stream(), np.ones(8, np.float32), np.zeros(8, np.float32)
    repeat[(8,)](y, 1)
    with one:
        repeat[(8,)](x, ENDLESS)
        done = one.record()
    with other:
        other.wait(done)
        repeat[(8,)](y, 3)
    with interrupted():
        other.synchronize()
    held = x.copy()
    time.sleep(0.02)
    np.testing.assert_array_equal(x, held)
    np.testing.assert_array_equal(y, np.ones(8))  # what was queued behind did not run
    with one:
        repeat[(8,)](y, 3)
    one.synchronize()
    np.testing.assert_array_equal(y, np.full(8, 4.0))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_the_thread_that_forked_is_the_main_one_of_the_child():
    def fork(found):
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            os.write(write, b"yes" if MainThread.number == threading.get_ident() else b"no")
            os._exit(0)
        os.waitpid(child, 0)
        found.append(os.read(read, 3))

    found = []
    thread = threading.Thread(target=fork, args=(found,))
    thread.start()
    thread.join()
    assert found == [b"yes"] and MainThread.number == threading.main_thread().ident
