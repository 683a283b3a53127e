"""Rules of control flow: scan, cond and while_loop under vmap, scan and cond in both modes of differentiation,
while_loop in forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.symbolic_dim import Size
from tessera.core.types import TensorType
from tessera.ir.core import Block, Node, Value
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow
from tessera.ops.tensor.basic import instantiate_zero, splat
from tessera.ops.tensor.elementwise import where
from tessera.ops.tensor.reduce import any as any_of
from tessera.ops.tensor.shape import permute, reshape
from tessera.transforms.autodiff import linearisation
from tessera.transforms.autodiff.call_primitives import add_transpose_call
from tessera.transforms.autodiff.linearisation import Dual, linearise, push_forward, select_live_nodes
from tessera.transforms.batching import BatchValue, batch_block, broadcast_to_batch
from tessera.transforms.batching import call_batching_rules as batched
from tessera.transforms.flow.region_ops import bind_cond, bind_scan, bind_scan_block, bind_while
from tessera.transforms.recording import eval_block, rebind_node, record_block

# Derivative rules of control flow: scan and cond in both modes, while_loop in forward mode.
#
# Reverse mode of a scan saves residuals in a forward loop and consumes them in a loop in the opposite direction.


# Residuals of a scan for reverse mode: stacked per step, or shared by all steps.


@dataclass(frozen=True)
class ScanResiduals:
    """The stacks of steps, then the tensors shared by all steps; `places` locates each residual."""

    stacks: list[Tensor]
    shared: list[Tensor]
    places: tuple[tuple[bool, int], ...]

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [*self.stacks, *self.shared]

    def select_step_values(self, slices: Sequence[Tensor], shared: Sequence[Tensor]) -> list[Tensor]:
        """The residuals of one step."""
        return [slices[i] if stacked else shared[i] for stacked, i in self.places]


@dataclass(frozen=True)
class ResidualAnalysis:
    """A body whose results after the first `count` are residuals, sorted by their dependences.

    Inputs of a step and values that depend on constants alone are not stacked.
    """

    block: Block
    count: int
    carry: int
    xs: int

    @property
    def needed_values(self) -> tuple[Value, ...]:
        """The residuals."""
        return self.block.results[self.count :]

    def find_varying_values(self) -> set[Value]:
        """The values that vary between steps."""
        found = set(self.block.params[: self.carry + self.xs])
        for node in self.block.nodes:
            if node.op.effects or not found.isdisjoint(node.args):
                found.update(node.results)
        return found

    def classify_values(self) -> tuple[list[Value], list[Value], list[Value]]:
        """Residuals computed by a step, residuals that are its inputs, and those shared by all steps; each once."""
        varying, inputs = self.find_varying_values(), set(self.block.params[self.carry : self.carry + self.xs])
        once = list(dict.fromkeys(self.needed_values))
        made = [v for v in once if v in varying and v not in inputs]
        return made, [v for v in once if v in inputs], [v for v in once if v not in varying]

    def shared(self, values: Sequence[Value], consts: Sequence[Tensor]) -> list[Tensor]:
        """The values that depend on constants alone, computed once."""
        varying, params = self.find_varying_values(), self.block.params[self.carry + self.xs :]
        nodes = tuple(n for n in self.block.nodes if varying.isdisjoint(n.results))
        return eval_block(Block(params, select_live_nodes(nodes, values), tuple(values)), consts)


# Derivatives of scan: forward mode in one loop, reverse mode in a second loop in the opposite direction.


MovingFlags = list[bool]


@dataclass(frozen=True)
class ScanLayout:
    """The partition of the operands of a scan, and of the parameters of its body."""

    carry: int
    xs: int

    @staticmethod
    def of(node: Node) -> ScanLayout:
        """The partition for a scan node."""
        return ScanLayout(node.attrs["carry"], node.attrs["xs"])

    def split(self, items: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The carried ones, the stacks, the constants."""
        end = self.carry + self.xs
        return list(items[: self.carry]), list(items[self.carry : end]), list(items[end:])


