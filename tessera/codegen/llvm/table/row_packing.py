"""Row packing: rows of an operand that may end within a tile are copied, whole registers at a time.

What lies outside of the operand is zero in the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.llvm.table.strided_views import ClippedView
from tessera.codegen.llvm.text.builder import ELEMENT_BYTES, get_element_bytes
from tessera.codegen.llvm.text.memory import StridedMemRef

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


@dataclass(frozen=True)
class RowCopy:
    """A copy of `rows` rows of `columns` elements, those that are held; strides are in elements.

    A row of the target has room for whole registers.
    """

    element: str  # the integer type of its bits
    lanes: int
    rows: int
    columns: int
    source: int
    target: int

    @property
    def name(self) -> str:
        """The name of the function, which encodes all fields."""
        return f"ts.rows.{self.element}x{self.lanes}.{self.rows}x{self.columns}.{self.source}.{self.target}"

    def text(self) -> Iterator[str]:
        """The function's lines; `%rows` and `%columns` are what the source holds."""
        e, size = self.element, ELEMENT_BYTES[self.element]
        t = f"<{self.lanes} x {e}>"
        yield f"define internal void @{self.name}(ptr %src, ptr noalias %dst, i64 %rows, i64 %columns) noinline #0 {{"
        yield "entry:"
        yield "  br label %row"
        yield "row:"
        yield "  %r = phi i64 [ 0, %entry ], [ %r.next, %end ]"
        yield "  %held = icmp slt i64 %r, %rows"
        yield "  %count = select i1 %held, i64 %columns, i64 0"
        for name, stride in (("src", self.source), ("dst", self.target)):
            yield f"  %{name}.o = mul i64 %r, {stride}"
            yield f"  %{name}.r = getelementptr {e}, ptr %{name}, i64 %{name}.o"
        yield "  br label %column"
        yield "column:"
        yield "  %n = phi i64 [ 0, %row ], [ %n.next, %column ]"
        yield f"  %at = getelementptr {e}, ptr %src.r, i64 %n"
        yield f"  %to = getelementptr {e}, ptr %dst.r, i64 %n"
        yield from mask_lanes(self.lanes, e)
        # A masked load of an address that no page holds reads nothing, but traps to microcode.
        yield "  %any = icmp slt i64 %n, %count"
        yield "  %from = select i1 %any, ptr %at, ptr %to"
        masked = f"ptr %from, i32 {size}, <{self.lanes} x i1> %m, {t} zeroinitializer"
        yield f"  %x = call {t} @llvm.masked.load.v{self.lanes}{e}.p0({masked})"
        yield f"  store {t} %x, ptr %to, align {size}"
        yield f"  %n.next = add i64 %n, {self.lanes}"
        yield f"  %more = icmp slt i64 %n.next, {self.columns}"
        yield "  br i1 %more, label %column, label %end"
        yield "end:"
        yield "  %r.next = add i64 %r, 1"
        yield f"  %again = icmp slt i64 %r.next, {self.rows}"
        yield "  br i1 %again, label %row, label %done"
        yield "done:"
        yield "  ret void"
        yield "}"


def mask_lanes(width: int, element: str) -> Iterator[str]:
    """%m: the lanes of a register at %n that lie before %count, by one comparison of narrow integers."""
    t = f"<{width} x {element}>"
    yield "  %left = sub i64 %count, %n"
    yield f"  %most = call i64 @llvm.smin.i64(i64 %left, i64 {width})"
    yield "  %some = call i64 @llvm.smax.i64(i64 %most, i64 0)"
    yield f"  %narrow = trunc i64 %some to {element}"
    yield f"  %one = insertelement {t} poison, {element} %narrow, i64 0"
    yield f"  %counts = shufflevector {t} %one, {t} poison, <{width} x i32> zeroinitializer"
    yield f"  %m = icmp ult {t} <{', '.join(f'{element} {n}' for n in range(width))}>, %counts"


def copy_rows(kernel: LlvmKernelContext, source: ClippedView, m: StridedMemRef, lanes: int) -> None:
    """Copy a matrix whose rows are contiguous; `m` has its shape and type, and room for whole registers."""
    rows, columns = (int(n) for n in m.shape)
    copy = RowCopy(
        f"i{8 * get_element_bytes(m.dtype)}", lanes, rows, columns, int(source.memory.strides[-2]), int(m.strides[-2])
    )
    name = kernel.library.require(copy.name, copy.text)
    held = ", ".join(f"i64 {limit}" for limit in source.limits[-2:])
    for each in (source.memory, m):
        kernel.scratch.record_access(each)
    kernel.text.line(f"call void @{name}(ptr {source.memory.base}, ptr {m.base}, {held})")
    for each in (source.memory, m):
        kernel.scratch.record_access(each)
