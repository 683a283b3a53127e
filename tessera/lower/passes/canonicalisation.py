"""Canonicalisation: small exact rewrites of Graph functions, one rule for each op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.core.types import TensorType
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ir.evaluator import make_copier, rebuild_function
from tessera.ir.rules import REGISTRY, Op, Rules
from tessera.ops.tensor import basic, contractions, elementwise, nn, reduce, shape

# rule(graph, node, args) gives the value to use instead, or None to keep the node.
canonicalisation_rules = Rules("simplification")
_POINTWISE = tuple(o for o in REGISTRY.values() if o.pointwise and o is not basic.cast)


class GraphRewriter:
    """The function being rebuilt: what made a value, and new nodes."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def find_producer(self, value: Value, op: Op) -> Node | None:
        """The node of a value, if it is of this op."""
        node = self.builder.producers.get(value)
        return node if node is not None and node.op is op else None

    def number(self, value: Value) -> Any:
        """The number that a tensor repeats, or None."""
        node = self.find_producer(value, basic.full)
        return None if node is None else node.attrs["value"]

    def add(self, op: Op, *args: Value, **attrs: Any) -> Value:
        """One more node."""
        return self.builder.add(op, args, attrs).out

    def full(self, like: Value, value: Any) -> Value:
        """A tensor that repeats a number."""
        type = like.type
        node = self.builder.add(
            basic.full, [], {"shape": type.shape, "value": value, "dtype": type.dtype}, types=(type,)
        )
        return node.out

    def reshape(self, value: Value, to: Sequence[Any]) -> Value:
        """A tensor with another shape."""
        inner = self.find_producer(value, shape.reshape)
        value = inner.args[0] if inner else value
        return value if value.type.shape == tuple(to) else self.add(shape.reshape, value, shape=tuple(to))


def canonicalise(function: Function) -> Function:
    """A function with every rule applied once, from the first node to the last."""
    return rebuild_function(function, _make_rewriter)


def _make_rewriter(builder: Builder):  # type: ignore[no-untyped-def]
    graph, copy = GraphRewriter(builder), make_copier(builder)

    def meaning(node: Node, args: list[Value], walk: Any) -> Sequence[Value]:
        rule = canonicalisation_rules.get(node.op)
        with builder.at(node.loc):
            found = rule(graph, node, args) if rule else None
        if found is not None and found.type == node.out.type:
            return (found,)
        return copy(node, args, walk)

    return meaning


def _move_splat(graph: GraphRewriter, node: Node, args: list[Value]) -> Value | None:
    """What moves the elements of a tensor that repeats one number gives such a tensor."""
    value = graph.number(args[0])
    return None if value is None else graph.full(node.out, value)


@canonicalisation_rules(basic.cast)
def _(graph, node, args):
    if args[0].type == node.out.type:
        return args[0]
    value = graph.number(args[0])
    if value is None:
        return None
    return graph.full(node.out, _fold_constants(node, [_get_splat_array(graph, args[0])]))


@canonicalisation_rules(shape.reshape)
def _(graph, node, args):
    return _move_splat(graph, node, args) or graph.reshape(args[0], node.attrs["shape"])


@canonicalisation_rules(basic.broadcast_to)
def _(graph, node, args):
    if args[0].type.shape == node.out.type.shape:
        return args[0]
    inner = graph.find_producer(args[0], basic.broadcast_to)
    if inner:
        return graph.add(basic.broadcast_to, inner.args[0], shape=node.attrs["shape"])
    return _move_splat(graph, node, args)


@canonicalisation_rules(shape.permute)
def _(graph, node, args):
    x, axes = args[0], list(node.attrs["axes"])
    inner = graph.find_producer(x, shape.permute)
    if inner:
        x, axes = inner.args[0], [inner.attrs["axes"][a] for a in axes]
    moved = [a for a in axes if x.type.shape[a] != 1]
    if moved == sorted(moved):  # only axes of size 1 change places
        return graph.reshape(x, node.out.type.shape)
    return _move_splat(graph, node, args) or (graph.add(shape.permute, x, axes=tuple(axes)) if inner else None)


@canonicalisation_rules(nn.scaled_dot_product_attention)
def _(graph, node, args):
    """Heads that were only brought forward stay where they were; a user that takes them back finds them there."""
    turned = [graph.find_producer(x, shape.permute) for x in args[:3]]
    if not all(each and each.attrs["axes"] == nn.HEADS_SECOND_ORDER for each in turned):
        return None
    found = graph.add(nn.positional_attention, *(each.args[0] for each in turned), *args[3:], **node.attrs)
    return graph.add(shape.permute, found, axes=nn.HEADS_SECOND_ORDER)


