"""Specialize: a Graph function with symbolic sizes replaced by numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.shapes import Dim


def specialize(function: Function, sizes: Mapping[str, int]) -> Function:
    """A function in which every size that `sizes` names is known."""
    return replace(function, body=_block(function.body, sizes, {}))


def _block(block: Block, sizes: Mapping[str, int], names: dict[Value, Value]) -> Block:
    params = tuple(_value(v, sizes, names) for v in block.params)
    nodes = tuple(_node(n, sizes, names) for n in block.nodes)
    return Block(params, nodes, tuple(names[v] for v in block.results))


def _value(value: Value, sizes: Mapping[str, int], names: dict[Value, Value]) -> Value:
    names[value] = Value(value.type.evaluate(sizes), value.hint)
    return names[value]


def _node(node: Node, sizes: Mapping[str, int], names: dict[Value, Value]) -> Node:
    regions = tuple(_block(r, sizes, names) for r in node.regions)
    args = tuple(names[v] for v in node.args)
    attrs = Attrs({k: _known(v, sizes) for k, v in node.attrs.items()})
    return replace(
        node, args=args, attrs=attrs, results=tuple(_value(v, sizes, names) for v in node.results), regions=regions
    )


def _known(value: Any, sizes: Mapping[str, int]) -> Any:
    if isinstance(value, Dim):
        return value.evaluate(sizes)
    return tuple(_known(v, sizes) for v in value) if isinstance(value, tuple) else value
