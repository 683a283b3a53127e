"""Logic, shift and bit-field instructions; bit counting and reversal, and the high half of products, on arrays."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.interp.target.ptx.isa.decoder import PtxDecoder, check_modifiers, decode_rule
from tessera.interp.target.ptx.isa.operands import make_bit_moving_step, make_elementwise_step, split_pair
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import BITS, TYPES, ImmediateOperand, PtxInstruction

# Bit counting and reversal on unsigned arrays, and the high half of products.


_PAIRS, _QUADS, _BYTES = 0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F


def _make_masks(a: np.ndarray) -> list[np.integer]:
    full = (1 << 8 * a.itemsize) - 1
    return [a.dtype.type(m & full) for m in (_PAIRS, _QUADS, _BYTES)]


def count_set_bits(a: np.ndarray) -> np.ndarray:
    """The number of set bits.

    >>> count_set_bits(np.array([0, 5, 2**32 - 1], np.uint32)).tolist()
    [0, 2, 32]
    """
    t = a.dtype.type
    pairs, quads, low = _make_masks(a)
    a = a - ((a >> t(1)) & pairs)
    a = (a & quads) + ((a >> t(2)) & quads)
    a = (a + (a >> t(4))) & low
    ones = t(0x0101010101010101 & (1 << 8 * a.itemsize) - 1)
    return ((a * ones) >> t(8 * a.itemsize - 8)).astype(np.uint32)


def count_leading_zeros(a: np.ndarray) -> np.ndarray:
    """The number of zeros above the highest set bit."""
    t = a.dtype.type
    shift = 1
    while shift < 8 * a.itemsize:
        a = a | (a >> t(shift))
        shift *= 2
    return count_set_bits(~a)


def reverse_bits(a: np.ndarray) -> np.ndarray:
    """The bits in reverse order."""
    t = a.dtype.type
    for mask, shift in zip(_make_masks(a), (1, 2, 4), strict=True):
        a = ((a >> t(shift)) & mask) | ((a & mask) << t(shift))
    return a.byteswap()


def multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product of two integers of up to 64 bits.

    >>> int(multiply_high(np.array([-1]), np.array([2**62]))[0])
    -1
    """
    bits = 8 * a.itemsize
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}8")
        return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(a.dtype)
    a, b = np.broadcast_arrays(a, b)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + ((x0 * y0) >> half)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":  # signed: subtract the other factor where one is negative
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


# Instructions.


_LOGIC: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


@decode_rule("and", "or", "xor")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    t = TYPES[inst.op[-1]]
    return make_bit_moving_step(d, inst, make_elementwise_step(d, inst, _LOGIC[inst.op[0]], t, t, t))


@decode_rule("not")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    t = TYPES[inst.op[-1]]
    return make_elementwise_step(d, inst, np.invert, t, t)


@decode_rule("cnot")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    t = TYPES[inst.op[-1]]
    return make_elementwise_step(d, inst, lambda a: (a == 0).astype(t.dtype), t, t)


@decode_rule("lop3")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    words, b32, number = check_modifiers(d, inst, "and", "or"), TYPES["b32"], inst.operands[4]
    assert isinstance(number, ImmediateOperand)
    table = number.value & 0xFF

    def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, _: np.ndarray) -> np.ndarray:
        out = np.zeros((1, 1), np.uint32)
        for row in range(8):
            if table >> row & 1:
                out = out | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
        return out

    if words:
        return _decode_lop3_with_predicate(d, inst, logic, _LOGIC[words[0]])
    return make_elementwise_step(d, inst, logic, b32, b32, b32, b32, b32)


def _decode_lop3_with_predicate(
    d: PtxDecoder, inst: PtxInstruction, logic: Callable[..., Any], combine: Callable[..., Any]
) -> LaneStep:
    """`lop3.and d|p, a, b, c, table, q`: p is (result != 0) combined with q."""
    b32, pred = TYPES["b32"], TYPES["pred"]
    out, flag = split_pair(inst.operands[0])
    write, write_flag = d.writer(out, b32), d.writer(flag, pred)
    *readers, also = [d.reader(o, t) for o, t in zip(inst.operands[1:], [*[b32] * 4, pred], strict=True)]

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        value, q = logic(*(r(m, lanes) for r in readers)), also(m, lanes)
        write(m, lanes, value)
        write_flag(m, lanes, combine(value != 0, q))

    return step


