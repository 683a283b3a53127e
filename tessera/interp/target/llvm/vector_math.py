"""Intrinsics across the elements of a vector: reductions, masks and rearrangements."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from tessera.interp.target.llvm.arith import Pure, as_unsigned, float_function, integer_function
from tessera.interp.target.llvm.float_math import float_math
from tessera.interp.target.llvm.lanes import unsigned
from tessera.interp.target.llvm.syntax import Instruction


def _columns(vector: np.ndarray) -> list[np.ndarray]:
    return [vector[:, k] for k in range(vector.shape[1])]


def _fold(function: Pure) -> Pure:
    return lambda vector: reduce(function, _columns(vector))


def _integer(op: str) -> Callable[[Instruction], Pure]:
    return lambda i: _fold(integer_function(op, i.type))


def _extreme(function: Pure, signed: bool) -> Callable[[Instruction], Pure]:
    def build(i: Instruction) -> Pure:
        if i.type.dtype == bool and signed:  # a set bit is -1
            return _fold(np.logical_or if function is np.minimum else np.logical_and)
        return _fold(function if signed or i.type.dtype == bool else as_unsigned(function, i.type))

    return build


def _float(name: str) -> Callable[[Instruction], Pure]:
    def build(i: Instruction) -> Pure:
        function = float_math(name, i.type)
        assert function is not None
        return _fold(function)

    return build


def _accumulate(op: str) -> Callable[[Instruction], Pure]:
    """In order from the start value; with reassoc in halves, as a vector unit would."""

    def build(i: Instruction) -> Pure:
        function = float_function(op, i.type)
        if {"reassoc", "fast"} & i.flags:
            return lambda start, vector: function(start, _halves(function, vector))
        return lambda start, vector: reduce(function, _columns(vector), start)

    return build


def _halves(function: Pure, vector: np.ndarray) -> np.ndarray:
    while vector.shape[1] > 1:
        half = vector.shape[1] // 2
        rest = vector[:, 2 * half :]
        vector = np.concatenate([function(vector[:, :half], vector[:, half : 2 * half]), rest], axis=1)
    return vector[:, 0]


def _active_mask(i: Instruction) -> Pure:
    """llvm.get.active.lane.mask: which of base, base + 1, ... lie below a limit."""
    count, type = i.type.lanes[0], i.operands[0].type

    def run(base: np.ndarray, limit: np.ndarray) -> np.ndarray:
        low, high = unsigned(base, type)[:, None], unsigned(limit, type)[:, None]
        # The sum must not wrap: compare with what is left below the limit.
        return (high > low) & (np.arange(count, dtype=np.uint64) < (high - low))

    return run


def _steps(i: Instruction) -> Pure:
    steps = np.arange(i.type.lanes[0]).astype(i.type.dtype)[None]
    return lambda: steps


def _splice(i: Instruction) -> Pure:
    count = i.type.lanes[0]

    def run(a: np.ndarray, b: np.ndarray, at: np.ndarray) -> np.ndarray:
        first = int(at[0]) % count if int(at[0]) < 0 else int(at[0])
        return _beside(a, b)[:, first : first + count]

    return run


def _beside(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    lanes = max(len(a), len(b))
    return np.concatenate([np.broadcast_to(x, (lanes, x.shape[1])) for x in (a, b)], axis=1)


def _interleave(i: Instruction) -> Pure:
    order = np.arange(i.type.lanes[0]).reshape(2, -1).T.reshape(-1)
    return lambda a, b: _beside(a, b)[:, order]


def _insert(i: Instruction) -> Pure:
    width = i.operands[1].type.lanes[0]

    def run(a: np.ndarray, b: np.ndarray, at: np.ndarray) -> np.ndarray:
        first = int(at[0])
        both = _beside(a, b)
        count = a.shape[1]
        order = np.arange(count)
        order[first : first + width] = count + np.arange(width)
        return both[:, order]

    return run


def _extract(i: Instruction) -> Pure:
    count = i.type.lanes[0]
    return lambda vector, at: vector[:, int(at[0]) : int(at[0]) + count]


def _compress(i: Instruction) -> Pure:
    """llvm.experimental.vector.compress: the chosen elements first."""

    def run(vector: np.ndarray, mask: np.ndarray, rest: np.ndarray) -> np.ndarray:
        lanes = max(len(vector), len(mask), len(rest))
        out = np.array(np.broadcast_to(rest, (lanes, vector.shape[1])))
        vector, mask = (np.broadcast_to(x, out.shape) for x in (vector, mask))
        order = np.argsort(~mask, axis=1, kind="stable")
        keep = np.take_along_axis(mask, order, 1)
        return np.where(keep, np.take_along_axis(vector, order, 1), out)

    return run


TABLE: dict[str, Callable[[Instruction], Pure]] = {
    **{f"vector.reduce.{op}": _integer(op) for op in ("add", "mul", "and", "or", "xor")},
    "vector.reduce.smin": _extreme(np.minimum, signed=True),
    "vector.reduce.smax": _extreme(np.maximum, signed=True),
    "vector.reduce.umin": _extreme(np.minimum, signed=False),
    "vector.reduce.umax": _extreme(np.maximum, signed=False),
    "vector.reduce.fadd": _accumulate("fadd"),
    "vector.reduce.fmul": _accumulate("fmul"),
    "vector.reduce.fmin": _float("minnum"),
    "vector.reduce.fmax": _float("maxnum"),
    "vector.reduce.fminimum": _float("minimum"),
    "vector.reduce.fmaximum": _float("maximum"),
    "get.active.lane.mask": _active_mask,
    "stepvector": _steps,
    "experimental.stepvector": _steps,
    "vector.splice": _splice,
    "vector.reverse": lambda i: lambda x: x[:, ::-1],
    "vector.interleave2": _interleave,
    "vector.insert": _insert,
    "vector.extract": _extract,
    "experimental.vector.compress": _compress,
}