def find_moving_results(block: Block, moves: MovingFlags, reverse: bool = False) -> tuple[MovingFlags, MovingFlags]:
    """The carried values with nonzero tangents after the loop (a fixpoint), and such results of a step."""
    found: MovingFlags = []

    def both(tensors: list[Tensor]) -> list[Tensor]:
        outs = push_forward(block, _make_duals(tensors[: len(moves)], tensors[len(moves) :], moves), reverse)
        found[:] = [d.tangent is not None for d in outs]
        return [d.primal for d in outs]

    types: list[Any] = [p.type for p in block.params]
    record_block(both, [*types, *(t for t, m in zip(types, moves, strict=True) if m)])
    return moves, found


def _make_duals(primals: Sequence[Tensor], tangents: Sequence[Tensor], moves: MovingFlags) -> list[Dual]:
    given = iter(tangents)
    return [Dual(x, next(given) if m else None) for x, m in zip(primals, moves, strict=True)]


def find_moving_carry(
    block: Block, moves: MovingFlags, carry: int, reverse: bool = False
) -> tuple[MovingFlags, MovingFlags]:
    """`moving`, extended by the carried values whose tangents become nonzero in a step."""
    while True:
        moves, found = find_moving_results(block, moves, reverse)
        grown = [a or b for a, b in zip(moves[:carry], found[:carry], strict=True)] + moves[carry:]
        if grown == moves:
            return moves, found
        moves = grown


@linearisation.call_jvp_rules(control_flow.scan)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    parts, block = ScanLayout.of(node), node.regions[0]
    moves, found = find_moving_carry(block, [d.tangent is not None for d in duals], parts.carry, reverse)
    if reverse:
        return _ScanTranspose(node, moves, found).call(duals)
    return _differentiate_scan_forward(node, parts, duals, moves, found)


def _differentiate_scan_forward(
    node: Node, parts: ScanLayout, duals: list[Dual], moves: MovingFlags, found: MovingFlags
) -> list[Dual]:
    block, places = node.regions[0], parts.split(moves)
    primals = parts.split([d.primal for d in duals])
    tangents = [
        [instantiate_zero(d.tangent, d.primal.type) for d, m in zip(ds, ms, strict=True) if m]
        for ds, ms in zip(parts.split(duals), places, strict=True)
    ]
    kept = [*places[0], *found[parts.carry :]]

    def step(tensors: list[Tensor]) -> list[Tensor]:
        given, pairs = iter(tensors), []
        for xs, ms in zip(primals, places, strict=True):
            here = [next(given) for _ in xs]
            pairs += _make_duals(here, [next(given) for m in ms if m], ms)
        outs = push_forward(block, pairs)
        moved = [instantiate_zero(d.tangent, d.primal.type) if k else None for d, k in zip(outs, kept, strict=True)]
        states, results = _append_tangents(outs, moved, parts.carry)
        return [*states, *results]

    operands = [[*xs, *ts] for xs, ts in zip(primals, tangents, strict=True)]
    carry, stacks, consts = operands
    outs = bind_scan(step, carry, stacks, consts, node.attrs["length"], node.attrs["reverse"])
    count = parts.carry + sum(places[0])
    return [*_pair_tangents(outs[:count], kept[: parts.carry]), *_pair_tangents(outs[count:], kept[parts.carry :])]


def _append_tangents(outs: Sequence[Dual], moved: Sequence[Any], carry: int) -> tuple[list[Tensor], list[Tensor]]:
    """The carried values followed by their tangents, and the results followed by theirs."""
    halves = (slice(None, carry), slice(carry, None))
    first, second = ([*(d.primal for d in outs[h]), *(t for t in moved[h] if t is not None)] for h in halves)
    return first, second


def _pair_tangents(tensors: Sequence[Tensor], moves: MovingFlags) -> list[Dual]:
    return _make_duals(tensors[: len(moves)], tensors[len(moves) :], moves)


