"""Retype: a function with each value's type, and perhaps each attribute, replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.types import Type


def retype(
    function: Function, type_of: Callable[[Type], Type], known: Callable[[Any], Any] = lambda value: value
) -> Function:
    """The function whose values have the types that `type_of` gives for theirs, and whose attributes are `known`."""
    return replace(function, body=_block(function.body, type_of, known, {}))


def _block(block: Block, type_of: Any, known: Any, names: dict[Value, Value]) -> Block:
    params = tuple(_value(v, type_of, names) for v in block.params)
    nodes = tuple(_node(n, type_of, known, names) for n in block.nodes)
    return Block(params, nodes, tuple(names[v] for v in block.results))


def _value(value: Value, type_of: Any, names: dict[Value, Value]) -> Value:
    names[value] = Value(type_of(value.type), value.hint)
    return names[value]


def _node(node: Node, type_of: Any, known: Any, names: dict[Value, Value]) -> Node:
    regions = tuple(_block(r, type_of, known, names) for r in node.regions)
    args = tuple(names[v] for v in node.args)
    results = tuple(_value(v, type_of, names) for v in node.results)
    attrs = Attrs({k: known(v) for k, v in node.attrs.items()})
    return replace(node, args=args, attrs=attrs, results=results, regions=regions)
