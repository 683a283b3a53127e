"""Software pipelining (Lam 1988): loops of asynchronous products rotated so that products overlap other work.

Where registers allow, a round's first product is issued one round early, and the last round becomes an epilogue.
Otherwise a round's last product is deferred to the next round, and the first round becomes a prologue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.ops import async_mma, wait_copy, wait_mma
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.core.types import int64
from tessera.ir.analysis import IntervalAnalysis
from tessera.ir.builder import Builder, evaluate_block, make_copier
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ops.dialects import control_flow
from tessera.ops.tensor import basic, elementwise

# Rotation: which loops can be rotated, and the parts of their rounds.


@dataclass(frozen=True)
class RotatableLoop:
    """A rotatable loop: its last product is deferred; `path` are the nodes that update its accumulator before."""

    loop: Node
    deferred_mma: Node
    place: int  # the number of the accumulator among the loop-carried values
    path: tuple[Node, ...]

    @property
    def body(self) -> Block:
        """The body of the loop."""
        return self.loop.regions[0]

    @property
    def words(self) -> list[Node]:
        """The node that packs the deferred product's left operand: products that read it must be complete by then."""
        return [n for n in self.body.nodes if self.deferred_mma.args[0] in n.results]

    @property
    def rest(self) -> list[Node]:
        """The other nodes of a round."""
        special = (self.deferred_mma, *self.path, *self.words)
        return [n for n in self.body.nodes if n not in special]

    @property
    def others(self) -> list[int]:
        """The numbers of the other loop-carried values."""
        return [i for i in range(len(self.body.results)) if i != self.place]


def match_rotatable_loop(loop: Node) -> RotatableLoop | None:
    """Match a loop whose last product's left operand is computed in the round, with another product before it."""
    body = loop.regions[0]
    uses = Counter(v for n in body.walk() for v in n.args) + Counter(body.results)
    products = [n for n in body.nodes if n.op is async_mma]
    made = {v for n in body.nodes for v in n.results}
    if len(products) < 2 or not products[-1].attrs["summed"] or products[-1].out not in body.results:
        return None
    late = products[-1]
    place = body.results.index(late.out)
    path = _find_accumulator_path(body, body.params[place + 1], late)
    fits = uses[late.out] == 1 and path is not None and late.args[0] in made and uses[late.args[0]] == 1
    return RotatableLoop(loop, late, place, path) if fits and path is not None else None


def _find_accumulator_path(body: Block, acc: Value, late: Node) -> tuple[Node, ...] | None:
    """The nodes between the carried accumulator and the product that adds to it; None if it has another use."""
    seen, found = {acc}, []
    for node in body.nodes:
        if node is not late and seen & set(node.args):
            if node.regions or node.op is async_mma:
                return None
            found.append(node)
            seen |= set(node.results)
    others = {late.args[0], *late.args[3:], *body.results}
    return tuple(found) if not seen & others and late.args[2] in seen else None


class LoopRewriter:
    """Rewrites a loop by replaying parts of its body with other indices and values."""

    def __init__(self, builder: Builder, turn: RotatableLoop, args: Sequence[Value], env: dict[Value, Value]) -> None:
        self.builder, self.turn, self.env = builder, turn, env
        self.lower, self.upper, self.step, *self.inits = args
        self.copy = make_copier(builder)

    def bound(self, index: Value, others: Sequence[Value]) -> dict[Value, Value]:
        """The environment of a round: outer values, the index, the loop-carried values."""
        params = self.turn.body.params
        carried = {params[i + 1]: v for i, v in zip(self.turn.others, others, strict=True)}
        return {**self.env, params[0]: index, **carried}

    def nodes(self, nodes: Sequence[Node], env: dict[Value, Value]) -> None:
        """Replay nodes; adds their results to `env`."""
        evaluate_block(Block((), tuple(nodes), ()), (), self.copy, env)

    def needed(self, values: Sequence[Value]) -> list[Node]:
        """The backward slice of some values in the body."""
        wanted, found = set(values), []
        for node in reversed(self.turn.body.nodes):
            if wanted & set(node.results):
                found.append(node)
                wanted |= set(node.args)
        return found[::-1]

    def loop(self, begin: Value, state: Sequence[Value]) -> Node:
        """Build the loop from `begin` on; `round` maps the index and the carried values to the next ones."""
        params = (Value(begin.type, self.turn.body.params[0].hint), *(Value(v.type, v.hint) for v in state))
        with self.builder.region() as nodes:
            results = self.round(*params)
        types = tuple(v.type for v in state)
        region = (Block(params, tuple(nodes), tuple(results)),)
        return self.builder.add(control_flow.for_, [begin, self.upper, self.step, *state], types=types, regions=region)

    def round(self, index: Value, *state: Value) -> list[Value]:
        """Build the nodes of one round; returns the carried values."""
        raise NotImplementedError

    def last(self) -> Value:
        """The index of the last round."""
        count = self.scalar(elementwise.sub, self.upper, self.lower)
        less = self.scalar(elementwise.sub, count, self.number(1))
        whole = self.scalar(elementwise.floor_divide, less, self.step)
        return self.scalar(elementwise.add, self.lower, self.scalar(elementwise.mul, whole, self.step))

    def scalar(self, op: Any, x: Value, y: Value) -> Value:
        """An op on two scalars."""
        return self.builder.add(op, [x, y], {}).out

    def number(self, value: int) -> Value:
        """A constant."""
        return self.builder.add(basic.full, [], {"shape": (), "value": value, "dtype": int64}).out


