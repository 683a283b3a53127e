"""Tokens: what the lexers of target texts share, source locations and a cursor."""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, NamedTuple, NoReturn

from tessera.core.errors import Location, ParseError

MAX_DIGITS = 4000  # of a number: Python converts no more than 4,300
_LONG_NUMBER = re.compile(rf"[0-9a-fA-F]{{{MAX_DIGITS + 1}}}")
SPACES = " \t\r\n"
RECURSION_LIMIT = 8000  # of Python: each level of nesting takes several calls


def check_digits(text: str, place: Location) -> None:
    """Refuse a number, or a name that holds one, that has too many digits."""
    if len(text) > MAX_DIGITS and _LONG_NUMBER.search(text):
        raise ParseError(f"a number of {len(text):,} characters", location=place, expected=f"at most {MAX_DIGITS:,}")


@contextmanager
def deep_nesting(place: Callable[[], Location]) -> Iterator[None]:
    """Parse with room for deep nesting; still deeper nesting is a ParseError at the place that the parser reached."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, RECURSION_LIMIT))
    try:
        yield
    except RecursionError:
        raise ParseError("the text nests too deep", location=place()) from None
    finally:
        sys.setrecursionlimit(before)


class TextToken(NamedTuple):
    """A token and the offset of its first character."""

    kind: str
    text: str
    offset: int


# A token of a tuple: as a call of the class, in half the time.
make_token: Callable[[tuple[str, str, int]], TextToken] = partial(tuple.__new__, TextToken)  # type: ignore[arg-type]


class TextLexer:
    """The tokens of a text; the groups of `pattern` are the token kinds, and "space" is skipped.

    Spaces may also come before the group of a token: a match for each space takes as long as one for a token.
    """

    pattern: ClassVar[re.Pattern[str]]
    end: ClassVar[str] = "end of text"
    long_kinds: ClassVar[tuple[str, ...]] = ("space", "string", "bytes")  # tokens that may hold many digits
    names: ClassVar[Mapping[str, Callable[[str], str]]] = {}  # what of a token's text is its name, by kind

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self.starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.tokens = self._scan(text)

    def line_of(self, offset: int) -> tuple[int, int]:
        """The first offset of the line of an offset, and that of the line after it, which the last line lacks."""
        line = bisect_right(self.starts, offset)
        return self.starts[line - 1], self.starts[line] if line < len(self.starts) else -1

    def place(self, offset: int) -> Location:
        """The line and column of an offset."""
        line = bisect_right(self.starts, offset)
        return Location(self.file, line, offset - self.starts[line - 1] + 1)

    def unexpected(self, text: str, offset: int) -> NoReturn:
        """Raise a ParseError at an offset where no token matches."""
        raise ParseError(f"unexpected character {text[offset]!r}", location=self.place(offset))

    def _scan(self, text: str) -> list[TextToken]:
        return [*self.scan_part(text, 0, len(text)), TextToken("end", self.end, len(text))]

    def scan_part(self, text: str, first: int, last: int) -> list[TextToken]:
        """The tokens between two offsets."""
        tokens: list[TextToken] = []
        position, names, append = first, self.names, tokens.append
        for match in self.pattern.finditer(text, first, last):
            start, end = match.span()
            if start != position:
                break
            position, kind = end, match.lastgroup or ""
            if kind == "space":
                continue
            found = match[match.lastindex or 0]
            if len(found) > MAX_DIGITS and kind not in self.long_kinds:
                check_digits(found, self.place(end - len(found)))
            append(make_token((kind, names[kind](found) if kind in names else found, end - len(found))))
        if position != last:
            self.unexpected(text, last - len(text[position:last].lstrip(SPACES)))
        return tokens


class TokenCursor:
    """A reading position in tokens; the last one has the kind "end".

    `spelled`: the kinds of tokens that a grammar matches by their text; names and strings are not among them.
    """

    spelled: ClassVar[tuple[str, ...]] = ()

    def __init__(self, lexer: TextLexer) -> None:
        self.lexer = lexer
        self.tokens = lexer.tokens
        self.index = 0

    @property
    def here(self) -> TextToken:
        """The next token."""
        return self.tokens[self.index]

    def after(self, distance: int = 1) -> TextToken:
        """A token further on."""
        return self.tokens[min(self.index + distance, len(self.tokens) - 1)]

    def take(self) -> TextToken:
        """Consume the next token."""
        token = self.tokens[self.index]
        if token.kind != "end":
            self.index += 1
        return token

    def at(self, *texts: str) -> bool:
        """Whether the next token has one of these texts."""
        token = self.tokens[self.index]
        return token.text in texts and token.kind in self.spelled

    def accept(self, *texts: str) -> bool:
        """Consume the next token if it has one of these texts."""
        token = self.tokens[self.index]
        if token.text in texts and token.kind in self.spelled:
            self.index += 1
            return True
        return False

    def expect(self, text: str) -> TextToken:
        """Consume a token with this text, or fail."""
        if not self.at(text):
            self.fail(f"expected '{text}'")
        return self.take()

    def fail(self, message: str) -> NoReturn:
        """Raise a ParseError at the next token."""
        token = self.here
        raise ParseError(f"{message}, found '{token.text}'", location=self.lexer.place(token.offset))
