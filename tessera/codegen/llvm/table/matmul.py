"""Matrix products (Goto and van de Geijn 2008): packed panels, a loop over register tiles, a microkernel for each.

An operand in memory that needs no conversion is read through a strided view; columns are packed by transposes in
registers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
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
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import ZERO_LANE, LaneIndex, LaneKind, LaneValue, LoopBody, LoopBuilder
from tessera.codegen.llvm.text.memory import StridedMemRef, compute_address, emit_pointer, fit_vector_width
from tessera.codegen.llvm.text.types import RegisterType, get_element_bytes, get_register_type
from tessera.core.symbolic_dim import Dim
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


# Microkernels: a register tile of C, over all of K.


K_UNROLL = 4
AccumulatorNames = dict[str, str]  # "row.vector" of the register tile to the register's name


@dataclass(frozen=True)
class MicroKernel:
    """A register tile of `rows` by `vectors` registers of one type; strides in elements.

    C[r, n] (+)= sum over k of A[r, k] B[k, n], where A has strides (`a_row`, `a_depth`), B has row stride `b_row` and C
    `c_row`.
    """

    type: RegisterType
    rows: int
    vectors: int
    depth: int
    a_row: int
    a_depth: int
    b_row: int
    c_row: int
    add: bool

    @property
    def name(self) -> str:
        """The name of the function, which encodes all fields."""
        word = "add" if self.add else "set"
        strides = f"a{self.a_row}x{self.a_depth}.b{self.b_row}.c{self.c_row}"
        return f"ts.dot.{self.type.suffix}.{self.rows}x{self.vectors}x{self.depth}.{strides}.{word}"

    def text(self) -> Iterator[str]:
        """The function's lines."""
        yield f"define internal void @{self.name}(ptr noalias %a, ptr noalias %b, ptr noalias %c) noinline #0 {{"
        yield "entry:"
        iterations = self.depth // K_UNROLL
        state = {name: self.type.const(0) for name in self._accumulator_names()}
        if iterations:
            state = yield from self._emit_loop(iterations, state)
        for k in range(iterations * K_UNROLL, self.depth):
            state = yield from self._emit_step(f"t{k}", str(k), 0, state)
        yield from self._store_tile(state)
        yield "  ret void"
        yield "}"

    def _accumulator_names(self) -> list[str]:
        return [f"{r}.{n}" for r in range(self.rows) for n in range(self.vectors)]

    def _emit_loop(self, iterations: int, state: AccumulatorNames) -> Generator[str, None, AccumulatorNames]:
        """The loop over K, unrolled; the accumulators after it."""
        yield "  br label %loop"
        yield "loop:"
        yield "  %k = phi i64 [ 0, %entry ], [ %k.next, %loop ]"
        for name, first in state.items():
            yield f"  %c.{name} = phi {self.type} [ {first}, %entry ], [ %c.{name}.{K_UNROLL - 1}, %loop ]"
        inner = {name: f"%c.{name}" for name in state}
        for u in range(K_UNROLL):
            inner = yield from self._emit_step(str(u), "%k", u, inner)
        yield f"  %k.next = add nuw nsw i64 %k, {K_UNROLL}"
        yield f"  %again = icmp ult i64 %k.next, {iterations * K_UNROLL}"
        yield "  br i1 %again, label %loop, label %done"
        yield "done:"
        return inner

    def _emit_step(
        self, tag: str, k: str, more: int, state: AccumulatorNames
    ) -> Generator[str, None, AccumulatorNames]:
        """One k: a row of B times each element of a column of A."""
        t, e = self.type, self.type.element
        yield f"  %pb.{tag} = getelementptr [{self.b_row} x {e}], ptr %b, i64 {k}, i64 {more * self.b_row}"
        for n in range(self.vectors):
            yield f"  %pb.{n}.{tag} = getelementptr {e}, ptr %pb.{tag}, i64 {n * t.width}"
            yield f"  %b.{n}.{tag} = load {t}, ptr %pb.{n}.{tag}, align {t.bits // 8}"
        yield f"  %pa.{tag} = getelementptr [{self.a_depth} x {e}], ptr %a, i64 {k}, i64 {more * self.a_depth}"
        for r in range(self.rows):
            yield from self._broadcast_a(tag, r)
            for n in range(self.vectors):
                yield from self._emit_fma(f"{r}.{n}", tag, state[f"{r}.{n}"], f"%a.{r}.{tag}", f"%b.{n}.{tag}")
        return {name: f"%c.{name}.{tag}" for name in state}

    def _broadcast_a(self, tag: str, r: int) -> Iterator[str]:
        t, e, to = self.type, self.type.element, f"%a.{r}.{tag}"
        yield f"  %pa.{r}.{tag} = getelementptr {e}, ptr %pa.{tag}, i64 {r * self.a_row}"
        if t.width == 1:
            yield f"  {to} = load {e}, ptr %pa.{r}.{tag}, align {t.bits // 8}"
            return
        yield f"  {to}.e = load {e}, ptr %pa.{r}.{tag}, align {t.bits // 8}"
        yield f"  {to}.s = insertelement {t} poison, {e} {to}.e, i64 0"
        yield f"  {to} = shufflevector {t} {to}.s, {t} poison, <{t.width} x i32> zeroinitializer"

    def _emit_fma(self, name: str, tag: str, total: str, a: str, b: str) -> Iterator[str]:
        t, d = self.type, f"%c.{name}.{tag}"
        if t.is_float:
            yield f"  {d} = call {t} @llvm.fma.{t.suffix}({t} {a}, {t} {b}, {t} {total})"
        else:
            yield f"  {d}.p = mul {t} {a}, {b}"
            yield f"  {d} = add {t} {total}, {d}.p"

    def _store_tile(self, state: AccumulatorNames) -> Iterator[str]:
        """Store the tile in C, or add it to C: the product is rounded, then the sum."""
        t = self.type
        for r in range(self.rows):
            for n in range(self.vectors):
                name, total = f"{r}.{n}", state[f"{r}.{n}"]
                place = r * self.c_row + n * t.width
                yield f"  %pc.{name} = getelementptr {t.element}, ptr %c, i64 {place}"
                if self.add:
                    yield f"  %old.{name} = load {t}, ptr %pc.{name}, align {t.bits // 8}"
                    yield f"  %sum.{name} = {'fadd' if t.is_float else 'add'} {t} %old.{name}, {total}"
                    total = f"%sum.{name}"
                yield f"  store {t} {total}, ptr %pc.{name}, align {t.bits // 8}"


