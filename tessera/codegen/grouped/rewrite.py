"""Groups on a processor: the tiles of a group become the leading axis of every block that differs between them.

A processor runs the whole group as one program: each op is done for all tiles before the next
begins, so that barriers have nothing left to do. A tile-varying scalar becomes a block of `group`
elements, a tile-varying block gets a leading axis of that size, and what is the same for all stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.evaluate import evaluate
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Function, Module, Node, Value
from tessera.op import Op, Rules
from tessera.ops import basic, checks, elementwise, mbarrier, shape, tile
from tessera.ops import group as group_ops
from tessera.passes.behind import with_what_follows
from tessera.types import DType, RefType, int64

lift = Rules("group")
# What is rewritten even where a group has one tile.
TOGETHER = (group_ops.collect, group_ops.exchange, group_ops.meet, checks.assert_, checks.print_, *mbarrier.OPS)
Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Part:
    """A value of the new function, and whether it differs between tiles (then its first axis is theirs)."""

    value: Value
    varying: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape for one tile."""
        whole = self.value.type.shape
        return tuple(int(n) for n in (whole[1:] if self.varying else whole))


class Group:
    """The rewriting of one function; `active` says which tiles run here (None: all).

    Code is for `size` tiles at once: all `total` of them, or a stretch by itself, whose first one is then `alone`.
    """

    def __init__(self, size: int) -> None:
        self.size = self.total = size
        self.alone: Value | None = None
        self.b = Builder()
        self.active: Value | None = None
        self.uneven = False  # whether a wait has been met that differs between tiles

    def add(self, op: Op, *args: Value, **attrs: Any) -> Value:
        """Record an op."""
        return self.b.add(op, args, attrs).out

    def tiles(self) -> Value:
        """The number of each tile here."""
        if self.alone is not None and self.size == 1:
            return self.reshape(self.alone, (1,))
        here = self.add(shape.iota, shape=(self.size,), axis=-1, dtype=int64)
        return here if self.alone is None else self.add(elementwise.add, here, self.broadcast(self.alone, (self.size,)))

    def first(self) -> Value:
        """The number of the first tile here."""
        return self.full(0, int64) if self.alone is None else self.alone

    def seen(self, v: Value, mask: bool = False) -> Value:
        """A block of tiles here as one of the whole group, for reports; a mask holds for no others."""
        if self.alone is None:
            return v
        rest = tuple(int(n) for n in v.type.shape[1:])
        stretches = self.total // self.size
        every = self.broadcast(self.reshape(v, (1, self.size, *rest)), (stretches, self.size, *rest))
        if mask:
            begins = self.add(shape.iota, shape=(stretches,), axis=-1, dtype=int64)
            begins = self.add(elementwise.mul, begins, self.full(self.size, int64, stretches))
            mine = self.add(elementwise.equal, begins, self.broadcast(self.alone, (stretches,)))
            mine = self.broadcast(self.reshape(mine, (stretches, 1, *(1,) * len(rest))), (stretches, self.size, *rest))
            every = self.add(elementwise.bitwise_and, every, mine)
        return self.reshape(every, (self.total, *rest))

    def full(self, value: Any, dtype: DType, *sizes: int) -> Value:
        """A constant block."""
        return self.add(basic.full, shape=sizes, value=value, dtype=dtype)

    def whole(self, part: Part) -> Value:
        """A part with the tiles' axis, all of it."""
        return part.value if part.varying else self.broadcast(part.value, (self.size, *part.shape))

    def broadcast(self, v: Value, sizes: Sequence[int]) -> Value:
        """A block repeated."""
        return v if tuple(v.type.shape) == tuple(sizes) else self.add(basic.broadcast_to, v, shape=tuple(sizes))

    def reshape(self, v: Value, sizes: Sequence[int]) -> Value:
        """A block in another shape."""
        return v if tuple(v.type.shape) == tuple(sizes) else self.add(shape.reshape, v, shape=tuple(sizes))

    def ranked(self, part: Part, rank: int) -> Value:
        """A part with axes of size 1 put in so that it broadcasts with blocks of `rank` axes for each tile."""
        missing = (1,) * (rank - len(part.shape))
        if part.varying:
            return self.reshape(part.value, (self.size, *missing, *part.shape))
        return self.reshape(part.value, (*missing, *part.shape))

    def both(self, a: Value | None, b: Value | None) -> Value | None:
        """Where two masks hold, broadcast together."""
        if a is None or b is None:
            return a or b
        sizes = _together(a.type.shape, b.type.shape)
        return self.add(elementwise.bitwise_and, self.broadcast(a, sizes), self.broadcast(b, sizes))

    def running(self, rank: int) -> Value | None:
        """The mask of active tiles, for blocks of `rank` axes."""
        return None if self.active is None else self.ranked(Part(self.active, True), rank)

    def meaning(self, node: Node, args: list[Part], run: Run) -> Sequence[Part]:
        """A node rewritten."""
        with self.b.at(node.loc):
            return lift.of(node.op)(self, node, args, run) if node.op in lift else _plain(self, node, args)


def _together(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b), strict=True)
    return tuple(int(m if n == 1 else n) for m, n in pairs)


def ungroup(module: Module) -> Module:
    """A Tile module whose functions all run one tile for each program."""
    return module.replace(module.functions[0], *(_ungrouped(f) for f in module.functions[1:]))


def _ungrouped(function: Function) -> Function:
    size = int(function.attrs.get("group", 1))
    if size == 1 and not any(n.op in TOGETHER for n in function.body.walk()):
        return function
    function, group = with_what_follows(function), Group(size)
    params = [Value(p.type, p.hint) for p in function.params]
    evaluate(function.body, [Part(p) for p in params], group.meaning)
    attrs = Attrs({**function.attrs, "group": 1, "tiles": size})
    return Function(function.name, group.b.block(params, ()), attrs, function.loc)


def _plain(group: Group, node: Node, args: list[Part]) -> Sequence[Part]:
    """An op that does not see leading axes: reductions count axes from the end, a dot takes them as a batch."""
    varying = any(p.varying for p in args)
    values = [group.whole(p) if varying and not isinstance(p.value.type, RefType) else p.value for p in args]
    return [Part(v, varying) for v in group.b.add(node.op, values, node.attrs).results]


@lift(tile.local_id)
def _(group, node, args, run):
    return [Part(group.tiles(), True)]


@lift(tile.group_size)
def _(group, node, args, run):
    return [Part(group.full(group.total, int64))]


@lift(tile.barrier, tile.async_commit, tile.async_wait)
def _(group, node, args, run):
    return []


@lift(basic.broadcast_to)
def _(group, node, args, run):
    (x,), sizes = args, node.attrs["shape"]
    if not x.varying:
        return [Part(group.broadcast(x.value, sizes))]
    return [Part(group.broadcast(group.ranked(x, len(sizes)), (group.size, *sizes)), True)]


@lift(shape.reshape)
def _(group, node, args, run):
    (x,), sizes = args, node.attrs["shape"]
    return [Part(group.reshape(x.value, (group.size, *sizes) if x.varying else sizes), x.varying)]


@lift(shape.permute)
def _(group, node, args, run):
    (x,), axes = args, node.attrs["axes"]
    moved = (0, *(a + 1 for a in axes)) if x.varying else axes
    return [Part(group.add(shape.permute, x.value, axes=moved), x.varying)]
