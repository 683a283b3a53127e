"""Matrix products against plain sums of products."""

import numpy as np
import pytest

from tessera.core.errors import DTypeError, ShapeError
from tessera.core.symbolic_dim import Dim
from tessera.core.types import Policy, TensorType, accum, bf16, f16, f32, int8, int32, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.contractions import dot, linear, matmul


def product(a, b):
    """a b as sums over an explicit index."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(axis=-2)


A = np.arange(-6.0, 6, dtype="f4").reshape(3, 4)
B = np.arange(20.0, dtype="f4").reshape(4, 5) - 9


@pytest.mark.parametrize("dtype", (f32, f16, bf16, int32, int64), ids=str)
def test_dot(dtype):
    out = dot(Tensor(A, dtype), Tensor(B, dtype))
    want = product(A, B).astype(dtype.numpy)  # every sum is small and whole
    assert out.dtype == dtype and np.array_equal(out.numpy().astype("f8"), want.astype("f8"))


def test_batches():
    a, b = np.stack([A, A + 1]), np.stack([B, B - 1])
    assert np.array_equal(dot(Tensor(a), Tensor(b)).numpy(), product(a, b))
    assert np.array_equal(matmul(Tensor(a[:, None]), Tensor(b)).numpy(), product(a[:, None], b))
    assert np.array_equal(matmul(Tensor(a), Tensor(B)).numpy(), product(a, B[None]))


def test_vectors():
    row, column = Tensor(A[0]), Tensor(B[:, 0])
    assert matmul(row, column).shape == () and matmul(row, column).numpy() == (A[0] * B[:, 0]).sum()
    assert np.array_equal((row @ Tensor(B)).numpy(), A[0] @ B) and (Tensor(A) @ column).shape == (3,)


def test_int8_gives_its_int32_accumulator():
    x = Tensor(np.full((1, 64), 127), int8)
    out = dot(x, x.T)
    assert out.dtype == int32 and out.numpy() == 64 * 127 * 127
    assert dot(x, x.T, dtype="int8").numpy() == np.int8((64 * 127 * 127) & 0xFF).astype(np.int8)


def test_narrow_floats_accumulate_wide():
    ones = Tensor(np.ones((1, 4096)), bf16)
    assert dot(ones, ones.T).numpy().astype(float) == 4096  # bf16 sums stop at 256
    assert dot(ones, ones.T, dtype=f32).dtype == f32
    tiny = Tensor([[1.0, 2.0**-12]], f16)
    assert dot(tiny, Tensor([[1.0], [1.0]], f16), dtype=f32).numpy() == 1 + 2.0**-12


def test_policy_accumulator_is_used():
    x = Tensor([[2048.0] + [1.0] * 8], Policy(f16) @ accum(f16))
    assert dot(x, Tensor([[1.0]] * 9, f16)).dtype == f16


def test_empty_products():
    out = dot(Tensor(np.zeros((2, 0), "f4")), Tensor(np.zeros((0, 3), "f4")))
    assert out.numpy().tolist() == [[0] * 3] * 2


def test_linear():
    out = linear(Tensor(A), Tensor(B), Tensor(np.ones(5, "f4")))
    assert np.array_equal(out.numpy(), product(A, B) + 1)


ERRORS = {
    "cannot multiply: the left has 4 columns, the right 3 rows": lambda: matmul(Tensor(A), Tensor(A)),
    "matmul needs at least one axis on each side": lambda: matmul(Tensor(1.0), Tensor(A)),
    "the shapes do not fit a matrix product": lambda: dot(Tensor(A), Tensor(A)),
}


@pytest.mark.parametrize("text", ERRORS)
def test_shape_errors(text):
    with pytest.raises(ShapeError) as caught:
        ERRORS[text]()
    assert text in str(caught.value) and "received" in str(caught.value)


def test_float_formats_do_not_mix():
    with pytest.raises(DTypeError, match="cannot mix bf16 and f32"):
        Tensor(A) @ Tensor(B, bf16)
    with pytest.raises(DTypeError, match="cannot multiply f32 by bf16"):
        dot(Tensor(A), Tensor(B, bf16))
    assert (Tensor(A) @ Tensor(B, int32)).dtype == f32


def test_symbolic_sizes():
    b, k = Dim.of("B"), Dim.of("K")
    (out,) = dot.result_types((TensorType((b, k), f32), TensorType((k, 8), f32)), {"dtype": f32})
    assert out.shape == (b, 8)
    with pytest.raises(ShapeError):
        dot.result_types((TensorType((b, k), f32), TensorType((b, 8), f32)), {"dtype": f32})
