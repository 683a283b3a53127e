"""What a loop can fetch ahead: loads of blocks that it multiplies, at places that its index alone tells.

Copies move 4 bytes at least. Blocks whose rows begin at any two bytes, and those that masks leave parts out of, are
held in registers instead, for a round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.memory import VECTOR_BYTES, Memory, together
from tessera.codegen.ptx.ops import multiply_add
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.pipeline import early
from tessera.codegen.ptx.types import size
from tessera.ir.core import Function, Node, Value
from tessera.ops import basic, control, linalg, shape, tile
from tessera.types import GLOBAL, RefType, TensorType, int64

ORDERED = frozenset(("memory", "async"))
LEAST = 4  # bytes that one copy moves, at least
PRODUCTS = (linalg.dot, multiply_add)
VIEWS = (shape.permute, shape.reshape, basic.cast)
MADE = (basic.full, basic.broadcast_to, shape.iota, shape.reshape, shape.permute)  # of masks, beside comparisons
Producers = Mapping[Value, Node]


@dataclass(frozen=True)
class Fetches:
    """What a loop fetches: its loads, and the nodes of its body that their places are computed by."""

    copied: tuple[Node, ...]
    held: Mapping[Node, int]  # in registers, for a round: so many for each
    places: tuple[Node, ...]

    @property
    def loads(self) -> tuple[Node, ...]:
        """All of them."""
        return (*self.copied, *self.held)

    @property
    def bytes(self) -> int:
        """The bytes of one round's blocks."""
        return sum(size(n.out.type.dtype) * math.prod(sizes(n.out)) for n in self.loads)  # type: ignore[union-attr]


def fetches_of(function: Function, apart: bool, aligned: Sequence[int]) -> dict[Node, Fetches]:
    """The innermost loops with products of blocks that can be fetched ahead, and what they fetch.

    `apart` says that refs lie in different memory, `aligned` of how many bytes their addresses are multiples.
    """
    if int(function.attrs.get("group", 1)) != 1:
        return {}
    producers = {v: node for node in function.body.walk() for v in node.results}
    align = dict(zip(function.params, aligned or [VECTOR_BYTES] * len(function.params), strict=True))
    found: dict[Node, Fetches] = {}
    for node in function.body.walk():
        if node.op is control.for_ and _counts(producers, node):
            fetches = _Finder(producers, node, apart, align).found()
            found.update({node: fetches} if fetches.loads and not any(map(_orders, node.regions[0].walk())) else {})
    return found


def _orders(node: Node) -> bool:
    """Whether what comes after a node may not be read before it: loops inside, barriers, atomic updates, copies."""
    effects = node.op.effects
    return node.op in (control.for_, control.while_) or bool(effects & ORDERED) or effects >= {"read", "write"}


def _counts(producers: Producers, loop: Node) -> bool:
    """Whether a loop counts up by a constant."""
    step = producers.get(loop.args[2])
    return step is not None and step.op is basic.full and int(step.attrs["value"]) > 0


class _Finder:
    """The search through one loop."""

    def __init__(self, producers: Producers, loop: Node, apart: bool, align: Mapping[Value, int]) -> None:
        (self.body,) = loop.regions
        self.producers = {**producers, self.body.params[0]: loop}  # as `divisor` knows an index
        self.align = align
        self.inside = {v: n for n in self.body.nodes for v in n.results}
        self.variable = {v for n in self.body.walk() for v in n.results} | set(self.body.params[1:])
        self.written = {n.args[0] for n in self.body.walk() if "write" in n.op.effects}
        if not apart and any(v.type.space == GLOBAL for v in self.written):  # type: ignore[union-attr]
            self.written |= set(align)

    def found(self) -> Fetches:
        """The loads that fit, with what computes their places."""
        operands = [v for n in self.body.nodes if n.op in PRODUCTS for v in n.args[-2:]]
        loads = [n for v in operands if (n := self._load(v)) is not None and self._fits(n)]
        needed: set[Node] = set()
        for load in loads:
            for v in load.args[1:]:
                needed |= self._cone(v) or set()
        ordered = tuple(n for n in self.body.nodes if n in needed)
        units = {n: self._unit(n) for n in dict.fromkeys(loads)}
        copied = tuple(n for n, unit in units.items() if unit >= LEAST and not masked(n))
        held = {n: _registers(n, unit) for n, unit in units.items() if n not in copied}
        return Fetches(copied, held, ordered)

    def _load(self, v: Value) -> Node | None:
        """The load in the loop's body that an operand comes from by views and casts."""
        node = self.inside.get(v)
        while node is not None and node.op in VIEWS:
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
        """The bytes that one copy can move."""
        ref, *operands = load.args
        starts = operands[: ref.type.rank]  # type: ignore[union-attr]
        m = Memory(ref.type.dtype, GLOBAL, "", sizes(ref), self.align[ref])  # type: ignore[union-attr]
        block = tuple(load.attrs["shape"])
        length = together(self.producers, m, starts, block, VECTOR_BYTES // size(m.dtype))
        while length > 1 and (block[-1] % length or m.shape[-1] % length):
            length //= 2
        return length * size(m.dtype)

    def _cone(self, v: Value) -> set[Node] | None:
        """The nodes of the body that a place or a mask is computed by; None if more than the index goes into it."""
        if v not in self.variable:
            return set()
        node = self.inside.get(v)
        if node is None or not (early(node) or node.op.pointwise or node.op in MADE):
            return None
        parts = [self._cone(x) for x in node.args]
        return None if any(p is None for p in parts) else {node}.union(*(p for p in parts if p is not None))


def masked(load: Node) -> bool:
    """Whether a mask leaves parts of a block out."""
    return len(load.args) > 1 + load.args[0].type.rank  # type: ignore[union-attr]


def _registers(load: Node, unit: int) -> int:
    """The registers of all threads that hold a block: elements of 16 bits that come by twos take half."""
    count, each = math.prod(sizes(load.out)), size(load.out.type.dtype)  # type: ignore[union-attr]
    return count * each // LEAST if unit >= LEAST else count
