"""Coroutine lowering: the sides of a divergent branch that wait for each other run in turn, suspended at their waits.

Values that live across a suspension are kept in slots, memory of the program, as is the number of the step at which a
coroutine resumes. A round in which no coroutine advances is a deadlock. The Tile interpreter schedules the same sides
in
the same order (`interp/interleave.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from tessera.codegen.block_types import static_shape
from tessera.codegen.grouped.control_flow import any_active, build_region, restrict_to_mask
from tessera.codegen.grouped.vectoriser import GroupValue, GroupVectoriser
from tessera.core.types import REGISTER, RefType, TensorType, bool_, int64, scalar
from tessera.ir.core import Block, Node, Value
from tessera.lower.passes.divergence_analysis import find_lockstep_width
from tessera.ops.dialects import control_flow, tile
from tessera.ops.dialects.mbarrier import mbarrier_wait
from tessera.ops.tensor import elementwise, reduce

# What is kept while tiles wait: values in memory of the program, and the code that runs round after round on them.


@dataclass(frozen=True)
class CoroutineSlot:
    """A value in memory of the program, and whether it differs between tiles.

    `own`: each tile has one to itself, and a tile by itself sees this `type`; all see the tiles' axis before it.
    """

    ref: Value
    type: TensorType
    varying: bool
    own: bool = False

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of a tile's own value."""
        return static_shape(self.type)[1:] if self.varying else static_shape(self.type)


class CoroutineScheduler:
    """The cells of branches that run in turn; `moved`: one has got on in this round, `last`: none can any more.

    `apart`: stretches of `together` tiles are to run by themselves, since they wait for something else than the others.
    """

    def __init__(self, group: GroupVectoriser, apart: bool, together: int = 1) -> None:
        self.group, self.apart, self.lockstep_width = group, apart, together
        self.made: list[Node] = []
        self.moved, self.last = self.cell(scalar(bool_)), self.cell(scalar(bool_))

    def cell(self, type: TensorType, varying: bool = False, own: bool = False) -> CoroutineSlot:
        """Room for a value, made before all that runs in turn; `own`: one for each tile."""
        cell = CoroutineSlot(Value(type), type, varying, own)
        room = (self.group.total, *cell.one) if own else static_shape(type) or (1,)
        ref = RefType(room, type.dtype, REGISTER, type.policy)
        attrs = {"shape": ref.shape, "dtype": ref.dtype, "space": REGISTER}
        with self.group.b.region() as nodes:
            made = self.group.b.add(tile.alloc, [], attrs, types=(ref,)).out
        self.made += nodes
        return replace(cell, ref=made)

    def put(self, cell: CoroutineSlot, value: Value) -> None:
        """Keep a value."""
        block = self.group.reshape(value, self._room(cell))
        if cell.own and not cell.varying and self.group.stretch_start is not None:  # what is the same for a stretch
            block = self.group.broadcast(block, (self.group.size, *cell.one))
        self.group.b.add(tile.store, [cell.ref, block, *self._origin(cell)], {"edge": "error"})

    def get(self, cell: CoroutineSlot) -> GroupValue:
        """What is kept."""
        room = self._room(cell)
        block = self.group.b.add(tile.load, [cell.ref, *self._origin(cell)], {"shape": room, "edge": "error"}).out
        if cell.own and self.group.stretch_start is None:
            return GroupValue(block, True)
        return GroupValue(self.group.reshape(block, static_shape(cell.type)), cell.varying)

    def _room(self, cell: CoroutineSlot) -> tuple[int, ...]:
        """The shape of what is read and written of a cell here."""
        if not cell.own:
            return static_shape(cell.type) or (1,)
        return (self.group.size if cell.varying or self.group.stretch_start is None else 1, *cell.one)

    def _origin(self, cell: CoroutineSlot) -> list[Value]:
        rest = [self.group.full(0, int64)] * len(self._room(cell))
        return [self.group.first(), *rest[1:]] if cell.own else rest

    def keep(self, part: GroupValue) -> CoroutineSlot:
        """A new cell with a value; of tiles by themselves, their own."""
        type = part.value.type
        assert isinstance(type, TensorType)
        cell = self.cell(type, part.varying, self.group.stretch_start is not None)
        self.put(cell, part.value)
        return cell

    def scatter_to_tiles(self, part: GroupValue) -> CoroutineSlot:
        """A new cell in which each tile finds its part of a value that differs between tiles."""
        type = part.value.type
        assert isinstance(type, TensorType)
        cell = self.cell(type.with_shape((self.lockstep_width, *part.shape)), True, own=True)
        self.put(cell, part.value)
        return cell

    def each(self, body: Callable[[], Any]) -> None:
        """Code that every tile, or stretch of tiles, runs by itself, one after the other."""
        group = self.group

        def one(first: Value) -> list[Value]:
            before = group.size, group.active
            group.size, group.active, group.stretch_start = self.lockstep_width, None, first
            body()
            (group.size, group.active), group.stretch_start = before, None
            return []

        bounds = [group.full(n, int64) for n in (0, group.total, self.lockstep_width)]
        group.b.add(control_flow.for_, bounds, types=(), regions=(build_region(group, [scalar(int64)], one),))

    def any_in_stretch(self, mask: Value) -> Value:
        """For each tile, whether any of those that it runs together with is in a mask."""
        if self.lockstep_width == 1:
            return mask
        group, count = self.group, self.group.total // self.lockstep_width
        each = group.add(reduce.max, group.reshape(mask, (count, self.lockstep_width)), axis=(-1,), keepdims=True)
        return group.reshape(group.broadcast(each, (count, self.lockstep_width)), (group.total,))

    def truth(self, value: bool) -> Value:
        """A constant."""
        return self.group.full(value, bool_)

    def negated(self, value: Value) -> Value:
        """The opposite."""
        return self.group.add(elementwise.bitwise_not, value)

    def when(self, condition: Value, body: Callable[[], Any]) -> None:
        """Code that runs where a scalar holds."""

        def taken() -> list[Value]:
            body()
            return []

        blocks = (build_region(self.group, (), taken), build_region(self.group, (), list))
        self.group.b.add(control_flow.if_, [condition], types=(), regions=blocks)

    def repeat(self, first: Value, body: Callable[[], Value]) -> None:
        """Rounds for as long as a scalar holds; `body()` gives it for the next round."""
        blocks = (
            build_region(self.group, [scalar(bool_)], lambda go: [go]),
            build_region(self.group, [scalar(bool_)], lambda go: [body()]),
        )
        self.group.b.add(control_flow.while_, [first], types=(scalar(bool_),), regions=blocks)


