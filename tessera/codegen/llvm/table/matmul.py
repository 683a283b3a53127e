"""Matrix products (Goto and van de Geijn 2008): packed panels, a loop over register tiles, a microkernel for each.

An operand in memory that needs no conversion is read through a strided view; columns are packed by transposes in
registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tessera.codegen.legality import static_shape
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import (
    allocate_block,
    choose_vector_width,
    emit_element,
    emit_loop_nest,
    emit_scalar_loops,
    materialise_block,
    move_block,
    offset_index,
    widen_lane,
)
from tessera.codegen.llvm.table.microkernels import MicroKernel, TransposeKernel, choose_register_tile
from tessera.codegen.llvm.table.pair_operands import (
    choose_pair_product,
    clear_last_column,
    emit_choice,
    find_least,
    get_packed_dtype,
    pack_pairs,
    require_pair_kernel,
    view_as_pairs,
)
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import (
    ZERO_LANE,
    LaneIndex,
    LaneKind,
    LaneValue,
    LoopBody,
    LoopBuilder,
    get_element_bytes,
    get_register_type,
)
from tessera.codegen.llvm.text.memory import StridedMemRef, compute_address, emit_pointer, fit_vector_width
from tessera.codegen.llvm.text.pair_products import BF16, EXACT_BF16
from tessera.core.symbolic_dim import Dim
from tessera.core.types import bf16, int32
from tessera.ir.core import Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


# Strided views: operands read in place instead of packed.


view_rule = Rules("llvm view")


def find_view(kernel: LlvmKernelContext, v: Value) -> StridedMemRef | None:
    """The memory that holds a block's elements in its own dtype, or None."""
    stored = kernel.buffers.get(v)
    if stored is not None:
        return stored if stored.dtype == v.type.dtype else None
    rule = view_rule.get(kernel.producers[v].op) if v in kernel.producers else None
    return rule(kernel, kernel.producers[v]) if rule is not None else None


def emit_element_pointer(kernel: LlvmKernelContext, m: StridedMemRef, index: list[LaneValue]) -> str:
    """The address of an element."""
    body = LoopBody(kernel)
    return emit_pointer(body, m, compute_address(body, m, tuple(index)))


@view_rule(tile.load)
def _(kernel, node):
    ref, rest = node.args[0], node.args[1:]
    m, starts = kernel.memrefs[ref], rest[: ref.type.rank]
    clip = node.attrs["edge"] == "clip" and kernel.ranges.find_unproven_axes(starts, node.attrs["shape"], m.shape)
    if clip or len(rest) > ref.type.rank:
        return None
    inner_index = offset_index(LoopBody(kernel), starts, tuple(LaneValue("0") for _ in starts))
    return m.at(emit_element_pointer(kernel, m, list(inner_index)), m.strides, node.attrs["shape"])


@view_rule(shape.permute)
def _(kernel, node):
    inner = find_view(kernel, node.args[0])
    if inner is None:
        return None
    axes = node.attrs["axes"]
    return inner.at(inner.base, tuple(inner.strides[a] for a in axes), tuple(inner.shape[a] for a in axes))


@view_rule(shape.reshape)
def _(kernel, node):
    inner_index, target_shape = node.args[0].type.shape, node.attrs["shape"]
    inner = find_view(kernel, node.args[0])
    if inner is None or [n for n in inner_index if n != 1] != [n for n in target_shape if n != 1]:
        return None
    stored = iter(s for s, n in zip(inner.strides, inner_index, strict=True) if n != 1)
    return inner.at(inner.base, tuple(next(stored) if n != 1 else 0 for n in target_shape), target_shape)


@view_rule(basic.broadcast_to)
def _(kernel, node):
    inner = find_view(kernel, node.args[0])
    if inner is None:
        return None
    target_shape = node.attrs["shape"]
    strides = tuple(s if n != 1 else 0 for s, n in zip(inner.strides, inner.shape, strict=True))
    return inner.at(inner.base, (0,) * (len(target_shape) - len(strides)) + strides, target_shape)


# Matrix products: packing, the loop over register tiles, calls of microkernels.


MAX_UNPACKED_ROWS = 16  # with at most these rows, packing B costs more than it saves
CACHE_SET_STRIDE = 1024  # rows at multiples of this stride in bytes map to the same cache sets


@dataclass(frozen=True)
class AxisTiles:
    """`count` pieces of `size` along an axis, starting at `first`."""

    first: int
    count: int
    size: int


