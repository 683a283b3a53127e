"""Derivatives of scan: forward mode in one loop, reverse mode in a second one that runs the other way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from tessera.autodiff import dual
from tessera.autodiff.calls import linear_call
from tessera.autodiff.dual import Dual, push
from tessera.autodiff.linear import linearise
from tessera.autodiff.record import record
from tessera.flow.nodes import scan_node, scan_of
from tessera.flow.residuals import Needs, Residuals
from tessera.ir.core import Block, Node
from tessera.ops import flow
from tessera.ops.basic import splat
from tessera.ops.derivatives import dense
from tessera.tensor import Tensor

Moves = list[bool]


@dataclass(frozen=True)
class Parts:
    """How the operands, and the parameters of the body, of a scan are divided."""

    carry: int
    xs: int

    @staticmethod
    def of(node: Node) -> Parts:
        """The division of a scan node."""
        return Parts(node.attrs["carry"], node.attrs["xs"])

    def split(self, items: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The carried ones, the stacks, the constants."""
        end = self.carry + self.xs
        return list(items[: self.carry]), list(items[self.carry : end]), list(items[end:])


def moving(block: Block, moves: Moves, reverse: bool = False) -> tuple[Moves, Moves]:
    """Which carried values move once the loop has run, and which results of a step do."""
    found: Moves = []

    def both(tensors: list[Tensor]) -> list[Tensor]:
        outs = push(block, _duals(tensors[: len(moves)], tensors[len(moves) :], moves), reverse)
        found[:] = [d.tangent is not None for d in outs]
        return [d.primal for d in outs]

    types: list[Any] = [p.type for p in block.params]
    record(both, [*types, *(t for t, m in zip(types, moves, strict=True) if m)])
    return moves, found


def _duals(primals: Sequence[Tensor], tangents: Sequence[Tensor], moves: Moves) -> list[Dual]:
    given = iter(tangents)
    return [Dual(x, next(given) if m else None) for x, m in zip(primals, moves, strict=True)]


def settle(block: Block, moves: Moves, carry: int, reverse: bool = False) -> tuple[Moves, Moves]:
    """`moving`, with each carried value that a step makes move moving from the start."""
    while True:
        moves, found = moving(block, moves, reverse)
        grown = [a or b for a, b in zip(moves[:carry], found[:carry], strict=True)] + moves[carry:]
        if grown == moves:
            return moves, found
        moves = grown


@dual.calls(flow.scan)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    parts, block = Parts.of(node), node.regions[0]
    moves, found = settle(block, [d.tangent is not None for d in duals], parts.carry, reverse)
    if reverse:
        return _Reverse(node, moves, found).call(duals)
    return _forward(node, parts, duals, moves, found)


def _forward(node: Node, parts: Parts, duals: list[Dual], moves: Moves, found: Moves) -> list[Dual]:
    block, places = node.regions[0], parts.split(moves)
    primals = parts.split([d.primal for d in duals])
    tangents = [
        [dense(d.tangent, d.primal.type) for d, m in zip(ds, ms, strict=True) if m]
        for ds, ms in zip(parts.split(duals), places, strict=True)
    ]
    kept = [*places[0], *found[parts.carry :]]

    def step(tensors: list[Tensor]) -> list[Tensor]:
        given, pairs = iter(tensors), []
        for xs, ms in zip(primals, places, strict=True):
            here = [next(given) for _ in xs]
            pairs += _duals(here, [next(given) for m in ms if m], ms)
        outs = push(block, pairs)
        moved = [dense(d.tangent, d.primal.type) if k else None for d, k in zip(outs, kept, strict=True)]
        states, results = _each(outs, moved, parts.carry)
        return [*states, *results]

    operands = [[*xs, *ts] for xs, ts in zip(primals, tangents, strict=True)]
    carry, stacks, consts = operands
    outs = scan_of(step, carry, stacks, consts, node.attrs["length"], node.attrs["reverse"])
    count = parts.carry + sum(places[0])
    return [*_paired(outs[:count], kept[: parts.carry]), *_paired(outs[count:], kept[parts.carry :])]


def _each(outs: Sequence[Dual], moved: Sequence[Any], carry: int) -> tuple[list[Tensor], list[Tensor]]:
    """The carried values with their tangents behind them, and the results with theirs."""
    halves = (slice(None, carry), slice(carry, None))
    first, second = ([*(d.primal for d in outs[h]), *(t for t in moved[h] if t is not None)] for h in halves)
    return first, second


def _paired(tensors: Sequence[Tensor], moves: Moves) -> list[Dual]:
    return _duals(tensors[: len(moves)], tensors[len(moves) :], moves)


