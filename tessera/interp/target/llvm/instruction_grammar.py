"""Reading instructions: one reader per opcode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.attribute_grammar import flags, ordering
from tessera.interp.target.llvm.call_grammar import call, prefixed_call
from tessera.interp.target.llvm.constant_grammar import typed, value
from tessera.interp.target.llvm.syntax import Instruction, Operand
from tessera.interp.target.llvm.type_grammar import TypeCursor
from tessera.interp.target.llvm.types import I1, PTR, VOID, Aggregate, Struct, Type, Vector

Reader = Callable[[TypeCursor, str], Instruction]

TERMINATORS = frozenset({"br", "switch", "ret", "unreachable"})

_INT_BINARY = "add sub mul udiv sdiv urem srem shl lshr ashr and or xor".split()
_FLOAT_BINARY = "fadd fsub fmul fdiv frem".split()
_CASTS = (
    "trunc zext sext fptrunc fpext fptoui fptosi uitofp sitofp bitcast ptrtoint ptrtoaddr inttoptr addrspacecast"
).split()
_UNSUPPORTED = frozenset(
    "invoke callbr indirectbr resume landingpad va_arg catchswitch catchret cleanupret catchpad cleanuppad".split()
)


def instruction(c: TypeCursor) -> Instruction:
    """One instruction with its result name, metadata and place."""
    where, result = c.place(), ""
    if c.here.kind == "local":
        result = c.take().text
        c.expect("=")
    op = c.here.text
    if op in _UNSUPPORTED:
        raise UnsupportedOpError(f"the instruction '{op}' is not supported", location=where)
    reader = _READERS.get(op) if c.here.kind == "word" else None
    if reader is None:
        c.fail("expected an instruction")
    c.take()
    found = _tail(c, reader(c, op))
    return replace(found, result=result, where=where)


def _tail(c: TypeCursor, found: Instruction) -> Instruction:
    """`, align 4, !dbg !7`"""
    while c.accept(","):
        if c.accept("align"):
            found = replace(found, align=c.integer())
        elif c.accept("addrspace"):
            c.skip_group()
        elif c.here.kind == "meta":
            found = _attachment(c, found)
        else:
            c.fail("expected align or metadata")
    return found


def _attachment(c: TypeCursor, found: Instruction) -> Instruction:
    name, node = c.take().text, c.take().text
    if c.at("(", "{"):
        c.skip_group()
    return replace(found, debug=node) if name == "!dbg" else found


def truth(type: Type) -> Type:
    """The type of a comparison of two values of this type."""
    return Vector(type.count, I1) if isinstance(type, Vector) else I1


def _pair(c: TypeCursor) -> tuple[Operand, Operand]:
    type = c.type()
    left = value(c, type)
    c.expect(",")
    return left, value(c, type)


def _list(c: TypeCursor) -> tuple[Operand, ...]:
    """Typed operands up to metadata, an alignment or the end."""
    found = [typed(c)]
    while c.at(",") and c.after().kind != "meta" and c.after().text != "align":
        c.take()
        found.append(typed(c))
    return tuple(found)


def _binary(c: TypeCursor, op: str) -> Instruction:
    found_flags = flags(c)
    pair = _pair(c)
    return Instruction(op, pair[0].type, pair, flags=found_flags)


def _compare(c: TypeCursor, op: str) -> Instruction:
    found_flags = flags(c)
    word = c.expect_kind("word")
    pair = _pair(c)
    return Instruction(op, truth(pair[0].type), pair, word, found_flags)


def _unary(c: TypeCursor, op: str) -> Instruction:
    found_flags = flags(c)
    operand = typed(c)
    return Instruction(op, operand.type, (operand,), flags=found_flags)


def _cast(c: TypeCursor, op: str) -> Instruction:
    found_flags = flags(c)
    operand = typed(c)
    c.expect("to")
    return Instruction(op, c.type(), (operand,), flags=found_flags)


def _select(c: TypeCursor, op: str) -> Instruction:
    found_flags = flags(c)
    operands = _list(c)
    return Instruction(op, operands[1].type, operands, flags=found_flags)


def _extract_element(c: TypeCursor, op: str) -> Instruction:
    operands = _list(c)
    return Instruction(op, operands[0].type.scalar, operands)


def _insert_element(c: TypeCursor, op: str) -> Instruction:
    operands = _list(c)
    return Instruction(op, operands[0].type, operands)


def _shuffle(c: TypeCursor, op: str) -> Instruction:
    left, right, mask = _list(c)
    return Instruction(op, Vector(mask.type.lanes[0], left.type.scalar), (left, right, mask))


def _indices(c: TypeCursor) -> tuple[int, ...]:
    found = []
    while c.at(",") and c.after().kind == "number":
        c.take()
        found.append(c.integer())
    return tuple(found)


def _extract_value(c: TypeCursor, op: str) -> Instruction:
    whole = typed(c)
    indices = _indices(c)
    type = whole.type
    for i in indices:
        if not isinstance(type, Aggregate) or i >= len(type.parts):
            c.fail(f"no member {i} in {type}")
        type = type.parts[i][1]
    return Instruction(op, type, (whole,), indices=indices)


def _insert_value(c: TypeCursor, op: str) -> Instruction:
    whole = typed(c)
    c.expect(",")
    part = typed(c)
    return Instruction(op, whole.type, (whole, part), indices=_indices(c))


def _element_address(c: TypeCursor, op: str) -> Instruction:
    flags(c)
    source = c.type()
    c.expect(",")
    operands = _list(c)
    counts = [o.type.count for o in operands if isinstance(o.type, Vector)]
    type = Vector(counts[0], PTR) if counts else PTR
    return Instruction(op, type, operands, source=source)


def _load(c: TypeCursor, op: str) -> Instruction:
    flags(c)
    type = c.type()
    c.expect(",")
    pointer = typed(c)
    ordering(c)
    return Instruction(op, type, (pointer,), source=type)


def _store(c: TypeCursor, op: str) -> Instruction:
    flags(c)
    operands = _list(c)
    ordering(c)
    return Instruction(op, VOID, operands, source=operands[0].type)


def _alloca(c: TypeCursor, op: str) -> Instruction:
    flags(c)
    source, count = c.type(), ()
    if c.at(",") and c.after().kind == "word" and c.after().text.startswith("i"):
        c.take()
        count = (typed(c),)  # type: ignore[assignment]
    return Instruction(op, PTR, count, source=source)


def _atomic(c: TypeCursor, op: str) -> Instruction:
    flags(c)
    word = c.expect_kind("word")
    operands = _list(c)
    ordering(c)
    return Instruction(op, operands[1].type, operands, word)


def _exchange(c: TypeCursor, op: str) -> Instruction:
    flags(c)
    operands = _list(c)
    ordering(c)
    return Instruction(op, Struct((operands[1].type, I1)), operands)


def _fence(c: TypeCursor, op: str) -> Instruction:
    ordering(c)
    return Instruction(op)


def _label(c: TypeCursor) -> str:
    c.expect("label")
    return c.expect_kind("local")


def _branch(c: TypeCursor, op: str) -> Instruction:
    if c.at("label"):
        return Instruction(op, labels=(_label(c),))
    condition = typed(c)
    c.expect(",")
    then = _label(c)
    c.expect(",")
    return Instruction(op, operands=(condition,), labels=(then, _label(c)))


def _switch(c: TypeCursor, op: str) -> Instruction:
    operands = [typed(c)]
    c.expect(",")
    labels = [_label(c)]
    c.expect("[")
    while not c.accept("]"):
        operands.append(typed(c))
        c.expect(",")
        labels.append(_label(c))
    return Instruction(op, operands=tuple(operands), labels=tuple(labels))


def _return(c: TypeCursor, op: str) -> Instruction:
    if c.accept("void"):
        return Instruction(op)
    operand = typed(c)
    return Instruction(op, operand.type, (operand,))


def _phi(c: TypeCursor, op: str) -> Instruction:
    found_flags = flags(c)
    type = c.type()
    operands, labels = [], []
    while True:
        c.expect("[")
        operands.append(value(c, type))
        c.expect(",")
        labels.append(c.expect_kind("local"))
        c.expect("]")
        if not (c.at(",") and c.after().text == "["):
            return Instruction(op, type, tuple(operands), flags=found_flags, labels=tuple(labels))
        c.take()


_READERS: dict[str, Reader] = {
    **dict.fromkeys((*_INT_BINARY, *_FLOAT_BINARY), _binary),
    **dict.fromkeys(_CASTS, _cast),
    **dict.fromkeys(("fneg", "freeze"), _unary),
    **dict.fromkeys(("icmp", "fcmp"), _compare),
    **dict.fromkeys(("tail", "musttail", "notail"), prefixed_call),
    "select": _select,
    "extractelement": _extract_element,
    "insertelement": _insert_element,
    "shufflevector": _shuffle,
    "extractvalue": _extract_value,
    "insertvalue": _insert_value,
    "getelementptr": _element_address,
    "load": _load,
    "store": _store,
    "alloca": _alloca,
    "atomicrmw": _atomic,
    "cmpxchg": _exchange,
    "fence": _fence,
    "br": _branch,
    "switch": _switch,
    "ret": _return,
    "unreachable": lambda c, op: Instruction(op),
    "phi": _phi,
    "call": call,
}
