"""Integer arithmetic (PTX ISA 9.7.1 and 9.7.2, with carry)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.interp.target.ptx.isa.decoder import INTEGER_RULES, PtxDecoder, check_modifiers, decode_rule
from tessera.interp.target.ptx.isa.logic_and_shift import multiply_high
from tessera.interp.target.ptx.isa.operands import make_elementwise_step
from tessera.interp.target.ptx.machine.simt import LaneStep
from tessera.interp.target.ptx.text.syntax import BITS, TYPES, PtxInstruction, PtxType

_WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_SUM: dict[str, Callable[..., Any]] = {"add": operator.add, "sub": operator.sub}


def clamp_to_type(wide: np.ndarray, t: PtxType) -> np.ndarray:
    """Integers clamped to a type's range."""
    limits = np.iinfo(t.dtype)
    return np.clip(wide, limits.min, limits.max).astype(t.dtype)


@decode_rule("add", "sub", table=INTEGER_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t, function = TYPES[inst.op[-1]], _SUM[inst.op[0]]
    words = check_modifiers(d, inst, "sat", "cc")
    if "cc" in words:
        return add_with_carry(d, inst, t, lambda a, b: (a, b), t, t)
    if "sat" in words:
        return make_elementwise_step(
            d, inst, lambda a, b: clamp_to_type(function(a.astype("i8"), b.astype("i8")), t), t, t, t
        )
    return make_elementwise_step(d, inst, function, t, t, t)


@decode_rule("addc", "subc")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    check_modifiers(d, inst, "cc")
    return add_with_carry(d, inst, t, lambda a, b: (a, b), t, t)


def add_with_carry(
    d: PtxDecoder, inst: PtxInstruction, t: PtxType, terms: Callable[..., Any], *types: PtxType
) -> LaneStep:
    """An addition or subtraction of two terms that reads or writes the carry.

    A subtraction adds the complement: its carry is 1 if there is no borrow. nvcc's 128-bit division depends on this: it
    reads the carry of `subc.cc` by `addc`.
    """
    reads_carry, writes_carry = inst.op[0].endswith("c"), "cc" in inst.op
    is_subtraction = inst.op[0].startswith("sub")
    carry, unsigned = d.register("%carry", 1), BITS[t.bits]
    write = d.writer(inst.operands[0], TYPES[f"b{t.bits}"])
    readers = [d.reader(o, k) for o, k in zip(inst.operands[1:], types, strict=True)]

    def step(m: Any, lanes: Any) -> None:
        a, b = (x.view(unsigned) for x in terms(*(r(m, lanes) for r in readers)))
        one = (m.read(carry, lanes) ^ is_subtraction).astype(unsigned) if reads_carry else np.zeros((1, 1), unsigned)
        first = a - b if is_subtraction else a + b
        total = first - one if is_subtraction else first + one
        out = (first > a) | (total > first) if is_subtraction else (first < a) | (total < first)
        write(m, lanes, total)
        if writes_carry:
            m.write(carry, lanes, out ^ is_subtraction)

    return step


@decode_rule("mul", "mul24", table=INTEGER_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    words = check_modifiers(d, inst, "lo", "hi", "wide")
    product, out = _multiply_part(inst.op[0] == "mul24", words, t)
    return make_elementwise_step(d, inst, product, out, t, t)


def _multiply_part(is_24_bit: bool, words: list[str], t: PtxType) -> tuple[Callable[..., Any], PtxType]:
    """The part of a product that the modifiers select, and its type."""
    if is_24_bit:
        return (_multiply_24_bit_high if "hi" in words else _multiply_24_bit_low), t
    if "wide" in words:
        out = TYPES[_WIDE[t.name]]
        return lambda a, b: a.astype(out.dtype) * b.astype(out.dtype), out
    return (multiply_high if "hi" in words else operator.mul), t


def _truncate_to_24_bits(a: np.ndarray) -> np.ndarray:
    wide = a.astype(f"{a.dtype.kind}8")
    return wide << wide.dtype.type(40) >> wide.dtype.type(40)


def _multiply_24_bit_low(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (_truncate_to_24_bits(a) * _truncate_to_24_bits(b)).astype(a.dtype)


def _multiply_24_bit_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    product = _truncate_to_24_bits(a) * _truncate_to_24_bits(b)
    return (product >> product.dtype.type(16)).astype(a.dtype)


@decode_rule("mad", "mad24", table=INTEGER_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    words = check_modifiers(d, inst, "lo", "hi", "wide", "cc", "sat")
    product, out = _multiply_part(inst.op[0] == "mad24", words, t)
    if "cc" in words:
        return add_with_carry(d, inst, t, lambda a, b, c: (product(a, b), c), t, t, t)
    if "sat" in words:
        return make_elementwise_step(
            d, inst, lambda a, b, c: clamp_to_type(product(a, b).astype("i8") + c.astype("i8"), t), t, t, t, t
        )
    return make_elementwise_step(d, inst, lambda a, b, c: product(a, b) + c, out, t, t, out)


@decode_rule("madc")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    product, _ = _multiply_part(False, check_modifiers(d, inst, "lo", "hi", "cc"), t)
    return add_with_carry(d, inst, t, lambda a, b, c: (product(a, b), c), t, t, t)


@decode_rule("div", "rem", table=INTEGER_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    check_modifiers(d, inst)
    take = 0 if inst.op[0] == "div" else 1
    return make_elementwise_step(d, inst, lambda a, b: divide_truncating(a, b)[take], t, t, t)


def divide_truncating(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The quotient, rounded toward zero, and the remainder; division by zero gives all ones, as on hardware."""
    a, b = np.broadcast_arrays(a, b)
    by_zero = b == 0
    safe = np.where(by_zero, b.dtype.type(1), b)
    quotient = a // safe
    rest = a - quotient * safe
    if a.dtype.kind == "i":
        quotient = quotient + ((rest != 0) & ((a < 0) != (safe < 0)))
    quotient, ones = quotient.astype(a.dtype), ~np.zeros_like(a)
    return np.where(by_zero, ones, quotient), np.where(by_zero, ones, a - quotient * safe)


@decode_rule("min", "max", table=INTEGER_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    positive = "relu" in check_modifiers(d, inst, "relu")
    function = np.minimum if inst.op[0] == "min" else np.maximum
    if positive:
        return make_elementwise_step(d, inst, lambda a, b: np.maximum(function(a, b), t.dtype.type(0)), t, t, t)
    return make_elementwise_step(d, inst, function, t, t, t)


@decode_rule("abs", "neg", table=INTEGER_RULES)
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    check_modifiers(d, inst)
    return make_elementwise_step(d, inst, np.abs if inst.op[0] == "abs" else np.negative, t, t)


@decode_rule("sad")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    check_modifiers(d, inst)
    return make_elementwise_step(d, inst, lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b)), t, t, t, t)


@decode_rule("dp4a", "dp2a")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """Four products of bytes, or two of a 16-bit word and a byte, added to the third operand."""
    words, b32 = check_modifiers(d, inst, "lo", "hi", types=2), TYPES["b32"]
    kinds = ["i" if w == "s32" else "u" for w in inst.op[-2:]]
    out = TYPES["s32" if "i" in kinds else "u32"]
    terms_, width = (4, 1) if inst.op[0] == "dp4a" else (2, 2)
    first = 2 if "hi" in words else 0

    def parts(x: np.ndarray, kind: str, size: int) -> np.ndarray:
        return np.ascontiguousarray(x)[..., None].view(f"{kind}{size}").astype(np.int64)

    def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        x, y = parts(a, kinds[0], width), parts(b, kinds[1], 1)[..., first : first + terms_]
        return ((x * y).sum(axis=-1) + c).astype(np.uint32).view(out.dtype)

    return make_elementwise_step(d, inst, dot, out, b32, b32, out)
