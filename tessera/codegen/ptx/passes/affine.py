"""Places as sums: a block of indices as a number, scalars and places along its axes, each times a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ranges import Ranges
from tessera.ir.core import Node, Value
from tessera.op import Rules
from tessera.ops import basic, elementwise, shape
from tessera.types import TensorType, int64

Producers = Mapping[Value, Node]
terms_of = Rules("affine form")  # rule(producers, node) gives a Sum or None


@dataclass(frozen=True)
class Sum:
    """`number`, plus scalars and places along axes (counted from the last, which is -1), each times a number."""

    number: int = 0
    scalars: Mapping[Value, int] = field(default_factory=dict)
    places: Mapping[int, int] = field(default_factory=dict)

    def times(self, n: int) -> Sum:
        """The sum multiplied by a number."""
        scalars = {v: c * n for v, c in self.scalars.items()}
        return Sum(self.number * n, scalars, {a: c * n for a, c in self.places.items()})

    def plus(self, other: Sum) -> Sum:
        """Two sums as one."""
        return Sum(
            self.number + other.number, _added(self.scalars, other.scalars), _added(self.places, other.places)
        )  # fmt: skip

    @property
    def constant(self) -> bool:
        """Whether it is a number alone."""
        return not self.scalars and not self.places

    def most(self, block: tuple[int, ...]) -> int:
        """The number, and what places add to it at most."""
        return self.number + sum(max(c * (block[a] - 1), 0) for a, c in self.places.items())


def _added(x: Mapping[Any, int], y: Mapping[Any, int]) -> dict[Any, int]:
    both = {k: x.get(k, 0) + y.get(k, 0) for k in (*x, *y)}
    return {k: c for k, c in both.items() if c}


def affine(producers: Producers, v: Value) -> Sum | None:
    """A block of indices as a sum; None where it is none."""
    if not isinstance(v.type, TensorType) or v.type.dtype != int64:
        return None
    node = producers.get(v)
    rule = terms_of.get(node.op) if node is not None else None
    found = rule(producers, node) if rule is not None else None
    return Sum(scalars={v: 1}) if found is None and not v.type.rank else found


@terms_of(basic.full)
def _(producers: Producers, node: Node) -> Sum | None:
    return Sum(int(node.attrs["value"]))


@terms_of(shape.iota)
def _(producers, node):
    rank = node.out.type.rank
    return Sum(places={node.attrs["axis"] % rank - rank: 1})


@terms_of(basic.broadcast_to)
def _(producers, node):
    return affine(producers, node.args[0])


@terms_of(shape.reshape)
def _(producers, node):
    """Axes of size 1 come and go; what else there is keeps its order."""
    found, here, there = affine(producers, node.args[0]), sizes(node.args[0]), sizes(node.out)
    ours, theirs = ([a - len(s) for a, n in enumerate(s) if n != 1] for s in (here, there))
    if found is None or [here[a] for a in ours] != [there[a] for a in theirs]:
        return found if found is not None and not found.places else None
    names = dict(zip(ours, theirs, strict=True))
    return Sum(found.number, found.scalars, {names[a]: c for a, c in found.places.items() if a in names})


@terms_of(elementwise.add, elementwise.sub)
def _(producers, node):
    x, y = (affine(producers, v) for v in node.args)
    return x and y and x.plus(y.times(1 if node.op is elementwise.add else -1))


@terms_of(elementwise.mul)
def _(producers, node):
    x, y = (affine(producers, v) for v in node.args)
    if x is None or y is None or not (x.constant or y.constant):
        return None
    return x.times(y.number) if y.constant else y.times(x.number)


# A comparison holds where the first of its operands, less the second, is below a number; or the other way round.
BELOW = {elementwise.less: (False, 0), elementwise.less_equal: (False, 1), elementwise.greater: (True, 0),
         elementwise.greater_equal: (True, 1)}  # fmt: skip


def excess(producers: Producers, node: Node) -> Sum | None:
    """For a comparison of indices the sum that is below 0 where it holds."""
    if node.op not in BELOW:
        return None
    turned, more = BELOW[node.op]
    x, y = (affine(producers, v) for v in (reversed(node.args) if turned else node.args))
    return None if x is None or y is None else x.plus(y.times(-1)).plus(Sum(-more))


def surely_below(ranges: Ranges, found: Sum, block: tuple[int, ...]) -> bool:
    """Whether a sum is below 0 everywhere, whatever the program and the round."""
    ends = (max(c * end for end in ranges.of(v)) for v, c in found.scalars.items())
    return found.most(block) + sum(ends) < 0
