"""Shared memory: its allocator, where the threads of a team must synchronise between accesses to the same memory, and
loads hoisted before these barriers.

The elements of an op are spread over threads, so two ops that touch one memory (at least one of them writing) need a
barrier between them, unless each thread touches only what it touched itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from tessera.codegen.ptx.layout import DistributedLayout, ThreadTeam
from tessera.codegen.ptx.ops import get_fact, smem_slots
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.core.symbolic_dim import round_up
from tessera.core.types import GLOBAL, RefType
from tessera.ir.core import Block, Function, Node, Value
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, contractions

EXCHANGE_ALIGN = 128
SHARED_SYMBOL = "tessera_shared"
LOCAL_SYMBOL = "tessera_local"


class SharedMemoryAllocator:
    """Bump allocator for shared and local memory; one exchange buffer for layout conversions follows all else."""

    def __init__(self, team: ThreadTeam) -> None:
        self._team = team
        self._shared = self._local = self._exchange = 0
        self._base = self._start = ""

    def allocate_shared(self, size: int, alignment: int) -> int:
        """Allocate shared memory; its offset."""
        place = round_up(self._shared, max(alignment, 16))
        self._shared = place + size
        return place

    def allocate_local(self, size: int) -> int:
        """Allocate local memory of each thread; its offset."""
        place = round_up(self._local, 16)
        self._local = place + size
        return place

    def reserve_exchange(self, size: int) -> str:
        """The address of the exchange buffer, of at least `size` bytes: a 32-bit register (shared memory), or a 64-bit
        one (local memory) for a team of one thread."""
        self._exchange = max(self._exchange, size)
        if not self._base:
            self._base = self._team.text.new("b64" if self.exchange_is_local else "b32")
            self._start = self._team.text.new("b32") if self._team.teams > 1 else ""
        return self._base

    @property
    def exchange_is_local(self) -> bool:
        """Whether the exchange buffer is in local memory."""
        return self._team.threads == 1

    @property
    def shared_bytes(self) -> int:
        """The bytes of dynamic shared memory that a block needs."""
        exchange = round_up(self._exchange, EXCHANGE_ALIGN) * (self._team.teams - 1) + self._exchange
        return round_up(self._shared, EXCHANGE_ALIGN) + (exchange if self._base and not self.exchange_is_local else 0)

    def format_prologue(self) -> Iterator[str]:
        """The first lines of the entry: the local memory, and the address of the exchange buffer."""
        start = round_up(self._local, 16)
        total = start + (self._exchange if self._base and self.exchange_is_local else 0)
        if total:
            yield f"\t.local .align 16 .b8 {LOCAL_SYMBOL}[{total}];"
        if self._base and self.exchange_is_local:
            yield f"\tmov.u64 {self._base}, {LOCAL_SYMBOL};"
            yield f"\tadd.s64 {self._base}, {self._base}, {start};"
        elif self._base:
            yield f"\tmov.u32 {self._base}, {SHARED_SYMBOL};"
            yield f"\tadd.s32 {self._base}, {self._base}, {round_up(self._shared, EXCHANGE_ALIGN)};"
            if self._start:  # each team has its own
                yield f"\tmov.u32 {self._start}, %tid.x;"
                yield f"\tdiv.u32 {self._start}, {self._start}, {self._team.threads};"
                stride = round_up(self._exchange, EXCHANGE_ALIGN)
                yield f"\tmad.lo.s32 {self._base}, {self._start}, {stride}, {self._base};"


READ, WRITE = "read", "write"


@dataclass(frozen=True)
class SharedAccess:
    """An access to memory; two accesses of the same threads to the same elements have equal `where`."""

    memory: Any
    kind: str
    where: Any = None

    def conflicts_with(self, other: SharedAccess) -> bool:
        """Whether a barrier is needed between the two."""
        same = self.where is not None and self.where == other.where
        if same and self.kind != other.kind:
            same = not self.where[1].replicated_bits  # one of the threads that replicate an element stores it for all
        return self.memory == other.memory and WRITE in (self.kind, other.kind) and not same

    def in_next_round(self, made: set[Value]) -> SharedAccess:
        """The same access in another round of a loop that redefines these values: its elements may differ."""
        moved = self.where is not None and any(start in made for start in self.where[0])
        return SharedAccess(self.memory, self.kind) if moved else self


class HazardTracker:
    """The accesses since the last barrier, on any path."""

    def __init__(
        self, function: Function, layouts: Mapping[Value, DistributedLayout], team: ThreadTeam, apart: bool
    ) -> None:
        self._layouts, self._alone = layouts, team.threads == 1
        self._shared = frozenset() if apart else frozenset(function.params)
        self._constants = {n.out: n.attrs["value"] for n in function.body.walk() if n.op is basic.full}
        # Accesses to slots are ordered by the program's own barriers.
        self._slots = {n.out for n in function.body.walk() if n.op is smem_slots}
        copied = {n.args[0] for n in function.body.walk() if n.op is tile.async_copy} - self._slots
        self._async_copied = {SharedAccess(self._memory(v), WRITE) for v in copied}
        self.rearranged: frozenset[Node] = frozenset()  # stores by other threads than those that hold the elements
        self.open: set[SharedAccess] = set()

    def needs_barrier(self, node: Node) -> bool:
        """Note a node's accesses; whether a barrier must come first."""
        if self._alone:
            return False
        if node.op is tile.barrier:
            self.open.clear()
            return False
        if node.op is tile.async_wait:  # other threads' copies are written only now
            self.open |= self._async_copied
            return False
        if node.op in (control_flow.for_, control_flow.while_):
            for region in node.regions:
                self.enter_loop(region)
            return False
        return self._note_accesses(self._accesses(node))

    def enter_loop(self, block: Block) -> None:
        """A loop over a block begins: its begin follows its end, so that what it does is open there already."""
        if not self._alone:
            self.open |= set(self._loop_accesses(block))

    def _note_accesses(self, mine: list[SharedAccess]) -> bool:
        clash = any(a.conflicts_with(b) for a in mine for b in self.open)
        if clash:
            self.open.clear()
        self.open |= set(mine)
        return clash

    def note_barrier(self) -> None:
        """The team has met for another reason."""
        self.open.clear()

    def needs_exchange_barrier(self, kind: str) -> bool:
        """Note that the exchange is written or read; whether a barrier must come first."""
        return not self._alone and self._note_accesses([SharedAccess("exchange", kind)])

    def _loop_accesses(self, block: Block) -> list[SharedAccess]:
        made = {v for node in block.walk() for v in (*node.results, *(p for r in node.regions for p in r.params))}
        made |= set(block.params)
        found = [access.in_next_round(made) for node in block.walk() for access in self._accesses(node)]
        return [*found, SharedAccess("exchange", READ), SharedAccess("exchange", WRITE)]

    def _accesses(self, node: Node) -> list[SharedAccess]:
        kinds = [kind for kind in (READ, WRITE) if kind in node.op.effects]
        if node.op is tile.async_copy:
            found = [(node.args[0], SharedAccess(self._memory(node.args[0]), WRITE))]
            found.append((node.args[1], SharedAccess(self._memory(node.args[1]), READ)))
        else:
            found = [
                (node.args[0], SharedAccess(self._memory(node.args[0]), kind, self._where(node))) for kind in kinds
            ]
        return [access for v, access in found if v not in self._slots]

    def _memory(self, ref: Value) -> Any:
        return GLOBAL if ref in self._shared else ref

    def _where(self, node: Node) -> Any:
        """The begin and layout of a block that is loaded or stored; constants are known by value."""
        if node.op not in (tile.load, tile.store) or node in self.rearranged:
            return None
        value, starts = (node.out, node.args[1:]) if node.op is tile.load else (node.args[1], node.args[2:])
        assert isinstance(node.args[0].type, RefType)
        places = tuple(self._constants.get(v, v) for v in starts[: node.args[0].type.rank])
        return (places, self._layouts[value])


