"""Arithmetic, logic, comparison, selection and moves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.interp.target.llvm.fma import fma
from tessera.interp.target.ptx.decode import Decoder, elementwise, rule
from tessera.interp.target.ptx.machine import Step
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.types import TYPES

_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_TWO: dict[str, Callable[..., Any]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_BITWISE: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_FLOAT_WORDS = {"rn"}  # the other modes (directed rounding, ftz, sat, approx) are not here yet
_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}


def _check(d: Decoder, inst: Instruction, *allowed: str) -> str:
    """The type an instruction ends with; any word between it and the opcode must be known."""
    if not set(inst.op[1:-1]) <= set(allowed):
        raise d.unsupported(inst)
    return inst.op[-1]


def _canonical(name: str, value: np.ndarray) -> np.ndarray:
    """Float results with the NaN that the hardware gives."""
    name = name.removesuffix("x2")
    if name in _NAN and (bad := np.isnan(value)).any():
        value = value.copy()
        value.view(f"u{value.itemsize}")[bad] = _NAN[name]
    return value


@rule("add", "sub", "mul")
def _(d: Decoder, inst: Instruction) -> Step:
    name = _check(d, inst, "lo", "wide", *_FLOAT_WORDS)
    t, function = TYPES[name], _TWO[inst.op[0]]
    if "wide" in inst.op:
        out = TYPES[_WIDE[name]]
        return elementwise(d, inst, lambda a, b: a.astype(out.dtype) * b.astype(out.dtype), out, t, t)
    return elementwise(d, inst, lambda a, b: _canonical(name, function(a, b)), t, t, t)


@rule("mad", "fma")
def _(d: Decoder, inst: Instruction) -> Step:
    name = _check(d, inst, "lo", "wide", *_FLOAT_WORDS)
    t = TYPES[name]
    if t.kind == "f":
        return elementwise(d, inst, lambda a, b, c: _canonical(name, fma(*np.broadcast_arrays(a, b, c))), t, t, t, t)
    out = TYPES[_WIDE[name]] if "wide" in inst.op else t
    return elementwise(d, inst, lambda a, b, c: a.astype(out.dtype) * b.astype(out.dtype) + c, out, t, t, out)


@rule("div", "rem")
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[_check(d, inst, *_FLOAT_WORDS)]
    if t.kind == "f":
        return elementwise(d, inst, lambda a, b: _canonical(t.name, a / b), t, t, t)
    take = 0 if inst.op[0] == "div" else 1
    return elementwise(d, inst, lambda a, b: _truncated(a, b)[take], t, t, t)


def _truncated(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quotient toward zero and remainder; division by zero gives all ones and the dividend."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    rest = a - quotient * safe
    quotient = quotient + ((rest != 0) & ((a < 0) != (safe < 0)))
    quotient = np.where(b == 0, ~np.zeros_like(a), quotient.astype(a.dtype))
    return quotient, np.where(b == 0, a, a - quotient * safe)


@rule("min", "max")
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[_check(d, inst)]
    if t.kind == "f":  # the number where one is NaN; -0 below +0
        pick = np.fmin if inst.op[0] == "min" else np.fmax
        tie = np.logical_or if inst.op[0] == "min" else np.logical_and

        def choose(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            zero = (a == 0) & (b == 0)
            signed = np.where(tie(np.signbit(a), np.signbit(b)), t.dtype.type(-0.0), t.dtype.type(0.0))
            return _canonical(t.name, np.where(zero, signed, pick(a, b)).astype(t.dtype))

        return elementwise(d, inst, choose, t, t, t)
    return elementwise(d, inst, np.minimum if inst.op[0] == "min" else np.maximum, t, t, t)


@rule("and", "or", "xor")
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[_check(d, inst)]
    return elementwise(d, inst, _BITWISE[inst.op[0]], t, t, t)


@rule("not", "neg", "abs")
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[_check(d, inst)]
    function = {"not": np.invert if t.kind != "p" else np.logical_not, "neg": np.negative, "abs": np.abs}
    return elementwise(d, inst, function[inst.op[0]], t, t)


@rule("shl", "shr")
def _(d: Decoder, inst: Instruction) -> Step:
    t, amount = TYPES[_check(d, inst)], TYPES["u32"]
    last = t.bits - 1

    def left(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        return np.where(n > last, t.dtype.type(0), a << np.minimum(n, last).astype(t.dtype))

    def right(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        filled = a >> np.minimum(n, last).astype(t.dtype)
        return filled if t.kind == "s" else np.where(n > last, t.dtype.type(0), filled)

    return elementwise(d, inst, left if inst.op[0] == "shl" else right, t, t, amount)


@rule("setp")
def _(d: Decoder, inst: Instruction) -> Step:
    name = _check(d, inst, *_COMPARE)
    if len(inst.op) != 3:
        raise d.unsupported(inst)
    compare: Callable[..., Any] = _COMPARE[inst.op[1]]
    if TYPES[name].kind == "f" and inst.op[1] == "ne":  # ordered: false where one is NaN
        compare = _ordered_ne
    return elementwise(d, inst, compare, TYPES["pred"], TYPES[name], TYPES[name])


def _ordered_ne(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a < b) | (a > b)


@rule("selp")
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[_check(d, inst)]
    return elementwise(d, inst, lambda a, b, p: np.where(p, a, b), t, t, t, TYPES["pred"])


@rule("mov")
def _(d: Decoder, inst: Instruction) -> Step:
    t = TYPES[_check(d, inst)]
    return elementwise(d, inst, lambda a: a, t, t)


@rule("cvt")
def _(d: Decoder, inst: Instruction) -> Step:
    """Between integers, to wider floats, and to f16, bf16 and f32 to nearest; no other mode yet."""
    source, out = TYPES[inst.op[-1]], TYPES[inst.op[-2]]
    narrowing = out.kind == "f" and (source.kind != "f" or out.bits < source.bits)
    exact = source.name != "f64" or out.name != "bf16"
    fits = source.parts == out.parts == 1 and exact and not (source.kind == "f" and out.kind != "f")
    fits = fits and (source.kind == "f" or out.name in ("f32", "f64") or out.kind != "f")
    if not fits or inst.op[1:-2] != (("rn",) if narrowing else ()):
        raise d.unsupported(inst)
    return elementwise(d, inst, lambda a: _canonical(out.name, a.astype(out.dtype)), out, source)
