"""Pointwise ops, casts and index ops on blocks, against the Tile interpreter."""

import ml_dtypes
import numpy as np
import pytest
from tilekernels import Kernel, agree

import tessera as ts
from tessera.core.types import bf16, bool_, f16, f32, f64, int8, int16, int32, int64, tf32, uint8
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

FLOATS = [f32, f64, f16, bf16]
INTEGERS = [int8, int16, int32, int64, uint8]
ARITHMETIC = [e.add, e.sub, e.mul, e.maximum, e.minimum]
UNARY = [e.neg, e.abs, e.floor, e.ceil, e.round, e.sqrt, e.rsqrt]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 1.0, -2.5, 0.5, 1.5]


def numbers(dtype, *size, seed=0):
    rng = np.random.default_rng(seed)
    if dtype == bool_:
        return rng.random(size) < 0.5
    if dtype.is_float:
        x = rng.normal(size=size) * 4
        x.flat[: min(x.size, len(SPECIAL))] = SPECIAL[: x.size]
        return x.astype(dtype.numpy)
    info = np.iinfo(dtype.numpy)
    x = rng.integers(info.min, info.max, size, dtype.numpy, endpoint=True)
    x.flat[:3] = [info.min, info.max, 0]
    return x


def pointwise(op, *inputs, **attrs):
    """A program that applies an op to whole arrays."""
    k = Kernel(*inputs)
    out = k(op, *(k.load(p) for p in k.params), **attrs)
    result = np.zeros(out.type.shape, out.type.dtype.numpy)
    k.params.append(Kernel(result).params[0])
    k.store(k.params[-1], out)
    return k.module(), [*inputs, result]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
@pytest.mark.parametrize("op", [*ARITHMETIC, e.floor_divide, e.remainder], ids=lambda o: o.name)
def test_arithmetic(op, dtype):
    x, y = numbers(dtype, 3, 37), numbers(dtype, 3, 37, seed=1)
    if op in (e.floor_divide, e.remainder):
        y[y == 0] = 3
    agree(*pointwise(op, x, y))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_div(dtype):
    agree(*pointwise(e.div, numbers(dtype, 5, 19), numbers(dtype, 5, 19, seed=2)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", UNARY, ids=lambda o: o.name)
def test_unary(op, dtype):
    agree(*pointwise(op, numbers(dtype, 45)))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, bool_], ids=str)
@pytest.mark.parametrize(
    "op", [e.less, e.less_equal, e.greater, e.greater_equal, e.equal, e.not_equal], ids=lambda o: o.name
)
def test_comparison(op, dtype):
    x, y = numbers(dtype, 40), numbers(dtype, 40, seed=3)
    y[5:15] = x[5:15]
    agree(*pointwise(op, x, y))


@pytest.mark.parametrize("dtype", [*INTEGERS, bool_], ids=str)
@pytest.mark.parametrize("op", [e.bitwise_and, e.bitwise_or, e.bitwise_xor], ids=lambda o: o.name)
def test_bitwise(op, dtype):
    agree(*pointwise(op, numbers(dtype, 33), numbers(dtype, 33, seed=4)))
    agree(*pointwise(e.bitwise_not, numbers(dtype, 33)))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", [e.shift_left, e.shift_right], ids=lambda o: o.name)
def test_shift(op, dtype):
    agree(*pointwise(op, numbers(dtype, 33), (numbers(dtype, 33, seed=4) % 8).astype(dtype.numpy)))


@pytest.mark.parametrize("dtype", [*FLOATS, int32, bool_], ids=str)
def test_where(dtype):
    agree(*pointwise(e.where, numbers(bool_, 7, 9), numbers(dtype, 7, 9), numbers(dtype, 7, 9, seed=1)))


