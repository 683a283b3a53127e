"""The DSD operations: element types, how many operands, what they compute, how many elements a cycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.interp.target.csl import types as t

Compute = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class DsdOp:
    """One operation. `forms` spells its operands: D a descriptor, S a scalar, P a pointer to the result's type.

    `sources` are the element types of the sources; `scalars` the types a scalar may have in their place;
    `width` is the elements a cycle on (WSE-2, WSE-3).
    """

    name: str
    result: t.Type
    sources: tuple[t.Type, ...]
    forms: tuple[str, ...]
    compute: Compute
    width: tuple[int, int] = (1, 1)
    scalars: tuple[t.Type, ...] = ()


def _multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a + b * c, rounded after the product and after the sum. No document says so; a public program that asks for equal
    bits (a box stencil on WSE-3, in the order of its own loops) needs it."""
    kind = np.asarray(a).dtype
    return np.asarray(a) + np.asarray(b, kind) * np.asarray(c, kind)


def _shift_left(a: Any, b: Any) -> Any:
    amount = np.asarray(b).astype(np.uint16)
    return np.where(amount > 15, 0, np.asarray(a).astype(np.uint32) << (amount & 15).astype(np.uint32))


def _shift_right(a: Any, b: Any) -> Any:
    amount = np.asarray(b).astype(np.uint16)
    return np.where(amount > 15, 0, np.asarray(a).astype(np.uint16) >> (amount & 15))


def _shift_arithmetic(a: Any, b: Any) -> Any:
    return np.asarray(a).astype(np.int16) >> np.minimum(np.asarray(b).astype(np.uint16), 15).astype(np.int16)


def _popcount(a: Any) -> Any:
    words = np.atleast_1d(np.asarray(a)).astype(np.uint16)
    return np.unpackbits(words.reshape(-1, 1).view(np.uint8), axis=1).sum(1).reshape(words.shape)


def _leading(a: Any) -> Any:
    x = np.atleast_1d(np.asarray(a)).astype(np.uint16)
    return np.where(x == 0, 16, 15 - np.floor(np.log2(np.maximum(x, 1))).astype(np.int32))


def _trailing(a: Any) -> Any:
    x = np.atleast_1d(np.asarray(a)).astype(np.int32) & 0xFFFF
    return np.where(x == 0, 16, np.log2(np.maximum(x & -x, 1)).astype(np.int32))


def _to_integer(a: Any) -> Any:
    return np.clip(np.rint(np.asarray(a, np.float64)), -32768, 32767)


def _same(a: Any) -> Any:
    return a


def _add(a: Any, b: Any) -> Any:
    return np.asarray(a) + np.asarray(b)


def _subtract(a: Any, b: Any) -> Any:
    return np.asarray(a) - np.asarray(b)


_BINARY, _REDUCING, _UNARY, _MOVE = (
    ("DDD", "DSD", "DDS"),
    ("DDD", "DSD", "DDS", "PSD"),
    ("DD", "DS"),
    ("DD", "PD", "DS"),
)
_H, _S, _U = t.F16, t.F32, t.U16
_WORDS = (t.I16, t.U16)


def _pairs(name: str, compute: Compute, narrow: tuple[int, int], wide: tuple[int, int]) -> list[DsdOp]:
    """The f16 and the f32 form of one operation of two sources."""
    return [
        DsdOp(f"{name}h", _H, (_H, _H), _REDUCING, compute, narrow),
        DsdOp(f"{name}s", _S, (_S, _S), _REDUCING, compute, wide),
    ]


def _single(name: str, compute: Compute, forms: tuple[str, ...] = _UNARY) -> list[DsdOp]:
    return [
        DsdOp(f"{name}h", _H, (_H,), forms, compute, (4, 8)),
        DsdOp(f"{name}s", _S, (_S,), forms, compute, (2, 4)),
    ]


def _integer(name: str, compute: Compute, forms: tuple[str, ...] = _BINARY) -> DsdOp:
    return DsdOp(name, _U, (_U, _U), forms, compute, (4, 8), _WORDS)


def _bitwise(name: str, compute: Compute) -> DsdOp:
    return DsdOp(name, _U, (_U,), _UNARY, compute, (1, 1), _WORDS)


def _normal(a: Any) -> Any:
    return np.frexp(a)[0] * 2


DSD_OPS: dict[str, DsdOp] = {
    op.name: op
    for op in (
        *_pairs("fadd", _add, (4, 8), (2, 4)),
        *_pairs("fsub", _subtract, (4, 8), (2, 4)),
        *_pairs("fmul", np.multiply, (4, 8), (1, 4)),
        *_pairs("fmax", np.maximum, (1, 8), (1, 4)),
        *_single("fabs", np.abs),
        *_single("fneg", np.negative),
        *_single("fmov", _same, _MOVE),
        *_single("fnorm", _normal, ("PS",)),
        DsdOp("fscaleh", _H, (_H, t.I16), ("PSS",), np.ldexp),
        DsdOp("fscales", _S, (_S, t.I16), ("PSS",), np.ldexp),
        DsdOp("faddhs", _S, (_S, _H), _REDUCING, _add, (2, 4), (_H, _S)),
        DsdOp("fmach", _H, (_H, _H, _H), ("DDDS",), _multiply_add, (4, 8)),
        DsdOp("fmacs", _S, (_S, _S, _S), ("DDDS",), _multiply_add, (2, 4)),
        DsdOp("fmachs", _S, (_S, _H, _H), ("DDDS",), _multiply_add, (2, 4)),
        DsdOp("fh2s", _S, (_H,), _UNARY, _same, (2, 4)),
        DsdOp("fs2h", _H, (_S,), _UNARY, _same, (2, 4)),
        DsdOp("fh2xp16", t.I16, (_H,), (*_UNARY, "PS"), _to_integer, (1, 1)),
        DsdOp("fs2xp16", t.I16, (_S,), (*_UNARY, "PS"), _to_integer, (1, 1)),
        DsdOp("xp162fh", _H, (t.I16,), _UNARY, _same, (1, 1), _WORDS),
        DsdOp("xp162fs", _S, (t.I16,), _UNARY, _same, (1, 1), _WORDS),
        DsdOp("mov16", _U, (_U,), _MOVE, _same, (4, 8), (*_WORDS, t.F16)),
        DsdOp("mov32", t.U32, (t.U32,), _MOVE, _same, (2, 4), (t.I32, t.U32, t.F32)),
        _integer("add16", _add),
        _integer("addc16", _add),
        _integer("sub16", _subtract, ("DDD", "DDS")),
        _integer("and16", np.bitwise_and),
        _integer("or16", np.bitwise_or),
        _integer("xor16", np.bitwise_xor),
        _integer("sll16", _shift_left),
        _integer("slr16", _shift_right),
        _integer("sar16", _shift_arithmetic),
        _bitwise("clz", _leading),
        _bitwise("ctz", _trailing),
        _bitwise("popcnt", _popcount),
    )
}


def _in_format(op: DsdOp, half: t.Type) -> DsdOp:
    """An operation whose 16-bit floats have another format."""

    def swapped(types: tuple[t.Type, ...]) -> tuple[t.Type, ...]:
        return tuple(half if x is t.F16 else x for x in types)

    return replace(op, result=swapped((op.result,))[0], sources=swapped(op.sources), scalars=swapped(op.scalars))


# By what `@fp16()` names: every 16-bit operation of a program takes that format.
OPERATIONS: dict[str, dict[str, DsdOp]] = {
    "f16": DSD_OPS,
    "bf16": {name: _in_format(op, t.BF16) for name, op in DSD_OPS.items()},
}
