"""Sampling against the logits processors of transformers, and the distribution of the draws."""

import numpy as np
import pytest

import tessera as ts
from tessera.llm.sampling import draw_tokens, find_kept, make_gumbel_noise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
LOGITS = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32) * 3


@pytest.mark.parametrize("target", ["interp", "llvm"])
@pytest.mark.parametrize(
    ("k", "p"), [(0, 1.0), (1, 1.0), (7, 1.0), (0, 0.5), (0, 0.999), (12, 0.8), (60, 1.0), (0, 1e-6)]
)
def test_kept_tokens_are_those_of_transformers(target, k, p):
    want = torch.tensor(LOGITS)
    if k:
        want = transformers.TopKLogitsWarper(k)(None, want)
    if p < 1:
        want = transformers.TopPLogitsWarper(p)(None, want)
    kept = ts.jit(find_kept, target=target)(LOGITS, np.full(3, k, np.int32), np.full(3, p, np.float32)).numpy()
    assert np.array_equal(kept, torch.isfinite(want).numpy())


def test_draws_follow_the_probabilities():
    logits, count = np.float32([0.0, 1.0, 2.0, -1.0, 0.5]), 4000
    rows = np.broadcast_to(logits, (count, 5)).copy()
    one, none = np.ones(count, np.float32), np.zeros(count, np.int32)
    operands = [ts.tensor(x) for x in (rows, none + 5, np.arange(count), one * 2, none, one)]
    drawn = draw_tokens(*operands, cut=False).numpy()
    p = np.exp(logits / 2) / np.exp(logits / 2).sum()
    assert np.abs(np.bincount(drawn, minlength=5) / count - p).max() < 0.025
    cold = (rows[:2], np.array([1, 2]), np.array([0, 1]), one[:2] * 0, np.int32([0, 3]), np.float32([1, 0.5]))
    greedy = draw_tokens(*map(ts.tensor, cold), cut=True)
    assert greedy.tolist() == [2, 2]


def test_noise_depends_on_seed_position_and_token_alone():
    seeds, places = np.array([7, 7, 2**40, -1]), np.array([3, 4, 3, 3])
    noise = make_gumbel_noise(ts.tensor(seeds), ts.tensor(places), 9).numpy()
    again = make_gumbel_noise(ts.tensor(seeds[:1]), ts.tensor(places[:1]), 6).numpy()
    assert np.array_equal(noise[:1, :6], again) and len(np.unique(noise)) == noise.size and np.isfinite(noise).all()
