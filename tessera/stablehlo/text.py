"""Recursive-descent parser: reads StableHLO text, in its own and in the generic form of MLIR, to operations and regions
(the StableHLO specification; the MLIR language reference)."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tessera.core.errors import UNKNOWN, Location, ParseError
from tessera.core.types import BY_MLIR, DType, TensorType

# What a text says.


@dataclass(frozen=True)
class RefusedType:
    """A type that this importer does not support, and why; an operation with such a type is refused."""

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class TupleType:
    """A tuple of types."""

    items: tuple[Any, ...]


TOKEN_TYPE = "!stablehlo.token"


@dataclass
class Operation:
    """An operation: its name, the names of results and operands, attributes, regions, types and location."""

    name: str
    operands: list[str] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)
    regions: list[HloRegion] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)  # of the results
    results: list[tuple[str, int]] = field(default_factory=list)
    location: Location = UNKNOWN

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or the default."""
        return self.attrs.get(name, default)


@dataclass
class HloRegion:
    """A region of one block: the names and types of its parameters, and its operations."""

    params: list[str] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


@dataclass
class HloFunction:
    """A function of a module."""

    name: str
    region: HloRegion
    hints: list[str]  # the parameters' names in the program that it came from, "" where unknown
    results: list[str]  # likewise


@dataclass
class HloModule:
    """The functions of a module by name, and the module's name."""

    name: str
    functions: dict[str, HloFunction]


# Lexer.

