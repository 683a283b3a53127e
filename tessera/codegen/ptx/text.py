"""PTX text as it grows: instructions, registers, labels, and the source line of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tessera.codegen.ptx.types import PREFIX, class_of
from tessera.errors import UNKNOWN, Location
from tessera.types import DType

Lines = list[Any]  # strings, and lists of lines that are filled in later


class Files:
    """The source files that `.loc` names by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, path: str) -> int:
        """The number of a file."""
        return self._numbers.setdefault(path, len(self._numbers) + 1)

    def text(self) -> Iterator[str]:
        """The directives that name the files."""
        for path, number in self._numbers.items():
            escaped = path.replace("\\", "\\\\").replace('"', '\\"')
            yield f'.file {number} "{escaped}"'


class Text:
    """The body of one entry under construction."""

    def __init__(self, files: Files | None) -> None:
        self.root: Lines = []
        self.head: Lines = []  # what every path passes first: what depends on the thread's number alone
        self._lines = self.root
        self._files = files
        self._counts: Counter[str] = Counter()
        self._labels = 0
        # Of what f32 each rounded one was made: a store rounds and packs two at once.
        self.origins: dict[str, tuple[DType, str]] = {}
        self.halves: dict[str, tuple[str, int]] = {}  # of which word, and which part of it, an f32 was decoded
        self._place: Location = UNKNOWN
        self._said: dict[int, Location] = {}

    def place(self, loc: Location) -> None:
        """Tie the lines that follow to a place in the source."""
        self._place = loc

    def line(self, text: str, guard: str = "") -> None:
        """Append an instruction, run by the threads whose guard holds."""
        self._locate()
        self._lines.append(f"\t{'@' + guard + ' ' if guard else ''}{text};")

    def _locate(self) -> None:
        here, said = self._place, self._said.get(id(self._lines))
        if self._files is not None and here != UNKNOWN and here != said:
            self._lines.append(f"\t.loc {self._files.number(here.file)} {here.line} {here.column}")
            self._said[id(self._lines)] = here

    def new(self, kind: str) -> str:
        """A register of a class (or for values of a type word) not used before."""
        kind = kind if kind in PREFIX else class_of(kind)
        self._counts[kind] += 1
        return f"{PREFIX[kind]}{self._counts[kind]}"

    def let(self, instruction: str, kind: str, *operands: Any, guard: str = "") -> str:
        """Append an instruction that gives a value; its register."""
        name = self.new(kind)
        self.line(f"{instruction} {', '.join([name, *map(str, operands)])}", guard)
        return name

    def do(self, instruction: str, *operands: Any, guard: str = "") -> None:
        """Append an instruction with operands."""
        self.line(f"{instruction} {', '.join(map(str, operands))}" if operands else instruction, guard)

    def new_label(self, hint: str) -> str:
        """A label not used before."""
        self._labels += 1
        return f"${hint}{self._labels}"

    def label(self, name: str) -> None:
        """Put a label here."""
        self._lines.append(f"{name}:")

    @contextmanager
    def first(self) -> Iterator[None]:
        """Put the lines appended inside at the head of the entry."""
        before, self._lines = self._lines, self.head
        place, self._place = self._place, UNKNOWN
        try:
            yield
        finally:
            self._lines, self._place = before, place

    def flat(self, begin: Iterable[str]) -> Iterator[str]:
        """The declarations of registers, what the entry begins with, then every line in order."""
        for kind, prefix in PREFIX.items():
            if self._counts[kind]:
                yield f"\t.reg .{kind} {prefix}<{self._counts[kind] + 1}>;"
        yield from begin
        yield from self.head
        yield from self.root
