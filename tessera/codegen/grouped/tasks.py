"""Branches of a group that wait for each other: each is left at a wait that has to go on later, and taken up there.

Both sides of such a branch run in turn, round after round, until both are done. What a side needs after a wait lies in
memory of the program (a cell), as does the number of the place where it goes on. A round in which nobody gets on
finds a deadlock. The interpreter runs the same sides in the same turn (`interp/interleave.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.codegen.blocks import sizes
from tessera.codegen.grouped.cells import Cell, Tasks
from tessera.codegen.grouped.control import some, within
from tessera.codegen.grouped.rewrite import Group, Part
from tessera.ir.core import Block, Node, Value
from tessera.ops import control, elementwise, tile
from tessera.ops.mbarrier import mbarrier_wait
from tessera.passes.differing import meeting
from tessera.types import RefType, int64, scalar


def pauses(node: Node) -> bool:
    """Whether a node waits at an mbarrier, or something inside it does."""
    return node.op is mbarrier_wait or any(n.op is mbarrier_wait for r in node.regions for n in r.walk())


class Stretch:
    """A block that is left and taken up again: pieces without waits, and between them nodes that pause.

    `place` is the number of the step to be done next; `out` are the cells of the block's results in the end.
    `split`: each tile is somewhere else, and the steps are code for one.
    """

    def __init__(
        self, tasks: Tasks, block: Block, walk: Any, out: Callable[[list[Part]], list[Part]], split: bool = False
    ) -> None:
        self.tasks, self.block, self.walk, self.out_of = tasks, block, walk, out
        self.kept: dict[Value, Cell] = {}
        self.out: list[Cell] = []
        self.place = tasks.cell(scalar(int64), own=split or tasks.group.alone is not None)
        if split:
            outer = {v: walk.env[v] for v in block.free if v in walk.env and not isinstance(v.type, RefType)}
            self.kept.update({v: tasks.shared_out(part) for v, part in outer.items() if part.varying})
        self.steps: list[Callable[[], Value | None]] = []
        self.uses: list[frozenset[Value]] = []
        for piece in _pieces(block):
            self._plan(piece)
        self._step(self._finish, frozenset(block.results))

    def _step(self, step: Callable[[], Value | None], uses: frozenset[Value]) -> None:
        self.steps.append(step)
        self.uses.append(uses)

    def _plan(self, piece: Sequence[Node]) -> None:
        uses = Block((), tuple(piece), ()).free
        if not pauses(piece[0]):
            number = len(self.steps)
            self._step(lambda: self._plain(piece, number), uses)
            return
        paused = PAUSING[piece[0].op](self.tasks, piece[0], self.walk)
        self._step(paused.begin, uses)
        self._step(lambda: self._paused(paused, piece[0]), uses)

    def begin(self, condition: Value | None = None) -> None:
        """Begin at the first step, or where a condition does not hold be done at once."""
        group = self.tasks.group
        shape = () if condition is None else sizes(condition.type)
        first, end = group.full(0, int64, *shape), group.full(len(self.steps), int64, *shape)
        self.tasks.put(self.place, first if condition is None else group.add(elementwise.where, condition, first, end))

    def done(self) -> Value:
        """Whether all steps are done, by every tile that is looked at."""
        group, place = self.tasks.group, self.tasks.get(self.place).value
        end = group.full(len(self.steps), int64, *sizes(place.type))
        if not place.type.shape:
            return group.add(elementwise.equal, place, end)
        return self.tasks.negated(some(group, group.add(elementwise.not_equal, place, end)))

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
                (part,) = self.tasks.group.meaning(node, [], self.walk)
            self.tasks.made += made
            self.walk.env[node.out] = part
        later = frozenset().union(*self.uses[number + 1 :])
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
        self.out = [self.tasks.keep(p) for p in self.out_of([self.walk.env[v] for v in self.block.results])]


def _pieces(block: Block) -> list[list[Node]]:
    """The nodes of a block, those that pause each by itself."""
    pieces: list[list[Node]] = []
    for node in block.nodes:
        if pieces and not pauses(node) and not pauses(pieces[-1][0]):
            pieces[-1].append(node)
        else:
            pieces.append([node])
    return pieces


# What pauses: made of (tasks, node, walk), with `begin()`, `step()` -> whether it is done, and `results()`.
PAUSING: dict[Any, Any] = {}


def _uneven(group: Group, node: Node, run: Any) -> bool:
    """Whether a wait in a branch differs between tiles; what is recorded to learn it is dropped."""
    before, group.uneven = group.uneven, False
    with group.b.region():
        for block in node.regions:
            with within(group, run.env[node.args[0]].value):
                run(block)
    found, group.uneven = group.uneven, before or group.uneven
    return found


def interleaved(group: Group, node: Node, run: Any) -> list[Part]:
    """A branch whose sides wait for each other, run in turn until both are done."""
    before = dict(run.env)
    apart = node.attrs.get("apart") or _uneven(group, node, run)
    together = meeting(*node.regions)
    tasks = Tasks(group, group.alone is None and bool(apart) and together < group.size, together)
    with group.b.region() as nodes:
        branch = PAUSING[control.if_](tasks, node, run)
        tasks.put(tasks.last, tasks.truth(False))
        branch.begin()
        found: list[Cell] = []

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
