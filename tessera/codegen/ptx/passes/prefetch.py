"""The pass that fetches ahead: blocks that a loop multiplies come by copies begun some rounds before they are read.

Its result is Tile IR like any other: a ring of slots in shared memory, copies into it (`async_copy`), a commit for each
round's, a wait and a barrier before they are read. What nothing can copy so (rows that begin at any two bytes, masks)
is loaded a round ahead and stored when the round is done. What belongs to rounds past the loop's end lies outside of
its source, where nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tessera.codegen.ptx.passes.fetches import Fetches
from tessera.codegen.ptx.passes.infer import sizes
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Function, Node, Value
from tessera.op import Op
from tessera.ops import basic, control, elementwise, shape, tile
from tessera.passes.dead_code import sweep
from tessera.types import TensorType, int64


def prefetched(function: Function, stages: int, loops: Mapping[Node, Fetches], room: Op = tile.alloc) -> Function:
    """The function with the blocks of some loops (`fetches_of`) fetched `stages` - 1 rounds ahead, into a `room`."""
    reading: dict[Node, tuple[Value, Value]] = {}

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            with builder.at(node.loc):
                if node in loops:
                    return _Staged(builder, node, loops[node], stages, room, reading).run(args, run)
                if node in reading:
                    return [_read(builder, node, *reading[node])]
            return copy(node, args, run)

        return meaning

    return sweep(rebuild(function, meaning_of)) if loops else function


class _Staged:
    """One loop under way to its new form."""

    def __init__(
        self, builder: Builder, loop: Node, fetches: Fetches, stages: int, room: Op, reading: dict[Node, Any]
    ) -> None:
        self.builder, self.loop, self.fetches, self.stages = builder, loop, fetches, stages
        self.reading = reading
        (self.body,) = loop.regions
        self.rings = {load: self._ring(room, load) for load in fetches.loads}

    def _ring(self, room: Op, load: Node) -> Value:
        type = load.out.type
        assert isinstance(type, TensorType)
        attrs = {"shape": (self.stages, *sizes(load.out)), "dtype": type.dtype}
        return self.builder.add(room, [], attrs).out

    def run(self, args: Sequence[Value], run: Any) -> Sequence[Value]:
        """The first copies, the loop, and a wait for the last ones; the loop's results."""
        lower, self.upper, step, *inits = args
        self.step = step
        for ahead in range(self.stages - 1):
            self._begin(self._later(lower, ahead), self._index(ahead), run.env)
        self._put(self._brought(lower, run.env), self._index(0))
        state = [*inits, self._index(0)]
        params = tuple(Value(v.type, p.hint) for v, p in zip([lower, *inits], self.body.params, strict=True))
        params = (*params, Value(state[-1].type, "slot"))
        with self.builder.region() as nodes:
            results = self._round(params, run)
        types = tuple(v.type for v in state)
        region = Block(params, tuple(nodes), tuple(results))
        made = self.builder.add(control.for_, [lower, self.upper, step, *state], types=types, regions=(region,))
        self._wait(0)
        return made.results[:-1]

    def _round(self, params: Sequence[Value], run: Any) -> list[Value]:
        """A round: its blocks have come, the copies of a later one begin, and the body."""
        index, *_, slot = params
        self._wait(self.stages - 2)
        self.builder.add(tile.barrier, [], {})
        last = self._index(self.stages - 1)
        first = self._scalar(elementwise.equal, slot, self._index(0))
        before = self._scalar(elementwise.where, first, last, self._scalar(elementwise.sub, slot, self._index(1)))
        self._begin(self._later(index, self.stages - 1), before, run.env)
        brought = self._brought(self._later(index, 1), run.env)
        self.reading.update((load, (ring, slot)) for load, ring in self.rings.items())
        results = run(self.body, *params[:-1])
        ended = self._scalar(elementwise.equal, slot, last)
        more = self._scalar(elementwise.add, slot, self._index(1))
        following = self._scalar(elementwise.where, ended, self._index(0), more)
        self._put(brought, following)
        return [*results, following]

    def _begin(self, index: Value, slot: Value, outer: Mapping[Value, Value]) -> None:
        """Begin the copies of the round that has an index, if there is one."""
        if not self.fetches.copied:
            return
        for load, (ref, *starts) in self._places(self.fetches.copied, index, outer):
            attrs = {"shape": sizes(load.out), "edge": "clip"}
            to = [slot, *(self._index(0) for _ in starts)]
            self.builder.add(tile.async_copy, [self.rings[load], ref, *to, *starts], attrs, loc=load.loc)
        self.builder.add(tile.async_commit, [], {})

    def _wait(self, pending: int) -> None:
        """Wait for all copies but those of the last rounds."""
        if self.fetches.copied:
            self.builder.add(tile.async_wait, [], {"pending": pending})

    def _brought(self, index: Value, outer: Mapping[Value, Value]) -> list[Value]:
        """The other blocks of the round that has an index."""
        found = self._places(self.fetches.held, index, outer)
        attrs = {"edge": "clip"}
        return [self.builder.add(tile.load, v, {**n.attrs, **attrs}, loc=n.loc).out for n, v in found]

    def _put(self, blocks: Sequence[Value], slot: Value) -> None:
        """Store these into their slots."""
        for load, block in zip(self.fetches.held, blocks, strict=True):
            whole = self.builder.add(shape.reshape, [block], {"shape": (1, *sizes(block))}).out
            to = [slot, *(self._index(0) for _ in sizes(block))]
            self.builder.add(tile.store, [self.rings[load], whole, *to], {}, loc=load.loc)

    def _places(
        self, loads: Collection[Node], index: Value, outer: Mapping[Value, Value]
    ) -> list[tuple[Node, list[Value]]]:
        """The operands of loads in the round that has an index; they lie outside where there is no such round."""
        if not loads:
            return []
        env = {**outer, self.body.params[0]: index}
        for node in self.fetches.places:
            made = self.builder.add(node.op, [env[v] for v in node.args], node.attrs, loc=node.loc)
            env.update(zip(node.results, made.results, strict=True))
        present = self._scalar(elementwise.less, index, self.upper)
        return [(load, self._operands(load, present, env)) for load in loads]

    def _operands(self, load: Node, present: Value, env: Mapping[Value, Value]) -> list[Value]:
        ref, *operands = load.args
        found = [env[v] for v in operands]
        axis = self._moving(operands[: ref.type.rank])  # type: ignore[union-attr]
        outside = self._index(int(ref.type.shape[axis]))  # type: ignore[union-attr]
        found[axis] = self._scalar(elementwise.where, present, found[axis], outside)
        return [env[ref], *found]

    def _moving(self, places: Sequence[Value]) -> int:
        """An axis along which the block moves from round to round, the last one if none does."""
        ours = {self.body.params[0], *(v for n in self.fetches.places for v in n.results)}
        return next((a for a in reversed(range(len(places))) if places[a] in ours), len(places) - 1)

    def _later(self, index: Value, rounds: int) -> Value:
        """The index so many rounds later."""
        if not rounds:
            return index
        step = self.builder.producers[self.step].attrs["value"]
        return self._scalar(elementwise.add, index, self._index(rounds * int(step)))

    def _index(self, n: int) -> Value:
        return self.builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out

    def _scalar(self, op: Op, *operands: Value) -> Value:
        return self.builder.add(op, operands, {}).out


def _read(builder: Builder, load: Node, ring: Value, slot: Value) -> Value:
    """What a load gave, read from its slot."""
    zero = builder.add(basic.full, [], {"shape": (), "value": 0, "dtype": int64}).out
    places = [slot, *(zero for _ in sizes(load.out))]
    block = builder.add(tile.load, [ring, *places], {"shape": (1, *sizes(load.out))}).out
    return builder.add(shape.reshape, [block], {"shape": sizes(load.out)}).out
