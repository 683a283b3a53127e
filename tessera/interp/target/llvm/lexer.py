"""LLVM IR text as tokens, and a cursor over them."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple, NoReturn

from tessera.errors import Location, ParseError

_NAME = r"[-a-zA-Z$._0-9]+"
_QUOTED = r'"[^"]*"'
_TOKEN = re.compile(
    rf"""(?P<space>[ \t\r\n]+|;[^\n]*)
  | (?P<label>(?:{_NAME}|{_QUOTED}):)
  | (?P<local>%(?:{_NAME}|{_QUOTED}))
  | (?P<global>@(?:{_NAME}|{_QUOTED}))
  | (?P<comdat>\$(?:{_NAME}|{_QUOTED}))
  | (?P<bytes>c{_QUOTED})
  | (?P<string>{_QUOTED})
  | (?P<meta>!{_QUOTED}|![-a-zA-Z$._0-9\\]*)
  | (?P<record>\#dbg_\w+)
  | (?P<group>[\#^]\d+)
  | (?P<hex>0x[KLMHR]?[0-9a-fA-F]+)
  | (?P<number>[-+]?\d+(?:\.\d*(?:[eE][-+]?\d+)?)?)
  | (?P<word>[a-zA-Z_][-\w.$]*)
  | (?P<punct>\.\.\.|[=,()\[\]{{}}<>*|:])""",
    re.VERBOSE,
)
_SIGIL = {"local": 1, "global": 1, "comdat": 1, "label": 0}
_OPEN, _CLOSE = frozenset("([{<"), frozenset(")]}>")


class Token(NamedTuple):
    """One word of the text and the offset where it begins."""

    kind: str
    text: str
    offset: int


_END = "end of text"


def _unquote(kind: str, text: str) -> str:
    """The plain name: without sigil, colon and quotes."""
    if kind not in _SIGIL:
        return text
    name = text[_SIGIL[kind] :] if kind != "label" else text[:-1]
    return name[1:-1] if name.startswith('"') else name


class Lexer:
    """The tokens of one text, with places in it."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.tokens = self._scan(text)

    def place(self, offset: int) -> Location:
        """Line and column of an offset."""
        line = bisect_right(self._starts, offset)
        return Location(self.file, line, offset - self._starts[line - 1] + 1)

    def _scan(self, text: str) -> list[Token]:
        tokens, position = [], 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise ParseError(f"unknown character {text[position]!r}", location=self.place(position))
            kind = match.lastgroup or ""
            if kind != "space":
                tokens.append(Token(kind, _unquote(kind, match.group()), position))
            position = match.end()
        tokens.append(Token("end", _END, len(text)))
        return tokens


class Cursor:
    """A reading position in the tokens."""

    def __init__(self, lexer: Lexer) -> None:
        self.lexer = lexer
        self.tokens = lexer.tokens
        self.index = 0

    @property
    def here(self) -> Token:
        """The token to be read next."""
        return self.tokens[self.index]

    def after(self, distance: int = 1) -> Token:
        """A token further on."""
        return self.tokens[min(self.index + distance, len(self.tokens) - 1)]

    def take(self) -> Token:
        """The next token, consumed."""
        token = self.tokens[self.index]
        if token.kind != "end":
            self.index += 1
        return token

    def at(self, *texts: str) -> bool:
        """Whether the next token is one of these words or signs (names and strings never are)."""
        token = self.here
        return token.text in texts and token.kind in ("word", "punct")

    def accept(self, *texts: str) -> bool:
        """Consume the next token if it is one of these."""
        found = self.at(*texts)
        self.index += found
        return found

    def expect(self, text: str) -> Token:
        """Consume exactly this word or sign."""
        if not self.at(text):
            self.fail(f"expected '{text}'")
        return self.take()

    def expect_kind(self, kind: str) -> str:
        """The text of the next token, which must be of this kind."""
        if self.here.kind != kind:
            self.fail(f"expected a {kind}")
        return self.take().text

    def integer(self) -> int:
        """A plain decimal integer."""
        token = self.here
        if token.kind != "number" or not token.text.lstrip("-+").isdigit():
            self.fail("expected an integer")
        return int(self.take().text)

    def line(self, token: Token | None = None) -> int:
        """The text line of a token (the next one by default)."""
        return self.place(token).line

    def place(self, token: Token | None = None) -> Location:
        """Where a token (the next one by default) stands."""
        return self.lexer.place((token or self.here).offset)

    def skip_group(self) -> None:
        """Pass over one bracketed group, brackets within it included."""
        depth = 0
        while True:
            token = self.take()
            if token.kind == "end":
                self.fail("unclosed bracket")
            if token.kind == "punct":
                depth += (token.text in _OPEN) - (token.text in _CLOSE)
            if depth == 0:
                return

    def skip_line(self) -> None:
        """Pass over the rest of this text line."""
        line = self.line()
        while self.here.kind != "end" and self.line() == line:
            self.take()

    def fail(self, message: str) -> NoReturn:
        """Raise a ParseError here."""
        raise ParseError(f"{message}, found '{self.here.text}'", location=self.place())
