"""Video instructions: arithmetic on bytes and halves of 32-bit registers (PTX ISA 9.7.18).

The scalar ones select a part of each source, operate in more bits than any part has, saturate, and combine the result
with a third source. The SIMD ones do this for two halves or four bytes at once.

The results are those of the ISA. On sm_90 ptxas replaces most of these instructions by others, whose results differ in
rare forms: saturation to a part, the part `.h1` of a result, sums beyond 32 bits, shifts and vmad with saturation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tessera.interp.target.ptx.isa.decoder import PtxDecoder, check_modifiers, decode_rule
from tessera.interp.target.ptx.isa.operands import Reader
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import TYPES, NameOperand, PtxInstruction, PtxOperand

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]
_PART = re.compile(r"(.*)\.([bh])(\d+)")
_PART_BITS = {"b": 8, "h": 16}
_COMPARISONS: dict[str, Combine] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_SECONDARY: dict[str, Combine] = {"add": np.add, "min": np.minimum, "max": np.maximum}


def _average(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The average, rounded away from zero."""
    total = a + b
    return (total + (total >= 0)) >> 1


_OPERATIONS: dict[str, Combine] = {
    "vadd": np.add, "vsub": np.subtract, "vabsdiff": lambda a, b: np.abs(a - b), "vmin": np.minimum,
    "vmax": np.maximum, "vavrg": _average,
}  # fmt: skip


def _split_part(operand: PtxOperand) -> tuple[PtxOperand, str, str]:
    """An operand without its part selector, the kind of the selector (b, h or ""), and its digits."""
    match = _PART.fullmatch(operand.text) if isinstance(operand, NameOperand) else None
    if match is None or not isinstance(operand, NameOperand):
        return operand, "", ""
    return replace(operand, text=match[1]), match[2], match[3]


def _is_signed(word: str) -> bool:
    return TYPES[word].kind == "s"


