"""Syntax tree (AST) of CSL: one frozen class for each construct, each with its source location."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.core.errors import Location


@dataclass(frozen=True)
class SyntaxNode:
    """Any construct; `loc` is its first token (of a binary operation: its operator)."""

    loc: Location


@dataclass(frozen=True)
class LiteralExpr(SyntaxNode):
    """A number, string, truth value, or `undefined` (None)."""

    value: int | float | bool | str | None


@dataclass(frozen=True)
class NameExpr(SyntaxNode):
    """The use of a name."""

    text: str


@dataclass(frozen=True)
class BuiltinCall(SyntaxNode):
    """`@name(arguments)`."""

    name: str
    args: tuple[SyntaxNode, ...]


@dataclass(frozen=True)
class UnaryExpr(SyntaxNode):
    """`-x`, `!x`, `~x`, `&x`, `comptime x`."""

    sign: str
    operand: SyntaxNode


@dataclass(frozen=True)
class BinaryExpr(SyntaxNode):
    """`a + b` and the like, `and` and `or` included."""

    sign: str
    left: SyntaxNode
    right: SyntaxNode


@dataclass(frozen=True)
class CallExpr(SyntaxNode):
    """`f(arguments)`."""

    callee: SyntaxNode
    args: tuple[SyntaxNode, ...]


@dataclass(frozen=True)
class SubscriptExpr(SyntaxNode):
    """`a[i, j]`."""

    base: SyntaxNode
    indices: tuple[SyntaxNode, ...]


@dataclass(frozen=True)
class FieldExpr(SyntaxNode):
    """`a.name`."""

    base: SyntaxNode
    name: str


@dataclass(frozen=True)
class DereferenceExpr(SyntaxNode):
    """`p.*`."""

    base: SyntaxNode


@dataclass(frozen=True)
class EnumLiteralExpr(SyntaxNode):
    """`.name` where an enum is expected."""

    name: str


@dataclass(frozen=True)
class StructLiteralExpr(SyntaxNode):
    """`.{ .a = x }` (named), `.{ x, y }` (unnamed), or either after a type."""

    type: SyntaxNode | None
    names: tuple[str, ...]
    values: tuple[SyntaxNode, ...]


@dataclass(frozen=True)
class ArrayTypeExpr(SyntaxNode):
    """`[d1, d2]T`; `[*]T` and `[*]const T` have no dims."""

    dims: tuple[SyntaxNode, ...]
    const: bool
    element: SyntaxNode


@dataclass(frozen=True)
class PointerTypeExpr(SyntaxNode):
    """`*T`, `*const T`."""

    const: bool
    element: SyntaxNode


@dataclass(frozen=True)
class FunctionTypeExpr(SyntaxNode):
    """`fn (T, U) R`, `task () void`."""

    params: tuple[SyntaxNode, ...]
    result: SyntaxNode
    task: bool = False


@dataclass(frozen=True)
class MemberDecl:
    """One field of a struct or union, or one name of an enum."""

    loc: Location
    name: str
    type: SyntaxNode | None
    value: SyntaxNode | None


@dataclass(frozen=True)
class AggregateTypeExpr(SyntaxNode):
    """`struct { … }`, `packed struct { … }`, `union { … }`, `enum(T) { … }`."""

    kind: str
    packed: bool
    tag: SyntaxNode | None
    members: tuple[MemberDecl, ...]


@dataclass(frozen=True)
class AffineAccessExpr(SyntaxNode):
    """`|i, j|{n, m} -> A[i, 2*j]`: the access pattern of a memory descriptor."""

    names: tuple[str, ...]
    extents: tuple[SyntaxNode, ...]
    body: SyntaxNode


@dataclass(frozen=True)
class BlockStmt(SyntaxNode):
    """`{ … }`, optionally with a label."""

    label: str
    body: tuple[SyntaxNode, ...]


@dataclass(frozen=True)
class IfStmt(SyntaxNode):
    """`if (c) a else b`, as an expression or a statement."""

    condition: SyntaxNode
    then: SyntaxNode
    other: SyntaxNode | None


@dataclass(frozen=True)
class CaseRange(SyntaxNode):
    """`a...b` in a switch, inclusive."""

    first: SyntaxNode
    last: SyntaxNode


@dataclass(frozen=True)
class SwitchCase:
    """One arm of a switch; an arm without values is `else`."""

    loc: Location
    values: tuple[SyntaxNode, ...]
    body: SyntaxNode


@dataclass(frozen=True)
class SwitchStmt(SyntaxNode):
    """`switch (x) { v, w => …, else => … }`."""

    subject: SyntaxNode
    cases: tuple[SwitchCase, ...]


@dataclass(frozen=True)
class WhileStmt(SyntaxNode):
    """`while (c) : (step) body`; `jumps`: the body contains a jump."""

    label: str
    inline: bool
    condition: SyntaxNode
    step: SyntaxNode | None
    body: SyntaxNode
    jumps: bool


@dataclass(frozen=True)
class ForStmt(SyntaxNode):
    """`for (items) |item, index| body`; `jumps` and `nested`: the body contains a jump, a loop."""

    label: str
    inline: bool
    items: SyntaxNode
    names: tuple[str, ...]
    body: SyntaxNode
    jumps: bool
    nested: bool


@dataclass(frozen=True)
class AssignStmt(SyntaxNode):
    """`target = value`, `target += value`; the operator is without `=` ("" for a plain assignment)."""

    sign: str
    target: SyntaxNode
    value: SyntaxNode


@dataclass(frozen=True)
class ReturnStmt(SyntaxNode):
    """`return x`."""

    value: SyntaxNode | None


@dataclass(frozen=True)
class JumpStmt(SyntaxNode):
    """`break :label value` or `continue :label`."""

    kind: str
    label: str
    value: SyntaxNode | None


@dataclass(frozen=True)
class VariableDecl(SyntaxNode):
    """`const`, `var` or `param`, with its modifiers."""

    kind: str
    name: str
    type: SyntaxNode | None
    value: SyntaxNode | None
    align: SyntaxNode | None
    section: SyntaxNode | None
    flags: frozenset[str]


@dataclass(frozen=True)
class ParameterDecl:
    """One parameter of a function or task."""

    loc: Location
    name: str
    type: SyntaxNode
    comptime: bool


@dataclass(frozen=True)
class FunctionDecl(SyntaxNode):
    """`fn` or `task`; `extern` declarations have no body. The body takes the addresses of the names `addressed`."""

    kind: str
    name: str
    params: tuple[ParameterDecl, ...]
    result: SyntaxNode
    body: BlockStmt | None
    flags: frozenset[str]
    addressed: frozenset[str]


@dataclass(frozen=True)
class TopLevelBlock(SyntaxNode):
    """`comptime { … }` or `layout { … }` at the top level."""

    kind: str
    body: BlockStmt


@dataclass(frozen=True)
class SourceFile:
    """One CSL file."""

    path: str
    items: tuple[SyntaxNode, ...]