@decode_rule("shl", "shr")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    t, amount = TYPES[inst.op[-1]], TYPES["u32"]
    last = np.uint32(t.bits - 1)

    def left(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        shifted = a << np.minimum(n, last).astype(t.dtype)
        return shifted if (inside := n <= last).all() else np.where(inside, shifted, t.dtype.type(0))

    def right(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        shifted = a >> np.minimum(n, last).astype(t.dtype)
        return shifted if t.kind == "s" or (inside := n <= last).all() else np.where(inside, shifted, t.dtype.type(0))

    return make_elementwise_step(d, inst, left if inst.op[0] == "shl" else right, t, t, amount)


@decode_rule("shf")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """A shift of two registers: the upper half of a left shift, the lower of a right one."""
    words, b32 = check_modifiers(d, inst, "l", "r", "clamp", "wrap"), TYPES["b32"]
    wrap = "wrap" in words

    def shift(a: np.ndarray, b: np.ndarray, n: np.ndarray) -> np.ndarray:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        shift_by = (n & 31 if wrap else np.minimum(n, 32)).astype(np.uint64)
        shifted = both << shift_by >> np.uint64(32) if words[0] == "l" else both >> shift_by
        return shifted.astype(np.uint32)

    return make_elementwise_step(d, inst, shift, b32, b32, b32, TYPES["u32"])


# Bits of positions and lengths of bit fields: 8 in the ISA; in the 64-bit forms the hardware uses all 32.
_FIELD = {32: np.uint32(0xFF), 64: np.uint32(0xFFFFFFFF)}


@decode_rule("bfe")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    t, u32 = TYPES[inst.op[-1]], TYPES["u32"]
    unsigned, field = BITS[t.bits].type, _FIELD[t.bits]

    def extract(a: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        first, width = (start & field).astype(np.int64), (length & field).astype(np.int64)
        bits = a.view(BITS[t.bits])
        field_mask = _make_low_bits_mask(np.clip(np.minimum(width, t.bits - first), 0, None), t.bits)
        value = bits >> np.minimum(first, t.bits - 1).astype(unsigned) & field_mask
        if t.kind != "s":
            return value
        # Bits beyond the field or the register are copies of the field's top bit.
        top = np.clip(first + width - 1, 0, t.bits - 1).astype(unsigned)
        negative = (width > 0) & ((bits >> top & unsigned(1)) != 0)
        return np.where(negative, value | ~field_mask, value).view(t.dtype)

    return make_elementwise_step(d, inst, extract, t, t, u32, u32)


def _make_low_bits_mask(width: np.ndarray, bits: int) -> np.ndarray:
    """A mask of low bits."""
    unsigned = BITS[bits].type
    low = (unsigned(1) << np.minimum(width, bits - 1).astype(unsigned)) - unsigned(1)
    return np.where(width >= bits, unsigned((1 << bits) - 1), low)


@decode_rule("bfi")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    t, u32 = TYPES[inst.op[-1]], TYPES["u32"]
    unsigned, field = BITS[t.bits].type, _FIELD[t.bits]

    def insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
        first, width = start & field, length & field
        shift_by = np.minimum(first, t.bits - 1).astype(unsigned)
        mask = np.where(first < t.bits, _make_low_bits_mask(width, t.bits) << shift_by, unsigned(0))
        return (b & ~mask) | ((a << shift_by) & mask)

    return make_bit_moving_step(d, inst, make_elementwise_step(d, inst, insert, t, t, t, u32, u32))


@decode_rule("bfind")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """The position of the highest bit that differs from the sign; all ones if there is none."""
    t, u32 = TYPES[inst.op[-1]], TYPES["u32"]
    amount = "shiftamt" in check_modifiers(d, inst, "shiftamt")

    def find(a: np.ndarray) -> np.ndarray:
        zeros = count_leading_zeros((np.where(a < 0, ~a, a) if t.kind == "s" else a).view(BITS[t.bits]))
        position = zeros if amount else np.uint32(t.bits - 1) - zeros
        return np.where(zeros == t.bits, np.uint32(0xFFFFFFFF), position)

    return make_elementwise_step(d, inst, find, u32, t)


@decode_rule("popc", "clz", "brev")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst)
    t = TYPES[inst.op[-1]]
    out = t if inst.op[0] == "brev" else TYPES["u32"]
    return make_elementwise_step(
        d, inst, {"popc": count_set_bits, "clz": count_leading_zeros, "brev": reverse_bits}[inst.op[0]], out, t
    )


@decode_rule("fns")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """The position of the n-th set bit at or above a base, or below it for negative n."""
    check_modifiers(d, inst)

    def find(mask: np.ndarray, base: np.ndarray, n: np.ndarray) -> np.ndarray:
        wide = np.broadcast_arrays(mask, base, n)
        result = [_find_nth_set_bit(*(int(v) for v in row)) for row in zip(*(w.reshape(-1) for w in wide), strict=True)]
        return np.array(result, np.uint32).reshape(wide[0].shape)

    return make_elementwise_step(d, inst, find, TYPES["b32"], TYPES["b32"], TYPES["b32"], TYPES["s32"])


def _find_nth_set_bit(mask: int, base: int, n: int) -> int:
    if n == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    positions = range(base, 32) if n > 0 else range(base, -1, -1)
    chosen = [p for p in positions if mask >> p & 1]
    return chosen[abs(n) - 1] if abs(n) <= len(chosen) else 0xFFFFFFFF


_SELECT = {  # the bytes that the special modes select for each of four selector values
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@decode_rule("prmt")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """Select four of eight bytes; the top bit of a selector replicates the sign of its byte."""
    words, b32 = check_modifiers(d, inst, *_SELECT, types=0, skip=2), TYPES["b32"]
    modes = np.array(_SELECT[words[0]], np.uint32) if words else None

    def permute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        select = modes[c & 3] if modes is not None else c
        out = np.zeros((1, 1), np.uint32)
        for k in range(4):
            position = select >> np.uint32(4 * k)
            byte = (both >> ((position & 7) * 8).astype(np.uint64)).astype(np.uint32) & np.uint32(0xFF)
            sign = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
            out = out | np.where(position & 8, sign, byte) << np.uint32(8 * k)
        return out

    return make_bit_moving_step(d, inst, make_elementwise_step(d, inst, permute, b32, b32, b32, b32))


@decode_rule("szext", "bmsk")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """szext: sign- or zero-extend from a bit position; bmsk: a mask of bits from a position."""
    wrap = check_modifiers(d, inst, "clamp", "wrap") == ["wrap"]
    t, u32 = TYPES[inst.op[-1]], TYPES["u32"]

    def clip(n: np.ndarray) -> np.ndarray:
        return n & np.uint32(31) if wrap else np.minimum(n, 32)

    def extend(a: np.ndarray, n: np.ndarray) -> np.ndarray:
        up = np.uint64(64) - clip(n).astype(np.uint64)
        wide = np.where(up == 64, np.uint64(0), a.view(np.uint32).astype(np.uint64) << np.minimum(up, 63))
        back = (
            wide.view(np.int64) >> np.minimum(up, 63).astype(np.int64) if t.kind == "s" else wide >> np.minimum(up, 63)
        )
        return back.astype(np.uint32).view(t.dtype)

    def mask(start: np.ndarray, width: np.ndarray) -> np.ndarray:
        return (_make_low_bits_mask(clip(width), 32).astype(np.uint64) << clip(start).astype(np.uint64)).astype(
            np.uint32
        )

    if inst.op[0] == "szext":
        return make_elementwise_step(d, inst, extend, t, t, u32)
    return make_elementwise_step(d, inst, mask, u32, u32, u32)
