"""What a parsed LLVM module is made of: frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.errors import UNKNOWN, Location
from tessera.interp.target.llvm.types import VOID, Type


@dataclass(frozen=True)
class Local:
    """A register by name."""

    type: Type
    name: str


@dataclass(frozen=True)
class Number:
    """An integer or a floating-point constant."""

    type: Type
    value: int | float


@dataclass(frozen=True)
class Many:
    """Constants in a row: a vector, an array or a struct."""

    type: Type
    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Zero:
    """zeroinitializer, null, false."""

    type: Type


@dataclass(frozen=True)
class Undefined:
    """undef or poison."""

    type: Type


@dataclass(frozen=True)
class Symbol:
    """The address of a global."""

    type: Type
    name: str


@dataclass(frozen=True)
class Expression:
    """A constant expression; `source` is the element type of a getelementptr."""

    type: Type
    op: str
    operands: tuple[Operand, ...]
    source: Type = VOID


Operand = Local | Number | Many | Zero | Undefined | Symbol | Expression


@dataclass(frozen=True)
class Instruction:
    """One instruction; which of the optional fields it uses depends on `op`."""

    op: str
    type: Type = VOID
    operands: tuple[Operand, ...] = ()
    word: str = ""  # predicate, atomic operation or callee
    flags: frozenset[str] = frozenset()
    align: int = 0
    source: Type = VOID  # the type loaded, allocated, indexed
    labels: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    aligns: tuple[int, ...] = ()  # of a call's arguments
    result: str = ""
    where: Location = UNKNOWN
    debug: str = ""  # the metadata node of !dbg

    def __str__(self) -> str:
        return f"{self.op} {self.word}".rstrip()


@dataclass(frozen=True)
class BasicBlock:
    """A label and the instructions up to the terminator."""

    label: str
    body: tuple[Instruction, ...]


@dataclass(frozen=True)
class Parameter:
    """A formal argument."""

    type: Type
    name: str
    by_value: bool = False


@dataclass(frozen=True)
class Function:
    """A function; without blocks it is only declared."""

    name: str
    type: Type
    parameters: tuple[Parameter, ...]
    blocks: tuple[BasicBlock, ...] = ()
    where: Location = UNKNOWN


@dataclass(frozen=True)
class Variable:
    """A module-level variable and its initial value."""

    name: str
    type: Type
    value: Operand | None
    constant: bool
    align: int = 0


@dataclass(frozen=True)
class Node:
    """A metadata node: its kind and those fields that are plain tokens."""

    kind: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """A whole module."""

    functions: dict[str, Function]
    variables: dict[str, Variable]
    nodes: dict[str, Node]
