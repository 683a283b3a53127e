"""Calls of a kind that was called before skip the signature, and mean what the first call meant."""

import ctypes

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.device import array_address
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.frontend.kernel.signature import KernelParameters

FACTOR = 2.0


@ts.kernel
def scale(x: ts.Tensor["N"], y: ts.Tensor["N"], by: float = 1.0, *, B: int = 4, twice=False):
    i = tile.program_id(0) * B
    block = x[i : i + B] * FACTOR * by
    y[i : i + B] = block + block if twice else block


@pytest.fixture
def bound(monkeypatch):
    """One entry for each call that is bound to the signature."""
    found, bind = [], KernelParameters.bind
    monkeypatch.setattr(KernelParameters, "bind", lambda *args: found.append(args) or bind(*args))
    return found


def arrays(n=8):
    return np.arange(n, dtype="f4"), np.zeros(n, "f4")


@pytest.mark.parametrize("target", ("interp", "llvm"))
def test_only_the_first_call_of_a_kind_is_bound(bound, target):
    kernel = scale.like(scale.options.__class__(target=target))
    for by in (1.0, 3.0, -0.5):  # a number of run time counts by its type
        x, y = arrays()
        kernel[(2,)](x, y, by, B=4)
        np.testing.assert_array_equal(y, x * 2 * by)
    assert len(bound) == 1
    kernel[(2,)](*arrays(), 1, B=4)
    kernel[(1,)](*arrays(), 1.0, B=8)
    kernel[(4,)](*arrays(16), 1.0, B=4)
    assert len(bound) == 4
    x, y = arrays()
    kernel[2,](y=y, x=x, by=1.0, B=4)
    kernel[2,](by=1.0, B=4, y=y, x=x)
    np.testing.assert_array_equal(y, x * 2)


def test_what_a_call_depends_on_is_seen(bound, monkeypatch):
    x, y = arrays()
    scale[(2,)](x, y, 1.0, B=4, twice=False)
    scale[(2,)](x, y, 1.0, B=4, twice=True)
    np.testing.assert_array_equal(y, x * 4)
    monkeypatch.setitem(scale.kernel_function.__globals__, "FACTOR", 5.0)  # a name outside of the kernel
    scale[(2,)](x, y, 1.0, B=4, twice=False)
    np.testing.assert_array_equal(y, x * 5)
    tensor = ts.Tensor(np.zeros(8, np.float32))
    for _ in range(2):
        scale[(2,)](ts.Tensor(x), tensor, 1.0, B=4)
        np.testing.assert_array_equal(tensor.numpy(), x * 5)
    grids = iter([(1,), (2,)])
    for n in (4, 8):
        y[:] = 0
        scale[lambda c: next(grids)](x, y, 1.0, B=4)
        assert np.count_nonzero(y) == n - 1  # x[0] is 0


def test_arrays_of_one_kind_in_other_memory():
    x, y = np.arange(16, dtype="f4")[::2], np.zeros(16, "f4")[1::2]
    for a, b in (arrays(), (x, y), arrays(), (x, y)):
        b[:] = 0
        scale.like(scale.options.__class__(target="llvm"))[(2,)](a, b, 1.0, B=4)
        np.testing.assert_array_equal(b, a * 2)
    same = np.arange(8, dtype="f4")
    for _ in range(2):
        scale.like(scale.options.__class__(target="llvm"))[(2,)](same, same, 0.5, B=4)
    np.testing.assert_array_equal(same, np.arange(8))


def test_wrong_calls_are_refused_after_right_ones():
    x, y = arrays()
    scale[(2,)](x, y, 1.0, B=4)
    fixed = y.copy()
    fixed.flags.writeable = False
    wrong = {
        ArgumentError: [(x, fixed, 1.0), (x, y, 1.0, 2), (x,)],
        ShapeError: [(x, y[:4], 1.0)],
        DTypeError: [(1.0, y, 1.0)],
    }
    for error, calls in wrong.items():
        for args in calls:
            with pytest.raises(error):
                scale[(2,)](*args, B=4)
    for grid in ((True,), (2.5,), ([2],), "2"):
        with pytest.raises(ArgumentError):
            scale[grid](x, y, 1.0, B=4)


def test_the_address_of_an_array():
    whole = np.arange(24, dtype="i2").reshape(4, 6)
    for array in (whole, whole[1:, 2:], whole[::-1], whole.T, np.array(3.0)):
        assert array_address(array) == array.__array_interface__["data"][0]
    assert ctypes.c_int16.from_address(array_address(whole[2:, 3:])).value == whole[2, 3]
