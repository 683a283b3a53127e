"""Served language models: a model with its tokenizer and engine, and the text of its tokens as they come.

Text is given in whole characters, and cut before a stop string.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.llm.generation import REPLACEMENT, LanguageModel
from tessera.llm.requests import find_stop
from tessera.llm.sampling import Sampling
from tessera.llm.scheduling import GenerationScheduler
from tessera.llm.tokenizer import Tokenizer
from tessera.serving.generation_engine import GenerationEngine
from tessera.serving.generation_replicas import ReplicatedGeneration
from tessera.serving.options import ServerOptions


class TextStream:
    """The text of one request: `push` gives what is new, without the start of what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), end_tokens: Sequence[int] = ()) -> None:
        self._tokenizer, self._stops, self._ends = tokenizer, tuple(stops), frozenset(end_tokens)
        self._tokens: list[int] = []
        self._shown, self._text = 0, ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The new text after a token; after a stop string there is none."""
        if token in self._ends or self.stopped:
            return ""
        self._tokens.append(token)
        self._text = self._tokenizer.decode(self._tokens)
        end = find_stop(self._text, self._stops)
        if end >= 0:
            self.stopped, self._text = True, self._text[:end]
            return self._take(end)
        if self._text.endswith(REPLACEMENT):  # a character that is not complete
            return ""
        return self._take(len(self._text) - _count_held(self._text, self._stops))

    def finish(self) -> str:
        """The text that was held back, when no token follows."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        found = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return found


def _count_held(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of a text that begins a stop string."""
    longest = min(max(map(len, stops), default=1) - 1, len(text))
    for n in range(longest, 0, -1):
        if text.endswith(tuple(s[:n] for s in stops if len(s) > n)):
            return n
    return 0


class ServedLanguageModel:
    """A language model behind a server: its name, its tokenizer and its engine.

    With `options.processes` the engine is one of `options.replicas` processes that load the model from `path`.

    Raises:
        ArgumentError: it has no tokenizer, or replicas in processes no path.
    """

    def __init__(
        self, name: str, model: LanguageModel, options: ServerOptions | None = None, path: str | Path | None = None
    ) -> None:
        held = options or ServerOptions()
        if model.tokenizer is None:
            raise ArgumentError("a language model without a tokenizer cannot be served", location=user_location(),
                                suggestion="ts.llm.load(path, tokenizer=...)")  # fmt: skip
        self.name, self.model, self.options, self.tokenizer = name, model, held, model.tokenizer
        scheduler = GenerationScheduler(model, held.slots, held.longest, held.pages, held.share_prefixes)
        self.engine: Any = self._make_engine(scheduler, path)

    def _make_engine(self, scheduler: GenerationScheduler, path: str | Path | None) -> Any:
        if not self.options.processes:
            return GenerationEngine(scheduler, self.options.max_queue)
        if path is None:
            raise ArgumentError("replicas in processes load their model from a path", location=user_location())
        return ReplicatedGeneration(path, scheduler, self.options, self.name)

    async def generate(
        self, prompt: np.ndarray | list[int], max_tokens: int, sampling: Sampling, stops: Sequence[str]
    ) -> AsyncIterator[tuple[str, int, str]]:
        """Pieces of text, each with its number of tokens and at the end a reason: "stop" or "length"."""
        text = TextStream(self.tokenizer, stops, self.model.config.end_tokens)
        stream = self.engine.stream(prompt, max_tokens, sampling)
        try:
            async for token, reason in stream:
                piece = text.push(token)
                if reason and not text.stopped:
                    piece += text.finish()
                yield piece, 1, "stop" if text.stopped else reason
                if text.stopped:
                    return
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the engine."""
        self.engine.close()
