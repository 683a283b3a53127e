"""Linearisation and transposition: forward mode (JVP), partial evaluation and reverse mode of a block.

After Radul, Paszke, Frostig, Johnson and Maclaurin, "You Only Linearize Once" (2022).
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import TesseraError
from tessera.core.types import TensorType
from tessera.ir.builder import CURRENT_BUILDER, evaluate_block
from tessera.ir.core import Block, Node, Value
from tessera.ir.rewrite import lower_node
from tessera.ir.rules import Rules, jvp, lower, transpose
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import shape
from tessera.ops.tensor.basic import splat
from tessera.transforms.recording import eval_block, rebind_node, record_block, set_location

# Forward mode: evaluation of a block with a tangent for each value.


NO_SAVED_VALUES: Mapping[Any, Any] = {}


@dataclass(frozen=True)
class Dual:
    """A dual number: a value and its tangent; None is zero."""

    primal: Tensor
    tangent: Tensor | None = None


# rule(node, duals, walk, reverse) returns the duals of a call's results. With `reverse` the recorded nodes will be
# transposed, so that a rule may record a linear node that only has a transpose.
call_jvp_rules = Rules("derivative of a call")


SavedValues = Mapping[Value, Tensor]


def push_forward(
    block: Block, duals: Sequence[Dual], reverse: bool = False, saved: SavedValues = NO_SAVED_VALUES
) -> list[Dual]:
    """The duals of the results of a block; `saved` values are not recomputed."""

    def meaning(node: Node, args: list[Dual], walk: Any) -> Sequence[Dual]:
        found = moved(node, args, walk)
        if saved and not saved.keys().isdisjoint(node.results):
            return [Dual(saved.get(v, d.primal), d.tangent) for v, d in zip(node.results, found, strict=True)]
        return found

    def moved(node: Node, args: list[Dual], walk: Any) -> Sequence[Dual]:
        with set_location(node.loc):
            if all(d.tangent is None for d in args) or not _has_floats(node):
                if all(v in saved for v in node.results):
                    return [Dual(saved[v]) for v in node.results]
                return [Dual(x) for x in rebind_node(node, [d.primal for d in args])]
            if node.op in call_jvp_rules:
                return call_jvp_rules.of(node.op)(node, args, walk, reverse)
            has_rule = node.op in jvp or node.op not in lower
            found = _apply_jvp_rule(node, args, saved) if has_rule else None
            return walk(lower_node(node), *args) if found is None else found

    return evaluate_block(block, duals, meaning)


def _has_floats(node: Node) -> bool:
    """Whether a result can have a tangent: the places of a sort have none, however they are computed."""
    types = [v.type for v in node.results]
    return not types or any(not isinstance(t, TensorType) or t.dtype.is_float for t in types)


def _apply_jvp_rule(node: Node, args: list[Dual], saved: SavedValues) -> list[Dual] | None:
    """The duals of the results by the op's rule; None where it leaves these attributes to the lowering."""
    primals = [d.primal for d in args]
    rule = jvp.of(node.op)
    outs = [saved[v] for v in node.results] if all(v in saved for v in node.results) else rebind_node(node, primals)
    moved = rule(outs[0] if len(outs) == 1 else tuple(outs), primals, [d.tangent for d in args], **node.attrs)
    if moved is NotImplemented:
        return None
    tangents = moved if len(outs) > 1 and moved is not None else [moved] * len(outs)
    return [Dual(x, t) for x, t in zip(outs, tangents, strict=True)]


# Reverse mode: record the JVP, evaluate the known part, transpose the linear part.


