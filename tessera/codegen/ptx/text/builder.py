"""The PTX builder: instructions, registers, labels, source locations, and the hidden parameters of an entry.

Hidden parameters are memory of the launch that the user does not pass: assertions, prints, the grid barrier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tessera.codegen.ptx.text.register_types import REGISTER_PREFIXES, register_class_of
from tessera.core.errors import UNKNOWN, Location
from tessera.core.types import DType

# PTX text as it grows: instructions, registers, labels, and the source line of each.


Lines = list[Any]  # strings, and lists of lines that are filled in later


class SourceFiles:
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


class PtxBuilder:
    """The body of one entry under construction."""

    def __init__(self, files: SourceFiles | None) -> None:
        self.root: Lines = []
        self.head: Lines = []  # what every path passes first: what depends on the thread's number alone
        self._lines = self.root
        self._files = files
        self._counts: Counter[str] = Counter()
        self._labels = 0
        # Of what f32 each rounded one was made: a store rounds and packs two at once.
        self.rounding_sources: dict[str, tuple[DType, str]] = {}
        self.halves: dict[str, tuple[str, int]] = {}  # of which word, and which part of it, an f32 was decoded
        self._place: Location = UNKNOWN
        self._last_location: dict[int, Location] = {}

    def place(self, loc: Location) -> None:
        """Tie the lines that follow to a place in the source."""
        self._place = loc

    def line(self, text: str, guard: str = "") -> None:
        """Append an instruction, run by the threads whose guard holds."""
        self._locate()
        self._lines.append(f"\t{'@' + guard + ' ' if guard else ''}{text};")

    def _locate(self) -> None:
        here, said = self._place, self._last_location.get(id(self._lines))
        if self._files is not None and here != UNKNOWN and here != said:
            self._lines.append(f"\t.loc {self._files.number(here.file)} {here.line} {here.column}")
            self._last_location[id(self._lines)] = here

    def new(self, kind: str) -> str:
        """A register of a class (or for values of a type word) not used before."""
        kind = kind if kind in REGISTER_PREFIXES else register_class_of(kind)
        self._counts[kind] += 1
        return f"{REGISTER_PREFIXES[kind]}{self._counts[kind]}"

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

    def assemble(self, begin: Iterable[str]) -> Iterator[str]:
        """The declarations of registers, what the entry begins with, then every line in order."""
        for kind, prefix in REGISTER_PREFIXES.items():
            if self._counts[kind]:
                yield f"\t.reg .{kind} {prefix}<{self._counts[kind] + 1}>;"
        yield from begin
        yield from self.head
        yield from self.root


# What an entry takes besides its arguments: memory of the launch, a parameter for each kind that it uses.


# In the order of parameters: what assertions find, and beside which values; what is printed; where programs meet.
HIDDEN_PARAMETERS = ("reports", "values", "prints", "meeting")


class HiddenParameters:
    """The kinds that an entry under emission uses: the address of each, and the places of the text that use it."""

    def __init__(self, text: PtxBuilder) -> None:
        self._text = text
        self._registers: dict[str, str] = {}
        self.sites: dict[str, list[dict[str, Any]]] = {}

    def site(self, kind: str, described: Mapping[str, Any]) -> tuple[int, str]:
        """A new place of the text that uses a kind: its number, and the register with the memory's address."""
        places = self.sites.setdefault(kind, [])
        places.append(dict(described))
        return len(places) - 1, self.address(kind)

    def address(self, kind: str) -> str:
        """The register with the address of a kind's memory."""
        if kind not in self._registers:
            self._registers[kind] = self._text.new("b64")
        return self._registers[kind]

    @property
    def used(self) -> tuple[str, ...]:
        """The kinds, in the order of their parameters."""
        return tuple(kind for kind in HIDDEN_PARAMETERS if kind in self._registers)

    def params(self, name: str) -> list[str]:
        """The parameters' declarations."""
        return [f"\t.param .u64 {name}_{kind}" for kind in self.used]

    def lines(self, name: str) -> Iterator[str]:
        """What stands at the begin of the entry."""
        for kind in self.used:
            register = self._registers[kind]
            yield f"\tld.param.u64 {register}, [{name}_{kind}];"
            yield f"\tcvta.to.global.u64 {register}, {register};"

    def described(self) -> dict[str, Any]:
        """The places as data that JSON can hold."""
        return {kind: self.sites[kind] for kind in self.used}
