"""Lexer of CSL text: tokens, and a cursor over them."""

from __future__ import annotations

import re
from typing import NoReturn

from tessera.core.errors import Location, ParseError
from tessera.interp.target import tokens
from tessera.interp.target.tokens import TextToken

_TOKEN = re.compile(
    r"""(?!/\*)(?:(?P<space>[ \t\r\n]+|//[^\n]*)
  | (?P<float>\d[\d_]*\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)
  | (?P<character>'(?:[^'\\\n]|\\.)')
  | (?P<integer>0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+|\d[\d_]*)
  | (?P<builtin>@[A-Za-z_]\w*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<sign>\.\.\.|<<=|>>=|=>|->|==|!=|<=|>=|<<|>>|\+=|-=|\*=|/=|%=|&=|\|=|\^=|[-+*/%&|^~!<>=.,:;?(){}\[\]]))""",
    re.VERBOSE,
)
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\"": '"', r"\\": "\\", r"\r": "\r", r"\'": "'", r"\0": "\0"}
KEYWORDS = frozenset(
    "const var param fn task comptime layout export extern inline if else while for switch return break continue "
    "and or true false undefined struct packed union enum align linksection".split()
)


class CslLexer(tokens.TextLexer):
    """The tokens of one file."""

    pattern, end = _TOKEN, "end of file"

    def token(self, kind: str, text: str, offset: int) -> TextToken:
        """The next token; keywords have their own kind."""
        return TextToken("keyword" if text in KEYWORDS else kind, text, offset)

    def unexpected(self, text: str, offset: int) -> NoReturn:
        """Raise a ParseError at text that is not a token."""
        if text[offset] == '"':
            raise ParseError("string is not terminated on its line", location=self.place(offset))
        super().unexpected(text, offset)


def unquote(text: str) -> str:
    """The characters of a string token."""
    return re.sub(r"\\.", lambda m: _ESCAPES.get(m.group(), m.group()), text[1:-1])


class CslCursor(tokens.TokenCursor):
    """A position in the tokens of one file."""

    spelled = ("keyword", "sign")

    @property
    def place(self) -> Location:
        """The location of the next token."""
        return self.lexer.place(self.here.offset)

    def name(self) -> str:
        """Consume a name that is not a keyword."""
        if self.here.kind != "word":
            self.fail("expected a name")
        return self.take().text
