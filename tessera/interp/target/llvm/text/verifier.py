"""LLVM verifier: the types of operands, constants and results of each instruction (LLVM Language Reference)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tessera.core.errors import ParseError
from tessera.interp.target.llvm.text.syntax import (
    I1,
    I32,
    ConstantExpression,
    LlvmAggregate,
    LlvmArray,
    LlvmFloat,
    LlvmFunction,
    LlvmInstruction,
    LlvmInt,
    LlvmOperand,
    LlvmPointer,
    LlvmStruct,
    LlvmType,
    LlvmVector,
    LlvmVoid,
    LocalOperand,
    NumberConstant,
    SequenceConstant,
)

MAX_LANES = 1 << 16  # of a vector
TypeRule = Callable[[LlvmInstruction], bool]


def verify_function(function: LlvmFunction) -> None:
    """Check the instructions of a function.

    Raises:
        ParseError: an operand is not defined, or has another type than the instruction takes; at its line.
    """
    types: dict[str, LlvmType] = {p.name: p.type for p in function.parameters}
    body = [i for block in function.blocks for i in block.body]
    types |= {i.result: i.type for i in body if i.result}
    labels = {block.label for block in function.blocks}
    for instruction in body:
        _verify_instruction(instruction, types)
        unknown = next((label for label in instruction.labels if label not in labels), None)
        if unknown is not None:
            raise ParseError(f"there is no basic block %{unknown}", location=instruction.where)
        if instruction.op == "ret" and instruction.type != function.type:
            raise ParseError(f"ret of {instruction.type} in a function of {function.type}", location=instruction.where)


def verify_calls(functions: Mapping[str, LlvmFunction]) -> None:
    """Check that calls pass what the functions of the module and the declared intrinsics take.

    Raises:
        ParseError: the types differ; at the call's line. Functions of the C library are not checked: some are variadic.
    """
    for function in functions.values():
        for i in (i for block in function.blocks for i in block.body if i.op == "call"):
            callee = functions.get(i.word)
            if callee is None or not (callee.blocks or i.word.startswith("llvm.")) or i.word.startswith("llvm.dbg"):
                continue
            wanted, given = [p.type for p in callee.parameters], [o.type for o in i.operands]
            if wanted != given or callee.type != i.type:
                raise ParseError(
                    f"the call does not fit @{i.word}", location=i.where, expected=", ".join(map(str, wanted)),
                    received=", ".join(map(str, given)),
                )  # fmt: skip


def _verify_instruction(instruction: LlvmInstruction, types: Mapping[str, LlvmType]) -> None:
    for operand in instruction.operands:
        problem = _find_problem(operand, types)
        if problem:
            raise ParseError(f"{instruction.op}: {problem}", location=instruction.where)
    rule = TYPE_RULES.get(instruction.op)
    if rule is not None and not rule(instruction):
        shown = ", ".join(str(o.type) for o in instruction.operands)
        raise ParseError(f"{instruction.op} does not take these operands", location=instruction.where, received=shown)


def _find_problem(operand: LlvmOperand, types: Mapping[str, LlvmType]) -> str:
    """What is wrong with an operand by itself, or ""."""
    if isinstance(operand.type, LlvmVector) and not 0 < operand.type.count <= MAX_LANES:
        return f"a vector has 1 to {MAX_LANES} elements: {operand.type}"
    if isinstance(operand, LocalOperand):
        known = types.get(operand.name)
        return "" if known == operand.type else f"%{operand.name} is {known or 'not defined'}, not {operand.type}"
    if isinstance(operand, NumberConstant):
        valid = isinstance(operand.type, LlvmFloat | LlvmInt)
        return "" if valid else f"{operand.value} is not a value of type {operand.type}"
    if isinstance(operand, ConstantExpression):
        return next((p for o in operand.operands if (p := _find_problem(o, types))), "")
    if isinstance(operand, SequenceConstant):
        wanted = _list_members(operand.type)
        if wanted != [e.type for e in operand.elements]:
            return f"the elements of a constant are not those of {operand.type}"
        return next((p for o in operand.elements if (p := _find_problem(o, types))), "")
    return ""


def _list_members(type: LlvmType) -> list[LlvmType]:
    if isinstance(type, LlvmVector | LlvmArray):
        return [type.element] * type.count
    return list(type.fields) if isinstance(type, LlvmStruct) else []


# Rules of instructions, by opcode.


def _operand_types(i: LlvmInstruction) -> list[LlvmType]:
    return [o.type for o in i.operands]


def _takes(*kinds: type) -> TypeRule:
    """A rule: the first operand is a value, or a vector, of one of these kinds."""
    return lambda i: isinstance(i.operands[0].type.scalar, kinds)


def _casts(source: type, target: type, compare: Callable[[int, int], bool] = lambda a, b: True) -> TypeRule:
    """A rule of a conversion between kinds, whose element sizes compare so."""

    def rule(i: LlvmInstruction) -> bool:
        a, b = i.operands[0].type, i.type
        kinds = isinstance(a.scalar, source) and isinstance(b.scalar, target)
        return kinds and a.lanes == b.lanes and compare(_count_bits(a.scalar), _count_bits(b.scalar))

    return rule


def _count_bits(type: LlvmType) -> int:
    return type.bits if isinstance(type, LlvmInt) else 8 * type.size


def _count_all_bits(type: LlvmType) -> int:
    return _count_bits(type.scalar) * (type.lanes[0] if type.lanes else 1)


def _takes_bitcast(i: LlvmInstruction) -> bool:
    types = (i.operands[0].type, i.type)
    if any(isinstance(t, LlvmAggregate | LlvmVoid) for t in types):
        return False
    pointers = {isinstance(t.scalar, LlvmPointer) for t in types}
    return len(pointers) == 1 and len({_count_all_bits(t) for t in types}) == 1


def _takes_select(i: LlvmInstruction) -> bool:
    if len(i.operands) != 3:
        return False
    condition, then, other = _operand_types(i)
    return condition.scalar == I1 and then == other and condition.lanes in ((), then.lanes)


def _takes_extract_element(i: LlvmInstruction) -> bool:
    types = _operand_types(i)
    return len(types) == 2 and isinstance(types[0], LlvmVector) and isinstance(types[1], LlvmInt)


def _takes_insert_element(i: LlvmInstruction) -> bool:
    types = _operand_types(i)
    vector = len(types) == 3 and isinstance(types[0], LlvmVector) and isinstance(types[2], LlvmInt)
    return vector and types[1] == types[0].scalar


def _takes_shuffle(i: LlvmInstruction) -> bool:
    left, right, mask = i.operands
    if not (isinstance(left.type, LlvmVector) and left.type == right.type and isinstance(mask.type, LlvmVector)):
        return False
    indices = [e.value for e in getattr(mask, "elements", ()) if isinstance(e, NumberConstant)]
    inside = all(0 <= n < 2 * left.type.count for n in indices)
    return mask.type.element == I32 and not isinstance(mask, LocalOperand) and inside


def _takes_insert_value(i: LlvmInstruction) -> bool:
    member: LlvmType = i.operands[0].type
    for index in i.indices:
        if not isinstance(member, LlvmAggregate) or index >= len(member.parts):
            return False
        member = member.parts[index][1]
    return bool(i.indices) and member == i.operands[1].type


def _takes_pointer(position: int, count: int) -> TypeRule:
    """A rule: so many operands, and the one at this position is an address."""
    return lambda i: len(i.operands) == count and isinstance(i.operands[position].type, LlvmPointer)


def _takes_address(i: LlvmInstruction) -> bool:
    base, *indices = _operand_types(i)
    lanes = {t.lanes for t in (base, *indices) if t.lanes}
    integers = all(isinstance(t.scalar, LlvmInt) for t in indices)
    return isinstance(base.scalar, LlvmPointer) and integers and len(lanes) <= 1


def _takes_exchange(i: LlvmInstruction) -> bool:
    types = _operand_types(i)
    return len(types) == 3 and isinstance(types[0], LlvmPointer) and types[1] == types[2]


TYPE_RULES: dict[str, TypeRule] = {
    **dict.fromkeys("add sub mul udiv sdiv urem srem shl lshr ashr and or xor".split(), _takes(LlvmInt)),
    **dict.fromkeys("fadd fsub fmul fdiv frem fneg fcmp".split(), _takes(LlvmFloat)),
    "icmp": _takes(LlvmInt, LlvmPointer),
    "trunc": _casts(LlvmInt, LlvmInt, lambda a, b: a > b),
    **dict.fromkeys(("zext", "sext"), _casts(LlvmInt, LlvmInt, lambda a, b: a < b)),
    "fptrunc": _casts(LlvmFloat, LlvmFloat, lambda a, b: a > b),
    "fpext": _casts(LlvmFloat, LlvmFloat, lambda a, b: a < b),
    **dict.fromkeys(("fptoui", "fptosi"), _casts(LlvmFloat, LlvmInt)),
    **dict.fromkeys(("uitofp", "sitofp"), _casts(LlvmInt, LlvmFloat)),
    **dict.fromkeys(("ptrtoint", "ptrtoaddr"), _casts(LlvmPointer, LlvmInt)),
    "inttoptr": _casts(LlvmInt, LlvmPointer),
    "bitcast": _takes_bitcast,
    "select": _takes_select,
    "extractelement": _takes_extract_element,
    "insertelement": _takes_insert_element,
    "shufflevector": _takes_shuffle,
    "insertvalue": _takes_insert_value,
    "getelementptr": _takes_address,
    "load": _takes_pointer(0, 1),
    "store": _takes_pointer(1, 2),
    "alloca": lambda i: all(isinstance(t, LlvmInt) for t in _operand_types(i)),
    "atomicrmw": _takes_pointer(0, 2),
    "cmpxchg": _takes_exchange,
    "br": lambda i: all(t == I1 for t in _operand_types(i)),
    "switch": lambda i: len(set(_operand_types(i))) == 1 and isinstance(i.operands[0].type, LlvmInt),
}
