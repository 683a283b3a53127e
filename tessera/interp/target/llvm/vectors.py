"""Picking values apart and putting them together: vectors, aggregates, select and freeze."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.errors import ParseError
from tessera.interp.target.llvm.arith import Pure
from tessera.interp.target.llvm.lanes import Value, by_part, undefined
from tessera.interp.target.llvm.syntax import Instruction, Many, Number, Operand


def _position(operand: Operand, count: int) -> int | None:
    """A constant index; one outside the vector gives poison, here the last element."""
    return min(int(operand.value), count - 1) if isinstance(operand, Number) else None


def _extract(i: Instruction) -> Pure:
    count = i.operands[0].type.lanes[0]
    at = _position(i.operands[1], count)
    if at is not None:
        return lambda vector, index: vector[:, at]
    return lambda vector, index: _pick(vector, np.clip(index.astype(np.int64), 0, count - 1))


def _pick(vector: np.ndarray, index: np.ndarray) -> np.ndarray:
    if len(index) == 1:
        return vector[:, int(index[0])]
    rows = np.arange(len(index)) if len(vector) > 1 else 0
    return vector[rows, index]


def _insert(i: Instruction) -> Pure:
    count = i.operands[0].type.lanes[0]
    at = _position(i.operands[2], count)

    def run(vector: np.ndarray, element: np.ndarray, index: np.ndarray) -> np.ndarray:
        lanes = max(len(vector), len(element), len(index))
        out = np.array(np.broadcast_to(vector, (lanes, count)))
        if at is not None:
            out[:, at] = element
        else:
            out[np.arange(lanes), np.clip(index.astype(np.int64), 0, count - 1)] = element
        return out

    return run


def _mask(operand: Operand) -> np.ndarray:
    """The numbers of a shuffle mask; -1 where any value will do."""
    if isinstance(operand, Many):
        return np.array([int(e.value) if isinstance(e, Number) else _other(e) for e in operand.elements])
    return np.full(operand.type.lanes, _other(operand))


def _other(operand: Operand) -> int:
    found = {"Zero": 0, "Undefined": -1}.get(type(operand).__name__)
    if found is None:
        raise ParseError("a shuffle mask must be constant")
    return found


def _shuffle(i: Instruction) -> Pure:
    mask, count = _mask(i.operands[2]), i.operands[0].type.lanes[0]
    if (mask >= 0).all() and (mask < count).all():
        return lambda a, b, m: a[:, mask]
    hole = undefined(i.type.scalar)

    def run(a: np.ndarray, b: np.ndarray, m: np.ndarray) -> np.ndarray:
        lanes = max(len(a), len(b))
        both = [np.broadcast_to(x, (lanes, *x.shape[1:])) for x in (a, b)]
        rest = np.broadcast_to(hole, (lanes, 1))
        return np.concatenate([*both, rest], axis=1)[:, mask]

    return run


def _extract_value(i: Instruction) -> Pure:
    def run(whole: Value) -> Value:
        for index in i.indices:
            whole = whole[index]
        return whole

    return run


def _insert_value(i: Instruction) -> Pure:
    return lambda whole, part: _with_member(whole, part, i.indices)


def _with_member(whole: Value, part: Value, indices: tuple[int, ...]) -> Value:
    if not indices:
        return part
    first = indices[0]
    return (*whole[:first], _with_member(whole[first], part, indices[1:]), *whole[first + 1 :])


def _select(i: Instruction) -> Pure:
    def run(condition: np.ndarray, yes: Value, no: Value) -> Value:
        if condition.shape == (1,):
            return yes if condition[0] else no
        return by_part(lambda a, b: _where(condition, a, b), yes, no)

    return run


def _where(condition: np.ndarray, yes: np.ndarray, no: np.ndarray) -> np.ndarray:
    if condition.ndim < yes.ndim:
        condition = condition[:, None]
    return np.where(condition, yes, no)


TABLE: dict[str, Callable[[Instruction], Pure]] = {
    "extractelement": _extract,
    "insertelement": _insert,
    "shufflevector": _shuffle,
    "extractvalue": _extract_value,
    "insertvalue": _insert_value,
    "select": _select,
    "freeze": lambda i: lambda x: x,
}
