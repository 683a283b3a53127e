"""Reading calls."""

from __future__ import annotations

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.attribute_grammar import flags, skip_attributes
from tessera.interp.target.llvm.constant_grammar import typed, value
from tessera.interp.target.llvm.syntax import Instruction, Operand
from tessera.interp.target.llvm.type_grammar import TypeCursor


def _argument(c: TypeCursor) -> tuple[Operand, int]:
    type = c.type()
    if str(type) == "metadata" and c.at_type():
        return typed(c), 0
    align = skip_attributes(c)
    return value(c, type), align


def prefixed_call(c: TypeCursor, op: str) -> Instruction:
    """tail call"""
    c.expect("call")
    return call(c, "call")


def call(c: TypeCursor, op: str) -> Instruction:
    """A direct call: attributes are passed over, but for the alignment of arguments."""
    where, found = c.place(), flags(c)
    skip_attributes(c)
    type = c.type()
    skip_attributes(c)
    if c.here.kind != "global":
        kind = "inline assembly" if c.at("asm") else "a call through a pointer"
        raise UnsupportedOpError(f"call: {kind} is not supported", location=where)
    callee, arguments = c.take().text, []
    c.expect("(")
    while not c.at(")"):
        arguments.append(_argument(c))
        if not c.accept(","):
            break
    _call_tail(c)
    operands, aligns = zip(*arguments) if arguments else ((), ())  # noqa: B905 (pairs)
    return Instruction("call", type, tuple(operands), callee, found, aligns=tuple(aligns))


def _call_tail(c: TypeCursor) -> None:
    """Attributes and operand bundles end with the line: the next word is an instruction."""
    line = c.line(c.expect(")"))
    while c.line() == line and (c.here.kind in ("word", "string", "group") or c.at("[")):
        if c.at("["):
            c.skip_group()
        elif c.take() and c.at("("):
            c.skip_group()