# Branches of a group that wait for each other: each is left at a wait that has to go on later, and taken up there.
#
# Both sides of such a branch run in turn, round after round, until both are done. What a side needs after a wait lies
# in
# memory of the program (a cell), as does the number of the place where it goes on. A round in which nobody gets on
# finds a deadlock. The interpreter runs the same sides in the same turn (`interp/interleave.py`).


def may_suspend(node: Node) -> bool:
    """Whether a node waits at an mbarrier, or something inside it does."""
    return node.op is mbarrier_wait or any(n.op is mbarrier_wait for r in node.regions for n in r.walk())


class Coroutine:
    """A block that is left and taken up again: pieces without waits, and between them nodes that pause.

    `place` is the number of the step to be done next; `out` are the cells of the block's results in the end.
    `split`: each tile is somewhere else, and the steps are code for one.
    """

    def __init__(
        self,
        tasks: CoroutineScheduler,
        block: Block,
        walk: Any,
        out: Callable[[list[GroupValue]], list[GroupValue]],
        split: bool = False,
    ) -> None:
        self.tasks, self.block, self.walk, self.select_outputs = tasks, block, walk, out
        self.kept: dict[Value, CoroutineSlot] = {}
        self.out: list[CoroutineSlot] = []
        self.place = tasks.cell(scalar(int64), own=split or tasks.group.stretch_start is not None)
        if split:
            outer = {v: walk.env[v] for v in block.free if v in walk.env and not isinstance(v.type, RefType)}
            self.kept.update({v: tasks.scatter_to_tiles(part) for v, part in outer.items() if part.varying})
        self.steps: list[Callable[[], Value | None]] = []
        self.uses: list[Set[Value]] = []
        for piece in _split_at_suspensions(block):
            self._plan(piece)
        self._step(self._finish, frozenset(block.results))

    def _step(self, step: Callable[[], Value | None], uses: Set[Value]) -> None:
        self.steps.append(step)
        self.uses.append(uses)

    def _plan(self, piece: Sequence[Node]) -> None:
        uses = Block((), tuple(piece), ()).free
        if not may_suspend(piece[0]):
            number = len(self.steps)
            self._step(lambda: self._plain(piece, number), uses)
            return
        paused = SUSPENSION_POINTS[piece[0].op](self.tasks, piece[0], self.walk)
        self._step(paused.begin, uses)
        self._step(lambda: self._paused(paused, piece[0]), uses)

    def begin(self, condition: Value | None = None) -> None:
        """Begin at the first step, or where a condition does not hold be done at once."""
        group = self.tasks.group
        shape = () if condition is None else static_shape(condition.type)
        first, end = group.full(0, int64, *shape), group.full(len(self.steps), int64, *shape)
        self.tasks.put(self.place, first if condition is None else group.add(elementwise.where, condition, first, end))

    def done(self) -> Value:
        """Whether all steps are done, by every tile that is looked at."""
        group, place = self.tasks.group, self.tasks.get(self.place).value
        end = group.full(len(self.steps), int64, *static_shape(place.type))
        if not place.type.shape:
            return group.add(elementwise.equal, place, end)
        return self.tasks.negated(any_active(group, group.add(elementwise.not_equal, place, end)))

    def go(self) -> None:
        """Do steps until one has to wait."""
        group = self.tasks.group
        for number in range(len(self.steps)):
            here = group.add(elementwise.equal, self.tasks.get(self.place).value, group.full(number, int64))
            self.tasks.when(here, lambda n=number: self._do(n))  # type: ignore[misc]

    def _do(self, number: int) -> None:
        tasks, following = self.tasks, self.tasks.group.full(number + 1, int64)
        for value in [v for v in self.kept if v in self.uses[number]]:
            self.walk.env[value] = tasks.get(self.kept[value])
        finished = self.steps[number]()

        def advance() -> None:
            tasks.put(self.place, following)
            tasks.put(tasks.moved, tasks.truth(True))

        if finished is None:
            advance()
        else:
            tasks.when(finished, advance)

    def _plain(self, piece: Sequence[Node], number: int) -> None:
        """A piece without waits; memory that it asks for is made before all that runs in turn."""
        nodes = []
        for node in piece:
            if node.op is not tile.alloc:
                nodes.append(node)
                continue
            with self.tasks.group.b.region() as made:
                (part,) = self.tasks.group.vectorise_node(node, [], self.walk)
            self.tasks.made += made
            self.walk.env[node.out] = part
        later = set[Value]().union(*self.uses[number + 1 :])
        wanted = [v for node in nodes for v in node.results if v in later]
        parts = self.walk(Block((), tuple(nodes), tuple(wanted)))
        self.kept.update(zip(wanted, map(self.tasks.keep, parts), strict=True))

    def _paused(self, paused: Any, node: Node) -> Value:
        finished = paused.step()

        def keep() -> None:
            parts = paused.results()
            self.kept.update(zip(node.results, map(self.tasks.keep, parts), strict=True))

        if node.results:
            self.tasks.when(finished, keep)
        return finished

    def _finish(self) -> None:
        self.out = [self.tasks.keep(p) for p in self.select_outputs([self.walk.env[v] for v in self.block.results])]


