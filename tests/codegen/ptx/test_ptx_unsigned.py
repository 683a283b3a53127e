"""Unsigned integers of 16, 32 and 64 bits as PTX: every op on blocks, conversions, and scalars as arguments."""

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked, run, run_both

import tessera as ts
from tessera import tile
from tessera.core.types import BY_NAME, bool_
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce
from tessera.runtime.program import prepare

NAMES = ("uint16", "uint32", "uint64")
PAIRS = (e.add, e.sub, e.mul, e.floor_divide, e.remainder, e.maximum, e.minimum, e.bitwise_and, e.bitwise_xor)
ORDER = (e.less, e.less_equal, e.greater, e.greater_equal, e.equal, e.not_equal)
SINGLE = (e.neg, e.abs, e.bitwise_not)


def numbers(name, count=40, seed=0, least=1):
    top = np.iinfo(name).max
    drawn = np.random.default_rng(seed).integers(least, top, count - 4, dtype=name, endpoint=True)
    return np.concatenate([np.array([least, top, top // 2, top // 2 + 1], name), drawn])


@pytest.mark.parametrize("name", NAMES)
def test_arithmetic(name):
    def build(k, x, y, *outs):
        a, b = k.load(x), k.load(y)
        for op, out in zip(PAIRS, outs, strict=False):
            k.store(out, k(op, a, b))
        for op, out in zip(SINGLE, outs[len(PAIRS) :], strict=False):
            k.store(out, k(op, a))
        for op, out in zip(ORDER, outs[len(PAIRS) + len(SINGLE) :], strict=True):
            k.store(out, k(op, a, b))

    empty = [np.zeros(40, name)] * (len(PAIRS) + len(SINGLE)) + [np.zeros(40, bool_.numpy)] * len(ORDER)
    run(build, numbers(name), numbers(name, seed=1)[::-1].copy(), *(a.copy() for a in empty))


@pytest.mark.parametrize("name", NAMES)
def test_shifts_and_constants(name):
    def build(k, x, y, left, right, product):
        a, b = k.load(x), k.load(y)
        k.store(left, k(e.shift_left, a, b))
        k.store(right, k(e.shift_right, a, b))
        k.store(product, k(e.mul, a, k.const(np.iinfo(name).max - 2, BY_NAME[name], (40,))))

    by = (numbers(name, seed=2) % np.array(np.iinfo(name).bits, name)).astype(name)
    run(build, numbers(name), by, *(np.zeros(40, name) for _ in range(3)))


@pytest.mark.parametrize("name", NAMES)
def test_reductions(name):
    def build(k, x, most, least, where, total):
        v = k.load(x)
        for op, out in ((reduce.max, most), (reduce.min, least), (reduce.sum, total)):
            k.store(out, k(op, v, axis=(-1,), keepdims=True))
        k.store(where, k(reduce.argmax, v, axis=-1, keepdims=True))

    total = np.zeros(1, "u8" if name == "uint64" else "i8")
    run(build, numbers(name, 100), np.zeros(1, name), np.zeros(1, name), np.zeros(1, "i8"), total)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", NAMES)
def test_kernels(name, arch):
    @ts.kernel
    def mixed(x, f, out, places, narrow, scale: BY_NAME[name]):
        i = tile.program_id(0)
        a = tile.load(x[i, :])
        out[i, :] = tile.cast(a // 3 + tile.arange(0, 20, dtype=BY_NAME[name]), ts.f32) + tile.cast(scale, ts.f32)
        places[i, :] = tile.cast(tile.load(f[i, :]), BY_NAME[name])
        narrow[i, :] = tile.cast(a, ts.bf16)

    x = numbers(name, 60).reshape(3, 20)
    f = np.random.default_rng(0).uniform(-9, 9e4, (3, 20)).astype("f4")
    arrays = [x, f, np.zeros((3, 20), "f4"), np.zeros((3, 20), name), np.zeros((3, 20), ts.bf16.numpy)]
    scale = np.array(np.iinfo(name).max - 1, name)
    module = prepare(mixed, [*arrays, scale], grid=(3,)).levels["tile"]
    for ours, theirs in run_both(module, [*arrays, scale], arch):
        np.testing.assert_array_equal(ours.astype("f8"), theirs.astype("f8"))


@ts.kernel
def divide_indices(out, rest, *, low: int, by: int):
    number = tile.program_id(0) * 8 + tile.arange(0, 8) + low
    tile.store(out[tile.program_id(0), 0:8], number // by)
    tile.store(rest[tile.program_id(0), 0:8], tile.cast(number, "int32") % by)


@pytest.mark.parametrize(
    ("low", "by", "word"),
    [(0, 3, "u32"), (0, 8, None), ((1 << 32) - 20, 7, "u64"), (1 << 40, 254, "u64"), (-5, 3, "s64"), (3, -7, "s64")],
)
def test_divisions_of_indices(low, by, word):
    """Numbers that are proven to be 0 or more are divided without signs, and in 32 bits where these are enough."""
    out, rest = np.zeros((4, 8), np.int64), np.zeros((4, 8), np.int32)
    arguments = {"out": out, "rest": rest, "low": low, "by": by}
    module = prepare(divide_indices, arguments, "ptx", (4,)).levels["tile"]
    text = emit_checked(module, "sm_90a").files["kernels.ptx"]
    assert (f"div.{word}" if word else "shr.") in text
    (out, _), (rest, _) = run_both(module, [out, rest], "sm_90a")
    numbers = low + np.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(out, numbers // by)
    np.testing.assert_array_equal(rest, numbers.astype(np.int32) % np.int32(by))


@ts.kernel
def take(x, places, out):
    tile.store(out[0:16], x[tile.load(places[0:16])])


def test_indices_of_32_bits_are_widened_by_the_multiplication():
    x, places, out = np.arange(100, dtype="f4"), np.arange(16, dtype="i4") * 6, np.zeros(16, "f4")
    module = prepare(take, {"x": x, "places": places, "out": out}, "ptx", (1,)).levels["tile"]
    text = emit_checked(module, "sm_90a").files["kernels.ptx"]
    (_, _), (_, _), (out, _) = run_both(module, [x, places, out], "sm_90a")
    np.testing.assert_array_equal(out, x[places])
    assert "mad.wide.s32" in text


@ts.kernel
def combine_indices(out, less, near, *, low: int, by: int):
    row = tile.program_id(0)
    number = row * 8 + tile.arange(0, 8)
    tile.store(out[row, 0:8], tile.maximum(number * by + low, number - 3))
    tile.store(less[row, 0:8], number * by < low)
    tile.store(near[row, 0:8], tile.cast(number * by, "float32"))


@pytest.mark.parametrize(
    ("low", "by"), [(9, 1 << 27), (9, 1 << 28), ((1 << 32) - 20, 1), (-9, 5), (0, -5), (0, 1 << 50)]
)
def test_indices_of_64_bits_are_computed_in_32(low, by):
    """Where no operand or result of an op on a block is negative or has more bits; other ops of the block stay.

    Comparisons of indices that are far apart are not relative to a thread's own in 32 bits.
    """
    arrays = [np.zeros((4, 8), dtype) for dtype in (np.int64, bool, np.float32)]
    arguments = dict(zip(("out", "less", "near"), arrays, strict=True)) | {"low": low, "by": by}
    module = prepare(combine_indices, arguments, "ptx", (4,)).levels["tile"]
    text = emit_checked(module, "sm_90a").files["kernels.ptx"]
    assert ("cvt.rn.f32.u32" in text) == (0 <= 31 * by < 1 << 32)
    numbers = np.arange(32).reshape(4, 8)
    wanted = np.maximum(numbers * by + low, numbers - 3), numbers * by < low, (numbers * by).astype("f4")
    for (found, interpreted), want in zip(run_both(module, arrays, "sm_90a"), wanted, strict=True):
        np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal(interpreted, want)
