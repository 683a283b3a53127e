"""Divisibility analysis: a number that an index scalar is a multiple of, which proves alignment (Granger 1989)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tessera.ir.core import Node, Value
from tessera.ir.rules import Rules

MAX_DIVISOR = 1 << 20  # a divisor of 0: as good as any that is asked for
# rule(producers, node) gives a divisor of the result; for a loop, of its index.
divisor_rules = Rules("divisor")


def find_divisor(producers: Mapping[Value, Node], value: Value) -> int:
    """A number that a scalar is a multiple of; `producers` may map the index of a loop to the loop."""
    node = producers.get(value)
    if node is None or (node.regions and value in node.results):
        return 1
    rule = divisor_rules.get(node.op)
    return rule(producers, node) if rule is not None else 1


def find_common_divisor(producers: Mapping[Value, Node], node: Node) -> int:
    """A divisor of every operand, and so of their sums, differences, maxima and minima."""
    return math.gcd(*(find_divisor(producers, v) for v in node.args))


def multiply_divisors(producers: Mapping[Value, Node], node: Node) -> int:
    """A divisor of a product."""
    return min(MAX_DIVISOR, math.prod(find_divisor(producers, v) for v in node.args))
