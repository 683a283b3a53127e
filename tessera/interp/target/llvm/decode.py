"""A function made ready to run: names become register numbers, instructions become closures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from tessera.errors import ParseError, TesseraError, UnsupportedOpError
from tessera.interp.target.llvm import effects, flow, memory_intrinsics, pure
from tessera.interp.target.llvm.arith import Pure
from tessera.interp.target.llvm.constants import Addresses, constant
from tessera.interp.target.llvm.frame import Block, Code, Edge, Frame, Step
from tessera.interp.target.llvm.lanes import Value, widen
from tessera.interp.target.llvm.syntax import BasicBlock, Function, Instruction, Local, Operand, Program

# A function that the text declares and the host gives: it sees the memory and the integers of one lane.
External = Callable[..., None]


class Decoder:
    """The decoding of one function."""

    def __init__(
        self, program: Program, function: Function, addresses: Addresses, externals: Mapping[str, External]
    ) -> None:
        self.program = program
        self.externals = externals
        self.function = function
        self.addresses = addresses
        blocks = {block.label: block for block in function.blocks}
        self.blocks = [blocks[label] for label in flow.block_order(self._checked(blocks))]
        self.number = {block.label: k for k, block in enumerate(self.blocks)}
        self.slots = {p.name: k for k, p in enumerate(function.parameters)}
        self.home: dict[int, int] = {}  # the block that defines a register
        self.values: list[Value | None] = [None] * len(self.slots)
        for k, block in enumerate(self.blocks):
            self._define(k, block)

    def _checked(self, blocks: dict[str, BasicBlock]) -> Function:
        for block in self.function.blocks:
            for label in block.body[-1].labels:
                if label not in blocks:
                    raise ParseError(f"there is no block %{label}", location=block.body[-1].where)
        return self.function

    def _define(self, k: int, block: BasicBlock) -> None:
        for i in block.body:
            if i.result:
                if i.result in self.slots:
                    raise ParseError(f"%{i.result} is defined twice", location=i.where)
                self.slots[i.result] = len(self.values)
                # A phi is written on the edges into its block: to the block itself it comes from outside.
                self.home[len(self.values)] = -1 if i.op == "phi" else k
                self.values.append(None)

    def code(self) -> Code:
        """The whole function."""
        blocks = [self._block(k, block) for k, block in enumerate(self.blocks)]
        outside = {register for block in blocks for register in block.reads}
        done = (replace(b, writes=tuple(r for r in b.writes if r in outside)) for b in blocks)
        return Code(self.function, tuple(done), tuple(self.values))

    def _block(self, k: int, block: BasicBlock) -> Block:
        body = tuple(i for i in block.body if i.op != "phi")
        used: set[int] = set()
        steps = tuple(self._step(i, used) for i in body[:-1])
        last = body[-1]
        edges = [self._edge(block.label, label, used) for label in last.labels]
        build = flow.TABLE[last.op]
        leave = build(last, self._registers(last, last.operands, used), edges)
        reads = tuple(r for r in sorted(used) if self._varies(r) and self.home.get(r) != k)
        writes = tuple(self.slots[i.result] for i in body if i.result)
        return Block(body, steps, leave, reads, writes)

    def _varies(self, register: int) -> bool:
        """Whether a register is not a constant."""
        return self.values[register] is None

    def _edge(self, source: str, target: str, used: set[int]) -> Edge:
        phis = [i for i in self.blocks[self.number[target]].body if i.op == "phi"]
        sources = tuple(self._registers(i, (self._incoming(i, source),), used)[0] for i in phis)
        return Edge(self.number[target], sources, tuple(self.slots[i.result] for i in phis))

    def _incoming(self, phi: Instruction, source: str) -> Operand:
        if source not in phi.labels:
            raise ParseError(f"phi %{phi.result} has no value for %{source}", location=phi.where)
        return phi.operands[phi.labels.index(source)]

    def _registers(self, i: Instruction, operands: tuple[Operand, ...], used: set[int]) -> tuple[int, ...]:
        found = tuple(self._register(i, operand) for operand in operands)
        used.update(found)
        return found

    def _register(self, i: Instruction, operand: Operand) -> int:
        if isinstance(operand, Local):
            if operand.name not in self.slots:
                raise ParseError(f"%{operand.name} is not defined", location=i.where)
            return self.slots[operand.name]
        self.values.append(() if str(operand.type) in _NO_VALUE else constant(operand, self.addresses))
        return len(self.values) - 1

    def _step(self, i: Instruction, used: set[int]) -> Step:
        try:
            args = self._registers(i, i.operands, used)
            out = self.slots.get(i.result, -1) if i.result else self._nowhere()
            return self._build(i, args, out)
        except TesseraError as error:
            if error.location is None:
                error.message += f" [{i} at {i.where}]"
            raise error.at(i.where) from None

    def _nowhere(self) -> int:
        """A register for a result that nobody names."""
        self.values.append(())
        return len(self.values) - 1

    def _build(self, i: Instruction, args: tuple[int, ...], out: int) -> Step:
        if i.op == "call":
            return self._call(i, args, out)
        if i.op in effects.TABLE:
            return effects.TABLE[i.op](i, args, out)
        return bind(pure.INSTRUCTIONS[i.op](i), args, out)

    def _call(self, i: Instruction, args: tuple[int, ...], out: int) -> Step:
        callee = self.program.functions.get(i.word)
        if callee is not None and callee.blocks:
            return _enter(callee, args, out)
        if i.word in self.externals:
            return _outside(self.externals[i.word], args)
        build = pure.intrinsic(i.word, memory_intrinsics.TABLE) if i.word.startswith(_BUILT_IN) else None
        if build is not None:
            return build(i, args, out)  # type: ignore[operator]
        function = pure.call(i)
        if function is None:
            raise UnsupportedOpError(f"call: the function @{i.word} is not supported")
        return bind(function, args, out)


def _outside(function: External, args: tuple[int, ...]) -> Step:
    """A function of the host, called for one lane after the other."""

    def step(f: Frame) -> None:
        columns = [widen(f.w[a], f.n) for a in args]
        for lane in range(f.n):
            function(f.memory, *(int(c[lane]) for c in columns))

    return step


_NO_VALUE = ("metadata", "token", "void")
_BUILT_IN = ("llvm.", "memcpy", "memmove", "memset")


def _enter(callee: Function, args: tuple[int, ...], out: int) -> Step:
    if any(p.by_value for p in callee.parameters):
        raise UnsupportedOpError(f"call: @{callee.name} has a byval parameter")

    def step(f: Frame) -> None:
        result = f.machine.run(callee, [f.w[a] for a in args], f.running())
        if result is not None:
            f.w[out] = result

    return step


def bind(function: Pure, args: tuple[int, ...], out: int) -> Step:
    """A function of values as a step between registers."""
    binder = _BINDERS.get(len(args))
    return binder(function, *args, out) if binder else _bind_many(function, args, out)


def _bind_1(function: Pure, a: int, out: int) -> Step:
    def step(f: Frame) -> None:
        w = f.w
        w[out] = function(w[a])

    return step


def _bind_2(function: Pure, a: int, b: int, out: int) -> Step:
    def step(f: Frame) -> None:
        w = f.w
        w[out] = function(w[a], w[b])

    return step


def _bind_3(function: Pure, a: int, b: int, c: int, out: int) -> Step:
    def step(f: Frame) -> None:
        w = f.w
        w[out] = function(w[a], w[b], w[c])

    return step


def _bind_many(function: Pure, args: tuple[int, ...], out: int) -> Step:
    def step(f: Frame) -> None:
        w = f.w
        w[out] = function(*[w[a] for a in args])

    return step


_BINDERS: dict[int, Callable[..., Step]] = {1: _bind_1, 2: _bind_2, 3: _bind_3}
