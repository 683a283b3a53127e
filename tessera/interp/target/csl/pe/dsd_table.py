"""The table of DSD operations: element types, operands, functions, elements per cycle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from tessera.interp.target.csl.sema import types as t

Compute = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class DsdOp:
    """One DSD operation. `forms` lists the allowed operand kinds: D a DSD, S a scalar, P a pointer to the result's
    type.

    `sources` are the element types of the sources; `scalars` the types that a scalar may have in their place; `width`
    is the number of elements per cycle on (WSE-2, WSE-3).
    """

    name: str
    result: t.CslType
    sources: tuple[t.CslType, ...]
    forms: tuple[str, ...]
    compute: Compute
    width: tuple[int, int] = (1, 1)
    scalars: tuple[t.CslType, ...] = ()

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The element type of the result."""
        return self.result.dtype

    @cached_property
    def source_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The element types of the sources."""
        return tuple(x.dtype for x in self.sources)

    @cached_property
    def in_place(self) -> Callable[..., Any] | None:
        """A function that also stores the result; None if it must be converted first."""
        if any(dtype != self.dtype for dtype in self.source_dtypes):
            return None
        return _multiply_add_in_place if self.compute is _multiply_add else _find_ufunc(self.compute)

    @cached_property
    def accumulates(self) -> bool:
        """Whether it adds a product, all in one type."""
        return self.in_place is _multiply_add_in_place

    @cached_property
    def at_once(self) -> tuple[np.dtype[Any], tuple[np.dtype[Any], ...], Callable[..., Any] | None]:
        """`dtype`, `source_dtypes` and `in_place`, which each operation on vectors needs."""
        return self.dtype, self.source_dtypes, self.in_place


def _multiply_add_in_place(a: Any, b: Any, c: Any, out: Any) -> None:
    np.add(a, np.multiply(b, c), out)


def _find_ufunc(compute: Compute) -> Callable[..., Any] | None:
    return compute if isinstance(compute, np.ufunc) else None


def _multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a + b * c, rounded after the product and after the sum.

    No document specifies this for f32; a public program that tests for equal bits (a box stencil on WSE-3) requires it.
    """
    kind = a.dtype
    return a + (b if b.dtype == kind else b.astype(kind)) * (c if c.dtype == kind else c.astype(kind))