class _Reverse:
    """One scan in reverse mode: a loop that keeps what the way back needs, and the loop back."""

    def __init__(self, node: Node, moves: Moves, found: Moves) -> None:
        self.block, self.parts, self.moves, self.found = node.regions[0], Parts.of(node), moves, found
        self.length, self.turned = node.attrs["length"], node.attrs["reverse"]

    def call(self, duals: list[Dual]) -> list[Dual]:
        """The results, whose tangents are known by their transpose."""
        operands, started = [d.primal for d in duals], [d.tangent is not None for d in duals]
        outs, saved = self._ahead(operands)

        def pull(tensors: list[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
            kept = replace(saved, stacks=tensors[: len(saved.stacks)], shared=tensors[len(saved.stacks) :])
            found = iter(self._back(kept, outs, g))
            every = [next(found) if m else None for m in self.moves]
            return [c for c, s in zip(every, started, strict=True) if s]  # type: ignore[misc]

        return linear_call(pull, saved.tensors, duals, outs)

    def _ahead(self, operands: list[Tensor]) -> tuple[list[Tensor], Residuals]:
        """The loop ahead: its results, and what it keeps."""
        count, block = len(self.block.results), self._recorded()
        carry, xs, consts = self.parts.split([*operands, *self.closed])
        needs = Needs(block, count, self.parts.carry, self.parts.xs)
        made, inputs, shared = needs.sorted()
        body = Block(needs.block.params, needs.block.nodes, (*needs.block.results[:count], *made))
        outs = scan_node(body, carry, xs, consts, self.length, self.turned)
        walked = dict(zip(needs.block.params[self.parts.carry :], xs, strict=False))
        stacks = [*outs[count:], *(walked[v] for v in inputs)]
        where = {v: (True, i) for i, v in enumerate([*made, *inputs])} | {v: (False, i) for i, v in enumerate(shared)}
        places = tuple(where[v] for v in needs.wanted)
        return outs[:count], Residuals(stacks, needs.shared(shared, consts), places)

    def _recorded(self) -> Block:
        """The body as a block that also gives every tensor that its linear part uses."""

        def step(tensors: list[Tensor]) -> list[Tensor]:
            self.point = linearise(self.block, tensors, self.moves)
            self.keys = list(dict.fromkeys(v for n in self.point.nodes for v in n.args if v in self.point.known))
            return [*self.point.results, *(self.point.known[v] for v in self.keys)]

        body = record(step, [p.type for p in self.block.params])  # type: ignore[misc]
        self.closed = list(body.closed)  # what a user's rule closes over is one more constant
        return body.block

    def _back(self, saved: Residuals, outs: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        """Cotangents of the operands that move, from those of the float results."""
        given, (carry, xs, consts) = iter(g), self.parts.split(self.moves)
        every = [next(given) if o.dtype.is_float else None for o in outs]
        states: list[Any] = [c for c, m in zip(every[: self.parts.carry], carry, strict=True) if m]
        along: list[Any] = [
            c for c, f in zip(every[self.parts.carry :], self.found[self.parts.carry :], strict=True) if f
        ]
        sums = [splat(0, p.type) for p, m in zip(self.parts.split(self.block.params)[2], consts, strict=True) if m]
        cuts = _cuts(len(states), len(sums), len(saved.stacks), len(along))

        def step(tensors: list[Tensor]) -> list[Tensor]:
            moved, added, slices, gs, shared = (tensors[c] for c in cuts)
            parts = self._step_back(saved.of_step(slices, shared), moved, gs)
            first, rest = parts[: len(states)], parts[len(states) + sum(xs) :]
            middle = parts[len(states) : len(states) + sum(xs)]
            return [*first, *(a + p for a, p in zip(added, rest, strict=True)), *middle]

        stacks = [*saved.stacks, *along]
        found = scan_of(step, [*states, *sums], stacks, saved.shared, self.length, not self.turned)
        return [*found[cuts[0]], *found[len(states) + len(sums) :], *found[cuts[1]]]

    def _step_back(self, known: list[Tensor], moved: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
        """One step back: cotangents of what moves in the body."""
        states, results, carry = iter(moved), iter(gs), self.parts.carry
        cotangents = [next(states) if m else None for m in self.moves[:carry]]
        cotangents += [next(results) if f else None for f in self.found[carry:]]
        return replace(self.point, known=dict(zip(self.keys, known, strict=True))).pull(cotangents)


def _cuts(*sizes: int) -> list[slice]:
    """The parts of a list, of these sizes and then the rest."""
    ends = [0, *accumulate(sizes)]
    return [*(slice(a, b) for a, b in pairwise(ends)), slice(ends[-1], None)]
