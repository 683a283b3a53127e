"""Reading operands: registers, globals and every spelling of a constant."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import ml_dtypes
import numpy as np

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.syntax import (
    Expression,
    Local,
    Many,
    Number,
    Operand,
    Symbol,
    Undefined,
    Zero,
)
from tessera.interp.target.llvm.type_grammar import TypeCursor
from tessera.interp.target.llvm.types import I8, VOID, Array, Float, Int, Type, Vector

Reader = Callable[[TypeCursor, Type], Operand]


def typed(c: TypeCursor) -> Operand:
    """`i32 %x`: a type, then a value of it."""
    return value(c, c.type())


def value(c: TypeCursor, type: Type) -> Operand:
    """A value whose type is known."""
    token = c.here
    reader = _WORDS.get(token.text) if token.kind in ("word", "punct") else _KINDS.get(token.kind)
    if reader is None:
        c.fail(f"expected a value of type {type}")
    return reader(c, type)


def starts_value(c: TypeCursor) -> bool:
    """Whether a value begins here, as against an attribute."""
    token = c.here
    return token.text in _WORDS if token.kind in ("word", "punct") else token.kind in _KINDS


def _local(c: TypeCursor, type: Type) -> Operand:
    return Local(type, c.take().text)


def _symbol(c: TypeCursor, type: Type) -> Operand:
    return Symbol(type, c.take().text)


def _number(c: TypeCursor, type: Type) -> Operand:
    if isinstance(type, Float):
        return Number(type, _rounded(c, type, float(c.take().text)))
    if not isinstance(type, Int):
        c.fail(f"expected a value of type {type}")
    return Number(type, c.integer())


def _rounded(c: TypeCursor, type: Float, number: float) -> float:
    """As LLVM has it, a literal must be a value of its type."""
    if number == number and float(np.asarray(number).astype(type.dtype)) != number:
        c.index -= 1
        c.fail(f"not exactly a {type}")
    return number


def _half(digits: str) -> float:
    return float(np.array(int(digits, 16), np.uint16).view(np.float16))


def _bfloat(digits: str) -> float:
    return float(np.array(int(digits, 16), np.uint16).view(ml_dtypes.bfloat16))


def _double(digits: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(digits.rjust(16, "0")))[0])


_HEX = {"H": _half, "R": _bfloat}


def _hex(c: TypeCursor, type: Type) -> Operand:
    digits = c.here.text[2:]
    if not isinstance(type, Float):
        c.fail(f"expected a value of type {type}")
    if digits[0] in "KLM":
        raise UnsupportedOpError(f"the float format {type} is not supported", location=c.place())
    c.take()
    read = _HEX.get(digits[0])
    return Number(type, read(digits[1:]) if read else _double(digits))


def _bytes(c: TypeCursor, type: Type) -> Operand:
    """`c"..."`, where a backslash and two digits give a byte."""
    text = c.take().text[2:-1]
    raw = re.sub(rb"\\([0-9a-fA-F]{2}|\\)", _unescape, text.encode())
    return Many(Array(len(raw), I8), tuple(Number(I8, byte) for byte in raw))


def _unescape(match: re.Match[bytes]) -> bytes:
    return b"\\" if match.group(1) == b"\\" else bytes.fromhex(match.group(1).decode())


def _keyword(make: Callable[[Type], Operand]) -> Reader:
    def read(c: TypeCursor, type: Type) -> Operand:
        c.take()
        return make(type)

    return read


def _many(close: str) -> Reader:
    def read(c: TypeCursor, type: Type) -> Operand:
        c.take()
        elements: list[Operand] = []
        while not c.at(close):
            elements.append(typed(c))
            if not c.accept(","):
                break
        c.expect(close)
        return Many(type, tuple(elements))

    return read


_row = _many(">")


def _angle(c: TypeCursor, type: Type) -> Operand:
    """A vector, or a packed struct `<{ ... }>`."""
    if c.after().text != "{":
        return _row(c, type)
    c.take()
    inside = _many("}")(c, type)
    c.expect(">")
    return inside


def _splat(c: TypeCursor, type: Type) -> Operand:
    c.take()
    c.expect("(")
    element = typed(c)
    c.expect(")")
    if not isinstance(type, Vector):
        c.fail("splat needs a vector type")
    return Many(type, (element,) * type.count)


def _skip_flags(c: TypeCursor) -> None:
    while c.at("inbounds", "nuw", "nusw", "nsw", "inrange"):
        inrange = c.take().text == "inrange"
        if inrange and c.at("("):
            c.skip_group()


def _address(c: TypeCursor, type: Type) -> Operand:
    """getelementptr (T, ptr @g, i64 1)"""
    op = c.take().text
    _skip_flags(c)
    c.expect("(")
    source = c.type()
    operands = []
    while c.accept(","):
        _skip_flags(c)
        operands.append(typed(c))
    c.expect(")")
    return Expression(type, op, tuple(operands), source)


def _cast(c: TypeCursor, type: Type) -> Operand:
    """ptrtoint (ptr @g to i64)"""
    op = c.take().text
    c.expect("(")
    operand = typed(c)
    c.expect("to")
    target = c.type()
    c.expect(")")
    return Expression(target, op, (operand,))


def _arithmetic(c: TypeCursor, type: Type) -> Operand:
    """add (i64 ptrtoint (ptr @g to i64), i64 8)"""
    op = c.take().text
    _skip_flags(c)
    c.expect("(")
    left = typed(c)
    c.expect(",")
    right = typed(c)
    c.expect(")")
    return Expression(type, op, (left, right))


def _metadata(c: TypeCursor, type: Type) -> Operand:
    """An operand of type metadata: never read."""
    if c.take().text.startswith("!DI") or c.at("{"):
        c.skip_group()
    return Undefined(VOID)


_KINDS: dict[str, Reader] = {
    "local": _local,
    "global": _symbol,
    "number": _number,
    "hex": _hex,
    "bytes": _bytes,
    "meta": _metadata,
}

_WORDS: dict[str, Reader] = {
    "true": _keyword(lambda t: Number(t, 1)),
    "false": _keyword(Zero),
    "null": _keyword(Zero),
    "none": _keyword(Zero),
    "zeroinitializer": _keyword(Zero),
    "undef": _keyword(Undefined),
    "poison": _keyword(Undefined),
    "splat": _splat,
    "<": _angle,
    "[": _many("]"),
    "{": _many("}"),
    "getelementptr": _address,
    **dict.fromkeys(("bitcast", "ptrtoint", "ptrtoaddr", "inttoptr", "addrspacecast", "trunc"), _cast),
    **dict.fromkeys(("add", "sub", "mul", "xor", "and", "or", "shl", "lshr"), _arithmetic),
}
