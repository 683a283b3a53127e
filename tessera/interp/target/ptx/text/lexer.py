"""PTX lexer: tokens, and a cursor over them."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NoReturn

from tessera.core.errors import Location, ParseError
from tessera.interp.target.tokens import MAX_DIGITS, check_digits

# PTX lexer: tokens, and a cursor over them.


# Spaces may also come before the group of a token: a match for each space takes as long as one for a token.
_TOKEN = re.compile(
    r"""\s*(?:(?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<word>[%$_a-zA-Z][\w$]*(?:(?:\.|::)\w+)*)
  | (?P<punct><<|>>|<=|>=|==|!=|&&|\|\||[-+~!@|,;:=(){}<>\[\]*/%&^?])
  | (?P<float>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)
  | (?P<number>0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|\d+U?)
  | (?P<string>"(?:[^"\\]|\\.)*")
  | (?P<directive>\.[a-zA-Z_]\w*))""",
    re.VERBOSE | re.DOTALL,
)


_OPAQUE = ("string", "end")  # kinds of tokens that the grammar never matches by their text


class PtxTokenCursor:
    """A reading position in the tokens of a text."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]
        # The kind, text and offset of each token: three lists take a third of the memory of one list of records.
        self.kinds: list[str] = []
        self.texts: list[str] = []
        self._offsets: list[int] = []
        self._scan(text)
        self.index = 0

    def _scan(self, text: str) -> None:
        kinds, texts, offsets, position = self.kinds, self.texts, self._offsets, 0
        for match in _TOKEN.finditer(text):
            start, stop = match.span()
            if start != position:
                break
            position, kind = stop, match.lastgroup or ""
            if kind == "space":
                continue
            found = match[kind]
            if len(found) > MAX_DIGITS and kind != "string":
                check_digits(found, self._locate(stop - len(found)))
            kinds.append(kind)
            texts.append(found)
            offsets.append(stop - len(found))
        if position != len(text):
            raise ParseError(f"unknown character {text[position]!r}", location=self._locate(position))
        for _ in range(2):  # so that every token has a successor
            kinds.append("end")
            texts.append("end of text")
            offsets.append(len(text))

    def _locate(self, offset: int) -> Location:
        line = bisect_right(self._starts, offset)
        return Location(self.file, line, offset - self._starts[line - 1] + 1)

    @property
    def here_kind(self) -> str:
        """The kind of the next token."""
        return self.kinds[self.index]

    @property
    def after_kind(self) -> str:
        """The kind of the token after the next one."""
        return self.kinds[self.index + 1]

    @property
    def after_text(self) -> str:
        """The text of the token after the next one."""
        return self.texts[self.index + 1]

    def take(self) -> str:
        """Consume the next token; its text."""
        text = self.texts[self.index]
        self.index += self.kinds[self.index] != "end"
        return text

    def at(self, *texts: str) -> bool:
        """Whether the next token has one of these texts."""
        index = self.index
        return self.texts[index] in texts and self.kinds[index] not in _OPAQUE

    def accept(self, *texts: str) -> bool:
        """Consume the next token if it has one of these texts."""
        index = self.index
        result = self.texts[index] in texts and self.kinds[index] not in _OPAQUE
        self.index += result
        return result

    def expect(self, text: str) -> None:
        """Consume a token with this text, or fail."""
        if not self.accept(text):
            self.fail(f"expected '{text}'")

    def kind(self, kind: str) -> str:
        """Consume a token of this kind; its text."""
        if self.kinds[self.index] != kind:
            self.fail(f"expected a {kind}")
        return self.take()

    def integer(self) -> int:
        """Consume an integer literal, with an optional sign."""
        sign = -1 if self.accept("-") else 1
        text = self.kind("number").rstrip("U")
        octal = len(text) > 1 and text[0] == "0" and text.isdigit()
        if octal and not set(text) <= set("01234567"):
            self.index -= 1
            self.fail("expected the digits 0 to 7 of an octal number")
        return sign * int(text, 8 if octal else 0)

    def place(self) -> Location:
        """The location of the next token."""
        return self._locate(self._offsets[self.index])

    def skip_group(self) -> None:
        """Skip a group in braces."""
        depth = 0
        while True:
            if self.here_kind == "end":
                self.fail("unclosed brace")
            text = self.take()
            depth += (text == "{") - (text == "}")
            if depth == 0:
                return

    def fail(self, message: str) -> NoReturn:
        """Raise a ParseError at the next token."""
        raise ParseError(f"{message}, found '{self.texts[self.index]}'", location=self.place())
