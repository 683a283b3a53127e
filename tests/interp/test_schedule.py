"""The Schedule interpreter on kernels built by hand."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import OutOfBoundsError
from tessera.core.types import RefType, bf16, f32, fp8_e5m2, int64
from tessera.frontend.jit.tracing import jit
from tessera.interp import schedule
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Function, Module, Value
from tessera.ops.dialects import schedule as ops
from tessera.ops.tensor import basic, elementwise
from tessera.runtime import driver


def module(shape, out_shape, dims, tile, loop, body):
    """A module with one kernel from x to out; `body(add, x, out)` adds its nodes."""
    inner, outer = Builder(), Builder()
    types = RefType(shape, f32), RefType(out_shape, f32)
    refs = tuple(Value(t, n) for t, n in zip(types, ("x", "out"), strict=True))

    def add(op, *args, **attrs):
        node = inner.add(op, args, attrs)
        return node.out if node.results else None

    body(add, *refs)
    params = tuple(Value(t, n) for t, n in zip(types, ("x", "out"), strict=True))
    attrs = {"dims": dims, "schedule": {"tile": tile, "loop": loop}}
    outer.add(ops.kernel, params, attrs, types=(), regions=(inner.block(refs, ()),))
    return Module("schedule", (Function("main", outer.block(params, ()), Attrs({"outputs": 1})),))


@pytest.mark.parametrize("tile, loop", [(4, ()), (3, ()), (1, ()), (2, (0,))])
def test_each_index_once(tile, loop):
    def body(add, x, out):
        i = add(ops.index, dim=0)
        add(ops.store, out, add(elementwise.add, add(ops.load, x, i), add(ops.load, x, i)), i)

    x = np.arange(4, dtype=np.float32)
    (got,) = schedule.run(module((4,), (4,), (("i", 4, "parallel"),), (tile,), loop, body), [x])
    np.testing.assert_array_equal(got, 2 * x)


@pytest.mark.parametrize("kind, want", [("sum", np.sum), ("max", np.max), ("min", np.min)])
@pytest.mark.parametrize("tile, loop", [(7, ()), (3, (1,)), (1, (1,))])
def test_reductions_over_tiles(kind, want, tile, loop):
    def body(add, x, out):
        i = add(ops.index, dim=0)
        add(ops.store, out, add(ops.reduce, add(ops.load, x, i, add(ops.index, dim=1)), kind=kind, dim=1), i)

    x = np.arange(14, dtype=np.float32).reshape(2, 7) - 9
    dims = (("i", 2, "parallel"), ("k", 7, "reduce"))
    (got,) = schedule.run(module((2, 7), (2,), dims, (1, tile), loop, body), [x])
    np.testing.assert_array_equal(got, want(x, axis=1))


@pytest.mark.parametrize("values", [[1, 5, 5, 2], [np.nan, 1, np.nan, 2], [-np.inf] * 4, [2, np.nan, 3, 9]])
@pytest.mark.parametrize("kind, want", [("argmax", np.argmax), ("argmin", np.argmin)])
def test_first_of_equals_over_tiles(values, kind, want):
    def body(add, x, out):
        place = add(ops.reduce, add(ops.load, x, add(ops.index, dim=0)), kind=kind, dim=0)
        add(ops.store, out, add(basic.cast, place, dtype=f32))

    x = np.float32(values)
    for tile in (1, 2, 3):
        (got,) = schedule.run(module((4,), (), (("k", 4, "reduce"),), (tile,), (0,), body), [x])
        assert got == want(x)


def test_out_of_bounds_names_the_buffer():
    def body(add, x, out):
        i = add(ops.index, dim=0)
        moved = add(elementwise.add, i, add(basic.full, shape=(), value=2, dtype=int64))
        add(ops.store, out, add(ops.load, x, moved), i)

    with pytest.raises(OutOfBoundsError, match="index 4 is outside axis 0 of x, whose size is 4"):
        schedule.run(module((4,), (4,), (("i", 4, "parallel"),), (2,), (), body), [np.zeros(4, np.float32)])


def test_a_masked_load_reads_nothing():
    def body(add, x, out):
        i = add(ops.index, dim=0)
        two = add(basic.full, shape=(), value=2, dtype=int64)
        add(ops.store, out, add(ops.load, x, i, add(elementwise.less, i, two)), i)

    x = np.ones(2, np.float32)
    (got,) = schedule.run(module((2,), (4,), (("i", 4, "parallel"),), (4,), (), body), [x])
    np.testing.assert_array_equal(got, [1, 1, 0, 0])


def test_products_are_rounded_by_their_policy():
    """The largest number where the policy saturates; toward zero 1 + 3/512 is 1, where the nearest is above."""

    def square(x, policy):
        rounded = ts.cast(x, dtype=policy)
        function = jit(lambda x: x @ x.T).trace(ts.cast(x, dtype=policy)).function
        levels = driver.lower(function, "interp")
        return schedule.run(levels["schedule"], [rounded.numpy()])[0].astype(np.float64)

    large = np.full((2, 3), 50000, np.float32)
    np.testing.assert_array_equal(square(large, fp8_e5m2 @ ts.saturate), np.full((2, 2), 57344))
    x = np.float32([[1, 3], [1, 2.0**-9]])
    np.testing.assert_array_equal(square(x, bf16 @ ts.toward_zero), [[10, 1], [1, 1]])


def test_sums_begin_at_positive_zero():
    def signs(x):
        return ts.signbit(x @ ts.ones((1, 2))), ts.signbit(ts.sum(x, axis=1))

    x = np.full((2, 1), -0.0, np.float32)
    levels = driver.lower(jit(signs).trace(x).function, "interp")
    assert not any(np.any(y) for y in schedule.run(levels["schedule"], [x]))
