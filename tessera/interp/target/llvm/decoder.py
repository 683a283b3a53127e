"""Decoder: names become register numbers, constants become values, instructions become closures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.core.errors import ParseError, TesseraError, UnknownNameError, UnsupportedOpError
from tessera.interp.target.llvm import arithmetic, control_flow, memory_ops, scalar_intrinsics, vector_ops
from tessera.interp.target.llvm.arithmetic import PureFunction
from tessera.interp.target.llvm.control_flow import (
    BlockEdge,
    DecodedBlock,
    DecodedFunction,
    LlvmFrame,
    RegisterStep,
    number_active_lanes,
)
from tessera.interp.target.llvm.lanes import RegisterValue, broadcast_lanes, make_undefined, make_zero, wrap_integers
from tessera.interp.target.llvm.memory import SegmentedMemory, get_memory_format
from tessera.interp.target.llvm.text.syntax import (
    I1,
    BasicBlock,
    ConstantExpression,
    GlobalOperand,
    LlvmAggregate,
    LlvmArray,
    LlvmFloat,
    LlvmFunction,
    LlvmInstruction,
    LlvmOperand,
    LlvmType,
    LlvmVector,
    LocalOperand,
    NumberConstant,
    ParsedModule,
    SequenceConstant,
    Undefined,
    Zero,
)

# Instructions and intrinsics without side effects.


BuildFunction = Callable[[LlvmInstruction], PureFunction]

PURE_INSTRUCTIONS: dict[str, BuildFunction] = {
    **arithmetic.ARITHMETIC_INSTRUCTIONS,
    **arithmetic.CAST_INSTRUCTIONS,
    **vector_ops.VECTOR_INSTRUCTIONS,
    **arithmetic.ADDRESS_INSTRUCTIONS,
}

_IDENTITY_INTRINSICS = "expect expect.with.probability launder.invariant.group strip.invariant.group ssa.copy".split()

PURE_INTRINSICS: dict[str, BuildFunction] = {
    **scalar_intrinsics.FLOAT_INTRINSICS,
    **scalar_intrinsics.INTEGER_INTRINSICS,
    **vector_ops.VECTOR_INTRINSICS,
    **dict.fromkeys((*_IDENTITY_INTRINSICS, "threadlocal.address"), lambda i: lambda x, *rest: x),
    "ptrmask": lambda i: lambda pointer, mask: pointer & mask.astype(np.int64),
    "is.constant": lambda i: lambda x: np.zeros(1, bool),
}


def find_intrinsic(name: str, table: dict) -> object | None:
    """The table entry of an intrinsic such as `llvm.fma.v16f32`, whose name has type suffixes."""
    parts = name.removeprefix("llvm.").split(".")
    for end in range(len(parts), 0, -1):
        if (result := table.get(".".join(parts[:end]))) is not None:
            return result
    return None


def find_pure_function(i: LlvmInstruction) -> PureFunction | None:
    """The function of a call to an intrinsic or the C library, if it has no side effects."""
    if i.word.startswith("llvm."):
        build = find_intrinsic(i.word, PURE_INTRINSICS)
        return build(i) if build is not None else None  # type: ignore[operator]
    return scalar_intrinsics.get_libc_function(i.word, i.type)


# Constants, and the initial bytes of global variables.


GlobalAddresses = Mapping[str, int]


def evaluate_constant(operand: LlvmOperand, addresses: GlobalAddresses) -> RegisterValue:
    """The value of a constant, uniform over lanes."""
    return _EVALUATORS[type(operand)](operand, addresses)


def _evaluate_number(c: NumberConstant, addresses: GlobalAddresses) -> RegisterValue:
    if isinstance(c.type, LlvmFloat):
        return np.array([c.value]).astype(c.type.dtype)
    return wrap_integers([int(c.value)], c.type)


def _evaluate_sequence(c: SequenceConstant, addresses: GlobalAddresses) -> RegisterValue:
    if isinstance(c.type, LlvmAggregate):
        return tuple(evaluate_constant(e, addresses) for e in c.elements)
    return _evaluate_row(c, addresses)[None]


def _evaluate_row(c: SequenceConstant, addresses: GlobalAddresses) -> np.ndarray:
    """The scalars of a vector."""
    scalar = c.elements[0].type
    if not isinstance(scalar, LlvmFloat) and all(isinstance(e, NumberConstant) for e in c.elements):
        return wrap_integers([int(e.value) for e in c.elements], scalar)  # type: ignore[union-attr]
    return np.concatenate([np.asarray(evaluate_constant(e, addresses)) for e in c.elements])


def _evaluate_symbol(c: GlobalOperand, addresses: GlobalAddresses) -> RegisterValue:
    if c.name not in addresses:
        raise UnknownNameError(f"@{c.name} is not a global variable of this module")
    return np.array([addresses[c.name]], np.int64)


def _evaluate_expression(c: ConstantExpression, addresses: GlobalAddresses) -> RegisterValue:
    build = PURE_INSTRUCTIONS.get(c.op)
    if build is None:
        raise UnsupportedOpError(f"the constant expression {c.op} is not supported")
    run = build(LlvmInstruction(c.op, c.type, c.operands, source=c.source))
    return run(*(evaluate_constant(operand, addresses) for operand in c.operands))


_EVALUATORS: dict[type, Callable[[Any, GlobalAddresses], RegisterValue]] = {
    NumberConstant: _evaluate_number,
    SequenceConstant: _evaluate_sequence,
    Zero: lambda c, addresses: make_zero(c.type),
    Undefined: lambda c, addresses: make_undefined(c.type),
    GlobalOperand: _evaluate_symbol,
    ConstantExpression: _evaluate_expression,
}


def build_global_image(type: LlvmType, initial: LlvmOperand, addresses: GlobalAddresses) -> np.ndarray:
    """The initial bytes of a global variable."""
    memory, data = SegmentedMemory(), np.zeros(type.stride, np.uint8)
    if not isinstance(initial, Zero):
        _write_constant(memory, memory.add("variable", data), type, initial, addresses)
    return data


def _write_constant(
    memory: SegmentedMemory, address: int, type: LlvmType, initial: LlvmOperand, addresses: GlobalAddresses
) -> None:
    """Store a constant; an array of scalars is stored as a vector."""
    if isinstance(initial, Zero | Undefined):
        return
    if isinstance(type, LlvmArray) and not isinstance(type.element, LlvmAggregate | LlvmVector) and type.element != I1:
        assert isinstance(initial, SequenceConstant)
        if initial.elements:
            row = _evaluate_row(initial, addresses)[None]
            memory.store(np.array([address]), row, get_memory_format(LlvmVector(type.count, type.element), 1))
    elif isinstance(type, LlvmAggregate):
        assert isinstance(initial, SequenceConstant)
        for (offset, part), element in zip(type.parts, initial.elements, strict=True):
            _write_constant(memory, address + offset, part, element, addresses)
    else:
        memory.store(np.array([address]), np.asarray(evaluate_constant(initial, addresses)), get_memory_format(type, 1))


# Functions: names become register numbers, instructions become closures.


# A function that the text declares and the host defines: it receives the memory and the integers of one lane.
HostFunction = Callable[..., None]


class FunctionDecoder:
    """Decodes one function."""

    def __init__(
        self,
        program: ParsedModule,
        function: LlvmFunction,
        addresses: GlobalAddresses,
        externals: Mapping[str, HostFunction],
    ) -> None:
        self.program = program
        self.externals = externals
        self.function = function
        self.addresses = addresses
        blocks = {block.label: block for block in function.blocks}
        self.blocks = [blocks[label] for label in control_flow.order_blocks(self._check_labels(blocks))]
        self.block_numbers = {block.label: k for k, block in enumerate(self.blocks)}
        self.registers = {p.name: k for k, p in enumerate(function.parameters)}
        self.defining_block: dict[int, int] = {}  # the block that defines a register
        self.values: list[RegisterValue | None] = [None] * len(self.registers)
        for k, block in enumerate(self.blocks):
            self._assign_registers(k, block)

    def _check_labels(self, blocks: dict[str, BasicBlock]) -> LlvmFunction:
        for block in self.function.blocks:
            for label in block.body[-1].labels:
                if label not in blocks:
                    raise ParseError(f"there is no basic block %{label}", location=block.body[-1].where)
        return self.function

    def _assign_registers(self, k: int, block: BasicBlock) -> None:
        for i in block.body:
            if i.result:
                if i.result in self.registers:
                    raise ParseError(f"%{i.result} is defined twice", location=i.where)
                self.registers[i.result] = len(self.values)
                # A phi is written on the edges into its block, so its value comes from outside the block.
                self.defining_block[len(self.values)] = -1 if i.op == "phi" else k
                self.values.append(None)

    def decode(self) -> DecodedFunction:
        """The decoded function."""
        blocks = [self._decode_block(k, block) for k, block in enumerate(self.blocks)]
        outside = {register for block in blocks for register in block.reads}
        done = (replace(b, writes=tuple(r for r in b.writes if r in outside)) for b in blocks)
        return DecodedFunction(self.function, tuple(done), tuple(self.values))

    def _decode_block(self, k: int, block: BasicBlock) -> DecodedBlock:
        body = tuple(i for i in block.body if i.op != "phi")
        used: set[int] = set()
        steps = tuple(self._decode_step(i, used) for i in body[:-1])
        last = body[-1]
        edges = [self._decode_edge(block.label, label, used) for label in last.labels]
        build = control_flow.TERMINATORS_BY_OPCODE[last.op]
        leave = build(last, self._find_registers(last, last.operands, used), edges)
        reads = tuple(r for r in sorted(used) if self._is_variable(r) and self.defining_block.get(r) != k)
        writes = tuple(self.registers[i.result] for i in body if i.result)
        return DecodedBlock(body, steps, leave, reads, writes)

    def _is_variable(self, register: int) -> bool:
        """Whether a register is not a constant."""
        return self.values[register] is None

    def _decode_edge(self, source: str, target: str, used: set[int]) -> BlockEdge:
        phis = [i for i in self.blocks[self.block_numbers[target]].body if i.op == "phi"]
        sources = tuple(self._find_registers(i, (self._find_incoming_value(i, source),), used)[0] for i in phis)
        return BlockEdge(self.block_numbers[target], sources, tuple(self.registers[i.result] for i in phis))

    def _find_incoming_value(self, phi: LlvmInstruction, source: str) -> LlvmOperand:
        if source not in phi.labels:
            raise ParseError(f"phi %{phi.result} has no value for %{source}", location=phi.where)
        return phi.operands[phi.labels.index(source)]

    def _find_registers(self, i: LlvmInstruction, operands: tuple[LlvmOperand, ...], used: set[int]) -> tuple[int, ...]:
        result = tuple(self._find_register(i, operand) for operand in operands)
        used.update(result)
        return result

    def _find_register(self, i: LlvmInstruction, operand: LlvmOperand) -> int:
        if isinstance(operand, LocalOperand):
            if operand.name not in self.registers:
                raise ParseError(f"%{operand.name} is not defined", location=i.where)
            return self.registers[operand.name]
        self.values.append(() if str(operand.type) in _VALUELESS_TYPES else evaluate_constant(operand, self.addresses))
        return len(self.values) - 1

    def _decode_step(self, i: LlvmInstruction, used: set[int]) -> RegisterStep:
        try:
            args = self._find_registers(i, i.operands, used)
            out = self.registers.get(i.result, -1) if i.result else self._add_unused_register()
            return self._build_step(i, args, out)
        except TesseraError as error:
            if error.location is None:
                error.message += f" [{i} at {i.where}]"
            raise error.at(i.where) from None

    def _add_unused_register(self) -> int:
        """A register for a result without a name."""
        self.values.append(())
        return len(self.values) - 1

    def _build_step(self, i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
        if i.op == "call":
            return self._decode_call(i, args, out)
        if i.op in memory_ops.MEMORY_INSTRUCTIONS:
            return memory_ops.MEMORY_INSTRUCTIONS[i.op](i, args, out)
        return bind_function(PURE_INSTRUCTIONS[i.op](i), args, out)

    def _decode_call(self, i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
        callee = self.program.functions.get(i.word)
        if callee is not None and callee.blocks:
            return _bind_call(callee, args, out)
        if i.word in self.externals:
            return _bind_host_function(self.externals[i.word], args)
        build = find_intrinsic(i.word, memory_ops.MEMORY_INTRINSICS) if i.word.startswith(_BUILT_IN_PREFIXES) else None
        if build is not None:
            return build(i, args, out)  # type: ignore[operator]
        function = find_pure_function(i)
        if function is None:
            raise UnsupportedOpError(f"call: the function @{i.word} is not supported")
        return bind_function(function, args, out)


def _bind_host_function(function: HostFunction, args: tuple[int, ...]) -> RegisterStep:
    """A call of a host function, lane by lane."""

    def step(f: LlvmFrame) -> None:
        columns = [broadcast_lanes(f.active[a], f.active_count) for a in args]
        for lane in range(f.active_count):
            function(f.memory, *(int(c[lane]) for c in columns))

    return step


_VALUELESS_TYPES = ("metadata", "token", "void")
_BUILT_IN_PREFIXES = ("llvm.", "memcpy", "memmove", "memset")


def _bind_call(callee: LlvmFunction, args: tuple[int, ...], out: int) -> RegisterStep:
    if any(p.by_value for p in callee.parameters):
        raise UnsupportedOpError(f"call: @{callee.name} has a byval parameter")

    def step(f: LlvmFrame) -> None:
        result = f.machine.run(callee, [f.active[a] for a in args], number_active_lanes(f))
        if result is not None:
            f.active[out] = result

    return step


def bind_function(function: PureFunction, args: tuple[int, ...], out: int) -> RegisterStep:
    """A function of values as a step on registers."""
    binder = _BINDERS.get(len(args))
    return binder(function, *args, out) if binder else _bind_many(function, args, out)


def _bind_1(function: PureFunction, a: int, out: int) -> RegisterStep:
    def step(f: LlvmFrame) -> None:
        active = f.active
        active[out] = function(active[a])

    return step


def _bind_2(function: PureFunction, a: int, b: int, out: int) -> RegisterStep:
    def step(f: LlvmFrame) -> None:
        active = f.active
        active[out] = function(active[a], active[b])

    return step


def _bind_3(function: PureFunction, a: int, b: int, c: int, out: int) -> RegisterStep:
    def step(f: LlvmFrame) -> None:
        active = f.active
        active[out] = function(active[a], active[b], active[c])

    return step


def _bind_many(function: PureFunction, args: tuple[int, ...], out: int) -> RegisterStep:
    def step(f: LlvmFrame) -> None:
        active = f.active
        active[out] = function(*[active[a] for a in args])

    return step


_BINDERS: dict[int, Callable[..., RegisterStep]] = {1: _bind_1, 2: _bind_2, 3: _bind_3}