@pytest.mark.parametrize("source", [*FLOATS, *INTEGERS, bool_], ids=str)
@pytest.mark.parametrize("to", [*FLOATS, tf32, *INTEGERS, bool_], ids=str)
def test_cast(source, to):
    x = numbers(source, 200)
    if source.is_float and to.is_float:
        with np.errstate(all="ignore"):
            x[:150] = (x[:150].astype(np.float64) * np.logspace(-45, 45, 150)).astype(source.numpy)
    k = Kernel(x)
    out = k(basic.cast, k.load(k.params[0]), dtype=to)
    wide = {tf32: f32, bool_: uint8}.get(to, to)
    result = np.zeros(x.shape, wide.numpy)
    k.params.append(Kernel(result).params[0])
    k.store(k.params[1], k(basic.cast, out, dtype=wide) if wide != to else out)
    agree(k.module(), [x, result])


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_permute(axes):
    agree(*pointwise(shape.permute, numbers(f32, 5, 21), axes=axes))


def test_permute_3():
    agree(*pointwise(shape.permute, numbers(f16, 3, 4, 21), axes=(2, 0, 1)))


@pytest.mark.parametrize("to", [(60,), (5, 12), (3, 1, 20), (4, 15), (1, 60, 1), (2, 3, 10)])
def test_reshape(to):
    agree(*pointwise(shape.reshape, numbers(int32, 3, 20), shape=to))


@pytest.mark.parametrize("to", [(4, 3, 20), (3, 20)])
def test_broadcast(to):
    agree(*pointwise(basic.broadcast_to, numbers(bf16, 1, 20), shape=to))
    agree(*pointwise(basic.broadcast_to, numbers(bf16, to[-2], 1), shape=to))


def test_iota_axes():
    out = np.zeros((6, 11), np.int32)
    k = Kernel(out)
    rows, columns = (k(shape.iota, shape=(6, 11), axis=a, dtype=int32) for a in (-2, -1))
    k.store(k.params[0], k.add(k(e.mul, rows, k.const(100, int32, (6, 11))), columns))
    agree(k.module(), [out])


def test_a_narrow_chain_rounds_at_each_op():
    x, y = numbers(bf16, 4, 33), numbers(bf16, 4, 33, seed=1)
    out = np.zeros((4, 33), ml_dtypes.bfloat16)
    k = Kernel(x, y, out)
    a, b = k.load(k.params[0]), k.load(k.params[1])
    k.store(k.params[2], k(e.mul, k.add(k(e.mul, a, b), a), k.add(a, b)))
    agree(k.module(), [x, y, out])


def test_scalar_parameters():
    x, s, out = numbers(f32, 20), np.float32(2.5), np.zeros(20, np.float32)
    k = Kernel(x, np.asarray(s), out)
    k.store(k.params[2], k(e.mul, k.load(k.params[0]), k.broadcast(k.params[1], 20)))
    agree(k.module(), [x, np.asarray(s), out])


def test_a_long_chain_is_stored_on_the_way():
    @ts.kernel
    def chain(x, y):
        block = x[:]
        for _ in ts.tile.static_range(150):
            block = block * 0.75 + 0.5
        y[:] = block

    x = np.linspace(0, 3, 24, dtype=np.float32)
    want = x
    for _ in range(150):
        want = want * np.float32(0.75) + np.float32(0.5)
    got = ts.jit(lambda x: ts.launch(chain, (1,), x, ts.like(x)), target="llvm")(x)
    np.testing.assert_array_equal(got.numpy(), want)


POLYNOMIALS = {
    "square": lambda a: a * a, "of two": lambda a: (a + 1) * (3 - a), "cube": lambda a: a * a * a - a,
    "difference": lambda a: a - a * 2, "scaled": lambda a: (a * 3 - 7) * 2 + a,
}  # fmt: skip


@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 16, 33])
def test_products_of_consecutive_numbers_are_not_consecutive(size, name):
    """The lanes of a short vector count from a number, by which another vector that counts is not scaled."""
    polynomial = POLYNOMIALS[name]
    found = ts.jit(lambda x: x + polynomial(ts.arange(size)), target="llvm")(np.zeros(size, np.int64))
    np.testing.assert_array_equal(found, polynomial(np.arange(size)))
