"""PTX builder: the instructions, registers with their types, labels and source locations of an entry, and its hidden
parameters.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tessera.core.errors import UNKNOWN, Location, UnsupportedOpError
from tessera.core.types import (
    DType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    fp4,
    fp6,
    fp6_e2m3,
    fp8_e4m3,
    fp8_e5m2,
    int4,
    int8,
    int16,
    int32,
    int64,
    tf32,
    uint8,
    uint16,
    uint32,
    uint64,
)
from tessera.ops.tensor.basic import full

# Register types: the PTX register class and the instruction type of each element type.


# In registers a narrow float is an f32 with the same value, and a narrow integer 32 bits with the same value: ops
# compute in 32 bits, then round or wrap the result to the narrow type.
PTX_TYPES: dict[DType, str] = {
    f64: "f64", f32: "f32", tf32: "f32", f16: "f32", bf16: "f32",
    int64: "s64", int32: "s32", int16: "s32", int8: "s32", int4: "s32", bool_: "pred",
    uint64: "u64", uint32: "u32", uint16: "u32", uint8: "u32",
    **dict.fromkeys((fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4), "f32"),
}  # fmt: skip
REGISTER_CLASSES = {"f64": "f64", "f32": "f32", "s64": "b64", "u64": "b64", "b64": "b64", "pred": "pred"}
REGISTER_PREFIXES = {"pred": "%p", "b16": "%h", "b32": "%r", "b64": "%x", "f32": "%f", "f64": "%d"}
REGISTER_BITS = {"b16": 16, "b32": 32, "b64": 64, "f32": 32, "f64": 64}
SMALL_FLOATS = (fp8_e4m3, fp8_e5m2, fp6, fp6_e2m3, fp4)
NARROW_FLOATS = (tf32, f16, bf16, *SMALL_FLOATS)


def ptx_type(dtype: DType) -> str:
    """The PTX type of instructions on elements of a type.

    Raises:
        UnsupportedOpError: the target does not support the type.
    """
    if dtype not in PTX_TYPES:
        raise UnsupportedOpError(
            f"the target ptx has no element type {dtype}", expected=", ".join(map(str, PTX_TYPES)),
            suggestion="cast to ts.f32 or ts.bf16 first",
        )  # fmt: skip
    return PTX_TYPES[dtype]


def register_class_of(word: str) -> str:
    """The register class for a PTX type."""
    return REGISTER_CLASSES.get(word, "b16" if word.endswith("16") else "b32")


def register_class(dtype: DType) -> str:
    """The register class for elements of a type."""
    return register_class_of(ptx_type(dtype))


def element_bytes(dtype: DType) -> int:
    """The bytes of an element in memory."""
    ptx_type(dtype)
    return dtype.numpy.itemsize


def literal(word: str, value: Any) -> str:
    """A number as an immediate operand of a PTX type.

    >>> literal("f32", 1.0), literal("s32", -3)
    ('0f3F800000', '-3')
    """
    if word == "f32":
        number = np.float32(value)
        return "0f7FC00000" if np.isnan(number) else f"0f{struct.unpack('<I', struct.pack('<f', number))[0]:08X}"
    if word == "f64":
        number = float(value)
        return (
            "0d7FF8000000000000" if number != number else f"0d{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"
        )
    return str(int(value))


def typed_literal(value: Any, dtype: DType) -> str:
    """A number, rounded to an element type, as an immediate operand."""
    number = full.ref(shape=(), value=value, dtype=dtype)
    return literal(ptx_type(dtype), float(number) if dtype.is_float else int(number))


def is_immediate(operand: str) -> bool:
    """Whether an operand is an immediate rather than a register."""
    return not operand.startswith("%")


# PTX builder: the instructions, registers, labels and source locations of an entry, and its hidden parameters.
#
# Hidden parameters are device memory that the runtime provides: for assertions, prints and the grid barrier.


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
        self.arch = ""  # the architecture whose instructions the text may have
        self.body: list[str] = []
        self.head: list[str] = []  # instructions that every path executes first, on loop-invariant operands
        self._lines = self.body
        self._files = files
        self._register_counts: Counter[str] = Counter()
        self._labels = 0
        # The f32 source of each rounded value: a store may round and pack two at once.
        self.rounding_sources: dict[str, tuple[DType, str]] = {}
        self.halves: dict[str, tuple[str, int]] = {}  # the word, and which half of it, that an f32 was decoded from
        self.low_words: dict[str, str] = {}  # of 64-bit registers, the 32-bit one that each extends with zeros
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
