"""Constants as register values, and the bytes of global variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tessera.errors import UnknownNameError, UnsupportedOpError
from tessera.interp.target.llvm.access import access
from tessera.interp.target.llvm.lanes import Value, integers, undefined, zero
from tessera.interp.target.llvm.memory import Memory
from tessera.interp.target.llvm.pure import INSTRUCTIONS
from tessera.interp.target.llvm.syntax import (
    Expression,
    Instruction,
    Many,
    Number,
    Operand,
    Symbol,
    Undefined,
    Zero,
)
from tessera.interp.target.llvm.types import I1, Aggregate, Array, Float, Type, Vector

Addresses = Mapping[str, int]


def constant(operand: Operand, addresses: Addresses) -> Value:
    """The value of a constant, the same in all lanes."""
    return _READERS[type(operand)](operand, addresses)


def _number(c: Number, addresses: Addresses) -> Value:
    if isinstance(c.type, Float):
        return np.array([c.value]).astype(c.type.dtype)
    return integers([int(c.value)], c.type)


def _many(c: Many, addresses: Addresses) -> Value:
    if isinstance(c.type, Aggregate):
        return tuple(constant(e, addresses) for e in c.elements)
    return _row(c, addresses)[None]


def _row(c: Many, addresses: Addresses) -> np.ndarray:
    """Scalars side by side."""
    scalar = c.elements[0].type
    if not isinstance(scalar, Float) and all(isinstance(e, Number) for e in c.elements):
        return integers([int(e.value) for e in c.elements], scalar)  # type: ignore[union-attr]
    return np.concatenate([np.asarray(constant(e, addresses)) for e in c.elements])


def _symbol(c: Symbol, addresses: Addresses) -> Value:
    if c.name not in addresses:
        raise UnknownNameError(f"@{c.name} is not a variable of this module")
    return np.array([addresses[c.name]], np.int64)


def _expression(c: Expression, addresses: Addresses) -> Value:
    build = INSTRUCTIONS.get(c.op)
    if build is None:
        raise UnsupportedOpError(f"the constant expression {c.op} is not supported")
    run = build(Instruction(c.op, c.type, c.operands, source=c.source))
    return run(*(constant(operand, addresses) for operand in c.operands))


_READERS: dict[type, Callable[[Any, Addresses], Value]] = {
    Number: _number,
    Many: _many,
    Zero: lambda c, addresses: zero(c.type),
    Undefined: lambda c, addresses: undefined(c.type),
    Symbol: _symbol,
    Expression: _expression,
}


def image(type: Type, initial: Operand, addresses: Addresses) -> np.ndarray:
    """The bytes of a variable."""
    memory, data = Memory(), np.zeros(type.stride, np.uint8)
    if not isinstance(initial, Zero):
        _write(memory, memory.add("variable", data), type, initial, addresses)
    return data


def _write(memory: Memory, place: int, type: Type, initial: Operand, addresses: Addresses) -> None:
    """Store a constant, an array of scalars as if it were a vector."""
    if isinstance(initial, Zero | Undefined):
        return
    if isinstance(type, Array) and not isinstance(type.element, Aggregate | Vector) and type.element != I1:
        assert isinstance(initial, Many)
        if initial.elements:
            row = _row(initial, addresses)[None]
            memory.store(np.array([place]), row, access(Vector(type.count, type.element), 1))
    elif isinstance(type, Aggregate):
        assert isinstance(initial, Many)
        for (offset, part), element in zip(type.parts, initial.elements, strict=True):
            _write(memory, place + offset, part, element, addresses)
    else:
        memory.store(np.array([place]), np.asarray(constant(initial, addresses)), access(type, 1))