class _ScanTranspose:
    """A scan in reverse mode: a forward loop that saves residuals, and a backward loop."""

    def __init__(self, node: Node, moves: MovingFlags, found: MovingFlags) -> None:
        self.block, self.parts, self.moves, self.found = node.regions[0], ScanLayout.of(node), moves, found
        self.length, self.is_reversed = node.attrs["length"], node.attrs["reverse"]

    def call(self, duals: list[Dual]) -> list[Dual]:
        """The results, with linear nodes whose transpose is the backward loop."""
        operands, started = [d.primal for d in duals], [d.tangent is not None for d in duals]
        outs, saved = self._bind_forward_loop(operands)

        def pull(tensors: list[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
            kept = replace(saved, stacks=tensors[: len(saved.stacks)], shared=tensors[len(saved.stacks) :])
            found = iter(self._pull_back(kept, outs, g))
            every = [next(found) if m else None for m in self.moves]
            return [c for c, s in zip(every, started, strict=True) if s]  # type: ignore[misc]

        return add_transpose_call(pull, saved.tensors, duals, outs)

    def _bind_forward_loop(self, operands: list[Tensor]) -> tuple[list[Tensor], ScanResiduals]:
        """The forward loop: its results and residuals."""
        count, block = len(self.block.results), self._record_body()
        carry, xs, consts = self.parts.split([*operands, *self.closed])
        needs = ResidualAnalysis(block, count, self.parts.carry, self.parts.xs)
        made, inputs, shared = needs.classify_values()
        body = Block(needs.block.params, needs.block.nodes, (*needs.block.results[:count], *made))
        outs = bind_scan_block(body, carry, xs, consts, self.length, self.is_reversed)
        walked = dict(zip(needs.block.params[self.parts.carry :], xs, strict=False))
        stacks = [*outs[count:], *(walked[v] for v in inputs)]
        where = {v: (True, i) for i, v in enumerate([*made, *inputs])} | {v: (False, i) for i, v in enumerate(shared)}
        places = tuple(where[v] for v in needs.needed_values)
        return outs[:count], ScanResiduals(stacks, needs.shared(shared, consts), places)

    def _record_body(self) -> Block:
        """The body as a block that also returns every tensor that its linear part uses."""

        def step(tensors: list[Tensor]) -> list[Tensor]:
            self.point = linearise(self.block, tensors, self.moves)
            self.keys = list(dict.fromkeys(v for n in self.point.nodes for v in n.args if v in self.point.known))
            return [*self.point.results, *(self.point.known[v] for v in self.keys)]

        body = record_block(step, [p.type for p in self.block.params])  # type: ignore[misc]
        self.closed = list(body.closed)  # a captured tensor of a user's rule is one more constant
        return body.block

    def _pull_back(self, saved: ScanResiduals, outs: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        """Cotangents of the operands with tangents, from those of the float results."""
        given, (carry, xs, consts) = iter(g), self.parts.split(self.moves)
        every = [next(given) if o.dtype.is_float else None for o in outs]
        states: list[Any] = [c for c, m in zip(every[: self.parts.carry], carry, strict=True) if m]
        along: list[Any] = [
            c for c, f in zip(every[self.parts.carry :], self.found[self.parts.carry :], strict=True) if f
        ]
        sums = [splat(0, p.type) for p, m in zip(self.parts.split(self.block.params)[2], consts, strict=True) if m]
        cuts = _slices_of_sizes(len(states), len(sums), len(saved.stacks), len(along))

        def step(tensors: list[Tensor]) -> list[Tensor]:
            moved, added, slices, gs, shared = (tensors[c] for c in cuts)
            parts = self._pull_back_step(saved.select_step_values(slices, shared), moved, gs)
            first, rest = parts[: len(states)], parts[len(states) + sum(xs) :]
            middle = parts[len(states) : len(states) + sum(xs)]
            return [*first, *(a + p for a, p in zip(added, rest, strict=True)), *middle]

        stacks = [*saved.stacks, *along]
        found = bind_scan(step, [*states, *sums], stacks, saved.shared, self.length, not self.is_reversed)
        return [*found[cuts[0]], *found[len(states) + len(sums) :], *found[cuts[1]]]

    def _pull_back_step(self, known: list[Tensor], moved: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Tensor]:
        """One step of the backward loop: cotangents of the body's inputs with tangents."""
        states, results, carry = iter(moved), iter(gs), self.parts.carry
        cotangents = [next(states) if m else None for m in self.moves[:carry]]
        cotangents += [next(results) if f else None for f in self.found[carry:]]
        return replace(self.point, known=dict(zip(self.keys, known, strict=True))).pull_back(cotangents)


def _slices_of_sizes(*sizes: int) -> list[slice]:
    """A list split into parts of these sizes and the rest."""
    ends = [0, *accumulate(sizes)]
    return [*(slice(a, b) for a, b in pairwise(ends)), slice(ends[-1], None)]


# Derivatives of cond, in both modes, and of while_loop in forward mode.


@linearisation.call_jvp_rules(control_flow.cond)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    condition, operands = duals[0].primal, duals[1:]
    moves = [d.tangent is not None for d in operands]
    if reverse:
        return _differentiate_cond_reverse(node, condition, operands, moves)
    found = [find_moving_results(block, moves)[1] for block in node.regions]
    kept = [any(each) for each in zip(*found, strict=True)]

    def branch(block: Block) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(tensors: list[Tensor]) -> list[Tensor]:
            outs = push_forward(block, _pair_tangents(tensors, moves))
            moved = [instantiate_zero(d.tangent, d.primal.type) for d, k in zip(outs, kept, strict=True) if k]
            return [*(d.primal for d in outs), *moved]

        return run

    tangents = [d.tangent for d in operands if d.tangent is not None]
    outs = bind_cond(condition, [branch(b) for b in node.regions], [*(d.primal for d in operands), *tangents])
    return _pair_tangents(outs, kept)


def _differentiate_cond_reverse(node: Node, condition: Tensor, operands: list[Dual], moves: MovingFlags) -> list[Dual]:
    """The backward pass takes the same branch, and recomputes its residuals."""
    primals = [d.primal for d in operands]
    outs = rebind_node(node, [condition, *primals])
    floats = [o.dtype.is_float for o in outs]

    def back(block: Block) -> Callable[[list[Tensor]], list[Tensor]]:
        def run(tensors: list[Tensor]) -> list[Tensor]:
            given = iter(tensors[len(primals) :])
            point = linearise(block, tensors[: len(primals)], moves)
            return point.pull_back([next(given) if f else None for f in floats])

        return run

    def pull(saved: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        return bind_cond(saved[0], [back(b) for b in node.regions], [*saved[1:], *g])

    return add_transpose_call(pull, [condition, *primals], operands, outs)


@linearisation.call_jvp_rules(control_flow.while_loop)
def _(node: Node, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    if reverse:
        raise UnsupportedOpError(
            "reverse mode does not support while_loop, whose number of steps is unknown",
            suggestion="use ts.fori_loop with numbers as bounds, or ts.scan, or forward mode: ts.jvp, ts.jacfwd",
        )
    count, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    carried, asked, consts = duals[:count], [d.primal for d in duals[count:end]], duals[end:]
    test, body = node.regions
    moves = find_moving_carry(body, [d.tangent is not None for d in (*carried, *consts)], count)[0][:count]

    def split(tensors: Sequence[Tensor]) -> list[Dual]:
        return _pair_tangents(tensors, moves)

    def step(tensors: list[Tensor]) -> list[Tensor]:
        outs = push_forward(body, [*split(tensors), *consts])
        return [
            *(d.primal for d in outs),
            *(instantiate_zero(d.tangent, d.primal.type) for d, m in zip(outs, moves, strict=True) if m),
        ]

    start = [
        *(d.primal for d in carried),
        *(instantiate_zero(d.tangent, d.primal.type) for d, m in zip(carried, moves, strict=True) if m),
    ]
    return split(bind_while(lambda tensors: eval_block(test, [*tensors[:count], *asked])[0], step, start))


# Batching rules of control flow: scan, cond and while_loop under vmap.
#
# A batched while_loop runs until every example is done; finished examples keep their state.


BatchedFlags = list[bool]


def _batched_type(type: TensorType, flag: bool, size: Size) -> TensorType:
    return type.with_shape((size, *type.shape)) if flag else type


def _broadcast_value(lane: BatchValue, size: Size) -> Tensor:
    return lane.tensor if lane.batched else broadcast_to_batch(lane.tensor, size)


def _make_batch_values(tensors: Sequence[Tensor], flags: BatchedFlags) -> list[BatchValue]:
    return [BatchValue(t, f) for t, f in zip(tensors, flags, strict=True)]


def _select_tensors(lanes: Sequence[BatchValue], flags: BatchedFlags, size: Size) -> list[Tensor]:
    """Lanes as tensors, with a leading axis where the flag is set."""
    return [_broadcast_value(lane, size) if f else lane.tensor for lane, f in zip(lanes, flags, strict=True)]


def find_batched_results(block: Block, flags: BatchedFlags, size: Size) -> BatchedFlags:
    """The results of a block that vary between examples, if these parameters do."""
    found: BatchedFlags = []

    def run(tensors: list[Tensor]) -> list[Tensor]:
        outs = batch_block(block, _make_batch_values(tensors, flags), size)
        found[:] = [o.batched for o in outs]
        return [o.tensor for o in outs]

    record_block(run, [_batched_type(p.type, f, size) for p, f in zip(block.params, flags, strict=True)])  # type: ignore[arg-type]
    return found


def find_batched_carry(block: Block, flags: BatchedFlags, carry: int, size: Size) -> tuple[BatchedFlags, BatchedFlags]:
    """`differing`, extended by the carried values that begin to vary in a step."""
    while True:
        found = find_batched_results(block, flags, size)
        grown = [a or b for a, b in zip(flags[:carry], found[:carry], strict=True)] + flags[carry:]
        if grown == flags:
            return flags, found
        flags = grown


@batched(control_flow.scan)
def _(node: Node, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    parts, block = ScanLayout.of(node), node.regions[0]
    flags, found = find_batched_carry(block, [x.batched for x in lanes], parts.carry, size)
    carry, xs, consts = parts.split(lanes)
    kept = [*flags[: parts.carry], *found[parts.carry :]]

    def step(tensors: list[Tensor]) -> list[Tensor]:
        return _select_tensors(batch_block(block, _make_batch_values(tensors, flags), size), kept, size)

    start = _select_tensors(carry, flags[: parts.carry], size)
    stacks = [_swap_leading_axes(x.tensor) if x.batched else x.tensor for x in xs]
    outs = bind_scan(step, start, stacks, [c.tensor for c in consts], node.attrs["length"], node.attrs["reverse"])
    results = [_swap_leading_axes(y) if f else y for y, f in zip(outs[parts.carry :], kept[parts.carry :], strict=True)]
    return _make_batch_values([*outs[: parts.carry], *results], kept)


def _swap_leading_axes(x: Tensor) -> Tensor:
    """Exchange the axes of lanes and steps: the first two."""
    return permute(x, axes=(1, 0, *range(2, x.ndim)))


@batched(control_flow.cond)
def _(node: Node, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    condition, operands = lanes[0], lanes[1:]
    if condition.batched:
        both = [batch_block(block, operands, size) for block in node.regions]
        pairs = zip(*both, strict=True)
        return [
            BatchValue(
                _select_per_example(condition.tensor, _broadcast_value(a, size), _broadcast_value(b, size)), True
            )
            for a, b in pairs
        ]
    flags = [x.batched for x in operands]
    found = [find_batched_results(block, flags, size) for block in node.regions]
    kept = [any(each) for each in zip(*found, strict=True)]

    def branch(block: Block) -> Callable[[list[Tensor]], list[Tensor]]:
        return lambda tensors: _select_tensors(batch_block(block, _make_batch_values(tensors, flags), size), kept, size)

    outs = bind_cond(condition.tensor, [branch(b) for b in node.regions], [x.tensor for x in operands])
    return _make_batch_values(outs, kept)


def _select_per_example(condition: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """`first` in the examples where the condition holds."""
    return where(reshape(condition, shape=(*condition.shape, *[1] * (first.ndim - 1))), first, second)


@batched(control_flow.while_loop)
def _(node: Node, lanes: list[BatchValue], walk: Any, size: Any) -> Sequence[BatchValue]:
    count, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    test, body = node.regions
    carry, asked, consts = lanes[:count], lanes[count:end], lanes[end:]
    flags = find_batched_carry(body, [x.batched for x in (*carry, *consts)], count, size)[0][:count]
    if any(find_batched_results(test, [*flags, *(x.batched for x in asked)], size)):
        flags = [True] * count

    def ask(tensors: Sequence[Tensor]) -> BatchValue:
        return batch_block(test, [*_make_batch_values(tensors, flags), *asked], size)[0]

    def step(tensors: list[Tensor]) -> list[Tensor]:
        outs = _select_tensors(batch_block(body, [*_make_batch_values(tensors, flags), *consts], size), flags, size)
        goes_on = ask(tensors)
        if not goes_on.batched:
            return outs
        return [_select_per_example(goes_on.tensor, new, old) for new, old in zip(outs, tensors, strict=True)]

    def go_on(tensors: list[Tensor]) -> Tensor:
        found = ask(tensors)
        return any_of(found.tensor) if found.batched else found.tensor

    return _make_batch_values(bind_while(go_on, step, _select_tensors(carry, flags, size)), flags)