def split_axis(total: int, size: int) -> list[AxisTiles]:
    """An axis in pieces, the remainder last."""
    is_whole = total // size
    result = [AxisTiles(0, is_whole, size), AxisTiles(is_whole * size, 1, total - is_whole * size)]
    return [p for p in result if p.count and p.size]


@statement_rule(contractions.dot)
def _(kernel, node):
    if kernel.plan.is_deferred(node.out):
        return
    wide, out = node.args[0].type.accumulate, node.out
    exact = wide == out.type.dtype
    target = (
        allocate_block(kernel, out)
        if exact
        else kernel.scratch.allocate_block(wide, out.type.shape, choose_vector_width(kernel, wide))
    )
    MatmulEmitter(kernel, node, target, False).emit()
    kernel.buffers[out] = target
    if not exact and out in kernel.plan.target:
        rounded = allocate_block(kernel, out)
        materialise_block(kernel, out, rounded)
        kernel.buffers[out] = rounded


def accumulate_product(kernel: LlvmKernelContext, node: Node, product: Value) -> None:
    """A sum with a dot operand: the dot accumulates into the memory of the other operand."""
    other = node.args[1] if node.args[0] is product else node.args[0]
    target = allocate_block(kernel, node.out)
    move_block(kernel, other, target)
    with kernel.at_node(kernel.producers[product]):
        MatmulEmitter(kernel, kernel.producers[product], target, True).emit()
    kernel.buffers[node.out] = target


