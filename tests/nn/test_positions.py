"""Positions and grouped queries against complex numbers, published slopes and PyTorch's attention."""

import numpy as np
import pytest

import tessera as ts
from tessera import nn
from tessera.core.errors import ShapeError

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_turn_complex_numbers(interleaved):
    x, positions = RNG.standard_normal((2, 5, 8)).astype(np.float32), np.array([0, 1, 2, 7, 100])
    pairs = x.reshape(2, 5, 4, 2) if interleaved else np.stack([x[..., :4], x[..., 4:]], -1)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * positions[:, None] * 500.0 ** (-np.arange(4) / 4))
    parts = np.stack([turned.real, turned.imag], -1)
    expected = parts.reshape(2, 5, 8) if interleaved else np.concatenate([parts[..., 0], parts[..., 1]], -1)
    found = nn.rotate_positions(x, positions, 500.0, interleaved)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)
    layer = nn.RotaryEmbedding(8, 500.0, interleaved)
    np.testing.assert_array_equal(
        layer(x, 3).numpy(), nn.rotate_positions(x, np.arange(3, 8), 500.0, interleaved).numpy()
    )
    with pytest.raises(ts.errors.ShapeError, match="pairs"):
        nn.rotate_positions(x[..., :3], positions)


def test_alibi_has_the_slopes_of_its_paper():
    np.testing.assert_allclose(nn.alibi_slopes(8).numpy(), [2.0**-i for i in range(1, 9)])
    slopes = nn.alibi_slopes(12).numpy()
    np.testing.assert_allclose(slopes[8:], [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5], rtol=1e-6)
    bias = nn.alibi_bias(8, 2, 5).numpy()
    np.testing.assert_allclose(bias[0, :, :], 0.5 * (np.arange(5)[None] - np.array([[3], [4]])))


def test_sinusoidal_positions_have_the_formula_of_their_paper():
    at, i = np.arange(6)[:, None], np.arange(4)[None]
    angle = at / 10000.0 ** (2 * i / 8)
    found = nn.SinusoidalPositions(8)(ts.zeros((6, 8))).numpy()
    np.testing.assert_allclose(found[:, 0::2], np.sin(angle), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[:, 1::2], np.cos(angle), rtol=1e-5, atol=1e-6)


def test_grouped_queries_equal_attention_of_torch():
    torch = pytest.importorskip("torch")
    layer, x = (
        nn.GroupedQueryAttention(16, 4, kv_heads=2, bias=True),
        RNG.standard_normal((2, 5, 16)).astype(np.float32),
    )
    w = {n: torch.tensor(t.numpy().copy()) for n, t in layer.state_dict().items()}

    def project(name, heads):
        y = torch.tensor(x) @ w[f"{name}.weight"].T + w[f"{name}.bias"]
        return y.view(2, 5, heads, 4).transpose(1, 2)

    def turn(t):
        angle = torch.arange(5)[:, None] * 10000.0 ** (-torch.arange(2) / 2)
        a, b = t[..., :2], t[..., 2:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    q, k, v = turn(project("q_proj", 4)), turn(project("k_proj", 2)), project("v_proj", 2)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = out.transpose(1, 2).reshape(2, 5, 16) @ w["o_proj.weight"].T + w["o_proj.bias"]
    np.testing.assert_allclose(layer(x).numpy(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ts.errors.ShapeError, match="batch of sequences"):
        layer(x[0])


def test_attention_weights_and_masks_equal_those_of_torch():
    torch = pytest.importorskip("torch")
    theirs, ours = torch.nn.MultiheadAttention(8, 2, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    q, k = (RNG.standard_normal(s).astype(np.float32) for s in ((3, 4, 8), (3, 5, 8)))
    padding, mask = np.zeros((3, 5), bool), RNG.standard_normal((4, 5)).astype(np.float32)
    padding[1, 3:] = True
    for average in (True, False):
        named = {"need_weights": True, "average_attn_weights": average}
        masks = {"key_padding_mask": np.where(padding, -np.inf, 0).astype(np.float32), "attn_mask": mask}
        want = theirs(*map(torch.tensor, (q, k, k)), **named, **{n: torch.tensor(m) for n, m in masks.items()})
        for given in (masks, {**masks, "key_padding_mask": padding}):
            for a, b in zip(ours(q, k, k, **named, **given), want, strict=True):
                np.testing.assert_allclose(a.numpy(), b.detach(), rtol=1e-4, atol=1e-6)


def test_a_mask_of_another_size_is_refused():
    layer, x = ts.nn.MultiheadAttention(8, 2), ts.ones((1, 5, 8))
    for mask in (np.zeros((5, 4), bool), np.zeros((4, 5), bool)):
        with pytest.raises(ShapeError, match="a mask does not fit"):
            layer(x, x, x, attn_mask=mask)
