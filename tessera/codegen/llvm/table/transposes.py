"""Transposes in registers: columns of memory become rows by shuffles instead of gathers, square by square."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.contract import get_tensor_type, static_shape
from tessera.codegen.llvm.table.loop_fusion import emit_scalar_loops
from tessera.codegen.llvm.table.row_packing import CONVERTED, get_loaded_element, join_parts
from tessera.codegen.llvm.table.strided_views import ClippedView, emit_element_pointer, find_clipped_view
from tessera.codegen.llvm.text.builder import (
    ELEMENT_BYTES,
    ZERO_LANE,
    LaneValue,
    RegisterType,
    get_element_bytes,
    is_number,
)
from tessera.codegen.llvm.text.memory import StridedMemRef
from tessera.core.symbolic_dim import round_up
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


MAX_WASTE = 1.5  # elements of the squares for each element of the block


@dataclass(frozen=True)
class TransposeKernel:
    """dst[i, j] = src[j, i] for a square of one register width.

    `source` is the row stride of the source in elements of the type `unit`, of which several may make an element;
    `target` is that of the result in elements. The bits `flipped` of each element are inverted. Of `joined` rows of the
    source each has a part of the elements, and units of type half or bfloat become floats.
    """

    type: RegisterType
    unit: str
    source: int
    target: int
    flipped: int = 0
    joined: int = 1

    @property
    def name(self) -> str:
        """The name of the function."""
        flipped = (f".{self.flipped}" if self.flipped else "") + (f".joined{self.joined}" if self.joined > 1 else "")
        return f"ts.transpose.{self.type.suffix}.{self.unit}.{self.source}.{self.target}{flipped}"

    @property
    def row(self) -> RegisterType:
        """A row of the source."""
        t, unit = self.type, get_loaded_element(self.unit)
        alone = self.joined > 1 or self.unit in CONVERTED
        return RegisterType(unit, t.width if alone else t.width * t.bits // (8 * ELEMENT_BYTES[unit]))

    @property
    def rows(self) -> int:
        """The rows of the source in a square."""
        return self.type.width * self.joined

    def text(self) -> Iterator[str]:
        """The function's lines."""
        yield f"define internal void @{self.name}(ptr noalias %src, ptr noalias %dst) noinline #0 {{"
        yield "entry:"
        element = self.row.element
        for i in range(self.rows):
            yield f"  %p{i} = getelementptr {element}, ptr %src, i64 {i * self.source}"
            yield f"  %y{i} = load {self.row}, ptr %p{i}, align {ELEMENT_BYTES[element]}"
        yield from self._exchange()
        yield "}"

    def clipped_text(self) -> Iterator[str]:
        """The function for a square of which only some rows, and some units of each, are within bounds; else zeros."""
        units = self.row
        yield (
            f"define internal void @{self.name}.clipped(ptr noalias %src, ptr noalias %dst, i64 %rows, i64 %units) "
            "noinline #0 {"
        )
        yield "entry:"
        yield f"  %high = icmp sge i64 %rows, {self.rows}"
        yield f"  %wide = icmp sge i64 %units, {units.width}"
        yield "  %whole = and i1 %high, %wide"
        yield "  br i1 %whole, label %all.of.it, label %part"
        yield "all.of.it:"
        yield f"  call void @{self.name}(ptr %src, ptr %dst)"
        yield "  ret void"
        yield "part:"
        numbers = units.of("i64")
        yield f"  %one = insertelement {numbers} poison, i64 %units, i64 0"
        yield f"  %all = shufflevector {numbers} %one, {numbers} poison, <{units.width} x i32> zeroinitializer"
        places = ", ".join(f"i64 {i}" for i in range(units.width))
        yield f"  %mask = icmp slt {numbers} <{places}>, %all"
        for i in range(self.rows):
            yield f"  %b{i} = icmp slt i64 {i}, %rows"
            yield f"  %m{i} = select i1 %b{i}, {units.truth} %mask, {units.truth} zeroinitializer"
            yield f"  %p{i} = getelementptr {units.element}, ptr %src, i64 {i * self.source}"
            # A masked load of an address that no page holds reads nothing, but traps to microcode.
            yield f"  %f{i}.p = select i1 %b{i}, ptr %p{i}, ptr %dst"
            operands = f"ptr %f{i}.p, i32 {ELEMENT_BYTES[units.element]}, {units.truth} %m{i}, {units} zeroinitializer"
            yield f"  %y{i} = call {units} @llvm.masked.load.{units.suffix}.p0({operands})"
        yield from self._exchange()
        yield "}"

    def _exchange(self) -> Iterator[str]:
        """The rows %y as columns, stored."""
        t, n = self.type, self.type.width
        for i in range(n):
            rows = [f"%y{i * self.joined + part}" for part in range(self.joined)]
            yield from join_parts(f"%x{i}.0", self.unit, self.row, t, rows)
        step = 1
        while step < n:
            for i in range(n):
                yield from self._swap_halves(i, step)
            step *= 2
        for i in range(n):
            yield f"  %q{i} = getelementptr {t.element}, ptr %dst, i64 {i * self.target}"
            out = f"%x{i}.{n.bit_length() - 1}"
            if self.flipped:
                yield f"  %f{i} = xor {t} {out}, {t.const(self.flipped)}"
                out = f"%f{i}"
            yield f"  store {t} {out}, ptr %q{i}, align {t.bits // 8}"
        yield "  ret void"

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


