"""Numbers that index scalars are multiples of: what tells that a block begins where 16 bytes do."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tessera.ir.core import Node, Value
from tessera.op import Rules
from tessera.ops import basic, control, elementwise

MOST = 1 << 20  # as good as a multiple of anything that is asked for
known = Rules("ptx divisor")
Producers = Mapping[Value, Node]


def divisor(producers: Producers, v: Value) -> int:
    """A number that a scalar is a multiple of."""
    node = producers.get(v)
    if node is None or (node.op is control.for_ and v in node.results):
        return 1
    rule = known.get(node.op)
    return rule(producers, node) if rule is not None else 1


@known(basic.full)
def _(producers, node):
    return math.gcd(int(node.attrs["value"]), MOST) or MOST


@known(basic.cast)
def _(producers, node):
    return divisor(producers, node.args[0]) if node.args[0].type.dtype.is_integer else 1


def _common(producers: Producers, node: Node) -> int:
    return math.gcd(*(divisor(producers, v) for v in node.args))


known(elementwise.add, elementwise.sub, elementwise.maximum, elementwise.minimum)(_common)


@known(elementwise.where)
def _(producers, node):
    return math.gcd(*(divisor(producers, v) for v in node.args[1:]))


@known(elementwise.mul)
def _(producers, node):
    return min(MOST, math.prod(divisor(producers, v) for v in node.args))


@known(control.for_)
def _(producers, node):
    """A loop stands for its index: it begins at the lower bound and goes on by steps."""
    return math.gcd(divisor(producers, node.args[0]), divisor(producers, node.args[2]))