# Early issue: a round processes the accumulator that the round before issued, then issues the first product of the next
# round together with its own second product, which is still in flight when the next round starts.


MAX_LOOP_REGISTERS = (
    176  # registers of a thread for both accumulators and the packed operands of two rounds; more would spill
)


@dataclass(frozen=True)
class EarlyIssueLoop(RotatableLoop):
    """A loop whose product `first` is issued one round early."""

    first: Node


def match_early_issue(turn: RotatableLoop) -> EarlyIssueLoop | None:
    """Match a loop whose only other product depends on nothing of its round, if registers allow early issue."""
    products = [n for n in turn.rest if n.op is async_mma]
    if len(products) != 1 or products[0].attrs["summed"]:
        return None
    (first,) = products
    made = {v for n in turn.body.nodes for v in n.results} | set(turn.body.params[1:])
    groups = min(2, static_shape(turn.deferred_mma.out)[0] // 64)
    held = (
        _element_count(first.out)
        + _element_count(turn.deferred_mma.out)
        + 2 * _element_count(turn.deferred_mma.args[0])
    )
    fits = (
        first.args[0] not in made
        and first.out not in turn.body.results
        and held // (128 * groups) <= MAX_LOOP_REGISTERS
    )
    return EarlyIssueLoop(turn.loop, turn.deferred_mma, turn.place, turn.path, first) if fits else None


def _element_count(v: Value) -> int:
    rows, columns = static_shape(v)
    return rows * columns


class EarlyIssueRewriter(LoopRewriter):
    """Rewrites one loop with early issue."""

    def __init__(self, builder: Builder, turn: EarlyIssueLoop, args: Sequence[Value], env: dict[Value, Value]) -> None:
        super().__init__(builder, turn, args, env)
        self.first = turn.first

    def run(self) -> list[Value]:
        """The first product as prologue, the loop, and the last round as epilogue; returns the loop's results."""
        turn = self.turn
        state = [*(self.inits[i] for i in turn.others), self.inits[turn.place], self._first(self.lower)]
        begin = self.scalar(elementwise.add, self.lower, self.step)
        *others, acc, sums = self.loop(begin, state).results
        env = self._replay_round(self.last(), others, sums)
        total = self._issue_deferred(acc, env)
        others = [env[turn.body.results[i]] for i in turn.others]
        return [*others[: turn.place], total, *others[turn.place :]]

    def round(self, index: Value, *state: Value) -> list[Value]:
        """Process the accumulator of the early product, then issue both products and wait for the first."""
        turn, (*others, acc, sums) = self.turn, state
        env = self._replay_round(self.scalar(elementwise.sub, index, self.step), others, sums)
        self.builder.add(wait_copy, [], {})
        self._prepare_deferred(acc, env)
        following = self._first(index)
        total = self._product(turn.deferred_mma, env)
        self.builder.add(wait_mma, [following], {})
        return [*(env[turn.body.results[i]] for i in turn.others), total, following]

    def _replay_round(self, index: Value, others: Sequence[Value], sums: Value) -> dict[Value, Value]:
        """Replay the nodes of a round that use the first product."""
        env = {**self.bound(index, others), self.first.out: sums}
        self.nodes([n for n in self.turn.rest if n is not self.first], env)
        return env

    def _prepare_deferred(self, acc: Value, env: dict[Value, Value]) -> None:
        """Replay the accumulator path and the left operand of the deferred product."""
        env[self.turn.body.params[self.turn.place + 1]] = acc
        self.nodes([*self.turn.path, *self.turn.words], env)

    def _issue_deferred(self, acc: Value, env: dict[Value, Value]) -> Value:
        self._prepare_deferred(acc, env)
        return self._product(self.turn.deferred_mma, env)

    def _first(self, index: Value) -> Value:
        return self._product(self.first, {**self.env, self.turn.body.params[0]: index})

    def _product(self, node: Node, env: dict[Value, Value]) -> Value:
        """Replay a product with its starts."""
        own = dict(env)
        self.nodes(self.needed(node.args[3 if node.attrs["summed"] else 2 :]), own)
        return self.builder.add(async_mma, [own[v] for v in node.args], node.attrs, loc=node.loc).out


# The pass: early issue where registers allow; else a round's last product is deferred to the next round. Deferral keeps
# the product's packed left operand and its accumulator; updates of the accumulator come at the end of the round.


def pipeline_loops(function: Function, grid: Sequence[int] | None) -> Function:
    """The function with each rotatable loop at its top level rotated, if it has at least one round."""
    ranges = IntervalAnalysis(UseDef(function), grid)
    turns = {
        n: t
        for n in function.body.nodes
        if n.op is control_flow.for_ and (t := match_rotatable_loop(n)) and _always_iterates(ranges, n)
    }
    patterns = RewritePatterns("software pipelining")

    @patterns(control_flow.for_)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        if node not in turns:
            return None
        early = match_early_issue(turns[node])
        if early is not None:
            return EarlyIssueRewriter(rewriter.builder, early, args, rewriter.walk.env).run()
        return RotationRewriter(rewriter.builder, turns[node], args, rewriter.walk.env).run()

    return rewrite_function(function, patterns)


def _always_iterates(ranges: IntervalAnalysis, loop: Node) -> bool:
    """Whether a loop has at least one round in every program."""
    return ranges.of(loop.args[0])[1] < ranges.of(loop.args[1])[0] and ranges.of(loop.args[2])[0] > 0


class RotationRewriter(LoopRewriter):
    """Rewrites one loop with a deferred product."""

    def run(self) -> list[Value]:
        """The first round as prologue, the loop, and the last product as epilogue; returns the loop's results."""
        turn = self.turn
        env = self.bound(self.lower, [self.inits[i] for i in turn.others])
        self.nodes([*turn.rest, *turn.words], env)
        acc = self._apply_accumulator_path(self.inits[turn.place], env)
        state = [*(env[turn.body.results[i]] for i in turn.others), acc, env[turn.deferred_mma.args[0]]]
        begin = self.scalar(elementwise.add, self.lower, self.step)
        node = self.loop(begin, state)
        *others, acc, left = node.results
        total = self._issue_deferred_mma(self.last(), acc, left, self.bound(self.lower, others))
        return [*others[: turn.place], total, *others[turn.place :]]

    def round(self, index: Value, *state: Value) -> list[Value]:
        """A round: its first product, the product deferred from the last round, and the rest."""
        turn, (*others, acc, left) = self.turn, state
        env = self.bound(index, others)
        first = next(i for i, n in enumerate(turn.rest) if n.op is async_mma) + 1
        self.nodes(turn.rest[:first], env)
        before = self.scalar(elementwise.sub, index, self.step)
        total = self._issue_deferred_mma(before, acc, left, self.bound(index, others))
        self.nodes(turn.rest[first:], env)
        self.builder.add(wait_copy, [], {})
        acc = self._apply_accumulator_path(total, env)
        self.nodes(turn.words, env)
        return [*(env[turn.body.results[i]] for i in turn.others), acc, env[turn.deferred_mma.args[0]]]

    def _apply_accumulator_path(self, acc: Value, env: dict[Value, Value]) -> Value:
        """The accumulator after the path of updates."""
        own = {**env, self.turn.body.params[self.turn.place + 1]: acc}
        self.nodes(self.turn.path, own)
        return own[self.turn.deferred_mma.args[2]]

    def _issue_deferred_mma(self, index: Value, acc: Value, left: Value, env: dict[Value, Value]) -> Value:
        """Issue the product of the round with this index."""
        late = self.turn.deferred_mma
        own = {**env, self.turn.body.params[0]: index}
        self.nodes(self.needed(late.args[3:]), own)
        args = [left, own[late.args[1]], acc, *(own[v] for v in late.args[3:])]
        return self.builder.add(async_mma, args, late.attrs, loc=late.loc).out
