"""Operands as readers and writers: names resolved through nested scopes, immediates, special registers, vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from tessera.core.errors import Location, ParseError, TesseraError, UnsupportedOpError
from tessera.interp.target.ptx.machine.call_stack import InlinedFunction
from tessera.interp.target.ptx.machine.fault import PtxFault
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import LaneStep, PtxMachine, PtxProgram
from tessera.interp.target.ptx.machine.special_registers import SPECIAL
from tessera.interp.target.ptx.text.syntax import (
    BITS,
    TYPES,
    AddressOperand,
    ImmediateOperand,
    NameOperand,
    PtxFunction,
    PtxInstruction,
    PtxOperand,
    PtxType,
    VectorOperand,
    bits_to_values,
    values_to_bits,
)

Reader = Callable[[PtxMachine, LaneSet], np.ndarray]
Writer = Callable[[PtxMachine, LaneSet, np.ndarray], None]
_CLOCKS = {"%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi"}


@dataclass(frozen=True)
class PtxVariableAddress:
    """A variable: its space and its address there."""

    space: str
    address: int


@dataclass(frozen=True)
class PtxFunctionAddress:
    """A function whose address was taken, as a number."""

    name: str
    address: int


class BranchTarget(int):
    """A label, by its number."""


def is_register(found: Any) -> TypeGuard[int]:
    """Whether what a name stands for is a register, by its number."""
    return isinstance(found, int) and not isinstance(found, BranchTarget)


@dataclass
class NameScope:
    """The names of one pair of braces, and those around it."""

    outer: NameScope | None
    own: dict[str, Any] = field(default_factory=dict)
    end: int = -1  # the label that `ret` goes to in an inlined function
    instance: InlinedFunction | None = None  # that function

    def find(self, name: str) -> Any:
        """What a name stands for here, or None."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.own:
                return scope.own[name]
            scope = scope.outer
        return None


class OperandDecoder:
    """Turns operands into functions of a machine and its lanes."""

    def __init__(self, world: dict[str, Any], shared: int) -> None:
        self.world = NameScope(None, world)
        self.names = self.world
        self.program = PtxProgram(shared=shared)
        self.labels: list[int] = []

    def unsupported(self, inst: PtxInstruction) -> TesseraError:
        """The error of an instruction this interpreter does not know."""
        return UnsupportedOpError(f"the interpreter has no {inst.name}", location=inst.location)

    def resolve(self, name: str, location: Location | None = None) -> Any:
        """What a name stands for: a register's index, a label's, a place or a function."""
        found = self.names.find(name)
        if found is None:
            raise ParseError(f"unknown name {name}", location=location)
        return found

    def reads_predicate(self, operand: PtxOperand) -> bool:
        """Whether an operand is a predicate register."""
        found = self.names.find(operand.text) if isinstance(operand, NameOperand) else None
        return is_register(found) and self.program.register_widths[found] == 1

    def registers(self, operand: PtxOperand) -> list[int]:
        """The registers that an operand names."""
        found = [self.names.find(p.text) for p in vector_parts(operand) if isinstance(p, NameOperand)]
        return [k for k in found if is_register(k)]

    def register(self, name: str, bits: int) -> int:
        """A new register of so many bits, or the one a name already has at the outermost level."""
        if name not in self.world.own:
            self.world.own[name] = len(self.program.register_widths)
            self.program.register_widths.append(bits)
            self.program.names.append(name)
        return self.world.own[name]

    def reader(self, operand: PtxOperand, type: PtxType) -> Reader:
        """What reads an operand as a type: arrays that broadcast to the shape of the lanes."""
        if isinstance(operand, ImmediateOperand):
            return constant_reader(
                bits_to_values(np.array([[encode_immediate(operand, type)]], BITS[max(type.bits, 8)]), type)
            )
        if isinstance(operand, VectorOperand):
            return self._packed(operand, type)
        if isinstance(operand, AddressOperand):
            place = self.resolve(str(operand.base))
            address = np.array([[place.address + operand.offset]], np.uint64).astype(BITS[type.bits])
            return stack_relative_reader(address) if place.space == "local" else constant_reader(address)
        if operand.text in _CLOCKS:
            return lambda m, lanes: _read_clock(m, type)
        if operand.text in SPECIAL and self.names.find(operand.text) is None:
            return lambda m, lanes: lanes.view(m.special[operand.text]).astype(type.dtype)
        if operand.text == "WARP_SZ":
            return constant_reader(np.array([[32]], type.dtype))
        found = self.resolve(operand.text)
        if isinstance(found, PtxVariableAddress | PtxFunctionAddress):
            bits = np.array([[found.address]], np.uint64).astype(BITS[type.bits]).view(type.dtype)
            return (
                stack_relative_reader(bits)
                if isinstance(found, PtxVariableAddress) and found.space == "local"
                else constant_reader(bits)
            )
        if not is_register(found):
            raise PtxFault(f"{operand.text} is no register", ParseError)
        if operand.negated:
            return lambda m, lanes: bits_to_values(m.read(found, lanes), type) ^ True
        return lambda m, lanes: bits_to_values(m.read(found, lanes), type)

    def _packed(self, group: VectorOperand, type: PtxType) -> Reader:
        part = TYPES[f"b{type.bits // len(group.parts)}"]
        readers = [self.reader(p, part) for p in group.parts]

        def read(m: PtxMachine, lanes: LaneSet) -> np.ndarray:
            whole = np.stack(np.broadcast_arrays(*(r(m, lanes) for r in readers)), axis=-1)
            return whole.view(BITS[type.bits])[..., 0].view(type.dtype)

        return read

    def writer(self, operand: PtxOperand, type: PtxType) -> Writer:
        """What writes numbers of a type to an operand."""
        if isinstance(operand, VectorOperand) and not operand.pair:
            return self._unpack(operand, type)
        if not isinstance(operand, NameOperand):
            raise PtxFault("a result that is no register", ParseError)
        if operand.text == "_":
            return lambda m, lanes, value: None
        index = self.resolve(operand.text)
        if not is_register(index):
            raise PtxFault(f"{operand.text} is no register", ParseError)
        width = self.program.register_widths[index]
        return lambda m, lanes, value: m.write(index, lanes, values_to_bits(value, type, width))

    def _unpack(self, group: VectorOperand, type: PtxType) -> Writer:
        part = TYPES[f"b{type.bits // len(group.parts)}"]
        writers = [self.writer(p, part) for p in group.parts]

        def write(m: PtxMachine, lanes: LaneSet, value: np.ndarray) -> None:
            whole = np.ascontiguousarray(value)[..., None].view(part.dtype)
            for k, writer in enumerate(writers):
                writer(m, lanes, whole[..., k])

        return write


