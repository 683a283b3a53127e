"""Native bindings: of programs with many weights, on several threads, with donated arrays. A call keeps nothing."""

import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.llvm import BACKEND
from tessera.codegen.llvm.runtime import native_calls
from tessera.core.errors import ShapeError
from tessera.ir.frozen_tree import FrozenDict
from tessera.runtime.driver import lower

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 300)).astype(np.float32)
W = [RNG.normal(size=(300, 300)).astype(np.float32) for _ in range(30)]


@pytest.fixture
def fills(monkeypatch):
    """What came of each native call: whether the arrays were taken as they are."""
    found = []
    run = native_calls.NativeCall.run

    def noted(self, given):
        code = run(self, given)
        found.append(code != native_calls.OTHER_ARRAYS)
        return code

    monkeypatch.setattr(native_calls.NativeCall, "run", noted)
    return found


def scale_rows(x, weights):
    return ts.concatenate([x[i] @ w for i, w in enumerate(weights)], axis=0)


def expect_rows(x, weights):
    return np.concatenate([x[i] @ w for i, w in enumerate(weights)])


def load(function, *arrays, threads=2):
    lowered = lower(ts.jit(function).trace(*arrays).function, "llvm")["tile"]
    return BACKEND.runtime(BACKEND.emit(lowered, {}), threads)


@pytest.fixture(scope="module")
def program():
    return load(lambda x, *weights: scale_rows(x, weights), X, *W)


def test_many_weights_on_two_threads(program, fills):
    found = program.run([X, *W])[0]
    np.testing.assert_allclose(found, expect_rows(X, W), rtol=1e-4, atol=1e-3)
    assert fills == [True]


@pytest.mark.parametrize("place", [0, 1, 30])
def test_an_array_replaced_between_calls_is_seen(program, place):
    program.run([X, *W])
    given = [X, *W]
    given[place] = given[place] * 2 + 1
    np.testing.assert_allclose(program.run(given)[0], expect_rows(given[0], given[1:]), rtol=1e-4, atol=1e-2)


def test_an_array_written_in_place_is_seen(program):
    weights = [w.copy() for w in W]
    program.run([X, *weights])
    weights[3][:] = 0.0
    found = program.run([X, *weights])[0]
    assert not found[900:1200].any() and found[:900].all()


def test_memory_of_an_array_that_moved_is_seen(program, fills):
    moved = W[0].copy()
    program.run([X, moved, *W[1:]])
    moved.resize((301, 300), refcheck=False)
    moved.resize((300, 300), refcheck=False)
    np.testing.assert_allclose(program.run([X, moved, *W[1:]])[0], expect_rows(X, W), rtol=1e-4, atol=1e-3)
    assert fills == [True, True]


def test_collected_arrays_are_not_read(program):
    for i in range(8):
        weights = [np.full_like(w, i) for w in W]  # likely where those before were
        np.testing.assert_allclose(program.run([X, *weights])[0], expect_rows(X, weights), rtol=1e-3, atol=1e-2)
        del weights
        gc.collect()


def make_others():
    read_only = W[0].copy()
    read_only.flags.writeable = False
    wide = np.zeros((600, 300), np.float32)
    wide[150:450] = W[0]
    return {
        "read-only": (read_only, True),
        "view of rows": (wide[150:450], True),
        "columns": (np.asfortranarray(W[0]), False),
        "memory map": (np.frombuffer(W[0].tobytes(), np.float32).reshape(300, 300), True),
        "unpickled": (pickle.loads(pickle.dumps(W[0])), True),
        "own type object": (W[0].astype(np.dtype("f4", copy=True)).view(np.dtype(np.float32, copy=True)), True),
    }


@pytest.mark.parametrize("name", make_others())
def test_other_arrays_give_the_same(program, fills, name):
    array, taken = make_others()[name]
    np.testing.assert_array_equal(program.run([X, array, *W[1:]])[0], program.run([X, *W])[0])
    assert fills == [taken, True]


def test_element_types_are_told_apart(program, fills):
    with pytest.raises(ts.errors.DTypeError):
        program.run([X, W[0].view(np.int32), *W[1:]])
    with pytest.raises(ts.errors.DTypeError):
        program.run([X, W[0].astype(">f4"), *W[1:]])
    with pytest.raises(ShapeError):
        program.run([X, W[0][:299], *W[1:]])
    assert fills == [False] * 3


def test_two_threads_of_callers_have_their_own_arrays(program):
    def call(i):
        weights = [w * np.float32(i) for w in W]
        return np.abs(program.run([X, *weights])[0] - expect_rows(X, weights)).max() / max(i, 1)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(call, range(24))) < 1e-2


def step(weights, x, state):
    return ts.tanh(x @ weights["w"]) + state, state + x @ weights["w"]


@pytest.mark.parametrize("frozen", [False, True])
def test_donated_state_and_frozen_weights(frozen):
    f = ts.jit(step, target="llvm", donate=("state",), dynamic=False)
    tree = {"w": ts.tensor(W[0])}
    weights, state, expected = FrozenDict(tree) if frozen else tree, ts.tensor(X), X
    for _ in range(4):
        _, state = f(weights, ts.tensor(X), state)
        expected = expected + X @ W[0]
    np.testing.assert_allclose(state.numpy(), expected, rtol=1e-4, atol=1e-2)


def test_a_donated_tensor_that_is_held_keeps_its_elements():
    f = ts.jit(step, target="llvm", donate=("state",), dynamic=False)
    weights = {"w": ts.tensor(W[0])}
    for _ in range(3):
        state = ts.tensor(X.copy())
        held = state.numpy()
        f(weights, ts.tensor(X), state)
        np.testing.assert_array_equal(held, X)


def test_one_state_given_twice_is_not_written_under_the_other():
    f = ts.jit(lambda a, b: (a * 2.0, b * 3.0), target="llvm", donate=("a", "b"), dynamic=False)
    for _ in range(3):
        held = X.copy()
        doubled, tripled = f(ts.tensor(held), ts.tensor(held))
        np.testing.assert_array_equal(doubled.numpy(), X * 2)
        np.testing.assert_array_equal(tripled.numpy(), X * 3)


def test_a_weight_of_a_module_set_anew_is_seen():
    model = ts.nn.Linear(300, 300)
    f = ts.jit(lambda model, x: model(x), target="llvm", dynamic=False)
    for w in (W[0], W[1], W[2]):
        model.weight = ts.tensor(w)
        bias = model.bias.numpy()
        np.testing.assert_allclose(f(model, ts.tensor(X)).numpy(), X @ w.T + bias, rtol=1e-4, atol=1e-3)
    model.load_state_dict({"weight": W[5], "bias": np.zeros(300, np.float32)})
    np.testing.assert_allclose(f(model, ts.tensor(X)).numpy(), X @ W[5].T, rtol=1e-4, atol=1e-3)


def test_callers_on_threads_other_than_the_main_one(program):
    found = []
    thread = threading.Thread(target=lambda: found.append(program.run([X, *W])[0]))
    thread.start()
    thread.join()
    np.testing.assert_allclose(found[0], expect_rows(X, W), rtol=1e-4, atol=1e-3)
