"""Rounding under policies: every f16 and bf16 code point against the gfloat package; stochastic rounding by count."""

import gfloat
import numpy as np
import pytest
from gfloat import formats

import tessera as ts
from tessera.core.types import bf16, f16, f32, f64, fp4, fp6, fp6_e2m3, fp8_e4m3, fp8_e5m2, tf32
from tessera.ir.numerics.conversion import convert, round_to_format

FORMATS = {
    f16: formats.format_info_binary16,
    bf16: formats.format_info_bfloat16,
    fp8_e4m3: formats.format_info_ocp_e4m3,
    fp8_e5m2: formats.format_info_ocp_e5m2,
    fp6: formats.format_info_ocp_e3m2,
    fp6_e2m3: formats.format_info_ocp_e2m3,
    fp4: formats.format_info_ocp_e2m1,
}
MODES = {"nearest": gfloat.RoundMode.TiesToEven, "toward_zero": gfloat.RoundMode.TowardZero}


def every(dtype):
    """Every code point of a 16-bit format but NaN, and points beside halfway."""
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        values = np.arange(2**16, dtype=np.uint16).view(dtype.numpy).astype(np.float64)
    return np.concatenate([values[~np.isnan(values)], [1.0625, 1.0625 + 2**-40, 2**-30 + 2**-60]])


@pytest.mark.parametrize("saturate", (False, True))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_against_gfloat(dtype, mode, saturate):
    info = FORMATS[dtype]
    for source in (f16, bf16):
        x = every(source)
        want = gfloat.round_ndarray(info, x, MODES[mode], saturate or not info.has_nz or info.num_nans == 0)
        got = round_to_format(x, dtype, mode, saturate).astype(np.float64)
        np.testing.assert_array_equal(got, want)
        assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()
        if mode == "nearest":
            np.testing.assert_array_equal(convert(x, dtype, saturate).astype(np.float64), want)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_code_point_decodes_as_gfloat_says(dtype):
    info, width = FORMATS[dtype], np.uint16 if dtype.bits == 16 else np.uint8
    codes = np.arange(2**dtype.bits, dtype=width)
    want = gfloat.decode_ndarray(info, codes)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(codes.view(dtype.numpy).astype(np.float64), want)
    exact = want[np.isfinite(want)]
    for mode in ("nearest", "toward_zero", "stochastic"):
        np.testing.assert_array_equal(round_to_format(exact, dtype, mode).astype(np.float64), exact)


@pytest.mark.parametrize("dtype", (*FORMATS, tf32, f32), ids=str)
def test_stochastic_rounding_is_unbiased(dtype):
    """Up with the probability of the distance: within 5 deviations of a binomial count, over 20,000 draws."""
    n, below = 20_000, 1.0
    above = 1.0 + 2.0 ** -({tf32: 10, f32: 23}.get(dtype) or FORMATS[dtype].precision - 1)
    for share in (0.1, 0.5, 0.93):
        x = np.full(n, below + share * (above - below))
        out = round_to_format(x, dtype, "stochastic", seed=3).astype(np.float64) - 1.0
        ups = np.count_nonzero(out > 2.0**-60)
        assert abs(ups - share * n) < 5 * np.sqrt(n * share * (1 - share))


def test_stochastic_rounding_repeats_and_follows_the_seed():
    x = np.linspace(0.1, 3, 500)
    first, again, other = (round_to_format(x, fp8_e4m3, "stochastic", seed=s).astype(float) for s in (1, 1, 2))
    assert (first == again).all() and (first != other).any()
    low, high = round_to_format(x, fp8_e4m3, "toward_zero").astype(float), first
    assert ((high == low) | (np.abs(high - x) < 0.25)).all()


def test_ops_store_as_the_policy_says():
    zero = ts.Tensor(np.float32([1.0, 1.0]), ts.bf16 @ ts.toward_zero)
    assert (zero + 0.0077).tolist() == [1.0, 1.0]
    assert (ts.Tensor([1.0, 1.0], ts.bf16) + 0.0077).tolist() == [1.0078125] * 2
    tiny = ts.Tensor(np.float32([1e-38]), ts.f32 @ ts.flush_denormals)
    assert (tiny * 0.1).tolist() == [0.0] and (ts.Tensor(np.float32([1e-38])) * 0.1).tolist() != [0.0]
    many = ts.Tensor(np.ones(4000, np.float32), ts.bf16 @ ts.stochastic_round)
    assert abs((many + 0.00390625 / 2).numpy().astype(float).mean() - 1.001953125) < 3e-4


def test_f64_flush_and_signs():
    assert (
        np.signbit(round_to_format([-1e-310], f64, flush=True))[0]
        and round_to_format([-1e-310], f64, flush=True)[0] == 0
    )
    assert np.signbit(round_to_format([-1e-30], fp4, "toward_zero").astype(float))[0]
