"""Reshapes and slices of adjacent elements on a device are views: no program runs; memory outlives its array."""

import gc

import numpy as np
import pytest

import tessera as ts
from tessera.core.device_array import DeviceArray
from tessera.runtime.launch import device_ops

X = np.arange(96, dtype=np.float32).reshape(4, 6, 4)
VIEWS = {
    "reshape": lambda x: x.reshape(8, 12),
    "all": lambda x: x[:],
    "rows": lambda x: x[1:3],
    "a row": lambda x: x[2],
    "a part of a row": lambda x: x[2, 1:5],
    "an element of a row": lambda x: x[3, 2],
    "a number": lambda x: x[3, 2, 0],
    "of a view": lambda x: x[1:4].reshape(18, 4)[3:9].reshape(-1),
}
COPIES = {
    "columns": lambda x: x[:, 1:3],
    "steps": lambda x: x[::2],
    "unaligned": lambda x: x[0, 0, 1:3],
    "elements of rows": lambda x: x[1:3, 0:1],
}


@pytest.fixture
def x():
    return ts.tensor(X).to("ptx")


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
def test_elements_are_those_of_numpy(x, name, monkeypatch):
    compiled, plain = [], device_ops._compile_op
    monkeypatch.setattr(device_ops, "_PROGRAMS", type(device_ops._PROGRAMS)())
    monkeypatch.setattr(device_ops, "_compile_op", lambda *given: compiled.append(given) or plain(*given))
    change = {**VIEWS, **COPIES}[name]
    found = change(x)
    assert isinstance(found.data, DeviceArray) and bool(compiled) == (name in COPIES)
    want = change(X)
    assert found.shape == want.shape
    np.testing.assert_array_equal(found.numpy(), want)
    np.testing.assert_array_equal((found * 2).numpy(), 2 * want)


def test_memory_outlives_the_array(x):
    y = x[1:3].reshape(12, 4)[1:]
    del x
    gc.collect()
    kept = [ts.tensor(np.full((4, 6, 4), 7.0, np.float32)).to("ptx") for _ in range(4)]
    np.testing.assert_array_equal(y.numpy(), X[1:3].reshape(12, 4)[1:])
    assert len(kept) == 4


@pytest.mark.parametrize("give_view", [False, True])
def test_donated_memory_that_a_view_shares_is_copied(x, give_view):
    view = x.reshape(96)
    add = ts.jit(lambda y: y + 1, target="ptx", donate=("y",))
    given, other = (view, x) if give_view else (x, view)
    np.testing.assert_array_equal(add(given).numpy().reshape(-1), X.reshape(-1) + 1)
    np.testing.assert_array_equal(other.numpy().reshape(-1), X.reshape(-1))
