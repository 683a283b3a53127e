"""Coroutine lowering: the sides of a divergent branch that wait for each other become coroutines, suspended at waits.

Values that are live across a suspension are saved in slots, which are memory of the program, as is the number of the
step at which a coroutine resumes. A round in which no coroutine advances is a deadlock. The Tile interpreter schedules
the same sides in the same order (`interp/tile/cooperative_scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from tessera.codegen.contract import static_shape
from tessera.codegen.grouped.control_flow import any_active, build_region, restrict_to_mask
from tessera.codegen.grouped.vectoriser import GroupValue, GroupVectoriser
from tessera.core.types import REGISTER, RefType, TensorType, bool_, int64, scalar
from tessera.ir.core import Block, Node, Value
from tessera.lower.passes.tail_duplication import find_lockstep_width
from tessera.ops.dialects import control_flow, tile
from tessera.ops.dialects.mbarrier import mbarrier_wait
from tessera.ops.tensor import elementwise, reduce


@dataclass(frozen=True)
class CoroutineSlot:
    """Memory of the program that holds a value, and whether the value differs between tiles.

    `per_tile`: each tile has a slot of its own; code for one tile sees `type`, code for all tiles sees the tiles' axis
    first.
    """

    ref: Value
    type: TensorType
    varying: bool
    per_tile: bool = False

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """The shape of one tile's value."""
        return static_shape(self.type)[1:] if self.varying else static_shape(self.type)


class CoroutineScheduler:
    """Emits the coroutines of a branch; slots say whether one has `progressed` in this round, or none in the last.

    `serial`: subgroups of `lockstep_width` tiles run one after the other, since they wait for different mbarriers.
    """

    def __init__(self, group: GroupVectoriser, serial: bool, lockstep_width: int = 1) -> None:
        self.group, self.serial, self.lockstep_width = group, serial, lockstep_width
        self.allocations: list[Node] = []
        self.progressed, self.stuck = self.allocate_slot(scalar(bool_)), self.allocate_slot(scalar(bool_))

    def allocate_slot(self, type: TensorType, varying: bool = False, per_tile: bool = False) -> CoroutineSlot:
        """A slot, allocated before all coroutines; `per_tile`: one for each tile."""
        slot = CoroutineSlot(Value(type), type, varying, per_tile)
        shape = (self.group.total, *slot.tile_shape) if per_tile else static_shape(type) or (1,)
        ref = RefType(shape, type.dtype, REGISTER, type.policy)
        attrs = {"shape": ref.shape, "dtype": ref.dtype, "space": REGISTER}
        with self.group.builder.region() as nodes:
            memory = self.group.builder.add(tile.alloc, [], attrs, types=(ref,)).out
        self.allocations += nodes
        return replace(slot, ref=memory)

    def store(self, slot: CoroutineSlot, value: Value) -> None:
        """Store a value in a slot."""
        block = self.group.reshape(value, self._find_block_shape(slot))
        if slot.per_tile and not slot.varying and self.group.subgroup_start is not None:  # uniform in the subgroup
            block = self.group.broadcast(block, (self.group.size, *slot.tile_shape))
        self.group.builder.add(tile.store, [slot.ref, block, *self._find_indices(slot)], {"edge": "error"})

    def load(self, slot: CoroutineSlot) -> GroupValue:
        """The value in a slot."""
        shape = self._find_block_shape(slot)
        block = self.group.builder.add(
            tile.load, [slot.ref, *self._find_indices(slot)], {"shape": shape, "edge": "error"}
        ).out
        if slot.per_tile and self.group.subgroup_start is None:
            return GroupValue(block, True)
        return GroupValue(self.group.reshape(block, static_shape(slot.type)), slot.varying)

    def _find_block_shape(self, slot: CoroutineSlot) -> tuple[int, ...]:
        """The shape of the block that code here reads and writes."""
        if not slot.per_tile:
            return static_shape(slot.type) or (1,)
        return (self.group.size if slot.varying or self.group.subgroup_start is None else 1, *slot.tile_shape)

    def _find_indices(self, slot: CoroutineSlot) -> list[Value]:
        rest = [self.group.full(0, int64)] * len(self._find_block_shape(slot))
        return [self.group.first_tile(), *rest[1:]] if slot.per_tile else rest

    def save(self, part: GroupValue) -> CoroutineSlot:
        """A new slot that holds a value; one for each tile in code for a subgroup."""
        type = part.value.type
        assert isinstance(type, TensorType)
        slot = self.allocate_slot(type, part.varying, self.group.subgroup_start is not None)
        self.store(slot, part.value)
        return slot

    def scatter_to_tiles(self, part: GroupValue) -> CoroutineSlot:
        """A new slot for each tile, which holds the tile's part of a varying value."""
        type = part.value.type
        assert isinstance(type, TensorType)
        slot = self.allocate_slot(type.with_shape((self.lockstep_width, *part.shape)), True, per_tile=True)
        self.store(slot, part.value)
        return slot

    def run_serially(self, body: Callable[[], Any]) -> None:
        """Emit a loop over subgroups, whose body is code for one."""
        group = self.group

        def emit_subgroup(first: Value) -> list[Value]:
            before = group.size, group.active
            group.size, group.active, group.subgroup_start = self.lockstep_width, None, first
            body()
            (group.size, group.active), group.subgroup_start = before, None
            return []

        bounds = [group.full(n, int64) for n in (0, group.total, self.lockstep_width)]
        group.builder.add(
            control_flow.for_, bounds, types=(), regions=(build_region(group, [scalar(int64)], emit_subgroup),)
        )

    def any_in_subgroup(self, mask: Value) -> Value:
        """For each tile, whether a mask holds for any tile of its subgroup."""
        if self.lockstep_width == 1:
            return mask
        group, count = self.group, self.group.total // self.lockstep_width
        each = group.add(reduce.max, group.reshape(mask, (count, self.lockstep_width)), axis=(-1,), keepdims=True)
        return group.reshape(group.broadcast(each, (count, self.lockstep_width)), (group.total,))

    def constant(self, value: bool) -> Value:
        """A bool constant."""
        return self.group.full(value, bool_)

    def negate(self, value: Value) -> Value:
        """The negation."""
        return self.group.add(elementwise.bitwise_not, value)

    def emit_if(self, condition: Value, body: Callable[[], Any]) -> None:
        """Emit code that runs if a scalar is true."""

        def emit_taken() -> list[Value]:
            body()
            return []

        blocks = (build_region(self.group, (), emit_taken), build_region(self.group, (), list))
        self.group.builder.add(control_flow.if_, [condition], types=(), regions=blocks)

    def emit_while(self, first: Value, body: Callable[[], Value]) -> None:
        """Emit a loop that runs while a scalar is true; `body()` gives the condition of the next iteration."""
        blocks = (
            build_region(self.group, [scalar(bool_)], lambda go: [go]),
            build_region(self.group, [scalar(bool_)], lambda go: [body()]),
        )
        self.group.builder.add(control_flow.while_, [first], types=(scalar(bool_),), regions=blocks)


