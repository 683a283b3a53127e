"""Memory planning: an offset in one workspace for each buffer; buffers whose lifetimes do not overlap share memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tessera.core.symbolic_dim import Dim, Size, estimate_size, proves_at_most, round_up
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.levels import KERNEL_OP
from tessera.ops.dialects import host

ALIGNMENT = 64


@dataclass(frozen=True)
class BufferLifetime:
    """A buffer: its size in bytes and the first and last node that touch it."""

    buffer: Value
    size: Size
    first: int
    last: int

    def overlaps(self, other: BufferLifetime) -> bool:
        """Whether both are alive at the same time."""
        return self.first <= other.last and other.first <= self.last


def plan_memory(module: Module) -> Module:
    """Assign offsets to the buffers of a Schedule module, and note the size of the workspace at its entry."""
    main = module.main
    lifetimes = find_lifetimes(main.body)
    offsets: dict[Value, Size]
    size: Size
    if any(isinstance(each.size, Dim) for each in lifetimes):
        offsets, size = assign_symbolic_offsets(lifetimes)
    else:
        offsets = {**assign_offsets(lifetimes)}
        size = max((o + _count_aligned_bytes(v) for v, o in offsets.items()), default=0)
    attrs = Attrs({**main.attrs, "workspace": size})
    return module.replace(
        Function(main.name, _set_block_offsets(main.body, offsets), attrs, main.loc), *module.functions[1:]
    )


def find_lifetimes(block: Block) -> list[BufferLifetime]:
    """The lifetimes of the buffers of an entry function; a view extends the lifetime of its buffer.

    A buffer from outside a loop or branch that touches it is alive throughout the loop or branch.
    """
    found = _BufferUses()
    found.walk(block)
    return [BufferLifetime(v, _count_aligned_bytes(v), min(at), max(at)) for v, at in found.touched.items() if at]


@dataclass
class _BufferUses:
    """The nodes that touch each buffer, numbered in program order."""

    owner: dict[Value, Value] = field(default_factory=dict)
    touched: dict[Value, list[int]] = field(default_factory=dict)
    number: int = 0

    def walk(self, block: Block) -> None:
        """Count the nodes of a block and of its regions."""
        for node in block.nodes:
            if node.op is host.alloc:
                self.owner[node.out], self.touched[node.out] = node.out, []
            self.touch(node)
            self.number += 1
            if node.regions and node.op.name != KERNEL_OP:
                self.inside(node)

    def touch(self, node: Node) -> None:
        """Record the buffers that a node touches; its results are views of them."""
        for value in node.args:
            if value in self.owner:
                self.touched[self.owner[value]].append(self.number)
                self.owner.update(dict.fromkeys(node.results, self.owner[value]))

    def inside(self, node: Node) -> None:
        """Walk the regions of a node; buffers from outside that they touch live as long as the node."""
        outside, first = {v: len(at) for v, at in self.touched.items()}, self.number - 1
        for region in node.regions:
            self.walk(region)
        for value, count in outside.items():
            if len(self.touched[value]) > count:
                self.touched[value] += [first, self.number]
        self.number += 1


def assign_offsets(found: Sequence[BufferLifetime]) -> dict[Value, int]:
    """An offset for each buffer: the largest first, each at the lowest offset that is free during its lifetime."""
    offsets: dict[Value, int] = {}
    placed: list[BufferLifetime] = []
    for each in sorted(found, key=lambda life: (-life.size, life.first)):
        taken = sorted((offsets[p.buffer], p.size) for p in placed if p.overlaps(each))
        offset = 0
        for start, size in taken:
            if offset + each.size <= start:
                break
            offset = max(offset, start + size)
        offsets[each.buffer] = offset
        placed.append(each)
    return offsets


@dataclass
class _MemorySlot:
    """Memory that buffers of disjoint lifetimes share; its size is that of the first."""

    size: Size
    buffers: list[BufferLifetime]

    def fits(self, other: BufferLifetime) -> bool:
        """Whether another buffer may lie here, whatever the sizes are."""
        return proves_at_most(other.size, self.size) and not any(b.overlaps(other) for b in self.buffers)


def assign_symbolic_offsets(found: Sequence[BufferLifetime]) -> tuple[dict[Value, Size], Size]:
    """An offset for each buffer of symbolic sizes, and the size of the workspace (linear scan over slots)."""
    slots: list[_MemorySlot] = []
    for each in sorted(found, key=lambda life: (-estimate_size(life.size), life.first)):
        slot = next((s for s in slots if s.fits(each)), None)
        if slot is None:
            slots.append(_MemorySlot(each.size, [each]))
        else:
            slot.buffers.append(each)
    offsets: dict[Value, Size] = {}
    total: Size = 0
    for slot in slots:
        offsets |= {each.buffer: total for each in slot.buffers}
        total = total + slot.size
    return offsets, total


def _count_aligned_bytes(value: Value) -> Size:
    size = math.prod(value.type.shape) * value.type.dtype.numpy.itemsize
    return round_up(size or 1, ALIGNMENT)


def _set_block_offsets(block: Block, offsets: Mapping[Value, Size]) -> Block:
    return replace(block, nodes=tuple(_set_offset(n, offsets) for n in block.nodes))


def _set_offset(node: Node, offsets: Mapping[Value, Size]) -> Node:
    if node.regions and node.op.name != KERNEL_OP:
        return replace(node, regions=tuple(_set_block_offsets(r, offsets) for r in node.regions))
    if node.op is not host.alloc or node.out not in offsets:
        return node
    return replace(node, attrs=Attrs({**node.attrs, "offset": offsets[node.out]}))
