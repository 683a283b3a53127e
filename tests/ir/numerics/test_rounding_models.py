"""The cost of one rounding to each format covers what rounding does, and no less would: units, subnormals, limits."""

import ml_dtypes
import numpy as np
import pytest

from tessera.core.types import Policy, bf16, f16, f32, fp4, fp6, fp6_e2m3, fp8_e4m3, fp8_e5m2, tf32
from tessera.ir.numerics.conversion import convert, round_to_storage
from tessera.ir.numerics.error_model import find_rounding_model, gamma

FORMATS = (f32, tf32, bf16, f16, fp8_e5m2, fp8_e4m3, fp6, fp6_e2m3, fp4)
POLICIES = {"nearest": {}, "toward_zero": {"rounding": "toward_zero"}, "stochastic": {"rounding": "stochastic"},
            "flush": {"denormals": "flush"}}  # fmt: skip


def smallest_normal(dtype):
    return float(ml_dtypes.finfo(dtype.numpy).smallest_normal)


def largest_error(x, dtype, policy, scale):
    """The largest error of rounding numbers, as a share of `scale`."""
    with np.errstate(all="ignore"):
        found = np.stack([round_to_storage(x, dtype, policy, seed).astype(np.float64) for seed in range(4)])
    return float(np.max(np.abs(found - x) / scale))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_unit_is_the_largest_relative_error(dtype, name):
    policy = Policy(dtype, **POLICIES[name])
    model = find_rounding_model(dtype, policy)
    fine = np.linspace(0.0, 2.0, 4099)[1:-1]  # of the first steps above a power of two
    x = smallest_normal(dtype) * 2 * (1 + 2 * model.unit * fine)
    share = largest_error(x, dtype, policy, np.abs(x) * model.unit)
    assert (0.9 / (1 + 4 * model.unit)) < share <= 1.0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_least_error_is_that_of_subnormals(dtype, name):
    policy = Policy(dtype, **POLICIES[name])
    model = find_rounding_model(dtype, policy)
    x = smallest_normal(dtype) * np.linspace(0.0, 1.0, 4097)[:-1]
    x = np.concatenate([x, model.tiny * np.linspace(0.0, 2.0, 99)])
    x = x[x < smallest_normal(dtype)]
    assert 0.9 * (1 - model.unit) < largest_error(x, dtype, policy, model.tiny) <= 1.0


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_top_is_the_largest_number(dtype, saturate):
    """It is kept; half a step above it is the first number that is not rounded to it."""
    model = find_rounding_model(dtype, Policy(dtype, saturate=saturate))
    step = 2 * find_rounding_model(dtype).unit * 2.0 ** np.floor(np.log2(model.top))
    with np.errstate(all="ignore"):
        top, near, far = convert(model.top + step * np.array([0.0, 0.49, 0.51]), dtype, saturate).astype(np.float64)
        below = float(convert(np.float64(model.top - 0.51 * step), dtype, saturate))
    assert top == near == model.top > below
    assert model.saturates == (saturate or dtype in (fp6, fp6_e2m3, fp4))
    assert far == model.top if model.saturates else np.isinf(far) if model.infinite else np.isnan(far)


def test_roundings_in_a_row():
    assert gamma(0, 0.1) == 0.0 and gamma(1, 2.0**-24) == 2.0**-24 / (1 - 2.0**-24)
    assert gamma(3, 0.25) == 3.0 and gamma(4, 0.25) == gamma(5, 0.25) == np.inf