def function_addresses(world: dict[str, Any]) -> dict[str, int]:
    """The number that stands in registers for each function that can be called."""
    bodies = [f.name for f in world.values() if isinstance(f, PtxFunction) and f.body is not None and not f.entry]
    return {name: 4096 * (1 + k) for k, name in enumerate(bodies)}


def make_elementwise_step(
    d: OperandDecoder, inst: PtxInstruction, function: Callable[..., Any], out: PtxType, *types: PtxType
) -> LaneStep:
    """A step that applies a function of arrays to the sources and writes the first operand."""
    write = d.writer(inst.operands[0], out)
    if len(inst.operands) != len(types) + 1:
        raise d.unsupported(inst)
    readers = [d.reader(o, t) for o, t in zip(inst.operands[1:], types, strict=True)]
    return lambda m, lanes: write(m, lanes, function(*(r(m, lanes) for r in readers)))


def make_bit_moving_step(d: OperandDecoder, inst: PtxInstruction, plain: LaneStep) -> LaneStep:
    """A step that moves bits which may not have been written: results are then unknown too, and a fault where used.

    Compilers carry values along paths that do not need them, halves of registers that nobody reads, and bits beside a
    field that is set. A result is known where a source is.
    """
    into, sources = d.registers(inst.operands[0]), [k for o in inst.operands[1:] for k in d.registers(o)]
    partly = len(sources) < sum(len(vector_parts(o)) for o in inst.operands[1:])  # what is no register is always known
    if not sources:
        return plain

    def move(m: PtxMachine, lanes: LaneSet) -> None:
        if not m.debug:
            plain(m, lanes)
            return
        known = np.logical_or.reduce(np.broadcast_arrays(*(m.known(k, lanes) | partly for k in sources)))
        m.allow_uninitialised = True
        plain(m, lanes)
        m.allow_uninitialised = False
        for k in into:
            m.set_known(k, lanes, known)

    return move


def split_pair(operand: PtxOperand) -> tuple[PtxOperand, PtxOperand]:
    """The two results of `a|b`; the second is a sink where only one is written."""
    if isinstance(operand, VectorOperand) and operand.pair:
        return operand.parts[0], operand.parts[1]
    return operand, NameOperand("_")


def vector_parts(operand: PtxOperand) -> tuple[PtxOperand, ...]:
    """The elements of `{a, b}`, or the operand alone."""
    return operand.parts if isinstance(operand, VectorOperand) and not operand.pair else (operand,)


def constant_reader(value: np.ndarray) -> Reader:
    """A reader of one value."""
    return lambda m, lanes: value


def stack_relative_reader(address: np.ndarray) -> Reader:
    """A reader of an address in local memory, which begins elsewhere in each call of a function by itself."""

    def read(m: PtxMachine, lanes: LaneSet) -> np.ndarray:
        return address if m.stack is None else address + m.stack.find_base(lanes).astype(address.dtype)

    return read


def encode_immediate(number: ImmediateOperand, type: PtxType) -> int:
    """The bits of an immediate as a type."""
    if number.float_bits and type.bits != number.float_bits:
        if number.float_bits == 64 and type.bits == 32:
            double = np.array([number.value], np.uint64).view(np.float64)
            return int(double.astype(np.float32).view(np.uint32)[0])
        raise PtxFault("a float immediate of another width", ParseError)
    return number.value & ((1 << max(type.bits, 8)) - 1)


def _read_clock(m: PtxMachine, type: PtxType) -> np.ndarray:
    m.clock += 16
    return np.array([[m.clock]], type.dtype)
