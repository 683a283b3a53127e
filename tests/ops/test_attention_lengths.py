"""Attention with lengths of caches and with dropout of weights, against the definition and against PyTorch."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DTypeError, ShapeError
from tessera.stdlib import flash_attention

B, H, G, S, T = 2, 4, 2, 3, 7
LENGTHS = np.array([5, 7])


def inputs(D, E=None, dtype="f4"):
    rng = np.random.default_rng(D)
    shapes = (B, H, S, D), (B, G, T, D), (B, G, T, E or D)
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def definition(q, k, v, lengths=None, causal=False, window=0, mask=None, kept=None):
    """softmax of each row over the keys that it sees, in f64."""
    q, k, v = (np.repeat(x, H // x.shape[1], 1).astype("f8") for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + (0 if mask is None else mask)
    end = (np.full(B, T) if lengths is None else np.asarray(lengths))[:, None, None, None]
    shift = end - S if lengths is not None else 0
    row, key = np.arange(S)[:, None] + shift, np.arange(T)
    seen = (key < end) & ((key <= row) | (not causal)) & ((key > row - window) | (window == 0))
    e = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    total = e.sum(-1, keepdims=True)
    return (e if kept is None else kept * e) @ v / np.where(total == 0, 1, total)


@pytest.mark.in_turn("D")
@pytest.mark.parametrize("target", ["interp", "llvm", "ptx", "csl:2x2"])
@pytest.mark.parametrize("more", [{}, {"causal": True}, {"causal": True, "window": 2}])
@pytest.mark.parametrize("D", [8, 5])
def test_lengths_on_every_target(target, more, D):
    q, k, v = inputs(D)
    wanted = definition(q, k, v, LENGTHS, **more)
    k[0, :, 5:], v[0, :, 5:] = np.nan, np.nan  # what lies after the end of a cache does not matter
    run = ts.jit(lambda q, k, v, n: ts.scaled_dot_product_attention(q, k, v, lengths=n, **more), target=target)
    np.testing.assert_allclose(run(q, k, v, LENGTHS).numpy(), wanted, rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["added", "seen"])
def test_lengths_and_a_mask(kind):
    q, k, v = inputs(8)
    seen = np.random.default_rng(1).random((B, 1, S, T)) > 0.3
    seen[..., 0] = True
    mask = np.where(seen, 0.0, -np.inf).astype("f4")
    found = ts.scaled_dot_product_attention(q, k, v, mask if kind == "added" else seen, lengths=LENGTHS)
    np.testing.assert_allclose(found.numpy(), definition(q, k, v, LENGTHS, mask=mask), rtol=2e-5, atol=1e-6)


def test_lengths_agree_with_the_routine():
    q, k, v = inputs(16)
    found = ts.scaled_dot_product_attention(q, k, v, lengths=LENGTHS, causal=True).numpy()
    np.testing.assert_allclose(found, flash_attention(q, k, v, lengths=LENGTHS, causal=True), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_dropout_drops_the_weights_of_the_stream(target):
    q, k, v = inputs(8)
    kept = (ts.rand((B, H, S, T), generator=ts.Generator(5)).numpy() >= 0.3) / 0.7
    call = lambda q, k, v: ts.scaled_dot_product_attention(q, k, v, dropout_p=0.3, generator=ts.Generator(5))  # noqa: E731
    found = ts.jit(call, target=target)(q, k, v).numpy()
    np.testing.assert_allclose(found, definition(q, k, v, kept=kept), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(found, flash_attention(q, k, v, dropout=0.3, seed=5), rtol=2e-5, atol=1e-6)


def test_gradients_with_lengths_and_dropout_are_those_of_pytorch():
    torch = pytest.importorskip("torch")
    arrays = inputs(8, 6)
    kept = (ts.rand((B, H, S, T), generator=ts.Generator(2)).numpy() >= 0.25) / 0.75

    def loss(q, k, v):
        given = {"lengths": LENGTHS, "causal": True, "dropout": 0.25, "generator": ts.Generator(2)}
        return (ts.scaled_dot_product_attention(q, k, v, **given) ** 2).sum()

    found = ts.grad(loss, argnums=(0, 1, 2))(*arrays)
    q, k, v = tensors = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    row = torch.arange(S)[:, None] + torch.tensor(LENGTHS - S)[:, None, None, None]
    weights = torch.softmax(scores.masked_fill(torch.arange(T) > row, -torch.inf), -1) * torch.tensor(kept)
    ((weights @ v.repeat_interleave(2, 1)) ** 2).sum().backward()
    for a, t in zip(found, tensors, strict=True):
        np.testing.assert_allclose(a.numpy(), t.grad.numpy(), rtol=2e-4, atol=2e-5)


def test_without_training_nothing_is_dropped():
    q, k, v = inputs(8)
    found = ts.scaled_dot_product_attention(q, k, v, dropout=0.5, training=False).numpy()
    np.testing.assert_array_equal(found, ts.scaled_dot_product_attention(q, k, v).numpy())


def test_each_call_draws_anew_and_bf16_stays():
    q, k, v = (ts.Tensor(x).to(ts.bf16) for x in inputs(8))
    one, other = (ts.scaled_dot_product_attention(q, k, v, dropout=0.5) for _ in range(2))
    assert one.dtype == ts.bf16 and (one.to(ts.f32).numpy() != other.to(ts.f32).numpy()).any()


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"lengths": [8, 1]}, ArgumentError, "a length does not fit the keys"),
        ({"lengths": [1.0, 1.0]}, DTypeError, "no integers"),
        ({"lengths": [1, 1, 1]}, ShapeError, "the axes before the heads"),
        ({"dropout": 1.0}, ArgumentError, "0 to before 1"),
        ({"lengths": [1, 1], "window": -1}, ArgumentError, "window"),
    ],
)
def test_errors(more, error, text):
    with pytest.raises(error, match=text) as raised:
        ts.scaled_dot_product_attention(*inputs(8), **more)
    assert raised.value.location.file == __file__


def test_a_mask_of_integers_is_refused():
    """It would be added to the scores: 0 and 1 hide next to nothing."""
    q, mask = ts.ones((1, 1, 3, 4)), np.array([[1, 1, 0]] * 3)
    with pytest.raises(DTypeError, match="bools or floats"):
        ts.scaled_dot_product_attention(q, q, q, mask)
    assert ts.scaled_dot_product_attention(q, q, q, mask != 0).shape == (1, 1, 3, 4)
