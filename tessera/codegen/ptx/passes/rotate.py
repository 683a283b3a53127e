"""The pass that turns loops of streamed products around, so that products go on while other work is done.

Where registers allow, a round's first product is made a round early (`ahead`). Else a round's last product is made in
the next round, beside what that computes of its first product. Of a round there remain then the product's left side,
by twos, and the sums that it is added to; what changes the sums before (a factor, say) comes at the round's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.codegen.ptx.ops import awaited, streamed
from tessera.codegen.ptx.passes.ahead import Ahead, led
from tessera.codegen.ptx.passes.turns import Rounds, turn_of
from tessera.codegen.ranges import Ranges
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import control, elementwise


def rotated(function: Function, grid: Sequence[int] | None) -> Function:
    """The function with each loop at its top turned around that can be, and surely has a round."""
    producers = {v: node for node in function.body.walk() for v in node.results}
    ranges = Ranges(producers, grid)
    turns = {n: t for n in function.body.nodes if n.op is control.for_ and (t := turn_of(n)) and _runs(ranges, n)}
    if not turns:
        return function

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node not in turns:
                return copy(node, args, run)
            early = led(turns[node])
            with builder.at(node.loc):
                if early is not None:
                    return Ahead(builder, early, args, run.env).run()
                return Rotation(builder, turns[node], args, run.env).run()

        return meaning

    return rebuild(function, meaning_of)


def _runs(ranges: Ranges, loop: Node) -> bool:
    """Whether a loop has a round whatever the program."""
    return ranges.of(loop.args[0])[1] < ranges.of(loop.args[1])[0] and ranges.of(loop.args[2])[0] > 0


class Rotation(Rounds):
    """One loop under way to its new form."""

    def run(self) -> list[Value]:
        """The first round, the loop, and the last product; the loop's results."""
        turn = self.turn
        env = self.bound(self.lower, [self.inits[i] for i in turn.others])
        self.nodes([*turn.rest, *turn.words], env)
        acc = self._changed(self.inits[turn.place], env)
        state = [*(env[turn.body.results[i]] for i in turn.others), acc, env[turn.late.args[0]]]
        begin = self.scalar(elementwise.add, self.lower, self.step)
        node = self.loop(begin, state)
        *others, acc, left = node.results
        total = self._late(self.last(), acc, left, self.bound(self.lower, others))
        return [*others[: turn.place], total, *others[turn.place :]]

    def round(self, index: Value, *state: Value) -> list[Value]:
        """A round: its first product, the one that was left over, and the rest."""
        turn, (*others, acc, left) = self.turn, state
        env = self.bound(index, others)
        first = next(i for i, n in enumerate(turn.rest) if n.op is streamed) + 1
        self.nodes(turn.rest[:first], env)
        before = self.scalar(elementwise.sub, index, self.step)
        total = self._late(before, acc, left, self.bound(index, others))
        self.nodes(turn.rest[first:], env)
        self.builder.add(awaited, [], {})
        acc = self._changed(total, env)
        self.nodes(turn.words, env)
        return [*(env[turn.body.results[i]] for i in turn.others), acc, env[turn.late.args[0]]]

    def _changed(self, acc: Value, env: dict[Value, Value]) -> Value:
        """The sums as they are before the product."""
        own = {**env, self.turn.body.params[self.turn.place + 1]: acc}
        self.nodes(self.turn.path, own)
        return own[self.turn.late.args[2]]

    def _late(self, index: Value, acc: Value, left: Value, env: dict[Value, Value]) -> Value:
        """The product of the round that had this index."""
        late = self.turn.late
        own = {**env, self.turn.body.params[0]: index}
        self.nodes(self.needed(late.args[3:]), own)
        args = [left, own[late.args[1]], acc, *(own[v] for v in late.args[3:])]
        return self.builder.add(streamed, args, late.attrs, loc=late.loc).out
