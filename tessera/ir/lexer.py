"""The lexer of IR text, and the cursor that its grammar reads tokens from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from tessera.errors import Location, ParseError

# A shape is one token with the word before it: `0x4xf32` would otherwise begin with a hex number.
_TOKEN = re.compile(
    r"""
      (?P<space>(?:\s+|//[^\n]*)+)
    | (?P<shaped>(?:tensor|!tile\.ref)<(?:(?:\d+|\?)x)*)
    | (?P<string>"(?:[^"\\\n]|\\(?:[0-9A-Fa-f]{2}|[nt"\\]))*")
    | (?P<value>%[\w$.-]+(?:\#\d+)?)
    | (?P<label>\^[\w$.-]+)
    | (?P<dialect>[!#][A-Za-z_][\w$.]*)
    | (?P<number>0x[0-9A-Fa-f]+|-?\d+(?:\.\d*(?:[eE][+-]?\d+)?)?)
    | (?P<word>[A-Za-z_][\w$.]*)
    | (?P<mark>->|[(){}\[\]<>:,=])
    """,
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(rb'\\([0-9A-Fa-f]{2}|[nt"\\])')
_ESCAPED = {b"n": b"\n", b"t": b"\t", b'"': b'"', b"\\": b"\\"}
_END = "end"

Item = TypeVar("Item")


class Token(NamedTuple):
    """A piece of text: its kind (a group of the pattern above), the text, and where it begins."""

    kind: str
    text: str
    start: int


def unquote(text: str) -> str:
    """What a string token stands for."""
    if "\\" not in text:
        return text[1:-1]
    raw = text[1:-1].encode("utf-8", "surrogatepass")
    return _ESCAPE.sub(_unescape, raw).decode("utf-8", "surrogatepass")


def _unescape(match: re.Match[bytes]) -> bytes:
    return _ESCAPED.get(match[1]) or bytes.fromhex(match[1].decode())


class Cursor:
    """The tokens of a text and the place in them."""

    def __init__(self, text: str, name: str) -> None:
        self._text, self._name = text, name
        self._tokens = list(self._scan())
        self._next = 0

    def _scan(self) -> Iterator[Token]:
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                received = self._text[at : at + 20].partition("\n")[0]
                raise ParseError("this is no part of the language", location=self._place(at), received=received)
            if match.lastgroup != "space":
                yield Token(match.lastgroup or "", match[0], at)
            at = match.end()
        yield Token(_END, "the end of the text", at)

    def _place(self, at: int) -> Location:
        line = self._text.count("\n", 0, at) + 1
        return Location(self._name, line, at - self._text.rfind("\n", 0, at))

    @property
    def token(self) -> Token:
        """The token that comes next."""
        return self._tokens[self._next]

    def advance(self) -> Token:
        """The next token, taken."""
        token = self.token
        self._next += token.kind != _END
        return token

    def at(self, text: str) -> bool:
        """Whether the next token is this text."""
        return self.token.text == text

    def accept(self, text: str) -> bool:
        """Take the next token if it is this text."""
        found = self.token.text == text
        self._next += found
        return found

    def expect(self, *texts: str) -> None:
        """Take tokens that must be these."""
        for text in texts:
            if not self.accept(text):
                raise self.error("unexpected text", expected=text)

    def take(self, kind: str, what: str) -> Token:
        """Take a token that must be of this kind."""
        if self.token.kind != kind:
            raise self.error("unexpected text", expected=what)
        return self.advance()

    def many(self, open: str, close: str, item: Callable[[], Item]) -> list[Item]:
        """Items in brackets, with commas between."""
        self.expect(open)
        items: list[Item] = []
        if not self.at(close):
            items.append(item())
            while self.accept(","):
                items.append(item())
        self.expect(close)
        return items

    def error(
        self, message: str, token: Token | None = None, *, expected: object = None, received: object = None,
        suggestion: str | None = None,
    ) -> ParseError:  # fmt: skip
        """An error at a token (the next one unless given), to be raised."""
        token = token or self.token
        shown = token.text if received is None else received
        place = self._place(token.start)
        return ParseError(message, location=place, expected=expected, received=shown, suggestion=suggestion)