def may_suspend(node: Node) -> bool:
    """Whether a node is an mbarrier wait or contains one."""
    return node.op is mbarrier_wait or any(n.op is mbarrier_wait for r in node.regions for n in r.walk())


class Coroutine:
    """A block split at its suspension points into steps; `resume_step` is the slot of the next step's number.

    `outputs` are the slots of the block's results. `split`: each tile has its own `resume_step`, and steps are code for
    one.
    """

    def __init__(
        self,
        scheduler: CoroutineScheduler,
        block: Block,
        walk: Any,
        out: Callable[[list[GroupValue]], list[GroupValue]],
        split: bool = False,
    ) -> None:
        self.scheduler, self.block, self.walk, self.select_outputs = scheduler, block, walk, out
        self.saved: dict[Value, CoroutineSlot] = {}
        self.outputs: list[CoroutineSlot] = []
        self.resume_step = scheduler.allocate_slot(
            scalar(int64), per_tile=split or scheduler.group.subgroup_start is not None
        )
        if split:
            outer = {v: walk.env[v] for v in block.free if v in walk.env and not isinstance(v.type, RefType)}
            self.saved.update({v: scheduler.scatter_to_tiles(part) for v, part in outer.items() if part.varying})
        self.steps: list[Callable[[], Value | None]] = []
        self.needed: list[Set[Value]] = []
        for piece in _split_at_suspensions(block):
            self._add_piece(piece)
        self._add_step(self._finish, frozenset(block.results))

    def _add_step(self, step: Callable[[], Value | None], uses: Set[Value]) -> None:
        self.steps.append(step)
        self.needed.append(uses)

    def _add_piece(self, piece: Sequence[Node]) -> None:
        uses = Block((), tuple(piece), ()).free
        if not may_suspend(piece[0]):
            number = len(self.steps)
            self._add_step(lambda: self._emit_piece(piece, number), uses)
            return
        point = SUSPENSION_POINTS[piece[0].op](self.scheduler, piece[0], self.walk)
        self._add_step(point.begin, uses)
        self._add_step(lambda: self._emit_suspension(point, piece[0]), uses)

    def begin(self, condition: Value | None = None) -> None:
        """Set the first step; where a condition is false, the coroutine is done at once."""
        group = self.scheduler.group
        shape = () if condition is None else static_shape(condition.type)
        first, end = group.full(0, int64, *shape), group.full(len(self.steps), int64, *shape)
        self.scheduler.store(
            self.resume_step, first if condition is None else group.add(elementwise.where, condition, first, end)
        )

    def is_done(self) -> Value:
        """Whether all steps are done, for every tile that the code is for."""
        group, step = self.scheduler.group, self.scheduler.load(self.resume_step).value
        end = group.full(len(self.steps), int64, *static_shape(step.type))
        if not step.type.shape:
            return group.add(elementwise.equal, step, end)
        return self.scheduler.negate(any_active(group, group.add(elementwise.not_equal, step, end)))

    def resume(self) -> None:
        """Emit the steps in order, each guarded by whether it is the next; a step that waits ends them."""
        group = self.scheduler.group
        for number in range(len(self.steps)):
            is_next = group.add(
                elementwise.equal, self.scheduler.load(self.resume_step).value, group.full(number, int64)
            )
            self.scheduler.emit_if(is_next, lambda n=number: self._emit_step(n))  # type: ignore[misc]

    def _emit_step(self, number: int) -> None:
        scheduler, next_step = self.scheduler, self.scheduler.group.full(number + 1, int64)
        for value in [v for v in self.saved if v in self.needed[number]]:
            self.walk.env[value] = scheduler.load(self.saved[value])
        is_done = self.steps[number]()

        def advance() -> None:
            scheduler.store(self.resume_step, next_step)
            scheduler.store(scheduler.progressed, scheduler.constant(True))

        if is_done is None:
            advance()
        else:
            scheduler.emit_if(is_done, advance)

    def _emit_piece(self, piece: Sequence[Node], number: int) -> None:
        """A step without waits; its allocations move before all coroutines."""
        nodes = []
        for node in piece:
            if node.op is not tile.alloc:
                nodes.append(node)
                continue
            with self.scheduler.group.builder.region() as allocations:
                (part,) = self.scheduler.group.vectorise_node(node, [], self.walk)
            self.scheduler.allocations += allocations
            self.walk.env[node.out] = part
        later = set[Value]().union(*self.needed[number + 1 :])
        live_out = [v for node in nodes for v in node.results if v in later]
        parts = self.walk(Block((), tuple(nodes), tuple(live_out)))
        self.saved.update(zip(live_out, map(self.scheduler.save, parts), strict=True))

    def _emit_suspension(self, point: Any, node: Node) -> Value:
        is_done = point.step()

        def save_results() -> None:
            parts = point.results()
            self.saved.update(zip(node.results, map(self.scheduler.save, parts), strict=True))

        if node.results:
            self.scheduler.emit_if(is_done, save_results)
        return is_done

    def _finish(self) -> None:
        self.outputs = [
            self.scheduler.save(p) for p in self.select_outputs([self.walk.env[v] for v in self.block.results])
        ]


