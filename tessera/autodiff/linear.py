"""Reverse mode: record a function with its tangents, run what is known, transpose what is linear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.autodiff.dual import NOTHING, Dual, Saved, push
from tessera.autodiff.record import located, record, replay
from tessera.errors import TesseraError
from tessera.ir.core import Block, Node, Value
from tessera.op import transpose
from tessera.ops.basic import splat
from tessera.tensor import Tensor


@dataclass(frozen=True)
class Linearised:
    """A function at a point: its results, and the nodes that take tangents of its arguments to those of its results.

    `inputs` holds a value for each argument that moves, `outputs` one for each result that does.
    """

    results: list[Tensor]
    inputs: Sequence[Value]
    outputs: Sequence[Value | None]
    nodes: tuple[Node, ...]
    known: dict[Value, Tensor]

    def pull(self, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
        """Cotangents of the arguments that move, from those of the results."""
        sums: dict[Value, Tensor] = {}
        for value, g in zip(self.outputs, cotangents, strict=True):
            if value is not None and g is not None:
                _gather(sums, value, g)
        for node in reversed(self.nodes):
            with located(node.loc):
                self._back(node, sums)
        return [sums[v] if v in sums else splat(0, v.type) for v in self.inputs]  # type: ignore[arg-type]

    def _back(self, node: Node, sums: dict[Value, Tensor]) -> None:
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
                _gather(sums, value, part)


def _gather(sums: dict[Value, Tensor], value: Value, g: Tensor) -> None:
    sums[value] = sums[value] + g if value in sums else g


def linearise(block: Block, primals: Sequence[Tensor], moves: Sequence[bool], saved: Saved = NOTHING) -> Linearised:
    """A block at a point, ready to be pulled back; `moves` says which arguments have tangents.

    Values of the block that are `saved` are known already.
    """
    count = len(primals)
    moved: list[bool] = []

    def both(tensors: list[Tensor]) -> list[Any]:
        tangents = iter(tensors[count:])
        duals = [Dual(x, next(tangents) if m else None) for x, m in zip(tensors[:count], moves, strict=True)]
        outs = push(block, duals, reverse=True, saved=saved)
        moved.extend(d.tangent is not None for d in outs)
        return [*(d.primal for d in outs), *(d.tangent for d in outs if d.tangent is not None)]

    types = [x.type for x in primals]
    recorded = record(both, [*types, *(t for t, m in zip(types, moves, strict=True) if m)])
    return _split(recorded.block, [*primals, *recorded.closed], count, len(moved), moved)


def _split(block: Block, tensors: list[Tensor], count: int, results: int, moved: list[bool]) -> Linearised:
    """The part of a block that knows nothing of the tangents, run; and the rest."""
    fixed = len(block.params) - (len(tensors) - count)
    inputs = block.params[count:fixed]
    params = (*block.params[:count], *block.params[fixed:])
    linear: set[Value] = set(inputs)
    for node in block.nodes:
        if not linear.isdisjoint(node.args):
            linear.update(node.results)
    tangents = iter(block.results[results:])
    outputs = [next(tangents) if m else None for m in moved]
    nodes = needed([n for n in block.nodes if n.results[0] in linear], [v for v in outputs if v is not None])
    wanted = [*block.results[:results], *(v for n in nodes for v in n.args if v not in linear)]
    rest = needed([n for n in block.nodes if n.results[0] not in linear], wanted)
    found = replay(Block(params, rest, tuple(wanted)), tensors)
    known = dict(zip(wanted, found, strict=True))
    return Linearised(found[:results], inputs, [v if v in linear else None for v in outputs], nodes, known)


def needed(nodes: Sequence[Node], results: Sequence[Value]) -> tuple[Node, ...]:
    """The nodes that these results depend on, in order."""
    wanted, kept = set(results), []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.results):
            wanted.update(node.args)
            kept.append(node)
    return tuple(reversed(kept))