def _split_at_suspensions(block: Block) -> list[list[Node]]:
    """The nodes of a block, those that pause each by itself."""
    pieces: list[list[Node]] = []
    for node in block.nodes:
        if pieces and not may_suspend(node) and not may_suspend(pieces[-1][0]):
            pieces[-1].append(node)
        else:
            pieces.append([node])
    return pieces


# What pauses: made of (tasks, node, walk), with `begin()`, `step()` -> whether it is done, and `results()`.
SUSPENSION_POINTS: dict[Any, Any] = {}


def _has_divergent_wait(group: GroupVectoriser, node: Node, run: Any) -> bool:
    """Whether a wait in a branch differs between tiles; what is recorded to learn it is dropped."""
    before, group.has_divergent_wait = group.has_divergent_wait, False
    with group.b.region():
        for block in node.regions:
            with restrict_to_mask(group, run.env[node.args[0]].value):
                run(block)
    found, group.has_divergent_wait = group.has_divergent_wait, before or group.has_divergent_wait
    return found


def interleave_sides(group: GroupVectoriser, node: Node, run: Any) -> list[GroupValue]:
    """A branch whose sides wait for each other, run in turn until both are done."""
    before = dict(run.env)
    apart = node.attrs.get("apart") or _has_divergent_wait(group, node, run)
    together = find_lockstep_width(*node.regions)
    tasks = CoroutineScheduler(group, group.stretch_start is None and bool(apart) and together < group.size, together)
    with group.b.region() as nodes:
        branch = SUSPENSION_POINTS[control_flow.if_](tasks, node, run)
        tasks.put(tasks.last, tasks.truth(False))
        branch.begin()
        found: list[CoroutineSlot] = []

        def keep() -> None:
            found.extend(tasks.keep(p) for p in branch.results())

        def turn() -> Value:
            tasks.put(tasks.moved, tasks.truth(False))
            finished = branch.step()
            tasks.when(finished, keep)
            going = tasks.negated(finished)
            stuck = group.add(elementwise.bitwise_and, going, tasks.negated(tasks.get(tasks.moved).value))
            tasks.put(tasks.last, stuck)
            return going

        tasks.repeat(tasks.truth(True), turn)
    for each in (*tasks.made, *nodes):
        group.b.append(each)
    run.env.update(before)  # inside, values stood for what was kept of them
    return [tasks.get(cell) for cell in found]
