"""Matrix products (Goto and van de Geijn 2008): packed panels, a loop over register tiles, a micro-kernel for each.

An operand that lies in memory unconverted is read through a strided view; columns are packed by transposes in
registers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.block_types import static_shape
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import (
    choose_vector_width,
    emit_element,
    emit_loop_nest,
    emit_scalar_loops,
    materialise_block,
    offset_index,
    widen_lane,
)
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import ZERO_LANE, LaneIndex, LaneKind, LaneValue, LoopBody, LoopBuilder
from tessera.codegen.llvm.text.memory import StridedMemRef, compute_address, emit_pointer, fit_vector_width
from tessera.codegen.llvm.text.types import RegisterType, get_element_bytes, get_register_type
from tessera.ir.core import Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_emitter import LlvmKernelEmitter


# Blocks that lie in memory as they are: a pointer and strides in place of a copy.


view_rule = Rules("llvm view")


def find_view(kernel: LlvmKernelEmitter, v: Value) -> StridedMemRef | None:
    """The memory in which a block's elements lie unconverted, if there is such."""
    held = kernel.buffers.get(v)
    if held is not None:
        return held if held.dtype == v.type.dtype else None
    rule = view_rule.get(kernel.producers[v].op) if v in kernel.producers else None
    return rule(kernel, kernel.producers[v]) if rule is not None else None


def emit_element_pointer(kernel: LlvmKernelEmitter, m: StridedMemRef, index: list[LaneValue]) -> str:
    """The address of an element."""
    body = LoopBody(kernel)
    return emit_pointer(body, m, compute_address(body, m, tuple(index)))


@view_rule(tile.load)
def _(kernel, node):
    ref, rest = node.args[0], node.args[1:]
    m, starts = kernel.memories[ref], rest[: ref.type.rank]
    clip = node.attrs["edge"] == "clip" and kernel.ranges.find_unproven_axes(starts, node.attrs["shape"], m.shape)
    if clip or len(rest) > ref.type.rank:
        return None
    here = offset_index(LoopBody(kernel), starts, tuple(LaneValue("0") for _ in starts))
    return m.at(emit_element_pointer(kernel, m, list(here)), m.strides, node.attrs["shape"])


@view_rule(shape.permute)
def _(kernel, node):
    inner = find_view(kernel, node.args[0])
    if inner is None:
        return None
    axes = node.attrs["axes"]
    return inner.at(inner.base, tuple(inner.strides[a] for a in axes), tuple(inner.shape[a] for a in axes))


@view_rule(shape.reshape)
def _(kernel, node):
    here, there = node.args[0].type.shape, node.attrs["shape"]
    inner = find_view(kernel, node.args[0])
    if inner is None or [n for n in here if n != 1] != [n for n in there if n != 1]:
        return None
    held = iter(s for s, n in zip(inner.strides, here, strict=True) if n != 1)
    return inner.at(inner.base, tuple(next(held) if n != 1 else 0 for n in there), there)


@view_rule(basic.broadcast_to)
def _(kernel, node):
    inner = find_view(kernel, node.args[0])
    if inner is None:
        return None
    there = node.attrs["shape"]
    strides = tuple(s if n != 1 else 0 for s, n in zip(inner.strides, inner.shape, strict=True))
    return inner.at(inner.base, (0,) * (len(there) - len(strides)) + strides, there)


# The inner product kernel: a tile of C in registers, over all of K.


K_UNROLL = 4
AccumulatorNames = dict[str, str]  # the name of each register of the tile, by its place


