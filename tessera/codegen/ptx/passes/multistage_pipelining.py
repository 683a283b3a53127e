"""Multistage pipelining (CUTLASS): operands of products copied to shared memory some rounds before they are read.

The result is Tile IR: a ring of slots, cp.async copies, a commit for each round, a wait and a barrier before reading.
Blocks that copies cannot move (odd two-byte rows, masks) are held in registers for one round. Operands that only
tensor cores read stay in their slots (ldmatrix). The number of stages is the schedule's, or what shared memory holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.codegen.ptx.context import VECTOR_BYTES, PtxMemRef, find_vector_length
from tessera.codegen.ptx.ops import (
    DOUBLE_MMA,
    FRAGMENT_PADDINGS,
    MMA_OPERAND_TYPES,
    matmul_accumulate,
    smem_operand,
    smem_slots,
    uses_any_mma,
    uses_split_mma,
)
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.mainloop import is_scalar_arithmetic
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.core.symbolic_dim import Dim, Size
from tessera.core.types import GLOBAL, RefType, TensorType, int64
from tessera.ir.builder import Builder
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, eliminate_dead_code, rewrite_function
from tessera.ir.rules import Op
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape

# Which loads are prefetched: operands of products whose starts depend on the loop's index alone. cp.async moves at
# least 4 bytes, so rows with 2-byte alignment, and masked loads, are prefetched into registers for one round instead.


ORDERING_EFFECTS = frozenset(("memory", "async"))
MIN_COPY_BYTES = 4  # bytes that cp.async moves at least
PRODUCT_OPS = (contractions.dot, matmul_accumulate)
REDUCTIONS = (reduce.max, reduce.min, reduce.sum)
VIEW_OPS = (shape.permute, shape.reshape, basic.cast)
MASK_OPS = (
    basic.full,
    basic.broadcast_to,
    shape.iota,
    shape.reshape,
    shape.permute,
)  # ops of masks, beside comparisons


@dataclass(frozen=True)
class LoopFetches:
    """The loads of a loop to prefetch, and the nodes of its body that compute their starts."""

    copied: tuple[Node, ...]
    held: Mapping[Node, int]  # loads prefetched into registers, with the registers of each
    places: tuple[Node, ...]

    @property
    def loads(self) -> tuple[Node, ...]:
        """Both kinds of loads."""
        return (*self.copied, *self.held)

    @property
    def bytes(self) -> int:
        """The bytes of one stage."""
        return sum(element_bytes(n.out.type.dtype) * math.prod(static_shape(n.out)) for n in self.loads)  # type: ignore[union-attr]


def find_loop_fetches(function: Function, apart: bool, aligned: Sequence[int]) -> dict[Node, LoopFetches]:
    """The innermost loops with products whose operands can be prefetched, with the loads to prefetch.

    `apart`: no two refs share memory; `aligned`: for each parameter, bytes that divide its address.
    """
    if int(function.attrs.get("group", 1)) != 1:
        return {}
    uses = UseDef(function)
    align = dict(zip(function.params, aligned or [VECTOR_BYTES] * len(function.params), strict=True))
    found: dict[Node, LoopFetches] = {}
    for node in function.body.walk():
        if node.op is control_flow.for_ and _has_constant_step(uses, node):
            fetches = _FetchFinder(uses, node, apart, align).find_fetches()
            found.update(
                {node: fetches} if fetches.loads and not any(map(_orders_memory, node.regions[0].walk())) else {}
            )
    return found


def _orders_memory(node: Node) -> bool:
    """Whether loads may not move across a node: inner loops, barriers, atomics, copies."""
    effects = node.op.effects
    return (
        node.op in (control_flow.for_, control_flow.while_)
        or bool(effects & ORDERING_EFFECTS)
        or effects >= {"read", "write"}
    )


def _has_constant_step(uses: UseDef, loop: Node) -> bool:
    """Whether a loop's step is a positive constant."""
    step = uses.get(loop.args[2])
    return step is not None and step.op is basic.full and int(step.attrs["value"]) > 0


