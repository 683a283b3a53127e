"""Functions of PyFlame: values and gradients are PyTorch's."""

import numpy as np
import pytest

import tessera.pyflame as pf

torch = pytest.importorskip("torch")

rng = np.random.default_rng(7)
MATRIX = rng.normal(size=(3, 4)).astype(np.float32)
WITH_ZEROS = np.float32([[-1.5, 0.0, 2.0], [0.0, 3.5, -0.25]])
POSITIVE = np.abs(MATRIX) + 0.1
CUBE = rng.normal(size=(2, 1, 3)).astype(np.float32)
# Name, the function of both libraries, operands.
CASES = {
    "relu": (lambda p, x: p.relu(x), WITH_ZEROS),
    "sigmoid": (lambda p, x: p.sigmoid(x), MATRIX),
    "tanh": (lambda p, x: p.tanh(x), MATRIX),
    "gelu": (lambda p, x: (p if p is pf else p.nn.functional).gelu(x), MATRIX),
    "gelu_tanh": (lambda p, x: (p if p is pf else p.nn.functional).gelu(x, approximate="tanh"), MATRIX),
    "silu": (lambda p, x: (p if p is pf else p.nn.functional).silu(x), MATRIX),
    "softmax": (lambda p, x: p.softmax(x, dim=0), MATRIX),
    "log_softmax": (lambda p, x: p.log_softmax(x, dim=1), MATRIX),
    "abs": (lambda p, x: p.abs(x), WITH_ZEROS),
    "sqrt": (lambda p, x: p.sqrt(x), POSITIVE),
    "exp": (lambda p, x: p.exp(x), MATRIX),
    "log": (lambda p, x: p.log(x), POSITIVE),
    "sin": (lambda p, x: p.sin(x), MATRIX),
    "cos": (lambda p, x: p.cos(x), MATRIX),
    "sum": (lambda p, x: p.sum(x), MATRIX),
    "sum0": (lambda p, x: x.sum(dim=0), MATRIX),
    "sum_both": (lambda p, x: p.sum(x, dim=(0, -1)), MATRIX),
    "sum_keep": (lambda p, x: x.sum(dim=1, keepdim=True), MATRIX),
    "mean": (lambda p, x: p.mean(x, dim=1), MATRIX),
    "mean_all": (lambda p, x: x.mean(), MATRIX),
    "max": (lambda p, x: p.max(x), MATRIX),
    "max1": (lambda p, x: p.max(x, dim=1) if p is pf else p.max(x, dim=1).values, MATRIX),
    "min": (lambda p, x: x.min(), MATRIX),
    "min0": (lambda p, x: x.min(dim=0) if p is pf else x.min(dim=0).values, MATRIX),
    "reshape": (lambda p, x: p.reshape(x, [2, -1]), MATRIX),
    "transpose": (lambda p, x: p.transpose(x, 0, -1), CUBE),
    "squeeze": (lambda p, x: p.squeeze(x), CUBE),
    "squeeze1": (lambda p, x: p.squeeze(x, dim=1), CUBE),
    "squeeze_other": (lambda p, x: p.squeeze(x, dim=0), CUBE),
    "unsqueeze": (lambda p, x: p.unsqueeze(x, -1), MATRIX),
    "matmul": (lambda p, x, y: p.matmul(x, y), MATRIX, MATRIX.T.copy()),
    "batches": (lambda p, x, y: x @ y, rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 4, 5))),
    "vector": (lambda p, x, y: x @ y, MATRIX, MATRIX[0].copy()),
    "cat": (lambda p, x, y: p.cat([x, y], dim=-1), MATRIX, MATRIX * 2),
    "stack": (lambda p, x, y: p.stack([x, y], dim=1), MATRIX, MATRIX * 2),
    "same": (lambda p, x: p.cat([x, x]), MATRIX),
    "where": (lambda p, x: p.where(x > 0, x * 2, x * x), MATRIX),
    "operators": (lambda p, x, y: -x + y * 2.0 - x / 2.0 + 1.0 / y + 3 - (2 - x) * y, POSITIVE, POSITIVE + 1),
    "power": (lambda p, x: x**2 + x**0.5 + 2.0**x, POSITIVE),
    "broadcast": (lambda p, x, y: x * y + y, MATRIX[:, :1].copy(), MATRIX[0].copy()),
    "item": (lambda p, x: x[1, ::2], MATRIX),
    "row": (lambda p, x: x[..., -1] + x[0, 0], MATRIX),
    "new_axis": (lambda p, x: x[None, 1:], MATRIX),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    function, *arrays = CASES[name]
    ours = [pf.tensor(a, requires_grad=True) for a in arrays]
    theirs = [torch.tensor(a, dtype=torch.float32, requires_grad=True) for a in arrays]
    y, z = function(pf, *ours), function(torch, *theirs)
    assert y.shape == list(z.shape)
    assert pf.is_lazy(y) or y is ours[0]
    g = np.cos(np.arange(y.numel, dtype=np.float32)).reshape(y.shape)
    y.backward(pf.tensor(g))
    z.backward(torch.tensor(g))
    np.testing.assert_allclose(y.numpy(), z.detach(), rtol=2e-5, atol=2e-6)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), b.grad, rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "lt", "ge", "eq", "ne"])
@pytest.mark.parametrize("other", [2, 0.5])
def test_operators_with_numbers_and_integers(name, other):
    import operator

    array = np.int32([-3, 0, 2, 7])
    call = getattr(operator, name)
    want, found = call(torch.tensor(array), other), call(pf.tensor(array), other)
    np.testing.assert_allclose(found.numpy(), want.numpy())
    assert str(found.dtype).removeprefix("DType.").rstrip("_") == str(want.dtype).removeprefix("torch.")


def test_index_by_a_tensor_and_by_a_mask():
    x, rows = pf.tensor(MATRIX), pf.tensor([2, 0], dtype=pf.int32)
    np.testing.assert_array_equal(x[rows].numpy(), MATRIX[[2, 0]])
    np.testing.assert_array_equal(x[rows, 1].numpy(), MATRIX[[2, 0], 1])
    np.testing.assert_array_equal(x[x > 0].numpy(), MATRIX[MATRIX > 0])


@pytest.mark.parametrize("dtype", [pf.float16, pf.bfloat16, pf.int32, pf.int16, pf.int8])
def test_every_element_type(dtype):
    x = pf.tensor([[1, 2], [3, -4]], dtype=dtype)
    want = torch.tensor([[1, 2], [3, -4]], dtype=getattr(torch, dtype.name))
    for function in (lambda t: t + t, lambda t: t.sum(), lambda t: t * 3, lambda t: t.max(), lambda t: t.reshape(4)):
        np.testing.assert_array_equal(function(x).numpy().astype(np.float64), function(want).to(torch.float64))
    assert (x + x).dtype is dtype


def test_empty_and_scalar_tensors():
    assert pf.zeros([0, 3]).sum(dim=0).numpy().tolist() == [0, 0, 0]
    assert pf.cat([pf.zeros([0, 2]), pf.ones([1, 2])]).shape == [1, 2]
    assert (pf.tensor(2.0) * pf.tensor(3.0)).item() == 6
    assert pf.squeeze(pf.tensor(1.0)).shape == []
