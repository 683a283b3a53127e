"""What mixes and what does not: Python numbers, integers, floats; and the texts of the errors."""

import sys

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError
from tessera.core.types import Policy, accum, bf16, bool_, f16, f32, f64, int8, int16, int32, int64, tf32, uint8
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import basic, elementwise, reduce

FLOATS = (f64, f32, f16, bf16)


@pytest.mark.parametrize("dtype", (*FLOATS, int8, int32), ids=str)
def test_python_numbers_take_the_tensors_type(dtype):
    x = Tensor([1, 2], dtype)
    for out in (x + 1, 1 + x, x * 2, 2 - x, x - True):
        assert out.dtype == dtype and out.shape == (2,)
    assert (5 - x).numpy().astype(float).tolist() == [4, 3]


def test_a_python_bool_beside_integers_is_zero_or_one():
    assert (Tensor([1, 2, 0], int32) == True).numpy().tolist() == [True, False, False]  # noqa: E712
    assert (Tensor([1, 2], int32) & True).numpy().tolist() == [1, 0]


def test_a_python_float_beside_integers_is_f32():
    assert (Tensor([1, 2], int8) + 0.5).dtype == f32 and (Tensor([1, 2], int64) * 1.5).numpy().tolist() == [1.5, 3]


@pytest.mark.parametrize(
    ("left", "right", "out"), [(int8, int32, int32), (uint8, int8, int16), (int32, int64, int64), (bool_, int8, int8)]
)
def test_integers_mix_as_in_numpy(left, right, out):
    assert (Tensor([1], left) + Tensor([1], right)).dtype == out


def test_an_integer_tensor_beside_a_float_tensor_takes_its_type():
    assert (Tensor([1, 2], int32) + Tensor([0.5, 0.5], bf16)).dtype == bf16


def test_float_formats_never_mix():
    with pytest.raises(DTypeError) as caught:
        Tensor([1.0], f32) + Tensor([1.0], bf16)
    caught.value.location = None
    assert str(caught.value) == (
        "DTypeError: cannot mix bf16 and f32\n"
        "  expected: operands of one float type\n"
        "  received: 1xf32 and 1xbf16\n"
        "  suggestion: cast one of them: x.to(ts.f32)"
    )


def test_the_error_points_at_the_users_line():
    with pytest.raises(DTypeError) as caught:
        Tensor([1.0], f32) + Tensor([1.0], f16)
    assert caught.value.location.file == __file__
    assert "Tensor([1.0], f32) + Tensor([1.0], f16)" in str(caught.value)
    assert "^^^" in str(caught.value) or sys.version_info < (3, 11)  # older Pythons keep no columns


def test_division_and_means_of_integers_give_f32_and_sums_int64():
    x = Tensor([1, 2, 4], int32)
    assert (x / x).dtype == f32 and reduce.mean(x).dtype == f32
    for dtype in (int8, int16, int32, uint8, bool_):
        assert reduce.sum(Tensor([1, 1], dtype)).dtype == int64
    assert reduce.sum(Tensor([1.0], bf16)).dtype == bf16


def test_python_floats_make_f32_tensors():
    assert as_tensor(1.5).dtype == f32 and as_tensor([1.0, 2.0]).dtype == f32 and as_tensor(3).dtype == int64
    assert Tensor(np.float64([1.0])).dtype == f64  # an array keeps its type
    with pytest.raises(DTypeError, match="is not a tensor or a number"):
        as_tensor(object())


def test_a_policy_stays_through_arithmetic():
    x = Tensor([1.0], Policy(bf16) @ accum(f32))
    assert (x + 1).type.policy == x.type.policy and (1 - x).type.policy == x.type.policy


def test_tf32_rounds_its_results():
    x = Tensor([1 + 2.0**-10], tf32)
    out = x * x
    assert out.dtype == tf32 and out.numpy()[0] == np.float32(1 + 2.0**-9)


def test_calls():
    x = Tensor([[1.0, 2.0]])
    assert reduce.sum(x, dim=1, keepdim=True).shape == reduce.sum(x, axis=1, keepdims=True).shape == (1, 1)
    assert reduce.sum(x=x).shape == () and reduce.sum(x, 0).shape == (2,)
    with pytest.raises(ArgumentError) as caught:
        reduce.sum(x, axes=1)
    assert "sum does not take these arguments" in str(caught.value) and "received: axes" in str(caught.value)
    with pytest.raises(ArgumentError, match="add takes 2 operands, not 1"):
        elementwise.add(x)
    with pytest.raises(ArgumentError, match="cast needs dtype"):
        basic.cast(x)
    with pytest.raises(ArgumentError, match="sum does not take these arguments"):
        reduce.sum(x, 0, True, 3)


NUMPY_NUMBERS = {
    "split": lambda n: ts.split(ts.arange(4), n),
    "roll": lambda n: ts.roll(ts.arange(4), n, np.int64(0)),
    "stride": lambda n: ts.conv2d(ts.ones((1, 1, 5, 5)), ts.ones((1, 1, 2, 2)), stride=n),
    "strides": lambda n: ts.conv2d(ts.ones((1, 1, 5, 5)), ts.ones((1, 1, 2, 2)), stride=(n, np.int8(1))),
    "window": lambda n: ts.max_pool2d(ts.ones((1, 1, 4, 4)), n),
    "norm": lambda n: ts.norm(ts.ones(4), n),
    "axis of a map": lambda n: ts.vmap(lambda x: x.sum(), in_dims=n)(ts.ones((2, 3, 4))),
    "argument": lambda n: ts.grad(lambda a, b, c: a * b * c, n)(1.0, 2.0, 3.0),
    "bound": lambda n: ts.fori_loop(0, n, lambda i, x: x * 3.0, 1.0),
    "rate": lambda n: ts.optim.SGD(lr=n).lr,
    "steps": lambda n: ts.optim.CosineAnnealingLR(0.1, T_max=n)(1),
    "slope": lambda n: ts.nn.LeakyReLU(n)(ts.Tensor([-1.0])),
}


@pytest.mark.parametrize("name", NUMPY_NUMBERS)
def test_numbers_of_numpy_are_those_of_python(name):
    """Sizes, axes and options that a program computes with NumPy."""
    call = NUMPY_NUMBERS[name]
    for kind in (np.int64, np.uint8, np.int32):
        found, want = (np.asarray(ts.tree.map(np.asarray, call(n))) for n in (kind(2), 2))
        np.testing.assert_array_equal(found, want)


def test_a_double_of_numpy_alone_is_a_python_number():
    """`np.float64` is a subclass of `float`."""
    two = np.float64(2)
    assert [f(two).dtype for f in (ts.exp, ts.sqrt, ts.abs)] == [f32] * 3
    assert ts.where(Tensor([True, False]), two, np.float64(3)).tolist() == [2, 3] and ts.maximum(two, 1).item() == 2


def test_a_number_that_is_wrong_is_told_as_it_came():
    with pytest.raises(ArgumentError, match="stride"):
        ts.conv2d(ts.ones((1, 1, 5, 5)), ts.ones((1, 1, 2, 2)), stride=np.int64(0))
