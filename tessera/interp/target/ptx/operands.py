"""Operands as readers and writers: names resolved through nested scopes, immediates, special registers, groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from tessera.errors import Location, ParseError, TesseraError, UnsupportedOpError
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Machine, Program, Step
from tessera.interp.target.ptx.special import SPECIAL
from tessera.interp.target.ptx.stack import Instance
from tessera.interp.target.ptx.syntax import Address, Function, Group, Instruction, Name, Number, Operand
from tessera.interp.target.ptx.types import BITS, TYPES, Type, bits_of, values

Reader = Callable[[Machine, Lanes], np.ndarray]
Writer = Callable[[Machine, Lanes, np.ndarray], None]
_CLOCKS = {"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"}


@dataclass(frozen=True)
class Place:
    """A variable: its space and its address there."""

    space: str
    address: int


@dataclass(frozen=True)
class Code:
    """A function whose address was taken, as a number."""

    name: str
    address: int


class Jump(int):
    """A label, by its number."""


def is_register(found: Any) -> TypeGuard[int]:
    """Whether what a name stands for is a register, by its number."""
    return isinstance(found, int) and not isinstance(found, Jump)


@dataclass
class Names:
    """The names of one pair of braces, and those around it."""

    outer: Names | None
    own: dict[str, Any] = field(default_factory=dict)
    end: int = -1  # the label that `ret` goes to in an inlined function
    instance: Instance | None = None  # that function

    def find(self, name: str) -> Any:
        """What a name stands for here, or None."""
        scope: Names | None = self
        while scope is not None:
            if name in scope.own:
                return scope.own[name]
            scope = scope.outer
        return None


class Operands:
    """Turns operands into functions of a machine and its lanes."""

    def __init__(self, world: dict[str, Any], shared: int) -> None:
        self.world = Names(None, world)
        self.names = self.world
        self.program = Program(shared=shared)
        self.labels: list[int] = []

    def unsupported(self, inst: Instruction) -> TesseraError:
        """The error of an instruction this interpreter does not know."""
        return UnsupportedOpError(f"the interpreter has no {inst.name}", location=inst.location)

    def resolve(self, name: str, location: Location | None = None) -> Any:
        """What a name stands for: a register's index, a label's, a place or a function."""
        found = self.names.find(name)
        if found is None:
            raise ParseError(f"unknown name {name}", location=location)
        return found

    def reads_predicate(self, operand: Operand) -> bool:
        """Whether an operand is a predicate register."""
        found = self.names.find(operand.text) if isinstance(operand, Name) else None
        return is_register(found) and self.program.widths[found] == 1

    def registers(self, operand: Operand) -> list[int]:
        """The registers that an operand names."""
        found = [self.names.find(p.text) for p in parts_of(operand) if isinstance(p, Name)]
        return [k for k in found if is_register(k)]

    def register(self, name: str, bits: int) -> int:
        """A new register of so many bits, or the one a name already has at the outermost level."""
        if name not in self.world.own:
            self.world.own[name] = len(self.program.widths)
            self.program.widths.append(bits)
            self.program.names.append(name)
        return self.world.own[name]

    def reader(self, operand: Operand, type: Type) -> Reader:
        """What reads an operand as a type: arrays that broadcast to the shape of the lanes."""
        if isinstance(operand, Number):
            return constant(values(np.array([[immediate(operand, type)]], BITS[max(type.bits, 8)]), type))
        if isinstance(operand, Group):
            return self._packed(operand, type)
        if isinstance(operand, Address):
            place = self.resolve(str(operand.base))
            address = np.array([[place.address + operand.offset]], np.uint64).astype(BITS[type.bits])
            return on_stack(address) if place.space == "local" else constant(address)
        if operand.text in _CLOCKS:
            return lambda m, lanes: _tick(m, type)
        if operand.text in SPECIAL and self.names.find(operand.text) is None:
            return lambda m, lanes: lanes.view(m.special[operand.text]).astype(type.dtype)
        if operand.text == "WARP_SZ":
            return constant(np.array([[32]], type.dtype))
        found = self.resolve(operand.text)
        if isinstance(found, Place | Code):
            bits = np.array([[found.address]], np.uint64).astype(BITS[type.bits]).view(type.dtype)
            return on_stack(bits) if isinstance(found, Place) and found.space == "local" else constant(bits)
        if not is_register(found):
            raise Fault(f"{operand.text} is no register", ParseError)
        if operand.negated:
            return lambda m, lanes: values(m.read(found, lanes), type) ^ True
        return lambda m, lanes: values(m.read(found, lanes), type)

    def _packed(self, group: Group, type: Type) -> Reader:
        part = TYPES[f"b{type.bits // len(group.parts)}"]
        readers = [self.reader(p, part) for p in group.parts]

        def read(m: Machine, lanes: Lanes) -> np.ndarray:
            whole = np.stack(np.broadcast_arrays(*(r(m, lanes) for r in readers)), axis=-1)
            return whole.view(BITS[type.bits])[..., 0].view(type.dtype)

        return read

    def writer(self, operand: Operand, type: Type) -> Writer:
        """What writes numbers of a type to an operand."""
        if isinstance(operand, Group) and not operand.pair:
            return self._unpack(operand, type)
        if not isinstance(operand, Name):
            raise Fault("a result that is no register", ParseError)
        if operand.text == "_":
            return lambda m, lanes, value: None
        index = self.resolve(operand.text)
        if not is_register(index):
            raise Fault(f"{operand.text} is no register", ParseError)
        width = self.program.widths[index]
        return lambda m, lanes, value: m.write(index, lanes, bits_of(value, type, width))

    def _unpack(self, group: Group, type: Type) -> Writer:
        part = TYPES[f"b{type.bits // len(group.parts)}"]
        writers = [self.writer(p, part) for p in group.parts]

        def write(m: Machine, lanes: Lanes, value: np.ndarray) -> None:
            whole = np.ascontiguousarray(value)[..., None].view(part.dtype)
            for k, writer in enumerate(writers):
                writer(m, lanes, whole[..., k])

        return write


def function_addresses(world: dict[str, Any]) -> dict[str, int]:
    """The number that stands in registers for each function that can be called."""
    bodies = [f.name for f in world.values() if isinstance(f, Function) and f.body is not None and not f.entry]
    return {name: 4096 * (1 + k) for k, name in enumerate(bodies)}


def elementwise(d: Operands, inst: Instruction, function: Callable[..., Any], out: Type, *types: Type) -> Step:
    """A step that applies a function of arrays to the sources and writes the first operand."""
    write = d.writer(inst.operands[0], out)
    if len(inst.operands) != len(types) + 1:
        raise d.unsupported(inst)
    readers = [d.reader(o, t) for o, t in zip(inst.operands[1:], types, strict=True)]
    return lambda m, lanes: write(m, lanes, function(*(r(m, lanes) for r in readers)))


def tolerant(d: Operands, inst: Instruction, plain: Step) -> Step:
    """A step that moves bits which may not have been written: results are then unknown too, and a fault where used.

    Compilers carry values along paths that do not need them, halves of registers that nobody reads, and bits beside a
    field that is set. A result is known where a source is.
    """
    into, sources = d.registers(inst.operands[0]), [k for o in inst.operands[1:] for k in d.registers(o)]
    partly = len(sources) < sum(len(parts_of(o)) for o in inst.operands[1:])  # what is no register is always known
    if not sources:
        return plain

    def move(m: Machine, lanes: Lanes) -> None:
        if not m.debug:
            plain(m, lanes)
            return
        known = np.logical_or.reduce(np.broadcast_arrays(*(m.known(k, lanes) | partly for k in sources)))
        m.tolerant = True
        plain(m, lanes)
        m.tolerant = False
        for k in into:
            m.set_known(k, lanes, known)

    return move


def pair_of(operand: Operand) -> tuple[Operand, Operand]:
    """The two results of `a|b`; the second is a sink where only one is written."""
    if isinstance(operand, Group) and operand.pair:
        return operand.parts[0], operand.parts[1]
    return operand, Name("_")


def parts_of(operand: Operand) -> tuple[Operand, ...]:
    """The elements of `{a, b}`, or the operand alone."""
    return operand.parts if isinstance(operand, Group) and not operand.pair else (operand,)


def constant(value: np.ndarray) -> Reader:
    """A reader of one value."""
    return lambda m, lanes: value


def on_stack(address: np.ndarray) -> Reader:
    """A reader of an address in local memory, which begins elsewhere in each call of a function by itself."""

    def read(m: Machine, lanes: Lanes) -> np.ndarray:
        return address if m.stack is None else address + m.stack.base_of(lanes).astype(address.dtype)

    return read


def immediate(number: Number, type: Type) -> int:
    """The bits of an immediate as a type."""
    if number.float_bits and type.bits != number.float_bits:
        if number.float_bits == 64 and type.bits == 32:
            double = np.array([number.value], np.uint64).view(np.float64)
            return int(double.astype(np.float32).view(np.uint32)[0])
        raise Fault("a float immediate of another width", ParseError)
    return number.value & ((1 << max(type.bits, 8)) - 1)


def _tick(m: Machine, type: Type) -> np.ndarray:
    m.clock += 16
    return np.array([[m.clock]], type.dtype)
