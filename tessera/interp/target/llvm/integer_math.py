"""Integer intrinsics: for each name, the NumPy function for a type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.interp.target.llvm.arith import Pure, as_unsigned
from tessera.interp.target.llvm.lanes import canonical, integers, unsigned
from tessera.interp.target.llvm.syntax import Instruction
from tessera.interp.target.llvm.types import Aggregate, Int, Type

_COMBINE: dict[str, Pure] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "shl": np.left_shift}


def _scalar(i: Instruction) -> Int:
    """The integer type that an intrinsic works on."""
    type = i.operands[0].type.scalar
    assert isinstance(type, Int)
    return type


def _bounds(type: Int, signed: bool) -> tuple[int, int]:
    return (-(1 << (type.bits - 1)), (1 << (type.bits - 1)) - 1) if signed else (0, (1 << type.bits) - 1)


def _exactly(x: np.ndarray, type: Int, signed: bool) -> np.ndarray:
    """The numbers in a type where sums and products of two do not wrap unseen."""
    if type.bits > 32:
        return (x if signed else unsigned(x, type)).astype(object)
    return x.astype(np.int64) if signed else unsigned(x, type).astype(np.uint64)


def _wrapped(x: np.ndarray, type: Int) -> np.ndarray:
    if x.dtype != object:
        return canonical(x.astype(type.dtype), type)
    return integers([int(n) for n in x.reshape(-1)], type).reshape(x.shape)


def _overflow(i: Instruction) -> Pure:
    """llvm.sadd.with.overflow and its like: the wrapped result and whether it wrapped."""
    name = i.word.split(".")[1]
    assert isinstance(i.type, Aggregate)
    type, signed, combine = _scalar(i), name[0] == "s", _COMBINE[name[1:]]
    low, high = _bounds(type, signed)

    def run(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        exact = combine(_exactly(a, type, signed), _exactly(b, type, signed))
        return _wrapped(exact, type), ((exact < low) | (exact > high)).astype(bool)

    return run


def _saturating(i: Instruction) -> Pure:
    """llvm.sadd.sat and its like."""
    name = i.word.split(".")[1]
    type, signed, combine = _scalar(i), name[0] == "s", _COMBINE[name[1:]]
    low, high = _bounds(type, signed)

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        left, right = _python(a, type, signed), _python(b, type, signed)
        return _wrapped(np.clip(combine(left, right), low, high).astype(object), type)

    return run


def _python(x: np.ndarray, type: Int, signed: bool) -> np.ndarray:
    """Python integers: a difference of unsigned numbers may be negative."""
    return (x if signed else unsigned(x, type)).astype(object)


def _absolute(i: Instruction) -> Pure:
    type = _scalar(i)
    return lambda x, poison: canonical(np.abs(x), type)


def _count(bits: np.ndarray) -> np.ndarray:
    """The ones in each unsigned number."""
    raw = np.ascontiguousarray(bits)[..., None].view(np.uint8)
    return np.unpackbits(raw, axis=-1).sum(axis=-1)


def _population(i: Instruction) -> Pure:
    type = _scalar(i)
    return lambda x: canonical(_count(unsigned(x, type)).astype(x.dtype), type)


def _leading_zeros(i: Instruction) -> Pure:
    type = _scalar(i)

    def run(x: np.ndarray, poison: np.ndarray) -> np.ndarray:
        bits = unsigned(x, type)
        for step in (1, 2, 4, 8, 16, 32):
            bits = bits | (bits >> min(step, type.bits))
        return canonical((type.bits - _count(bits)).astype(x.dtype), type)

    return run


def _trailing_zeros(i: Instruction) -> Pure:
    type = _scalar(i)

    def run(x: np.ndarray, poison: np.ndarray) -> np.ndarray:
        bits = unsigned(x, type)
        below = ~bits & (bits - bits.dtype.type(1))
        return canonical(np.minimum(_count(below), type.bits).astype(x.dtype), type)

    return run


def _reverse_bits(i: Instruction) -> Pure:
    type = _scalar(i)

    def run(x: np.ndarray) -> np.ndarray:
        raw = np.ascontiguousarray(x)[..., None].view(np.uint8)
        bits = np.unpackbits(raw, axis=-1, bitorder="little")[..., ::-1]
        out = np.packbits(bits, axis=-1, bitorder="little").view(x.dtype)[..., 0]
        return out >> (8 * x.dtype.itemsize - type.bits)

    return run


def _funnel(i: Instruction) -> Pure:
    """llvm.fshl, llvm.fshr: a window of two numbers side by side."""
    type, left = _scalar(i), ".fshl." in i.word

    def run(a: np.ndarray, b: np.ndarray, shift: np.ndarray) -> np.ndarray:
        high, low = unsigned(a, type), unsigned(b, type)
        width = high.dtype.type(type.bits)
        by = unsigned(shift, type) % width
        by = by if left else width - by
        return canonical(((high << by) | (low >> (width - by))).view(a.dtype), type)

    return run


def _signed(function: Pure, for_bits: Pure) -> Callable[[Instruction], Pure]:
    """A signed function; a single set bit is -1."""
    return lambda i: for_bits if i.type.dtype == bool else function


def _unsigned(function: Pure) -> Callable[[Instruction], Pure]:
    def build(i: Instruction) -> Pure:
        type: Type = i.type.scalar
        return function if type.dtype == bool else as_unsigned(function, type)

    return build


TABLE: dict[str, Callable[[Instruction], Pure]] = {
    "smin": _signed(np.minimum, np.logical_or),
    "smax": _signed(np.maximum, np.logical_and),
    "umin": _unsigned(np.minimum),
    "umax": _unsigned(np.maximum),
    "abs": _absolute,
    "ctpop": _population,
    "ctlz": _leading_zeros,
    "cttz": _trailing_zeros,
    "bswap": lambda i: lambda x: x.byteswap(),
    "bitreverse": _reverse_bits,
    "fshl": _funnel,
    "fshr": _funnel,
    **{f"{s}{op}.sat": _saturating for s in "su" for op in ("add", "sub")},
    **{f"{s}{op}.with.overflow": _overflow for s in "su" for op in ("add", "sub", "mul")},
}
