"""Syntax tree of an LLVM module, and the source locations in its debug metadata."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tessera.core.errors import UNKNOWN, Location
from tessera.interp.target.llvm.text.types import VOID, LlvmType

# The syntax tree: frozen values without behaviour.


@dataclass(frozen=True)
class LocalOperand:
    """A register, by name."""

    type: LlvmType
    name: str


@dataclass(frozen=True)
class NumberConstant:
    """An integer or a floating-point constant."""

    type: LlvmType
    value: int | float


@dataclass(frozen=True)
class SequenceConstant:
    """A constant vector, array or struct."""

    type: LlvmType
    elements: tuple[LlvmOperand, ...]


@dataclass(frozen=True)
class Zero:
    """zeroinitializer, null, false."""

    type: LlvmType


@dataclass(frozen=True)
class Undefined:
    """undef or poison."""

    type: LlvmType


@dataclass(frozen=True)
class GlobalOperand:
    """The address of a global."""

    type: LlvmType
    name: str


@dataclass(frozen=True)
class ConstantExpression:
    """A constant expression; `source` is the element type of a getelementptr."""

    type: LlvmType
    op: str
    operands: tuple[LlvmOperand, ...]
    source: LlvmType = VOID


LlvmOperand = LocalOperand | NumberConstant | SequenceConstant | Zero | Undefined | GlobalOperand | ConstantExpression


@dataclass(frozen=True)
class LlvmInstruction:
    """One instruction; `op` determines which optional fields it uses."""

    op: str
    type: LlvmType = VOID
    operands: tuple[LlvmOperand, ...] = ()
    word: str = ""  # predicate, atomic operation or callee
    flags: frozenset[str] = frozenset()
    align: int = 0
    source: LlvmType = VOID  # the type loaded, allocated, indexed
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
    body: tuple[LlvmInstruction, ...]


@dataclass(frozen=True)
class LlvmParameter:
    """A formal argument."""

    type: LlvmType
    name: str
    by_value: bool = False


@dataclass(frozen=True)
class LlvmFunction:
    """A function; one without blocks is a declaration."""

    name: str
    type: LlvmType
    parameters: tuple[LlvmParameter, ...]
    blocks: tuple[BasicBlock, ...] = ()
    where: Location = UNKNOWN


@dataclass(frozen=True)
class LlvmGlobal:
    """A module-level variable and its initial value."""

    name: str
    type: LlvmType
    value: LlvmOperand | None
    constant: bool
    align: int = 0


@dataclass(frozen=True)
class MetadataNode:
    """A metadata node: its kind, and its fields that are single tokens."""

    kind: str
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ParsedModule:
    """A whole module."""

    functions: dict[str, LlvmFunction]
    variables: dict[str, LlvmGlobal]
    nodes: dict[str, MetadataNode]


# Debug metadata.


def find_source_location(program: ParsedModule, i: LlvmInstruction) -> Location | None:
    """The file, line and column of an instruction's DILocation; None if it has none."""
    node = program.nodes.get(i.debug)
    if node is None or node.kind != "DILocation":
        return None
    file, line, column = _find_file(program, node), *(int(node.fields.get(n, 0)) for n in ("line", "column"))
    return Location(file, line, column) if file else None


def _find_file(program: ParsedModule, node: MetadataNode | None) -> str:
    """The file of the innermost scope that names one."""
    while node is not None:
        if (result := program.nodes.get(node.fields.get("file", ""))) is not None:
            return os.path.join(_unquote_field(result, "directory"), _unquote_field(result, "filename"))
        node = program.nodes.get(node.fields.get("scope", ""))
    return ""


def _unquote_field(node: MetadataNode, name: str) -> str:
    return node.fields.get(name, "").strip('"')