@dataclass(frozen=True)
class LinearisedBlock:
    """A linearised function: its results, and the nodes that map tangents of its arguments to those of its results.

    `inputs` holds a value for each argument with a tangent, `outputs` one for each such result.
    """

    results: list[Tensor]
    inputs: Sequence[Value]
    outputs: Sequence[Value | None]
    nodes: tuple[Node, ...]
    known: dict[Value, Tensor]

    def pull_back(self, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Cotangents of the arguments with tangents, from those of the results."""
        sums = CotangentSums()
        for value, g in zip(self.outputs, cotangents, strict=True):
            if value is not None and g is not None:
                sums.add(value, g)
        for node in reversed(self.nodes):
            with set_location(node.loc):
                self._pull_back(node, sums)
        found = {v: sums.take(v) for v in dict.fromkeys(self.inputs)}
        return [splat(0, v.type) if (g := found[v]) is None else g for v in self.inputs]  # type: ignore[arg-type]

    def _pull_back(self, node: Node, sums: CotangentSums) -> None:
        found = [sums.take(v) for v in node.results]
        if all(g is None for g in found):
            return
        dense = [splat(0, v.type) if g is None else g for g, v in zip(found, node.results, strict=True)]  # type: ignore[arg-type]
        operands = [self.known.get(v, v.type) for v in node.args]
        try:
            rule = transpose.of(node.op)
            parts = rule(dense[0] if len(dense) == 1 else tuple(dense), *operands, **node.attrs)
        except TesseraError as error:
            raise error.at(node.loc) from None
        for value, part in zip(node.args, parts, strict=True):
            if part is not None and value not in self.known:
                sums.add(value, part)


class CotangentSums:
    """The cotangents of values, each a sum of parts in the order in which they come.

    Parts that slices of a traced value give are padded with zeros. Those that cover the value side by side are
    concatenated: no element is added to zeros.
    """

    def __init__(self) -> None:
        self._parts: dict[Value, list[Tensor]] = {}

    def add(self, value: Value, g: Tensor) -> None:
        """Add a part to the cotangent of a value."""
        parts = self._parts.setdefault(value, [])
        parts[:] = [*parts, g] if not parts or _find_padding(g) is not None else [self._sum(parts) + g]

    def take(self, value: Value) -> Tensor | None:
        """The cotangent of a value, which is then forgotten; None if there is none."""
        parts = self._parts.pop(value, None)
        return self._sum(parts) if parts else None

    def _sum(self, parts: list[Tensor]) -> Tensor:
        return _concatenate_slices(parts) if len(parts) > 1 else parts[0]


def _find_padding(g: Tensor) -> Node | None:
    """The node that pads a part of a traced value with zeros."""
    builder = CURRENT_BUILDER.get()
    node = builder.producers.get(g.data) if builder is not None and g.is_traced else None
    return node if node is not None and node.op is shape.pad and node.attrs["value"] == 0 else None


def _concatenate_slices(parts: list[Tensor]) -> Tensor:
    """The sum of parts: concatenated where they are slices that cover an axis side by side."""
    nodes = [_find_padding(g) for g in parts]
    axes = {
        a
        for n in nodes
        if n
        for a, widths in enumerate(zip(n.attrs["low"], n.attrs["high"], strict=True))
        if any(widths)
    }
    if len(axes) == 1 and all(nodes):
        (axis,) = axes
        ordered = sorted((n for n in nodes if n), key=lambda n: n.attrs["low"][axis])
        sizes = [n.args[0].type.shape[axis] for n in ordered]  # type: ignore[union-attr]
        ends = list(itertools.accumulate(sizes))
        if [n.attrs["low"][axis] for n in ordered] == [0, *ends[:-1]] and ends[-1] == parts[0].shape[axis]:
            return shape.concatenate([Tensor(n.args[0]) for n in ordered], axis=axis)
    return functools.reduce(operator.add, parts)


def linearise(
    block: Block, primals: Sequence[Tensor], moves: Sequence[bool], saved: SavedValues = NO_SAVED_VALUES
) -> LinearisedBlock:
    """The linearisation of a block at a point; `moves` flags the arguments with tangents.

    `saved` holds known values of the block.
    """
    count = len(primals)
    moved: list[bool] = []

    def both(tensors: list[Tensor]) -> list[Any]:
        tangents = iter(tensors[count:])
        duals = [Dual(x, next(tangents) if m else None) for x, m in zip(tensors[:count], moves, strict=True)]
        outs = push_forward(block, duals, reverse=True, saved=saved)
        moved.extend(d.tangent is not None for d in outs)
        return [*(d.primal for d in outs), *(d.tangent for d in outs if d.tangent is not None)]

    types = [x.type for x in primals]
    recorded = record_block(both, [*types, *(t for t, m in zip(types, moves, strict=True) if m)])
    return _partially_evaluate(recorded.block, [*primals, *recorded.closed], count, len(moved), moved)


def _partially_evaluate(
    block: Block, tensors: list[Tensor], count: int, results: int, moved: list[bool]
) -> LinearisedBlock:
    """Partial evaluation: run the nodes that do not depend on tangents; return the others."""
    fixed = len(block.params) - (len(tensors) - count)
    inputs = block.params[count:fixed]
    params = (*block.params[:count], *block.params[fixed:])
    linear: set[Value] = set(inputs)
    for node in block.nodes:
        if not linear.isdisjoint(node.args):
            linear.update(node.results)
    tangents = iter(block.results[results:])
    outputs = [next(tangents) if m else None for m in moved]
    nodes = select_live_nodes([n for n in block.nodes if n.results[0] in linear], [v for v in outputs if v is not None])
    wanted = [*block.results[:results], *(v for n in nodes for v in n.args if v not in linear)]
    rest = select_live_nodes([n for n in block.nodes if n.results[0] not in linear], wanted)
    found = eval_block(Block(params, rest, tuple(wanted)), tensors)
    known = dict(zip(wanted, found, strict=True))
    return LinearisedBlock(found[:results], inputs, [v if v in linear else None for v in outputs], nodes, known)


def select_live_nodes(nodes: Sequence[Node], results: Sequence[Value]) -> tuple[Node, ...]:
    """The nodes that the results depend on, in order."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.results):
            wanted.update(node.args)
            kept.append(node)
    return tuple(reversed(kept))
