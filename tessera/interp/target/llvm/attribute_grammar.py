"""Reading what qualifies an instruction or an argument: flags, orderings and attributes."""

from __future__ import annotations

from tessera.interp.target.llvm.constant_grammar import starts_value
from tessera.interp.target.llvm.type_grammar import TypeCursor

_FLAGS = frozenset(
    "nsw nuw exact disjoint nneg samesign inbounds nusw fast nnan ninf nsz arcp contract afn reassoc "
    "volatile atomic weak inalloca tail musttail notail".split()
)
_ORDERINGS = ("unordered", "monotonic", "acquire", "release", "acq_rel", "seq_cst")


def flags(c: TypeCursor) -> frozenset[str]:
    """The flags between an opcode and its operands."""
    found = set()
    while c.here.kind == "word" and c.here.text in (*_FLAGS, "inrange"):
        found.add(c.take().text)
        if c.at("(") and "inrange" in found:
            c.skip_group()
    return frozenset(found)


def ordering(c: TypeCursor) -> None:
    """Scopes and orderings mean nothing here: an access is always whole and in order."""
    if c.accept("syncscope"):
        c.skip_group()
    while c.accept(*_ORDERINGS):
        pass


def _at_attribute(c: TypeCursor) -> bool:
    """Whether neither a type nor a value follows."""
    word = c.here.kind == "word" and not c.at_type() and not starts_value(c)
    return word or c.here.kind in ("string", "group")


def skip_attributes(c: TypeCursor) -> int:
    """Pass over attributes up to a type or a value; their alignment, or 0."""
    align = 0
    while _at_attribute(c):
        name = c.take().text
        if c.accept("="):
            c.take()
        elif name == "align":
            bracket = c.accept("(")
            align = c.integer()
            align = align if not bracket or c.expect(")") else 0
        elif c.at("("):
            c.skip_group()
        elif c.here.kind == "number":
            c.take()
    return align
