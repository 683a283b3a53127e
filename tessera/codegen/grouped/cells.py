"""What is kept while tiles wait: values in memory of the program, and the code that runs round after round on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tessera.codegen.blocks import sizes
from tessera.codegen.grouped.control import region
from tessera.codegen.grouped.rewrite import Group, Part
from tessera.ir.core import Node, Value
from tessera.ops import control, elementwise, reduce, tile
from tessera.types import REGISTER, RefType, TensorType, bool_, int64, scalar


@dataclass(frozen=True)
class Cell:
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
        return sizes(self.type)[1:] if self.varying else sizes(self.type)


class Tasks:
    """The cells of branches that run in turn; `moved`: one has got on in this round, `last`: none can any more.

    `apart`: stretches of `together` tiles are to run by themselves, since they wait for something else than the others.
    """

    def __init__(self, group: Group, apart: bool, together: int = 1) -> None:
        self.group, self.apart, self.together = group, apart, together
        self.made: list[Node] = []
        self.moved, self.last = self.cell(scalar(bool_)), self.cell(scalar(bool_))

    def cell(self, type: TensorType, varying: bool = False, own: bool = False) -> Cell:
        """Room for a value, made before all that runs in turn; `own`: one for each tile."""
        cell = Cell(Value(type), type, varying, own)
        room = (self.group.total, *cell.one) if own else sizes(type) or (1,)
        ref = RefType(room, type.dtype, REGISTER, type.policy)
        attrs = {"shape": ref.shape, "dtype": ref.dtype, "space": REGISTER}
        with self.group.b.region() as nodes:
            made = self.group.b.add(tile.alloc, [], attrs, types=(ref,)).out
        self.made += nodes
        return replace(cell, ref=made)

    def put(self, cell: Cell, value: Value) -> None:
        """Keep a value."""
        block = self.group.reshape(value, self._room(cell))
        if cell.own and not cell.varying and self.group.alone is not None:  # what is the same for a stretch
            block = self.group.broadcast(block, (self.group.size, *cell.one))
        self.group.b.add(tile.store, [cell.ref, block, *self._origin(cell)], {"edge": "error"})

    def get(self, cell: Cell) -> Part:
        """What is kept."""
        room = self._room(cell)
        block = self.group.b.add(tile.load, [cell.ref, *self._origin(cell)], {"shape": room, "edge": "error"}).out
        if cell.own and self.group.alone is None:
            return Part(block, True)
        return Part(self.group.reshape(block, sizes(cell.type)), cell.varying)

    def _room(self, cell: Cell) -> tuple[int, ...]:
        """The shape of what is read and written of a cell here."""
        if not cell.own:
            return sizes(cell.type) or (1,)
        return (self.group.size if cell.varying or self.group.alone is None else 1, *cell.one)

    def _origin(self, cell: Cell) -> list[Value]:
        rest = [self.group.full(0, int64)] * len(self._room(cell))
        return [self.group.first(), *rest[1:]] if cell.own else rest

    def keep(self, part: Part) -> Cell:
        """A new cell with a value; of tiles by themselves, their own."""
        type = part.value.type
        assert isinstance(type, TensorType)
        cell = self.cell(type, part.varying, self.group.alone is not None)
        self.put(cell, part.value)
        return cell

    def shared_out(self, part: Part) -> Cell:
        """A new cell in which each tile finds its part of a value that differs between tiles."""
        type = part.value.type
        assert isinstance(type, TensorType)
        cell = self.cell(type.with_shape((self.together, *part.shape)), True, own=True)
        self.put(cell, part.value)
        return cell

    def each(self, body: Callable[[], Any]) -> None:
        """Code that every tile, or stretch of tiles, runs by itself, one after the other."""
        group = self.group

        def one(first: Value) -> list[Value]:
            before = group.size, group.active
            group.size, group.active, group.alone = self.together, None, first
            body()
            (group.size, group.active), group.alone = before, None
            return []

        bounds = [group.full(n, int64) for n in (0, group.total, self.together)]
        group.b.add(control.for_, bounds, types=(), regions=(region(group, [scalar(int64)], one),))

    def stretches(self, mask: Value) -> Value:
        """For each tile, whether any of those that it runs together with is in a mask."""
        if self.together == 1:
            return mask
        group, count = self.group, self.group.total // self.together
        each = group.add(reduce.max, group.reshape(mask, (count, self.together)), axis=(-1,), keepdims=True)
        return group.reshape(group.broadcast(each, (count, self.together)), (group.total,))

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

        blocks = (region(self.group, (), taken), region(self.group, (), list))
        self.group.b.add(control.if_, [condition], types=(), regions=blocks)

    def repeat(self, first: Value, body: Callable[[], Value]) -> None:
        """Rounds for as long as a scalar holds; `body()` gives it for the next round."""
        blocks = (
            region(self.group, [scalar(bool_)], lambda go: [go]),
            region(self.group, [scalar(bool_)], lambda go: [body()]),
        )
        self.group.b.add(control.while_, [first], types=(scalar(bool_),), regions=blocks)
