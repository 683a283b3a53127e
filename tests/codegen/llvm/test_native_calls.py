"""Native calls: small programs whose arrays machine code checks, and the arrays that it leaves to the general way."""

import threading

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm import BACKEND
from tessera.codegen.llvm.runtime import interrupts, native_calls
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.runtime.driver import lower

X = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
Y = np.random.default_rng(1).integers(-9, 9, (5, 7)).astype(np.int32)
DIRECT = interrupts.get_direct_address


@pytest.fixture(scope="module")
def program():
    traced = ts.jit(lambda x, y: (ts.cast(y, ts.f32) - x, y + y)).trace(X, Y)
    return BACKEND.runtime(BACKEND.emit(lower(traced.function, "llvm")["tile"], {}), 1)


@pytest.fixture
def native(program, monkeypatch):
    """The program, and what came of its native calls."""
    codes = []
    run = native_calls.NativeCall.run

    def noted(self, given):
        codes.append(run(self, given))
        return codes[-1]

    monkeypatch.setattr(native_calls.NativeCall, "run", noted)
    return program, codes


def check(found, x=X, y=Y):
    np.testing.assert_array_equal(found[0], np.asarray(y).astype(np.float32) - x)
    np.testing.assert_array_equal(found[1], np.asarray(y) + np.asarray(y))


def test_plain_arrays_are_taken(native):
    program, codes = native
    first, second = program.run([X, Y]), program.run([X + 1, Y * 2])
    check(first)
    check(second, X + 1, Y * 2)
    assert codes == [native_calls.DONE] * 2


class Own(np.ndarray):
    """An array of another class."""


OTHERS = {
    "columns": (np.asfortranarray(X), Y),
    "every second": (np.repeat(X, 2, axis=1)[:, ::2], Y),
    "another class": (X.view(Own), Y),
    "unaligned": (np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32).reshape(X.shape), Y),
    "a list": (X, Y.tolist()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arrays_are_converted(native, name):
    x, y = OTHERS[name]
    program, codes = native
    given = [x, np.asarray(y, np.int32)] if name != "a list" else [x, np.array(y, np.int32).view(Own)]
    check(program.run(given), np.asarray(x), Y)
    assert codes == [native_calls.OTHER_ARRAYS]


@pytest.mark.parametrize(
    ("arrays", "error"),
    [
        ([X, Y[:4]], ShapeError),
        ([X.reshape(7, 5), Y], ShapeError),
        ([X.reshape(-1), Y], ShapeError),
        ([X[None], Y], ShapeError),
        ([X, Y.astype(np.int64)], DTypeError),
        ([Y, X], DTypeError),
        ([X, Y.view(np.float32)], DTypeError),
        ([X.astype(">f4"), Y], DTypeError),
        ([X], ArgumentError),
        ([X, Y, X], ArgumentError),
    ],
)
def test_wrong_arrays_are_refused(program, arrays, error):
    with pytest.raises(error):
        program.run(arrays)
    check(program.run([X, Y]))


def test_results_are_new_arrays(program):
    first, second = program.run([X, Y])[0], program.run([X, Y])[0]
    assert not np.shares_memory(first, second)


def test_other_threads_take_the_general_way(native):
    program, codes = native
    found = []
    thread = threading.Thread(target=lambda: found.append(program.run([X, Y])))
    thread.start()
    thread.join()
    check(found[0])
    assert codes == []


def test_an_unknown_layout_is_not_read(monkeypatch):
    monkeypatch.setattr(native_calls, "has_known_layout", lambda: False)
    found = ts.jit(lambda x: x + 1.5, target="llvm")(X)
    np.testing.assert_array_equal(found.numpy(), X + np.float32(1.5))


def test_the_layout_is_known_here():
    assert native_calls.has_known_layout()
    assert not native_calls._has_known_fields(X.view(Own))


def test_calls_of_other_types_and_numbers_alternate():
    f = ts.jit(lambda x, k: x * k, static_argnums=(1,), target="llvm")
    for k in (2, 3, 2.0, 2):
        for x in (X, X[:3], Y):
            found = f(x, k) if x is not Y or isinstance(k, int) else None
            if found is not None:
                np.testing.assert_array_equal(found.numpy(), x * x.dtype.type(k))


def test_arrays_without_elements():
    x = np.zeros((0, 3), np.float32)
    assert ts.jit(lambda x: x + 1.0, target="llvm")(x).shape == (0, 3)


@pytest.mark.parametrize(
    ("function", "size", "short"),
    [
        (lambda x: x + 1.0, (20, 30), True),
        (lambda x: x + 1.0, (2000, 3000), False),  # more programs
        (lambda x: ts.while_loop(lambda x: ts.sum(x) < 1e6, lambda x: x * 2.0, x), (20,), False),
        (lambda x: ts.cumsum(x), (4, 5000), False),  # a loop that checks the stop word
    ],
    ids=["few", "many", "while", "scan"],
)
def test_programs_that_end_soon_set_no_signal_handler(monkeypatch, function, size, short):
    asked = []
    monkeypatch.setattr(interrupts, "get_direct_address", lambda: asked.append(size) or DIRECT())
    x = np.ones(size, np.float32)
    lowered = lower(ts.jit(function).trace(x).function, "llvm")["tile"]
    program = BACKEND.runtime(BACKEND.emit(lowered, {}), 1)
    program.run([x])
    assert bool(asked) == short
