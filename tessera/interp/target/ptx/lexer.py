"""PTX text as tokens, and a cursor over them."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple, NoReturn

from tessera.errors import Location, ParseError

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)
  | (?P<number>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<string>"[^"]*")
  | (?P<directive>\.[a-zA-Z_]\w*)
  | (?P<word>[%$_a-zA-Z][\w$]*(?:(?:\.|::)\w+)*)
  | (?P<punct>[-+~!@|,;:=(){}<>\[\]])""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """One word of the text and the offset where it begins."""

    kind: str
    text: str
    offset: int


class Cursor:
    """A reading position in the tokens of one text."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.tokens = self._scan(text)
        self.index = 0

    def _scan(self, text: str) -> list[Token]:
        tokens, position = [], 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ParseError(f"unknown character {text[position]!r}", location=self._locate(position))
            if match.lastgroup != "space":
                tokens.append(Token(match.lastgroup or "", match.group(), position))
            position = match.end()
        tokens.append(Token("end", "end of text", len(text)))
        return tokens

    def _locate(self, offset: int) -> Location:
        line = bisect_right(self._starts, offset)
        return Location(self.file, line, offset - self._starts[line - 1] + 1)

    @property
    def here(self) -> Token:
        """The token to be read next."""
        return self.tokens[self.index]

    def after(self) -> Token:
        """The token behind the next one."""
        return self.tokens[min(self.index + 1, len(self.tokens) - 1)]

    def take(self) -> Token:
        """The next token, consumed."""
        token = self.tokens[self.index]
        self.index += token.kind != "end"
        return token

    def at(self, *texts: str) -> bool:
        """Whether the next token is one of these."""
        return self.here.text in texts and self.here.kind not in ("string", "end")

    def accept(self, *texts: str) -> bool:
        """Consume the next token if it is one of these."""
        found = self.at(*texts)
        self.index += found
        return found

    def expect(self, text: str) -> None:
        """Consume exactly this token."""
        if not self.accept(text):
            self.fail(f"expected '{text}'")

    def kind(self, kind: str) -> str:
        """The text of the next token, which must be of this kind."""
        if self.here.kind != kind:
            self.fail(f"expected a {kind}")
        return self.take().text

    def integer(self) -> int:
        """An integer in any of its spellings, with an optional sign."""
        sign = -1 if self.accept("-") else 1
        text = self.kind("number").rstrip("U")
        octal = len(text) > 1 and text[0] == "0" and text.isdigit()
        return sign * int(text, 8 if octal else 0)

    def place(self) -> Location:
        """Where the next token stands."""
        return self._locate(self.here.offset)

    def skip_group(self) -> None:
        """Pass over one group in braces."""
        depth = 0
        while True:
            token = self.take()
            if token.kind == "end":
                self.fail("unclosed brace")
            depth += (token.text == "{") - (token.text == "}")
            if depth == 0:
                return

    def fail(self, message: str) -> NoReturn:
        """Raise a ParseError here."""
        raise ParseError(f"{message}, found '{self.here.text}'", location=self.place())
