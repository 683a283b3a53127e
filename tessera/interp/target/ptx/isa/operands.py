"""Operands as readers and writers: names resolved through nested scopes, immediates, special registers, vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from tessera.core.errors import Location, ParseError, TesseraError, UnsupportedOpError
from tessera.interp.target.ptx.machine.call_stack import InlinedFunction
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import PtxFault
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
    """A variable: its state space and its address in it."""

    space: str
    address: int


@dataclass(frozen=True)
class PtxFunctionAddress:
    """A function whose address is taken, as a number."""

    name: str
    address: int


class BranchTarget(int):
    """A label, by its number."""


def is_register(result: Any) -> TypeGuard[int]:
    """Whether a name's meaning is a register number."""
    return isinstance(result, int) and not isinstance(result, BranchTarget)


@dataclass
class NameScope:
    """The names of one scope, and the scope around it."""

    outer: NameScope | None
    names: dict[str, Any] = field(default_factory=dict)
    end: int = -1  # the label that `ret` branches to in an inlined function
    instance: InlinedFunction | None = None  # the inlined function

    def find(self, name: str) -> Any:
        """The meaning of a name, or None."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None


class OperandDecoder:
    """Makes readers and writers of operands: functions of a machine and its lanes."""

    def __init__(self, symbols: dict[str, Any], shared: int) -> None:
        self.module_scope = NameScope(None, symbols)
        self.names = self.module_scope
        self.program = PtxProgram(shared=shared)
        self.labels: list[int] = []

    def unsupported(self, inst: PtxInstruction) -> TesseraError:
        """The error of an unsupported instruction."""
        return UnsupportedOpError(f"the PTX emulator has no {inst.name}", location=inst.location)

    def resolve(self, name: str, location: Location | None = None) -> Any:
        """The meaning of a name: a register number, a label, a variable or a function."""
        result = self.names.find(name)
        if result is None:
            raise ParseError(f"unknown name {name}", location=location)
        return result

    def is_predicate(self, operand: PtxOperand) -> bool:
        """Whether an operand is a predicate register."""
        result = self.names.find(operand.text) if isinstance(operand, NameOperand) else None
        return is_register(result) and self.program.register_widths[result] == 1

    def registers(self, operand: PtxOperand) -> list[int]:
        """The registers of an operand."""
        result = [self.names.find(p.text) for p in get_vector_parts(operand) if isinstance(p, NameOperand)]
        return [k for k in result if is_register(k)]

    def register(self, name: str, bits: int) -> int:
        """A register at module scope, made on first use."""
        if name not in self.module_scope.names:
            self.module_scope.names[name] = len(self.program.register_widths)
            self.program.register_widths.append(bits)
            self.program.names.append(name)
        return self.module_scope.names[name]

    def reader(self, operand: PtxOperand, type: PtxType) -> Reader:
        """The reader of an operand as a type: it gives arrays that broadcast to the shape of the lanes."""
        if isinstance(operand, ImmediateOperand):
            return make_constant_reader(
                bits_to_values(np.array([[encode_immediate(operand, type)]], BITS[max(type.bits, 8)]), type)
            )
        if isinstance(operand, VectorOperand):
            return self._make_packed_reader(operand, type)
        if isinstance(operand, AddressOperand):
            variable = self.resolve(str(operand.base))
            address = np.array([[variable.address + operand.offset]], np.uint64).astype(BITS[type.bits])
            return make_stack_relative_reader(address) if variable.space == "local" else make_constant_reader(address)
        if operand.text in _CLOCKS:
            return lambda m, lanes: _read_clock(m, type)
        if operand.text in SPECIAL and self.names.find(operand.text) is None:
            return lambda m, lanes: lanes.view(m.special[operand.text]).astype(type.dtype)
        if operand.text == "WARP_SZ":
            return make_constant_reader(np.array([[32]], type.dtype))
        result = self.resolve(operand.text)
        if isinstance(result, PtxVariableAddress | PtxFunctionAddress):
            bits = np.array([[result.address]], np.uint64).astype(BITS[type.bits]).view(type.dtype)
            return (
                make_stack_relative_reader(bits)
                if isinstance(result, PtxVariableAddress) and result.space == "local"
                else make_constant_reader(bits)
            )
        if not is_register(result):
            raise PtxFault(f"{operand.text} is not a register", ParseError)
        if operand.negated:
            return lambda m, lanes: bits_to_values(m.read(result, lanes), type) ^ True
        return lambda m, lanes: bits_to_values(m.read(result, lanes), type)

    def _make_packed_reader(self, group: VectorOperand, type: PtxType) -> Reader:
        part = TYPES[f"b{type.bits // len(group.parts)}"]
        readers = [self.reader(p, part) for p in group.parts]

        def read(m: PtxMachine, lanes: LaneSet) -> np.ndarray:
            whole = np.stack(np.broadcast_arrays(*(r(m, lanes) for r in readers)), axis=-1)
            return whole.view(BITS[type.bits])[..., 0].view(type.dtype)

        return read

    def writer(self, operand: PtxOperand, type: PtxType) -> Writer:
        """The writer of values of a type to an operand."""
        if isinstance(operand, VectorOperand) and not operand.pair:
            return self._make_unpacking_writer(operand, type)
        if not isinstance(operand, NameOperand):
            raise PtxFault("the result operand is not a register", ParseError)
        if operand.text == "_":
            return lambda m, lanes, value: None
        index = self.resolve(operand.text)
        if not is_register(index):
            raise PtxFault(f"{operand.text} is not a register", ParseError)
        width = self.program.register_widths[index]
        return lambda m, lanes, value: m.write(index, lanes, values_to_bits(value, type, width))

    def _make_unpacking_writer(self, group: VectorOperand, type: PtxType) -> Writer:
        part = TYPES[f"b{type.bits // len(group.parts)}"]
        writers = [self.writer(p, part) for p in group.parts]

        def write(m: PtxMachine, lanes: LaneSet, value: np.ndarray) -> None:
            whole = np.ascontiguousarray(value)[..., None].view(part.dtype)
            for k, writer in enumerate(writers):
                writer(m, lanes, whole[..., k])

        return write


def assign_function_addresses(symbols: dict[str, Any]) -> dict[str, int]:
    """The address of each function that can be called."""
    bodies = [f.name for f in symbols.values() if isinstance(f, PtxFunction) and f.body is not None and not f.entry]
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


def make_bit_moving_step(d: OperandDecoder, inst: PtxInstruction, step: LaneStep) -> LaneStep:
    """A step that may move uninitialised bits: the result is then uninitialised, and a fault where it is used.

    Compilers carry values along paths that do not use them, unused halves of registers, and bits beside a field that is
    set. A result is initialised if a source is.
    """
    destinations, sources = d.registers(inst.operands[0]), [k for o in inst.operands[1:] for k in d.registers(o)]
    # operands other than registers are initialised
    partly_constant = len(sources) < sum(len(get_vector_parts(o)) for o in inst.operands[1:])
    if not sources:
        return step

    def move(m: PtxMachine, lanes: LaneSet) -> None:
        if not m.debug:
            step(m, lanes)
            return
        known = np.logical_or.reduce(np.broadcast_arrays(*(m.known(k, lanes) | partly_constant for k in sources)))
        m.allow_uninitialised = True
        step(m, lanes)
        m.allow_uninitialised = False
        for k in destinations:
            m.set_known(k, lanes, known)

    return move


def split_pair(operand: PtxOperand) -> tuple[PtxOperand, PtxOperand]:
    """The two results of `a|b`; the second is `_` if there is only one."""
    if isinstance(operand, VectorOperand) and operand.pair:
        return operand.parts[0], operand.parts[1]
    return operand, NameOperand("_")


def get_vector_parts(operand: PtxOperand) -> tuple[PtxOperand, ...]:
    """The elements of `{a, b}`, or the operand itself."""
    return operand.parts if isinstance(operand, VectorOperand) and not operand.pair else (operand,)


def make_constant_reader(value: np.ndarray) -> Reader:
    """A reader of a constant."""
    return lambda m, lanes: value


def make_stack_relative_reader(address: np.ndarray) -> Reader:
    """A reader of an address in local memory, relative to the frame of a recursive call."""

    def read(m: PtxMachine, lanes: LaneSet) -> np.ndarray:
        return address if m.stack is None else address + m.stack.find_base(lanes).astype(address.dtype)

    return read


def encode_immediate(number: ImmediateOperand, type: PtxType) -> int:
    """The bits of an immediate as a type."""
    if number.float_bits and type.bits != number.float_bits:
        if number.float_bits == 64 and type.bits == 32:
            double = np.array([number.value], np.uint64).view(np.float64)
            return int(double.astype(np.float32).view(np.uint32)[0])
        raise PtxFault("the float immediate has the wrong width", ParseError)
    return number.value & ((1 << max(type.bits, 8)) - 1)


def _read_clock(m: PtxMachine, type: PtxType) -> np.ndarray:
    m.clock += 16
    return np.array([[m.clock]], type.dtype)
