"""Speculative execution: a cheap draft model proposes tokens, the model accepts or rejects them at once.

`accept_draft` is the rejection rule of Leviathan, Kalman and Matias (ICML 2023): the tokens that come out have exactly
the distribution of the model's own samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.random import Generator, rand
from tessera.ops.tensor.reduce import argmax


def sample(logits: Any, temperature: float = 1.0, generator: Generator | None = None) -> Tensor:
    """A token for each row of logits [..., V], as int64 [...]; temperature 0 takes the most likely one.

    Drawn by the Gumbel-max rule from the default generator or `generator`.

    Raises:
        ArgumentError: the temperature is negative or no number.

    >>> sample(Tensor([0.0, 9.0, 1.0]), temperature=0.0)
    Tensor(1, int64)
    """
    if not temperature >= 0:
        raise ArgumentError(
            "no temperature", location=user_location(), expected="0 or more", received=repr(temperature)
        )
    tensor = as_tensor(logits)
    if temperature == 0:
        return argmax(tensor, axis=-1)
    noise = rand(tensor.shape, generator=generator)
    gumbel = -e.log(-e.log(e.maximum(noise, 1e-30)) + 1e-30)
    return argmax(tensor / temperature + gumbel, axis=-1)


def accept_draft(
    target_logits: Any, draft_logits: Any, tokens: Sequence[int], generator: Generator | None = None,
    uniforms: Any = None,
) -> list[int]:  # fmt: skip
    """The tokens that a step gives: the accepted prefix of the draft's `tokens`, then one of the model's own.

    `target_logits` [K + 1, V] are the model's at each position of the draft and after it, `draft_logits` [K, V] those
    that the K tokens were drawn from. Each token is accepted with probability min(1, p/q); at the first one that is
    rejected another is drawn from max(0, p - q). So the results are distributed as samples of the model. `uniforms` are
    2 K + 2 numbers in [0, 1) to decide by, instead of those of a generator.

    Raises:
        ShapeError: the shapes do not fit.
    """
    p, q = (_probabilities(x) for x in (target_logits, draft_logits))
    if p.shape != (len(tokens) + 1, q.shape[-1]) or q.shape[0] != len(tokens):
        raise ShapeError(
            "the logits do not fit the draft", location=user_location(),
            expected=f"({len(tokens) + 1}, V) of the model and ({len(tokens)}, V) of the draft",
            received=f"{p.shape} and {q.shape}",
        )  # fmt: skip
    count = 2 * len(tokens) + 2
    draws = rand((count,), generator=generator).numpy() if uniforms is None else np.asarray(uniforms, np.float64)
    if draws.shape != (count,):
        raise ShapeError(
            "other numbers to decide by", location=user_location(), expected=f"({count},)", received=draws.shape
        )
    accepted: list[int] = []
    for k, token in enumerate(tokens):
        if draws[2 * k] * q[k, token] >= p[k, token]:
            rest = np.maximum(p[k] - q[k], 0.0)
            rest = rest if rest.sum() > 0 else p[k]
            return [*accepted, _draw(rest / rest.sum(), draws[2 * k + 1])]
        accepted.append(int(token))
    return [*accepted, _draw(p[-1], draws[-1])]


def _probabilities(logits: Any) -> np.ndarray:
    z = as_tensor(logits).numpy().astype(np.float64)
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _draw(probabilities: np.ndarray, uniform: float) -> int:
    place = int(np.searchsorted(np.cumsum(probabilities), uniform, side="right"))
    return min(place, len(probabilities) - 1)


def speculative(step: Callable[..., Sequence[int]]) -> Callable[..., Any]:
    """A step `step(model, prompt, draft_model)` that gives accepted tokens, which gets `generate(..., num_tokens=N)`.

    `generate` repeats the step, each time with the tokens so far. A step that accepts nothing is followed by one token
    of the model itself (greedy), so that it always ends; `model(tokens)` gives logits [len(tokens), V].

    Raises:
        ArgumentError: it is no function; a step gives something else than tokens.
    """
    if not callable(step):
        raise ArgumentError("@ts.speculative decorates a function", location=user_location(), received=repr(step)[:80])

    @functools.wraps(step)
    def run(model: Any, prompt: Sequence[int], draft_model: Any) -> list[int]:
        found = list(step(model, prompt, draft_model))
        if not all(isinstance(t, (int, np.integer)) for t in found):
            raise ArgumentError(
                f"{getattr(step, '__name__', 'the step')} gives no tokens", location=user_location(),
                expected="a list of ints", received=repr(found)[:80],
            )  # fmt: skip
        return [int(t) for t in found]

    def generate(model: Any, prompt: Sequence[int], draft_model: Any, num_tokens: int) -> list[int]:
        """`num_tokens` tokens after the prompt."""
        made: list[int] = []
        while len(made) < num_tokens:
            tokens = [*prompt, *made]
            found = run(model, tokens, draft_model)
            made += found or [int(np.argmax(as_tensor(model(tokens)).numpy()[-1]))]
        return made[:num_tokens]

    run.generate = generate  # type: ignore[attr-defined]
    return run
