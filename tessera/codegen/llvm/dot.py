"""Matrix products: operands packed or read in place, a loop over tiles, a micro-kernel for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.blocks import sizes
from tessera.codegen.llvm import memory
from tessera.codegen.llvm.element import value_at, widened
from tessera.codegen.llvm.lane import ZERO, Body, Index, Kind, Lane
from tessera.codegen.llvm.micro import Micro, shape_of
from tessera.codegen.llvm.nest import fill, lanes_for, nest, walk
from tessera.codegen.llvm.scratch import Memory, fit
from tessera.codegen.llvm.text import Loop
from tessera.codegen.llvm.transpose import Transpose
from tessera.codegen.llvm.types import register, size
from tessera.codegen.llvm.view import offset, view_of
from tessera.codegen.llvm.visit import visit
from tessera.ir.core import Node, Value
from tessera.ops import linalg

if TYPE_CHECKING:
    from tessera.codegen.llvm.kernel import Kernel

FEW_ROWS = 16  # with no more rows than this, B is read too seldom to be worth packing
SAME_SETS = 1024  # rows this many bytes apart (or a multiple) fight for the same cache sets


@dataclass(frozen=True)
class Part:
    """`count` pieces of `size` along an axis, from `first` on."""

    first: int
    count: int
    size: int


def parts(total: int, size: int) -> list[Part]:
    """An axis in pieces, the rest last."""
    whole = total // size
    found = [Part(0, whole, size), Part(whole * size, 1, total - whole * size)]
    return [p for p in found if p.count and p.size]


@visit(linalg.dot)
def _(kernel, node):
    if kernel.plan.deferred(node.out):
        return
    wide, out = node.args[0].type.accumulate, node.out
    exact = wide == out.type.dtype
    target = kernel.room(out) if exact else kernel.scratch.block(wide, out.type.shape, lanes_for(kernel, wide))
    Product(kernel, node, target, False).emit()
    kernel.buffers[out] = target
    if not exact and out in kernel.plan.target:
        rounded = kernel.room(out)
        fill(kernel, out, rounded)
        kernel.buffers[out] = rounded


def join(kernel: Kernel, node: Node, product: Value) -> None:
    """A sum with a product, added to the other summand in place."""
    other = node.args[1] if node.args[0] is product else node.args[0]
    target = kernel.room(node.out)
    kernel.move(other, target)
    with kernel.at(kernel.producers[product]):
        Product(kernel, kernel.producers[product], target, True).emit()
    kernel.buffers[node.out] = target


class Product:
    """One dot being emitted into `target`."""

    def __init__(self, kernel: Kernel, node: Node, target: Memory, add: bool) -> None:
        self.kernel, self.target, self.add = kernel, target, add
        self.a, self.b = node.args
        self.dtype = target.dtype
        *self.batch, self.rows, self.columns = sizes(node.out.type)
        self.depth = sizes(self.a.type)[-1]
        self.width = fit(lanes_for(kernel, self.dtype), self.columns)
        self.vectors = -(-self.columns // self.width)
        registers = 32 if kernel.vector_bytes == 64 else 16
        self.tile = shape_of(self.rows, self.vectors, registers)

    def emit(self) -> None:
        """Everything: for each index of the batch, the operands and the tiles."""
        views = [self._usable(self._view_a()), self._usable(self._view_b())]
        axes = [a for a, n in enumerate(self.batch) if n != 1]
        walk(self.kernel, self.batch, axes, [ZERO] * len(self.batch), lambda index: self._one(index, *views))

    def _usable(self, view: Memory | None) -> Memory | None:
        return view if view is not None and view.dtype == self.dtype else None

    def _view_a(self) -> Memory | None:
        """A in place, unless its rows fall upon the same cache sets and are read more than once."""
        view = view_of(self.kernel, self.a)
        if view is None:
            return None
        clash = view.strides[-2] * size(view.dtype) % SAME_SETS == 0 and view.strides[-2] > 0 and self.tile[0] > 4
        return None if clash and self.vectors > 2 * self.tile[1] else view

    def _view_b(self) -> Memory | None:
        """B in place where few rows of A use it; else its panels are packed, so that each is one stream."""
        if self.rows > FEW_ROWS:
            return None
        view = view_of(self.kernel, self.b)
        whole = self.columns % self.width == 0
        return view if view is not None and whole and view.strides[-1] == 1 else None

    def _one(self, index: list[Lane], a: Memory | None, b: Memory | None) -> None:
        a = self._at(a, index) if a is not None else self._packed_a(index)
        b = self._at(b, index) if b is not None else None
        c = self._at(self.target, index)
        for columns in self._columns():
            panels = self._panels(columns, b) if b is not None else self._packed_b(index, columns)
            with Loop(self.kernel.text, "0", str(columns.count)) as loop:
                self._rows(a, panels, c, Lane(loop.index), columns)

    def _columns(self) -> list[Part]:
        """The vectors of a row in panels; one that is not full stands in the last, alone."""
        whole = self.columns // self.width // self.tile[1]
        rest = Part(whole * self.tile[1], 1, self.vectors - whole * self.tile[1])
        return [p for p in (Part(0, whole, self.tile[1]), rest) if p.count and p.size]

    def _at(self, m: Memory, index: Sequence[Lane]) -> Memory:
        """A matrix of a batch."""
        base = offset(self.kernel, m, [*index, ZERO, ZERO])
        return m.at(base, m.strides[-2:], m.shape[-2:])

    def _rows(self, a: Memory, b: Memory, c: Memory, panel: Lane, columns: Part) -> None:
        """Every tile of one panel."""
        kernel, text = self.kernel, self.kernel.text
        first = text.add(str(columns.first * self.width), text.mul(panel.name, columns.size * self.width))
        for m in (a, b, c):
            kernel.scratch.touch(m)
        at_b = offset(kernel, b, [panel, ZERO, ZERO])
        for rows in parts(self.rows, self.tile[0]):
            micro = self._micro(rows, columns, a, b, c)
            with Loop(text, "0", str(rows.count)) as loop:
                row = Lane(text.add(str(rows.first), text.mul(loop.index, rows.size)))
                at_a, at_c = offset(kernel, a, [row, ZERO]), offset(kernel, c, [row, Lane(first)])
                text.line(f"call void @{micro.name}(ptr {at_a}, ptr {at_b}, ptr {at_c})")
                for m in (a, b, c):
                    kernel.scratch.touch(m)

    def _micro(self, rows: Part, columns: Part, a: Memory, b: Memory, c: Memory) -> Micro:
        t = register(self.dtype, self.width)
        strides = (a.strides[0], a.strides[1], b.strides[1], c.strides[0])
        micro = Micro(t, rows.size, columns.size, self.depth, *strides, self.add)
        self.kernel.library.need(micro.name, micro.text)
        return micro

    def _packed_a(self, index: list[Lane]) -> Memory:
        """A in rows, in the type that products are summed in."""
        row = -(-self.depth // self.width) * self.width
        row += self.width if row * size(self.dtype) % SAME_SETS == 0 else 0
        m = self.kernel.scratch.memory(self.dtype, (self.rows, self.depth), (row, 1))
        self._pack(self.a, m, lambda body, here: (*index, *here))
        return m

    def _packed_b(self, index: list[Lane], columns: Part) -> Memory:
        """The panels of B: each holds its rows one after the other."""
        across = columns.size * self.width
        shape = (columns.count, self.depth, min(across, self.columns - columns.first * self.width))
        m = self.kernel.scratch.memory(self.dtype, shape, (self.depth * across, across, 1))

        view = self._usable(view_of(self.kernel, self.b))
        if view is not None and self._turns(view, columns):
            self._turned(self._at(view, index), m, columns)
            return m

        def place(body: Body, here: Index) -> Index:
            panel, k, n = here
            text = body.text
            start = text.add(str(columns.first * self.width), text.mul(panel.name, across))
            return (*index, k, Lane(text.add(start, n.name), n.kind))

        self._pack(self.b, m, place)
        return m

    def _turns(self, view: Memory, columns: Part) -> bool:
        """Whether the columns of B lie contiguous, in whole squares of registers."""
        whole = (
            self.depth % self.width == 0 and (columns.first + columns.count * columns.size) * self.width <= self.columns
        )
        return whole and self.width > 1 and view.strides[-2] == 1 and view.strides[-1] > 1

    def _turned(self, b: Memory, m: Memory, columns: Part) -> None:
        """Pack columns that lie contiguous, square by square."""
        kernel, width = self.kernel, self.width
        turn = Transpose(register(self.dtype, width), b.strides[1], m.strides[1])
        kernel.library.need(turn.name, turn.text)
        squares = (columns.count, columns.size, self.depth // width)

        def one(index: list[Lane]) -> None:
            text, (panel, column, row) = kernel.text, index
            first = text.add(text.mul(panel.name, columns.size), text.add(column.name, str(columns.first)))
            k = Lane(text.mul(row.name, width))
            source = offset(kernel, b, [k, Lane(text.mul(first, width))])
            target = offset(kernel, m, [panel, k, Lane(text.mul(column.name, width))])
            text.line(f"call void @{turn.name}(ptr {source}, ptr {target})")
            kernel.scratch.touch(b)
            kernel.scratch.touch(m)

        walk(kernel, squares, range(3), [ZERO] * 3, one)

    def _panels(self, columns: Part, b: Memory) -> Memory:
        """B in place, seen as panels."""
        across = columns.size * self.width
        base = offset(self.kernel, b, [ZERO, Lane(str(columns.first * self.width))])
        return b.at(base, (across, b.strides[0], 1), (columns.count, self.depth, across))

    def _pack(self, v: Value, m: Memory, place: object) -> None:
        """Compute an operand into memory, whole vectors at a time: what follows the end is never used."""

        def visit_one(body: Body, here: Index) -> None:
            lane = widened(body, v.type.dtype, self.dtype, value_at(body, v, place(body, here)))  # type: ignore[operator]
            whole = Body(self.kernel, body.width)
            memory.store(whole, m, here, Lane(body.spread(lane, register(self.dtype, body.width)), Kind.VARYING))

        nest(self.kernel, m.shape, self.width, visit_one)
