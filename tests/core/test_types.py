"""Element types, policies, and the types of values."""

import ml_dtypes
import numpy as np
import pytest

import tessera.core.types as t
from tessera.core.errors import DTypeError
from tessera.core.symbolic_dim import Dim


@pytest.mark.parametrize("dtype", t.DTYPES, ids=str)
def test_every_type_has_one_name_and_a_storage(dtype):
    assert t.BY_NAME[dtype.name] is dtype and t.BY_MLIR[dtype.mlir] is dtype and repr(dtype) == f"ts.{dtype}"
    assert t.as_dtype(dtype.name) is dtype and t.as_dtype(dtype) is dtype
    assert (dtype.is_float, dtype.is_integer).count(True) == (dtype.kind != "bool")
    if dtype is not t.tf32:  # shares f32's storage
        assert t.as_dtype(dtype.numpy) is dtype
    if dtype.is_float and dtype is not t.tf32:
        assert ml_dtypes.finfo(dtype.numpy).bits == dtype.bits
    if dtype.is_integer:
        assert ml_dtypes.iinfo(dtype.numpy).bits == dtype.bits


def test_python_types():
    assert (t.as_dtype(float), t.as_dtype(int), t.as_dtype(bool)) == (t.f32, t.int64, t.bool_)
    with pytest.raises(DTypeError, match="use one of f64, f32"):
        t.as_dtype("float99")
    with pytest.raises(DTypeError):
        t.as_dtype(np.complex64)


def test_a_policy_is_built_by_at():
    p = t.bf16 @ t.accum(t.f64) @ t.stochastic_round @ t.loss_scale(1024)
    assert (p.storage, p.accumulate, p.rounding, p.loss_scale) == (t.bf16, t.f64, "stochastic", 1024.0)
    assert repr(t.bf16 @ t.saturate @ t.flush_denormals) == "ts.bf16 @ saturate=True @ denormals=flush"
    assert (t.f16 @ t.compute("f16") @ t.toward_zero).clauses() == {"compute": t.f16, "rounding": "toward_zero"}
    with pytest.raises(DTypeError, match="is not part of a policy"):
        t.bf16 @ t.f32


NARROW = (t.f16, t.bf16, t.fp8_e4m3, t.fp8_e5m2, t.fp6, t.fp6_e2m3, t.fp4)


@pytest.mark.parametrize("dtype", NARROW + (t.tf32, t.f32), ids=str)
def test_narrow_floats_compute_and_accumulate_in_f32(dtype):
    type = t.TensorType((2,), dtype)
    assert type.compute is type.accumulate is t.f32


def test_other_defaults():
    for dtype, wide in ((t.f64, t.f64), (t.int8, t.int32), (t.int4, t.int32), (t.int16, t.int16), (t.int64, t.int64)):
        assert t.TensorType((), dtype).accumulate is wide
    assert t.scalar(t.int8).compute is t.int8


def test_a_policy_decides_over_the_defaults():
    type = t.TensorType((2,), t.bf16, t.bf16 @ t.accum(t.bf16) @ t.compute(t.bf16))
    assert type.accumulate is type.compute is t.bf16
    assert type.with_dtype(t.f32).policy is None and type.with_shape((3,)).policy == type.policy
    assert t.TensorType((2,), t.bf16, t.Policy(t.bf16)) == t.TensorType((2,), t.bf16)


def test_text_and_sizes():
    b = Dim.of("B")
    type = t.TensorType((b, 2 * b, 3), t.bf16)
    assert str(type) == "Bx2*Bx3xbf16" and type.rank == 3 and str(t.scalar(t.f32)) == "f32"
    assert type.evaluate({"B": 4}).shape == (4, 8, 3) and type.evaluate({}) == type
    ref = t.RefType((b, 3), t.f32, t.SHARED)
    assert str(ref) == "shared BxD".replace("D", "3xf32") and ref.evaluate({"B": 2}).shape == (2, 3)
    assert ref.block((1, 3)) == t.TensorType((1, 3), t.f32)
