"""Tensor calls: functions of Python in machine code that take tensors, and what they leave to the general way."""

import gc
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.llvm.runtime import tensor_calls
from tessera.frontend.jit import repeated_calls
from tessera.ir.tensor import POOL_PLACEMENT

X, Y = np.float32([[1, 2, 3], [4, 5, 6]]), np.float32([[1, 1, 2], [2, 3, 3]])


@pytest.fixture(autouse=True, scope="module", params=("1", "2"))
def threads(request):
    """The number of threads that share the tiles of a program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESSERA_THREADS", request.param)
        yield


def make_call(function, *arrays, **options):
    """A function for llvm that has been called often enough, its tensors and its tensor call."""
    f = ts.jit(function, target="llvm", **options)
    given = [ts.tensor(a) for a in arrays]
    for _ in range(3):
        f(*given)
    return f, given, f._repeated.direct


@pytest.fixture(scope="module")
def added():
    return make_call(lambda x, y: x + y, X, Y)


def test_one_result_is_a_tensor(added):
    _, (x, y), call = added
    found = call(x, y)
    assert type(found) is ts.Tensor and found.type is x.type and found.grad is None and found.requires_grad is False
    np.testing.assert_array_equal(found.numpy(), X + Y)
    np.testing.assert_array_equal(call(y, y).numpy(), Y + Y)


def test_several_results_are_a_list():
    f, given, call = make_call(lambda x, y: {"sum": x + y, "rows": [ts.sum(x, axis=1), y * 2.0]}, X, Y)
    assert [t.shape for t in call(*given)] == [(2,), (2, 3), (2, 3)]  # in the order of the keys
    found = f(*given)
    np.testing.assert_array_equal(found["sum"].numpy(), X + Y)
    np.testing.assert_array_equal(found["rows"][0].numpy(), X.sum(1))


def deleted():
    tensor = ts.tensor(X)
    del tensor.data
    return tensor


OTHERS = {
    "columns": lambda: ts.Tensor(np.asfortranarray(X)), "another shape": lambda: ts.tensor(X[:1]),
    "another type": lambda: ts.tensor(X.astype(np.float64)), "an array": lambda: X, "a number": lambda: 1.0,
    "gradients": lambda: ts.Tensor(X, requires_grad=True), "no elements": deleted,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_are_left(added, name):
    f, (x, y), call = added
    other = OTHERS[name]()
    assert call(x, other) is call(other, y) is repeated_calls.OTHER
    if name not in ("no elements", "another type"):
        np.testing.assert_array_equal(f(x, other).numpy(), np.broadcast_to(X + np.asarray(other), X.shape))


def test_another_count_is_left(added):
    _, (x, y), call = added
    assert call() is call(x) is call(x, y, y) is repeated_calls.OTHER


def test_another_thread_is_left(added):
    f, (x, y), call = added
    found = []
    thread = threading.Thread(target=lambda: found.extend([call(x, y), f(x, y)]))
    thread.start()
    thread.join()
    assert found[0] is repeated_calls.OTHER
    np.testing.assert_array_equal(found[1].numpy(), X + Y)


def test_nothing_is_kept_and_nothing_lost(added):
    _, (x, y), call = added
    held = (None, False, x, y, x.data, x.type, ts.Tensor, repeated_calls.OTHER)
    call(x, y)
    gc.collect()  # of earlier tests
    before = [sys.getrefcount(each) for each in held]
    for _ in range(10000):
        call(x, y)
        call(x, 1.0)
    gc.collect()
    changes = [sys.getrefcount(each) - count for each, count in zip(held, before, strict=True)]
    assert max(map(abs, changes)) < 2000, changes  # None and False have other users


def test_a_busy_program_is_left(added):
    f, (x, y), call = added
    lock = f._repeated.run._run.__self__._lock
    with lock:
        assert call(x, y) is repeated_calls.OTHER
    assert call(x, y) is not repeated_calls.OTHER and not lock.locked()


def test_errors_pass_and_leave_the_program_free():
    i = np.int64([0, 1])
    f, (x, places), call = make_call(lambda x, i: ts.take(x, i, axis=0), X, i)
    places.data[1] = 9
    for _ in range(2):
        with pytest.raises(ts.errors.OutOfBoundsError):
            call(x, places)
    places.data[1] = 0
    np.testing.assert_array_equal(f(x, places).numpy(), X[[0, 0]])


def test_a_result_that_cannot_be_made_is_an_error(added, monkeypatch):
    def refuse(*_):
        raise MemoryError("no memory")

    f, given, _ = added
    native = f._repeated._direct._kept[0]
    monkeypatch.setattr(native.binding, "makers", [(refuse, (0, 1))])
    types = [given[0].type] * 3
    lock = threading.Lock()
    call = tensor_calls.make_tensor_call(native, types, lock, lambda: None, repeated_calls.OTHER)
    with pytest.raises(MemoryError, match="no memory"):
        call.run(*given)
    assert not lock.locked()


@pytest.mark.parametrize("size", [3, 1 << 19])
def test_results_that_hold_zeros_first_and_large_ones(size):
    """Atomics add to their result; a large one has memory that is kept."""
    i = np.zeros(4, np.int64)
    f, (x, places, u), call = make_call(
        lambda x, i, u: x.index_add(0, i, u), np.ones(size, np.float32), i, np.ones(4, np.float32)
    )
    for _ in range(3):
        found = (call or f)(x, places, u).numpy()
        assert found[0] == 5.0 and found[1:].sum() == size - 1


@ts.kernel
def show_rows(x, out):
    i = tile.program_id(0)
    row = tile.load(x[i, 0:4])
    tile.print("row", i, row)
    tile.store(out[i, 0:4], row)


def test_programs_that_print_take_the_general_way(capsys):
    x = np.ones((2, 4), np.float32)
    f, given, call = make_call(lambda x: show_rows[(2,)](x, ts.zeros((2, 4))), x)
    assert call is None
    capsys.readouterr()
    f(*given)
    assert capsys.readouterr().out.count("row") == 2


def test_memory_pools_place_results(added):
    f, given, _ = added
    placed = []
    token = POOL_PLACEMENT.set(lambda array: placed.append(array) or array)
    try:
        f(*given)
    finally:
        POOL_PLACEMENT.reset(token)
    assert len(placed) == 1


def test_a_program_for_a_few_shapes_in_turn():
    f = ts.jit(lambda x, y: ts.concatenate([x, y], axis=1), target="llvm")
    cases = [(ts.ones((2, n)), ts.zeros((2, n + 1))) for n in (3, 4, 5, 6)]
    for _ in range(4):
        for case in cases:
            f(*case)
    calls, each = [], f._repeated
    while each is not None:
        calls.append(each)
        each = each.older
    assert len(calls) == repeated_calls.MAX_REPEATED
    for x, y in cases:
        found = f._repeated((x, y))
        assert found.type.shape == (2, 2 * x.shape[1] + 1) and found.numpy().sum() == 2 * x.shape[1]


def test_no_call_where_fields_are_not_known(monkeypatch):
    monkeypatch.setattr(tensor_calls, "_find_tensor_fields", lambda: None)
    f, given, call = make_call(lambda x, y: x - y, X, Y)
    assert call is None
    np.testing.assert_array_equal(f(*given).numpy(), X - Y)


def test_ctrl_c_stops_a_call():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread alone")
    f, given, call = make_call(lambda x: x @ x, np.ones((3000, 3000), np.float32))
    start = time.perf_counter()
    call(*given)
    whole = time.perf_counter() - start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(whole / 10, os.kill, (os.getpid(), signal.SIGINT))
    try:
        start = time.perf_counter()
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call(*given)
        assert time.perf_counter() - start < 0.7 * whole
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert call(*given).data[0, 0] == 3000.0