# Load hoisting: moves loads as early in their block as their operands allow, before the barriers of reductions.


MAX_HOISTED_ELEMENTS = 1 << 15  # elements: half of the registers of a multiprocessor
LEAST_SUNK_LOADS = 16  # loads of more elements than that are sunk where there are so many
MAX_EARLY_LOADED = 1024  # elements, where products that leave few registers come between a load and its use


def hoist_loads(function: Function, most: int = MAX_HOISTED_ELEMENTS) -> Function:
    """Hoist each load from memory that the function never writes: first those that need not wait for other kernels.

    Functions with products are unchanged, and those that load more than `most` elements, which would fill the
    registers; many such loads are sunk instead.
    """
    held = sum(math.prod(static_shape(n.out)) for n in function.body.walk() if n.op is tile.load)
    if any(n.op is contractions.dot for n in function.body.walk()):
        return function
    written = tile.find_written_refs(function.body)
    if held > most:
        return replace(function, body=_sink_in_block(function.body, written))
    body = _hoist_in_block(function.body, written)
    constants = {function.params[i] for i in get_fact(function, "constants", ())}
    body = _begin_with_constants(body, constants - written) if constants else body
    return Function(function.name, body, function.attrs, function.loc)


def _sink_in_block(block: Block, written: Set[Value]) -> Block:
    """A block of many loads and pointwise ops with each load directly before its first use, in the order in which a
    walk from what the block stores needs them: registers then hold the elements of few loads at a time."""
    pure = {v: n for n in block.nodes for v in n.results if is_movable_load(n, written) or _is_free(n)}
    if sum(n.op is tile.load for n in pure.values()) < LEAST_SUNK_LOADS or any(n.regions for n in block.nodes):
        return block
    order: dict[Node, None] = {}
    work = [n for n in reversed(block.nodes) if not n.results or n.results[0] not in pure]
    while work:
        needed = [pure[v] for v in work[-1].args if v in pure and pure[v] not in order]
        if needed:
            work += reversed(needed)
        else:
            order[work.pop()] = None
    return Block(block.params, tuple(order), block.results)