def _fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a + b * c of 16-bit floats, rounded once: a public probe on the vendor's simulator finds 130 results like that.

    The product is exact in f64, and so is every sum that is near the middle of two 16-bit floats.
    """
    return np.asarray(a, np.float64) + np.asarray(b, np.float64) * np.asarray(c, np.float64)


def _shift_left(a: Any, b: Any) -> Any:
    amount = np.asarray(b).astype(np.uint16)
    return np.where(amount > 15, 0, np.asarray(a).astype(np.uint32) << (amount & 15).astype(np.uint32))


def _shift_right(a: Any, b: Any) -> Any:
    amount = np.asarray(b).astype(np.uint16)
    return np.where(amount > 15, 0, np.asarray(a).astype(np.uint16) >> (amount & 15))


def _shift_right_arithmetic(a: Any, b: Any) -> Any:
    return np.asarray(a).astype(np.int16) >> np.minimum(np.asarray(b).astype(np.uint16), 15).astype(np.int16)


def _popcount(a: Any) -> Any:
    words = np.atleast_1d(np.asarray(a)).astype(np.uint16)
    return np.unpackbits(words.reshape(-1, 1).view(np.uint8), axis=1).sum(1).reshape(words.shape)


def _count_leading_zeros(a: Any) -> Any:
    x = np.atleast_1d(np.asarray(a)).astype(np.uint16)
    return np.where(x == 0, 16, 15 - np.floor(np.log2(np.maximum(x, 1))).astype(np.int32))


def _count_trailing_zeros(a: Any) -> Any:
    x = np.atleast_1d(np.asarray(a)).astype(np.int32) & 0xFFFF
    return np.where(x == 0, 16, np.log2(np.maximum(x & -x, 1)).astype(np.int32))


def _to_integer(a: Any) -> Any:
    return np.clip(np.rint(np.asarray(a, np.float64)), -32768, 32767)


def _identity(a: Any) -> Any:
    return a


_BINARY, _REDUCING, _UNARY, _MOVE = (
    ("DDD", "DSD", "DDS"),
    ("DDD", "DSD", "DDS", "PSD"),
    ("DD", "DS"),
    ("DD", "PD", "DS"),
)
_F16, _F32, _U16 = t.F16, t.F32, t.U16
_INTEGER_SCALARS = (t.I16, t.U16)


def _make_float_binary(name: str, compute: Compute, narrow: tuple[int, int], wide: tuple[int, int]) -> list[DsdOp]:
    """The f16 and f32 forms of an operation on two sources."""
    return [
        DsdOp(f"{name}h", _F16, (_F16, _F16), _REDUCING, compute, narrow),
        DsdOp(f"{name}s", _F32, (_F32, _F32), _REDUCING, compute, wide),
    ]


def _make_float_unary(name: str, compute: Compute, forms: tuple[str, ...] = _UNARY) -> list[DsdOp]:
    return [
        DsdOp(f"{name}h", _F16, (_F16,), forms, compute, (4, 8)),
        DsdOp(f"{name}s", _F32, (_F32,), forms, compute, (2, 4)),
    ]


def _make_integer_binary(name: str, compute: Compute, forms: tuple[str, ...] = _BINARY) -> DsdOp:
    return DsdOp(name, _U16, (_U16, _U16), forms, compute, (4, 8), _INTEGER_SCALARS)


def _make_integer_unary(name: str, compute: Compute) -> DsdOp:
    return DsdOp(name, _U16, (_U16,), _UNARY, compute, (1, 1), _INTEGER_SCALARS)


def _normalise(a: Any) -> Any:
    return np.frexp(a)[0] * 2


DSD_OPS: dict[str, DsdOp] = {
    op.name: op
    for op in (
        *_make_float_binary("fadd", np.add, (4, 8), (2, 4)),
        *_make_float_binary("fsub", np.subtract, (4, 8), (2, 4)),
        *_make_float_binary("fmul", np.multiply, (4, 8), (1, 4)),
        *_make_float_binary("fmax", np.maximum, (1, 8), (1, 4)),
        *_make_float_unary("fabs", np.abs),
        *_make_float_unary("fneg", np.negative),
        *_make_float_unary("fmov", _identity, _MOVE),
        *_make_float_unary("fnorm", _normalise, ("PS",)),
        DsdOp("fscaleh", _F16, (_F16, t.I16), ("PSS",), np.ldexp),
        DsdOp("fscales", _F32, (_F32, t.I16), ("PSS",), np.ldexp),
        DsdOp("faddhs", _F32, (_F32, _F16), _REDUCING, np.add, (2, 4), (_F16, _F32)),
        DsdOp("fmach", _F16, (_F16, _F16, _F16), ("DDDS",), _fused_multiply_add, (4, 8)),
        DsdOp("fmacs", _F32, (_F32, _F32, _F32), ("DDDS",), _multiply_add, (1, 1)),
        DsdOp("fmachs", _F32, (_F32, _F16, _F16), ("DDDS",), _multiply_add, (2, 4)),
        DsdOp("fh2s", _F32, (_F16,), _UNARY, _identity, (2, 4)),
        DsdOp("fs2h", _F16, (_F32,), _UNARY, _identity, (2, 4)),
        DsdOp("fh2xp16", t.I16, (_F16,), (*_UNARY, "PS"), _to_integer, (1, 1)),
        DsdOp("fs2xp16", t.I16, (_F32,), (*_UNARY, "PS"), _to_integer, (1, 1)),
        DsdOp("xp162fh", _F16, (t.I16,), _UNARY, _identity, (1, 1), _INTEGER_SCALARS),
        DsdOp("xp162fs", _F32, (t.I16,), _UNARY, _identity, (1, 1), _INTEGER_SCALARS),
        DsdOp("mov16", _U16, (_U16,), _MOVE, _identity, (4, 8), (*_INTEGER_SCALARS, t.F16)),
        DsdOp("mov32", t.U32, (t.U32,), _MOVE, _identity, (2, 4), (t.I32, t.U32, t.F32)),
        _make_integer_binary("add16", np.add),
        _make_integer_binary("addc16", np.add),
        _make_integer_binary("sub16", np.subtract, ("DDD", "DDS")),
        _make_integer_binary("and16", np.bitwise_and),
        _make_integer_binary("or16", np.bitwise_or),
        _make_integer_binary("xor16", np.bitwise_xor),
        _make_integer_binary("sll16", _shift_left),
        _make_integer_binary("slr16", _shift_right),
        _make_integer_binary("sar16", _shift_right_arithmetic),
        _make_integer_unary("clz", _count_leading_zeros),
        _make_integer_unary("ctz", _count_trailing_zeros),
        _make_integer_unary("popcnt", _popcount),
    )
}


def _with_half_format(op: DsdOp, half: t.CslType) -> DsdOp:
    """The operation with another 16-bit float format."""

    def swapped(types: tuple[t.CslType, ...]) -> tuple[t.CslType, ...]:
        return tuple(half if x is t.F16 else x for x in types)

    return replace(op, result=swapped((op.result,))[0], sources=swapped(op.sources), scalars=swapped(op.scalars))


# By the format of `@fp16()`, which all 16-bit operations of a program use.
DSD_OPS_BY_FP16: dict[str, dict[str, DsdOp]] = {
    "f16": DSD_OPS,
    "bf16": {name: _with_half_format(op, t.BF16) for name, op in DSD_OPS.items()},
}
