"""Matrix products of 8-bit and smaller types by tensor cores; narrow accumulators wrap."""

import numpy as np
import pytest
from ptxcheck import ARCHITECTURES, emit_checked, run_both

import tessera as ts
from tessera import tile
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE
from tessera.core.types import as_dtype
from tessera.runtime.program import prepare

PAIRS = [
    ("uint8", "uint8"), ("int8", "uint8"), ("uint8", "int8"), ("fp8_e4m3", "fp8_e5m2"), ("fp8_e5m2", "fp8_e4m3"),
]  # fmt: skip


SMALLER = ("int4", "fp6", "fp6_e2m3", "fp4")


@ts.kernel
def one(a, b, out):
    tile.store(out, tile.cast(tile.dot(tile.load(a), tile.load(b)), out.dtype))


@ts.kernel
def many(a, b, out, K: ts.constexpr):
    m, n = tile.program_id(0) * 64, tile.program_id(1) * 64
    acc = tile.zeros((64, 64), out.dtype)
    for k in tile.range(0, K, 128):
        acc += tile.dot(tile.load(a[m : m + 64, k : k + 128]), tile.transpose(tile.load(b[n : n + 64, k : k + 128])))
    tile.store(out[m : m + 64, n : n + 64], acc)


def numbers(dtype, shape, seed):
    """Whole numbers over the type's range; of fp8 such that f32 holds every sum."""
    low, high = {"int8": (-128, 128), "uint8": (0, 256), "int16": (-3000, 3000)}.get(dtype, (-4, 5))
    return np.random.default_rng(seed).integers(low, high, shape).astype(as_dtype(dtype).numpy)


def wanted(a, b, kind):
    return (a.astype("f8") @ b.astype("f8")).astype(np.int64 if kind.kind == "i" else kind).astype(kind)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize(("m", "k", "n"), [(16, 32, 24), (40, 64, 8), (5, 7, 3), (33, 32, 9)])
def test_blocks(pair, m, k, n):
    a, b = numbers(pair[0], (m, k), 0), numbers(pair[1], (k, n), 1)
    out = np.zeros((m, n), np.int32 if "int" in pair[0] else np.float32)
    module = prepare(one, [a, b, out]).levels["tile"]
    ours, theirs = run_both(module, [a, b, out])[-1]
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, wanted(a, b, out.dtype))
    assert ("mma.sync" in emit_checked(module).text(TEXT_FILE)) == (min(m, n) >= 8 and k % 32 == 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_loops(pair, arch):
    a, b = numbers(pair[0], (64, 256), 0), numbers(pair[1], (128, 256), 1)
    out = np.zeros((64, 128), np.int32 if "int" in pair[0] else np.float32)
    module = prepare(many, [a, b, out, 256], grid=(1, 2)).levels["tile"]
    ours, _ = run_both(module, [a, b, out], arch)[-1]
    np.testing.assert_array_equal(ours, wanted(a, b.T, out.dtype))
    assert ("wgmma" if arch == "sm_90a" else "mma.sync") in emit_checked(module, arch).text(TEXT_FILE)


@pytest.mark.parametrize("dtype", SMALLER)
def test_sub_byte_types(dtype):
    """Held as int8 or f16, which have all their numbers."""
    a, b = (numbers(dtype, s, i) for i, s in enumerate(((32, 64), (64, 40))))
    out = np.zeros((32, 40), np.int32 if dtype == "int4" else np.float32)
    module = prepare(one, [a, b, out]).levels["tile"]
    ours, theirs = run_both(module, [a, b, out])[-1]
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, wanted(a, b, out.dtype))
    assert "mma.sync" in emit_checked(module).text(TEXT_FILE)


def test_narrow_sums_wrap():
    a, b = numbers("int16", (20, 12), 0), numbers("int16", (12, 10), 1)
    ours, theirs = run_both(
        prepare(one, [a, b, np.zeros((20, 10), "i2")]).levels["tile"], [a, b, np.zeros((20, 10), "i2")]
    )[-1]
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(ours, wanted(a, b, np.dtype("i2")))
