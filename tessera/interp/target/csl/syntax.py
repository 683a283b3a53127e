"""The syntax tree of CSL: one frozen class for each construct, each with its place."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.errors import Location


@dataclass(frozen=True)
class Syntax:
    """Any construct; `loc` is where it begins (a binary operation: where its sign stands)."""

    loc: Location


@dataclass(frozen=True)
class Literal(Syntax):
    """A number, string, truth value, or `undefined` (None)."""

    value: int | float | bool | str | None


@dataclass(frozen=True)
class Name(Syntax):
    """The use of a name."""

    text: str


@dataclass(frozen=True)
class Builtin(Syntax):
    """`@name(arguments)`."""

    name: str
    args: tuple[Syntax, ...]


@dataclass(frozen=True)
class Unary(Syntax):
    """`-x`, `!x`, `~x`, `&x`, `comptime x`."""

    sign: str
    operand: Syntax


@dataclass(frozen=True)
class Binary(Syntax):
    """`a + b` and the like, `and` and `or` included."""

    sign: str
    left: Syntax
    right: Syntax


@dataclass(frozen=True)
class Call(Syntax):
    """`f(arguments)`."""

    callee: Syntax
    args: tuple[Syntax, ...]


@dataclass(frozen=True)
class Index(Syntax):
    """`a[i, j]`."""

    base: Syntax
    indices: tuple[Syntax, ...]


@dataclass(frozen=True)
class Field(Syntax):
    """`a.name`."""

    base: Syntax
    name: str


@dataclass(frozen=True)
class Dereference(Syntax):
    """`p.*`."""

    base: Syntax


@dataclass(frozen=True)
class EnumLiteral(Syntax):
    """`.name` where an enum is expected."""

    name: str


@dataclass(frozen=True)
class StructLiteral(Syntax):
    """`.{ .a = x }` (names given) or `.{ x, y }` (no names), or either after a type."""

    type: Syntax | None
    names: tuple[str, ...]
    values: tuple[Syntax, ...]


@dataclass(frozen=True)
class ArrayType(Syntax):
    """`[d1, d2]T`; `[*]T` and `[*]const T` have no dims."""

    dims: tuple[Syntax, ...]
    const: bool
    element: Syntax


@dataclass(frozen=True)
class PointerType(Syntax):
    """`*T`, `*const T`."""

    const: bool
    element: Syntax


@dataclass(frozen=True)
class FunctionType(Syntax):
    """`fn (T, U) R`, `task () void`."""

    params: tuple[Syntax, ...]
    result: Syntax
    task: bool = False


@dataclass(frozen=True)
class Member:
    """One field of a struct or union, or one name of an enum."""

    loc: Location
    name: str
    type: Syntax | None
    value: Syntax | None


@dataclass(frozen=True)
class AggregateType(Syntax):
    """`struct { … }`, `packed struct { … }`, `union { … }`, `enum(T) { … }`."""

    kind: str
    packed: bool
    tag: Syntax | None
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Affine(Syntax):
    """`|i, j|{n, m} -> A[i, 2*j]`: the access pattern of a memory descriptor."""

    names: tuple[str, ...]
    extents: tuple[Syntax, ...]
    body: Syntax


@dataclass(frozen=True)
class Block(Syntax):
    """`{ … }`, perhaps labelled."""

    label: str
    body: tuple[Syntax, ...]


@dataclass(frozen=True)
class If(Syntax):
    """`if (c) a else b`, as an expression or a statement."""

    condition: Syntax
    then: Syntax
    other: Syntax | None


@dataclass(frozen=True)
class Range(Syntax):
    """`a...b` in a switch, both ends included."""

    first: Syntax
    last: Syntax


@dataclass(frozen=True)
class Case:
    """One arm of a switch; no values means `else`."""

    loc: Location
    values: tuple[Syntax, ...]
    body: Syntax


@dataclass(frozen=True)
class Switch(Syntax):
    """`switch (x) { v, w => …, else => … }`."""

    subject: Syntax
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class While(Syntax):
    """`while (c) : (step) body`."""

    label: str
    inline: bool
    condition: Syntax
    step: Syntax | None
    body: Syntax


@dataclass(frozen=True)
class For(Syntax):
    """`for (items) |item, index| body`."""

    label: str
    inline: bool
    items: Syntax
    names: tuple[str, ...]
    body: Syntax


@dataclass(frozen=True)
class Assign(Syntax):
    """`target = value`, `target += value`; the sign is without `=` ("" for plain)."""

    sign: str
    target: Syntax
    value: Syntax


@dataclass(frozen=True)
class Return(Syntax):
    """`return x`."""

    value: Syntax | None


@dataclass(frozen=True)
class Jump(Syntax):
    """`break :label value` or `continue :label`."""

    kind: str
    label: str
    value: Syntax | None


@dataclass(frozen=True)
class Declare(Syntax):
    """`const`, `var` or `param`, with what stands before and after it."""

    kind: str
    name: str
    type: Syntax | None
    value: Syntax | None
    align: Syntax | None
    section: Syntax | None
    flags: frozenset[str]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function or task."""

    loc: Location
    name: str
    type: Syntax
    comptime: bool


@dataclass(frozen=True)
class Function(Syntax):
    """`fn` or `task`; no body where it is only declared (`extern`)."""

    kind: str
    name: str
    params: tuple[Parameter, ...]
    result: Syntax
    body: Block | None
    flags: frozenset[str]


@dataclass(frozen=True)
class TopBlock(Syntax):
    """`comptime { … }` or `layout { … }` at the top level."""

    kind: str
    body: Block


@dataclass(frozen=True)
class File:
    """One CSL file."""

    path: str
    items: tuple[Syntax, ...]
