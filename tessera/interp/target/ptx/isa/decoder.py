"""Decoder: the syntax tree of an entry becomes a program. Scopes are resolved, calls inlined, instructions decoded.

An opcode with integer and floating-point forms has a rule in each of two tables; the instruction type selects one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tessera.core.errors import ParseError, TesseraError, UnsupportedOpError
from tessera.interp.target.ptx.isa.operands import (
    BranchTarget,
    NameScope,
    OperandDecoder,
    PtxFunctionAddress,
    PtxVariableAddress,
    assign_function_addresses,
)
from tessera.interp.target.ptx.machine.call_stack import InlinedFunction, RecursiveCall
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, LaneStep, PtxMachine, PtxProgram
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    AddressOperand,
    BranchTargetList,
    NameOperand,
    PtxFunction,
    PtxInstruction,
    PtxLabel,
    PtxOperand,
    PtxScope,
    PtxVariable,
    VectorOperand,
    get_callee_operand,
    get_variable_size,
    list_call_operands,
    name_body_variable,
)

# Rule tables.


DECODE_RULES: dict[str, Callable[[PtxDecoder, PtxInstruction], LaneStep]] = {}
CONTROL_RULES: dict[str, Callable[[PtxDecoder, PtxInstruction, DecodedInstruction], None]] = {}
SYSTEM_FUNCTIONS: dict[str, Callable[[PtxDecoder, PtxInstruction], LaneStep]] = {}  # functions of the system, by name
ControlTransfer = Callable[[PtxMachine, LaneSet, int], None]
SELF_GUARDED = {"bra", "exit", "ret", "brx", "trap"}  # control transfers that read their own guard


def decode_rule(*names: str, table: dict[str, Any] = DECODE_RULES) -> Callable[[Any], Any]:
    """Register the rule of the opcodes that begin with these words; the longest match is chosen."""

    def keep(function: Any) -> Any:
        table.update(dict.fromkeys(names, function))
        return function

    return keep


def check_modifiers(d: OperandDecoder, inst: PtxInstruction, *allowed: str, types: int = 1, skip: int = 1) -> list[str]:
    """The modifiers between opcode and types; each must be one of `allowed`."""
    words = list(inst.op[skip : len(inst.op) - types])
    if not set(words) <= set(allowed):
        raise d.unsupported(inst)
    return words


@dataclass(frozen=True)
class _PendingInstruction:
    instruction: PtxInstruction
    names: NameScope
    control: ControlTransfer | None = None


class PtxDecoder(OperandDecoder):
    """Decodes one entry; `symbols` maps module-level names to variables and functions."""

    def __init__(self, symbols: dict[str, Any], shared: int) -> None:
        super().__init__(symbols, shared)
        self.pending: list[_PendingInstruction] = []
        self.inlining: dict[str, InlinedFunction] = {}  # functions whose bodies are being inlined
        self.has_register_groups = False  # whether a name is a group of registers

    def decode_entry(self, function: PtxFunction, params: dict[str, PtxVariableAddress]) -> PtxProgram:
        """The program of an entry whose parameters have these addresses."""
        assert function.body is not None
        exit = PtxInstruction(("exit",), (), None, function.location)
        self._decode_scope(function.body, NameScope(self.module_scope, dict(params)))
        self.pending.append(_PendingInstruction(exit, self.module_scope))
        self.program.lines = [self._decode_line(p) for p in self.pending]
        ends = {i + 1 for i, line in enumerate(self.program.lines) if line.control is not None}
        joins = {i for i, line in enumerate(self.program.lines) if line.group_size}
        self.program.block_starts = {*self.labels, *ends, *joins}
        return self.program

    def _decode_scope(self, scope: PtxScope, names: NameScope) -> None:
        for item in scope.items:
            if isinstance(item, PtxLabel):
                names.names[item.name] = BranchTarget(self.make_label())
            elif isinstance(item, BranchTargetList):
                names.names[item.name] = item
        for item in scope.items:
            if isinstance(item, PtxVariable):
                self._declare(item, names)
            elif isinstance(item, PtxLabel):
                self.labels[names.names[item.name]] = len(self.pending)
            elif isinstance(item, PtxScope):
                self._decode_scope(item, NameScope(names, end=names.end, instance=names.instance))
            elif isinstance(item, PtxInstruction):
                self._add_instruction(item, names)

    def _add_instruction(self, inst: PtxInstruction, names: NameScope) -> None:
        if inst.guard and (inst.op[0] == "call" or (inst.op[0] in CONTROL_RULES and inst.op[0] not in SELF_GUARDED)):
            self._branch_around(inst, inst.guard, names)
        elif inst.op[0] == "call" and not self._is_external(inst, names):
            self._decode_call(inst, names)
        else:
            self.pending.append(_PendingInstruction(inst, names))

    def _branch_around(self, inst: PtxInstruction, guard: NameOperand, names: NameScope) -> None:
        """A guard on a synchronising instruction becomes a branch around it: lanes that skip it are not waited for."""
        after = self.make_label()
        names.names[f"$after{after}"] = BranchTarget(after)
        opposite = replace(guard, negated=not guard.negated)
        skip = PtxInstruction(("bra",), (NameOperand(f"$after{after}"),), opposite, inst.location, inst.source)
        self.pending.append(_PendingInstruction(skip, names))
        self._add_instruction(replace(inst, guard=None), names)
        self.labels[after] = len(self.pending)

    def make_label(self) -> int:
        """A new label."""
        self.labels.append(-1)
        return len(self.labels) - 1

    def _declare(self, v: PtxVariable, names: NameScope) -> None:
        if v.space == "reg":
            for name in [f"{v.name}{i}" for i in range(v.many)] if v.many else [v.name]:
                self._declare_registers(name, v, names)
            return
        size = get_variable_size(v)
        if v.space == "shared":
            start = self.program.shared = -(-self.program.shared // v.align) * v.align
            self.program.shared += size
        elif v.space in ("local", "param"):
            start = -(-self.program.local // v.align) * v.align
            self.program.local = start + size
        else:
            names.names[v.name] = self.module_scope.names[name_body_variable(v)]
            return
        names.names[v.name] = PtxVariableAddress("shared" if v.space == "shared" else "local", start)

    def _declare_registers(self, name: str, v: PtxVariable, names: NameScope) -> None:
        """A register; a vector register or one of 128 bits is a group of several."""
        bits, parts = TYPES[v.type].bits, [name]
        if v.vector > 1:
            parts = [f"{name}.{c}" for c in "xyzw"[: v.vector]]
        if bits > 64:
            parts, bits = [f"{p}.{half}" for p in parts for half in ("low", "high")], 64
        for part in parts:
            names.names[part] = len(self.program.register_widths)
            self.program.register_widths.append(bits)
            self.program.names.append(part)
        for position, color in zip("xyzw", "rgba", strict=True):
            if f"{name}.{position}" in parts:
                names.names[f"{name}.{color}"] = names.names[f"{name}.{position}"]
        if len(parts) > 1:
            names.names[name], self.has_register_groups = VectorOperand(tuple(map(NameOperand, parts))), True

    def _expand_register_groups(self, operand: PtxOperand) -> PtxOperand:
        """An operand in which groups are replaced by their registers."""
        if isinstance(operand, NameOperand):
            result = self.names.find(operand.text)
            return result if isinstance(result, VectorOperand) else operand
        if not isinstance(operand, VectorOperand):
            return operand
        inner = [self._expand_register_groups(p) for p in operand.parts]
        flat = [p for i in inner for p in (i.parts if isinstance(i, VectorOperand) and not operand.pair else (i,))]
        return replace(operand, parts=tuple(flat))

    def _is_external(self, inst: PtxInstruction, names: NameScope) -> bool:
        result = names.find(get_callee_operand(inst).text)
        return isinstance(result, PtxFunction) and result.body is None

    def _decode_call(self, inst: PtxInstruction, names: NameScope) -> None:
        result, end = names.find(get_callee_operand(inst).text), self.make_label()
        if isinstance(result, PtxFunction):
            self._inline_call(inst, result, names, end)
        else:
            self._emit_indirect_call(inst, names, end)
        self.labels[end] = len(self.pending)

    def _emit_indirect_call(self, inst: PtxInstruction, names: NameScope, end: int) -> None:
        """A call through a register: functions with as many parameters are inlined; each lane branches to its own."""
        count = len(list_call_operands(inst))
        shaped = [f for f in self._list_functions() if len(f.results) + len(f.params) == count]
        starts = {self.get_function_address(f.name): self.make_label() for f in shaped}
        self.pending.append(_PendingInstruction(inst, names, self._dispatch(names, inst, starts)))
        for f, start in zip(shaped, starts.values(), strict=True):
            self.labels[start] = len(self.pending)
            self._inline_call(inst, f, names, end)
            self.pending.append(
                _PendingInstruction(PtxInstruction(("ret",), (), None, inst.location), NameScope(names, end=end))
            )

    def _dispatch(
        self, names: NameScope, inst: PtxInstruction, starts: dict[int, int]
    ) -> Callable[[PtxMachine, LaneSet, int], None]:
        before, self.names = self.names, names
        try:
            read, self.names = self.reader(get_callee_operand(inst), TYPES["u64"]), before
        except TesseraError as error:
            raise error.at(inst.location) from None

        def control(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
            target, remaining = read(m, lanes), lanes.count
            for address, label in starts.items():
                subset = lanes.select(target == address)
                remaining -= subset.count
                m.push(self.labels[label], subset)
            if remaining:
                raise PtxFault("the call address is not a function with these parameters")

        return control

    def _list_functions(self) -> list[PtxFunction]:
        return [
            f
            for f in self.module_scope.names.values()
            if isinstance(f, PtxFunction) and f.body is not None and not f.entry
        ]

    def get_function_address(self, name: str) -> int:
        """The address of a function in registers."""
        return assign_function_addresses(self.module_scope.names)[name]

    def resolve(self, name: str, location: Any = None) -> Any:
        """As for operands; a function's name is its address."""
        result = super().resolve(name, location)
        return PtxFunctionAddress(name, self.get_function_address(name)) if isinstance(result, PtxFunction) else result

    def _inline_call(self, inst: PtxInstruction, function: PtxFunction, names: NameScope, end: int) -> None:
        """A call: the function's body in its place, or within that body a recursive call."""
        formal = [*function.results, *function.params]
        arguments = list_call_operands(inst)
        if len(arguments) != len(formal):
            message = f"{function.name} has {len(formal)} results and parameters"
            raise ParseError(message, received=f"{len(arguments)}", location=inst.location)
        inner, first_register = NameScope(self.module_scope), len(self.program.register_widths)
        moves = NameScope(names)
        before: list[tuple[PtxVariable, PtxOperand]] = []
        after: list[tuple[PtxVariable, PtxOperand]] = []
        for k, (v, operand) in enumerate(zip(formal, arguments, strict=True)):
            actual = names.find(operand.text) if isinstance(operand, NameOperand) else None
            if v.space == "param" and isinstance(actual, PtxVariableAddress):
                inner.names[v.name] = actual
                continue
            self._declare(v, inner)
            self._share_names(v, inner, moves)
            (after if k < len(function.results) else before).append((v, operand))
        if function.name in self.inlining:
            bound = [inner.names[v.name] for v in formal]
            count = len(function.results)
            self._emit_moves(inst, before, moves, into=True)
            self._emit_recursive_call(inst, self.inlining[function.name], bound[:count], bound[count:])
            self._emit_moves(inst, after, moves, into=False)
            return
        self._emit_moves(inst, before, moves, into=True)
        inner.end = self.make_label()
        bound = [inner.names[v.name] for v in formal]
        results, params = bound[: len(function.results)], bound[len(function.results) :]
        instance = InlinedFunction(function, self.make_label(), inner.end, results, params, first_register)
        inner.instance = instance
        self.inlining[function.name], self.labels[instance.start] = instance, len(self.pending)
        assert function.body is not None
        self._decode_scope(function.body, inner)
        instance.last = len(self.program.register_widths)
        del self.inlining[function.name]
        self.labels[inner.end] = len(self.pending)
        self._emit_moves(inst, after, moves, into=False)

    def _share_names(self, v: PtxVariable, inner: NameScope, moves: NameScope) -> None:
        """Give the copies of arguments access to a parameter of the function, as `$name`."""
        for name, meaning in inner.names.items():
            if name == v.name or name.startswith(f"{v.name}."):
                if isinstance(meaning, VectorOperand):
                    meaning = VectorOperand(tuple(NameOperand(f"${p.text}") for p in meaning.parts))  # type: ignore[union-attr]
                moves.names[f"${name}"] = meaning

    def _emit_moves(
        self, inst: PtxInstruction, pairs: list[tuple[PtxVariable, PtxOperand]], names: NameScope, into: bool
    ) -> None:
        """Copy arguments to a function's parameters, or its results back: they are passed by value."""
        for v, operand in pairs:
            kind = v.type if v.type == "pred" else f"b{TYPES[v.type].bits}"
            words = (f"v{v.vector}", kind) if v.vector > 1 else (kind,)
            formal: PtxOperand = NameOperand(f"${v.name}") if v.space == "reg" else AddressOperand(f"${v.name}", 0)
            op = "mov" if v.space == "reg" else "st.param" if into else "ld.param"
            pair = (formal, operand) if into else (operand, formal)
            move = PtxInstruction((*op.split("."), *words), pair, None, inst.location, inst.source)
            self.pending.append(_PendingInstruction(move, names))

    def _emit_recursive_call(
        self, inst: PtxInstruction, instance: InlinedFunction, results: list[Any], params: list[Any]
    ) -> None:
        function = instance.function
        if any(isinstance(v, VectorOperand) for v in (*results, *params)):
            raise UnsupportedOpError(f"recursive call of {function.name} with vectors", location=inst.location)
        self.program.stack = True
        sizes = (
            [0 if v.space == "reg" else get_variable_size(v) for v in function.results],
            [0 if v.space == "reg" else get_variable_size(v) for v in function.params],
        )
        call = RecursiveCall(instance, results, params, sizes)

        def control(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
            m.stack.push_frame(m, lanes, call, pc + 1)
            m.push(self.labels[instance.start], lanes)

        self.pending.append(_PendingInstruction(inst, self.module_scope, control))

    def _decode_line(self, pending: _PendingInstruction) -> DecodedInstruction:
        inst, self.names = pending.instruction, pending.names
        if self.has_register_groups:
            inst = replace(inst, operands=tuple(map(self._expand_register_groups, inst.operands)))
        line = DecodedInstruction(inst, control=pending.control)
        try:
            if pending.control is None:
                self._decode(inst, line)
        except (KeyError, IndexError, AttributeError, ValueError, AssertionError) as error:
            raise self.unsupported(inst) from error
        except PtxFault as fault:
            raise fault.kind(f"{inst.name}: {fault.message}", location=inst.location) from None
        except TesseraError as error:
            raise error.at(inst.location) from None
        return line

    def _decode(self, inst: PtxInstruction, line: DecodedInstruction) -> None:
        if inst.op[0] in CONTROL_RULES:
            CONTROL_RULES[inst.op[0]](self, inst, line)
        elif inst.op[0] in DECODE_RULES:
            line.step = self.guard_step(inst, DECODE_RULES[inst.op[0]](self, inst))
        else:
            raise self.unsupported(inst)

    def guard_step(self, inst: PtxInstruction, step: LaneStep) -> LaneStep:
        """A step for the lanes whose guard is true."""
        if inst.guard is None:
            return step
        guard = self.reader(inst.guard, TYPES["pred"])

        def run(m: PtxMachine, lanes: LaneSet) -> None:
            chosen = lanes.select(guard(m, lanes))
            if chosen.count:
                step(m, chosen)

        return run


# Opcodes with integer and float forms: two tables, selected by the type.


DecodeRule = Callable[[PtxDecoder, PtxInstruction], LaneStep]
INTEGER_RULES: dict[str, DecodeRule] = {}
FLOAT_RULES: dict[str, DecodeRule] = {}


def merge_typed_rules() -> None:
    """Add both tables to the general one, once they are filled."""
    for name in {*INTEGER_RULES, *FLOAT_RULES}:
        DECODE_RULES[name] = _select_by_type(name)


def _select_by_type(name: str) -> DecodeRule:
    return lambda d, inst: (FLOAT_RULES if TYPES[inst.op[-1]].kind == "f" else INTEGER_RULES)[name](d, inst)
