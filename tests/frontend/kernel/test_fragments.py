"""Fragments, matrix products with a rounding of one's choice, conversions toward zero, padded buffers."""

import ml_dtypes
import numpy as np
import pytest
from engines import results

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, ShapeError

BF16 = ts.bf16.numpy


@ts.kernel
def tensor_core(A, B, C):
    a_frag, b_frag = tile.fragment.a((16, 16), ts.bf16), tile.fragment.b((16, 16), ts.bf16)
    c_frag = tile.fragment.c((16, 16), ts.f32)
    tile.load_matrix(a_frag, A, stride=16)
    tile.load_matrix(b_frag, B, stride=16)
    for _step in tile.range(2):
        tile.mma(c_frag, a_frag, b_frag, c_frag)
    tile.store_matrix(C, c_frag, stride=16)


def test_fragments_hold_sums(rng):
    a, b = rng.standard_normal((2, 16, 16)).astype(BF16)
    for (c,) in results(tensor_core, {"A": a, "B": b, "C": np.zeros((16, 16), "f4")}):
        np.testing.assert_allclose(c, 2 * (a.astype("f4") @ b.astype("f4")), rtol=1e-4, atol=1e-5)


@ts.kernel
def flat(x, out):
    buffer = tile.alloc_shared((4, 8), ts.f32, swizzle="xor", padding=1, alignment=128)
    part = tile.fragment.a((4, 4), ts.f32)
    tile.load_matrix(part, x[3:], stride=5)
    buffer[0:4, 0:4] = part
    buffer[0:4, 4:8] = part * 2.0
    tile.store_matrix(out, buffer[0:4, 2:6])


def test_rows_of_a_flat_memory_and_a_padded_buffer(rng):
    x = rng.random(30, dtype="f4")
    rows = np.stack([x[3 + 5 * k : 7 + 5 * k] for k in range(4)])
    for (out,) in results(flat, {"x": x, "out": np.zeros((4, 4), "f4")}):
        np.testing.assert_array_equal(out, np.concatenate([rows, rows * 2], 1)[:, 2:6])


@ts.kernel
def mixed(A, B, nearest, down, half, brain):
    a, b = tile.load(A), tile.load(B)
    tile.store(nearest, tile.mma_mixed(a, b, accumulate=ts.f32, saturate=True, rounding="rte"))
    tile.store(down, tile.mma_mixed(a, b, accumulate=ts.f32, rounding="rtz"))
    tile.store(half, tile.mma_mixed(a, b, accumulate=ts.f16, saturate=True, rounding="rtz"))
    tile.store(brain, tile.mma(a, b, accumulate=ts.bf16, rounding="rtz"))


def toward_zero(x, dtype):
    """`x` in a narrower type, the slow way: one step back where the nearest is too far out."""
    near = x.astype(dtype)
    return np.where(np.abs(near.astype("f8")) > np.abs(x), np.nextafter(near, np.zeros_like(near)), near)


def test_sums_of_two_formats_round_once(rng):
    a, b = (rng.standard_normal((8, 16)) * 99).astype("f2"), (rng.standard_normal((16, 8)) * 99).astype(BF16)
    empty = {n: np.zeros((8, 8), d) for n, d in (("nearest", "f4"), ("down", "f4"), ("half", "f2"), ("brain", BF16))}
    exact = a.astype("f8") @ b.astype("f8")
    assert np.abs(exact).max() > 65504
    for nearest, down, half, brain in results(mixed, {"A": a, "B": b, **empty}):
        np.testing.assert_array_equal(nearest, exact.astype("f4"))
        np.testing.assert_array_equal(down, toward_zero(exact, "f4"))
        np.testing.assert_array_equal(half, toward_zero(np.clip(exact, -65504, 65504), "f2"))
        np.testing.assert_array_equal(brain.astype("f4"), toward_zero(exact, BF16).astype("f4"))


@ts.kernel
def integers(A, B, C):
    tile.store(C, tile.mma_mixed(tile.load(A), tile.load(B), accumulate=ts.int8, saturate=True))


def test_integers_saturate(rng):
    a, b = rng.integers(-9, 9, (8, 16), "i1"), rng.integers(-9, 9, (16, 8), "i1")
    for (c,) in results(integers, {"A": a, "B": b, "C": np.zeros((8, 8), "i1")}):
        np.testing.assert_array_equal(c, np.clip(a.astype("i4") @ b.astype("i4"), -128, 127))


@ts.kernel
def truncated(x, half, brain, byte):
    block = tile.load(x)
    tile.store(half, tile.cast(block, ts.f16, rounding="rtz"))
    tile.store(brain, tile.cast(block, ts.bf16, rounding="rtz", saturate=True))
    tile.store(byte, tile.cast(block, ts.int8, saturate=True))


def test_conversions_toward_zero_at_every_edge(rng):
    """Powers of two and their neighbours, denormals, the largest number and beyond, infinity, NaN."""
    info = ml_dtypes.finfo(np.float16)
    edges = [
        0.0,
        info.smallest_subnormal * 0.9,
        info.smallest_subnormal * 1.5,
        info.smallest_normal,
        1,
        2,
        65504,
        65519,
    ]
    edges = np.array([*edges, *np.nextafter(np.float32([1, 2, 65504]), np.float32(0)), 1e30, np.inf, np.nan], "f4")
    x = np.concatenate([edges, -edges, (rng.standard_normal(200) * 10.0 ** rng.integers(-9, 9, 200)).astype("f4")])
    empty = {n: np.zeros(len(x), d) for n, d in (("half", "f2"), ("brain", BF16), ("byte", "i1"))}
    with np.errstate(all="ignore"):
        finite = np.where(np.isinf(x), x, np.clip(x, -65504, 65504)).astype("f8")
        want = toward_zero(finite, "f2")
    top = float(ml_dtypes.finfo(BF16).max)
    for half, brain, byte in results(truncated, {"x": x, **empty}):
        np.testing.assert_array_equal(half, want)
        wide = toward_zero(np.clip(x.astype("f8"), -top, top), BF16).astype("f8")
        np.testing.assert_array_equal(brain.astype("f8"), wide)
        np.testing.assert_array_equal(byte, np.trunc(np.clip(np.nan_to_num(x, nan=0), -128, 127)))


@ts.kernel
def wrong_stride(A):
    tile.load_matrix(tile.fragment.a((4, 4), ts.f32), A, stride=4)


@ts.kernel
def no_stride(A):
    tile.load_matrix(tile.fragment.a((4, 4), ts.f32), A[0])


@ts.kernel
def a_vector(A):
    tile.fragment.a((4,), ts.f32)


@ts.kernel
def up(A):
    tile.store(A, tile.cast(tile.load(A), ts.f16, rounding="rtp"))


@ts.kernel
def odd_alignment(A):
    tile.alloc_shared((4,), ts.f32, alignment=12)


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        (wrong_stride, ArgumentError, "rows of A are 8 elements apart"),
        (no_stride, ArgumentError, "rows of A are 8|need a stride|does not lie in"),
        (a_vector, ShapeError, "a fragment is a matrix"),
        (up, ArgumentError, "not a rounding"),
        (odd_alignment, ArgumentError, "power of two"),
    ],
)
def test_refusals(entry, error, message):
    with pytest.raises((error, ShapeError), match=message):
        results(entry, {"A": np.zeros((8, 8), "f4")}, engines=[("tile", "interp")])
