"""Attention with dropout against NumPy with the same numbers, whatever the blocks; and launches compiled once."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError
from tessera.runtime.launch import streams
from tessera.stdlib import flash_attention


@pytest.fixture(autouse=True, params=["interp", "cpu"])
def device(request):
    before = ts.default_device()
    ts.set_default_device(request.param)
    yield request.param
    ts.set_default_device(before)


def inputs(rng):
    return [rng.standard_normal((2, h, s, 8)).astype("f4") for h, s in ((4, 9), (2, 21), (2, 21))]


def definition(q, k, v, rate, seed):
    """softmax, then each weight dropped by the number at its place of the stream."""
    k, v = np.repeat(k, 2, 1), np.repeat(v, 2, 1)
    scores = q.astype("f8") @ k.swapaxes(-1, -2) / np.sqrt(8)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    drawn = ts.rand(weights.shape, generator=ts.Generator(seed)).numpy()
    return np.where(drawn < rate, 0, weights / (1 - rate)) @ v


@pytest.mark.parametrize("block", [(8, 8), (32, 64)])
def test_dropout(block, rng):
    q, k, v = inputs(rng)
    routine = flash_attention.with_schedule(ts.Schedule(block=block))
    found = routine(q, k, v, dropout=0.3, seed=5)
    np.testing.assert_allclose(found, definition(q, k, v, 0.3, 5), rtol=2e-5, atol=2e-6)
    assert (found != routine(q, k, v, dropout=0.3, seed=6)).any()


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_is_a_probability(rate, rng):
    with pytest.raises(ArgumentError, match="0 to before 1"):
        flash_attention(*inputs(rng), dropout=rate)


def test_without_dropout_nothing_changes(rng):
    q, k, v = inputs(rng)
    np.testing.assert_array_equal(flash_attention(q, k, v, dropout=0.0, seed=3), flash_attention(q, k, v))


def test_another_seed_compiles_nothing_anew(rng, device):
    q, k, v = inputs(rng)
    flash_attention(q, k, v, dropout=0.5, seed=1)
    before = len(streams._PROGRAMS)
    for seed in range(3):
        flash_attention(q, k, v, dropout=0.5, seed=seed)
    assert len(streams._PROGRAMS) == before and (device == "interp" or before)
