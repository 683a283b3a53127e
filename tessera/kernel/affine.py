"""Index arithmetic seen through: what an index is made of, found by walking back over the nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera.ir.core import Node, Value
from tessera.kernel.trace import Index, current, plus
from tessera.op import Op
from tessera.ops import basic, elementwise, shape
from tessera.tensor import Tensor


@dataclass(frozen=True)
class Linear:
    """A constant plus multiples of scalars, plus multiples of the place along axes of a block.

    Axes count from the end (-1 is the last), so that broadcasting does not move them.
    """

    constant: int = 0
    scalars: dict[Value, int] = field(default_factory=dict)
    ramps: dict[int, int] = field(default_factory=dict)

    def plus(self, other: Linear, sign: int = 1) -> Linear:
        """The sum of two forms."""
        scalars = _sum(self.scalars, other.scalars, sign)
        return Linear(self.constant + sign * other.constant, scalars, _sum(self.ramps, other.ramps, sign))

    def times(self, factor: int) -> Linear:
        """A multiple of this form."""
        return Linear().plus(self, factor)

    @property
    def is_constant(self) -> bool:
        """Whether nothing is left but the constant."""
        return not self.scalars and not self.ramps


def _sum(a: dict[Any, int], b: dict[Any, int], sign: int) -> dict[Any, int]:
    total = {k: a.get(k, 0) + sign * b.get(k, 0) for k in (*a, *b)}
    return {k: c for k, c in total.items() if c}


def form(index: Index, deep: bool = True) -> Linear | None:
    """What an integer tensor is made of, or None where it is no linear form.

    A scalar that is not itself linear stands for itself; unless `deep`, every scalar does.
    """
    if isinstance(index, int):
        return Linear(index)
    if not index.is_traced or not index.dtype.is_integer:
        return None
    return _walk(index.data, deep)


def constant(index: Index) -> int | None:
    """The value of an index known while compiling, else None."""
    found = index if isinstance(index, int) else form(index)
    if isinstance(found, Linear):
        return found.constant if found.is_constant else None
    return found


def difference(upper: Index, lower: Index) -> int | None:
    """upper - lower where that is known while compiling, else None."""
    high, low = form(upper), form(lower)
    if high is None or low is None:
        return None
    gap = high.plus(low, -1)
    if not gap.is_constant:  # the same expression written twice is the same number
        alike: dict[Any, int] = {}
        for scalar, factor in gap.scalars.items():
            alike = _sum(alike, {_expression(scalar): factor}, 1)
        gap = Linear(gap.constant, alike, gap.ramps)
    return gap.constant if gap.is_constant else None


def _expression(value: Value) -> Any:
    """What a value is computed by, where that reads no memory: equal for equal expressions."""
    node = current().builder.producers.get(value)
    if node is None or node.op.effects or node.regions or len(node.results) != 1:
        return value
    return (node.op, node.attrs, tuple(map(_expression, node.args)))


def scalar_part(found: Linear) -> Index:
    """The part of a form that is the same all over the block, as an index."""
    total: Index = 0
    for scalar, factor in found.scalars.items():
        each = Tensor(scalar)
        total = plus(total, each if factor == 1 else each * factor)  # type: ignore[operator]
    return plus(total, found.constant)


def _walk(value: Value, deep: bool) -> Linear | None:
    node = current().builder.producers.get(value)
    rule = _RULES.get(node.op) if node is not None else None
    scalar = value.type.rank == 0
    opaque = Linear(0, {value: 1}) if scalar else None
    if rule is None or node is None or (scalar and not deep and node.op is not basic.full):
        return opaque
    return rule(node, deep) or opaque


def _add(node: Node, deep: bool, sign: int = 1) -> Linear | None:
    a, b = (_walk(v, deep) for v in node.args)
    return a.plus(b, sign) if a is not None and b is not None else None


def _mul(node: Node, deep: bool) -> Linear | None:
    a, b = (_walk(v, deep) for v in node.args)
    if a is None or b is None:
        return None
    if a.is_constant:
        a, b = b, a
    return a.times(b.constant) if b.is_constant else None


def _cast(node: Node, deep: bool) -> Linear | None:
    widens = node.args[0].type.dtype.is_integer and node.out.type.dtype.bits >= node.args[0].type.dtype.bits
    return _walk(node.args[0], deep) if widens else None


def _full(node: Node, deep: bool) -> Linear | None:
    return Linear(int(node.attrs["value"]))


def _iota(node: Node, deep: bool) -> Linear | None:
    axis = node.attrs["axis"]
    return Linear(0, {}, {axis: 1} if node.out.type.shape[axis] != 1 else {})


def _reshape(node: Node, deep: bool) -> Linear | None:
    """Axes of size 1 come and go; the others keep their order."""
    found = _walk(node.args[0], deep)
    before, after = (_long_axes(v) for v in (node.args[0], node.out))
    sizes = [[v.type.shape[a] for a in axes] for v, axes in ((node.args[0], before), (node.out, after))]
    if found is None or sizes[0] != sizes[1]:
        return None
    moved = dict(zip(before, after, strict=True))
    return Linear(found.constant, found.scalars, {moved[a]: c for a, c in found.ramps.items()})


def _long_axes(value: Value) -> list[int]:
    rank = value.type.rank
    return [a - rank for a, n in enumerate(value.type.shape) if n != 1]


_RULES: dict[Op, Callable[[Node, bool], Linear | None]] = {
    elementwise.add: _add,
    elementwise.sub: lambda node, deep: _add(node, deep, -1),
    elementwise.mul: _mul,
    elementwise.neg: lambda node, deep: f.times(-1) if (f := _walk(node.args[0], deep)) else None,
    basic.cast: _cast,
    basic.full: _full,
    basic.broadcast_to: lambda node, deep: _walk(node.args[0], deep),
    shape.iota: _iota,
    shape.reshape: _reshape,
}