@dataclass(frozen=True)
class MicroKernel:
    """A tile of `rows` by `vectors` registers, all of one type; strides in elements.

    C[r, n] (+)= sum over k of A[r, k] B[k, n], where A has strides (`a_row`, `a_depth`), the rows of B
    lie `b_row` apart and those of C `c_row`.
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
        """The name of the function, which says all of this."""
        word = "add" if self.add else "set"
        strides = f"a{self.a_row}x{self.a_depth}.b{self.b_row}.c{self.c_row}"
        return f"ts.dot.{self.type.suffix}.{self.rows}x{self.vectors}x{self.depth}.{strides}.{word}"

    def text(self) -> Iterator[str]:
        """The function."""
        yield f"define internal void @{self.name}(ptr noalias %a, ptr noalias %b, ptr noalias %c) noinline #0 {{"
        yield "entry:"
        rounds = self.depth // K_UNROLL
        state = {name: self.type.const(0) for name in self._tile()}
        if rounds:
            state = yield from self._loop(rounds, state)
        for k in range(rounds * K_UNROLL, self.depth):
            state = yield from self._step(f"t{k}", str(k), 0, state)
        yield from self._finish(state)
        yield "  ret void"
        yield "}"

    def _tile(self) -> list[str]:
        return [f"{r}.{n}" for r in range(self.rows) for n in range(self.vectors)]

    def _loop(self, rounds: int, state: AccumulatorNames) -> Generator[str, None, AccumulatorNames]:
        """The loop over K, a few steps a round; gives what is accumulated then."""
        yield "  br label %loop"
        yield "loop:"
        yield "  %k = phi i64 [ 0, %entry ], [ %k.next, %loop ]"
        for name, first in state.items():
            yield f"  %c.{name} = phi {self.type} [ {first}, %entry ], [ %c.{name}.{K_UNROLL - 1}, %loop ]"
        inner = {name: f"%c.{name}" for name in state}
        for u in range(K_UNROLL):
            inner = yield from self._step(str(u), "%k", u, inner)
        yield f"  %k.next = add nuw nsw i64 %k, {K_UNROLL}"
        yield f"  %again = icmp ult i64 %k.next, {rounds * K_UNROLL}"
        yield "  br i1 %again, label %loop, label %done"
        yield "done:"
        return inner

    def _step(self, tag: str, k: str, more: int, state: AccumulatorNames) -> Generator[str, None, AccumulatorNames]:
        """One k: a row of B, and each element of a column of A times it."""
        t, e = self.type, self.type.element
        yield f"  %pb.{tag} = getelementptr [{self.b_row} x {e}], ptr %b, i64 {k}, i64 {more * self.b_row}"
        for n in range(self.vectors):
            yield f"  %pb.{n}.{tag} = getelementptr {e}, ptr %pb.{tag}, i64 {n * t.width}"
            yield f"  %b.{n}.{tag} = load {t}, ptr %pb.{n}.{tag}, align {t.bits // 8}"
        yield f"  %pa.{tag} = getelementptr [{self.a_depth} x {e}], ptr %a, i64 {k}, i64 {more * self.a_depth}"
        for r in range(self.rows):
            yield from self._element(tag, r)
            for n in range(self.vectors):
                yield from self._multiply(f"{r}.{n}", tag, state[f"{r}.{n}"], f"%a.{r}.{tag}", f"%b.{n}.{tag}")
        return {name: f"%c.{name}.{tag}" for name in state}

    def _element(self, tag: str, r: int) -> Iterator[str]:
        t, e, to = self.type, self.type.element, f"%a.{r}.{tag}"
        yield f"  %pa.{r}.{tag} = getelementptr {e}, ptr %pa.{tag}, i64 {r * self.a_row}"
        if t.width == 1:
            yield f"  {to} = load {e}, ptr %pa.{r}.{tag}, align {t.bits // 8}"
            return
        yield f"  {to}.e = load {e}, ptr %pa.{r}.{tag}, align {t.bits // 8}"
        yield f"  {to}.s = insertelement {t} poison, {e} {to}.e, i64 0"
        yield f"  {to} = shufflevector {t} {to}.s, {t} poison, <{t.width} x i32> zeroinitializer"

    def _multiply(self, name: str, tag: str, total: str, a: str, b: str) -> Iterator[str]:
        t, d = self.type, f"%c.{name}.{tag}"
        if t.is_float:
            yield f"  {d} = call {t} @llvm.fma.{t.suffix}({t} {a}, {t} {b}, {t} {total})"
        else:
            yield f"  {d}.p = mul {t} {a}, {b}"
            yield f"  {d} = add {t} {total}, {d}.p"

    def _finish(self, state: AccumulatorNames) -> Iterator[str]:
        """The tile put into C, or added to it: the product is rounded as a whole, then the sum."""
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
    """The tile (rows, vectors) with which a product of this size takes the least time.

    Per step of k a tile takes an instruction for each register of it, and part of one for each load;
    fewer than 8 sums leave the multiplier idle while it waits for the sum before.
    """

    def time(tile: tuple[int, int]) -> float:
        return sum(
            count * times * (max(8, r * v) + 0.4 * (r + v) + 0.5)
            for r, count in _count_tiles(rows, tile[0])
            for v, times in _count_tiles(vectors, tile[1])
        )

    tiles = [(r, v) for r in range(1, 15) for v in range(1, 5) if r * v + v + 2 <= registers]
    return min((t for t in tiles if t[0] <= rows and t[1] <= vectors), key=time, default=(1, 1))


def _count_tiles(count: int, size: int) -> list[tuple[int, int]]:
    """A count as (size, how often), with the rest last."""
    return [(n, times) for n, times in ((size, count // size), (count % size, 1)) if n and times]


# A square of vectors turned about its diagonal: columns of memory become rows by shuffles, not gathers.


@dataclass(frozen=True)
class TransposeKernel:
    """dst[i, j] = src[j, i] for a square as wide as a register; rows lie `source` and `target` elements apart."""

    type: RegisterType
    source: int
    target: int

    @property
    def name(self) -> str:
        """The name of the function."""
        return f"ts.transpose.{self.type.suffix}.{self.source}.{self.target}"

    def text(self) -> Iterator[str]:
        """The function."""
        t, n = self.type, self.type.width
        yield f"define internal void @{self.name}(ptr noalias %src, ptr noalias %dst) noinline #0 {{"
        yield "entry:"
        for i in range(n):
            yield f"  %p{i} = getelementptr {t.element}, ptr %src, i64 {i * self.source}"
            yield f"  %x{i}.0 = load {t}, ptr %p{i}, align {t.bits // 8}"
        step = 1
        while step < n:
            for i in range(n):
                yield from self._exchange(i, step)
            step *= 2
        for i in range(n):
            yield f"  %q{i} = getelementptr {t.element}, ptr %dst, i64 {i * self.target}"
            yield f"  store {t} %x{i}.{n.bit_length() - 1}, ptr %q{i}, align {t.bits // 8}"
        yield "  ret void"
        yield "}"

    def _exchange(self, i: int, step: int) -> Iterator[str]:
        """Rows `step` apart swap the halves (of squares of 2 `step`) that lie off the diagonal."""
        t, n, stage = self.type, self.type.width, step.bit_length() - 1
        first, second = i & ~step, i | step
        low = i == first
        # A pick from n on is an element of the second row.
        picks = [
            (lane if low else lane + step) if not lane & step else (n + lane - (step if low else 0))
            for lane in range(n)
        ]
        listed = ", ".join(f"i32 {p}" for p in picks)
        rows = f"{t} %x{first}.{stage}, {t} %x{second}.{stage}"
        yield f"  %x{i}.{stage + 1} = shufflevector {rows}, <{n} x i32> <{listed}>"


# Matrix products: operands packed or read in place, a loop over tiles, a micro-kernel for each.


MAX_UNPACKED_ROWS = 16  # with no more rows than this, B is read too seldom to be worth packing
CACHE_SET_STRIDE = 1024  # rows this many bytes apart (or a multiple) fight for the same cache sets


@dataclass(frozen=True)
class AxisTiles:
    """`count` pieces of `size` along an axis, from `first` on."""

    first: int
    count: int
    size: int


def split_axis(total: int, size: int) -> list[AxisTiles]:
    """An axis in pieces, the rest last."""
    whole = total // size
    found = [AxisTiles(0, whole, size), AxisTiles(whole * size, 1, total - whole * size)]
    return [p for p in found if p.count and p.size]


@statement_rule(contractions.dot)
def _(kernel, node):
    if kernel.plan.is_deferred(node.out):
        return
    wide, out = node.args[0].type.accumulate, node.out
    exact = wide == out.type.dtype
    target = (
        kernel.room(out) if exact else kernel.scratch.block(wide, out.type.shape, choose_vector_width(kernel, wide))
    )
    MatmulEmitter(kernel, node, target, False).emit()
    kernel.buffers[out] = target
    if not exact and out in kernel.plan.target:
        rounded = kernel.room(out)
        materialise_block(kernel, out, rounded)
        kernel.buffers[out] = rounded


def accumulate_product(kernel: LlvmKernelEmitter, node: Node, product: Value) -> None:
    """A sum with a product, added to the other summand in place."""
    other = node.args[1] if node.args[0] is product else node.args[0]
    target = kernel.room(node.out)
    kernel.move(other, target)
    with kernel.at(kernel.producers[product]):
        MatmulEmitter(kernel, kernel.producers[product], target, True).emit()
    kernel.buffers[node.out] = target


class MatmulEmitter:
    """One dot being emitted into `target`."""

    def __init__(self, kernel: LlvmKernelEmitter, node: Node, target: StridedMemRef, add: bool) -> None:
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
        """Everything: for each index of the batch, the operands and the tiles."""
        views = [self._usable(self._view_a()), self._usable(self._view_b())]
        axes = [a for a, n in enumerate(self.batch) if n != 1]
        emit_scalar_loops(
            self.kernel, self.batch, axes, [ZERO_LANE] * len(self.batch), lambda index: self._one(index, *views)
        )

    def _usable(self, view: StridedMemRef | None) -> StridedMemRef | None:
        return view if view is not None and view.dtype == self.dtype else None

    def _view_a(self) -> StridedMemRef | None:
        """A in place, unless its rows fall upon the same cache sets and are read more than once."""
        view = find_view(self.kernel, self.a)
        if view is None:
            return None
        clash = (
            view.strides[-2] * get_element_bytes(view.dtype) % CACHE_SET_STRIDE == 0
            and view.strides[-2] > 0
            and self.tile[0] > 4
        )
        return None if clash and self.vectors > 2 * self.tile[1] else view

    def _view_b(self) -> StridedMemRef | None:
        """B in place where few rows of A use it; else its panels are packed, so that each is one stream."""
        if self.rows > MAX_UNPACKED_ROWS:
            return None
        view = find_view(self.kernel, self.b)
        whole = self.columns % self.width == 0
        return view if view is not None and whole and view.strides[-1] == 1 else None

    def _one(self, index: list[LaneValue], a: StridedMemRef | None, b: StridedMemRef | None) -> None:
        a = self._at(a, index) if a is not None else self._packed_a(index)
        b = self._at(b, index) if b is not None else None
        c = self._at(self.target, index)
        for columns in self._columns():
            panels = self._panels(columns, b) if b is not None else self._packed_b(index, columns)
            with LoopBuilder(self.kernel.text, "0", str(columns.count)) as loop:
                self._rows(a, panels, c, LaneValue(loop.index), columns)

    def _columns(self) -> list[AxisTiles]:
        """The vectors of a row in panels; one that is not full stands in the last, alone."""
        whole = self.columns // self.width // self.tile[1]
        rest = AxisTiles(whole * self.tile[1], 1, self.vectors - whole * self.tile[1])
        return [p for p in (AxisTiles(0, whole, self.tile[1]), rest) if p.count and p.size]

    def _at(self, m: StridedMemRef, index: Sequence[LaneValue]) -> StridedMemRef:
        """A matrix of a batch."""
        base = emit_element_pointer(self.kernel, m, [*index, ZERO_LANE, ZERO_LANE])
        return m.at(base, m.strides[-2:], m.shape[-2:])

    def _rows(self, a: StridedMemRef, b: StridedMemRef, c: StridedMemRef, panel: LaneValue, columns: AxisTiles) -> None:
        """Every tile of one panel."""
        kernel, text = self.kernel, self.kernel.text
        first = text.add(str(columns.first * self.width), text.mul(panel.name, columns.size * self.width))
        for m in (a, b, c):
            kernel.scratch.record_access(m)
        at_b = emit_element_pointer(kernel, b, [panel, ZERO_LANE, ZERO_LANE])
        for rows in split_axis(self.rows, self.tile[0]):
            micro = self._micro(rows, columns, a, b, c)
            with LoopBuilder(text, "0", str(rows.count)) as loop:
                row = LaneValue(text.add(str(rows.first), text.mul(loop.index, rows.size)))
                at_a, at_c = (
                    emit_element_pointer(kernel, a, [row, ZERO_LANE]),
                    emit_element_pointer(kernel, c, [row, LaneValue(first)]),
                )
                text.line(f"call void @{micro.name}(ptr {at_a}, ptr {at_b}, ptr {at_c})")
                for m in (a, b, c):
                    kernel.scratch.record_access(m)

    def _micro(
        self, rows: AxisTiles, columns: AxisTiles, a: StridedMemRef, b: StridedMemRef, c: StridedMemRef
    ) -> MicroKernel:
        t = get_register_type(self.dtype, self.width)
        strides = (a.strides[0], a.strides[1], b.strides[1], c.strides[0])
        micro = MicroKernel(t, rows.size, columns.size, self.depth, *strides, self.add)
        self.kernel.library.need(micro.name, micro.text)
        return micro

    def _packed_a(self, index: list[LaneValue]) -> StridedMemRef:
        """A in rows, in the type that products are summed in."""
        row = -(-self.depth // self.width) * self.width
        row += self.width if row * get_element_bytes(self.dtype) % CACHE_SET_STRIDE == 0 else 0
        m = self.kernel.scratch.memory(self.dtype, (self.rows, self.depth), (row, 1))
        self._pack(self.a, m, lambda body, here: (*index, *here))
        return m

    def _packed_b(self, index: list[LaneValue], columns: AxisTiles) -> StridedMemRef:
        """The panels of B: each holds its rows one after the other."""
        across = columns.size * self.width
        shape = (columns.count, self.depth, min(across, self.columns - columns.first * self.width))
        m = self.kernel.scratch.memory(self.dtype, shape, (self.depth * across, across, 1))

        view = self._usable(find_view(self.kernel, self.b))
        if view is not None and self._turns(view, columns):
            self._turned(self._at(view, index), m, columns)
            return m

        def place(body: LoopBody, here: LaneIndex) -> LaneIndex:
            panel, k, n = here
            text = body.text
            start = text.add(str(columns.first * self.width), text.mul(panel.name, across))
            return (*index, k, LaneValue(text.add(start, n.name), n.kind))

        self._pack(self.b, m, place)
        return m

    def _turns(self, view: StridedMemRef, columns: AxisTiles) -> bool:
        """Whether the columns of B lie contiguous, in whole squares of registers."""
        whole = (
            self.depth % self.width == 0 and (columns.first + columns.count * columns.size) * self.width <= self.columns
        )
        return whole and self.width > 1 and view.strides[-2] == 1 and view.strides[-1] > 1

    def _turned(self, b: StridedMemRef, m: StridedMemRef, columns: AxisTiles) -> None:
        """Pack columns that lie contiguous, square by square."""
        kernel, width = self.kernel, self.width
        turn = TransposeKernel(get_register_type(self.dtype, width), b.strides[1], m.strides[1])
        kernel.library.need(turn.name, turn.text)
        squares = (columns.count, columns.size, self.depth // width)

        def one(index: list[LaneValue]) -> None:
            text, (panel, column, row) = kernel.text, index
            first = text.add(text.mul(panel.name, columns.size), text.add(column.name, str(columns.first)))
            k = LaneValue(text.mul(row.name, width))
            source = emit_element_pointer(kernel, b, [k, LaneValue(text.mul(first, width))])
            target = emit_element_pointer(kernel, m, [panel, k, LaneValue(text.mul(column.name, width))])
            text.line(f"call void @{turn.name}(ptr {source}, ptr {target})")
            kernel.scratch.record_access(b)
            kernel.scratch.record_access(m)

        emit_scalar_loops(kernel, squares, range(3), [ZERO_LANE] * 3, one)

    def _panels(self, columns: AxisTiles, b: StridedMemRef) -> StridedMemRef:
        """B in place, seen as panels."""
        across = columns.size * self.width
        base = emit_element_pointer(self.kernel, b, [ZERO_LANE, LaneValue(str(columns.first * self.width))])
        return b.at(base, (across, b.strides[0], 1), (columns.count, self.depth, across))

    def _pack(self, v: Value, m: StridedMemRef, place: object) -> None:
        """Compute an operand into memory, whole vectors at a time: what follows the end is never used."""

        def visit_one(body: LoopBody, here: LaneIndex) -> None:
            lane = widen_lane(body, v.type.dtype, self.dtype, emit_element(body, v, place(body, here)))  # type: ignore[operator]
            whole = LoopBody(self.kernel, body.width)
            memory.store_lane(
                whole,
                m,
                here,
                LaneValue(body.broadcast_lane(lane, get_register_type(self.dtype, body.width)), LaneKind.VARYING),
            )

        emit_loop_nest(self.kernel, m.shape, self.width, visit_one)
