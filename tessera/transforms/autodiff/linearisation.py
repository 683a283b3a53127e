"""Linearisation and transposition: forward mode (JVP), partial evaluation and reverse mode of a block.

After Radul, Paszke, Frostig, Johnson and Maclaurin, "You Only Linearize Once" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import TesseraError
from tessera.core.types import TensorType
from tessera.ir.builder import evaluate_block
from tessera.ir.core import Block, Node, Value
from tessera.ir.rewrite import lower_node
from tessera.ir.rules import Rules, jvp, lower, transpose
from tessera.ir.tensor import Tensor
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
        sums: dict[Value, Tensor] = {}
        for value, g in zip(self.outputs, cotangents, strict=True):
            if value is not None and g is not None:
                _accumulate_cotangent(sums, value, g)
        for node in reversed(self.nodes):
            with set_location(node.loc):
                self._pull_back(node, sums)
        return [sums[v] if v in sums else splat(0, v.type) for v in self.inputs]  # type: ignore[arg-type]

    def _pull_back(self, node: Node, sums: dict[Value, Tensor]) -> None:
        found = [sums.pop(v, None) for v in node.results]
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
                _accumulate_cotangent(sums, value, part)


def _accumulate_cotangent(sums: dict[Value, Tensor], value: Value, g: Tensor) -> None:
    sums[value] = sums[value] + g if value in sums else g


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