def _extend(value: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    """The low bits of integers as numbers."""
    low = value & ((1 << bits) - 1)
    return low - ((low >> (bits - 1)) << bits) if signed else low


def _read_word(d: PtxDecoder, operand: PtxOperand) -> Reader:
    read = d.reader(operand, TYPES["u32"])
    return lambda m, lanes: read(m, lanes).astype(np.int64)


def _read_part(d: PtxDecoder, operand: PtxOperand, type: str) -> Reader:
    """A source of a scalar instruction: a register, or the byte or half of it that its selector names."""
    whole, kind, digit = _split_part(operand)
    if isinstance(whole, NameOperand):
        whole = replace(whole, negated=False)
    bits = _PART_BITS[kind] if kind else 32
    read, shift, signed = _read_word(d, whole), bits * int(digit or 0), _is_signed(type)
    if shift >= 32:
        raise ValueError(digit)
    return lambda m, lanes: _extend(read(m, lanes) >> shift, bits, signed)


def _saturate(value: np.ndarray, bits: int, signed: bool) -> np.ndarray:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return np.clip(value, low, high)


def _make_scalar_step(
    d: PtxDecoder, inst: PtxInstruction, compute: Callable[[np.ndarray, np.ndarray], np.ndarray], types: Sequence[str],
    result: str, words: Sequence[str],
) -> LaneStep:  # fmt: skip
    """A step of a scalar instruction: `types` are those of the sources, `result` that of the result."""
    target, kind, digit = _split_part(inst.operands[0])
    secondary = next((_SECONDARY[w] for w in words if w in _SECONDARY), None)
    write = d.writer(target, TYPES["u32"])
    a, b = (_read_part(d, o, t) for o, t in zip(inst.operands[1:3], types, strict=True))
    if len(inst.operands) != (4 if kind or secondary else 3):
        raise d.unsupported(inst)
    signed, bits = _is_signed(result), _PART_BITS.get(kind, 32)
    c = _read_word(d, inst.operands[3]) if kind or secondary else None

    def combine(value: np.ndarray, other: np.ndarray) -> np.ndarray:
        if secondary is not None:
            return secondary(_extend(value, 32, signed), _extend(other, 32, signed))
        shift = bits * int(digit)
        return (value & ((1 << bits) - 1)) << shift | other & ~(((1 << bits) - 1) << shift)

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        value = compute(a(m, lanes), b(m, lanes))
        if "sat" in words:
            value = _saturate(value, bits, signed)
        whole = combine(value, c(m, lanes)) if c is not None else value
        write(m, lanes, (whole & 0xFFFFFFFF).astype(np.uint32))

    return step


@decode_rule("vadd", "vsub", "vabsdiff", "vmin", "vmax")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    result, *types = inst.op[1:4]
    words = check_modifiers(d, inst, "sat", *_SECONDARY, skip=4, types=0)
    return _make_scalar_step(d, inst, _OPERATIONS[inst.op[0]], types, result, words)


@decode_rule("vset")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    compare = _COMPARISONS[inst.op[3]]
    words = check_modifiers(d, inst, *_SECONDARY, skip=4, types=0)
    return _make_scalar_step(
        d, inst, lambda a, b: compare(a, b).astype(np.int64), inst.op[1:3], inst.op[1], words
    )  # fmt: skip


@decode_rule("vshl", "vshr")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """A shift by a number of bits that is clamped to 32, or taken modulo 32."""
    result, *types = inst.op[1:4]
    words = check_modifiers(d, inst, "sat", "clamp", "wrap", *_SECONDARY, skip=4, types=0)
    left = inst.op[0] == "vshl"

    def shift(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        count = b & 31 if "wrap" in words else np.minimum(b, 32)
        wide, count = a.astype(object), count.astype(object)
        return np.asarray(wide << count if left else wide >> count)

    return _make_scalar_step(d, inst, shift, types, result, words)


@decode_rule("vmad")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """A product plus a third source, of which one may be negated, shifted right by 7 or 15 bits."""
    words = check_modifiers(d, inst, "sat", "shr7", "shr15", "po", skip=4, types=0)
    write = d.writer(inst.operands[0], TYPES["u32"])
    signs = [isinstance(o, NameOperand) and o.negated for o in inst.operands[1:]]
    sources = [replace(o, negated=False) if isinstance(o, NameOperand) else o for o in inst.operands[1:]]
    a, b = (_read_part(d, o, t) for o, t in zip(sources[:2], inst.op[2:4], strict=True))
    minus = signs[0] != signs[1]
    signed = any(map(_is_signed, inst.op[2:4])) or minus or signs[2]
    c = _read_part(d, sources[2], "s32" if signed else "u32")
    shift = 7 if "shr7" in words else 15 if "shr15" in words else 0

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        product = a(m, lanes).astype(object) * b(m, lanes).astype(object) * (-1 if minus else 1)
        added = c(m, lanes).astype(object) * (-1 if signs[2] else 1)
        value = (product + added + ("po" in words)) >> shift
        if "sat" in words:
            value = _saturate(value, 32, signed)
        write(m, lanes, np.asarray(value & 0xFFFFFFFF).astype(np.uint32))

    return step


# SIMD: two halves or four bytes.


_DEFAULT_SELECTORS = {2: ("10", "32"), 4: ("3210", "7654")}


def _read_lanes(d: PtxDecoder, pair: Sequence[PtxOperand], digits: str, count: int, signed: bool) -> Reader:
    """The halves or bytes that a selector takes from a pair of registers, the lowest first."""
    bits, low, high = 32 // count, _read_word(d, pair[0]), _read_word(d, pair[1])
    places = [int(digit) for digit in reversed(digits)]

    def read(m: PtxMachine, lanes: LaneSet) -> np.ndarray:
        both = np.broadcast_arrays(low(m, lanes), high(m, lanes))
        return np.stack([_extend(both[p // count] >> p % count * bits, bits, signed) for p in places])

    return read


def _decode_simd(d: PtxDecoder, inst: PtxInstruction, compute: Combine, types: Sequence[str], result: str) -> LaneStep:
    count = int(inst.op[0][-1])
    words, bits = inst.op[4:], 32 // count
    if not set(words) <= {"sat", "add"} or len(inst.operands) != 4:
        raise d.unsupported(inst)
    target, _, mask = _split_part(inst.operands[0])
    sources = [_split_part(o) for o in inst.operands[1:3]]
    pair = [s[0] for s in sources]
    chosen = [s[2] or default for s, default in zip(sources, _DEFAULT_SELECTORS[count], strict=True)]
    a, b = (_read_lanes(d, pair, s, count, _is_signed(t)) for s, t in zip(chosen, types, strict=True))
    write, c = d.writer(target, TYPES["u32"]), _read_word(d, inst.operands[3])
    kept = [str(k) in mask if mask else True for k in range(count)]

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        values, other = compute(a(m, lanes), b(m, lanes)), c(m, lanes)
        if "sat" in words:
            values = _saturate(values, bits, _is_signed(result))
        total = other if "add" in words else np.zeros_like(other)
        for k, value in enumerate(values):
            own = other >> k * bits
            if "add" in words:
                total = total + (value if kept[k] else 0)
            else:
                total = total | ((value if kept[k] else own) & ((1 << bits) - 1)) << k * bits
        write(m, lanes, (total & 0xFFFFFFFF).astype(np.uint32))

    return step


@decode_rule(*(f"{name}{count}" for name in _OPERATIONS for count in (2, 4)))
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    return _decode_simd(d, inst, _OPERATIONS[inst.op[0][:-1]], inst.op[2:4], inst.op[1])


@decode_rule("vset2", "vset4")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    compare = _COMPARISONS[inst.op[3]]
    return _decode_simd(d, inst, lambda a, b: compare(a, b).astype(np.int64), inst.op[1:3], inst.op[1])
