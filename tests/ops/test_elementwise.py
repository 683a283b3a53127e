"""Elementwise ops against Python's own arithmetic, one number at a time."""

import math
import operator

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import DTypeError, ShapeError
from tessera.core.types import bf16, bool_, f16, f32, f64, int8, int32, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e

X = [-2.5, -1.0, -0.5, 0.25, 1.0, 3.5]
Y = [0.5, -3.0, 2.0, 0.75, 4.0, -1.25]
WHOLE, OTHER = [7, -7, 5, -128, 100, 0], [2, 2, -3, 1, 27, 5]

BINARY = {
    e.add: operator.add,
    e.sub: operator.sub,
    e.mul: operator.mul,
    e.div: operator.truediv,
    e.floor_divide: operator.floordiv,
    e.remainder: operator.mod,
    e.maximum: max,
    e.minimum: min,
    e.less: operator.lt,
    e.less_equal: operator.le,
    e.greater: operator.gt,
    e.greater_equal: operator.ge,
    e.equal: operator.eq,
    e.not_equal: operator.ne,
}
UNARY = {
    e.neg: operator.neg,
    e.abs: abs,
    e.exp: math.exp,
    e.exp2: lambda x: 2.0**x,
    e.tanh: math.tanh,
    e.erf: math.erf,
    e.sin: math.sin,
    e.cos: math.cos,
    e.floor: math.floor,
    e.ceil: math.ceil,
    e.round: round,
}
OF_POSITIVE = {e.log: math.log, e.log2: math.log2, e.sqrt: math.sqrt, e.rsqrt: lambda x: 1 / math.sqrt(x)}
BITS = {
    e.bitwise_and: operator.and_,
    e.bitwise_or: operator.or_,
    e.bitwise_xor: operator.xor,
}


def name(op):
    return op.__name__


@pytest.mark.parametrize("dtype", (f64, f32, f16, bf16), ids=str)
@pytest.mark.parametrize("op", BINARY, ids=name)
def test_binary(op, dtype):
    out = op(Tensor(X, dtype), Tensor(Y, dtype)).numpy()
    want = np.array([BINARY[op](x, y) for x, y in zip(X, Y, strict=True)])  # every operand is exact in bf16
    assert np.array_equal(out, want.astype(out.dtype))


@pytest.mark.parametrize("op", BINARY, ids=name)
def test_binary_on_integers(op):
    out = op(Tensor(WHOLE, int32), Tensor(OTHER, int32))
    want = [BINARY[op](x, y) for x, y in zip(WHOLE, OTHER, strict=True)]
    assert out.dtype == (f32 if op is e.div else bool_ if out.dtype is bool_ else int32)
    assert out.numpy().tolist() == np.float32(want).tolist() if op is e.div else out.numpy().tolist() == want


@pytest.mark.parametrize("dtype", (f64, f32, f16, bf16), ids=str)
@pytest.mark.parametrize("op", UNARY, ids=name)
def test_unary(op, dtype):
    out = op(Tensor(X, dtype))
    assert out.dtype == dtype
    np.testing.assert_allclose(out.numpy().astype(float), [UNARY[op](x) for x in X], rtol=TOLERANCE[dtype])


TOLERANCE = {f64: 1e-15, f32: 3e-7, f16: 6e-4, bf16: 4e-3}


@pytest.mark.parametrize("op", OF_POSITIVE, ids=name)
def test_functions_of_positive_numbers(op):
    out = op(Tensor([0.25, 1.0, 3.5], f32)).numpy()
    np.testing.assert_allclose(out, [OF_POSITIVE[op](x) for x in (0.25, 1.0, 3.5)], rtol=3e-7)


def test_pow():
    out = e.pow(Tensor([2.0, -2.0, 0.0, 9.0]), Tensor([10.0, 3.0, 0.0, 0.5])).numpy()
    assert out.tolist() == [1024, -8, 1, 3]
    with pytest.raises(DTypeError, match="negative power is not an integer"):
        Tensor([2]) ** -1


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8"])
def test_powers_of_integers_stay_integers(dtype, rng):
    x, y = rng.integers(-5, 6, 60), rng.integers(0, 70, 60)
    x, y = (np.abs(x) if dtype == "uint8" else x).astype(dtype), y.astype(dtype)
    want = np.power(x, y)
    fits = np.abs(x.astype(float)) ** y < 2.0 ** (8 * want.itemsize - 1)
    for target in ("interp", "llvm"):
        found = ts.jit(lambda x, y: x**y, target=target)(x, y).numpy()
        assert found.dtype == want.dtype and (found == want)[fits].all()
    assert (Tensor(x) ** 3).numpy().tolist() == (x**3).tolist() and (2 ** Tensor([0, 5])).tolist() == [1, 32]
    assert (Tensor([1, -1, 2, 0]) ** Tensor([-3, -3, -1, 64])).tolist() == [1, -1, 0, 0]


