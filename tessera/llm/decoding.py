"""Decoding loops: one token of each request a step, or several that a draft model proposes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, user_location
from tessera.ir.tensor import Tensor, get_elements
from tessera.llm.requests import find_stop
from tessera.llm.sampling import Sampling

Tokens = Iterator[tuple[int, int]]


class TokenChooser:
    """Chooses the tokens of a batch of requests from logits, each by its own sampling."""

    def __init__(self, model: Any, chosen: Sequence[Sampling]) -> None:
        self.model = model
        self.greedy = all(s.greedy for s in chosen)
        self._cut = any(s.top_k or s.top_p < 1 for s in chosen)
        self._seeds = np.array([s.seed for s in chosen], np.int64)
        self._temperature = np.array([s.temperature for s in chosen], np.float32)
        self._top_k = np.array([s.top_k for s in chosen], np.int32)
        self._top_p = np.array([s.top_p for s in chosen], np.float32)

    def choose(self, out: Any, places: np.ndarray) -> np.ndarray:
        """The tokens for logits [B, V] at positions [B], or [B, S, V] and [B, S]; greedy tokens as they are."""
        return self.choose_there(out, places).numpy()

    def choose_there(self, out: Any, places: np.ndarray) -> Tensor:
        """As `choose`, where the logits are."""
        held = out if isinstance(out, Tensor) else Tensor(out)
        if self.greedy:
            return held
        each = places.shape[1] if places.ndim > 1 else 1
        parts = (self._seeds, self._temperature, self._top_k, self._top_p)
        seeds, temperature, top_k, top_p = (np.repeat(p, each) for p in parts)
        flat = held.reshape(places.size, held.shape[-1])
        drawn = self.model._draw(
            flat, seeds, places.reshape(-1).astype(np.int64), temperature, top_k, top_p, cut=self._cut
        )
        return drawn.reshape(places.shape)


class LateReader:
    """Reads tokens of a device while steps behind theirs run: by a stream of its own."""

    def __init__(self) -> None:
        self._streams: dict[int, int] = {}

    def mark(self, tokens: Tensor) -> tuple[Tensor, Any]:
        """The tokens of the step that was queued last, for `read`."""
        held = get_elements(tokens)
        return tokens, held.memory.mark(held.stream) if isinstance(held, DeviceArray) else None

    def read(self, marked: tuple[Tensor, Any]) -> np.ndarray:
        """The marked tokens, once their step has ended."""
        held = get_elements(marked[0])
        if not isinstance(held, DeviceArray):
            return held
        if id(held.memory) not in self._streams:
            self._streams[id(held.memory)] = held.memory.make_stream()
        return held.memory.copy_out_after(held, marked[1], self._streams[id(held.memory)])


class _Requests:
    """Which requests go on, and the tokens that each has given."""

    def __init__(self, model: Any, count: int, max_tokens: int, stops: Sequence[str]) -> None:
        self.ends, self.most = set(model.config.end_tokens), max_tokens
        self.tokenizer, self.stops = model.tokenizer, stops
        self.given: list[list[int]] = [[] for _ in range(count)]
        self.open = np.ones(count, bool)

    def give(self, request: int, token: int) -> bool:
        """Note a token; whether the request goes on."""
        given = self.given[request]
        given.append(token)
        ended = token in self.ends or len(given) >= self.most
        if self.stops and not ended:
            ended = find_stop(self.tokenizer.decode(given), self.stops) >= 0
        self.open[request] = not ended
        return not ended

    def give_all(self, found: np.ndarray) -> Tokens:
        """The tokens of the open requests, each noted after it was taken."""
        for i in map(int, np.flatnonzero(self.open)):
            yield i, int(found[i])
            self.give(i, int(found[i]))


def decode_alone(
    model: Any, prompts: Sequence[np.ndarray], most: int, chosen: Sequence[Sampling], stops: Sequence[str] = ()
) -> Tokens:
    """The tokens of each request as they come, one a step."""
    if not prompts:
        return
    chooser, state = TokenChooser(model, chosen), _Requests(model, len(prompts), most, stops)
    session = model.new_session(len(prompts), max(len(p) for p in prompts) + most)
    found = chooser.choose(session.prefill(prompts, chooser.greedy), session.past)
    if model._resident and most > 1:
        yield from _decode_ahead(session, chooser, state, found)
        return
    while True:
        yield from state.give_all(found)
        if not state.open.any():
            return
        out = session.run_step(found, state.open.astype(np.int32), greedy=chooser.greedy)
        found = chooser.choose(out, session.past)


def _decode_ahead(session: Any, chooser: TokenChooser, state: _Requests, found: np.ndarray) -> Tokens:
    """The tokens from `found` on: each step is queued before the tokens of the step before it are read.

    A request that ends with a token that was not read yet takes part in one step too many, of which nothing is given.
    """
    reader = LateReader()

    def queue(tokens: Any) -> tuple[Tensor, Any]:
        out = session.run_step(tokens, state.open.astype(np.int32), greedy=chooser.greedy)
        return reader.mark(chooser.choose_there(out, session.past))

    queued: Any = queue(found)
    while True:
        yield from state.give_all(found)
        if not state.open.any():
            return
        more = max(len(g) for g, open_ in zip(state.given, state.open, strict=True) if open_) + 1 < state.most
        following = queue(queued[0]) if more else None
        found, queued = reader.read(queued), following


def decode_with_draft(
    model: Any, draft: Any, prompts: Sequence[np.ndarray], most: int, chosen: Sequence[Sampling], proposals: int,
    stops: Sequence[str] = (),
) -> Tokens:  # fmt: skip
    """The tokens of `decode_alone`, of which a draft model proposes some and one step of the model checks all.

    Both draw with the same numbers, so a proposal holds exactly where the model would draw it itself.
    """
    if draft.config.vocabulary != model.config.vocabulary:
        raise ArgumentError(
            "the draft model has another vocabulary", location=user_location(), expected=model.config.vocabulary,
            received=draft.config.vocabulary,
        )  # fmt: skip
    if not isinstance(proposals, int) or proposals < 1:
        raise ArgumentError(f"{proposals!r} proposals", location=user_location(), expected="1 or more")
    return _decode_with_draft(model, draft, prompts, most, chosen, proposals, stops)


def _decode_with_draft(
    model: Any, draft: Any, prompts: Sequence[np.ndarray], most: int, chosen: Sequence[Sampling], proposals: int,
    stops: Sequence[str],
) -> Tokens:  # fmt: skip
    if not prompts:
        return
    chooser, drafter = TokenChooser(model, chosen), TokenChooser(draft, chosen)
    state = _Requests(model, len(prompts), most, stops)
    longest = max(len(p) for p in prompts) + most
    room = longest + proposals + 1  # a step writes all proposals, also those after the end
    limit = min(model.config.context, draft.config.context)
    sessions = [m.new_session(len(prompts), min(room, limit)) for m in (model, draft)]
    found = chooser.choose(sessions[0].prefill(prompts, chooser.greedy), sessions[0].past)
    sessions[1].prefill(prompts, True)
    for i in range(len(prompts)):
        yield i, int(found[i])
        state.give(i, int(found[i]))
    while state.open.any():
        left = min(proposals, int(sessions[0].pool.longest - sessions[0].past.max() - 1))
        guesses = _propose(sessions[1], drafter, found, state.open, max(left, 0))
        rows = np.concatenate([found.reshape(-1, 1), guesses], axis=1)
        before = sessions[0].past
        width = rows.shape[1] * state.open.astype(np.int32)
        out = sessions[0].run_step(rows, width, every=True, greedy=chooser.greedy)
        checked = chooser.choose(out, before[:, None] + 1 + np.arange(rows.shape[1])[None])
        taken = np.zeros(len(prompts), np.int32)
        for i in map(int, np.flatnonzero(state.open)):
            for j in range(rows.shape[1]):
                taken[i], token = j + 1, int(checked[i, j])
                found[i] = token
                yield i, token
                if not state.give(i, token) or j + 1 == rows.shape[1] or token != rows[i, j + 1]:
                    break
        for each in sessions:
            each.past = before + taken


def _propose(session: Any, drafter: TokenChooser, first: np.ndarray, open_: np.ndarray, count: int) -> np.ndarray:
    """The next `count` tokens of each open request by the draft model; it also takes its own last one."""
    guesses, last = [], first
    for _ in range(count):
        out = session.run_step(last, open_.astype(np.int32), greedy=drafter.greedy)
        last = drafter.choose(out, session.past)
        guesses.append(last)
    session.run_step(last, open_.astype(np.int32), greedy=True)
    return np.stack(guesses, axis=1) if guesses else np.zeros((len(first), 0), np.int32)
