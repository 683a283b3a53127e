"""Continuous batching: requests join and leave a running batch at any step (Yu et al. 2022), over a paged cache.

The shapes of a step are fixed: a prompt is read in chunks of one page, and a decoding step has a row for each slot,
used or not. The result of a row is therefore the same, bit for bit, whatever the other rows hold: a request gives the
tokens that it gives alone. A single request runs in a step of one row where that was found to give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.llm.decoding import TokenChooser
from tessera.llm.generation import Completion, LanguageModel, make_cache
from tessera.llm.sampling import GREEDY, Sampling
from tessera.llm.shared_pages import SharedPages, name_prefixes

LONGEST = 2048  # positions of a request, by default
COMPARED_STEPS = 4


@dataclass(eq=False)
class Generation:
    """A request in the scheduler: its prompt, the tokens so far, and why it ended ("" while it runs)."""

    number: int
    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    slot: int = -1  # of the batch; -1 while it waits
    past: int = 0  # positions in the cache
    pages: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    shared: int = 0  # pages that it took from others

    @property
    def needed(self) -> int:
        """The positions in the cache before a new token is drawn, and one for that."""
        return len(self.prompt) + max(len(self.tokens), 1)


class GivenToken(NamedTuple):
    """A new token of a request, and why the request ends with it: "stop", "length", or "" where it goes on."""

    request: Generation
    token: int
    reason: str


@dataclass
class SchedulerCounts:
    """What a scheduler did: steps, tokens and pages."""

    prefill_steps: int = 0
    decode_steps: int = 0
    tokens: int = 0
    shared_pages: int = 0
    preemptions: int = 0


class GenerationScheduler:
    """Generates for many requests at once; `step` does one chunk of a prompt and one token of each running request.

    `slots` is the number of requests in the batch, `longest` the positions of a request, `pages` those of the cache
    (by default as many as all slots can need). A request is admitted when a slot and the pages of its prompt are
    free. Where the cache is full, the request that came last gives its pages back, and is computed again later: the
    same tokens, because each is drawn by its seed and position. `share_prefixes` keeps the pages of prompts, for
    requests that begin alike.

    Raises:
        ArgumentError: a number is not positive, or `longest` is more than the model's context or than the cache.
    """

    def __init__(
        self, model: LanguageModel, slots: int = 8, longest: int | None = None, pages: int | None = None,
        share_prefixes: bool = True,
    ) -> None:  # fmt: skip
        longest = min(model.config.context, LONGEST) if longest is None else longest
        for name, value in (("slots", slots), ("longest", longest)):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
                raise ArgumentError(f"a scheduler with {name} {value!r}", location=user_location(),
                                    expected="a positive integer")  # fmt: skip
        if longest > model.config.context:
            raise ArgumentError("requests longer than the model's context", location=user_location(),
                                expected=f"up to {model.config.context} tokens", received=longest)  # fmt: skip
        self.model, self.slots, self.longest = model, int(slots), int(longest)
        self.width = -(-self.longest // model.page_size)
        self.pages = SharedPages(self.slots * self.width if pages is None else pages, model.page_size)
        self.share_prefixes, self.counts = share_prefixes, SchedulerCounts()
        self.waiting: deque[Generation] = deque()
        self.running: dict[int, Generation] = {}  # by slot
        self._numbers = count()
        self._equal_steps = -1 if model._resident else 0  # of one row and of all slots; -1: not the same
        self._keys, self._values = make_cache(model, self.pages.count)

    def submit(self, prompt: Any, max_tokens: int = 128, sampling: Sampling = GREEDY) -> Generation:
        """Add a request, a list of tokens: `make_request`, and `enqueue`."""
        made = self.make_request(prompt, max_tokens, sampling)
        self.enqueue(made)
        return made

    def enqueue(self, request: Generation) -> None:
        """Add a request of `make_request` at the end of the queue."""
        self.waiting.append(request)

    def make_request(self, prompt: Any, max_tokens: int = 128, sampling: Sampling = GREEDY) -> Generation:
        """A request, checked; nothing of the scheduler changes.

        Raises:
            ArgumentError: the prompt is empty, or with `max_tokens` longer than a request may be; another argument is
                no number of tokens or no sampling.
            OutOfBoundsError: a token is not in the vocabulary.
        """
        held = self.model.check_tokens(prompt, "the prompt")
        if not isinstance(max_tokens, (int, np.integer)) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ArgumentError(f"max_tokens is {max_tokens!r}", location=user_location(), expected="1 or more")
        if not isinstance(sampling, Sampling):
            raise ArgumentError("the sampling is no Sampling", location=user_location(), received=repr(sampling)[:80])
        most = min(self.longest, self.pages.count * self.pages.size)
        if len(held) + int(max_tokens) > most:
            raise ArgumentError(
                "the request is longer than the context", location=user_location(),
                expected=f"up to {most} tokens with those to generate",
                received=f"{len(held)} of the prompt, max_tokens {max_tokens}",
            )  # fmt: skip
        names = name_prefixes(held[:-1], self.pages.size) if self.share_prefixes else []
        return Generation(next(self._numbers), held, int(max_tokens), sampling, names=names)

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.waiting or self.running)

    def cancel(self, request: Generation) -> None:
        """End a request, and free its slot and pages; one that has ended stays as it is."""
        if request.reason:
            return
        if request in self.waiting:
            self.waiting.remove(request)
        self._leave(request)
        request.reason = "cancelled"

    def step(self) -> list[GivenToken]:
        """A chunk of the first prompt that is not read, and a token of each request whose prompt is: the new tokens.

        While more than a quarter of the prompts are unread, further chunks are read first, up to one for each slot: a
        decoding step costs as much with few rows in use as with all.
        """
        self._admit()
        found, before = self._prefill(), self.counts.prefill_steps
        for _ in range(self.slots - 1):
            unread = sum(r.past < len(r.prompt) for r in self.running.values())
            if 4 * unread <= len(self.running):
                break
            found += self._prefill()
            if self.counts.prefill_steps == before:  # no page is free
                break
            before = self.counts.prefill_steps
        return [*found, *self._decode()]

    def reset(self) -> None:
        """End all requests as cancelled, with an empty cache: after a step that failed."""
        for request in [*self.waiting, *self.running.values()]:
            self.cancel(request)
        self.pages = SharedPages(self.pages.count, self.pages.size)
        self._keys, self._values = make_cache(self.model, self.pages.count)

    def warm_up(self) -> None:
        """Compile the programs of a prompt and of greedy steps, before the first request."""
        self.submit([0], min(3, self.longest - 1) or 1)
        self.run()

    def run(self) -> None:
        """Step until nothing waits or runs."""
        while self.busy:
            self.step()

    def generate(self, prompts: Sequence[Any], max_tokens: int = 128, sampling: Sampling = GREEDY) -> list[Completion]:
        """The completions of prompts, which are lists of tokens: those of `LanguageModel.generate`."""
        made = [self.submit(p, max_tokens, sampling) for p in prompts]
        self.run()
        ends = self.model.config.end_tokens
        return [Completion([t for t in m.tokens if t not in ends], "", m.reason) for m in made]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            first = self.waiting[0]
            held = sum(self.pages.holds(n) for n in first.names)
            needed = -(-first.needed // self.pages.size) - held
            if self.running and needed > self.pages.available - held:
                return  # the requests that run need no page of its own: they end, or are preempted, first
            self.waiting.popleft()
            first.slot = next(s for s in range(self.slots) if s not in self.running)
            self.running[first.slot] = first

    def _prefill(self) -> list[GivenToken]:
        waiting = [r for r in self.running.values() if r.past < len(r.prompt)]
        request = min(waiting, key=lambda r: r.number, default=None)
        if request is None:
            return []
        self._share(request)
        start, size = request.past, self.pages.size
        if not self._make_room(request, min(start + size, len(request.prompt))):
            return []
        chunk = request.prompt[start : start + size]
        tokens = np.zeros((1, size), np.int32)
        tokens[0, : len(chunk)] = chunk
        out = self._compute(tokens, [request], np.array([start]), np.array([len(chunk)]), request.sampling.greedy)
        self.counts.prefill_steps += 1
        request.past += len(chunk)
        done = start // size
        if done < len(request.names):
            self.pages.publish(request.pages[done], request.names[done])
        if request.past < len(request.prompt) or request.tokens:
            return []
        chooser = TokenChooser(self.model, [request.sampling])
        return [self._give(request, int(self._choose(chooser, out, np.array([request.past]))[0]))]

    def _share(self, request: Generation) -> None:
        """Take the pages of the prompt's next prefixes that others computed."""
        while request.past == len(request.pages) * self.pages.size and len(request.pages) < len(request.names):
            page = self.pages.find(request.names[len(request.pages)])
            if page is None:
                return
            request.pages.append(page)
            request.past += self.pages.size
            request.shared += 1
            self.counts.shared_pages += 1

    def _decode(self) -> list[GivenToken]:
        for request in sorted(self.running.values(), key=lambda r: r.number):
            if request.slot >= 0 and request.tokens and request.past >= len(request.prompt):
                self._make_room(request, request.past + 1)
        ready = [r for r in self.running.values() if r.tokens and r.past >= len(r.prompt)]
        ready = [r for r in ready if len(r.pages) * self.pages.size > r.past]
        if not ready:
            return []
        found = self._choose_tokens(ready)
        given = []
        for r in ready:
            r.past += 1
            if r.past == len(r.prompt) + len(r.tokens):  # otherwise it is computed again, and the token is known
                given.append(self._give(r, found[r.number]))
        return given

    def _choose_tokens(self, ready: Sequence[Generation]) -> dict[int, int]:
        """The next token of each request, by its number: a step of all slots, or of one row where that is the same.

        A step of one row is cheaper, but its products may sum in another order. It is used once the logits of a few
        requests had the same bits both ways.
        """
        rows: list[Generation | None] = [None] * self.slots
        for r in ready:
            rows[r.slot] = r
        self.counts.decode_steps += 1
        if len(ready) > 1 or self.slots == 1 or self._equal_steps < 0:
            return self._run_rows(rows)[1]
        bits, tokens = self._run_rows(ready)
        if self._equal_steps < COMPARED_STEPS:
            want, tokens = self._run_rows(rows)  # the last one writes what the cache keeps
            self._equal_steps = self._equal_steps + 1 if bits == want else -1
        return tokens

    def _run_rows(self, rows: Sequence[Generation | None]) -> tuple[bytes, dict[int, int]]:
        """A decoding step: the bits of the first request's logits, and the tokens by the requests' numbers."""
        tokens, places = np.zeros((len(rows), 1), np.int32), np.zeros(len(rows), np.int32)
        for i, r in enumerate(rows):
            if r is not None:
                tokens[i], places[i] = r.tokens[r.past - len(r.prompt)], r.past
        chooser = TokenChooser(self.model, [r.sampling if r else GREEDY for r in rows])
        counts = np.array([r is not None for r in rows], np.int32)
        out = self._compute(tokens, rows, places, counts, chooser.greedy)
        found = self._choose(chooser, out, places + counts)
        first = int(np.argmax(counts))
        bits = out.numpy()[first].tobytes() if self._equal_steps >= 0 else b""
        return bits, {r.number: int(found[i]) for i, r in enumerate(rows) if r is not None}

    def _choose(self, chooser: TokenChooser, out: Any, places: np.ndarray) -> np.ndarray:
        if chooser.greedy and not self.model._resident:  # the logits are here: no other program need be compiled
            return np.argmax(out.numpy(), axis=-1)
        return chooser.choose(out, places)

    def _compute(
        self, tokens: np.ndarray, rows: Sequence[Generation | None], past: np.ndarray, counts: np.ndarray, greedy: bool
    ) -> Any:
        table = np.zeros((len(rows), self.width), np.int32)
        for i, r in enumerate(rows):
            if r is not None:
                table[i, : len(r.pages)] = r.pages
        run = self.model._greedy if greedy and self.model._resident else self.model._step
        out, self._keys, self._values = run(
            self.model.weights, tokens, table, past.astype(np.int32), counts.astype(np.int32), self._keys,
            self._values, every=False,
        )  # fmt: skip
        return out

    def _make_room(self, request: Generation, length: int) -> bool:
        """Give a request the pages for so many positions, if need be those of requests that came later."""
        while len(request.pages) * self.pages.size < length:
            if not self.pages.available:
                last = max(self.running.values(), key=lambda r: r.number)
                self._preempt(last)
                if last is request:
                    return False
                continue
            request.pages.append(self.pages.take())
        return True

    def _preempt(self, request: Generation) -> None:
        self._leave(request)
        request.past = 0
        self.waiting.appendleft(request)
        self.counts.preemptions += 1

    def _leave(self, request: Generation) -> None:
        self.running.pop(request.slot, None)
        request.slot = -1
        for page in reversed(request.pages):  # the end of a prefix is of no use without its start
            self.pages.release(page)
        request.pages = []

    def _give(self, request: Generation, token: int) -> GivenToken:
        request.tokens.append(token)
        self.counts.tokens += 1
        if token in self.model.config.end_tokens:
            request.reason = "stop"
        elif len(request.tokens) >= request.max_tokens:
            request.reason = "length"
        if request.reason:
            self._leave(request)
        return GivenToken(request, token, request.reason)
