"""The namespace of the array API standard: its names, and edge cases that the standard fixes."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera import array_api as xp
from tessera.runtime.program import prepare

# Section "API specification" of the 2024.12 standard, without complex numbers and the extensions.
NAMES = """
e inf nan newaxis pi arange asarray empty empty_like eye from_dlpack full full_like linspace meshgrid ones ones_like
tril triu zeros zeros_like astype broadcast_arrays broadcast_to can_cast finfo iinfo isdtype result_type abs acos acosh
add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert bitwise_or bitwise_right_shift bitwise_xor
ceil clip copysign cos cosh divide equal exp expm1 floor floor_divide greater greater_equal hypot isfinite isinf isnan
less less_equal log log1p log2 log10 logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply
negative nextafter not_equal positive pow reciprocal remainder round sign signbit sin sinh square sqrt subtract tan tanh
trunc take matmul matrix_transpose tensordot vecdot concat expand_dims flip moveaxis permute_dims repeat reshape roll
squeeze stack tile unstack argmax argmin nonzero searchsorted where unique_counts unique_inverse unique_values argsort
sort cumulative_sum cumulative_prod count_nonzero diff isin take_along_axis unique_all broadcast_shapes linalg
max mean min prod std sum var all any bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64
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
    ("pow", (math.nan, 0.0), 1.0), ("pow", (1.0, math.nan), 1.0), ("pow", (-math.inf, 0.5), math.inf),
    ("pow", (-0.0, 0.5), 0.0), ("sign", (-0.0,), 0.0), ("atan2", (-0.0, -1.0), -math.pi),
    ("nextafter", (0.0, -0.0), -0.0),
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


def test_half_powers_alike(rng):
    """A constant exponent of one half is no square root, at any level."""
    x = np.array([-0.0, -math.inf, math.inf, 4.0, math.nan], np.float32)
    program = prepare(ts.jit(lambda x: x**0.5), (x,), "llvm")
    for level in ("graph", "schedule", "tile", "target", "device"):
        found = program.run(level, "llvm")[0]
        assert found.tolist()[:4] == [0.0, math.inf, math.inf, 2.0] and not np.signbit(found[0]), level


def test_namespace_info():
    info = xp.__array_namespace_info__()
    assert info.dtypes(kind="unsigned integer").keys() == {"uint8", "uint16", "uint32", "uint64"}
    assert info.default_dtypes()["real floating"] == ts.f32 and info.default_device() in info.devices()


def test_named_results():
    x = ts.Tensor([[2.0, 0.0], [0.0, 3.0]])
    assert xp.linalg.svd(x).S.tolist() == [3.0, 2.0] and xp.linalg.eigh(x).eigenvalues.tolist() == [2.0, 3.0]
    assert xp.linalg.slogdet(x).sign.item() == 1.0 and xp.linalg.qr(x).R.shape == (2, 2)
    assert xp.unique_counts(ts.Tensor([2, 2])).counts.tolist() == [2]
    with pytest.raises(ts.TesseraError, match="svd gives the reduced factors"):
        xp.linalg.svd(x, full_matrices=True)


def test_types_that_stay():
    assert xp.asarray(16777217.0, dtype=xp.float64).item() == 16777217.0  # not by way of f32
    assert (
        xp.zeros(2, dtype=None).dtype == ts.f32 and xp.sum(ts.Tensor([1], ts.uint8), dtype=ts.uint8).dtype == ts.uint8
    )
    assert xp.result_type(xp.int8, 1) == ts.int8 and xp.result_type(xp.float32, True, 2.0) == ts.f32
    assert not xp.isdtype(xp.float32, "complex floating")
    assert xp.var(ts.Tensor([1.0, 2.0]), correction=2).item() == math.inf and math.isnan(
        xp.std(1.0, correction=1).item()
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
