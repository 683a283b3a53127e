"""Ops that run on the host, by NumPy, whatever the target: decompositions, and long sorts where a target asks."""

from __future__ import annotations

from typing import Any

from tessera.ir.core import Attrs, Function, Module, Node
from tessera.lower import flow
from tessera.lower.plan import Plan
from tessera.lower.points import shape_of
from tessera.op import REGISTRY, Op
from tessera.ops import host, sort

# The ops without any other lowering.
ALWAYS = tuple(op for op in REGISTRY.values() if op.name.startswith("ts.") and "host" in op.effects)


def keeps(function: Function, op: Op, plan: Plan) -> bool:
    """Whether an op with a lowering is left to the host: a sort whose lowering compares too many pairs."""
    if op is not sort.argsort or plan.host_sort is None:
        return False
    found = [n for n in function.body.walk() if n.op is op]
    return any(int(n.types[0].shape[n.attrs["axis"]]) > plan.host_sort for n in found)


@flow.rules(*ALWAYS, sort.argsort)
def _(lowering: Any, node: Node) -> None:
    operands = [lowering.view(v, shape_of(v)) for v in node.args]
    results = [lowering.hold(v) for v in node.results]
    attrs = {"op": node.op.name, "operands": len(operands), "attrs": Attrs(node.attrs)}
    lowering.builder.add(host.call, [*operands, *results], attrs, types=())


def hosted(module: Module) -> list[Node]:
    """The calls of a Schedule or Tile module that run on the host."""
    return [n for n in module.main.body.walk() if n.op is host.call]
