"""Unsigned integers of 8 to 64 bits on PEs, and atomic updates of narrow types: equal to NumPy's."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.codegen.csl.generator import Csl
from tessera.core.errors import OutOfBoundsError
from tessera.runtime import driver
from tessera.runtime.program import prepare

TYPES = ["uint8", "uint16", "uint32", "uint64"]


def run(function, args, grid=(2, 2), arch="wse3"):
    traced = ts.jit(function).trace(*args).function
    generator = Csl(grid)
    artifact = generator.emit(driver.lower(traced, f"csl:{grid[0]}x{grid[1]}")["tile"], {"arch": arch})
    return generator.runtime(artifact).run(args)


def numbers(dtype, shape, seed=0):
    """Random numbers with both ends of the type, and those beside its half."""
    last = int(np.iinfo(dtype).max)
    found = np.random.default_rng(seed).integers(0, last, shape, dtype=dtype, endpoint=True)
    found.reshape(-1)[:6] = [0, 1, last, last - 1, last // 2, last // 2 + 1]
    return found


@pytest.mark.parametrize("arch", ["wse2", "wse3"])
@pytest.mark.parametrize("dtype", TYPES)
def test_pointwise_ops(dtype, arch):
    x, y = numbers(dtype, (4, 6)), numbers(dtype, (6, 4), 1).T

    def program(x, y):
        z = y | 1
        return x + y, x - y, x * y, x % z, x // z, x >> 3, x << 2, x ^ y, ~x, -x, ts.maximum(x, y), x < y

    expected = (x + y, x - y, x * y, x % (y | 1), x // (y | 1), x >> 3, x << 2, x ^ y, ~x, -x, np.maximum(x, y), x < y)
    for found, want in zip(run(program, (x, y), arch=arch), expected, strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("dtype", TYPES)
def test_reductions_products_and_order(dtype):
    x = numbers(dtype, (6, 8))

    def program(x):
        few = x % 7
        return ts.max(x, axis=1), ts.min(x), ts.argmax(x, axis=0), ts.sort(x, axis=1), ts.sum(few, axis=0), few @ few.T

    few = (x % 7).astype(np.int64)
    expected = (x.max(axis=1), x.min(), x.argmax(axis=0), np.sort(x, axis=1), few.sum(axis=0), few @ few.T)
    for found, want in zip(run(program, (x,)), expected, strict=True):
        np.testing.assert_array_equal(found.astype(want.dtype), want)


@pytest.mark.parametrize("dtype", TYPES)
def test_casts_saturate_and_round(dtype):
    last = int(np.iinfo(dtype).max)
    reals = np.array([0.9, -0.9, -3e9, 254.6, 65535.5, 4294967040.0, 1e19, 3e19, np.nan, np.inf, -np.inf], np.float32)
    whole, signed = numbers(dtype, (11,)), np.array([-1, -(2**31), 2**31 - 1, 77] * 2 + [-256, 65535, 65536], np.int32)

    def program(reals, whole, signed):
        return [ts.cast(reals, dtype=getattr(ts, dtype)), ts.cast(signed, dtype=getattr(ts, dtype)),
                ts.cast(whole, dtype=ts.f32), ts.cast(whole, dtype=ts.int16)]  # fmt: skip

    found = run(program, (reals, whole, signed), (1, 2))
    want = [0 if r != r else min(max(int(r) if abs(r) < 1e38 else int(np.sign(r)) * 2**70, 0), last) for r in reals]
    assert [int(n) for n in found[0]] == want
    for one, expected in zip(found[1:], (signed.astype(dtype), whole.astype("f4"), whole.astype("i2")), strict=True):
        np.testing.assert_array_equal(one, expected)


def test_the_largest_numbers_round_once_to_bf16():
    """Eight significant bits; the second and the last number are ties once they are f32."""
    x = np.array([2**64 - 1, 2**63 + 2**55 + 1, 2**63 + 2**55, 257, 2**40 + 2**32 + 1], np.uint64)
    (found,) = run(lambda x: ts.cast(x, dtype=ts.bf16), (x,), (1, 1))
    assert found.astype(np.float64).tolist() == [2.0**64, 2.0**63 + 2.0**56, 2.0**63, 256, 2.0**40 + 2.0**33]


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64"])
def test_indices_past_the_end_are_errors(dtype):
    table = np.arange(12, dtype=np.float32).reshape(6, 2)
    places = np.array([5, 0, 3], dtype)
    (found,) = run(lambda t, i: ts.take(t, i, axis=0), (table, places), (1, 1))
    np.testing.assert_array_equal(found, table[places])
    places[1] = np.iinfo(dtype).max  # -1 as a signed number
    with pytest.raises(OutOfBoundsError):
        run(lambda t, i: ts.take(t, i, axis=0), (table, places), (1, 1))


@ts.kernel
def combined(x, sums, largest, bits, swapped, mixed):
    i = tile.program_id(0)
    tile.atomic_add(sums[i % 3], x[i])
    tile.atomic_max(largest[i % 3], x[i])
    tile.atomic_xor(bits[i % 3], x[i])
    tile.atomic_cas(swapped[i % 3], x[i % 3], x[i])
    tile.atomic_add(mixed[i % 3], x[i])
    tile.atomic_max(mixed[i % 3], x[i] // 2)  # of the sum as a number of this type


@pytest.mark.parametrize("dtype", ["int8", "int16", *TYPES])
def test_atomic_updates(dtype):
    least = int(np.iinfo(dtype).min)
    x = np.random.default_rng(1).integers(least, int(np.iinfo(dtype).max), 9, dtype=dtype, endpoint=True)
    start = [np.zeros(3, dtype), np.full(3, least, dtype), np.zeros(3, dtype), x[:3].copy(), np.zeros(3, dtype)]
    program, arrays = prepare(combined, (x, *start), grid=(9,)), [x, *start]
    generator = Csl((1, 1))
    generator.runtime(generator.emit(program.levels["tile"], {"arch": "wse3"})).run(arrays)
    rows = x.reshape(3, 3)
    swapped = [next((n for n in rows[1:, k] if n != x[k]), x[k]) for k in range(3)]
    mixed = np.zeros(3, dtype)
    for row in rows:
        mixed = np.maximum(mixed + row, row // 2)
    expected = (rows.sum(axis=0, dtype=dtype), rows.max(axis=0), np.bitwise_xor.reduce(rows, axis=0), swapped, mixed)
    for one, want in zip(arrays[1:], expected, strict=True):
        np.testing.assert_array_equal(one, want)
