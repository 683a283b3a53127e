"""Matrix products (Goto and van de Geijn 2008): packed panels, a loop over register tiles, a microkernel for each.

An operand in memory that needs no conversion is read through a strided view; columns are packed by transposes in
registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tessera.codegen.contract import static_shape
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.indexed_operands import (
    IndexedMatrix,
    IndexedRows,
    find_indexed_matrix,
    find_indexed_rows,
)
from tessera.codegen.llvm.table.loop_fusion import (
    allocate_block,
    choose_vector_width,
    emit_element,
    emit_loop_nest,
    emit_scalar_loops,
    materialise_block,
    move_block,
    widen_lane,
)
from tessera.codegen.llvm.table.microkernels import MicroKernel, choose_register_tile
from tessera.codegen.llvm.table.pair_operands import (
    choose_pair_product,
    clear_last_columns,
    emit_choice,
    emit_offsets,
    find_flipped_bits,
    find_least,
    get_packed_dtype,
    pack_pairs,
    require_pair_kernel,
    view_as_pairs,
)
from tessera.codegen.llvm.table.row_packing import (
    CONVERTED,
    choose_source,
    copy_panels,
    copy_rows,
    has_contiguous_rows,
)
from tessera.codegen.llvm.table.strided_views import ClippedView, emit_element_pointer, find_clipped_view, find_view
from tessera.codegen.llvm.table.transposes import Squares, emit_transposes
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import (
    NARROW_FLOATS,
    ZERO_LANE,
    LaneIndex,
    LaneKind,
    LaneValue,
    LoopBody,
    LoopBuilder,
    get_element_bytes,
    get_register_type,
)
from tessera.codegen.llvm.text.memory import StridedMemRef, fit_vector_width
from tessera.codegen.llvm.text.pair_products import BF16, EXACT_BF16, INT16
from tessera.codegen.llvm.text.panel_kernels import MATRIX_UNITS, PanelKernel
from tessera.core.symbolic_dim import Dim, round_up
from tessera.core.types import DType, bf16, f32, int8, int32, uint8
from tessera.ir.core import Node, Value
from tessera.ops.tensor import contractions, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


# Matrix products: packing, the loop over register tiles, calls of microkernels.


MAX_UNPACKED_ROWS = 16  # with at most these rows, packing B costs more than it saves
MAX_SCATTERED_VECTORS = 2  # registers of a panel for a gathered A
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
    wide = f32 if wide in NARROW_FLOATS else wide  # the microkernel keeps its sums in registers, and adds to memory
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
        self.registers = 32 if kernel.vector_bytes == 64 else 16
        self.tile = choose_register_tile(self.rows, self.vectors, self.registers)
        self.pair = choose_pair_product(kernel, self.a, self.b, self.dtype, self.width)
        self.parts = self.pair.parts if self.pair else 1  # elements of K in a lane
        self.steps = -(-self.depth // self.parts)  # of a microkernel along K
        self.flipped = find_flipped_bits(self.pair, self.b)
        self.choice = ""  # whether the instruction for pairs of bf16 may be used
        self.offsets: StridedMemRef | None = None  # what the sums of each row begin with
        self.windows: IndexedMatrix | None = None  # A, where it is gathered and read in place
        self.lines: IndexedRows | None = None  # the same of B

    def emit(self) -> None:
        """Emit packing and tiles for each index of the batch axes."""
        self._keep_merged_columns()
        self._find_indexed()
        views = [None if self.windows else self._view_a(), self._view_b()]
        axes = [a for a, n in enumerate(self.batch) if n != 1]
        emit_scalar_loops(
            self.kernel, self.batch, axes, [ZERO_LANE] * len(self.batch), lambda index: self._emit_matrix(index, *views)
        )

    def _find_indexed(self) -> None:
        """The operand that is gathered and read in place, if there is one."""
        if self.pair is None and find_clipped_view(self.kernel, self.a) is None:
            # Rows of A that lie apart are read from the second cache by every panel: many of them share a load of B.
            widest = min(self.vectors, MAX_SCATTERED_VECTORS)
            tile = choose_register_tile(self.rows, widest, self.registers)
            self.windows = find_indexed_matrix(self.kernel, self.a, self.dtype, ahead=tile[0])
            self.tile = tile if self.windows else self.tile
        elif self.pair is None and self.columns % self.width == 0 and find_clipped_view(self.kernel, self.b) is None:
            self.lines = find_indexed_rows(self.kernel, self.b, self.dtype)

    def _keep_merged_columns(self) -> None:
        """Compute B whose columns are several axes into memory along these: the lanes of a panel cross their ends."""
        node = self.kernel.producers.get(self.b)
        if self.b in self.kernel.buffers or node is None or node.op is not shape.reshape:
            return
        (source,), fine = node.args, static_shape(node.args[0].type)
        merges = len(fine) == len(self.batch) + 3 and fine[:-2] == (*self.batch, self.depth)[: len(fine) - 2]
        inner = fine[-1] if merges else 0
        if not merges or source in self.kernel.buffers or inner % self.width == 0 or 2 * inner < self.width:
            return
        memory = self.kernel.scratch.allocate_block(source.type.dtype, static_shape(self.b.type), self.width)
        *outer, row, _ = memory.strides
        materialise_block(self.kernel, source, memory.at(memory.base, (*outer, row, inner, 1), fine))
        self.kernel.buffers[self.b] = memory

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

    def _streams(self, a: StridedMemRef) -> bool:
        """Whether rows of A come from memory: what is packed lies in a cache, and so does what few panels read twice.

        Rows that map to the same cache sets would displace each other.
        """
        return a.buffer is None and int(a.strides[0]) * get_element_bytes(a.dtype) % CACHE_SET_STRIDE != 0

    def _view_b(self) -> StridedMemRef | None:
        """B in place if few rows of A use it; otherwise its panels are packed, so that each is read sequentially."""
        if self.lines is not None:
            return StridedMemRef(
                self.dtype, self.lines.base, static_shape(self.b.type), (0,) * len(self.batch) + (0, 1)
            )
        if self.pair or (self.rows > MAX_UNPACKED_ROWS and self.windows is None):
            return None
        view = self._check_dtype(find_view(self.kernel, self.b))
        is_whole = self.columns % self.width == 0
        return view if view is not None and is_whole and view.strides[-1] == 1 else None

    def _emit_matrix(self, index: list[LaneValue], a: StridedMemRef | None, b: StridedMemRef | None) -> None:
        if self.windows is not None:
            a = self.windows.rows
        else:
            a = self._select_matrix(a, index) if a is not None else self._pack_a(index)
        b = self._select_matrix(b, index) if b is not None else None
        c = self._select_matrix(self.target, index)
        if self.pair and self.flipped:
            self.offsets = emit_offsets(self.kernel, a, self.rows, self.depth, self.pair)
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
        if self.pair in MATRIX_UNITS:
            name = self._require_panel_kernel(columns, a, b, c)
            at_a, at_c = (
                emit_element_pointer(kernel, m, [ZERO_LANE, n]) for m, n in ((a, ZERO_LANE), (c, LaneValue(first)))
            )
            text.line(f"call void @{name}(ptr {at_a}, ptr {at_b}, ptr {at_c}{self._format_extra(ZERO_LANE)})")
            for m in (a, b, c, *((self.offsets,) if self.offsets else ())):
                kernel.scratch.record_access(m)
            return
        for rows in split_axis(self.rows, self.tile[0]):
            name = self._require_microkernel(rows, columns, a, b, c)
            with LoopBuilder(text, "0", str(rows.count)) as loop:
                row = LaneValue(text.add(str(rows.first), text.mul(loop.index, rows.size)))
                at_a = self.windows.base if self.windows else emit_element_pointer(kernel, a, [row, ZERO_LANE])
                at_c = emit_element_pointer(kernel, c, [row, LaneValue(first)])
                text.line(f"call void @{name}(ptr {at_a}, ptr {at_b}, ptr {at_c}{self._format_extra(row)})")
                indexed = (m for x in (self.windows, self.lines) if x is not None for m in (x.memory, x.depths))
                for m in (a, b, c, *indexed, *((self.offsets,) if self.offsets else ())):
                    kernel.scratch.record_access(m)

    def _format_extra(self, row: LaneValue) -> str:
        """The further arguments of a microkernel: of pairs which definition, or the offsets of the rows; tables."""
        if self.windows is not None:
            rows = emit_element_pointer(self.kernel, self.windows.rows, [row])
            return f", ptr {rows}, ptr {self.windows.depths.base}"
        if self.lines is not None:
            return f", ptr {self.lines.depths.base}"
        if self.offsets is not None:
            return f", ptr {emit_element_pointer(self.kernel, self.offsets, [row])}"
        return f", i1 {self.choice}" if self.choice else ""

    def _require_microkernel(
        self, rows: AxisTiles, columns: AxisTiles, a: StridedMemRef, b: StridedMemRef, c: StridedMemRef
    ) -> str:
        """Define the microkernel of a panel; its name."""
        t = get_register_type(self.dtype, self.width)
        a_depth = self.parts if self.pair else int(a.strides[-1])
        indexed = "a" if self.windows else "b" if self.lines else ""
        strides = (0 if self.windows else int(a.strides[0]), a_depth, int(b.strides[1]), int(c.strides[0]))
        ahead = not indexed and self.pair is None and a_depth == 1 and self._streams(a)
        micro = MicroKernel(
            t, rows.size, columns.size, self.steps, *strides, self.add, self.pair, bool(self.flipped), indexed, ahead
        )
        if self.pair:
            exact = replace(micro, pair=EXACT_BF16) if self.pair is BF16 else None
            return require_pair_kernel(self.kernel, micro, exact)
        return self.kernel.library.require(micro.name, micro.text)

    def _require_panel_kernel(self, columns: AxisTiles, a: StridedMemRef, b: StridedMemRef, c: StridedMemRef) -> str:
        """Define the product of all rows with a panel, and the microkernels that it calls; its name."""
        assert self.pair is not None
        strides = (int(a.strides[0]), int(b.strides[1]), int(c.strides[0]))
        sizes = (self.rows, columns.size, self.steps, self.tile[0])
        panel = PanelKernel(self.pair, *sizes, *strides, self.add, bool(self.flipped))
        called = [
            (rows.first, rows.count, rows.size, self._require_microkernel(rows, columns, a, b, c))
            for rows in split_axis(self.rows, self.tile[0])
        ]
        return self.kernel.library.require(panel.name, lambda: panel.text(called))

    def _find_least_of_panels(self, b: StridedMemRef) -> str:
        """The least element of packed panels."""
        panels, pairs, columns = (int(n) for n in b.shape)
        return find_least(self.kernel, b, panels * pairs, 2 * int(b.strides[1]), 2 * columns)

    def _pack_a(self, index: list[LaneValue]) -> StridedMemRef:
        """A packed row-major in the accumulator type, or as numbers of 16 or 8 bits."""
        dtype = get_packed_dtype(self.pair) if self.pair else self.dtype
        lanes = self.width * self.parts
        row = round_up(self.depth, lanes)
        row += lanes if row * get_element_bytes(dtype) % CACHE_SET_STRIDE == 0 else 0
        turned, rows = self._find_turned(self.a, index), self._find_rows(self.a, index)
        room = round_up(self.rows, self.width) if turned is not None else self.rows
        m = self.kernel.scratch.allocate(dtype, (room, self.depth), (row, 1))
        if turned is not None:
            self._pack_turned_rows(turned, m)
        elif rows is not None:
            copy_rows(self.kernel, rows, m, lanes)
        else:
            self._pack_operand(self.a, m, lambda body, inner_index: (*index, *inner_index))
        if self.pair and self.depth % self.parts:
            clear_last_columns(self.kernel, m, self.depth, self.pair)
        return m

    def _find_rows(self, v: Value, index: list[LaneValue]) -> ClippedView | None:
        """A matrix of an operand whose rows are contiguous, and are packed a register at a time."""
        found = find_clipped_view(self.kernel, v)
        if found is None or self.width == 1 or not has_contiguous_rows(found):
            return None
        if not self._packs(found.memory.dtype):
            return None
        return ClippedView(self._select_matrix(found.memory, index), found.limits[-2:])

    def _packs(self, dtype: DType) -> bool:
        """Whether elements of a type are packed a register at a time: as they are, or converted to floats."""
        if self.pair is None:
            return choose_source(dtype, self.dtype) is not None
        return dtype in {BF16: (bf16,), INT16: ()}.get(self.pair, (int8, uint8))

    def _pack_b(self, index: list[LaneValue], columns: AxisTiles) -> StridedMemRef:
        """B packed in panels; a panel's rows are contiguous."""
        panel_columns = columns.size * self.width
        dtype = int32 if self.pair else self.dtype
        shape = (columns.count, self.steps, min(panel_columns, self.columns - columns.first * self.width))
        source = self._find_turned(self.b, index)
        steps = round_up(self.steps, self.width) if source is not None else self.steps
        m = self.kernel.scratch.allocate(dtype, shape, (steps * panel_columns, panel_columns, 1))
        if source is not None:
            self._pack_columns(source, m, columns)
            return m

        rows = self._find_rows(self.b, index)
        if rows is not None:
            copy_panels(self.kernel, rows, m, (columns.first * self.width, self.width), self.parts, self.flipped)
            return m

        def place(body: LoopBody, inner_index: LaneIndex) -> LaneIndex:
            panel, k, n = inner_index
            with body.hoist(panel, k):
                start = body.text.add(str(columns.first * self.width), body.text.mul(panel.name, panel_columns))
            return (*index, k, LaneValue(body.text.add(start, n.name), n.kind))

        if self.pair:
            pack_pairs(self.kernel, self.b, m, place, self.depth, self.pair)
        else:
            self._pack_operand(self.b, m, place)
        return m

    def _find_turned(self, v: Value, index: list[LaneValue]) -> ClippedView | None:
        """A matrix of an operand that lies in memory by columns, and is worth a transpose in registers."""
        found = find_clipped_view(self.kernel, v)
        if found is None or self.width == 1 or not found.is_whole_but_for(2):
            return None
        if not self._packs(found.memory.dtype):
            return None
        m = found.memory
        if m.strides[-2] != 1 or not isinstance(m.strides[-1], int) or m.strides[-1] <= 1:
            return None
        if 4 * min(map(int, m.shape[-2:])) < self.width:
            return None
        return ClippedView(self._select_matrix(m, index), found.limits[-2:])

    def _pack_turned_rows(self, source: ClippedView, m: StridedMemRef) -> None:
        """Pack A whose columns are contiguous: squares of its elements, or of lanes that parts of them make."""
        width, parts = self.width, self.parts

        def place(index: Sequence[LaneValue]) -> tuple[str, str, list[LaneValue]]:
            row, column = (self.kernel.text.mul(i.name, width) for i in index)
            return self.kernel.text.mul(column, parts), row, [LaneValue(row), LaneValue(column)]

        squares = Squares((-(-self.rows // width), -(-self.depth // (width * parts))), place)
        if self.pair:
            m = replace(m, dtype=int32, strides=(int(m.strides[0]) // parts, 1))
        t, unit = get_register_type(m.dtype, width), self._choose_unit(source, m.dtype)
        plain = t if self.pair or unit in CONVERTED else t.of(unit)
        emit_transposes(self.kernel, plain, unit, source, m, squares, joined=parts)

    def _choose_unit(self, source: ClippedView, dtype: DType) -> str:
        """The type of the elements of a source that is packed."""
        unit = self.pair.unit if self.pair else choose_source(source.memory.dtype, dtype)
        assert unit is not None
        return unit

    def _pack_columns(self, source: ClippedView, m: StridedMemRef, columns: AxisTiles) -> None:
        """Pack contiguous columns of B: squares of its elements, or of lanes of them."""
        width, text = self.width, self.kernel.text
        unit = self._choose_unit(source, m.dtype)
        t = get_register_type(m.dtype, width)
        t = t if self.pair or unit in CONVERTED else t.of(unit)

        def place(index: Sequence[LaneValue]) -> tuple[str, str, list[LaneValue]]:
            panel, column, square = index
            first = text.add(text.mul(panel.name, columns.size), text.add(column.name, str(columns.first)))
            k = text.mul(square.name, width)
            target = [panel, LaneValue(k), LaneValue(text.mul(column.name, width))]
            return text.mul(first, width), text.mul(k, self.parts), target

        squares = Squares((columns.count, columns.size, -(-self.steps // width)), place)
        emit_transposes(self.kernel, t, unit, source, m, squares, self.flipped)

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