def _split_at_suspensions(block: Block) -> list[list[Node]]:
    """The nodes of a block in pieces; a node that may suspend is a piece of its own."""
    pieces: list[list[Node]] = []
    for node in block.nodes:
        if pieces and not may_suspend(node) and not may_suspend(pieces[-1][0]):
            pieces[-1].append(node)
        else:
            pieces.append([node])
    return pieces


# Suspension points by op, made of (scheduler, node, walk): `begin()`, `step()` -> whether it is done, `results()`.
SUSPENSION_POINTS: dict[Any, Any] = {}


def _has_divergent_wait(group: GroupVectoriser, node: Node, run: Any) -> bool:
    """Whether a wait in a branch differs between tiles; the nodes of this trial run are discarded."""
    before, group.has_divergent_wait = group.has_divergent_wait, False
    with group.builder.region():
        for block in node.regions:
            with restrict_to_mask(group, run.env[node.args[0]].value):
                run(block)
    result, group.has_divergent_wait = group.has_divergent_wait, before or group.has_divergent_wait
    return result


def interleave_sides(group: GroupVectoriser, node: Node, run: Any) -> list[GroupValue]:
    """A branch whose sides wait for each other: both are resumed in every round until both are done."""
    before = dict(run.env)
    serial = node.attrs.get("apart") or _has_divergent_wait(group, node, run)
    lockstep_width = find_lockstep_width(*node.regions)
    scheduler = CoroutineScheduler(
        group, group.subgroup_start is None and bool(serial) and lockstep_width < group.size, lockstep_width
    )
    with group.builder.region() as nodes:
        branch = SUSPENSION_POINTS[control_flow.if_](scheduler, node, run)
        scheduler.store(scheduler.stuck, scheduler.constant(False))
        branch.begin()
        results: list[CoroutineSlot] = []

        def save_results() -> None:
            results.extend(scheduler.save(p) for p in branch.results())

        def emit_round() -> Value:
            scheduler.store(scheduler.progressed, scheduler.constant(False))
            is_done = branch.step()
            scheduler.emit_if(is_done, save_results)
            unfinished = scheduler.negate(is_done)
            stuck = group.add(
                elementwise.bitwise_and, unfinished, scheduler.negate(scheduler.load(scheduler.progressed).value)
            )
            scheduler.store(scheduler.stuck, stuck)
            return unfinished

        scheduler.emit_while(scheduler.constant(True), emit_round)
    for each in (*scheduler.allocations, *nodes):
        group.builder.append(each)
    run.env.update(before)  # while coroutines are emitted, it maps values to loads from slots
    return [scheduler.load(slot) for slot in results]
