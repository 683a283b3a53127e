"""Reductions over every choice of axes, odd sizes, all types, NaN and ties."""

import numpy as np
import pytest
from test_loop_fusion import numbers
from tilekernels import Kernel, agree

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.codegen.llvm.table import reductions
from tessera.core.types import bf16, bool_, f16, f32, f64, int8, int32, int64, uint8
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce
from tessera.runtime.driver import lower

AXES = [(-1,), (-2,), (-3,), (-1, -2), (-1, -3), (-2, -3), (-1, -2, -3)]


def reduced(op, x, axis, keepdims=False):
    k = Kernel(x)
    out = k(op, k.load(k.params[0]), axis=axis, keepdims=keepdims)
    return finished(k, out, x)


def finished(k, out, *inputs):
    if not out.type.shape:  # a scalar is stored as a block of one
        out = k.broadcast(out, 1)
    result = np.zeros(out.type.shape, out.type.dtype.numpy)
    k.params.append(Kernel(result).params[0])
    k.store(k.params[-1], out)
    return k.module(), [*inputs, result]


@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_sum_axes(axis, keepdims):
    x = np.random.default_rng(0).normal(size=(3, 5, 150)).astype(np.float32)
    agree(*reduced(reduce.sum, x, axis, keepdims), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [f64, f16, bf16, int8, int32, int64, uint8, bool_], ids=str)
def test_sum_types(dtype):
    x = (
        numbers(dtype, 4, 37)
        if not dtype.is_float
        else np.random.default_rng(0).normal(size=(4, 37)).astype(dtype.numpy)
    )
    agree(*reduced(reduce.sum, x, (-1,)), rtol=1e-2 if dtype.bits == 16 else 1e-12, atol=1e-2)


@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16, int8, int32, int64, uint8], ids=str)
@pytest.mark.parametrize("op", [reduce.max, reduce.min], ids=lambda o: o.name)
@pytest.mark.parametrize("axis", [(-1,), (-2,), (-1, -2)], ids=str)
def test_extremes(op, dtype, axis):
    agree(*reduced(op, numbers(dtype, 6, 70), axis))


@pytest.mark.in_turn("axis")
@pytest.mark.parametrize("dtype", [f32, f64, bf16, int8, int32, int64, uint8], ids=str)
@pytest.mark.parametrize("op", [reduce.argmax, reduce.argmin], ids=lambda o: o.name)
@pytest.mark.parametrize("axis", [-1, -2])
def test_places(op, dtype, axis):
    x = numbers(dtype, 6, 70)
    x[1] = x[2]
    x[3] = x[3, 0]
    agree(*reduced(op, x, axis))


def test_places_of_nan_and_infinity():
    x = np.full((4, 33), -np.inf, np.float32)
    x[1, 20:] = np.nan
    x[2, 31] = 1
    agree(*reduced(reduce.argmax, x, -1))


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 64, 127, 128, 130])
def test_sizes(size):
    x = np.random.default_rng(0).normal(size=(3, size)).astype(np.float32)
    agree(*reduced(reduce.sum, x, (-1,)), rtol=1e-5, atol=1e-5)
    agree(*reduced(reduce.max, x, (-1,)))
    agree(*reduced(reduce.max, x, (-2,)))


def test_softmax():
    x = np.random.default_rng(0).normal(size=(9, 75)).astype(np.float32)
    k = Kernel(x)
    block = k.load(k.params[0])
    top = k.broadcast(k(reduce.max, block, axis=(-1,), keepdims=True), 9, 75)
    weights = k(e.exp, k(e.sub, block, top))
    total = k.broadcast(k(reduce.sum, weights, axis=(-1,), keepdims=True), 9, 75)
    agree(*finished(k, k(e.div, weights, total), x), rtol=1e-6)


def test_layer_norm():
    x = np.random.default_rng(0).normal(size=(9, 384)).astype(np.float32)
    k = Kernel(x)
    block, n = k.load(k.params[0]), k.const(1 / 384, f32, (9, 1))
    mean = k.broadcast(k(e.mul, k(reduce.sum, block, axis=(-1,), keepdims=True), n), 9, 384)
    d = k(e.sub, block, mean)
    var = k(e.mul, k(reduce.sum, k(e.mul, d, d), axis=(-1,), keepdims=True), n)
    agree(*finished(k, k(e.mul, d, k.broadcast(k(e.rsqrt, var), 9, 384)), x), rtol=1e-4, atol=1e-5)


def special_rows(columns):
    """Rows of zeros of both signs, infinities, subnormal numbers, and NaN of both signs."""
    rows = np.random.default_rng(3).normal(size=(12, columns)).astype(np.float32)
    rows[0], rows[1], rows[2], rows[3] = -0.0, -0.0, 0.0, np.inf
    rows[1, columns // 2] = 0.0
    rows[2, -1] = -0.0
    rows[4], rows[5], rows[6] = -np.inf, -np.abs(rows[5]), np.abs(rows[6])
    rows[7] = -1e-42
    rows[7, 1] = 2e-42
    rows[8, columns - 1], rows[9, 0] = np.nan, np.float32(-np.nan)
    rows[10] = -np.abs(rows[10])
    rows[10, 2] = np.int32(-4194304).view(np.float32)  # NaN with the sign
    rows[11, 2:] = np.inf
    rows[11, 0] = np.nan
    return rows


@pytest.mark.parametrize("columns", [3, 7, 8, 33, 200])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_of_special_floats(name, axis, columns):
    x = np.ascontiguousarray(special_rows(columns) if axis else special_rows(columns).T)
    function, own = getattr(np, name), getattr(ts, name)
    wanted = function(x, axis=axis)
    positive = np.any(~np.signbit(x), axis=axis) if name == "max" else np.all(~np.signbit(x), axis=axis)
    wanted = np.where(wanted == 0, np.where(positive, np.float32(0.0), np.float32(-0.0)), wanted)
    found = ts.jit(lambda x: own(x, axis=axis), target="llvm")(x).numpy()
    np.testing.assert_array_equal(found, wanted)
    kept = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found)[kept], np.signbit(wanted)[kept])


def test_long_extremes_compare_bits():
    def text(columns):
        traced = ts.jit(lambda x: ts.max(x, axis=1)).trace(np.zeros((4, columns), np.float32))
        return emit_artifact(get_backend("llvm"), lower(traced.function, "llvm")["tile"], {}).text("kernels.ll")

    assert "llvm.umax" in text(100) and "llvm.maximum" not in text(100)
    assert "llvm.maximum" in text(5)


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("count", [1, 15, 16, 97, 128, 129, 300, 1000])
def test_groups_of_registers_hold_every_result_once(count, width):
    """Each loop takes steps of its group; an axis of few registers is one group, which reads the rows once."""
    found = []
    for start, stop, step, mask in reductions._group_registers(count, width, 8):
        found += [i + n for i in range(int(start), int(stop), step) for n in range(step if mask is None else count - i)]
    assert found == list(range(count))
    assert len(reductions._group_registers(96, 16, 8)) == len(reductions._group_registers(197, 16, 16)) - 1 == 1