def _is_free(node: Node) -> bool:
    return not (node.op.effects or node.regions)


def _hoist_in_block(block: Block, written: Set[Value]) -> Block:
    order = [node for node in block.nodes if node.op is basic.full]
    for node in block.nodes:
        if node.op is basic.full:
            continue
        if is_movable_load(node, written):
            order.insert(_find_earliest_position(order, node, written), node)
        else:
            order.append(node)
    return Block(block.params, tuple(order), block.results)


def _begin_with_constants(block: Block, constants: Set[Value]) -> Block:
    """The block with loads of constants, and what these need, first: they do not wait for the kernel ahead."""
    known, first = set(constants), []
    for node in block.nodes:
        reads = node.op is tile.load and node.args[0] in constants
        if (reads or not (node.op.effects or node.regions)) and known.issuperset(node.args):
            known.update(node.results)
            first.append(node)
    needed = {v for n in first if n.op is tile.load for v in n.results}
    for node in reversed(first):
        needed.update(node.args if not needed.isdisjoint(node.results) else ())
    first = [n for n in first if not needed.isdisjoint(n.results)]
    taken = set(first)
    return Block(block.params, (*first, *(n for n in block.nodes if n not in taken)), block.results)


def is_movable_load(node: Node, written: Set[Value]) -> bool:
    """Whether a load reads global memory that the function never writes."""
    return node.op is tile.load and node.args[0].type.space == GLOBAL and node.args[0] not in written  # type: ignore[union-attr]


def _find_earliest_position(order: list[Node], node: Node, written: Set[Value]) -> int:
    """The position after the last node that defines an operand, and after the loads that are hoisted already."""
    operands = set(node.args)
    for place in range(len(order), 0, -1):
        before = order[place - 1]
        if is_movable_load(before, written) or operands & set(before.results):
            return place
    return 0
