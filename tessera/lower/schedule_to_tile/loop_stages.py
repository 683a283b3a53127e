"""Loop stages: the order in which the nodes of a body run when a loop walks one dim.

A reduction over the looped dim is complete only after a whole loop. Stage p holds what p complete loops make
possible: first the nodes that do not depend on the looped dim, then one loop that completes the reductions of this
stage. A value that depends on the looped dim is recomputed in each loop that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.ir.core import Block, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.lower.affine import BodyIndexing
from tessera.ops.dialects import schedule

REDUCTION_OPS = (schedule.reduce, schedule.contract)


@dataclass(frozen=True)
class LoopStage:
    """Nodes before a loop, and the nodes of the loop; `ended` are the reductions that it completes."""

    straight: tuple[Node, ...]
    loop: tuple[Node, ...]
    ended: tuple[Node, ...]


def split_into_stages(block: Block, found: BodyIndexing, loop: Sequence[int]) -> list[LoopStage]:
    """The stages of a body whose looped dims are `loop` (at most one)."""
    if not loop:
        return [LoopStage(block.nodes, (), ())]
    (dim,) = loop
    phase = _number_phases(block, dim)
    last = max((phase[n] for n in block.nodes), default=0)
    made = [_make_stage(block, found, dim, phase, p) for p in range(last + 1)]
    return [s for s in made if s.straight or s.loop]


def _reduces_over(node: Node, dim: int) -> bool:
    return node.op in REDUCTION_OPS and node.attrs["dim"] == dim


def _number_phases(block: Block, dim: int) -> dict[Node, int]:
    """The number of loops that precede a node (for a reduction: that precede its own loop)."""
    after: dict[Value, int] = dict.fromkeys(block.params, 0)
    phase: dict[Node, int] = {}
    for node in block.nodes:
        phase[node] = max((after[v] for v in node.args), default=0)
        for value in node.results:
            after[value] = phase[node] + _reduces_over(node, dim)
    return phase


def _make_stage(block: Block, found: BodyIndexing, dim: int, phase: dict[Node, int], p: int) -> LoopStage:
    ended = tuple(n for n in block.nodes if _reduces_over(n, dim) and phase[n] == p)
    inner = [n for n in block.nodes if _is_inner(n, found, dim)]
    wanted = [n for n in inner if not n.results and phase[n] == p]
    needed = _find_needed_nodes([*ended, *wanted], inner)
    straight = tuple(n for n in block.nodes if n not in inner and not _reduces_over(n, dim) and phase[n] == p)
    return LoopStage(straight, tuple(n for n in inner if n in needed), ended)


def _is_inner(node: Node, found: BodyIndexing, dim: int) -> bool:
    """Whether a node runs inside the loops."""
    if node.results:
        return dim in found.depends[node.out]
    return any(dim in found.depends[v] for v in node.args)


def _find_needed_nodes(ends: Sequence[Node], inner: Sequence[Node]) -> set[Node]:
    """The inner nodes that some nodes depend on, and those of these nodes that are inner."""
    uses = UseDef(Block((), tuple(inner), ()))
    return {n for n in ends if n in inner}.union(uses.backward_slice([v for n in ends for v in n.args]))
