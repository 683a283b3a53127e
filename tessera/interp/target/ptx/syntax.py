"""What PTX text says: frozen records of modules, functions, variables, instructions and operands."""

from __future__ import annotations

from dataclasses import dataclass, field

from tessera.errors import Location, ParseError


@dataclass(frozen=True)
class Name:
    """A register, variable, label or function by name."""

    text: str
    negated: bool = False


@dataclass(frozen=True)
class Number:
    """An immediate: an integer, or the bits of a float of 32 or 64 bits."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; a base that is None is an absolute address; `[map, {x, y}]` has coordinates."""

    base: str | None
    offset: int = 0
    coordinates: tuple[Operand, ...] | None = None


@dataclass(frozen=True)
class Group:
    """`{a, b}`, or with `pair` set `a|b`; `(a, b)` in calls."""

    parts: tuple[Operand, ...]
    pair: bool = False


Operand = Name | Number | Address | Group


@dataclass(frozen=True)
class Variable:
    """A declared register, parameter or variable; `count` elements; `many` registers name0 to name(many-1)."""

    name: str
    space: str
    type: str
    align: int = 1
    count: int = 1
    many: int = 0
    vector: int = 1
    initial: tuple[Operand, ...] = ()
    extern: bool = False
    location: Location = field(default_factory=Location, compare=False)


@dataclass(frozen=True)
class Instruction:
    """One instruction; `source` is the place its `.loc` names."""

    op: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Name | None
    location: Location = field(compare=False)
    source: Location | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The opcode with its modifiers, as written."""
        return ".".join(self.op)


@dataclass(frozen=True)
class Label:
    """A place to branch to."""

    name: str


@dataclass(frozen=True)
class Scope:
    """A body in braces."""

    items: tuple[Item, ...]


@dataclass(frozen=True)
class Targets:
    """The labels that an indexed branch may go to."""

    name: str
    labels: tuple[str, ...]


Item = Variable | Instruction | Label | Scope | Targets


@dataclass(frozen=True)
class Function:
    """An entry or a function; one without a body is declared only."""

    name: str
    entry: bool
    results: tuple[Variable, ...]
    params: tuple[Variable, ...]
    body: Scope | None
    limits: tuple[tuple[str, tuple[int, ...]], ...] = ()
    location: Location = field(default_factory=Location, compare=False)


@dataclass(frozen=True)
class ModuleText:
    """A whole module."""

    version: str
    target: tuple[str, ...]
    variables: tuple[Variable, ...]
    functions: tuple[Function, ...]


def called(inst: Instruction) -> Name:
    """The function or register that a call names."""
    found = next((o for o in inst.operands if isinstance(o, Name)), None)
    if found is None:
        raise ParseError("a call of no function", location=inst.location)
    return found


def arguments_of(inst: Instruction) -> list[Operand]:
    """What a call gives and takes, results first."""
    return [part for o in inst.operands if isinstance(o, Group) for part in o.parts]