@pytest.mark.parametrize("op", BITS, ids=name)
def test_bits(op):
    assert op(Tensor(WHOLE, int8), Tensor(OTHER, int8)).numpy().tolist() == list(map(BITS[op], WHOLE, OTHER))
    truth = [(a, b) for a in (False, True) for b in (False, True)]
    left, right = (Tensor(np.array(side)) for side in zip(*truth, strict=True))
    assert op(left, right).numpy().tolist() == [BITS[op](a, b) for a, b in truth]


def test_invert_and_shifts():
    assert (~Tensor([5, -1], int8)).numpy().tolist() == [-6, 0]
    assert (~Tensor(np.array([True, False]))).numpy().tolist() == [False, True]
    assert (Tensor([1, 3], int32) << 4).numpy().tolist() == [16, 48]
    assert (Tensor([-16, 48], int32) >> 4).numpy().tolist() == [-1, 3]


def test_where():
    x = Tensor([-1.0, 2.0])
    assert e.where(x > 0, x, 0.5).numpy().tolist() == [0.5, 2]
    with pytest.raises(DTypeError, match="the condition is not bool"):
        e.where(x, x, x)


def test_rounding_goes_to_even():
    assert e.round(Tensor([0.5, 1.5, 2.5, -0.5, -2.5])).numpy().tolist() == [0, 2, 2, 0, -2]


def test_nan_and_infinity():
    x = Tensor([np.nan, np.inf, -np.inf, 0.0, -1.0], f32)
    assert np.isnan(e.maximum(x, 0.0).numpy()).tolist() == [True] + [False] * 4
    assert np.isnan(e.minimum(0.0, x).numpy()).tolist() == [True] + [False] * 4
    assert not e.equal(x, x).numpy()[0] and e.not_equal(x, x).numpy()[0] and not e.less(x, x).numpy()[0]
    assert e.log(x).numpy()[1:4].tolist()[0] == np.inf and np.isnan(e.log(x).numpy()[[0, 2, 4]]).all()
    assert e.log(x).numpy()[3] == -np.inf and e.exp(x).numpy()[1:4].tolist() == [np.inf, 0, 1]
    assert np.isnan(e.sqrt(x).numpy()[4]) and np.isnan(e.sin(x).numpy()[:3]).all() and e.rsqrt(x).numpy()[3] == np.inf


def test_division_by_zero():
    assert (Tensor([1.0, -1.0]) / 0.0).numpy().tolist() == [np.inf, -np.inf]
    assert np.isnan((Tensor([0.0]) / 0.0).numpy()).all()


def test_16_bit_values_compute_in_f32_and_round_once():
    x = Tensor([60000.0], f16)
    assert np.isinf((x + x).numpy()).all() and (x * 0.5 + x * 0.5).numpy()[0] == 60000
    one, tiny = Tensor([1.0], bf16), Tensor([2.0**-9], bf16)
    assert (one + tiny).numpy().astype(float)[0] == 1.0


def test_integers_wrap():
    assert (Tensor([127], int8) + 1).numpy().tolist() == [-128] and e.neg(Tensor([-128], int8)).numpy() == -128


def test_arithmetic_on_bool_is_refused():
    with pytest.raises(DTypeError) as caught:
        e.sub(Tensor(np.array([True])), Tensor(np.array([True])))
    assert "arithmetic on bool" in str(caught.value) and "use & | ^ for logic, or cast to ts.int32" in str(caught.value)


def test_bits_of_floats_are_refused():
    with pytest.raises(DTypeError, match="bitwise ops need integers or bools"):
        Tensor([1.0]) & Tensor([2.0])


def test_broadcasting():
    out = e.add(Tensor(np.ones((3, 1), "f4")), Tensor(np.arange(4.0, dtype="f4")))
    assert out.shape == (3, 4) and out.numpy()[2].tolist() == [1, 2, 3, 4]
    with pytest.raises(ShapeError, match="cannot broadcast 3 with 4 in dimension 1"):
        e.add(Tensor(np.ones((2, 3), "f4")), Tensor(np.ones((2, 4), "f4")))


def test_functions_of_integers_give_f32():
    assert e.exp(Tensor([0, 1], int64)).dtype == f32 and ts.sqrt(4).dtype == f32
    assert all(f(Tensor([3], int8)).dtype == int8 for f in (e.floor, e.ceil, e.round, ts.trunc))  # whole already
