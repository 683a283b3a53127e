"""Places of extremes in long rows: a program for each part, and the first of the places where the extreme is."""

from functools import cache

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import get_backend
from tessera.ops.dialects import host
from tessera.runtime import driver

RNG = np.random.default_rng(11)


def make_rows(kind, shape):
    x = RNG.standard_normal(shape).astype(np.float32)
    if kind == "equal":
        return np.round(x)  # many elements are the extreme
    if kind == "negative":
        return -np.abs(x)
    if kind == "infinite":
        return np.full(shape, -np.inf, np.float32)
    if kind == "nan":
        x[..., shape[-1] // 2 :: 1000] = np.nan
    return x


@pytest.mark.parametrize("kind", ["normal", "equal", "negative", "infinite", "nan"])
@pytest.mark.parametrize("shape", [(5003,), (2, 4096), (3, 1, 2500)])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places_are_those_of_numpy(name, shape, kind):
    x = make_rows(kind, shape)
    x = -x if name == "argmin" else x
    program = ts.jit(lambda x: getattr(ts, name)(x, axis=-1))
    levels = driver.lower(program.trace(x).function, "ptx")
    assert len([n for n in levels["tile"].main.body.walk() if n.op is host.launch]) == 2
    want = getattr(np, name)(x, axis=-1)
    for level in ("schedule", "tile"):
        (found,) = driver.run_level(levels, level, [x])
        np.testing.assert_array_equal(found, want)


def test_places_on_a_gpu():
    x = make_rows("nan", (2, 2500))
    levels = driver.lower(ts.jit(lambda x: ts.argmax(x, axis=1, keepdims=True)).trace(x).function, "ptx")
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    (found,) = get_backend("ptx").interpreter(artifact)([x])
    np.testing.assert_array_equal(found, np.argmax(x, axis=1, keepdims=True))


@pytest.mark.parametrize("dtype", [ts.fp8_e4m3, ts.fp8_e5m2, ts.bf16, ts.f64])
def test_the_last_part_of_any_float(dtype):
    """It is filled with no NaN, where a type has no infinity."""
    x = np.full((2, 2500), -2, dtype.numpy)
    x[0, 2400] = x[1, 2499] = -1
    for op, y in ((ts.argmax, x), (ts.argmin, -x)):
        levels = driver.lower(ts.jit(lambda y, op=op: op(y, axis=-1)).trace(y).function, "ptx")
        assert driver.run_level(levels, "tile", [y])[0].tolist() == [2400, 2499]


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "u8", "?"])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_integers(name, dtype):
    """The extremes of the type are among them, in the last part, too: its filling comes after what is equal."""
    top = np.array([0, 1], "?") if dtype == "?" else np.array([np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    x = np.full((3, 2500), top[0] if name == "argmax" else top[1], dtype)
    x[0, [700, 2400]], x[1, 2499] = top[1 if name == "argmax" else 0], top[1 if name == "argmax" else 0]
    program = ts.jit(lambda x: getattr(ts, name)(x, axis=-1))
    levels = driver.lower(program.trace(x).function, "ptx")
    assert len([n for n in levels["tile"].main.body.walk() if n.op is host.launch]) == 2
    artifact = get_backend("ptx").emit(levels["tile"], {"arch": "sm_90a"})
    for found in (driver.run_level(levels, "tile", [x])[0], get_backend("ptx").interpreter(artifact)([x])[0]):
        assert found.tolist() == [700, 2499, 0]


@pytest.mark.parametrize("shape", [(4000, 2500), (2000,)])
def test_short_or_many_rows_are_not_cut(shape):
    x = np.broadcast_to(np.zeros((), np.float32), shape)
    levels = driver.lower(ts.jit(lambda x: ts.argmax(x, axis=-1)).trace(x).function, "ptx")
    assert len([n for n in levels["tile"].main.body.walk() if n.op is host.launch]) == 1


def compares_pairs(module):
    """Whether a kernel carries pairs of a value and a place."""
    return any(n.op.name in ("ts.argmax", "ts.argmin") for f in module.functions for n in f.body.walk())


@cache
def compile_places(name, shape, axis, dtype):
    """The program of a processor at each level and as machine code: one for elements of all kinds."""
    function = ts.jit(lambda y: getattr(ts, name)(y, axis=axis)).trace(np.zeros(shape, dtype.numpy)).function
    levels = driver.lower(function, "llvm")
    assert not compares_pairs(levels["tile"])
    named = {level: driver.compile_level(levels, level, "llvm") for level in ("graph", "schedule", "tile", "target")}
    return {**named, "machine code": driver.compile_tile(levels["tile"], "llvm")}


@pytest.mark.parametrize("kind", ["normal", "equal", "negative", "infinite", "nan"])
@pytest.mark.parametrize(("shape", "axis"), [((301, 19), 0), ((3, 70, 33), 1), ((2, 40, 1, 9), 1), ((50, 3, 4), 0)])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places_along_outer_axes_of_a_processor(name, shape, axis, kind):
    """The extremes of whole rows are found first, and then where they are."""
    x = (
        make_rows(kind, shape)
        if kind != "nan"
        else np.where(RNG.random(shape) < 0.01, np.nan, make_rows("normal", shape))
    )
    x = (-x if name == "argmin" else x).astype(np.float32)
    for dtype in (ts.f32, ts.f64, ts.bf16):
        y = x.astype(dtype.numpy)
        want = getattr(np, name)(y.astype(np.float64), axis=axis)
        for level, run in compile_places(name, shape, axis, dtype).items():
            np.testing.assert_array_equal(run([y])[0], want, err_msg=level)


def test_computed_elements_keep_their_place_as_they_are_compared():
    levels = driver.lower(ts.jit(lambda x: ts.argmax(ts.exp(x), axis=0)).trace(np.ones((40, 8), "f4")).function, "llvm")
    assert compares_pairs(levels["tile"])


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "i8", "u8"])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_integers_along_outer_axes_of_a_processor(name, dtype):
    info = np.iinfo(dtype)
    x = RNG.integers(info.min, info.max, (50, 37), dtype, endpoint=True)
    x[[7, 20], 5], x[[3, 30], 6] = info.max, info.min
    levels = driver.lower(ts.jit(lambda x: getattr(ts, name)(x, axis=0)).trace(x).function, "llvm")
    assert not compares_pairs(levels["tile"])
    want = getattr(np, name)(x, axis=0)
    np.testing.assert_array_equal(driver.compile_tile(levels["tile"], "llvm")([x])[0], want)
    np.testing.assert_array_equal(driver.run_level(levels, "tile", [x], "llvm")[0], want)