@dataclass(frozen=True)
class Squares:
    """The squares of a transposed copy: loops over them, and where each begins.

    `place(index)` gives the row and the unit of a square in the source, and the index of its first element in the
    target.
    """

    counts: Sequence[int]
    place: Callable[[Sequence[LaneValue]], tuple[str, str, Sequence[LaneValue]]]


def emit_transposes(
    kernel: LlvmKernelContext, t: RegisterType, unit: str, source: ClippedView, target: StridedMemRef, squares: Squares,
    flipped: int = 0, joined: int = 1,
) -> None:  # fmt: skip
    """Copy a matrix whose columns are contiguous to rows; `source` is (units, rows), of units of `unit`.

    The target has room for whole squares: what is outside the source is zero there. The bits `flipped` of each element
    are inverted, and `joined` rows of the source make one.
    """
    across = TransposeKernel(t, unit, int(source.memory.strides[1]), int(target.strides[-2]), flipped, joined)
    whole = _has_whole_squares(source, across)
    name = kernel.library.require(across.name, across.text)
    if not whole:
        kernel.library.require(f"{across.name}.clipped", across.clipped_text)

    def one(index: list[LaneValue]) -> None:
        row, units, place = squares.place(index)
        begin = emit_element_pointer(kernel, source.memory, [LaneValue(units), LaneValue(row)])
        end = emit_element_pointer(kernel, target, place)
        if whole:
            kernel.text.line(f"call void @{name}(ptr {begin}, ptr {end})")
        else:
            left = [_subtract(kernel, limit, at) for limit, at in ((source.limits[1], row), (source.limits[0], units))]
            kernel.text.line(f"call void @{across.name}.clipped(ptr {begin}, ptr {end}, i64 {left[0]}, i64 {left[1]})")
        kernel.scratch.record_access(source.memory)
        kernel.scratch.record_access(target)

    emit_scalar_loops(kernel, squares.counts, range(len(squares.counts)), [ZERO_LANE] * len(squares.counts), one)


def _has_whole_squares(source: ClippedView, kernel: TransposeKernel) -> bool:
    """Whether the squares cover the source exactly, and all of it is within bounds."""
    units, rows = source.limits
    return source.is_whole and int(units) % kernel.row.width == 0 and int(rows) % kernel.rows == 0


def _subtract(kernel: LlvmKernelContext, limit: str, at: str) -> str:
    if at == "0":
        return limit
    if is_number(limit) and is_number(at):
        return str(int(limit) - int(at))
    return kernel.text.let(f"sub i64 {limit}, {at}", "left")


def find_turned(kernel: LlvmKernelContext, v: Value) -> ClippedView | None:
    """A block that lies in memory by its second to last long axis, as a matrix (units, rows); None for others."""
    found = find_clipped_view(kernel, v)
    if found is None or any(not isinstance(n, int) for n in (*found.memory.shape, *found.memory.strides)):
        return None
    m = found.memory
    long = [a for a, n in enumerate(m.shape) if n != 1]
    if len(long) != 2 or m.strides[long[0]] != 1 or int(m.strides[long[1]]) <= 1:
        return None
    matrix = m.at(m.base, tuple(m.strides[a] for a in long), tuple(m.shape[a] for a in long))
    return ClippedView(matrix, tuple(found.limits[a] for a in long))


def keep_turned(kernel: LlvmKernelContext, node: Node) -> bool:
    """Transpose a block into scratch memory, where only stores use its elements: their lanes would be gathers."""
    if not all(s.node.op is tile.store for s in kernel.plan.sinks(node.out)):
        return False
    source, dtype = find_turned(kernel, node.out), get_tensor_type(node.out).dtype
    unit = f"i{8 * get_element_bytes(dtype)}"  # moved as they are
    width = kernel.vector_bytes // max(4, get_element_bytes(dtype))
    if source is None or source.memory.dtype != dtype:
        return False
    units, rows = (round_up(int(n), width) for n in source.memory.shape)
    if units * rows > MAX_WASTE * math.prod(static_shape(node.out.type)):
        return False
    target = kernel.scratch.allocate(dtype, (units, rows), (rows, 1))

    def place(index: Sequence[LaneValue]) -> tuple[str, str, list[LaneValue]]:
        at, row = (kernel.text.mul(i.name, width) for i in index)
        return row, at, [LaneValue(at), LaneValue(row)]

    emit_transposes(
        kernel, RegisterType(unit, width), unit, source, target, Squares((units // width, rows // width), place)
    )
    sizes = static_shape(node.out.type)
    long = [a for a, n in enumerate(sizes) if n != 1]
    strides = tuple(rows if a == long[0] else int(a == long[1]) for a in range(len(sizes)))
    kernel.buffers[node.out] = target.at(target.base, strides, sizes)
    return True
