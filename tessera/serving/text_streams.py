"""Text streams: the text of tokens as they come, in whole characters, cut before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.llm.generation import REPLACEMENT
from tessera.llm.requests import find_stop
from tessera.llm.tokenizer import Tokenizer


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
