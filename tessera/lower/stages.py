"""Stages: in which order the nodes of a body run when one dim is walked by a loop.

A reduction along the looped dim is known only after a whole loop over it. Stage p is what p finished
loops make possible: first what does not depend on the looped dim, then one loop that ends the
reductions of this stage. A value that depends on the looped dim is computed again in each loop that needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tessera.ir.core import Block, Node, Value
from tessera.lower.forms import Forms
from tessera.ops import schedule

COMBINING = (schedule.reduce, schedule.contract)


@dataclass(frozen=True)
class Stage:
    """Nodes computed once, then a loop: its nodes, of which `ended` are the reductions that end with it."""

    straight: tuple[Node, ...]
    loop: tuple[Node, ...]
    ended: tuple[Node, ...]


def stages(block: Block, found: Forms, loop: Sequence[int]) -> list[Stage]:
    """The stages of a body whose looped dims are `loop` (at most one)."""
    if not loop:
        return [Stage(block.nodes, (), ())]
    (dim,) = loop
    phase = _phases(block, dim)
    last = max((phase[n] for n in block.nodes), default=0)
    made = [_stage(block, found, dim, phase, p) for p in range(last + 1)]
    return [s for s in made if s.straight or s.loop]


def _ends(node: Node, dim: int) -> bool:
    return node.op in COMBINING and node.attrs["dim"] == dim


def _phases(block: Block, dim: int) -> dict[Node, int]:
    """How many loops must be over before a node can run (a reduction: before its own loop)."""
    after: dict[Value, int] = dict.fromkeys(block.params, 0)
    phase: dict[Node, int] = {}
    for node in block.nodes:
        phase[node] = max((after[v] for v in node.args), default=0)
        for value in node.results:
            after[value] = phase[node] + _ends(node, dim)
    return phase


def _stage(block: Block, found: Forms, dim: int, phase: dict[Node, int], p: int) -> Stage:
    ended = tuple(n for n in block.nodes if _ends(n, dim) and phase[n] == p)
    inner = [n for n in block.nodes if _is_inner(n, found, dim)]
    wanted = [n for n in inner if not n.results and phase[n] == p]
    needed = _cone([*ended, *wanted], inner)
    straight = tuple(n for n in block.nodes if n not in inner and not _ends(n, dim) and phase[n] == p)
    return Stage(straight, tuple(n for n in inner if n in needed), ended)


def _is_inner(node: Node, found: Forms, dim: int) -> bool:
    """Whether a node runs inside the loops."""
    if node.results:
        return dim in found.depends[node.out]
    return any(dim in found.depends[v] for v in node.args)


def _cone(ends: Sequence[Node], inner: Collection[Node]) -> set[Node]:
    """The inner nodes that some nodes need, and those of them that are inner."""
    makers = {v: n for n in inner for v in n.results}
    needed = {n for n in ends if n in inner}
    work = list(ends)
    while work:
        for value in work.pop().args:
            node = makers.get(value)
            if node is not None and node not in needed:
                needed.add(node)
                work.append(node)
    return needed
