"""Ops that a tile function written by hand computes as a whole: what it is, its grid, and how it sees its operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.ir.core import Function, Node
from tessera.lower.plan import Plan
from tessera.op import Op, Rules


@dataclass(frozen=True)
class Launch:
    """A tile function, its grid, and the shapes its operands and result are seen as."""

    function: Function
    grid: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]


# rule(node, plan) gives the launch for a node, or None where its lowering must do.
rules = Rules("launch")
Rule = Callable[[Node, Plan], "Launch | None"]


def kept(plan: Plan) -> frozenset[Op]:
    """The ops that this plan launches."""
    return frozenset(rules) if plan.flash else frozenset()


def launch_of(node: Node, plan: Plan) -> Launch | None:
    """How a node is launched, if it is."""
    rule = rules.get(node.op) if plan.flash else None
    return rule(node, plan) if rule else None
