"""Collective scheduling: starts collectives when their operands are ready, and waits where their results are used.

Between the two the device computes (XLA's latency-hiding scheduler). Collectives that become ready near each other
start together, since each start has a latency of its own (XLA's collective combiners, the buckets of PyTorch's DDP).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tessera.ir.core import Attrs, Block, Module, Node, Value
from tessera.ir.levels import KERNEL_OP
from tessera.lower.passes.multi_output_fusion import MemoryMap
from tessera.ops.dialects import host
from tessera.ops.tensor.collectives import ASYNCHRONOUS, MESSAGES

BUCKET_BYTES = 1 << 24  # of operands that start together: as many take the links' bandwidth, not their latency
DECLARING = (host.alloc, host.view, host.at)
Groups = tuple[tuple[int, ...], ...]


def schedule_collectives(module: Module) -> Module:
    """Make the collectives of a Schedule module asynchronous where something can be computed meanwhile.

    This may change their order. The attribute `collective_order` of the entry function has a digest of it for each list
    of groups with several collectives: the ranks of a group compare it before the first run.
    """
    found = _Scheduler(module, MemoryMap.of(module.main.body))
    main = replace(module.main, body=found.schedule(module.main.body))
    if orders := found.describe_orders():
        main = replace(main, attrs=Attrs({**main.attrs, "collective_order": orders}))
    return module.replace(main, *module.functions[1:])


@dataclass
class _Collective:
    """A collective of a block: where it is, and between which nodes it may run.

    It may start after node `ready` (-1: at once), and must be complete before node `needed`.
    """

    node: Node
    place: int
    ready: int
    needed: int
    slot: int = -1  # the node behind which it starts

    @property
    def groups(self) -> Groups:
        """The ranks that communicate."""
        return find_groups(self.node)

    @property
    def bytes(self) -> int:
        """The bytes of its operand."""
        type = self.node.args[0].type
        return math.prod(int(n) for n in type.shape) * type.dtype.numpy.itemsize  # type: ignore[union-attr]


@dataclass
class _Touched:
    """The memory that a node reads, and that it writes."""

    read: set[Value] = field(default_factory=set)
    written: set[Value] = field(default_factory=set)


@dataclass
class _Scheduler:
    """One walk over the blocks of an entry function; `orders` describes the collectives of each list of groups."""

    module: Module
    memory: MemoryMap
    orders: dict[Groups, list[str]] = field(default_factory=dict)

    def schedule(self, block: Block) -> Block:
        """A block, and those in it, with its collectives scheduled."""
        nodes = tuple(self._enter(n) for n in block.nodes)
        touched = [self._find_touched(n) for n in nodes]
        found = list(self._find_collectives(nodes, touched))
        _form_buckets(found)
        made = list(_emit(nodes, found))
        self._note_order(made)
        return replace(block, nodes=tuple(n for _, n in made))

    def _enter(self, node: Node) -> Node:
        if not node.regions or node.op.name == KERNEL_OP:
            return node
        return replace(node, regions=tuple(self.schedule(r) for r in node.regions))

    # What nodes touch.

    def _find_touched(self, node: Node) -> _Touched:
        found = _Touched()
        self._add_touched(node, found)
        return found

    def _add_touched(self, node: Node, found: _Touched) -> None:
        storage = [self.memory.storage(v) for v in node.args]
        if node.op in DECLARING:
            return
        if node.op in (host.call, host.start):
            count = node.attrs["operands"]
            found.read.update(storage[:count])
            found.written.update(storage[count:])
        elif node.op.name == KERNEL_OP or node.op is host.launch:
            body = node.regions[0] if node.regions else self.module.function(node.attrs["kernel"]).body
            written = {n.args[0] for n in body.walk() if "write" in n.op.effects}
            found.read.update(storage)
            found.written.update(s for s, p in zip(storage, body.params, strict=False) if p in written)
        else:  # of the host's loops and branches any operand may be a state that is written
            found.read.update(storage)
            found.written.update(storage)
            for region in node.regions:
                for inner in region.nodes:
                    self._add_touched(inner, found)

    # Where collectives may run.

    def _find_collectives(self, nodes: Sequence[Node], touched: Sequence[_Touched]) -> Iterator[_Collective]:
        uses: dict[Value, list[tuple[int, bool]]] = {}
        for place, each in enumerate(touched):
            for value in each.read | each.written:
                uses.setdefault(value, []).append((place, value in each.written))
        barriers = [i for i, n in enumerate(nodes) if _is_barrier(n)]
        for place, node in enumerate(nodes):
            if node.op is not host.call or not is_collective(node) or not _is_sized(node):
                continue
            own = touched[place]
            conflicts = {i for v in own.read for i, writes in uses[v] if writes}
            conflicts |= {i for v in own.written for i, _ in uses[v]} - {place}
            ready = max([i for i in (*conflicts, *barriers) if i < place], default=-1)
            if any(is_collective(nodes[i]) for i in conflicts if i < place):
                ready = place  # it takes the result of another, which is waited for here
            needed = min((i for i in conflicts if i > place), default=len(nodes))
            if any(map(_computes, nodes[ready + 1 : needed])):
                yield _Collective(node, place, ready, needed)

    # The order, as ranks compare it.

    def _note_order(self, made: Sequence[tuple[int, Node]]) -> None:
        """Describe the collectives of a block in their order: each by its type and its number before scheduling."""
        collectives = [(place, n) for place, n in made if is_collective(n)]
        for groups in dict.fromkeys(find_groups(n) for _, n in collectives):
            own = [(place, n) for place, n in collectives if find_groups(n) == groups]
            numbers = {place: i for i, place in enumerate(sorted(place for place, _ in own))}
            self.orders.setdefault(groups, []).extend(f"{numbers[place]} {_describe(n)}" for place, n in own)

    def describe_orders(self) -> tuple[tuple[Groups, str], ...]:
        """The digest of each order of several collectives, as an attribute."""
        several = {groups: order for groups, order in self.orders.items() if len(order) > 1}
        return tuple((g, hashlib.sha256("\n".join(order).encode()).hexdigest()) for g, order in several.items())


def is_collective(node: Node) -> bool:
    """Whether a node runs or starts a collective of a group."""
    return node.op in (host.call, host.start) and node.attrs["op"] in ASYNCHRONOUS


def find_groups(node: Node) -> Groups:
    """The groups of a collective."""
    return node.attrs["attrs"]["groups"]  # type: ignore[no-any-return]


def _describe(node: Node) -> str:
    """A collective as all ranks of a group call it: its op, its attributes and its types."""
    attrs = {k: v for k, v in node.attrs["attrs"].items() if k not in ("groups", "site")}
    return f"{node.attrs['op']} {sorted(attrs.items())} {[str(v.type) for v in node.args]}"


def _is_barrier(node: Node) -> bool:
    """Whether a node exchanges messages: what other ranks do before and after it may depend on its order."""
    inner = (n for r in node.regions for n in r.walk()) if node.op.name != KERNEL_OP else ()
    return any(n.op is host.call and n.attrs["op"] in MESSAGES for n in (node, *inner))


def _computes(node: Node) -> bool:
    """Whether the device works for a node that is no collective."""
    return node.op not in DECLARING and not is_collective(node)


def _is_sized(node: Node) -> bool:
    return all(isinstance(n, int) for v in node.args for n in v.type.shape)  # type: ignore[union-attr]


def _form_buckets(found: Sequence[_Collective]) -> None:
    """Choose where each collective starts: when it is ready, or with others that are ready soon afterwards.

    A bucket has collectives of the same groups. It starts when the last of them is ready, which is before half of what
    each of them could run beside has passed, and holds at most `BUCKET_BYTES` if it holds several.
    """
    bucket: list[_Collective] = []
    for each in sorted(found, key=lambda c: (c.ready, c.place)):
        if bucket and not _fits(each, bucket):
            bucket = []
        bucket.append(each)
        for member in bucket:
            member.slot = each.ready


def _fits(each: _Collective, bucket: Sequence[_Collective]) -> bool:
    if each.groups != bucket[0].groups or each.bytes + sum(c.bytes for c in bucket) > BUCKET_BYTES:
        return False
    return all(2 * (each.ready - c.ready) <= c.needed - c.ready for c in bucket)


def _emit(nodes: Sequence[Node], found: Sequence[_Collective]) -> Iterator[tuple[int, Node]]:
    """The nodes in their new order, each with its place in the old one; a wait has that of its collective."""
    moved = {c.place for c in found}
    makers = {v: i for i, n in enumerate(nodes) if n.op in DECLARING for v in n.results}
    emitted: set[int] = set()

    def declare(values: Sequence[Value]) -> Iterator[tuple[int, Node]]:
        """What makes buffers and views, at their first use."""
        for v in values:
            place = makers.get(v, -1)
            if place >= 0 and place not in emitted:
                emitted.add(place)
                yield from declare(nodes[place].args)
                yield place, nodes[place]

    starts, waits = _group_by(found, lambda c: c.slot), _group_by(found, lambda c: c.needed)
    for place in range(-1, len(nodes) + 1):
        for c in waits.get(place, ()):
            yield c.place, replace(c.node, op=host.wait, attrs=Attrs())
        if 0 <= place < len(nodes) and place not in moved and place not in emitted:
            emitted.add(place)
            yield place, nodes[place]
        for c in starts.get(place, ()):
            yield from declare(c.node.args)
            yield c.place, replace(c.node, op=host.start)


def _group_by(found: Sequence[_Collective], key: Callable[[_Collective], int]) -> dict[int, list[_Collective]]:
    groups: dict[int, list[_Collective]] = {}
    for each in found:
        groups.setdefault(key(each), []).append(each)
    return groups
