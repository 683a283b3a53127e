"""An entry's syntax as a program: scopes resolved, calls inlined, each instruction decoded by its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tessera.errors import ParseError, TesseraError, UnsupportedOpError
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine, Program, Step
from tessera.interp.target.ptx.operands import Code, Jump, Names, Operands, Place, function_addresses
from tessera.interp.target.ptx.stack import Call, Instance
from tessera.interp.target.ptx.syntax import (
    Function,
    Group,
    Instruction,
    Label,
    Name,
    Operand,
    Scope,
    Targets,
    Variable,
    arguments_of,
    called,
)
from tessera.interp.target.ptx.types import TYPES, size_of

RULES: dict[str, Callable[[Decoder, Instruction], Step]] = {}
CONTROL: dict[str, Callable[[Decoder, Instruction, Line], None]] = {}
EXTERNAL: dict[str, Callable[[Decoder, Instruction], Step]] = {}  # functions of the system, by name
Control = Callable[[Machine, Lanes, int], None]
GUARDED = {"bra", "exit", "ret", "brx", "trap"}  # control that reads its own guard


def rule(*names: str, table: dict[str, Any] = RULES) -> Callable[[Any], Any]:
    """Register what decodes instructions whose opcode begins with one of these words, the longest match first."""

    def keep(function: Any) -> Any:
        table.update(dict.fromkeys(names, function))
        return function

    return keep


def modifiers(d: Operands, inst: Instruction, *allowed: str, types: int = 1, skip: int = 1) -> list[str]:
    """The words between opcode and types; each must be known, so that no modifier is passed over in silence."""
    words = list(inst.op[skip : len(inst.op) - types])
    if not set(words) <= set(allowed):
        raise d.unsupported(inst)
    return words


@dataclass(frozen=True)
class _Pending:
    instruction: Instruction
    names: Names
    control: Control | None = None


class Decoder(Operands):
    """Decodes one entry; `world` maps module-level names to places and functions."""

    def __init__(self, world: dict[str, Any], shared: int) -> None:
        super().__init__(world, shared)
        self.code: list[_Pending] = []
        self.active: dict[str, Instance] = {}  # functions whose bodies are being put in place of calls
        self.grouped = False  # whether a name stands for several registers

    def entry(self, function: Function, params: dict[str, Place]) -> Program:
        """The program of an entry whose parameters lie at these places."""
        assert function.body is not None
        exit = Instruction(("exit",), (), None, function.location)
        self._scope(function.body, Names(self.world, dict(params)))
        self.code.append(_Pending(exit, self.world))
        self.program.lines = [self._line(p) for p in self.code]
        ends = {i + 1 for i, line in enumerate(self.program.lines) if line.control is not None}
        joins = {i for i, line in enumerate(self.program.lines) if line.team}
        self.program.leaders = {*self.labels, *ends, *joins}
        return self.program

    def _scope(self, scope: Scope, names: Names) -> None:
        for item in scope.items:
            if isinstance(item, Label):
                names.own[item.name] = Jump(self.label())
            elif isinstance(item, Targets):
                names.own[item.name] = item
        for item in scope.items:
            if isinstance(item, Variable):
                self._declare(item, names)
            elif isinstance(item, Label):
                self.labels[names.own[item.name]] = len(self.code)
            elif isinstance(item, Scope):
                self._scope(item, Names(names, end=names.end, instance=names.instance))
            elif isinstance(item, Instruction):
                self._instruction(item, names)

    def _instruction(self, inst: Instruction, names: Names) -> None:
        if inst.guard and (inst.op[0] == "call" or (inst.op[0] in CONTROL and inst.op[0] not in GUARDED)):
            self._skip_unless(inst, inst.guard, names)
        elif inst.op[0] == "call" and not self._is_external(inst, names):
            self._call(inst, names)
        else:
            self.code.append(_Pending(inst, names))

    def _skip_unless(self, inst: Instruction, guard: Name, names: Names) -> None:
        """A guard on what synchronises is a branch around it: lanes that do not take part must not be waited for."""
        after = self.label()
        names.own[f"$after{after}"] = Jump(after)
        opposite = replace(guard, negated=not guard.negated)
        skip = Instruction(("bra",), (Name(f"$after{after}"),), opposite, inst.location, inst.source)
        self.code.append(_Pending(skip, names))
        self._instruction(replace(inst, guard=None), names)
        self.labels[after] = len(self.code)

    def label(self) -> int:
        """A new label."""
        self.labels.append(-1)
        return len(self.labels) - 1

    def _declare(self, v: Variable, names: Names) -> None:
        if v.space == "reg":
            for name in [f"{v.name}{i}" for i in range(v.many)] if v.many else [v.name]:
                self._registers(name, v, names)
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

    def _registers(self, name: str, v: Variable, names: Names) -> None:
        """A register; a vector of them, and one of 128 bits, is a group of several."""
        bits, parts = TYPES[v.type].bits, [name]
        if v.vector > 1:
            parts = [f"{name}.{c}" for c in "xyzw"[: v.vector]]
        if bits > 64:
            parts, bits = [f"{p}.{half}" for p in parts for half in ("low", "high")], 64
        for part in parts:
            names.own[part] = len(self.program.widths)
            self.program.widths.append(bits)
            self.program.names.append(part)
        if len(parts) > 1:
            names.own[name], self.grouped = Group(tuple(map(Name, parts))), True

    def _spread(self, operand: Operand) -> Operand:
        """An operand with the names of groups of registers replaced by what they stand for."""
        if isinstance(operand, Name):
            found = self.names.find(operand.text)
            return found if isinstance(found, Group) else operand
        if not isinstance(operand, Group):
            return operand
        inner = [self._spread(p) for p in operand.parts]
        flat = [p for i in inner for p in (i.parts if isinstance(i, Group) and not operand.pair else (i,))]
        return replace(operand, parts=tuple(flat))

    def _is_external(self, inst: Instruction, names: Names) -> bool:
        found = names.find(called(inst).text)
        return isinstance(found, Function) and found.body is None

    def _call(self, inst: Instruction, names: Names) -> None:
        found, end = names.find(called(inst).text), self.label()
        if isinstance(found, Function):
            self._enter(inst, found, names, end)
        else:
            self._indirect(inst, names, end)
        self.labels[end] = len(self.code)

    def _indirect(self, inst: Instruction, names: Names, end: int) -> None:
        """A call through a register: every function of that shape is inlined, and each lane goes to its own."""
        many = len(arguments_of(inst))
        shaped = [f for f in self._functions() if len(f.results) + len(f.params) == many]
        starts = {self.address_of(f.name): self.label() for f in shaped}
        self.code.append(_Pending(inst, names, self._dispatch(names, inst, starts)))
        for f, start in zip(shaped, starts.values(), strict=True):
            self.labels[start] = len(self.code)
            self._enter(inst, f, names, end)
            self.code.append(_Pending(Instruction(("ret",), (), None, inst.location), Names(names, end=end)))

    def _dispatch(
        self, names: Names, inst: Instruction, starts: dict[int, int]
    ) -> Callable[[Machine, Lanes, int], None]:
        before, self.names = self.names, names
        try:
            read, self.names = self.reader(called(inst), TYPES["u64"]), before
        except TesseraError as error:
            raise error.at(inst.location) from None

        def control(m: Machine, lanes: Lanes, pc: int) -> None:
            target, left = read(m, lanes), lanes.count
            for address, label in starts.items():
                some = lanes.select(target == address)
                left -= some.count
                m.push(self.labels[label], some)
            if left:
                raise Fault("a call of an address that is no function of this shape")

        return control

    def _functions(self) -> list[Function]:
        return [f for f in self.world.own.values() if isinstance(f, Function) and f.body is not None and not f.entry]

    def address_of(self, name: str) -> int:
        """The number that stands for a function in registers."""
        return function_addresses(self.world.own)[name]

    def resolve(self, name: str, location: Any = None) -> Any:
        """As for operands; a function's name is its address."""
        found = super().resolve(name, location)
        return Code(name, self.address_of(name)) if isinstance(found, Function) else found

    def _enter(self, inst: Instruction, function: Function, names: Names, end: int) -> None:
        """A call: the function's body in its place, or, within that body, a call proper."""
        formal = [*function.results, *function.params]
        given = arguments_of(inst)
        if len(given) != len(formal):
            says = f"{function.name} has {len(formal)} results and parameters"
            raise ParseError(says, received=f"{len(given)}", location=inst.location)
        actual = [self._actual(inst, v, o, names) for v, o in zip(formal, given, strict=True)]
        results, params = actual[: len(function.results)], actual[len(function.results) :]
        if function.name in self.active:
            self._recur(inst, self.active[function.name], results, params)
            return
        instance = Instance(function, self.label(), end, results, params, len(self.program.widths))
        inner = Names(self.world, {v.name: a for v, a in zip(formal, actual, strict=True)}, end, instance)
        self.active[function.name], self.labels[instance.start] = instance, len(self.code)
        assert function.body is not None
        self._scope(function.body, inner)
        instance.last = len(self.program.widths)
        del self.active[function.name]

    def _recur(self, inst: Instruction, instance: Instance, results: list[Any], params: list[Any]) -> None:
        function = instance.function
        if any(v.space != "param" for v in (*function.results, *function.params)):
            raise UnsupportedOpError(f"recursive call of {function.name} with registers", location=inst.location)
        self.program.stack = True
        sizes = [size_of(v) for v in function.results], [size_of(v) for v in function.params]
        call = Call(instance, results, params, sizes)

        def control(m: Machine, lanes: Lanes, pc: int) -> None:
            m.stack.enter(m, lanes, call, pc + 1)
            m.push(self.labels[instance.start], lanes)

        self.code.append(_Pending(inst, self.world, control))

    def _actual(self, inst: Instruction, variable: Variable, operand: Operand, names: Names) -> Any:
        found = names.find(operand.text) if isinstance(operand, Name) else None
        if found is None or isinstance(found, Place) != (variable.space == "param"):
            raise UnsupportedOpError(f"argument {variable.name} of {inst.name}", location=inst.location)
        return found

    def _line(self, pending: _Pending) -> Line:
        inst, self.names = pending.instruction, pending.names
        if self.grouped:
            inst = replace(inst, operands=tuple(map(self._spread, inst.operands)))
        line = Line(inst, control=pending.control)
        try:
            if pending.control is None:
                self._decode(inst, line)
        except (KeyError, IndexError, AttributeError, ValueError, AssertionError) as error:
            raise self.unsupported(inst) from error
        except Fault as fault:
            raise fault.kind(f"{inst.name}: {fault.message}", location=inst.location) from None
        except TesseraError as error:
            raise error.at(inst.location) from None
        return line

    def _decode(self, inst: Instruction, line: Line) -> None:
        if inst.op[0] in CONTROL:
            CONTROL[inst.op[0]](self, inst, line)
        elif inst.op[0] in RULES:
            line.step = self.guarded(inst, RULES[inst.op[0]](self, inst))
        else:
            raise self.unsupported(inst)

    def guarded(self, inst: Instruction, step: Step) -> Step:
        """A step for the lanes alone whose guard is true."""
        if inst.guard is None:
            return step
        guard = self.reader(inst.guard, TYPES["pred"])

        def run(m: Machine, lanes: Lanes) -> None:
            chosen = lanes.select(guard(m, lanes))
            if chosen.count:
                step(m, chosen)

        return run
