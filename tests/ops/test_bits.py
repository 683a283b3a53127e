"""Bits of elements: bitcast, counts and fewer bits of precision, against NumPy's views and formats."""

import ml_dtypes
import numpy as np
import pytest

import tessera as ts
from tessera.errors import DTypeError

ALL_HALVES = np.arange(1 << 16).astype("u2")


@pytest.mark.parametrize(("half", "name"), [(np.float16, "f16"), (ml_dtypes.bfloat16, "bf16")])
def test_every_16_bit_pattern_is_that_number_and_back(half, name):
    numbers = ALL_HALVES.view(half)
    is_number = ~np.isnan(numbers.astype("f4"))
    np.testing.assert_array_equal(ts.bitcast(ALL_HALVES, name).numpy()[is_number], numbers[is_number])
    np.testing.assert_array_equal(ts.bitcast(numbers, "uint16").numpy()[is_number], ALL_HALVES[is_number])


@pytest.mark.parametrize("target", ["interp", "cpu"])
def test_words_are_those_of_a_view(target):
    x = np.float32([1.5, -2, np.inf, -0.0, 1e-42])
    found = ts.jit(lambda x: (ts.bitcast(x, "int32"), ts.bitcast(ts.bitcast(x, "uint32") + 1, "f32")), target=target)(x)
    np.testing.assert_array_equal(found[0].numpy(), x.view("i4"))
    np.testing.assert_array_equal(found[1].numpy().view("u4"), x.view("u4") + 1)


def test_another_width_is_refused():
    with pytest.raises(DTypeError, match="keeps the width"):
        ts.bitcast(ts.Tensor([1.0]), "int64")


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u4", "i4", "i8", "u8"])
def test_counts_of_bits(dtype, rng):
    info = np.iinfo(dtype)
    x = np.append(rng.integers(info.min, info.max, 50, dtype=dtype), np.array([0, 1, info.max], dtype))
    words = [f"{int(v) & (2**info.bits - 1):0{info.bits}b}" for v in x]
    assert ts.population_count(x).tolist() == [w.count("1") for w in words]
    assert ts.count_leading_zeros(x).tolist() == [len(w) - len(w.lstrip("0")) for w in words]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2"])
def test_reduced_precision_is_that_of_the_format(name, rng):
    format = getattr(ml_dtypes, name, np.float16)
    info = ml_dtypes.finfo(format)
    x = (rng.standard_normal(500) * 2.0 ** rng.integers(-30, 30, 500)).astype("f4")
    with np.errstate(over="ignore"):
        want = x.astype(format).astype("f4")
    want = np.where(np.abs(want) < float(info.smallest_normal), 0, want)
    np.testing.assert_array_equal(ts.reduce_precision(x, info.nexp, info.nmant).numpy(), want)


@pytest.mark.parametrize("target", ["interp", "cpu"])
def test_counts_of_bits_of_int4(target):
    """Found by fuzzing: int4 has no unsigned type of its width."""
    x = np.arange(-8, 8).astype(ml_dtypes.int4)
    words = [f"{v & 15:04b}" for v in range(-8, 8)]
    ones, zeros = ts.jit(lambda x: (ts.population_count(x), ts.count_leading_zeros(x)), target=target)(x)
    assert ones.tolist() == [w.count("1") for w in words]
    assert zeros.tolist() == [len(w) - len(w.lstrip("0")) for w in words]


def test_nothing_is_known_of_the_bits_of_a_nan():
    """Engines differ in its sign and payload: those of an invalid operation are negative on a processor."""
    found = ts.debug.error_bound(lambda x: ts.bitcast(x - x, "int32"))(np.float32([4.0, -np.inf]))
    (result,) = found.results
    np.testing.assert_array_equal(np.isinf(result.radius), [False, True])