class _FetchFinder:
    """Finds the loads of one loop to prefetch."""

    def __init__(self, uses: UseDef, loop: Node, apart: bool, align: Mapping[Value, int]) -> None:
        (self.body,) = loop.regions
        self.producers = {**uses, self.body.params[0]: loop}  # find_divisor takes the loop for its index
        self.align = align
        self.inside = UseDef(self.body, nested=False)
        self.variable = {v for n in self.body.walk() for v in n.results} | set(self.body.params[1:])
        self.written = tile.find_written_refs(self.body)
        if not apart and any(v.type.space == GLOBAL for v in self.written):  # type: ignore[union-attr]
            self.written |= set(align)

    def find_fetches(self) -> LoopFetches:
        """The loads that can be prefetched, with the nodes that compute their starts."""
        operands = [v for n in self.body.nodes if n.op in PRODUCT_OPS for v in n.args[-2:]]
        loads = [n for v in operands if (n := self._load(v)) is not None and self._fits(n)]
        needed: set[Node] = set()
        for load in loads:
            for v in load.args[1:]:
                needed |= self._cone(v) or set()
        ordered = tuple(n for n in self.body.nodes if n in needed)
        units = {n: self._unit(n) for n in dict.fromkeys(loads)}
        copied = tuple(n for n, unit in units.items() if unit >= MIN_COPY_BYTES and not is_masked(n))
        held = {n: _count_registers(n, unit) for n, unit in units.items() if n not in copied}
        return LoopFetches(copied, held, ordered)

    def _load(self, v: Value) -> Node | None:
        """The load in the loop's body that an operand comes from through views and casts."""
        node = self.inside.get(v)
        while node is not None and node.op in VIEW_OPS:
            node = self.inside.get(node.args[0])
        return node if node is not None and node.op is tile.load else None

    def _fits(self, load: Node) -> bool:
        ref, *operands = load.args
        type = ref.type
        if not isinstance(type, RefType) or type.space != GLOBAL or ref in self.written or ref not in self.align:
            return False
        whole = type.policy is None and type.rank >= 2 and sum(n > 1 for n in load.attrs["shape"][:-1]) <= 1
        known = all(isinstance(v.type, TensorType) and v.type.dtype == int64 for v in operands[: type.rank])
        return whole and known and all(self._cone(v) is not None for v in operands)

    def _unit(self, load: Node) -> int:
        """The bytes that one cp.async can move."""
        ref, *operands = load.args
        starts = operands[: ref.type.rank]  # type: ignore[union-attr]
        m = PtxMemRef(ref.type.dtype, GLOBAL, "", tuple(ref.type.shape), self.align[ref])  # type: ignore[union-attr]
        block = tuple(load.attrs["shape"])
        length = find_vector_length(self.producers, m, starts, block, VECTOR_BYTES // element_bytes(m.dtype))
        while length > 1 and (block[-1] % length or m.shape[-1] % length != 0):
            length //= 2
        return length * element_bytes(m.dtype)

    def _cone(self, v: Value) -> set[Node] | None:
        """The nodes of the body that compute a start or a mask; None if it depends on more than the index."""
        if v not in self.variable:
            return set()
        node = self.inside.get(v)
        if node is None or not (is_scalar_arithmetic(node) or node.op.pointwise or node.op in MASK_OPS):
            return None
        parts = [self._cone(x) for x in node.args]
        return None if any(p is None for p in parts) else {node}.union(*(p for p in parts if p is not None))


def is_masked(load: Node) -> bool:
    """Whether a load has a mask."""
    return len(load.args) > 1 + load.args[0].type.rank  # type: ignore[union-attr]


def _count_registers(load: Node, unit: int) -> int:
    """The registers of all threads that hold a block; pairs of 16-bit elements share one."""
    count, each = math.prod(static_shape(load.out)), element_bytes(load.out.type.dtype)  # type: ignore[union-attr]
    return count * each // MIN_COPY_BYTES if unit >= MIN_COPY_BYTES else count


# Prefetching: the result is Tile IR with a ring of slots, an `async_copy` for each block, a commit for each round, and
# a wait and a barrier before the reads. Loads prefetched into registers are stored when the round ends. Copies of
# rounds after the last one are out of bounds and read nothing.


def insert_prefetch(
    function: Function, stages: int, loops: Mapping[Node, LoopFetches], room: Op = tile.alloc
) -> Function:
    """The function with the loads of some loops prefetched `stages` - 1 rounds ahead, into buffers made by `room`."""
    reading: dict[Node, tuple[Value, Value]] = {}
    patterns = RewritePatterns("multistage pipelining")

    @patterns(control_flow.for_)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        if node not in loops:
            return None
        return _StagedLoop(rewriter.builder, node, loops[node], stages, room, reading).run(args, rewriter.walk)

    @patterns(tile.load)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        return _read_slot(rewriter.builder, node, *reading[node]) if node in reading else None

    return eliminate_dead_code(rewrite_function(function, patterns)) if loops else function


class _StagedLoop:
    """Rewrites one loop."""

    def __init__(
        self, builder: Builder, loop: Node, fetches: LoopFetches, stages: int, room: Op, reading: dict[Node, Any]
    ) -> None:
        self.builder, self.loop, self.fetches, self.stages = builder, loop, fetches, stages
        self.reading = reading
        (self.body,) = loop.regions
        self.rings = {load: self._ring(room, load) for load in fetches.loads}

    def _ring(self, room: Op, load: Node) -> Value:
        type = load.out.type
        assert isinstance(type, TensorType)
        attrs = {"shape": (self.stages, *static_shape(load.out)), "dtype": type.dtype}
        return self.builder.add(room, [], attrs).out

    def run(self, args: Sequence[Value], run: Any) -> Sequence[Value]:
        """The prologue of copies, the loop, and a wait for the last copies; returns the loop's results."""
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
        made = self.builder.add(control_flow.for_, [lower, self.upper, step, *state], types=types, regions=(region,))
        self._wait(0)
        return made.results[:-1]

    def _round(self, params: Sequence[Value], run: Any) -> list[Value]:
        """A round: wait for its blocks, issue the copies of a later round, run the body."""
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
        """Issue the copies of the round with this index, if it exists."""
        if not self.fetches.copied:
            return
        for load, (ref, *starts) in self._places(self.fetches.copied, index, outer):
            attrs = {"shape": static_shape(load.out), "edge": "clip"}
            to = [slot, *(self._index(0) for _ in starts)]
            self.builder.add(tile.async_copy, [self.rings[load], ref, *to, *starts], attrs, loc=load.loc)
        self.builder.add(tile.async_commit, [], {})

    def _wait(self, pending: int) -> None:
        """Wait for all copies except those of the last `pending` rounds."""
        if self.fetches.copied:
            self.builder.add(tile.async_wait, [], {"pending": pending})

    def _brought(self, index: Value, outer: Mapping[Value, Value]) -> list[Value]:
        """Load the blocks that are prefetched into registers, of the round with this index."""
        found = self._places(self.fetches.held, index, outer)
        attrs = {"edge": "clip"}
        return [self.builder.add(tile.load, v, {**n.attrs, **attrs}, loc=n.loc).out for n, v in found]

    def _put(self, blocks: Sequence[Value], slot: Value) -> None:
        """Store these blocks into their slots."""
        for load, block in zip(self.fetches.held, blocks, strict=True):
            whole = self.builder.add(shape.reshape, [block], {"shape": (1, *static_shape(block))}).out
            to = [slot, *(self._index(0) for _ in static_shape(block))]
            self.builder.add(tile.store, [self.rings[load], whole, *to], {}, loc=load.loc)

    def _places(
        self, loads: Collection[Node], index: Value, outer: Mapping[Value, Value]
    ) -> list[tuple[Node, list[Value]]]:
        """The operands of loads in the round with this index; out of bounds if the round does not exist."""
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
        outside = self._index(ref.type.shape[axis])  # type: ignore[union-attr]
        found[axis] = self._scalar(elementwise.where, present, found[axis], outside)
        return [env[ref], *found]

    def _moving(self, places: Sequence[Value]) -> int:
        """The last axis whose start changes from round to round, or the last axis of all."""
        ours = {self.body.params[0], *(v for n in self.fetches.places for v in n.results)}
        return next((a for a in reversed(range(len(places))) if places[a] in ours), len(places) - 1)

    def _later(self, index: Value, rounds: int) -> Value:
        """The index some rounds later."""
        if not rounds:
            return index
        step = self.builder.producers[self.step].attrs["value"]
        return self._scalar(elementwise.add, index, self._index(rounds * int(step)))

    def _index(self, n: Size) -> Value:
        if isinstance(n, Dim):
            return self.builder.add(basic.dim_value, [], {"size": n}).out
        return self.builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out

    def _scalar(self, op: Op, *operands: Value) -> Value:
        return self.builder.add(op, operands, {}).out


def _read_slot(builder: Builder, load: Node, ring: Value, slot: Value) -> Value:
    """The block of a load, read from its slot."""
    zero = _make_index(builder, 0)
    places = [slot, *(zero for _ in static_shape(load.out))]
    block = builder.add(tile.load, [ring, *places], {"shape": (1, *static_shape(load.out))}).out
    return builder.add(shape.reshape, [block], {"shape": static_shape(load.out)}).out


# Loop-invariant operands of products whose fragments are read element by element stay in shared memory: no round stores
# them again. Their copy is part of the first group that a loop waits for.


def keep_invariant_operands(function: Function) -> Function:
    """The function in which such operands, loaded before a loop, are copied to a slot of their own."""
    kept, patterns = _find_invariant_loads(function), RewritePatterns("invariant operands")

    @patterns(tile.load)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        if node not in kept:
            return None
        type, builder = node.out.type, rewriter.builder
        attrs = {"shape": (1, *static_shape(node.out)), "dtype": type.dtype}  # type: ignore[union-attr]
        ring, zero = builder.add(smem_slots, [], attrs).out, _make_index(builder, 0)
        to = [zero] * (1 + len(static_shape(node.out)))
        copied = {"shape": static_shape(node.out), "edge": "clip"}
        builder.add(tile.async_copy, [ring, args[0], *to, *args[1:]], copied, loc=node.loc)
        return _read_slot(builder, node, ring, zero)

    return rewrite_function(function, patterns) if kept else function


def _find_invariant_loads(function: Function) -> set[Node]:
    uses, outside = UseDef(function), set(function.body.nodes)
    waiting = [r.nodes for n in outside for r in n.regions if any(m.op is tile.async_wait for m in r.nodes)]
    inner = [n for nodes in waiting for n in nodes if uses_split_mma(n)]
    found = {load for n in inner for v in n.args[-2:] if (load := _find_load(uses, v)) in outside}
    written = tile.find_written_refs(function.body)
    return {n for n in found if n is not None and not is_masked(n) and n.args[0] not in written}


def _find_load(uses: UseDef, v: Value) -> Node | None:
    """The load of a block in global memory that only one product uses, through views."""
    node = uses.get(v)
    while node is not None and _is_view(node) and uses.count_uses(v) == 1:
        v = node.args[0]
        node = uses.get(v)
    plain = node is not None and node.op is tile.load and uses.count_uses(v) == 1
    return node if plain and node.args[0].type.space == GLOBAL else None  # type: ignore[union-attr]


def _make_index(builder: Builder, n: int) -> Value:
    return builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out


# ldmatrix selection: products read operands in slots directly from shared memory.


LDMATRIX_EXTENT = 16  # rows and columns that ldmatrix reads at once


@dataclass(frozen=True)
class SlotOperand:
    """An operand of a product in a slot."""

    ref: Value
    slot: Value
    flipped: bool


def read_operands_in_place(function: Function) -> Function:
    """The function in which tensor cores read their blocks of slots directly from shared memory."""
    uses = UseDef(function)
    found = _find_slot_operands(function, uses)
    layouts = {s.ref: _choose_row_attributes(s, place == len(n.args) - 1) for (n, place), s in found.items()}
    if not found:
        return function
    patterns = RewritePatterns("operands in shared memory")

    @patterns(smem_slots)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        return rewriter.add(smem_slots, **{**node.attrs, **layouts[node.out]}) if node.out in layouts else None

    @patterns(*PRODUCT_OPS)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Sequence[Value] | None:
        sides = [(i, found[node, i]) for i in range(len(args)) if (node, i) in found]
        for i, side in sides:
            args[i] = rewriter.add(smem_operand, rewriter.new(side.ref), rewriter.new(side.slot), flipped=side.flipped)
        return rewriter.copy(node, args) if sides else None

    return eliminate_dead_code(rewrite_function(function, patterns))


def _find_slot_operands(function: Function, uses: UseDef) -> dict[tuple[Node, int], SlotOperand]:
    """The operands of products in slots with no other reader, by node and operand number."""
    products = [n for n in function.body.walk() if uses_any_mma(n)]
    places = {(n, len(n.args) - 2 + right): bool(right) for n in products for right in (0, 1)}
    found = {at: side for at, right in places.items() if (side := _match_slot_operand(uses, *at, right)) is not None}
    readers = Counter(n.args[0] for n in function.body.walk() if n.op is tile.load)
    ours = Counter(side.ref for side in found.values())
    return {at: side for at, side in found.items() if ours[side.ref] == readers[side.ref]}


def _choose_row_attributes(side: SlotOperand, right: bool) -> dict[str, Any]:
    """How the rows of slots are laid out so that the lanes that read a fragment use all banks."""
    dtype = side.ref.type.dtype  # type: ignore[union-attr]
    if dtype in FRAGMENT_PADDINGS:
        return {"padding": FRAGMENT_PADDINGS[dtype][0 if right == side.flipped else 1]}
    return {"swizzled": True}


def _match_slot_operand(uses: UseDef, node: Node, place: int, right: bool) -> SlotOperand | None:
    """The slot of an operand, if ldmatrix can read it there; or None."""
    v, flipped = node.args[place], False
    made = uses.get(v)
    while made is not None and _is_view(made) and uses.count_uses(v) == 1:
        (x,) = made.args
        turned = made.op is shape.permute
        if turned and tuple(made.attrs["axes"]) != (1, 0):
            return None
        if not turned and [n for n in static_shape(x) if n != 1] != [n for n in static_shape(v) if n != 1]:
            return None
        flipped, v = flipped != turned, x
        made = uses.get(v)
    if made is None or made.op is not tile.load or uses.count_uses(v) != 1:
        return None
    ref = made.args[0]
    origin = uses.get(ref)
    fits = origin is not None and origin.op is smem_slots and _is_readable_in_place(ref, right, flipped)
    return SlotOperand(ref, made.args[1], flipped) if fits else None


def _is_view(node: Node) -> bool:
    """Whether a node has its operand's elements: a permutation, a reshape, or a cast that changes nothing."""
    same = node.op is basic.cast and node.args[0].type == node.out.type
    return same or node.op in (shape.permute, shape.reshape)


def _is_readable_in_place(ref: Value, right: bool, flipped: bool) -> bool:
    """Whether fragments are read from these blocks: ldmatrix transposes 16-bit elements, not 8-bit ones; f32 and f64
    are read one by one."""
    dtype = ref.type.dtype  # type: ignore[union-attr]
    rows, columns = math.prod(static_shape(ref)[1:-1]), static_shape(ref)[-1]
    if dtype in FRAGMENT_PADDINGS:
        return rows % DOUBLE_MMA[1] == columns % DOUBLE_MMA[2] == 0
    whole = rows % LDMATRIX_EXTENT == 0 and columns * element_bytes(dtype) % (2 * LDMATRIX_EXTENT) == 0
    return whole and MMA_OPERAND_TYPES.get(dtype) == dtype and (element_bytes(dtype) == 2 or right == flipped)


# The number of stages: what a Schedule requests, or as many as fit in shared memory.


MAX_STAGES, MIN_STAGES = 4, 2
SM_REGISTERS, REGISTER_BYTES = 1 << 16, 4  # registers of a multiprocessor, and bytes of each
OTHER_REGISTERS = 64  # registers of a thread for all but the largest block
MAX_RESIDENT_BLOCKS = 8  # the most resident blocks that hide latency better than more stages do
MAX_HELD_REGISTERS = 64  # registers of a thread for accumulators and prefetched blocks: more halve the occupancy
RESERVED_SHARED_BYTES = 2048  # bytes of shared memory for everything else


def pipeline_operand_copies(
    function: Function, apart: bool, aligned: Sequence[int], threads: int, limit: int
) -> Function:
    """The function with the operands of its loops prefetched, if they fit in `limit` bytes of shared memory.

    `apart` and `aligned` are those of `find_loop_fetches`, `threads` the threads of a block.
    """
    uses = UseDef(function)
    found = {n: _fit_registers(n, f, threads) for n, f in find_loop_fetches(function, apart, aligned).items()}
    loops = {
        n: f
        for n, f in found.items()
        if f.loads and count_rounds(uses, n) >= MIN_STAGES and _has_tensor_cores(n) and not _is_exceptional(uses, n)
    }
    asked = function.attrs.get("stages")
    stages = _choose_stages(function, loops, threads, limit) if asked is None else int(asked)
    if not loops or stages < MIN_STAGES:
        return function
    if not any(f.copied for f in loops.values()):
        stages = MIN_STAGES  # registers hold one round
    return keep_invariant_operands(insert_prefetch(function, stages, loops, smem_slots))


def _has_tensor_cores(loop: Node) -> bool:
    return any(uses_any_mma(n) for n in loop.regions[0].nodes)


def _is_exceptional(uses: UseDef, loop: Node) -> bool:
    """Whether what a block holds decides if a loop runs at all: the copies before it would mostly be for nothing."""
    ends = [made for v in loop.args[:2] if (made := uses.get(v)) is not None]
    tests = [n.args[0] for n in ends if n.op is elementwise.where]
    return any(n.op in REDUCTIONS for n in uses.backward_slice(tests))


def _fit_registers(loop: Node, fetches: LoopFetches, threads: int) -> LoopFetches:
    """The loads to prefetch, without those for which no registers are left beside the accumulators."""
    most = max((_count_result_registers(n.out) for n in loop.regions[0].nodes if uses_any_mma(n)), default=0)
    fits = most + sum(fetches.held.values()) <= MAX_HELD_REGISTERS * threads
    return fetches if fits else replace(fetches, held={})


def _count_result_registers(v: Value) -> int:
    """The registers of all threads that hold a block whose elements are not packed."""
    wide = element_bytes(v.type.dtype) > REGISTER_BYTES  # type: ignore[union-attr]
    return math.prod(static_shape(v)) * (2 if wide else 1)


def count_rounds(uses: UseDef, loop: Node) -> float:
    """The trip count of a loop; infinite if it is not known."""
    ends = [uses.get(v) for v in loop.args[:3]]
    if any(n is None or n.op is not basic.full for n in ends):
        return math.inf
    lower, upper, step = (int(n.attrs["value"]) for n in ends if n is not None)
    return -((lower - upper) // step)


def _choose_stages(function: Function, loops: Mapping[Node, LoopFetches], threads: int, limit: int) -> int:
    """The most stages that fit beside the resident blocks that registers allow; 1 if not even two fit."""
    each = sum(f.bytes for f in loops.values())
    held = [v for n in function.body.walk() for v in n.results if isinstance(v.type, TensorType)]
    largest = max(map(_count_result_registers, held))
    blocks = max(1, min(SM_REGISTERS // (threads * (largest // threads + OTHER_REGISTERS)), MAX_RESIDENT_BLOCKS))
    fits = [n for n in range(MIN_STAGES, MAX_STAGES + 1) if n * each <= limit // blocks - RESERVED_SHARED_BYTES]
    whole = [n for n in range(MIN_STAGES, MAX_STAGES + 1) if n * each <= limit - RESERVED_SHARED_BYTES]
    return max(fits, default=min(whole, default=1))
