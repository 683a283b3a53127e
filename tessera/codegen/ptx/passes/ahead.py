"""Loops of two streamed products whose rounds begin with sums that are there: the first product is made a round early.

A round works on sums that the round before began, then begins the next ones and its second product together. That one
is still under way when the next round begins. Only the last round, which comes after the loop, works on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.ops import awaited, settled, streamed
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.turns import Rounds, Turn
from tessera.ir.builder import Builder
from tessera.ir.core import Node, Value
from tessera.ops import elementwise

REGISTERS = 176  # of a thread, for the sums of both products and for words of two rounds: more would not stay in them


@dataclass(frozen=True)
class Led(Turn):
    """A loop of this kind; `first` is the product to make early."""

    first: Node


def led(turn: Turn) -> Led | None:
    """A loop as one of this kind, if its only other product needs nothing of its round, and registers allow for it."""
    products = [n for n in turn.rest if n.op is streamed]
    if len(products) != 1 or products[0].attrs["summed"]:
        return None
    (first,) = products
    made = {v for n in turn.body.nodes for v in n.results} | set(turn.body.params[1:])
    groups = min(2, sizes(turn.late.out)[0] // 64)
    held = _elements(first.out) + _elements(turn.late.out) + 2 * _elements(turn.late.args[0])
    fits = first.args[0] not in made and first.out not in turn.body.results and held // (128 * groups) <= REGISTERS
    return Led(turn.loop, turn.late, turn.place, turn.path, first) if fits else None


def _elements(v: Value) -> int:
    rows, columns = sizes(v)
    return rows * columns


class Ahead(Rounds):
    """One loop under way to its new form."""

    def __init__(self, builder: Builder, turn: Led, args: Sequence[Value], env: dict[Value, Value]) -> None:
        super().__init__(builder, turn, args, env)
        self.first = turn.first

    def run(self) -> list[Value]:
        """The first product, the loop, and the last round; the loop's results."""
        turn = self.turn
        state = [*(self.inits[i] for i in turn.others), self.inits[turn.place], self._first(self.lower)]
        begin = self.scalar(elementwise.add, self.lower, self.step)
        *others, acc, sums = self.loop(begin, state).results
        env = self._made(self.last(), others, sums)
        total = self._second(acc, env)
        others = [env[turn.body.results[i]] for i in turn.others]
        return [*others[: turn.place], total, *others[turn.place :]]

    def round(self, index: Value, *state: Value) -> list[Value]:
        """What is made of the sums that are there; then both products; the first one done."""
        turn, (*others, acc, sums) = self.turn, state
        env = self._made(self.scalar(elementwise.sub, index, self.step), others, sums)
        self.builder.add(awaited, [], {})
        self._ready(acc, env)
        following = self._first(index)
        total = self._product(turn.late, env)
        self.builder.add(settled, [following], {})
        return [*(env[turn.body.results[i]] for i in turn.others), total, following]

    def _made(self, index: Value, others: Sequence[Value], sums: Value) -> dict[Value, Value]:
        """What a round makes of the first product's sums."""
        env = {**self.bound(index, others), self.first.out: sums}
        self.nodes([n for n in self.turn.rest if n is not self.first], env)
        return env

    def _ready(self, acc: Value, env: dict[Value, Value]) -> None:
        """What the second product is added to, and its left side."""
        env[self.turn.body.params[self.turn.place + 1]] = acc
        self.nodes([*self.turn.path, *self.turn.words], env)

    def _second(self, acc: Value, env: dict[Value, Value]) -> Value:
        self._ready(acc, env)
        return self._product(self.turn.late, env)

    def _first(self, index: Value) -> Value:
        return self._product(self.first, {**self.env, self.turn.body.params[0]: index})

    def _product(self, node: Node, env: dict[Value, Value]) -> Value:
        """A product again, with its places."""
        own = dict(env)
        self.nodes(self.needed(node.args[3 if node.attrs["summed"] else 2 :]), own)
        return self.builder.add(streamed, [own[v] for v in node.args], node.attrs, loc=node.loc).out
