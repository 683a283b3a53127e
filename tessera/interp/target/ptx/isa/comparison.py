"""Comparison and selection: set, setp, selp, slct."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.interp.target.ptx.isa.decoder import PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.floating_point import flush_subnormals
from tessera.interp.target.ptx.isa.operands import Reader, make_elementwise_step, split_pair
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import TYPES, PtxInstruction, PtxType

Compare = Callable[[Any, Any], Any]
_ORDERED_COMPARISONS: dict[str, Compare] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_UNSIGNED: dict[str, Compare] = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
_COMBINE: dict[str, Compare] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _is_unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


def _make_unordered(compare: Compare) -> Compare:
    return lambda a, b: compare(a, b) | _is_unordered(a, b)


_FLOAT: dict[str, Compare] = {**_ORDERED_COMPARISONS, "ne": lambda a, b: (a < b) | (a > b), "nan": _is_unordered}
_FLOAT["num"] = lambda a, b: ~_is_unordered(a, b)
_FLOAT |= {f"{name}u": _make_unordered(function) for name, function in _ORDERED_COMPARISONS.items()}


def _decode_comparison(
    d: PtxDecoder, inst: PtxInstruction, t: PtxType, types: int
) -> tuple[Compare, Compare | None, list[Reader]]:
    """The comparison, its combination with a predicate, and the readers of all operands."""
    words = list(inst.op[1 : len(inst.op) - types])
    table = _FLOAT if t.kind == "f" else {**_ORDERED_COMPARISONS, **_UNSIGNED}
    compare, combine = table[words.pop(0)], None
    readers = [d.reader(o, t) for o in inst.operands[1:3]]
    if words and words[0] in _COMBINE:
        combine = _COMBINE[words.pop(0)]
        readers.append(d.reader(inst.operands[3], TYPES["pred"]))
    if words not in ([], ["ftz"]) or len(inst.operands) != 3 + (combine is not None):
        raise d.unsupported(inst)
    if not words:
        return compare, combine, readers
    return (lambda a, b: compare(flush_subnormals(t, a), flush_subnormals(t, b))), combine, readers


@decode_rule("setp")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """`p|q`: q is the negated comparison, or for packed types the comparison of the upper half."""
    t, pred = TYPES[inst.op[-1]], TYPES["pred"]
    compare, combine, readers = _decode_comparison(d, inst, t, 1)
    first, second = (d.writer(o, pred) for o in split_pair(inst.operands[0]))

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        a, b, *rest = (r(m, lanes) for r in readers)
        result = compare(a, b)
        low, high = (result, ~result) if t.parts == 1 else (result[..., 0], result[..., 1])
        if combine is not None:
            low, high = combine(low, rest[0]), combine(high, rest[0])
        first(m, lanes, low)
        second(m, lanes, high)

    return step


@decode_rule("set")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """True is all ones in an integer result, 1.0 in a float."""
    t, out = TYPES[inst.op[-1]], TYPES[inst.op[-2]]
    compare, combine, readers = _decode_comparison(d, inst, t, 2)
    write = d.writer(inst.operands[0], out)
    yes = out.dtype.type(1) if out.kind == "f" else np.invert(np.zeros((), out.dtype))
    no = out.dtype.type(0)

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        a, b, *rest = (r(m, lanes) for r in readers)
        value = compare(a, b)
        if combine is not None:
            value = combine(value, rest[0] if t.parts == 1 else rest[0][..., None])
        if t.parts > 1 and out.parts == 1:  # one mask of 16 bits for each half
            halves = np.where(value, np.uint16(0xFFFF), np.uint16(0))
            write(m, lanes, np.ascontiguousarray(halves).view(out.dtype)[..., 0])
        else:
            write(m, lanes, np.where(value, yes, no))

    return step


@decode_rule("selp")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    if len(inst.op) != 2:
        raise d.unsupported(inst)
    return make_elementwise_step(d, inst, lambda a, b, p: np.where(p, a, b), t, t, t, TYPES["pred"])


@decode_rule("slct")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """The first operand if the third is >= 0 (true for -0, false for NaN), else the second."""
    t, by = TYPES[inst.op[-2]], TYPES[inst.op[-1]]
    if inst.op[1:-2] not in ((), ("ftz",)):
        raise d.unsupported(inst)
    value = (lambda c: flush_subnormals(by, c)) if "ftz" in inst.op else lambda c: c
    return make_elementwise_step(d, inst, lambda a, b, c: np.where(value(c) >= 0, a, b), t, t, t, by)
