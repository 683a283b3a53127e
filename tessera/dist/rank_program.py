"""Rank programs for prediction: kernels and communication of one rank, with their time and memory by a stated model.

A kernel takes the longer of its arithmetic and its bytes at the device's peaks, and a fixed time to start. A product or
a reduction begins a kernel; pointwise ops join that of their operand. A collective takes the time of its bytes on the
slowest link between its ranks, and of its messages. A message takes that of its bytes on the link between two ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.core.errors import UNKNOWN, Location, UnsupportedOpError
from tessera.core.types import TensorType
from tessera.dist.mesh import Mesh
from tessera.dist.propagation import Link, estimate_collective
from tessera.ir.core import Block, Function, Node, Value
from tessera.ir.rewrite import eliminate_dead_code, expand_composites, lower_node
from tessera.ir.rules import lower
from tessera.lower.op_chains import CONSTANT_OPS, VIEW_OPS
from tessera.ops.tensor import contractions
from tessera.ops.tensor.collectives import COMMUNICATING, local_part, place_part, receive, send

MATRIX_BITS = 16  # elements up to this width use the matrix units


@dataclass(frozen=True)
class Compute:
    """The peaks of one device: FLOP/s of matrix units and of others, bytes per second, and the seconds of a launch."""

    matrix: float = 800e12
    flops: float = 60e12
    bandwidth: float = 4e12
    launch: float = 2e-6


@dataclass(frozen=True)
class Message:
    """A message between two ranks, at the one that sends it or at the one that receives it."""

    source: int
    to: int
    tag: int
    sends: bool


@dataclass
class Item:
    """A kernel, a collective (with members) or a message of a rank: how long it takes, and whose results it needs."""

    label: str
    seconds: float
    place: str = ""
    members: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()  # communication before it, by its numbers
    after: int = -1  # the last item whose result it takes
    bytes: int = 0
    flops: float = 0.0
    message: Message | None = None
    loc: Location = field(default=UNKNOWN, compare=False)


@dataclass
class RankProgram:
    """The items of a rank in order, the bytes of its arguments, and the most bytes that it holds at one time."""

    items: list[Item] = field(default_factory=list)
    argument_bytes: int = 0
    peak_bytes: int = 0


def hoist_collectives(program: RankProgram) -> RankProgram:
    """The program with each collective behind the item that makes its operand, but in its place among messages.

    So do compiled programs (`tessera.lower.passes.collective_scheduling`).
    """
    slots: list[tuple[int, int]] = []
    barrier = -1
    for number, item in enumerate(program.items):
        barrier = number if item.message is not None else barrier
        moves = bool(item.members) and item.message is None
        slots.append((max(item.after, barrier), 1) if moves else (number, 0))
    order = sorted(range(len(slots)), key=lambda number: (*slots[number], number))
    places = {number: place for place, number in enumerate(order)}
    moved = [program.items[number] for number in order]
    items = [replace(i, needs=tuple(sorted(places[n] for n in i.needs)), after=places.get(i.after, -1)) for i in moved]
    return replace(program, items=items)


def count_bytes(value: Value) -> int:
    """The bytes of a value."""
    if not isinstance(value.type, TensorType):
        return 0
    return math.prod(int(n) for n in value.type.shape) * value.type.dtype.numpy.itemsize


def make_program(function: Function, mesh: Mesh, rank: int, links: Mapping[str, Link], compute: Compute) -> RankProgram:
    """The kernels and the communication of a traced function as a rank runs it.

    Raises:
        UnsupportedOpError: a loop ends by a computed value.
    """
    pointwise = {n.op for n in function.body.walk() if n.op in lower and _is_pointwise(n)}
    function = eliminate_dead_code(expand_composites(function, lambda op: op not in pointwise))
    made = _Maker(mesh, rank, links, compute)
    made.walk(function.body, {})
    argument_bytes = sum(count_bytes(v) for v in function.params)
    return RankProgram(made.items, argument_bytes, argument_bytes + made.peak)


def _is_pointwise(node: Node) -> bool:
    """Whether a node is a chain of pointwise ops, which joins the kernel of its operand."""
    if node.op in lower and not node.regions and not node.op.pointwise:
        return all(map(_is_pointwise, lower_node(node).nodes))
    return node.op.pointwise or node.op in (*VIEW_OPS, *CONSTANT_OPS)


class _Maker:
    def __init__(self, mesh: Mesh, rank: int, links: Mapping[str, Link], compute: Compute) -> None:
        self.mesh, self.rank, self.links, self.compute = mesh, rank, links, compute
        self.items: list[Item] = []
        self.peak = 0

    def walk(self, block: Block, needed: Mapping[Value, tuple[int, ...]]) -> None:
        """Add the items of a block; `needed` are the collectives behind values from outside."""
        behind, made, first = dict(needed), dict[Value, int](), len(self.items) - 1
        kernels = list(_list_kernels(block))
        self.peak = max(self.peak, _find_peak(block, kernels))
        for kernel in kernels:
            needs = tuple(sorted({n for node in kernel for v in node.args for n in behind.get(v, ())}))
            node = kernel[0]
            after = max((made.get(v, first) for each in kernel for v in each.args), default=first)
            if node.regions:
                self._repeat(node, behind, needs)
                made.update(dict.fromkeys(node.results, len(self.items) - 1))
                continue
            found = needs
            if node.op in COMMUNICATING and node.op not in (local_part, place_part):
                self._add_collective(node, needs)
                self.items[-1].after = after
                after, found = len(self.items) - 1, (len(self.items) - 1,)
            elif item := self._make_kernel(block, kernel, needs):
                self.items.append(item)
                after, found = len(self.items) - 1, ()  # what waits for the kernel waits for them, too
            for each in kernel:
                behind.update(dict.fromkeys(each.results, found))
                made.update(dict.fromkeys(each.results, after))

    def _repeat(self, node: Node, behind: dict[Value, tuple[int, ...]], needs: tuple[int, ...]) -> None:
        if node.op.name.endswith("while_loop"):
            raise UnsupportedOpError(
                "a loop that ends by a computed value has no predicted time", location=node.loc,
                suggestion="ts.scan, whose length is known",
            )  # fmt: skip
        outside = {p: needs for r in node.regions for p in r.params}
        if node.op.name.endswith("cond"):
            longest = max(node.regions, key=lambda r: sum(i.seconds for i in self._separate(r, outside)))
            self.walk(longest, outside)
            return
        for _ in range(int(node.attrs.get("length", 1))):
            self.walk(node.regions[-1], outside)

    def _separate(self, block: Block, needed: Mapping[Value, tuple[int, ...]]) -> list[Item]:
        other = _Maker(self.mesh, self.rank, self.links, self.compute)
        other.walk(block, needed)
        return other.items

    def _make_kernel(self, block: Block, kernel: Sequence[Node], needs: tuple[int, ...]) -> Item | None:
        moved = [n for n in kernel if n.op not in (*VIEW_OPS, *CONSTANT_OPS)]
        if not moved:
            return None
        bytes = sum(map(count_bytes, {*_find_inputs(kernel), *_find_outputs(block, kernel)}))
        counts = {n: _count_flops(n) for n in moved}
        flops = {wide: sum(c for n, c in counts.items() if _uses_matrix_units(n) is wide) for wide in (True, False)}
        arithmetic = flops[True] / self.compute.matrix + flops[False] / self.compute.flops
        seconds = max(arithmetic, bytes / self.compute.bandwidth) + self.compute.launch
        head = max(moved, key=counts.__getitem__)
        return Item(head.op.__name__, seconds, str(head.loc), needs=needs, bytes=bytes, flops=sum(flops.values()))

    def _add_collective(self, node: Node, needs: tuple[int, ...]) -> None:
        if node.op in (send, receive):
            self._add_message(node, needs)
            return
        groups = node.attrs["groups"]
        members = next(tuple(g) for g in groups if self.rank in g)
        held = max(count_bytes(node.args[0]), count_bytes(node.out))
        kind = node.op.__name__
        seconds = estimate_collective(kind, held, len(members), find_link(self.mesh, members, self.links))
        self.items.append(Item(kind, seconds, str(node.loc), members, needs, held, loc=node.loc))

    def _add_message(self, node: Node, needs: tuple[int, ...]) -> None:
        sends, tag = node.op is send, int(node.attrs["tag"])
        there = int(node.attrs["to" if sends else "source"])
        self.mesh.coordinate(there)
        source, to = (self.rank, there) if sends else (there, self.rank)
        held, link = count_bytes(node.out), find_link(self.mesh, (source, to), self.links)
        seconds = held / link.bandwidth + link.latency if sends else 0.0
        name, message = "send" if sends else "recv", Message(source, to, tag, sends)
        self.items.append(Item(name, seconds, str(node.loc), (), needs, held, message=message, loc=node.loc))


@lru_cache(maxsize=4096)
def _find_axes(shape: tuple[int, ...], members: tuple[int, ...]) -> tuple[int, ...]:
    places = np.array(np.unravel_index(members, shape))
    return tuple(int(i) for i in np.flatnonzero((places != places[:, :1]).any(axis=1)))


def find_link(mesh: Mesh, members: tuple[int, ...], links: Mapping[str, Link]) -> Link:
    """The slowest link between ranks: of the mesh axes along which they differ."""
    axes = _find_axes(tuple(mesh.devices.shape), members) or (0,)
    return min((links[mesh.axis_names[i]] for i in axes), key=lambda link: link.bandwidth)


# Kernels.


def _list_kernels(block: Block) -> Iterator[list[Node]]:
    """The nodes of a block in runs that one kernel executes; a collective or a loop is alone."""
    current: list[Node] = []
    for node in block.nodes:
        alone = bool(node.regions) or "collective" in node.op.effects
        made = {v for n in current for v in n.results}
        free = node.op in (*VIEW_OPS, *CONSTANT_OPS)
        joins = free or (node.op.pointwise and (any(v in made for v in node.args) or _is_free(current)))
        if current and (alone or not joins):
            yield current
            current = []
        if alone:
            yield [node]
        else:
            current.append(node)
    if current:
        yield current


def _is_free(nodes: Sequence[Node]) -> bool:
    return all(n.op in (*VIEW_OPS, *CONSTANT_OPS) for n in nodes)


def _find_inputs(kernel: Sequence[Node]) -> set[Value]:
    made = {v for n in kernel for v in n.results}
    return {v for n in kernel for v in n.args} - made


def _find_outputs(block: Block, kernel: Sequence[Node]) -> set[Value]:
    made = {v for n in kernel if n.op not in (*VIEW_OPS, *CONSTANT_OPS) for v in n.results}
    inside = set(map(id, kernel))
    outside = {v for n in block.nodes if id(n) not in inside for v in n.args}
    return made & (outside | set(block.results))


def _count_elements(value: Value) -> int:
    return math.prod(int(n) for n in value.type.shape) if isinstance(value.type, TensorType) else 0


def _count_flops(node: Node) -> int:
    """The arithmetic of a node: that of its products, or one operation an element.

    A composite op is one kernel: what its lowering holds in between stays in registers or in shared memory.
    """
    if products := _count_products(node):
        return products
    return max((_count_elements(v) for v in (*node.args, *node.results)), default=0)


def _count_products(node: Node) -> int:
    """The operations of the products in a node, and in its lowering if it has one."""
    if node.op is contractions.dot:
        return 2 * _count_elements(node.out) * int(node.types[0].shape[-1])
    if node.op not in lower or node.op.pointwise:
        return 0
    key = node.op, node.types, node.attrs
    if key not in _PRODUCTS:
        total = sum(map(_count_products, lower_node(node).walk()))
        _PRODUCTS[key] = total // 2 if node.attrs.get("causal") else total  # half of the pairs are hidden, and skipped
    return _PRODUCTS[key]


_PRODUCTS: dict[Any, int] = {}


def _uses_matrix_units(node: Node) -> bool:
    """Whether a node multiplies on matrix units: what narrow operands are widened to in a lowering makes no difference."""
    return bool(_count_products(node)) and node.types[0].dtype.numpy.itemsize * 8 <= MATRIX_BITS


def _find_peak(block: Block, kernels: Sequence[Sequence[Node]]) -> int:
    """The most bytes of values that are alive at one time, besides the block's parameters."""
    last: dict[Value, int] = {}
    for at, kernel in enumerate(kernels):
        for node in kernel:
            last.update(dict.fromkeys(node.args, at))
    last.update(dict.fromkeys(block.results, len(kernels)))
    ends: dict[int, int] = {}
    held = peak = 0
    for at, kernel in enumerate(kernels):
        for value in (v for n in kernel if n.op not in (*VIEW_OPS, *CONSTANT_OPS) for v in n.results):
            if last.get(value, at) > at:
                held += count_bytes(value)
                ends[last[value]] = ends.get(last[value], 0) + count_bytes(value)
        peak = max(peak, held)
        held -= ends.get(at, 0)
    return peak
