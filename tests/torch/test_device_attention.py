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


@pytest.mark.parametrize("by_bias", [False, True])
def test_a_bias(by_bias):
    """Its own derivative needs the weights; without it they are computed again."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 3, 20, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 1, 20, 20).masked_fill(torch.rand(2, 1, 20, 20) < 0.3, -torch.inf)
    bias[0, 0, 3] = -torch.inf  # a query without a key
    bias = bias.expand(2, 3, 20, 20).clone().requires_grad_()
    scores = q @ k.transpose(-1, -2) * 8**-0.5 + bias
    weights = torch.softmax(scores, -1).nan_to_num()
    wanted, g = weights @ v, torch.randn(2, 3, 20, 8)
    by_weights = g @ v.transpose(-1, -2)
    by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True))
    gradients = (by_scores @ k * 8**-0.5, by_scores.mT @ q * 8**-0.5, weights.mT @ g, by_scores)
    x, dy, held = [from_torch(t.detach()) for t in (q, k, v)], from_torch(g), from_torch(bias.detach())
    forward = ATEN["aten._scaled_dot_product_efficient_attention.default"]
    out, log_sum, *rest = forward(*x, held, True)
    backward = ATEN["aten._scaled_dot_product_efficient_attention_backward.default"]
    found = backward(dy, *x, held, out, log_sum, *rest, 0.0, [True] * 3 + [by_bias])
    torch.testing.assert_close(to_torch(out), wanted.detach())
    assert (found[3] is not None) == by_bias
    for a, b in zip(found[: 3 + by_bias], gradients, strict=False):
        torch.testing.assert_close(to_torch(a), b.detach(), atol=1e-5, rtol=1e-4)
