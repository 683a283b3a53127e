"""Instruction parser: one parser for each opcode, calls included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tessera.core.errors import UNKNOWN, Location, UnsupportedOpError
from tessera.interp.target.llvm.text.instruction_memo import remember_line, split_debug
from tessera.interp.target.llvm.text.operand_parser import (
    LlvmTypeCursor,
    parse_flags,
    parse_typed_value,
    parse_value,
    skip_attributes,
    skip_ordering,
)
from tessera.interp.target.llvm.text.syntax import (
    I1,
    PTR,
    VOID,
    LlvmAggregate,
    LlvmInstruction,
    LlvmOperand,
    LlvmStruct,
    LlvmType,
    LlvmVector,
)
from tessera.interp.target.tokens import TextToken

# Calls.


def _parse_argument(c: LlvmTypeCursor) -> tuple[LlvmOperand, int]:
    type = c.type()
    if str(type) == "metadata" and c.at_type():
        return parse_typed_value(c), 0
    align = skip_attributes(c)
    return parse_value(c, type), align


def parse_prefixed_call(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    """A call after `tail`, `musttail` or `notail`."""
    c.expect("call")
    return parse_call(c, "call")


def parse_call(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    """A direct call; attributes are skipped, except the alignment of arguments."""
    location, result = c.place(), parse_flags(c)
    skip_attributes(c)
    type = c.type()
    skip_attributes(c)
    if c.here.kind != "global":
        kind = "inline assembly" if c.at("asm") else "a call through a pointer"
        raise UnsupportedOpError(f"call: {kind} is not supported", location=location)
    callee, arguments = c.take().text, []
    c.expect("(")
    while not c.at(")"):
        arguments.append(_parse_argument(c))
        if not c.accept(","):
            break
    _skip_call_tail(c)
    operands, aligns = zip(*arguments) if arguments else ((), ())  # noqa: B905 (pairs)
    return LlvmInstruction("call", type, tuple(operands), callee, result, aligns=tuple(aligns))


def _skip_call_tail(c: LlvmTypeCursor) -> None:
    """Skip attributes and operand bundles, which end with the line."""
    line = c.line(c.expect(")"))
    while c.line() == line and (c.here.kind in ("word", "string", "group") or c.at("[")):
        if c.at("["):
            c.skip_group()
        elif c.take() and c.at("("):
            c.skip_group()


# Instructions: one parser for each opcode.


InstructionParser = Callable[[LlvmTypeCursor, str], LlvmInstruction]

TERMINATORS = frozenset({"br", "switch", "ret", "unreachable"})

_INT_BINARY = "add sub mul udiv sdiv urem srem shl lshr ashr and or xor".split()
_FLOAT_BINARY = "fadd fsub fmul fdiv frem".split()
_CASTS = (
    "trunc zext sext fptrunc fpext fptoui fptosi uitofp sitofp bitcast ptrtoint ptrtoaddr inttoptr addrspacecast"
).split()
_UNSUPPORTED = frozenset(
    "invoke callbr indirectbr resume landingpad va_arg catchswitch catchret cleanupret catchpad cleanuppad".split()
)


def parse_instruction(c: LlvmTypeCursor) -> LlvmInstruction:
    """One instruction with its result, metadata and location; what a line means is known if it was parsed before."""
    first, location = c.here, c.place()
    parsed = c.lexer.parsed.get(first.offset)
    if parsed is not None:
        c.index += 1
        return parsed[0].at(location, parsed[1])
    instruction = _parse_anew(c, location)
    if c.lexer.line_based:
        _remember(c, first, instruction)
    return instruction


def _remember(c: LlvmTypeCursor, first: TextToken, instruction: LlvmInstruction) -> None:
    """Record an instruction that is alone in its line."""
    start, end = c.lexer.line_of(first.offset)
    line = c.lexer.text[start : end - 1]
    last = c.tokens[c.index - 1]
    if line[: first.offset - start].strip() or not last.offset < end <= c.here.offset:
        return
    if instruction.debug == split_debug(line)[1]:
        remember_line(line, first._replace(offset=first.offset - start), instruction.at(UNKNOWN, ""))


def _parse_anew(c: LlvmTypeCursor, location: Location) -> LlvmInstruction:
    result = ""
    if c.here.kind == "local":
        result = c.take().text
        c.expect("=")
    op = c.here.text
    if op in _UNSUPPORTED:
        raise UnsupportedOpError(f"the instruction '{op}' is not supported", location=location)
    reader = _PARSERS.get(op) if c.here.kind == "word" else None
    if reader is None:
        c.fail("expected an instruction")
    c.take()
    value = reader(c, op)
    tail = _parse_tail(c) if c.at(",") else {}
    return replace(value, result=result, where=location, **tail)


def _parse_tail(c: LlvmTypeCursor) -> dict[str, Any]:
    """`, align 4, !dbg !7`: the fields of the instruction that it gives."""
    found: dict[str, Any] = {}
    while c.accept(","):
        if c.accept("align"):
            found["align"] = c.integer()
        elif c.accept("addrspace"):
            c.skip_group()
        elif c.here.kind == "meta":
            name, node = c.take().text, c.take().text
            if c.at("(", "{"):
                c.skip_group()
            if name == "!dbg":
                found["debug"] = node
        else:
            c.fail("expected align or metadata")
    return found


def get_comparison_type(type: LlvmType) -> LlvmType:
    """The result type of a comparison of values of this type."""
    return LlvmVector(type.count, I1) if isinstance(type, LlvmVector) else I1


def _parse_pair(c: LlvmTypeCursor) -> tuple[LlvmOperand, LlvmOperand]:
    type = c.type()
    left = parse_value(c, type)
    c.expect(",")
    return left, parse_value(c, type)


def _parse_operands(c: LlvmTypeCursor, count: int = 0) -> tuple[LlvmOperand, ...]:
    """Typed operands up to metadata, an alignment or the end; `count` of them, where it is not 0."""
    result = [parse_typed_value(c)]
    while c.at(",") and c.after().kind != "meta" and c.after().text != "align":
        c.take()
        result.append(parse_typed_value(c))
    if count and len(result) != count:
        c.index -= 1  # the error is at this instruction, not at the next
        c.fail(f"expected {count} operands")
    return tuple(result)


def _parse_binary(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    flags = parse_flags(c)
    pair = _parse_pair(c)
    return LlvmInstruction(op, pair[0].type, pair, flags=flags)


def _parse_compare(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    flags = parse_flags(c)
    word = c.expect_kind("word")
    pair = _parse_pair(c)
    return LlvmInstruction(op, get_comparison_type(pair[0].type), pair, word, flags)


def _parse_unary(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    flags = parse_flags(c)
    operand = parse_typed_value(c)
    return LlvmInstruction(op, operand.type, (operand,), flags=flags)


def _parse_cast(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    flags = parse_flags(c)
    operand = parse_typed_value(c)
    c.expect("to")
    return LlvmInstruction(op, c.type(), (operand,), flags=flags)


def _parse_select(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    flags = parse_flags(c)
    operands = _parse_operands(c, 3)
    return LlvmInstruction(op, operands[1].type, operands, flags=flags)


def _parse_extract_element(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    operands = _parse_operands(c)
    return LlvmInstruction(op, operands[0].type.scalar, operands)


def _parse_insert_element(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    operands = _parse_operands(c)
    return LlvmInstruction(op, operands[0].type, operands)


def _parse_shuffle(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    left, right, mask = _parse_operands(c, 3)
    if not isinstance(mask.type, LlvmVector):
        c.index -= 1
        c.fail("expected a vector as the mask of shufflevector")
    return LlvmInstruction(op, LlvmVector(mask.type.count, left.type.scalar), (left, right, mask))


def _parse_indices(c: LlvmTypeCursor) -> tuple[int, ...]:
    result = []
    while c.at(",") and c.after().kind == "number":
        c.take()
        result.append(c.integer())
    return tuple(result)


def _parse_extract_value(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    whole = parse_typed_value(c)
    indices = _parse_indices(c)
    type = whole.type
    for i in indices:
        if not isinstance(type, LlvmAggregate) or i >= len(type.parts):
            c.fail(f"no member {i} in {type}")
        type = type.parts[i][1]
    return LlvmInstruction(op, type, (whole,), indices=indices)


def _parse_insert_value(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    whole = parse_typed_value(c)
    c.expect(",")
    part = parse_typed_value(c)
    return LlvmInstruction(op, whole.type, (whole, part), indices=_parse_indices(c))


def _parse_getelementptr(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    parse_flags(c)
    source = c.type()
    c.expect(",")
    operands = _parse_operands(c)
    counts = [o.type.count for o in operands if isinstance(o.type, LlvmVector)]
    type = LlvmVector(counts[0], PTR) if counts else PTR
    return LlvmInstruction(op, type, operands, source=source)


def _parse_load(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    parse_flags(c)
    type = c.type()
    c.expect(",")
    pointer = parse_typed_value(c)
    skip_ordering(c)
    return LlvmInstruction(op, type, (pointer,), source=type)


def _parse_store(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    parse_flags(c)
    operands = _parse_operands(c)
    skip_ordering(c)
    return LlvmInstruction(op, VOID, operands, source=operands[0].type)


def _parse_alloca(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    parse_flags(c)
    source, count = c.type(), ()
    if c.at(",") and c.after().kind == "word" and c.after().text.startswith("i"):
        c.take()
        count = (parse_typed_value(c),)  # type: ignore[assignment]
    return LlvmInstruction(op, PTR, count, source=source)


def _parse_atomicrmw(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    parse_flags(c)
    word = c.expect_kind("word")
    operands = _parse_operands(c, 2)
    skip_ordering(c)
    return LlvmInstruction(op, operands[1].type, operands, word)


def _parse_cmpxchg(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    parse_flags(c)
    operands = _parse_operands(c, 3)
    skip_ordering(c)
    return LlvmInstruction(op, LlvmStruct((operands[1].type, I1)), operands)


def _parse_fence(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    skip_ordering(c)
    return LlvmInstruction(op)


def _parse_label(c: LlvmTypeCursor) -> str:
    c.expect("label")
    return c.expect_kind("local")


def _parse_branch(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    if c.at("label"):
        return LlvmInstruction(op, labels=(_parse_label(c),))
    condition = parse_typed_value(c)
    c.expect(",")
    then = _parse_label(c)
    c.expect(",")
    return LlvmInstruction(op, operands=(condition,), labels=(then, _parse_label(c)))


def _parse_switch(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    operands = [parse_typed_value(c)]
    c.expect(",")
    labels = [_parse_label(c)]
    c.expect("[")
    while not c.accept("]"):
        operands.append(parse_typed_value(c))
        c.expect(",")
        labels.append(_parse_label(c))
    return LlvmInstruction(op, operands=tuple(operands), labels=tuple(labels))


def _parse_return(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    if c.accept("void"):
        return LlvmInstruction(op)
    operand = parse_typed_value(c)
    return LlvmInstruction(op, operand.type, (operand,))


def _parse_phi(c: LlvmTypeCursor, op: str) -> LlvmInstruction:
    flags = parse_flags(c)
    type = c.type()
    operands, labels = [], []
    while True:
        c.expect("[")
        operands.append(parse_value(c, type))
        c.expect(",")
        labels.append(c.expect_kind("local"))
        c.expect("]")
        if not (c.at(",") and c.after().text == "["):
            return LlvmInstruction(op, type, tuple(operands), flags=flags, labels=tuple(labels))
        c.take()


_PARSERS: dict[str, InstructionParser] = {
    **dict.fromkeys((*_INT_BINARY, *_FLOAT_BINARY), _parse_binary),
    **dict.fromkeys(_CASTS, _parse_cast),
    **dict.fromkeys(("fneg", "freeze"), _parse_unary),
    **dict.fromkeys(("icmp", "fcmp"), _parse_compare),
    **dict.fromkeys(("tail", "musttail", "notail"), parse_prefixed_call),
    "select": _parse_select,
    "extractelement": _parse_extract_element,
    "insertelement": _parse_insert_element,
    "shufflevector": _parse_shuffle,
    "extractvalue": _parse_extract_value,
    "insertvalue": _parse_insert_value,
    "getelementptr": _parse_getelementptr,
    "load": _parse_load,
    "store": _parse_store,
    "alloca": _parse_alloca,
    "atomicrmw": _parse_atomicrmw,
    "cmpxchg": _parse_cmpxchg,
    "fence": _parse_fence,
    "br": _parse_branch,
    "switch": _parse_switch,
    "ret": _parse_return,
    "unreachable": lambda c, op: LlvmInstruction(op),
    "phi": _parse_phi,
    "call": parse_call,
}
