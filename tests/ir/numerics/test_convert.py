"""Conversions: every code point, one rounding (against exact fractions), saturation, integers."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tessera as ts
from conformance.graph.found.cases import list_halves
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import (  # fmt: skip
    bf16,
    bool_,
    f16,
    f32,
    f64,
    fp4,
    fp6,
    fp6_e2m3,
    fp8_e4m3,
    fp8_e5m2,
    int4,
    int8,
    int16,
    int32,
    int64,
    tf32,
    uint8,
)
from tessera.ir.numerics.conversion import convert, round_to_storage
from tessera.runtime.program import prepare

SMALL = (f16, bf16, fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4)
fast = settings(max_examples=60, deadline=None)
doubles = st.floats(width=64, allow_nan=False, allow_infinity=False)


def code_points(dtype):
    """Every value of a narrow format."""
    if dtype.bits == 16:
        return np.arange(2**16, dtype=np.uint16).view(dtype.numpy)
    return np.arange(2**dtype.bits, dtype=np.uint8).view(dtype.numpy)


def grid_of(dtype):
    """The finite values of a format in order, as f64."""
    values = np.unique(convert(code_points(dtype), f64))
    return values[np.isfinite(values)]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_every_code_point_survives_widening(dtype):
    points = code_points(dtype)
    for wide in (f32, f64):
        there = convert(points, wide)
        assert [float(v) for v in there[~np.isnan(there)]] == [v for v in map(float, points) if v == v]
        back = convert(there, dtype)
        same = back.view(np.uint8) == points.view(np.uint8)
        nan = np.isnan(there)
        assert same.reshape(len(points), -1).all(axis=1)[~nan].all() and np.isnan(convert(back, f64))[nan].all()


@pytest.mark.parametrize("wide", (f32, f64), ids=str)
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_midpoints_go_to_even_and_their_neighbours_to_the_nearer(dtype, wide):
    grid = grid_of(dtype)
    low, high = grid[:-1], grid[1:]
    middle = ((low + high) / 2).astype(wide.numpy)
    exact = middle.astype(np.float64) == (low + high) / 2
    nearest = convert(middle, dtype).astype(np.float64)
    even = convert(low, dtype).view(np.uint16 if dtype.bits == 16 else np.uint8) % 2 == 0
    assert np.array_equal(nearest[exact], np.where(even, low, high)[exact])
    for toward, want in ((low, low), (high, high)):
        off = np.nextafter(middle, toward.astype(wide.numpy))
        assert np.array_equal(convert(off, dtype).astype(np.float64)[exact], want[exact])


def nearest_fraction(x, dtype):
    """Nearest-even rounding with exact fractions, for a finite x inside the range."""
    grid = grid_of(dtype)
    at = int(np.clip(np.searchsorted(grid, x), 1, len(grid) - 1))
    low, high = Fraction(float(grid[at - 1])), Fraction(float(grid[at]))
    below, above = Fraction(x) - low, high - Fraction(x)
    if below != above:
        return float(low if below < above else high)
    code = convert(np.float64(low), dtype).view(np.uint16 if dtype.bits == 16 else np.uint8)
    return float(low if code % 2 == 0 else high)


@pytest.mark.parametrize("dtype", (bf16, fp8_e4m3, fp8_e5m2, f16), ids=str)
@fast
@example(x=1 + 2.0**-8 + 2.0**-40)  # f32 in between would make a tie of it, and round to even
@example(x=-(1 + 2.0**-8 - 2.0**-40))
@example(x=2.0**-134 * (1 + 2.0**-30))
@given(x=st.floats(-400, 400))
def test_f64_rounds_once(dtype, x):
    assert float(convert(np.float64(x), dtype)) == nearest_fraction(x, dtype)


@fast
@given(x=doubles)
def test_tf32_keeps_ten_bits_of_mantissa(x):
    out = float(convert(np.float64(x), tf32))
    if np.isfinite(out) and abs(out) > 2.0**-126:
        assert abs(Fraction(out) - Fraction(x)) <= Fraction(out).__abs__() * Fraction(1, 2**10) / 2
        assert np.float32(out).view(np.uint32) & 0x1FFF == 0


def test_tf32_rounds_even_f32_values():
    assert convert(np.float32(1 + 2.0**-11), tf32) == 1 and convert(np.float32(1 + 3 * 2.0**-11), tf32) == 1 + 2.0**-9


def test_overflow_is_infinite_or_nan_and_saturates_on_demand():
    big = np.float32([1e30, -1e30, np.inf, np.nan])
    assert convert(big, f16).tolist()[:3] == [np.inf, -np.inf, np.inf]
    assert np.isnan(convert(big, fp8_e4m3).astype(np.float32)).all()
    for dtype in (f16, fp8_e4m3, fp8_e5m2, bf16):
        top = float(ml_dtypes.finfo(dtype.numpy).max)
        held = convert(np.float32([3.4e38, -3.4e38, np.inf, np.nan]), dtype, saturate=True).astype(np.float64)
        assert held[:3].tolist() == [top, -top, top] and np.isnan(held[3])


@pytest.mark.parametrize(("dtype", "top"), ((fp6, 28), (fp6_e2m3, 7.5), (fp4, 6)), ids=str)
def test_formats_without_infinity_or_nan_always_saturate(dtype, top):
    assert convert(np.float32([1e30, -1e30]), dtype).astype(np.float64).tolist() == [top, -top]


@pytest.mark.parametrize("dtype", (fp6, fp6_e2m3, fp4), ids=str)
@pytest.mark.parametrize("source", ("f64", "f32", "bf16"))
@pytest.mark.parametrize("clause", (None, ts.toward_zero, ts.saturate, ts.stochastic_round), ids=str)
def test_nan_is_a_positive_zero_where_there_is_none(dtype, source, clause):
    """Its sign is what processors differ in."""
    x = np.array([np.nan, -np.nan], ts.DType(source).numpy)
    to = dtype if clause is None else dtype @ clause
    program = prepare(ts.jit(lambda x: ts.cast(x, dtype=to)), (x,), "llvm")
    for level, target in (("graph", "llvm"), ("tile", "llvm"), ("target", "llvm"), ("target", "ptx")):
        try:
            assert not program.run(level, target)[0].view(np.uint8).any(), (level, target)
        except UnsupportedOpError as error:
            assert "rounding from f64" in str(error)  # the one way that a target leaves out


@pytest.mark.parametrize("dtype", (int4, int8, int16, int32, int64, uint8), ids=str)
def test_float_to_integer_goes_toward_zero_and_saturates(dtype):
    info = ml_dtypes.iinfo(dtype.numpy)
    out = convert(np.float64([2.9, 0.99, -0.99, 1e300, -1e300, np.inf, -np.inf, np.nan]), dtype)
    assert [int(v) for v in out] == [2, 0, 0, *([int(info.max), int(info.min)] * 2), 0]
    if dtype.kind == "int":
        assert int(convert(np.float32(-2.9), dtype)) == -2


def test_largest_int64_is_not_a_double():
    assert int(convert(np.float64(2.0**63), int64)) == 2**63 - 1
    assert int(convert(np.nextafter(2.0**63, 0), int64)) == 2**63 - 1024


def test_bool_and_integers():
    assert convert(np.float32([0, -0.0, 0.5, np.nan]), bool_).tolist() == [False, False, True, True]
    assert convert(np.array([True, False]), bf16).astype(float).tolist() == [1, 0]
    assert convert(np.int64(300), int8) == 44  # integers wrap, as in NumPy
    assert float(convert(np.int64(2**24 + 1), f32)) == 2**24


def test_same_type_is_the_same_array():
    x = np.ones(3, np.float32)
    assert convert(x, f32) is x


def round_whole(number, digits, toward_zero):
    """An integer with so many binary digits: to nearest even, or toward zero."""
    shift = max(abs(number).bit_length() - digits, 0)
    whole, rest = divmod(abs(number), 1 << shift)
    half = (1 << shift) // 2
    up = shift and not toward_zero and (rest > half or (rest == half and whole % 2))
    return (whole + bool(up) << shift) * (-1 if number < 0 else 1)


@pytest.mark.parametrize("toward_zero", [False, True])
@pytest.mark.parametrize("dtype, digits", [(bf16, 8), (tf32, 11), (f32, 24), (f64, 53)], ids=str)
@pytest.mark.parametrize("source", ["int32", "uint32", "int64", "uint64"])
def test_integers_round_once(source, dtype, digits, toward_zero):
    numbers = list_halves(source)
    policy = dtype @ ts.toward_zero if toward_zero else None
    found = round_to_storage(numbers, dtype, policy)
    assert [int(v) for v in found.astype(np.float64)] == [round_whole(int(n), digits, toward_zero) for n in numbers]
