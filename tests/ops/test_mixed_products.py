"""Products of two element types: both fp8 formats, int8 by uint8; and what uint8 sums up in."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import DTypeError
from tessera.ops.tensor.contractions import dot
from tessera.runtime import driver

RNG = np.random.default_rng(0)
A = RNG.integers(-8, 9, (5, 12)).astype(ts.fp8_e4m3.numpy)
B = RNG.integers(-3, 4, (12, 7)).astype(ts.fp8_e5m2.numpy)
WANT = A.astype("f4") @ B.astype("f4")


@pytest.mark.parametrize(("a", "b"), [(A, B), (B.T, A.T)])
def test_fp8_formats(a, b):
    out = ts.matmul(a, b)
    assert out.dtype == ts.f32
    np.testing.assert_array_equal(out.numpy(), a.astype("f4") @ b.astype("f4"))
    assert ts.matmul(a, b, dtype=ts.bf16).dtype == ts.bf16


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_at_every_level(target):
    trace = ts.jit(lambda a, b: ts.matmul(a, b) + 1.0).trace(A, B)
    levels = driver.lower(trace.function, target)
    for level in ("graph", "schedule", "tile", "target"):
        (found,) = driver.run_level(levels, level, [A, B], target)
        np.testing.assert_array_equal(found, WANT + 1)


def test_derivatives():
    a, b = ts.Tensor(A), ts.Tensor(B)
    da, db = ts.grad(lambda a, b: ts.matmul(a, b).sum(), argnums=(0, 1))(a, b)
    assert (da.dtype, db.dtype) == (ts.fp8_e4m3, ts.fp8_e5m2)
    np.testing.assert_array_equal(da.numpy().astype("f4"), np.broadcast_to(B.astype("f4").sum(1), A.shape))
    batched = ts.vmap(ts.matmul)(np.stack([A, A]), np.stack([B, B]))
    np.testing.assert_array_equal(batched.numpy(), np.stack([WANT, WANT]))


def test_bytes_of_both_signs():
    x, y = RNG.integers(-128, 128, (6, 40), "i1"), RNG.integers(0, 256, (40, 5), "u1")
    out = dot(x, y)
    assert out.dtype == ts.int32
    np.testing.assert_array_equal(out.numpy(), x.astype("i4") @ y.astype("i4"))


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_bytes_of_both_signs_sum_up_in_int32(target):
    """127 * 255 is near the end of int16, which NumPy takes for both."""
    x, y = np.full((2, 40), 127, "i1"), np.full((40, 3), 255, "u1")
    want = np.full((2, 3), 127 * 255 * 40)
    for function in (lambda x, y: x @ y, ts.matmul, lambda x, y: ts.einsum("ik,kj->ij", x, y)):
        out = ts.jit(function, target=target)(x, y)
        assert out.dtype == ts.int32
        np.testing.assert_array_equal(out.numpy(), want)


def test_uint8_does_not_wrap():
    x = np.full((2, 300), 255, "u1")
    np.testing.assert_array_equal(ts.matmul(x, x.T).numpy(), np.full((2, 2), 255 * 255 * 300))


@pytest.mark.parametrize(("a", "b"), [("f16", "bf16"), ("fp8_e4m3", "f16"), ("int8", "int16"), ("fp8_e4m3", "fp6")])
def test_others_do_not_mix(a, b):
    x, y = ts.zeros((2, 2), dtype=getattr(ts, a)), ts.zeros((2, 2), dtype=getattr(ts, b))
    with pytest.raises(DTypeError, match=rf"cannot multiply {a} by {b}[\s\S]*fp8_e4m3, fp8_e5m2 or of int8, uint8"):
        dot(x, y)
