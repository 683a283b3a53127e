"""The namespace of the array API standard: its names, and edge cases that the standard fixes."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera import array_api as xp

# Section "API specification" of the 2023.12 standard, without complex numbers and the extensions.
NAMES = """
e inf nan newaxis pi arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones ones_like
tril triu zeros zeros_like astype broadcast_arrays broadcast_to can_cast finfo iinfo isdtype result_type abs acos acosh
add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert bitwise_or bitwise_right_shift bitwise_xor
ceil clip copysign cos cosh divide equal exp expm1 floor floor_divide greater greater_equal hypot isfinite isinf isnan
less less_equal log log1p log2 log10 logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply
negative not_equal positive pow reciprocal remainder round sign signbit sin sinh square sqrt subtract tan tanh trunc
take matmul matrix_transpose tensordot vecdot concat expand_dims flip moveaxis permute_dims repeat reshape roll squeeze
stack tile unstack argmax argmin nonzero searchsorted where unique_counts unique_inverse unique_values argsort sort
cumulative_sum cumulative_prod count_nonzero diff isin take_along_axis unique_all broadcast_shapes linalg
max mean min prod std sum var all any bool int8 int16 int32 int64 uint8 float32 float64
""".split()
X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def test_names():
    assert [n for n in NAMES if not hasattr(xp, n)] == []
    assert ts.Tensor([1.0]).__array_namespace__() is xp


CALLS = {
    "concat": lambda m, x: m.concat([x, x], axis=None),
    "squeeze": lambda m, x: m.squeeze(x[:1, :, None], axis=(0, 2)),
    "argmax": lambda m, x: m.argmax(x, keepdims=True),
    "argmin": lambda m, x: m.argmin(x, axis=1),
    "expand_dims": lambda m, x: m.expand_dims(x, axis=-1),
    "permute_dims": lambda m, x: m.permute_dims(x, (1, 0)),
    "repeat": lambda m, x: m.repeat(x, 2, axis=1),
    "tile": lambda m, x: m.tile(x, (2, 2)),
    "sum": lambda m, x: m.sum(x, axis=0, dtype=m.float64),
    "cumulative_sum": lambda m, x: m.cumulative_sum(x, axis=1, include_initial=True),
    "linspace": lambda m, x: m.linspace(0, 1, 5, dtype=m.float32, endpoint=False),
    "arange": lambda m, x: m.arange(1, 9, 2),
    "full": lambda m, x: m.full((2,), 7),
    "unstack": lambda m, x: m.unstack(x, axis=1)[2],
    "unique": lambda m, x: m.unique_counts(m.round(x))[1],
    "broadcast": lambda m, x: m.broadcast_to(x[0], (3, 4)),
    "prod": lambda m, x: m.prod(x, axis=-1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.skipif(np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="NumPy has these names from 2.1 on")
def test_numpy_agrees(call):
    ours, numpy = call(xp, ts.Tensor(X)).numpy(), call(np, X)
    np.testing.assert_allclose(ours, numpy, rtol=1e-5)
    assert ours.dtype == numpy.dtype


# What the standard's "Special cases" say, as (function, operands, result).
SPECIAL = [
    ("pow", (math.nan, 0.0), 1.0), ("pow", (1.0, math.nan), 1.0),
    ("pow", (-math.inf, 3.0), -math.inf), ("hypot", (math.inf, math.nan), math.inf), ("expm1", (-math.inf,), -1.0),
    ("log1p", (-1.0,), -math.inf), ("logaddexp", (math.nan, 1.0), math.nan), ("sqrt", (-0.0,), -0.0),
    ("acosh", (0.5,), math.nan), ("atanh", (-1.0,), -math.inf), ("asinh", (-0.0,), -0.0), ("floor", (-0.0,), -0.0),
    ("round", (2.5,), 2.0), ("sign", (math.nan,), math.nan), ("divide", (1.0, -0.0), -math.inf),
    ("floor_divide", (1.0, -math.inf), -1.0), ("remainder", (5.0, -math.inf), -math.inf), ("trunc", (-0.5,), -0.0),
    ("maximum", (math.nan, 1.0), math.nan), ("copysign", (2.0, -0.0), -2.0), ("tanh", (-math.inf,), -1.0),
]  # fmt: skip


@pytest.mark.parametrize("name,operands,want", SPECIAL, ids=str)
def test_special_cases(name, operands, want):
    found = getattr(xp, name)(*(ts.Tensor(x, ts.f64) for x in operands)).item()
    assert (
        math.isnan(found) if math.isnan(want) else found == want and math.copysign(1, found) == math.copysign(1, want)
    )


def test_empty_reductions():
    none = ts.zeros((0, 3))
    assert xp.sum(none).item() == 0.0 and xp.prod(none).item() == 1.0 and xp.sum(none, axis=0).tolist() == [0.0] * 3
    assert bool(xp.all(none)) and not bool(xp.any(none)) and xp.concat([none, none]).shape == (0, 3)


def test_sets_and_running_totals():
    x = ts.Tensor([3, 1, 3, 2, 1])
    for found, want in zip(
        xp.unique_all(x), np.unique(x.numpy(), return_index=True, return_inverse=True, return_counts=True), strict=True
    ):
        assert found.tolist() == want.tolist()
    assert xp.isin(x, ts.Tensor([1, 9])).tolist() == [False, True, False, False, True]
    assert xp.cumulative_prod(x, include_initial=True).tolist() == [1, 3, 3, 9, 18, 18]
    assert xp.broadcast_shapes((2, 1), (3,)) == (2, 3)
    assert xp.linalg.matrix_norm(ts.Tensor([[3.0, 4.0]])).item() == 5.0
