"""Lexer of CSL text: tokens, and a cursor over them."""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate, chain
from string import ascii_letters
from typing import NoReturn

from tessera.core.errors import Location, ParseError
from tessera.interp.target import tokens
from tessera.interp.target.tokens import TextToken

# The space before a token, and the token: a name, a builtin, a number, a sign, a string or a character.
_TOKEN = re.compile(
    r"""([ \t\r\n]*(?://[^\n]*(?:\n|\Z)[ \t\r\n]*)*)
(?!/[*/])(@?[A-Za-z_]\w*
  |\d[\d_]*\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|0x[0-9a-fA-F_]+|0b[01_]+|0o[0-7_]+|\d[\d_]*
  |\.\.\.|<<=|>>=|=>|->|==|!=|<=|>=|<<|>>|\+=|-=|\*=|/=|%=|&=|\|=|\^=|[-+*/%&|^~!<>=.,:;?(){}\[\]]
  |"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)'|\Z)""",
    re.VERBOSE,
)
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\"": '"', r"\\": "\\", r"\r": "\r", r"\'": "'", r"\0": "\0"}
KEYWORDS = frozenset(
    "const var param fn task comptime layout export extern inline if else while for switch return break continue "
    "and or true false undefined struct packed union enum align linksection".split()
)


# The kind of a token by its text, or by its first character; another one is a number.
_SIGNS = "... <<= >>= => -> == != <= >= << >> += -= *= /= %= &= |= ^= " + " ".join("-+*/%&|^~!<>=.,:;?(){}[]")
_KINDS = {
    **dict.fromkeys(ascii_letters + "_", "word"),
    **dict.fromkeys(KEYWORDS, "keyword"),
    **dict.fromkeys(_SIGNS.split(), "sign"),
    **{"@": "builtin", '"': "string", "'": "character", "": "end"},
}


class CslLexer(tokens.TextLexer):
    """The tokens of one file: their texts and offsets. The text of the end is empty."""

    end = "end of file"

    def __init__(self, text: str, file: str) -> None:
        self.texts: list[str] = []
        self.offsets: list[int] = []
        super().__init__(text, file)

    def _scan(self, text: str) -> list[TextToken]:
        found = _TOKEN.findall(text)
        self.texts = [token for _, token in found]
        lengths = chain.from_iterable((len(space), len(token)) for space, token in found)
        ends = [0, *accumulate(lengths)]  # of spaces and tokens in turn
        self.offsets = ends[1::2]
        if ends[-1] != len(text):
            self._find_error(text)
        if max(map(len, self.texts)) > tokens.MAX_DIGITS:
            self._check_digits()
        self.texts += [""] * _LOOKAHEAD
        return []

    def _find_error(self, text: str) -> NoReturn:
        """Raise a ParseError at the first character that no token includes."""
        last = 0
        while (match := _TOKEN.match(text, last)) is not None:
            last = match.end()
        while (space := _SPACE.match(text, last)) is not None:
            last = space.end()
        self.unexpected(text, last)

    def _check_digits(self) -> None:
        for token, offset in zip(self.texts, self.offsets, strict=True):
            if token[:1] != '"':
                tokens.check_digits(token, self.place(offset))

    def unexpected(self, text: str, offset: int) -> NoReturn:
        """Raise a ParseError at text that is not a token."""
        if text[offset] == '"':
            raise ParseError("string is not terminated on its line", location=self.place(offset))
        super().unexpected(text, offset)


_SPACE = re.compile(r"[ \t\r\n]+|//[^\n]*")
_LOOKAHEAD = 2  # the tokens after the next one that the parser inspects


def unquote(text: str) -> str:
    """The characters of a string token."""
    return re.sub(r"\\.", lambda m: _ESCAPES.get(m.group(), m.group()), text[1:-1])


class CslCursor:
    """A position in the tokens of one file."""

    def __init__(self, lexer: CslLexer) -> None:
        self.lexer, self.index, self.texts = lexer, 0, lexer.texts
        self._file, self._offsets, self._starts = lexer.file, lexer.offsets, lexer.starts
        self._places: dict[int, Location] = {}  # by token

    @property
    def place(self) -> Location:
        """The location of the next token."""
        found = self._places.get(self.index)
        if found is None:
            offset, starts = self._offsets[self.index], self._starts
            line = bisect_right(starts, offset)
            found = self._places[self.index] = Location(self._file, line, offset - starts[line - 1] + 1)
        return found

    def kind(self, distance: int = 0) -> str:
        """The kind of the next token, or of one after it."""
        text = self.texts[self.index + distance]
        return _KINDS.get(text) or _KINDS.get(text[0], "number")

    def take(self) -> str:
        """Consume the next token."""
        text = self.texts[self.index]
        if text:
            self.index += 1
        return text

    def at(self, *texts: str) -> bool:
        """Whether the next token is one of these keywords and signs."""
        return self.texts[self.index] in texts

    def accept(self, text: str) -> bool:
        """Consume the next token if it is this keyword or sign."""
        if self.texts[self.index] == text:
            self.index += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Consume this keyword or sign, or fail."""
        if self.texts[self.index] != text:
            self.fail(f"expected '{text}'")
        self.index += 1

    def fail(self, message: str) -> NoReturn:
        """Raise a ParseError at the next token."""
        raise ParseError(f"{message}, found '{self.texts[self.index] or self.lexer.end}'", location=self.place)

    def name(self) -> str:
        """Consume a name that is not a keyword."""
        if self.kind() != "word":
            self.fail("expected a name")
        return self.take()