class MatmulEmitter:
    """Emits one dot into `target`."""

    def __init__(self, kernel: LlvmKernelContext, node: Node, target: StridedMemRef, add: bool) -> None:
        self.kernel, self.target, self.add = kernel, target, add
        self.a, self.b = node.args
        self.dtype = target.dtype
        *self.batch, self.rows, self.columns = static_shape(node.out.type)
        self.depth = static_shape(self.a.type)[-1]
        self.width = fit_vector_width(choose_vector_width(kernel, self.dtype), self.columns)
        self.vectors = -(-self.columns // self.width)
        registers = 32 if kernel.vector_bytes == 64 else 16
        self.tile = choose_register_tile(self.rows, self.vectors, registers)
        self.pair = choose_pair_product(kernel, self.a, self.b, self.dtype, self.width)
        self.steps = -(-self.depth // 2) if self.pair else self.depth  # of a microkernel along K
        self.choice = ""  # whether the instruction for pairs of bf16 may be used

    def emit(self) -> None:
        """Emit packing and tiles for each index of the batch axes."""
        views = [self._view_a(), self._view_b()]
        axes = [a for a, n in enumerate(self.batch) if n != 1]
        emit_scalar_loops(
            self.kernel, self.batch, axes, [ZERO_LANE] * len(self.batch), lambda index: self._emit_matrix(index, *views)
        )

    def _check_dtype(self, view: StridedMemRef | None) -> StridedMemRef | None:
        """A view in the accumulator type; the strides of a matrix are constants of a microkernel."""
        if view is None or view.dtype != self.dtype or any(isinstance(s, Dim) for s in view.strides[-2:]):
            return None
        return view

    def _view_a(self) -> StridedMemRef | None:
        """A in place, unless its rows map to the same cache sets and are read more than once."""
        view = find_view(self.kernel, self.a)
        if not view_as_pairs(view, self.pair):
            view = None if self.pair else self._check_dtype(view)
        if view is None:
            return None
        conflicts = (
            view.strides[-2] * get_element_bytes(view.dtype) % CACHE_SET_STRIDE == 0
            and view.strides[-2] > 0
            and self.tile[0] > 4
        )
        return None if conflicts and self.vectors > 2 * self.tile[1] else view

    def _view_b(self) -> StridedMemRef | None:
        """B in place if few rows of A use it; otherwise its panels are packed, so that each is read sequentially."""
        if self.rows > MAX_UNPACKED_ROWS or self.pair:
            return None
        view = self._check_dtype(find_view(self.kernel, self.b))
        is_whole = self.columns % self.width == 0
        return view if view is not None and is_whole and view.strides[-1] == 1 else None

    def _emit_matrix(self, index: list[LaneValue], a: StridedMemRef | None, b: StridedMemRef | None) -> None:
        a = self._select_matrix(a, index) if a is not None else self._pack_a(index)
        b = self._select_matrix(b, index) if b is not None else None
        c = self._select_matrix(self.target, index)
        least = find_least(self.kernel, a, self.rows, int(a.strides[0]), self.depth) if self.pair is BF16 else ""
        for columns in self._split_columns():
            panels = self._view_as_panels(columns, b) if b is not None else self._pack_b(index, columns)
            if self.pair is BF16:
                self.choice = emit_choice(self.kernel, least, self._find_least_of_panels(panels))
            with LoopBuilder(self.kernel.text, "0", str(columns.count)) as loop:
                self._emit_panel(a, panels, c, LaneValue(loop.index), columns)

    def _split_columns(self) -> list[AxisTiles]:
        """The vectors of a row in panels; a partial panel is last."""
        is_whole = self.columns // self.width // self.tile[1]
        rest = AxisTiles(is_whole * self.tile[1], 1, self.vectors - is_whole * self.tile[1])
        return [p for p in (AxisTiles(0, is_whole, self.tile[1]), rest) if p.count and p.size]

    def _select_matrix(self, m: StridedMemRef, index: Sequence[LaneValue]) -> StridedMemRef:
        """A matrix of a batch."""
        base = emit_element_pointer(self.kernel, m, [*index, ZERO_LANE, ZERO_LANE])
        return m.at(base, m.strides[-2:], m.shape[-2:])

    def _emit_panel(
        self, a: StridedMemRef, b: StridedMemRef, c: StridedMemRef, panel: LaneValue, columns: AxisTiles
    ) -> None:
        """Every register tile of one panel."""
        kernel, text = self.kernel, self.kernel.text
        first = text.add(str(columns.first * self.width), text.mul(panel.name, columns.size * self.width))
        for m in (a, b, c):
            kernel.scratch.record_access(m)
        at_b = emit_element_pointer(kernel, b, [panel, ZERO_LANE, ZERO_LANE])
        for rows in split_axis(self.rows, self.tile[0]):
            name = self._require_microkernel(rows, columns, a, b, c)
            with LoopBuilder(text, "0", str(rows.count)) as loop:
                row = LaneValue(text.add(str(rows.first), text.mul(loop.index, rows.size)))
                at_a, at_c = (
                    emit_element_pointer(kernel, a, [row, ZERO_LANE]),
                    emit_element_pointer(kernel, c, [row, LaneValue(first)]),
                )
                choice = f", i1 {self.choice}" if self.choice else ""
                text.line(f"call void @{name}(ptr {at_a}, ptr {at_b}, ptr {at_c}{choice})")
                for m in (a, b, c):
                    kernel.scratch.record_access(m)

    def _require_microkernel(
        self, rows: AxisTiles, columns: AxisTiles, a: StridedMemRef, b: StridedMemRef, c: StridedMemRef
    ) -> str:
        """Define the microkernel of a panel; its name."""
        t = get_register_type(self.dtype, self.width)
        a_depth = 2 if self.pair else int(a.strides[1])
        strides = (int(a.strides[0]), a_depth, int(b.strides[1]), int(c.strides[0]))
        micro = MicroKernel(t, rows.size, columns.size, self.steps, *strides, self.add, self.pair)
        if self.pair:
            exact = replace(micro, pair=EXACT_BF16) if self.pair is BF16 else None
            return require_pair_kernel(self.kernel, micro, exact)
        return self.kernel.library.require(micro.name, micro.text)

    def _find_least_of_panels(self, b: StridedMemRef) -> str:
        """The least element of packed panels."""
        panels, pairs, columns = (int(n) for n in b.shape)
        return find_least(self.kernel, b, panels * pairs, 2 * int(b.strides[1]), 2 * columns)

    def _pack_a(self, index: list[LaneValue]) -> StridedMemRef:
        """A packed row-major in the accumulator type, or as numbers of 16 bits."""
        dtype = get_packed_dtype(self.pair) if self.pair else self.dtype
        row = -(-self.depth // self.width) * self.width
        row += self.width if row * get_element_bytes(dtype) % CACHE_SET_STRIDE == 0 else 0
        m = self.kernel.scratch.allocate(dtype, (self.rows, self.depth), (row, 1))
        self._pack_operand(self.a, m, lambda body, inner_index: (*index, *inner_index))
        if self.pair and self.depth % 2:
            clear_last_column(self.kernel, m, self.depth)
        return m

    def _pack_b(self, index: list[LaneValue], columns: AxisTiles) -> StridedMemRef:
        """B packed in panels; a panel's rows are contiguous."""
        panel_columns = columns.size * self.width
        dtype = int32 if self.pair else self.dtype
        shape = (columns.count, self.steps, min(panel_columns, self.columns - columns.first * self.width))
        m = self.kernel.scratch.allocate(dtype, shape, (self.steps * panel_columns, panel_columns, 1))

        view = self._view_columns(index)
        if view is not None and self._is_transposable(view, columns):
            self._pack_transposed(view, m, columns)
            return m

        def place(body: LoopBody, inner_index: LaneIndex) -> LaneIndex:
            panel, k, n = inner_index
            text = body.text
            start = text.add(str(columns.first * self.width), text.mul(panel.name, panel_columns))
            return (*index, k, LaneValue(text.add(start, n.name), n.kind))

        if self.pair:
            pack_pairs(self.kernel, self.b, m, place, self.depth)
        else:
            self._pack_operand(self.b, m, place)
        return m

    def _view_columns(self, index: list[LaneValue]) -> StridedMemRef | None:
        """A matrix B in memory whose columns may be transposed; a column of pairs is one of integers of 32 bits."""
        view = find_view(self.kernel, self.b)
        if not self.pair:
            view = self._check_dtype(view)
            return self._select_matrix(view, index) if view is not None else None
        if view is None or self.pair is not BF16 or view.dtype != bf16 or view.strides[-2] != 1 or self.depth % 2:
            return None
        if not isinstance(view.strides[-1], int) or view.strides[-1] % 2:
            return None
        m = self._select_matrix(view, index)
        return StridedMemRef(int32, m.base, (self.steps, self.columns), (1, int(m.strides[1]) // 2), m.buffer)

    def _is_transposable(self, view: StridedMemRef, columns: AxisTiles) -> bool:
        """Whether the columns of B are contiguous and divide into squares of the register width."""
        is_whole = (
            self.steps % self.width == 0 and (columns.first + columns.count * columns.size) * self.width <= self.columns
        )
        return is_whole and self.width > 1 and view.strides[-2] == 1 and view.strides[-1] > 1

    def _pack_transposed(self, b: StridedMemRef, m: StridedMemRef, columns: AxisTiles) -> None:
        """Pack contiguous columns, square by square."""
        kernel, width = self.kernel, self.width
        aligned = 2 if self.pair else get_element_bytes(self.dtype)
        t = get_register_type(m.dtype, width)
        transpose = TransposeKernel(t, int(b.strides[1]), int(m.strides[1]), aligned)
        kernel.library.require(transpose.name, transpose.text)
        squares = (columns.count, columns.size, self.steps // width)

        def one(index: list[LaneValue]) -> None:
            text, (panel, column, row) = kernel.text, index
            first = text.add(text.mul(panel.name, columns.size), text.add(column.name, str(columns.first)))
            k = LaneValue(text.mul(row.name, width))
            source = emit_element_pointer(kernel, b, [k, LaneValue(text.mul(first, width))])
            target = emit_element_pointer(kernel, m, [panel, k, LaneValue(text.mul(column.name, width))])
            text.line(f"call void @{transpose.name}(ptr {source}, ptr {target})")
            kernel.scratch.record_access(b)
            kernel.scratch.record_access(m)

        emit_scalar_loops(kernel, squares, range(3), [ZERO_LANE] * 3, one)

    def _view_as_panels(self, columns: AxisTiles, b: StridedMemRef) -> StridedMemRef:
        """B in place, viewed as panels."""
        panel_columns = columns.size * self.width
        base = emit_element_pointer(self.kernel, b, [ZERO_LANE, LaneValue(str(columns.first * self.width))])
        return b.at(base, (panel_columns, b.strides[0], 1), (columns.count, self.depth, panel_columns))

    def _pack_operand(self, v: Value, m: StridedMemRef, place: object) -> None:
        """Compute an operand into memory, full vectors at a time: elements past the end of a row are never used.

        Where rows have one element, a vector holds several rows, and those past the last one are not in the memory.
        """
        padded = m.shape[-1] != 1

        def visit_one(body: LoopBody, inner_index: LaneIndex) -> None:
            lane = widen_lane(body, v.type.dtype, m.dtype, emit_element(body, v, place(body, inner_index)))  # type: ignore[operator]
            memory.store_lane(
                LoopBody(self.kernel, body.width) if padded else body,
                m,
                inner_index,
                LaneValue(body.broadcast_lane(lane, get_register_type(m.dtype, body.width)), LaneKind.VARYING),
            )

        emit_loop_nest(self.kernel, [int(n) for n in m.shape], self.width, visit_one)
