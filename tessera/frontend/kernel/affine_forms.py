"""Affine analysis of indices: an index as a constant plus multiples of scalars and iotas, by use-def chains."""

from __future__ import annotations

from typing import Any

from tessera.frontend.kernel.trace import Index, add_indices, current_trace
from tessera.ir.analysis.affine import AffineAnalysis, AffineForm, add_terms
from tessera.ir.core import Node, Value
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import basic


def find_affine_form(index: Index, deep: bool = True) -> AffineForm | None:
    """Find the affine form of an integer tensor, or None.

    A scalar that is not affine is a symbol; without `deep`, every scalar is.
    """
    if isinstance(index, int):
        return AffineForm(index)
    if not index.is_traced or not index.dtype.is_integer:
        return None
    producers = current_trace().builder.producers
    follows = _always if deep else _is_block_or_constant
    return AffineAnalysis(producers, follows, narrow=True).find_form(index.data)


def _always(node: Node) -> bool:
    return True


def _is_block_or_constant(node: Node) -> bool:
    return len(node.results) == 1 and (bool(node.out.type.rank) or node.op is basic.full)


def find_constant(index: Index) -> int | None:
    """Return the compile-time value of an index, or None."""
    found = index if isinstance(index, int) else find_affine_form(index)
    if isinstance(found, AffineForm):
        return found.constant if found.is_constant else None
    return found


def constant_difference(upper: Index, lower: Index) -> int | None:
    """Return upper - lower where it is a compile-time constant, or None."""
    high, low = find_affine_form(upper), find_affine_form(lower)
    if high is None or low is None:
        return None
    gap = high.plus(low, -1)
    if not gap.is_constant:  # equal expressions have equal values
        alike: dict[Any, int] = {}
        for scalar, factor in gap.scalars.items():
            alike = add_terms(alike, {_expression_key(scalar): factor})
        gap = AffineForm(gap.constant, alike, gap.ramps)
    return gap.constant if gap.is_constant else None


def _expression_key(value: Value) -> Any:
    """Make a key of a value's expression, where it reads no memory: equal expressions have equal keys."""
    node = current_trace().builder.producers.get(value)
    if node is None or node.op.effects or node.regions or len(node.results) != 1:
        return value
    return (node.op, node.attrs, tuple(map(_expression_key, node.args)))


def build_scalar_part(found: AffineForm) -> Index:
    """Build the index of the part of a form that is uniform over the block."""
    total: Index = 0
    for scalar, factor in found.scalars.items():
        each = Tensor(scalar)
        total = add_indices(total, each if factor == 1 else each * factor)  # type: ignore[operator]
    return add_indices(total, found.constant)
