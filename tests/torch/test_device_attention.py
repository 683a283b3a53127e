"""Attention under the names that GPUs give it: values, gradients, and the shapes of what the backward pass keeps."""

import pytest

torch = pytest.importorskip("torch")

from tessera.torch.aten import ATEN  # noqa: E402
from tessera.torch.tensors import from_torch, to_torch  # noqa: E402


@pytest.mark.parametrize(("name", "kept"), [("efficient", (2, 3, 32)), ("cudnn", (2, 3, 20, 1)), ("flash", (2, 3, 20))])
def test_values_and_gradients(name, kept):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 20, 8, requires_grad=True) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    g = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (q, k, v), g)
    x, dy = [from_torch(t.detach()) for t in (q, k, v)], from_torch(g)
    row = ATEN[f"aten._scaled_dot_product_{name}_attention.default"]
    out, log_sum, *rest = row(*x, *([] if name == "flash" else [None, True]), 0.0, True)
    assert log_sum.shape == kept
    backward = ATEN[f"aten._scaled_dot_product_{name}_attention_backward.default"]
    if name == "efficient":
        found = backward(dy, *x, None, out, log_sum, *rest, 0.0, [True] * 3 + [False], True)[:3]
    elif name == "cudnn":
        found = backward(dy, *x, out, log_sum, *rest[4:6], None, None, None, 20, 20, 0.0, True)
    else:
        found = backward(dy, *x, out, log_sum, None, None, 20, 20, 0.0, True, *rest[4:6])
    torch.testing.assert_close(to_torch(out), wanted.detach())
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(to_torch(a), b, atol=1e-5, rtol=1e-4)


def test_the_forward_pass_alone_keeps_nothing():
    x = [from_torch(torch.randn(1, 2, 5, 4)) for _ in range(3)]
    assert ATEN["aten._scaled_dot_product_efficient_attention.default"](*x)[1].shape == (1, 2, 0)
