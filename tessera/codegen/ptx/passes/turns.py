"""Loops of streamed products that can be turned around: what the parts of a round are, and rounds recorded anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.ops import streamed
from tessera.evaluate import copier, evaluate
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Node, Value
from tessera.ops import basic, control, elementwise
from tessera.types import int64


@dataclass(frozen=True)
class Turn:
    """A loop that can be turned: its last product, where its sums are carried, and what changes them before."""

    loop: Node
    late: Node
    place: int  # among the values that are carried
    path: tuple[Node, ...]

    @property
    def body(self) -> Block:
        """The loop's region."""
        return self.loop.regions[0]

    @property
    def words(self) -> list[Node]:
        """What makes the last product's left side: instructions that read such words must be done by then."""
        return [n for n in self.body.nodes if self.late.args[0] in n.results]

    @property
    def rest(self) -> list[Node]:
        """What a round does beside."""
        special = (self.late, *self.path, *self.words)
        return [n for n in self.body.nodes if n not in special]

    @property
    def others(self) -> list[int]:
        """What else is carried, by place."""
        return [i for i in range(len(self.body.results)) if i != self.place]


def turn_of(loop: Node) -> Turn | None:
    """How a loop can be turned, if its last product's left side is made in the round and there is another product."""
    body = loop.regions[0]
    uses = Counter(v for n in body.walk() for v in n.args) + Counter(body.results)
    products = [n for n in body.nodes if n.op is streamed]
    made = {v for n in body.nodes for v in n.results}
    if len(products) < 2 or not products[-1].attrs["summed"] or products[-1].out not in body.results:
        return None
    late = products[-1]
    place = body.results.index(late.out)
    path = _path(body, body.params[place + 1], late)
    fits = uses[late.out] == 1 and path is not None and late.args[0] in made and uses[late.args[0]] == 1
    return Turn(loop, late, place, path) if fits and path is not None else None


def _path(body: Block, acc: Value, late: Node) -> tuple[Node, ...] | None:
    """The nodes between what is carried and the product that is added to it; None if something else sees it."""
    seen, found = {acc}, []
    for node in body.nodes:
        if node is not late and seen & set(node.args):
            if node.regions or node.op is streamed:
                return None
            found.append(node)
            seen |= set(node.results)
    others = {late.args[0], *late.args[3:], *body.results}
    return tuple(found) if not seen & others and late.args[2] in seen else None


class Rounds:
    """A loop under way to a new form: its parts recorded again, with other indices and values."""

    def __init__(self, builder: Builder, turn: Turn, args: Sequence[Value], env: dict[Value, Value]) -> None:
        self.builder, self.turn, self.env = builder, turn, env
        self.lower, self.upper, self.step, *self.inits = args
        self.copy = copier(builder)

    def bound(self, index: Value, others: Sequence[Value]) -> dict[Value, Value]:
        """What names stand for in a round: those outside, the index, what is carried."""
        params = self.turn.body.params
        carried = {params[i + 1]: v for i, v in zip(self.turn.others, others, strict=True)}
        return {**self.env, params[0]: index, **carried}

    def nodes(self, nodes: Sequence[Node], env: dict[Value, Value]) -> None:
        """Record nodes; `env` then has their results."""
        evaluate(Block((), tuple(nodes), ()), (), self.copy, env)

    def needed(self, values: Sequence[Value]) -> list[Node]:
        """The nodes of the body that some values are computed by."""
        wanted, found = set(values), []
        for node in reversed(self.turn.body.nodes):
            if wanted & set(node.results):
                found.append(node)
                wanted |= set(node.args)
        return found[::-1]

    def loop(self, begin: Value, state: Sequence[Value]) -> Node:
        """The loop anew from `begin` on: `round` makes of an index and what is carried what is carried on."""
        params = (Value(begin.type, self.turn.body.params[0].hint), *(Value(v.type, v.hint) for v in state))
        with self.builder.region() as nodes:
            results = self.round(*params)
        types = tuple(v.type for v in state)
        region = (Block(params, tuple(nodes), tuple(results)),)
        return self.builder.add(control.for_, [begin, self.upper, self.step, *state], types=types, regions=region)

    def round(self, index: Value, *state: Value) -> list[Value]:
        """The nodes of one round, added to the builder; what is carried on."""
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
