"""Speculative execution: the tokens have the distribution of the model's own."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import tessera as ts
from tessera.errors import ArgumentError, ShapeError
from tessera.research.speculative import accept_draft

R = np.random.default_rng(0)


def soft(z):
    e = np.exp(z - z.max())
    return e / e.sum()


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_the_first_token_is_distributed_as_the_models(scale):
    """Whatever the draft proposes: chi-square against the model's own probabilities."""
    target, draft = R.standard_normal(6) * 2, R.standard_normal(6) * scale
    rng, counts = np.random.default_rng(1), np.zeros(6)
    for _ in range(4000):
        token = int(rng.choice(6, p=soft(draft)))
        counts[accept_draft(np.stack([target, target]), draft[None], [token], uniforms=rng.random(4))[0]] += 1
    assert stats.chisquare(counts, soft(target) * counts.sum()).pvalue > 1e-3
    naive = rng.choice(6, p=soft(draft), size=4000)  # always accepting is caught
    assert stats.chisquare(np.bincount(naive, minlength=6), soft(target) * 4000).pvalue < 1e-3


def test_the_pair_of_two_steps_is_distributed_as_the_models():
    target, draft = R.standard_normal((3, 3)), R.standard_normal((2, 3))
    rng, counts = np.random.default_rng(2), np.zeros((3, 3))
    for _ in range(6000):
        tokens = [int(rng.choice(3, p=soft(row))) for row in draft]
        found = accept_draft(target, draft, tokens, uniforms=rng.random(6))
        if len(found) > 1:
            counts[found[0], found[1]] += 1
    rows = counts.sum(1)
    for first in range(3):  # the second token, wherever the first was accepted
        assert stats.chisquare(counts[first], soft(target[1]) * rows[first]).pvalue > 1e-3


def test_an_equal_draft_is_always_accepted():
    logits = R.standard_normal((4, 5))
    for seed in range(20):
        tokens = [int(t) for t in R.integers(0, 5, 3)]
        assert accept_draft(logits, logits[:3], tokens, ts.Generator(seed))[:3] == tokens


def test_samples_have_the_probabilities_of_their_logits():
    logits = np.float32([0.0, 1.0, 2.0, -1.0])
    drawn = ts.sample(np.tile(logits, (8000, 1)), generator=ts.Generator(3)).numpy()
    assert stats.chisquare(np.bincount(drawn, minlength=4), soft(logits.astype("f8")) * 8000).pvalue > 1e-3
    assert (ts.sample(np.tile(logits, (5, 1)), temperature=0).numpy() == 2).all()
    warm = ts.sample(np.tile(logits, (8000, 1)), temperature=5.0, generator=ts.Generator(4)).numpy()
    assert stats.chisquare(np.bincount(warm, minlength=4), soft(logits.astype("f8") / 5.0) * 8000).pvalue > 1e-3


def test_what_is_refused():
    with pytest.raises(ShapeError):
        accept_draft(np.zeros((2, 3)), np.zeros((2, 3)), [0, 1])
    with pytest.raises(ShapeError):
        accept_draft(np.zeros((2, 3)), np.zeros((1, 3)), [0], uniforms=np.zeros(3))
    for temperature in (-1.0, float("nan")):
        with pytest.raises(ArgumentError):
            ts.sample(np.zeros(3), temperature=temperature)
    with pytest.raises(ArgumentError):
        ts.speculative(3)
    with pytest.raises(ArgumentError, match="no tokens"):
        ts.speculative(lambda m, p, d: ["a"])(None, [], None)


def test_15_2_speculative_execution():
    table = R.standard_normal((7, 7)).astype("f4") * 3

    def model(tokens):
        return table[np.asarray(tokens)]

    class Draft:
        """Right two times in three."""

        def generate(self, prompt, num_tokens, temperature):
            made = list(prompt)
            for i in range(num_tokens):
                made.append(int(table[made[-1]].argmax()) if i % 3 < 2 else 0)
            return made[len(prompt) :]

    @ts.speculative
    def speculative_decode(model, prompt, draft_model):
        """Speculative decoding for faster inference"""
        draft_tokens = draft_model.generate(prompt, num_tokens=4, temperature=0)
        logits = model(prompt + draft_tokens)[len(prompt) - 1 :]
        accepted = []
        for i, token in enumerate(draft_tokens):
            if int(ts.sample(logits[i], temperature=0)) == token:
                accepted.append(token)
            else:
                break
        return accepted

    want, greedy = 3, []
    for _ in range(20):
        want = int(table[want].argmax())
        greedy.append(want)
    assert speculative_decode.generate(model, [3], Draft(), num_tokens=20) == greedy
    assert len(speculative_decode(model, [3], Draft())) >= 2
    silent = SimpleNamespace(generate=lambda prompt, num_tokens, temperature: [])
    assert speculative_decode.generate(model, [3], silent, num_tokens=5) == greedy[:5]
