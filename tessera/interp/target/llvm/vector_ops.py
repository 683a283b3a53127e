"""Vectors and aggregates: element access, shuffles, select, and the vector intrinsics."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from tessera.core.errors import ParseError
from tessera.interp.target.llvm.arithmetic import PureFunction, as_unsigned, get_float_function, get_integer_function
from tessera.interp.target.llvm.lanes import (
    RegisterValue,
    broadcast_lanes,
    copy_broadcast,
    make_undefined,
    map_members,
    view_unsigned,
)
from tessera.interp.target.llvm.scalar_intrinsics import get_float_math
from tessera.interp.target.llvm.text.syntax import LlvmInstruction, LlvmOperand, NumberConstant, SequenceConstant

# Vector intrinsics: reductions, masks and rearrangements.


def _split_columns(vector: np.ndarray) -> list[np.ndarray]:
    return [vector[:, k] for k in range(vector.shape[1])]


def _fold_columns(function: PureFunction) -> PureFunction:
    return lambda vector: reduce(function, _split_columns(vector))


def _make_integer_reduction(op: str) -> Callable[[LlvmInstruction], PureFunction]:
    return lambda i: _fold_columns(get_integer_function(op, i.type))


def _make_extreme_reduction(function: PureFunction, signed: bool) -> Callable[[LlvmInstruction], PureFunction]:
    def build(i: LlvmInstruction) -> PureFunction:
        if i.type.dtype == bool and signed:  # true is -1
            return _fold_columns(np.logical_or if function is np.minimum else np.logical_and)
        return _fold_columns(function if signed or i.type.dtype == bool else as_unsigned(function, i.type))

    return build


def _make_float_reduction(name: str) -> Callable[[LlvmInstruction], PureFunction]:
    def build(i: LlvmInstruction) -> PureFunction:
        function = get_float_math(name, i.type)
        assert function is not None
        return _fold_columns(function)

    return build


def _make_ordered_reduction(op: str) -> Callable[[LlvmInstruction], PureFunction]:
    """A sequential reduction from the start value; with reassoc a reduction by halves, as a vector unit computes it."""

    def build(i: LlvmInstruction) -> PureFunction:
        function = get_float_function(op, i.type)
        if {"reassoc", "fast"} & i.flags:
            return lambda start, vector: function(start, _reduce_by_halves(function, vector))
        return lambda start, vector: reduce(function, _split_columns(vector), start)

    return build


def _reduce_by_halves(function: PureFunction, vector: np.ndarray) -> np.ndarray:
    while vector.shape[1] > 1:
        half = vector.shape[1] // 2
        rest = vector[:, 2 * half :]
        vector = np.concatenate([function(vector[:, :half], vector[:, half : 2 * half]), rest], axis=1)
    return vector[:, 0]


def _build_active_mask(i: LlvmInstruction) -> PureFunction:
    """llvm.get.active.lane.mask: which of base, base + 1, ... are below a limit."""
    count, type = i.type.lanes[0], i.operands[0].type

    def run(base: np.ndarray, limit: np.ndarray) -> np.ndarray:
        low, high = view_unsigned(base, type)[:, None], view_unsigned(limit, type)[:, None]
        # Compare with limit - base: base + lane could wrap.
        return (high > low) & (np.arange(count, dtype=np.uint64) < (high - low))

    return run


def _build_step_vector(i: LlvmInstruction) -> PureFunction:
    steps = np.arange(i.type.lanes[0]).astype(i.type.dtype)[None]
    return lambda: steps


def _build_splice(i: LlvmInstruction) -> PureFunction:
    count = i.type.lanes[0]

    def run(a: np.ndarray, b: np.ndarray, at: np.ndarray) -> np.ndarray:
        first = int(at[0]) % count if int(at[0]) < 0 else int(at[0])
        return _concatenate_vectors(a, b)[:, first : first + count]

    return run


def _concatenate_vectors(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    lanes = max(len(a), len(b))
    return np.concatenate([broadcast_lanes(x, lanes) for x in (a, b)], axis=1)


def _build_interleave(i: LlvmInstruction) -> PureFunction:
    order = np.arange(i.type.lanes[0]).reshape(2, -1).T.reshape(-1)
    return lambda a, b: _concatenate_vectors(a, b)[:, order]


def _build_vector_insert(i: LlvmInstruction) -> PureFunction:
    width = i.operands[1].type.lanes[0]

    def run(a: np.ndarray, b: np.ndarray, at: np.ndarray) -> np.ndarray:
        first = int(at[0])
        both = _concatenate_vectors(a, b)
        count = a.shape[1]
        order = np.arange(count)
        order[first : first + width] = count + np.arange(width)
        return both[:, order]

    return run


def _build_vector_extract(i: LlvmInstruction) -> PureFunction:
    count = i.type.lanes[0]
    return lambda vector, at: vector[:, int(at[0]) : int(at[0]) + count]


def _build_compress(i: LlvmInstruction) -> PureFunction:
    """llvm.experimental.vector.compress: the selected elements first."""

    def run(vector: np.ndarray, mask: np.ndarray, rest: np.ndarray) -> np.ndarray:
        lanes = max(len(vector), len(mask), len(rest))
        out = np.array(np.broadcast_to(rest, (lanes, vector.shape[1])))
        vector, mask = (np.broadcast_to(x, out.shape) for x in (vector, mask))
        order = np.argsort(~mask, axis=1, kind="stable")
        keep = np.take_along_axis(mask, order, 1)
        return np.where(keep, np.take_along_axis(vector, order, 1), out)

    return run


VECTOR_INTRINSICS: dict[str, Callable[[LlvmInstruction], PureFunction]] = {
    **{f"vector.reduce.{op}": _make_integer_reduction(op) for op in ("add", "mul", "and", "or", "xor")},
    "vector.reduce.smin": _make_extreme_reduction(np.minimum, signed=True),
    "vector.reduce.smax": _make_extreme_reduction(np.maximum, signed=True),
    "vector.reduce.umin": _make_extreme_reduction(np.minimum, signed=False),
    "vector.reduce.umax": _make_extreme_reduction(np.maximum, signed=False),
    "vector.reduce.fadd": _make_ordered_reduction("fadd"),
    "vector.reduce.fmul": _make_ordered_reduction("fmul"),
    "vector.reduce.fmin": _make_float_reduction("minnum"),
    "vector.reduce.fmax": _make_float_reduction("maxnum"),
    "vector.reduce.fminimum": _make_float_reduction("minimum"),
    "vector.reduce.fmaximum": _make_float_reduction("maximum"),
    "get.active.lane.mask": _build_active_mask,
    "stepvector": _build_step_vector,
    "experimental.stepvector": _build_step_vector,
    "vector.splice": _build_splice,
    "vector.reverse": lambda i: lambda x: x[:, ::-1],
    "vector.interleave2": _build_interleave,
    "vector.insert": _build_vector_insert,
    "vector.extract": _build_vector_extract,
    "experimental.vector.compress": _build_compress,
}


# Vector and aggregate instructions.


def _get_constant_position(operand: LlvmOperand, count: int) -> int | None:
    """A constant index; an index out of bounds gives poison, here the last element."""
    return min(int(operand.value), count - 1) if isinstance(operand, NumberConstant) else None


def _build_extract_element(i: LlvmInstruction) -> PureFunction:
    count = i.operands[0].type.lanes[0]
    at = _get_constant_position(i.operands[1], count)
    if at is not None:
        return lambda vector, index: vector[:, at]
    return lambda vector, index: _gather_elements(vector, np.clip(index.astype(np.int64), 0, count - 1))


def _gather_elements(vector: np.ndarray, index: np.ndarray) -> np.ndarray:
    if len(index) == 1:
        return vector[:, int(index[0])]
    rows = np.arange(len(index)) if len(vector) > 1 else 0
    return vector[rows, index]


def _build_insert_element(i: LlvmInstruction) -> PureFunction:
    count = i.operands[0].type.lanes[0]
    at = _get_constant_position(i.operands[2], count)

    def run(vector: np.ndarray, element: np.ndarray, index: np.ndarray) -> np.ndarray:
        lanes = max(len(vector), len(element), len(index))
        out = copy_broadcast(vector, (lanes, count))
        if at is not None:
            out[:, at] = element
        else:
            out[np.arange(lanes), np.clip(index.astype(np.int64), 0, count - 1)] = element
        return out

    return run


def _read_shuffle_mask(operand: LlvmOperand) -> np.ndarray:
    """The indices of a shuffle mask; -1 for an undefined element."""
    if isinstance(operand, SequenceConstant):
        return np.array(
            [int(e.value) if isinstance(e, NumberConstant) else _read_mask_constant(e) for e in operand.elements]
        )
    return np.full(operand.type.lanes, _read_mask_constant(operand))


def _read_mask_constant(operand: LlvmOperand) -> int:
    result = {"Zero": 0, "Undefined": -1}.get(type(operand).__name__)
    if result is None:
        raise ParseError("a shuffle mask must be constant")
    return result


def _build_shuffle(i: LlvmInstruction) -> PureFunction:
    mask, count = _read_shuffle_mask(i.operands[2]), i.operands[0].type.lanes[0]
    if (mask >= 0).all() and (mask < count).all():
        return lambda a, b, m: a[:, mask]
    hole = np.asarray(make_undefined(i.type.scalar))[:, None]

    def run(a: np.ndarray, b: np.ndarray, m: np.ndarray) -> np.ndarray:
        lanes = max(len(a), len(b))
        parts = [broadcast_lanes(x, lanes) for x in (a, b, hole)]
        return np.concatenate(parts, axis=1)[:, mask]

    return run


def _build_extract_value(i: LlvmInstruction) -> PureFunction:
    def run(whole: RegisterValue) -> RegisterValue:
        for index in i.indices:
            whole = whole[index]
        return whole

    return run


def _build_insert_value(i: LlvmInstruction) -> PureFunction:
    return lambda whole, part: _replace_member(whole, part, i.indices)


def _replace_member(whole: RegisterValue, part: RegisterValue, indices: tuple[int, ...]) -> RegisterValue:
    if not indices:
        return part
    first = indices[0]
    return (*whole[:first], _replace_member(whole[first], part, indices[1:]), *whole[first + 1 :])


def _build_select(i: LlvmInstruction) -> PureFunction:
    def run(condition: np.ndarray, yes: RegisterValue, no: RegisterValue) -> RegisterValue:
        if condition.shape == (1,):
            return yes if condition[0] else no
        return map_members(lambda a, b: _select_by_condition(condition, a, b), yes, no)

    return run


def _select_by_condition(condition: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    if condition.ndim < yes.ndim:
        condition = condition[:, None]
    return np.where(condition, yes, no)


VECTOR_INSTRUCTIONS: dict[str, Callable[[LlvmInstruction], PureFunction]] = {
    "extractelement": _build_extract_element,
    "insertelement": _build_insert_element,
    "shufflevector": _build_shuffle,
    "extractvalue": _build_extract_value,
    "insertvalue": _build_insert_value,
    "select": _build_select,
    "freeze": lambda i: lambda x: x,
}
