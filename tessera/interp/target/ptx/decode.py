"""An entry's syntax as a program: scopes resolved, calls inlined, operands turned into readers and writers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.errors import Location, ParseError, TesseraError, UnsupportedOpError
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.machine import Lanes, Line, Machine, Program, Step
from tessera.interp.target.ptx.syntax import (
    Address,
    Function,
    Group,
    Instruction,
    Label,
    Name,
    Number,
    Operand,
    Scope,
    Variable,
)
from tessera.interp.target.ptx.types import BITS, TYPES, Type, bits_of, values

Reader = Callable[[Machine, Lanes], np.ndarray]
Writer = Callable[[Machine, Lanes, np.ndarray], None]
RULES: dict[str, Callable[[Decoder, Instruction], Step]] = {}
CONTROL: dict[str, Callable[[Decoder, Instruction, Line], None]] = {}
GUARDED = {"bra", "exit", "ret"}  # control that reads its own guard


def rule(*names: str, table: dict[str, Any] = RULES) -> Callable[[Any], Any]:
    """Register what decodes instructions whose opcode begins with one of these words."""

    def keep(function: Any) -> Any:
        table.update(dict.fromkeys(names, function))
        return function

    return keep


@dataclass(frozen=True)
class Place:
    """A variable: its space and its address there."""

    space: str
    address: int


@dataclass
class Names:
    """The names of one pair of braces, and those around it."""

    outer: Names | None
    own: dict[str, Any] = field(default_factory=dict)
    end: int = -1  # the label that `ret` goes to in an inlined function

    def find(self, name: str) -> Any:
        scope: Names | None = self
        while scope is not None:
            if name in scope.own:
                return scope.own[name]
            scope = scope.outer
        return None


@dataclass(frozen=True)
class _Pending:
    instruction: Instruction
    names: Names


class Decoder:
    """Decodes one entry; `world` maps module-level names to places and functions."""

    def __init__(self, world: dict[str, Any], shared: int) -> None:
        self.world = Names(None, world)
        self.program = Program(shared=shared)
        self.code: list[_Pending] = []
        self.labels: list[int] = []
        self.calls: list[str] = []
        self.names = self.world

    def entry(self, function: Function, params: dict[str, Place]) -> Program:
        """The program of an entry whose parameters lie at these places."""
        assert function.body is not None
        exit = Instruction(("exit",), (), None, function.location)
        self._scope(function.body, Names(self.world, dict(params)))
        self.code.append(_Pending(exit, self.world))
        self.program.lines = [self._line(p) for p in self.code]
        ends = {i + 1 for i, line in enumerate(self.program.lines) if line.control is not None}
        joins = {i for i, line in enumerate(self.program.lines) if line.members is not None}
        self.program.leaders = {*self.labels, *ends, *joins}
        return self.program

    def _scope(self, scope: Scope, names: Names) -> None:
        for item in scope.items:
            if isinstance(item, Label):
                names.own[item.name] = self.label()
        for item in scope.items:
            if isinstance(item, Variable):
                self._declare(item, names)
            elif isinstance(item, Label):
                self.labels[names.own[item.name]] = len(self.code)
            elif isinstance(item, Scope):
                self._scope(item, Names(names, end=names.end))
            elif item.op[0] == "call":
                self._call(item, names)
            else:
                self.code.append(_Pending(item, names))

    def label(self) -> int:
        """A new label."""
        self.labels.append(-1)
        return len(self.labels) - 1

    def _declare(self, v: Variable, names: Names) -> None:
        if v.space == "reg":
            parts = [f"{v.name}{i}" for i in range(v.many)] if v.many else [v.name]
            if v.vector > 1:
                parts = [f"{p}.{c}" for p in parts for c in "xyzw"[: v.vector]]
            for part in parts:
                names.own[part] = len(self.program.widths)
                self.program.widths.append(TYPES[v.type].bits)
                self.program.names.append(part)
            return
        size = size_of(v)
        if v.space == "shared":
            start = self.program.shared = -(-self.program.shared // v.align) * v.align
            self.program.shared += size
        elif v.space in ("local", "param"):
            start = -(-self.program.local // v.align) * v.align
            self.program.local = start + size
        else:
            raise UnsupportedOpError(f".{v.space} variable {v.name} in a body", location=v.location)
        names.own[v.name] = Place("shared" if v.space == "shared" else "local", start)

    def _call(self, inst: Instruction, names: Names) -> None:
        groups = [o for o in inst.operands if isinstance(o, Group)]
        called = next(o for o in inst.operands if isinstance(o, Name))
        function = names.find(called.text)
        if not isinstance(function, Function) or function.body is None or function.name in self.calls or inst.guard:
            raise UnsupportedOpError(
                f"call of {called.text}: only direct, unguarded, non-recursive calls of functions with a body",
                location=inst.location,
            )
        inner = Names(self.world, end=self.label())
        actual = [part for group in groups for part in group.parts]
        formal = [*function.results, *function.params]
        for variable, operand in zip(formal, actual, strict=True):
            found = names.find(operand.text) if isinstance(operand, Name) else None
            if found is None or isinstance(found, Place) != (variable.space == "param"):
                raise UnsupportedOpError(f"argument {variable.name} of {function.name}", location=inst.location)
            inner.own[variable.name] = found
        self.calls.append(function.name)
        self._scope(function.body, inner)
        self.calls.pop()
        self.labels[inner.end] = len(self.code)

    def _line(self, pending: _Pending) -> Line:
        inst, self.names = pending.instruction, pending.names
        line = Line(inst)
        try:
            if inst.op[0] in CONTROL:
                CONTROL[inst.op[0]](self, inst, line)
                if line.control is None or inst.op[0] not in GUARDED:
                    self._no_guard(inst)
            elif inst.op[0] in RULES:
                line.step = self._guarded(inst, RULES[inst.op[0]](self, inst))
            else:
                raise self.unsupported(inst)
        except (KeyError, IndexError, AttributeError, ValueError, AssertionError, Fault) as error:
            raise self.unsupported(inst) from error
        return line

    def _no_guard(self, inst: Instruction) -> None:
        if inst.guard:
            raise UnsupportedOpError(f"a guard on {inst.name}", location=inst.location)

    def unsupported(self, inst: Instruction) -> TesseraError:
        """The error of an instruction this interpreter does not know."""
        return UnsupportedOpError(f"the interpreter has no {inst.name}", location=inst.location)

    def _guarded(self, inst: Instruction, step: Step) -> Step:
        if inst.guard is None:
            return step
        guard = self.reader(inst.guard, TYPES["pred"])

        def run(m: Machine, lanes: Lanes) -> None:
            chosen = lanes[guard(m, lanes)]
            if len(chosen):
                step(m, chosen)

        return run

    def resolve(self, name: str, location: Location | None = None) -> Any:
        """What a name stands for: a register's index, a label's, a place or a function."""
        found = self.names.find(name)
        if found is None:
            raise ParseError(f"unknown name {name}", location=location)
        return found

    def reader(self, operand: Operand, type: Type) -> Reader:
        """What reads an operand as a type, for all given lanes."""
        if isinstance(operand, Number):
            return _constant(values(np.array([immediate(operand, type)], BITS[max(type.bits, 8)]), type))
        if isinstance(operand, Group):
            return self._packed(operand, type)
        if isinstance(operand, Address):
            place = self.resolve(str(operand.base))
            return _constant(np.array([generic(place) + operand.offset], np.uint64).astype(BITS[type.bits]))
        if operand.text.startswith("%clock") or operand.text == "%globaltimer":
            return lambda m, lanes: np.full(len(lanes), m.pc, type.dtype)
        if operand.text.startswith("%") and self.names.find(operand.text) is None:
            return lambda m, lanes: m.special[operand.text][lanes].astype(type.dtype)
        found = self.resolve(operand.text)
        if isinstance(found, Place):
            return _constant(np.array([generic(found)], np.uint64).astype(BITS[type.bits]).view(type.dtype))
        flip = operand.negated
        return lambda m, lanes: (
            values(m.read(found, lanes), type) ^ flip if flip else values(m.read(found, lanes), type)
        )

    def _packed(self, group: Group, type: Type) -> Reader:
        part = TYPES[f"b{type.bits // len(group.parts)}"]
        readers = [self.reader(p, part) for p in group.parts]

        def read(m: Machine, lanes: Lanes) -> np.ndarray:
            whole = np.stack([r(m, lanes) for r in readers], axis=1)
            return np.ascontiguousarray(whole).view(BITS[type.bits]).reshape(-1).view(type.dtype)

        return read

    def writer(self, operand: Operand, type: Type) -> Writer:
        """What writes numbers of a type to an operand."""
        if isinstance(operand, Group) and not operand.pair:
            return self._unpack(operand, type)
        assert isinstance(operand, Name)
        if operand.text == "_":
            return lambda m, lanes, value: None
        index = self.resolve(operand.text)
        width = self.program.widths[index]
        return lambda m, lanes, value: m.write(index, lanes, bits_of(value, type, width))

    def _unpack(self, group: Group, type: Type) -> Writer:
        part = TYPES[f"b{type.bits // len(group.parts)}"]
        writers = [self.writer(p, part) for p in group.parts]

        def write(m: Machine, lanes: Lanes, value: np.ndarray) -> None:
            whole = np.ascontiguousarray(np.broadcast_to(value, len(lanes))).view(part.dtype).reshape(len(lanes), -1)
            for k, writer in enumerate(writers):
                writer(m, lanes, whole[:, k])

        return write


def elementwise(d: Decoder, inst: Instruction, function: Callable[..., Any], out: Type, *types: Type) -> Step:
    """A step that applies a function of arrays to the sources and writes the first operand."""
    write = d.writer(inst.operands[0], out)
    readers = [d.reader(o, t) for o, t in zip(inst.operands[1:], types, strict=True)]
    return lambda m, lanes: write(m, lanes, function(*(r(m, lanes) for r in readers)))


def _constant(value: np.ndarray) -> Reader:
    return lambda m, lanes: value


def immediate(number: Number, type: Type) -> int:
    """The bits of an immediate as a type."""
    if number.float_bits and type.bits != number.float_bits:
        if number.float_bits == 64 and type.bits == 32:
            double = np.array([number.value], np.uint64).view(np.float64)
            return int(double.astype(np.float32).view(np.uint32)[0])
        raise Fault("a float immediate of another width")
    return number.value & ((1 << max(type.bits, 8)) - 1)


def generic(place: Place) -> int:
    """An address within its own space; global memory's is the generic one."""
    return place.address


def size_of(v: Variable) -> int:
    """A variable's bytes."""
    return max(TYPES[v.type].bits // 8, 1) * v.vector * v.count