_LEXEME = re.compile(
    r"""
      (?P<space>(?:\s+|//[^\n]*)+)
    | (?P<tensor>tensor<[^<>]*(?:<[^<>]*(?:<[^<>]*>[^<>]*)*>[^<>]*)*>)
    | (?P<string>"(?:[^"\\\n]|\\.)*")
    | (?P<value>%[\w$.-]+(?:\#\d+)?)
    | (?P<symbol>@(?:[\w$.-]+|"[^"\n]*"))
    | (?P<label>\^[\w$.-]+)
    | (?P<alias>[!#][A-Za-z_][\w$.]*)
    | (?P<number>-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))
    | (?P<word>[A-Za-z_][\w$.]*)
    | (?P<mark>->|.)
    """,
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(rb'\\([0-9A-Fa-f]{2}|[nt"\\])')
_ESCAPED = {b"n": b"\n", b"t": b"\t", b'"': b'"', b"\\": b"\\"}

Item = TypeVar("Item")


class Lexeme(NamedTuple):
    """A token: its kind (a group of the pattern above), its text and its offset."""

    kind: str
    text: str
    start: int


class Lexer:
    """The tokens of a text, and the position of the parser."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.next = text, file, 0
        self.lexemes = [
            Lexeme(m.lastgroup or "", m[0], m.start()) for m in _LEXEME.finditer(text) if m.lastgroup != "space"
        ]
        self.lexemes += [Lexeme("end", "the end of the text", len(text))] * 2
        self._lines = [m.start() for m in re.finditer("\n", text)]

    @property
    def here(self) -> Lexeme:
        """The next token."""
        return self.lexemes[self.next]

    def ahead(self, count: int = 1) -> Lexeme:
        """A later token."""
        return self.lexemes[min(self.next + count, len(self.lexemes) - 1)]

    def take(self) -> Lexeme:
        """Consume the next token."""
        found = self.lexemes[self.next]
        self.next += found.kind != "end"
        return found

    def at(self, *texts: str) -> bool:
        """Whether the next token is one of these."""
        return self.lexemes[self.next].text in texts

    def accept(self, text: str) -> bool:
        """Consume the next token if it is this."""
        found = self.lexemes[self.next].text == text
        self.next += found
        return found

    def expect(self, *texts: str) -> None:
        """Consume tokens that must be these."""
        for text in texts:
            if not self.accept(text):
                raise self.error(text)

    def take_kind(self, kind: str) -> str:
        """The text of the next token, which must be of this kind."""
        if self.here.kind != kind:
            raise self.error(f"a {kind}")
        return self.take().text

    def take_integer(self) -> int:
        """The next token, which must be a whole number."""
        text = self.here.text
        if not text.lstrip("-").isdecimal() or len(text) > 20:
            raise self.error("an integer")
        return int(self.take().text)

    def many(self, open: str, close: str, item: Callable[[], Item]) -> list[Item]:
        """A bracketed list, separated by commas."""
        self.expect(open)
        items: list[Item] = []
        while not self.at(close):
            items.append(item())
            if not self.accept(","):
                break
        self.expect(close)
        return items

    def place(self, offset: int) -> Location:
        """The location of an offset in the text."""
        line = bisect.bisect_left(self._lines, offset)
        return Location(self.file, line + 1, offset - (self._lines[line - 1] if line else -1))

    def error(self, expected: str) -> ParseError:
        """The error that the next token is another than expected."""
        here = self.here
        return ParseError(
            "this is not StableHLO text",
            location=self.place(here.start),
            expected=expected,
            received=here.text[:60],
            suggestion="pass the text of jax.jit(f).lower(...).as_text(), or of `stablehlo-opt`",
        )


def unquote(text: str) -> str:
    """The value of a string literal."""
    if "\\" not in text:
        return text[1:-1]
    raw = text[1:-1].encode("utf-8", "surrogatepass")
    return _ESCAPE.sub(lambda m: _ESCAPED.get(m[1]) or bytes.fromhex(m[1].decode()), raw).decode("utf-8", "replace")


# Types and dense elements.

_ELEMENTS: Mapping[str, DType] = {**BY_MLIR, "si8": BY_MLIR["i8"], "si32": BY_MLIR["i32"], "si64": BY_MLIR["i64"]}


def parse_tensor_type(text: str) -> Any:
    """The type `tensor<...>` as a TensorType, or as one that is refused."""
    *sizes, element = text[len("tensor<") : -1].replace(" ", "").split("x") if "<" not in text[7:] else ["", text]
    if "complex<" in text:
        return RefusedType(text, "complex numbers are not supported")
    if "quant." in text:
        return RefusedType(text, "quantised types are not supported")
    if "?" in text or "*" in text or "," in text:
        return RefusedType(text, "its sizes are known only when the program runs")
    if element not in _ELEMENTS or element == "tf32":
        return RefusedType(text, f"there is no element type for {element}")
    if not all(n.isdecimal() and len(n) < 19 for n in sizes):
        return RefusedType(text, "its sizes are no numbers of 64 bits")
    return TensorType(tuple(int(n) for n in sizes), _ELEMENTS[element])


def _sizes(type: TensorType) -> tuple[int, ...]:
    """The sizes of a type of this text, which are numbers."""
    return tuple(n for n in type.shape if isinstance(n, int))


def _decode_bytes(raw: bytes, type: TensorType) -> np.ndarray:
    """The elements of a dense string: row-major, little-endian; bools are bits or bytes, one element is repeated."""
    count = math.prod(_sizes(type))
    if type.dtype.kind == "bool":
        if len(raw) == 1 and count > 8:
            return np.broadcast_to(raw[0] != 0, _sizes(type))
        if len(raw) == count:
            return (np.frombuffer(raw, np.uint8) != 0).reshape(type.shape)
        return np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")[:count].astype(bool).reshape(type.shape)
    flat = np.frombuffer(raw, type.dtype.numpy)
    return np.broadcast_to(flat[0], _sizes(type)) if flat.size == 1 else flat.reshape(type.shape)


def _decode_number(text: str, dtype: DType) -> Any:
    if text in ("true", "false"):
        return text == "true"
    if dtype.is_float and text.lstrip("-").startswith("0x"):
        bits = np.array([int(text, 16)], f"u{dtype.numpy.itemsize}")
        return bits.view(dtype.numpy)[0]
    if dtype.is_float:
        return dtype.numpy.type(float(text))
    return int(text, 0) & ((1 << dtype.bits) - 1)


def make_dense(elements: Any, type: TensorType) -> np.ndarray:
    """The array of a dense attribute: nested lists of number tokens, one token for all elements, or a byte string."""
    if isinstance(elements, bytes):
        return _decode_bytes(elements, type)
    flat: list[str] = []
    _flatten(elements, flat)
    values = [_decode_number(t, type.dtype) for t in flat]
    if type.dtype.is_integer:
        wide = np.array(values, np.uint64)
        array = wide.astype(type.dtype.numpy)
    else:
        array = np.array(values, type.dtype.numpy)
    return np.broadcast_to(array.reshape(()), _sizes(type)) if array.size == 1 else array.reshape(type.shape)


def _flatten(elements: Any, flat: list[str]) -> None:
    if isinstance(elements, str):
        flat.append(elements)
        return
    for each in elements:
        _flatten(each, flat)
