"""getelementptr: an address plus constant and scaled offsets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.errors import UnsupportedOpError
from tessera.interp.target.llvm.arith import Pure
from tessera.interp.target.llvm.lanes import spread_scalars
from tessera.interp.target.llvm.syntax import Instruction, Number, Operand, Zero
from tessera.interp.target.llvm.types import Aggregate, Struct, Type, Vector

# Position of an operand and the bytes that one step of it moves.
_Term = tuple[int, int]


def _constant(operand: Operand) -> int | None:
    if isinstance(operand.type, Vector):
        return None
    return int(operand.value) if isinstance(operand, Number) else 0 if isinstance(operand, Zero) else None


def _inner(type: Type, index: int | None) -> tuple[Type, int, int]:
    """The type one index further in, the bytes of a step and a fixed offset."""
    if isinstance(type, Struct):
        assert index is not None, "a struct index is constant"
        offset, member = type.parts[index]
        return member, 0, offset
    if isinstance(type, Aggregate | Vector):
        element: Type = type.element  # type: ignore[union-attr]
        # Elements of a vector lie without padding.
        return element, element.size if isinstance(type, Vector) else element.stride, 0
    raise UnsupportedOpError(f"getelementptr cannot index a {type}")


def _layout(i: Instruction) -> tuple[int, list[_Term]]:
    """The constant part of an offset, and what is left to scale when it runs."""
    fixed, terms, type = 0, [], i.source
    for position, operand in enumerate(i.operands[1:], 1):
        index = _constant(operand)
        step = type.stride if position == 1 else 0
        if position > 1:
            type, step, offset = _inner(type, index)
            fixed += offset
        if index is None:
            terms.append((position, step))
        else:
            fixed += index * step
    return fixed, terms


def element_address(i: Instruction) -> Pure:
    """The function from base and indices to an address."""
    fixed, terms = _layout(i)
    if isinstance(i.type, Vector):
        return _vector_address(fixed, terms)
    if not terms:
        return lambda base, *indices: base + fixed
    if len(terms) == 1:
        position, step = terms[0]
        return lambda *v: v[0] + (v[position].astype(np.int64) * step + fixed)

    def run(base: np.ndarray, *indices: np.ndarray) -> np.ndarray:
        total = base + fixed
        for position, step in terms:
            total = total + indices[position - 1].astype(np.int64) * step
        return total

    return run


def _vector_address(fixed: int, terms: list[_Term]) -> Pure:
    def run(*values: np.ndarray) -> np.ndarray:
        base, *indices = spread_scalars(*values)
        total = base + fixed
        for position, step in terms:
            total = total + indices[position - 1].astype(np.int64) * step
        return total

    return run


TABLE: dict[str, Callable[[Instruction], Pure]] = {"getelementptr": element_address}