def choose_register_tile(rows: int, vectors: int, registers: int) -> tuple[int, int]:
    """The register tile (rows, vectors) of least cost for a product of this size.

    A step of k costs an instruction for each register of the tile and a fraction for each load; fewer than 8
    accumulators do not hide the latency of an FMA.
    """

    def estimate_cost(tile: tuple[int, int]) -> float:
        return sum(
            count * times * (max(8, r * v) + 0.4 * (r + v) + 0.5)
            for r, count in _count_tiles(rows, tile[0])
            for v, times in _count_tiles(vectors, tile[1])
        )

    tiles = [(r, v) for r in range(1, 15) for v in range(1, 5) if r * v + v + 2 <= registers]
    return min((t for t in tiles if t[0] <= rows and t[1] <= vectors), key=estimate_cost, default=(1, 1))


def _count_tiles(count: int, size: int) -> list[tuple[int, int]]:
    """A size as (tile size, count) pairs, the remainder last."""
    return [(n, times) for n, times in ((size, count // size), (count % size, 1)) if n and times]


# In-register transposes: columns of memory become rows by shuffles instead of gathers.


@dataclass(frozen=True)
class TransposeKernel:
    """dst[i, j] = src[j, i] for a square of one register width; `source` and `target` are row strides in elements."""

    type: RegisterType
    source: int
    target: int

    @property
    def name(self) -> str:
        """The name of the function."""
        return f"ts.transpose.{self.type.suffix}.{self.source}.{self.target}"

    def text(self) -> Iterator[str]:
        """The function's lines."""
        t, n = self.type, self.type.width
        yield f"define internal void @{self.name}(ptr noalias %src, ptr noalias %dst) noinline #0 {{"
        yield "entry:"
        for i in range(n):
            yield f"  %p{i} = getelementptr {t.element}, ptr %src, i64 {i * self.source}"
            yield f"  %x{i}.0 = load {t}, ptr %p{i}, align {t.bits // 8}"
        step = 1
        while step < n:
            for i in range(n):
                yield from self._swap_halves(i, step)
            step *= 2
        for i in range(n):
            yield f"  %q{i} = getelementptr {t.element}, ptr %dst, i64 {i * self.target}"
            yield f"  store {t} %x{i}.{n.bit_length() - 1}, ptr %q{i}, align {t.bits // 8}"
        yield "  ret void"
        yield "}"

    def _swap_halves(self, i: int, step: int) -> Iterator[str]:
        """Rows `step` apart exchange the off-diagonal halves of squares of 2 `step`."""
        t, n, stage = self.type, self.type.width, step.bit_length() - 1
        first, second = i & ~step, i | step
        low = i == first
        # Indices from n on select from the second row.
        picks = [
            (lane if low else lane + step) if not lane & step else (n + lane - (step if low else 0))
            for lane in range(n)
        ]
        listed = ", ".join(f"i32 {p}" for p in picks)
        rows = f"{t} %x{first}.{stage}, {t} %x{second}.{stage}"
        yield f"  %x{i}.{stage + 1} = shufflevector {rows}, <{n} x i32> <{listed}>"


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
        view = self._check_dtype(find_view(self.kernel, self.a))
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
        if self.rows > MAX_UNPACKED_ROWS:
            return None
        view = self._check_dtype(find_view(self.kernel, self.b))
        is_whole = self.columns % self.width == 0
        return view if view is not None and is_whole and view.strides[-1] == 1 else None

    def _emit_matrix(self, index: list[LaneValue], a: StridedMemRef | None, b: StridedMemRef | None) -> None:
        a = self._select_matrix(a, index) if a is not None else self._pack_a(index)
        b = self._select_matrix(b, index) if b is not None else None
        c = self._select_matrix(self.target, index)
        for columns in self._split_columns():
            panels = self._view_as_panels(columns, b) if b is not None else self._pack_b(index, columns)
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
            micro = self._require_microkernel(rows, columns, a, b, c)
            with LoopBuilder(text, "0", str(rows.count)) as loop:
                row = LaneValue(text.add(str(rows.first), text.mul(loop.index, rows.size)))
                at_a, at_c = (
                    emit_element_pointer(kernel, a, [row, ZERO_LANE]),
                    emit_element_pointer(kernel, c, [row, LaneValue(first)]),
                )
                text.line(f"call void @{micro.name}(ptr {at_a}, ptr {at_b}, ptr {at_c})")
                for m in (a, b, c):
                    kernel.scratch.record_access(m)

    def _require_microkernel(
        self, rows: AxisTiles, columns: AxisTiles, a: StridedMemRef, b: StridedMemRef, c: StridedMemRef
    ) -> MicroKernel:
        t = get_register_type(self.dtype, self.width)
        strides = (int(a.strides[0]), int(a.strides[1]), int(b.strides[1]), int(c.strides[0]))
        micro = MicroKernel(t, rows.size, columns.size, self.depth, *strides, self.add)
        self.kernel.library.require(micro.name, micro.text)
        return micro

    def _pack_a(self, index: list[LaneValue]) -> StridedMemRef:
        """A packed row-major in the accumulator type."""
        row = -(-self.depth // self.width) * self.width
        row += self.width if row * get_element_bytes(self.dtype) % CACHE_SET_STRIDE == 0 else 0
        m = self.kernel.scratch.allocate(self.dtype, (self.rows, self.depth), (row, 1))
        self._pack_operand(self.a, m, lambda body, inner_index: (*index, *inner_index))
        return m

    def _pack_b(self, index: list[LaneValue], columns: AxisTiles) -> StridedMemRef:
        """B packed in panels; a panel's rows are contiguous."""
        panel_columns = columns.size * self.width
        shape = (columns.count, self.depth, min(panel_columns, self.columns - columns.first * self.width))
        m = self.kernel.scratch.allocate(self.dtype, shape, (self.depth * panel_columns, panel_columns, 1))

        view = self._check_dtype(find_view(self.kernel, self.b))
        if view is not None and self._is_transposable(view, columns):
            self._pack_transposed(self._select_matrix(view, index), m, columns)
            return m

        def place(body: LoopBody, inner_index: LaneIndex) -> LaneIndex:
            panel, k, n = inner_index
            text = body.text
            start = text.add(str(columns.first * self.width), text.mul(panel.name, panel_columns))
            return (*index, k, LaneValue(text.add(start, n.name), n.kind))

        self._pack_operand(self.b, m, place)
        return m

    def _is_transposable(self, view: StridedMemRef, columns: AxisTiles) -> bool:
        """Whether the columns of B are contiguous and divide into squares of the register width."""
        is_whole = (
            self.depth % self.width == 0 and (columns.first + columns.count * columns.size) * self.width <= self.columns
        )
        return is_whole and self.width > 1 and view.strides[-2] == 1 and view.strides[-1] > 1

    def _pack_transposed(self, b: StridedMemRef, m: StridedMemRef, columns: AxisTiles) -> None:
        """Pack contiguous columns, square by square."""
        kernel, width = self.kernel, self.width
        transpose = TransposeKernel(get_register_type(self.dtype, width), int(b.strides[1]), int(m.strides[1]))
        kernel.library.require(transpose.name, transpose.text)
        squares = (columns.count, columns.size, self.depth // width)

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
            lane = widen_lane(body, v.type.dtype, self.dtype, emit_element(body, v, place(body, inner_index)))  # type: ignore[operator]
            memory.store_lane(
                LoopBody(self.kernel, body.width) if padded else body,
                m,
                inner_index,
                LaneValue(body.broadcast_lane(lane, get_register_type(self.dtype, body.width)), LaneKind.VARYING),
            )

        emit_loop_nest(self.kernel, [int(n) for n in m.shape], self.width, visit_one)
