"""Group vectorisation of launches: a launch at the Graph level with groups of tiles becomes one of single programs."""

from __future__ import annotations

from dataclasses import replace

from tessera.codegen.grouped.vectoriser import vectorise_function
from tessera.ir.core import Attrs, Block, Function, Node
from tessera.ops.dialects import control_flow, host


def ungroup_launches(function: Function) -> Function:
    """The function with each launch of groups as one program per group, in regions too; the same one if it has none."""
    body = _ungroup_block(function.body)
    return function if body is function.body else replace(function, body=body)


def _ungroup_block(block: Block) -> Block:
    nodes = tuple(_ungroup_node(n) for n in block.nodes)
    return block if all(a is b for a, b in zip(nodes, block.nodes, strict=True)) else replace(block, nodes=nodes)


def _ungroup_node(node: Node) -> Node:
    if node.op is control_flow.launch:
        return ungroup_launch(node) if int(node.attrs["attrs"].get("group", 1)) > 1 else node
    regions = tuple(map(_ungroup_block, node.regions))
    return node if all(a is b for a, b in zip(regions, node.regions, strict=True)) else replace(node, regions=regions)


def ungroup_launch(node: Node, counted: bool = False) -> Node:
    """The launch with one program for each group of tiles; `counted` loops have a known number of trips."""
    made = vectorise_function(host.launched_function(node), counted)
    hints = Attrs({name: value for name, value in made.attrs.items() if name not in ("grid", "tiles")})
    return replace(node, regions=(made.body,), attrs=Attrs({**node.attrs, "attrs": hints}))
