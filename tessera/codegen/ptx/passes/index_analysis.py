"""Index analysis: affine forms of index blocks, divisors of index scalars (alignment), backward slices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.value_ranges import IntervalAnalysis
from tessera.core.types import TensorType, int64
from tessera.ir.core import Function, Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, elementwise, shape

# Places as sums: a block of indices as a number, scalars and places along its axes, each times a number.


Producers = Mapping[Value, Node]
affine_rules = Rules("affine form")  # rule(producers, node) gives a Sum or None


@dataclass(frozen=True)
class AffineForm:
    """`number`, plus scalars and places along axes (counted from the last, which is -1), each times a number."""

    number: int = 0
    scalars: Mapping[Value, int] = field(default_factory=dict)
    places: Mapping[int, int] = field(default_factory=dict)

    def times(self, n: int) -> AffineForm:
        """The sum multiplied by a number."""
        scalars = {v: c * n for v, c in self.scalars.items()}
        return AffineForm(self.number * n, scalars, {a: c * n for a, c in self.places.items()})

    def plus(self, other: AffineForm) -> AffineForm:
        """Two sums as one."""
        return AffineForm(
            self.number + other.number, _add_terms(self.scalars, other.scalars), _add_terms(self.places, other.places)
        )  # fmt: skip

    @property
    def constant(self) -> bool:
        """Whether it is a number alone."""
        return not self.scalars and not self.places

    def most(self, block: tuple[int, ...]) -> int:
        """The number, and what places add to it at most."""
        return self.number + sum(max(c * (block[a] - 1), 0) for a, c in self.places.items())


def _add_terms(x: Mapping[Any, int], y: Mapping[Any, int]) -> dict[Any, int]:
    both = {k: x.get(k, 0) + y.get(k, 0) for k in (*x, *y)}
    return {k: c for k, c in both.items() if c}


def find_affine_form(producers: Producers, v: Value) -> AffineForm | None:
    """A block of indices as a sum; None where it is none."""
    if not isinstance(v.type, TensorType) or v.type.dtype != int64:
        return None
    node = producers.get(v)
    rule = affine_rules.get(node.op) if node is not None else None
    found = rule(producers, node) if rule is not None else None
    return AffineForm(scalars={v: 1}) if found is None and not v.type.rank else found


@affine_rules(basic.full)
def _(producers: Producers, node: Node) -> AffineForm | None:
    return AffineForm(int(node.attrs["value"]))


@affine_rules(shape.iota)
def _(producers, node):
    rank = node.out.type.rank
    return AffineForm(places={node.attrs["axis"] % rank - rank: 1})


@affine_rules(basic.broadcast_to)
def _(producers, node):
    return find_affine_form(producers, node.args[0])


@affine_rules(shape.reshape)
def _(producers, node):
    """Axes of size 1 come and go; what else there is keeps its order."""
    found, here, there = find_affine_form(producers, node.args[0]), static_shape(node.args[0]), static_shape(node.out)
    ours, theirs = ([a - len(s) for a, n in enumerate(s) if n != 1] for s in (here, there))
    if found is None or [here[a] for a in ours] != [there[a] for a in theirs]:
        return found if found is not None and not found.places else None
    names = dict(zip(ours, theirs, strict=True))
    return AffineForm(found.number, found.scalars, {names[a]: c for a, c in found.places.items() if a in names})


@affine_rules(elementwise.add, elementwise.sub)
def _(producers, node):
    x, y = (find_affine_form(producers, v) for v in node.args)
    return x and y and x.plus(y.times(1 if node.op is elementwise.add else -1))


@affine_rules(elementwise.mul)
def _(producers, node):
    x, y = (find_affine_form(producers, v) for v in node.args)
    if x is None or y is None or not (x.constant or y.constant):
        return None
    return x.times(y.number) if y.constant else y.times(x.number)


# A comparison holds where the first of its operands, less the second, is below a number; or the other way round.
COMPARISON_OPS = {elementwise.less: (False, 0), elementwise.less_equal: (False, 1), elementwise.greater: (True, 0),
         elementwise.greater_equal: (True, 1)}  # fmt: skip


def find_excess(producers: Producers, node: Node) -> AffineForm | None:
    """For a comparison of indices the sum that is below 0 where it holds."""
    if node.op not in COMPARISON_OPS:
        return None
    turned, more = COMPARISON_OPS[node.op]
    x, y = (find_affine_form(producers, v) for v in (reversed(node.args) if turned else node.args))
    return None if x is None or y is None else x.plus(y.times(-1)).plus(AffineForm(-more))


def is_always_below(ranges: IntervalAnalysis, found: AffineForm, block: tuple[int, ...]) -> bool:
    """Whether a sum is below 0 everywhere, whatever the program and the round."""
    ends = (max(c * end for end in ranges.of(v)) for v, c in found.scalars.items())
    return found.most(block) + sum(ends) < 0


# Numbers that index scalars are multiples of: what tells that a block begins where 16 bytes do.


MAX_DIVISOR = 1 << 20  # as good as a multiple of anything that is asked for
divisor_rules = Rules("ptx divisor")
ProducerMap = Mapping[Value, Node]


def find_divisor(producers: ProducerMap, v: Value) -> int:
    """A number that a scalar is a multiple of."""
    node = producers.get(v)
    if node is None or (node.op is control_flow.for_ and v in node.results):
        return 1
    rule = divisor_rules.get(node.op)
    return rule(producers, node) if rule is not None else 1


@divisor_rules(basic.full)
def _(producers, node):
    return math.gcd(int(node.attrs["value"]), MAX_DIVISOR) or MAX_DIVISOR


@divisor_rules(basic.cast)
def _(producers, node):
    return find_divisor(producers, node.args[0]) if node.args[0].type.dtype.is_integer else 1


def _common_divisor(producers: ProducerMap, node: Node) -> int:
    return math.gcd(*(find_divisor(producers, v) for v in node.args))


divisor_rules(elementwise.add, elementwise.sub, elementwise.maximum, elementwise.minimum)(_common_divisor)


@divisor_rules(elementwise.where)
def _(producers, node):
    return math.gcd(*(find_divisor(producers, v) for v in node.args[1:]))


@divisor_rules(elementwise.mul)
def _(producers, node):
    return min(MAX_DIVISOR, math.prod(find_divisor(producers, v) for v in node.args))


@divisor_rules(control_flow.for_)
def _(producers, node):
    """A loop stands for its index: it begins at the lower bound and goes on by steps."""
    return math.gcd(find_divisor(producers, node.args[0]), find_divisor(producers, node.args[2]))


# What some scalars of a function are computed by.


def backward_slice(function: Function, values: Iterable[Value]) -> list[Node]:
    """The nodes at any depth of a function that some values are computed by, in order."""
    producers = {v: n for n in function.body.walk() for v in n.results}
    wanted, found = list(values), set[Node]()
    while wanted:
        made = producers.get(wanted.pop())
        if made is not None and made not in found:
            found.add(made)
            wanted += made.args
    return [n for n in function.body.walk() if n in found]
