"""Forward mode: a walk over a block with a tangent beside each value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.autodiff.record import again, located
from tessera.evaluate import evaluate, lowering_of
from tessera.ir.core import Block, Node, Value
from tessera.op import Rules, jvp, lower
from tessera.tensor import Tensor

NOTHING: Mapping[Any, Any] = {}


@dataclass(frozen=True)
class Dual:
    """A value and how it moves; a tangent of None is zero."""

    primal: Tensor
    tangent: Tensor | None = None


# rule(node, duals, walk, reverse) gives the duals of a call's results. Where `reverse` holds, what is
# recorded will be transposed, so that a rule may leave a linear node that only has a transpose.
calls = Rules("derivative of a call")


Saved = Mapping[Value, Tensor]


def push(block: Block, duals: Sequence[Dual], reverse: bool = False, saved: Saved = NOTHING) -> list[Dual]:
    """The results of a block and how they move; values that are `saved` are not computed again."""

    def meaning(node: Node, args: list[Dual], walk: Any) -> Sequence[Dual]:
        found = moved(node, args, walk)
        if saved and not saved.keys().isdisjoint(node.results):
            return [Dual(saved.get(v, d.primal), d.tangent) for v, d in zip(node.results, found, strict=True)]
        return found

    def moved(node: Node, args: list[Dual], walk: Any) -> Sequence[Dual]:
        with located(node.loc):
            if all(d.tangent is None for d in args):
                if all(v in saved for v in node.results):
                    return [Dual(saved[v]) for v in node.results]
                return [Dual(x) for x in again(node, [d.primal for d in args])]
            if node.op in calls:
                return calls.of(node.op)(node, args, walk, reverse)
            if node.op not in jvp and node.op in lower:
                return walk(lowering_of(node), *args)
            return _moved(node, args, saved)

    return evaluate(block, duals, meaning)


def _moved(node: Node, args: list[Dual], saved: Saved) -> list[Dual]:
    primals = [d.primal for d in args]
    rule = jvp.of(node.op)
    outs = [saved[v] for v in node.results] if all(v in saved for v in node.results) else again(node, primals)
    moved = rule(outs[0] if len(outs) == 1 else tuple(outs), primals, [d.tangent for d in args], **node.attrs)
    tangents = moved if len(outs) > 1 and moved is not None else [moved] * len(outs)
    return [Dual(x, t) for x, t in zip(outs, tangents, strict=True)]
