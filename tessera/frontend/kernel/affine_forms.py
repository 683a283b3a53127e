"""Affine analysis of indices: an index as a constant plus multiples of scalars and iotas, by use-def chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera.frontend.kernel.trace import Index, add_indices, current_trace
from tessera.ir.core import Node, Value
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import basic, elementwise, shape


@dataclass(frozen=True)
class AffineForm:
    """A constant plus multiples of scalars, plus multiples of the place along axes of a block.

    Axes count from the end (-1 is the last), so that broadcasting does not move them.
    """

    constant: int = 0
    scalars: dict[Value, int] = field(default_factory=dict)
    ramps: dict[int, int] = field(default_factory=dict)

    def plus(self, other: AffineForm, sign: int = 1) -> AffineForm:
        """The sum of two forms."""
        scalars = _add_forms(self.scalars, other.scalars, sign)
        return AffineForm(self.constant + sign * other.constant, scalars, _add_forms(self.ramps, other.ramps, sign))

    def times(self, factor: int) -> AffineForm:
        """A multiple of this form."""
        return AffineForm().plus(self, factor)

    @property
    def is_constant(self) -> bool:
        """Whether nothing is left but the constant."""
        return not self.scalars and not self.ramps


def _add_forms(a: dict[Any, int], b: dict[Any, int], sign: int) -> dict[Any, int]:
    total = {k: a.get(k, 0) + sign * b.get(k, 0) for k in (*a, *b)}
    return {k: c for k, c in total.items() if c}


def find_affine_form(index: Index, deep: bool = True) -> AffineForm | None:
    """What an integer tensor is made of, or None where it is no linear form.

    A scalar that is not itself linear stands for itself; unless `deep`, every scalar does.
    """
    if isinstance(index, int):
        return AffineForm(index)
    if not index.is_traced or not index.dtype.is_integer:
        return None
    return _analyse_value(index.data, deep)


def find_constant(index: Index) -> int | None:
    """The value of an index known while compiling, else None."""
    found = index if isinstance(index, int) else find_affine_form(index)
    if isinstance(found, AffineForm):
        return found.constant if found.is_constant else None
    return found


def constant_difference(upper: Index, lower: Index) -> int | None:
    """upper - lower where that is known while compiling, else None."""
    high, low = find_affine_form(upper), find_affine_form(lower)
    if high is None or low is None:
        return None
    gap = high.plus(low, -1)
    if not gap.is_constant:  # the same expression written twice is the same number
        alike: dict[Any, int] = {}
        for scalar, factor in gap.scalars.items():
            alike = _add_forms(alike, {_expression_key(scalar): factor}, 1)
        gap = AffineForm(gap.constant, alike, gap.ramps)
    return gap.constant if gap.is_constant else None


def _expression_key(value: Value) -> Any:
    """What a value is computed by, where that reads no memory: equal for equal expressions."""
    node = current_trace().builder.producers.get(value)
    if node is None or node.op.effects or node.regions or len(node.results) != 1:
        return value
    return (node.op, node.attrs, tuple(map(_expression_key, node.args)))


def build_scalar_part(found: AffineForm) -> Index:
    """The part of a form that is the same all over the block, as an index."""
    total: Index = 0
    for scalar, factor in found.scalars.items():
        each = Tensor(scalar)
        total = add_indices(total, each if factor == 1 else each * factor)  # type: ignore[operator]
    return add_indices(total, found.constant)


def _analyse_value(value: Value, deep: bool) -> AffineForm | None:
    node = current_trace().builder.producers.get(value)
    rule = _AFFINE_RULES.get(node.op) if node is not None else None
    scalar = value.type.rank == 0
    opaque = AffineForm(0, {value: 1}) if scalar else None
    if rule is None or node is None or (scalar and not deep and node.op is not basic.full):
        return opaque
    return rule(node, deep) or opaque


def _analyse_add(node: Node, deep: bool, sign: int = 1) -> AffineForm | None:
    a, b = (_analyse_value(v, deep) for v in node.args)
    return a.plus(b, sign) if a is not None and b is not None else None


def _analyse_mul(node: Node, deep: bool) -> AffineForm | None:
    a, b = (_analyse_value(v, deep) for v in node.args)
    if a is None or b is None:
        return None
    if a.is_constant:
        a, b = b, a
    return a.times(b.constant) if b.is_constant else None


def _analyse_cast(node: Node, deep: bool) -> AffineForm | None:
    widens = node.args[0].type.dtype.is_integer and node.out.type.dtype.bits >= node.args[0].type.dtype.bits
    return _analyse_value(node.args[0], deep) if widens else None


def _analyse_full(node: Node, deep: bool) -> AffineForm | None:
    return AffineForm(int(node.attrs["value"]))


def _analyse_iota(node: Node, deep: bool) -> AffineForm | None:
    axis = node.attrs["axis"]
    return AffineForm(0, {}, {axis: 1} if node.out.type.shape[axis] != 1 else {})


def _analyse_reshape(node: Node, deep: bool) -> AffineForm | None:
    """Axes of size 1 come and go; the others keep their order."""
    found = _analyse_value(node.args[0], deep)
    before, after = (_long_axes(v) for v in (node.args[0], node.out))
    sizes = [[v.type.shape[a] for a in axes] for v, axes in ((node.args[0], before), (node.out, after))]
    if found is None or sizes[0] != sizes[1]:
        return None
    moved = dict(zip(before, after, strict=True))
    return AffineForm(found.constant, found.scalars, {moved[a]: c for a, c in found.ramps.items()})


def _long_axes(value: Value) -> list[int]:
    rank = value.type.rank
    return [a - rank for a, n in enumerate(value.type.shape) if n != 1]


_AFFINE_RULES: dict[Op, Callable[[Node, bool], AffineForm | None]] = {
    elementwise.add: _analyse_add,
    elementwise.sub: lambda node, deep: _analyse_add(node, deep, -1),
    elementwise.mul: _analyse_mul,
    elementwise.neg: lambda node, deep: f.times(-1) if (f := _analyse_value(node.args[0], deep)) else None,
    basic.cast: _analyse_cast,
    basic.full: _analyse_full,
    basic.broadcast_to: lambda node, deep: _analyse_value(node.args[0], deep),
    shape.iota: _analyse_iota,
    shape.reshape: _analyse_reshape,
}
