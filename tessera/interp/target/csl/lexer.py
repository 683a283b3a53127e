"""CSL text as tokens, and a cursor over them."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple, NoReturn

from tessera.errors import Location, ParseError

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|//[^\n]*)
  | (?P<float>\d[\d_]*\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+)
  | (?P<character>'(?:[^'\\\n]|\\.)')
  | (?P<integer>0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+|\d[\d_]*)
  | (?P<builtin>@[A-Za-z_]\w*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<sign>\.\.\.|<<=|>>=|=>|->|==|!=|<=|>=|<<|>>|\+=|-=|\*=|/=|%=|&=|\|=|\^=|[-+*/%&|^~!<>=.,:;?(){}\[\]])""",
    re.VERBOSE,
)
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\"": '"', r"\\": "\\", r"\r": "\r", r"\'": "'", r"\0": "\0"}
KEYWORDS = frozenset(
    "const var param fn task comptime layout export extern inline if else while for switch return break continue "
    "and or true false undefined struct packed union enum align linksection".split()
)


class Token(NamedTuple):
    """One word of the text and the offset where it begins."""

    kind: str
    text: str
    offset: int


class Lexer:
    """The tokens of one file, with places in it."""

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
            if match is None or text.startswith("/*", position):
                self._unexpected(text, position)
            if match.lastgroup != "space":
                tokens.append(Token(_kind(match), match.group(), position))
            position = match.end()
        return [*tokens, Token("end", "end of file", len(text))]

    def _unexpected(self, text: str, position: int) -> NoReturn:
        if text[position] == '"':
            raise ParseError("a string does not end on its line", location=self.place(position))
        raise ParseError(f"unexpected character {text[position]!r}", location=self.place(position))


def _kind(match: re.Match[str]) -> str:
    return "keyword" if match.group() in KEYWORDS else match.lastgroup or ""


def unquote(text: str) -> str:
    """The characters that a string token stands for."""
    return re.sub(r"\\.", lambda m: _ESCAPES.get(m.group(), m.group()), text[1:-1])


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

    @property
    def place(self) -> Location:
        """Where the next token stands."""
        return self.lexer.place(self.here.offset)

    def after(self, distance: int = 1) -> Token:
        """A token further on."""
        return self.tokens[min(self.index + distance, len(self.tokens) - 1)]

    def take(self) -> Token:
        """The next token, consumed."""
        token = self.here
        self.index += token.kind != "end"
        return token

    def at(self, *texts: str) -> bool:
        """Whether the next token is one of these keywords or signs."""
        return self.here.text in texts and self.here.kind in ("keyword", "sign")

    def accept(self, *texts: str) -> bool:
        """Consume the next token if it is one of these."""
        found = self.at(*texts)
        self.index += found
        return found

    def expect(self, text: str) -> Token:
        """Consume exactly this keyword or sign."""
        if not self.at(text):
            self.fail(f"expected '{text}'")
        return self.take()

    def name(self) -> str:
        """A name that is not a keyword, consumed."""
        if self.here.kind != "word":
            self.fail("expected a name")
        return self.take().text

    def fail(self, message: str) -> NoReturn:
        """Raise a ParseError here."""
        raise ParseError(f"{message}, found '{self.here.text}'", location=self.place)
