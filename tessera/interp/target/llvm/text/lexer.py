"""Lexer of LLVM IR text, and a cursor over its tokens."""

from __future__ import annotations

import re

from tessera.core.errors import Location
from tessera.interp.target import tokens
from tessera.interp.target.tokens import TextToken

_NAME = r"[-a-zA-Z$._0-9]+"
_QUOTED = r'"[^"]*"'
_TOKEN_PATTERN = re.compile(
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
_SIGIL_LENGTH = {"local": 1, "global": 1, "comdat": 1, "label": 0}
_OPEN, _CLOSE = frozenset("([{<"), frozenset(")]}>")


def _unquote(kind: str, text: str) -> str:
    """The name without sigil, colon and quotes."""
    if kind not in _SIGIL_LENGTH:
        return text
    name = text[_SIGIL_LENGTH[kind] :] if kind != "label" else text[:-1]
    return name[1:-1] if name.startswith('"') else name


class LlvmLexer(tokens.TextLexer):
    """The tokens of a text; names have no sigil, colon or quotes."""

    pattern = _TOKEN_PATTERN

    def token(self, kind: str, text: str, offset: int) -> TextToken:
        """The token of a match."""
        return TextToken(kind, _unquote(kind, text), offset)


class LlvmCursor(tokens.TokenCursor):
    """A reading position in the tokens of a text."""

    spelled = ("word", "punct")

    def expect_kind(self, kind: str) -> str:
        """Consume a token of this kind; its text."""
        if self.here.kind != kind:
            self.fail(f"expected a {kind}")
        return self.take().text

    def integer(self) -> int:
        """Consume a decimal integer."""
        token = self.here
        if token.kind != "number" or not token.text.lstrip("-+").isdigit():
            self.fail("expected an integer")
        return int(self.take().text)

    def line(self, token: TextToken | None = None) -> int:
        """The line of a token (by default the next one)."""
        return self.place(token).line

    def place(self, token: TextToken | None = None) -> Location:
        """The location of a token (by default the next one)."""
        return self.lexer.place((token or self.here).offset)

    def skip_group(self) -> None:
        """Skip a bracketed group, with nested brackets."""
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
        """Skip the rest of this line."""
        line = self.line()
        while self.here.kind != "end" and self.line() == line:
            self.take()
