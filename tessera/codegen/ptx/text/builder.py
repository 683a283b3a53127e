"""PTX builder: the instructions, registers, labels and source locations of an entry, and its hidden parameters.

Hidden parameters are device memory that the runtime provides: for assertions, prints and the grid barrier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tessera.codegen.ptx.text.register_types import REGISTER_PREFIXES, register_class_of
from tessera.core.errors import UNKNOWN, Location
from tessera.core.types import DType

# In the order of parameters: assertion failures, the values beside them, prints, the state of the grid barrier.
HIDDEN_PARAMETERS = ("reports", "values", "prints", "meeting")


class SourceFiles:
    """The source files that `.loc` refers to by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, path: str) -> int:
        """The number of a file."""
        return self._numbers.setdefault(path, len(self._numbers) + 1)

    def text(self) -> Iterator[str]:
        """The `.file` directives."""
        for path, number in self._numbers.items():
            escaped = path.replace("\\", "\\\\").replace('"', '\\"')
            yield f'.file {number} "{escaped}"'


class PtxBuilder:
    """The body of one entry under construction."""

    def __init__(self, files: SourceFiles | None) -> None:
        self.body: list[str] = []
        self.head: list[str] = []  # instructions that every path executes first, on loop-invariant operands
        self._lines = self.body
        self._files = files
        self._register_counts: Counter[str] = Counter()
        self._labels = 0
        # The f32 source of each rounded value: a store may round and pack two at once.
        self.rounding_sources: dict[str, tuple[DType, str]] = {}
        self.halves: dict[str, tuple[str, int]] = {}  # the word, and which half of it, that an f32 was decoded from
        self._location: Location = UNKNOWN
        self._last_location: dict[int, Location] = {}

    def set_location(self, loc: Location) -> None:
        """Attach a source location to the lines that follow."""
        self._location = loc

    def line(self, text: str, guard: str = "") -> None:
        """Append an instruction, predicated by the guard."""
        self._append_location()
        self._lines.append(f"\t{'@' + guard + ' ' if guard else ''}{text};")

    def _append_location(self) -> None:
        here, last = self._location, self._last_location.get(id(self._lines))
        if self._files is not None and here != UNKNOWN and here != last:
            self._lines.append(f"\t.loc {self._files.number(here.file)} {here.line} {here.column}")
            self._last_location[id(self._lines)] = here

    def new(self, kind: str) -> str:
        """A new register of a register class, or of the class for a type name."""
        kind = kind if kind in REGISTER_PREFIXES else register_class_of(kind)
        self._register_counts[kind] += 1
        return f"{REGISTER_PREFIXES[kind]}{self._register_counts[kind]}"

    def let(self, instruction: str, kind: str, *operands: Any, guard: str = "") -> str:
        """Append an instruction with a result; the new register that holds it."""
        name = self.new(kind)
        self.line(f"{instruction} {', '.join([name, *map(str, operands)])}", guard)
        return name

    def do(self, instruction: str, *operands: Any, guard: str = "") -> None:
        """Append an instruction without a new result."""
        self.line(f"{instruction} {', '.join(map(str, operands))}" if operands else instruction, guard)

    def new_label(self, hint: str) -> str:
        """A new label."""
        self._labels += 1
        return f"${hint}{self._labels}"

    def label(self, name: str) -> None:
        """Place a label here."""
        self._lines.append(f"{name}:")

    @contextmanager
    def at_entry_head(self) -> Iterator[None]:
        """Append the lines of the `with` block to the head of the entry, without a source location."""
        before, self._lines = self._lines, self.head
        location, self._location = self._location, UNKNOWN
        try:
            yield
        finally:
            self._lines, self._location = before, location

    def assemble(self, prologue: Iterable[str]) -> Iterator[str]:
        """The register declarations, the prologue, the head and the body."""
        for kind, prefix in REGISTER_PREFIXES.items():
            if self._register_counts[kind]:
                yield f"\t.reg .{kind} {prefix}<{self._register_counts[kind] + 1}>;"
        yield from prologue
        yield from self.head
        yield from self.body


class HiddenParameters:
    """The hidden parameters that an entry uses: the address of each, and the source sites that use it."""

    def __init__(self, text: PtxBuilder) -> None:
        self._text = text
        self._registers: dict[str, str] = {}
        self.sites: dict[str, list[dict[str, Any]]] = {}

    def add_site(self, kind: str, description: Mapping[str, Any]) -> tuple[int, str]:
        """Record a site that uses a parameter: its number, and the register with the parameter's address."""
        sites = self.sites.setdefault(kind, [])
        sites.append(dict(description))
        return len(sites) - 1, self.address(kind)

    def address(self, kind: str) -> str:
        """The register with a parameter's address."""
        if kind not in self._registers:
            self._registers[kind] = self._text.new("b64")
        return self._registers[kind]

    @property
    def used(self) -> tuple[str, ...]:
        """The parameters in use, in order."""
        return tuple(kind for kind in HIDDEN_PARAMETERS if kind in self._registers)

    def declare(self, name: str) -> list[str]:
        """The parameter declarations."""
        return [f"\t.param .u64 {name}_{kind}" for kind in self.used]

    def load(self, name: str) -> Iterator[str]:
        """The instructions that load the addresses."""
        for kind in self.used:
            register = self._registers[kind]
            yield f"\tld.param.u64 {register}, [{name}_{kind}];"
            yield f"\tcvta.to.global.u64 {register}, {register};"

    def describe(self) -> dict[str, Any]:
        """The sites as manifest data."""
        return {kind: self.sites[kind] for kind in self.used}