@canonicalisation_rules(shape.slice_)
def _(graph, node, args):
    return args[0] if args[0].type == node.out.type else _move_splat(graph, node, args)


@canonicalisation_rules(shape.pad)
def _(graph, node, args):
    return args[0] if args[0].type == node.out.type else None


@canonicalisation_rules(shape.concatenate)
def _(graph, node, args):
    kept = [a for a in args if 0 not in a.type.shape]
    if len(kept) == len(args) > 1 or not kept:
        return None
    return kept[0] if len(kept) == 1 else graph.add(shape.concatenate, *kept, axis=node.attrs["axis"])


@canonicalisation_rules(elementwise.where)
def _(graph, node, args):
    chosen = graph.number(args[0])
    return None if chosen is None else args[1 if chosen else 2]


def _get_splat_array(graph: GraphRewriter, value: Value) -> np.ndarray | None:
    number = graph.number(value)
    return None if number is None else basic.full.ref(shape=(), value=number, dtype=value.type.dtype)


def _get_element_type(value: Value) -> TensorType:
    assert isinstance(value.type, TensorType)
    return value.type.with_shape(())


def _fold_constants(node: Node, arrays: Sequence[Any]) -> Any:
    """A pointwise node on numbers."""
    types = tuple(_get_element_type(v) for v in node.args)
    (out,) = node.op.execute(types, (_get_element_type(node.out),), node.attrs, list(arrays))
    return out.item() if not node.out.type.dtype.is_float else float(out)


@canonicalisation_rules(*(o for o in _POINTWISE if o is not elementwise.where))
def _(graph, node, args):
    numbers = [_get_splat_array(graph, a) for a in args]
    if all(n is not None for n in numbers):
        return graph.full(node.out, _fold_constants(node, numbers))
    if node.op is elementwise.pow and numbers[1] is not None and float(numbers[1]) == 2:
        return graph.add(elementwise.mul, args[0], args[0])  # rounded once, as the power is
    unit = _IDENTITIES.get(node.op)
    if unit is None or numbers[1] is None or float(numbers[1]) != unit:
        return None
    return args[0]


# x times 1, x over 1, x to the power 1 and x minus 0 are x, with its sign and payload; x plus 0 is not, for -0.
_IDENTITIES: dict[Op, float] = {elementwise.mul: 1.0, elementwise.div: 1.0, elementwise.pow: 1.0, elementwise.sub: 0.0}


@canonicalisation_rules(contractions.dot)
def _(graph, node, args):
    return graph.full(node.out, 0) if args[0].type.shape[-1] == 0 else None


@canonicalisation_rules(reduce.argmax, reduce.argmin)
def _(graph, node, args):
    return graph.full(node.out, 0) if args[0].type.shape[node.attrs["axis"]] == 1 else None


@canonicalisation_rules(reduce.sum, reduce.max, reduce.min)
def _(graph, node, args):
    (x,), axes = args, [a + args[0].type.rank for a in node.attrs["axis"]]
    sizes = x.type.shape
    if node.op is reduce.sum and any(sizes[a] == 0 for a in axes):
        return graph.full(node.out, 0)
    many = [a for a in axes if sizes[a] != 1]
    if not many:
        same = graph.reshape(x, node.out.type.shape)
        dtype = node.out.type.dtype
        return same if same.type.dtype == dtype else graph.add(basic.cast, same, dtype=dtype)
    return None if len(axes) == 1 else _reduce_one_axis(graph, node, x, many)


def _reduce_one_axis(graph: GraphRewriter, node: Node, x: Value, axes: list[int]) -> Value:
    """A reduction of several axes as one of the last axis, which they are made into."""
    sizes, rank = x.type.shape, x.type.rank
    kept = [a for a in range(rank) if a not in axes]
    order = [*kept, *axes]
    together = axes == list(range(axes[0], axes[-1] + 1))
    if together:
        order = list(range(rank))
    elif order != sorted(order):
        x = graph.add(shape.permute, x, axes=tuple(order))
    first = axes[0] if together else len(kept)
    count = math.prod(sizes[a] for a in axes)
    after = [sizes[a] for a in order[first + len(axes) :]]
    flat = graph.reshape(x, (*(sizes[a] for a in order[:first]), count, *after))
    axis = first - flat.type.rank
    out = graph.add(node.op, flat, axis=(axis,), keepdims=False)
    return graph.reshape(out, node.out.type.shape)
