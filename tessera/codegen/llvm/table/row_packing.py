"""Packing of contiguous rows: panels of an operand that may end within a tile are copied, whole registers at a time.

What lies outside of the operand is zero in the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.llvm.table.strided_views import ClippedView, emit_element_pointer
from tessera.codegen.llvm.text.builder import (
    ELEMENT_BYTES,
    ZERO_LANE,
    LaneValue,
    LoopBuilder,
    RegisterType,
    get_element_bytes,
    get_memory_type,
    is_number,
)
from tessera.codegen.llvm.text.memory import StridedMemRef
from tessera.core.types import DType, bf16, f16, f32

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext

STRIP = 4  # registers of a row that are copied side by side
PREFETCHED_ROWS = 16  # so many rows lie between one that is copied and the one that is fetched
CACHE_LINE = 64
CONVERTED = ("half", "bfloat")  # elements that become floats


@dataclass(frozen=True)
class PanelCopy:
    """A copy of `rows` rows of `vectors` registers; strides are in elements.

    `parts` rows of the source make one of the target: their elements of a column are the parts of a lane, the bits
    `flipped` of which are inverted. Elements of type half or bfloat become floats.
    """

    source: str  # the type of an element in memory: an integer of its size, half or bfloat
    target: RegisterType
    parts: int
    rows: int
    vectors: int
    source_row: int
    target_row: int
    flipped: int = 0

    @property
    def name(self) -> str:
        """The name of the function, which encodes all fields."""
        kind = f"{self.source}x{self.parts}.{self.target.suffix}.{self.flipped}"
        return f"ts.panel.{kind}.{self.rows}x{self.vectors}.{self.source_row}.{self.target_row}"

    @property
    def _bits(self) -> str:
        """The integer type of an element's size."""
        return "i16" if self.source in CONVERTED else self.source

    @property
    def loaded(self) -> RegisterType:
        """The type of the registers that are loaded."""
        return RegisterType(get_loaded_element(self.source), self.target.width)

    def text(self) -> Iterator[str]:
        """The function's lines; `%held` and `%columns` are the rows and columns that the source holds from here on."""
        parameters = "ptr %src, ptr noalias %dst, i64 %held, i64 %columns"
        yield f"define internal void @{self.name}({parameters}) noinline #0 {{"
        yield "entry:"
        yield "  %some = icmp sgt i64 %columns, 0"
        yield "  %least = call i64 @llvm.smax.i64(i64 %held, i64 0)"
        yield f"  %most = call i64 @llvm.smin.i64(i64 %least, i64 {self.rows * self.parts})"
        yield "  %count = select i1 %some, i64 %most, i64 0"
        yield f"  %steps = udiv i64 %count, {self.parts}"
        yield f"  %full = icmp sge i64 %columns, {self.vectors * self.target.width}"
        for n in range(self.vectors):
            yield from self._mask_lanes(n)
        yield "  %any = icmp ugt i64 %steps, 0"
        yield "  br i1 %any, label %first, label %rest"
        yield "first:"
        yield "  br i1 %full, label %whole, label %clipped"
        for label in ("whole", "clipped"):
            yield from self._emit_loop(label, "first", "0", "%steps", "rest")
        yield "rest:"
        yield f"  %more = icmp ult i64 %steps, {self.rows}"
        yield "  br i1 %more, label %guarded, label %done"
        yield from self._emit_loop("guarded", "rest", "%steps", str(self.rows), "done")
        yield "done:"
        yield "  ret void"
        yield "}"

    def _mask_lanes(self, n: int) -> Iterator[str]:
        """%m.n: the lanes of register n that the source holds, and %o.n, where it is, or a place that is held."""
        t, first = RegisterType(self._bits, self.target.width), n * self.target.width
        yield f"  %left.{n} = sub i64 %columns, {first}"
        yield f"  %most.{n} = call i64 @llvm.smin.i64(i64 %left.{n}, i64 {t.width})"
        yield f"  %some.{n} = call i64 @llvm.smax.i64(i64 %most.{n}, i64 0)"
        narrowed = f"trunc i64 %some.{n} to {t.element}" if t.bits < 64 else f"add i64 %some.{n}, 0"
        yield f"  %narrow.{n} = {narrowed}"
        yield f"  %one.{n} = insertelement {t} poison, {t.element} %narrow.{n}, i64 0"
        yield f"  %counts.{n} = shufflevector {t} %one.{n}, {t} poison, <{t.width} x i32> zeroinitializer"
        lanes = ", ".join(f"{t.element} {lane}" for lane in range(t.width))
        yield f"  %m.{n} = icmp ult {t} <{lanes}>, %counts.{n}"
        yield f"  %h.{n} = icmp slt i64 {first}, %columns"
        yield f"  %o.{n} = select i1 %h.{n}, i64 {first}, i64 0"

    def _emit_loop(self, label: str, before: str, begin: str, end: str, after: str) -> Iterator[str]:
        """Rows of the target from `begin` to before `end`: all lanes, those that are held, or also of rows that are."""
        yield f"{label}:"
        yield f"  %{label}.s = phi i64 [ {begin}, %{before} ], [ %{label}.next, %{label} ]"
        yield f"  %{label}.t = mul i64 %{label}.s, {self.target_row}"
        yield f"  %{label}.to = getelementptr {self.target.element}, ptr %dst, i64 %{label}.t"
        for part in range(self.parts):
            yield from self._locate_row(label, part)
        for n in range(self.vectors):
            found = []
            for part in range(self.parts):
                yield from self._load(label, n, part)
                found.append(f"%{label}.x.{n}.{part}")
            t, y = self.target, f"%{label}.y.{n}"
            yield from join_parts(y, self.source, self.loaded, t, found)
            if self.flipped:
                yield f"  {y}.f = xor {t} {y}, {t.const(self.flipped)}"
                y = f"{y}.f"
            yield f"  %{label}.to.{n} = getelementptr {t.element}, ptr %{label}.to, i64 {n * t.width}"
            yield f"  store {t} {y}, ptr %{label}.to.{n}, align {ELEMENT_BYTES[t.element]}"
        yield f"  %{label}.next = add i64 %{label}.s, 1"
        yield f"  %{label}.again = icmp ult i64 %{label}.next, {end}"
        yield f"  br i1 %{label}.again, label %{label}, label %{after}"

    def _locate_row(self, label: str, part: int) -> Iterator[str]:
        """The row of the source of a part; later ones are fetched."""
        name, e = f"%{label}.r.{part}", self.loaded.element
        yield f"  {name}.s = mul i64 %{label}.s, {self.parts}"
        yield f"  {name} = add i64 {name}.s, {part}"
        yield f"  {name}.o = mul i64 {name}, {self.source_row}"
        yield f"  {name}.p = getelementptr {e}, ptr %src, i64 {name}.o"
        if label == "guarded":
            yield f"  {name}.in = icmp slt i64 {name}, %count"
            return
        yield f"  {name}.f = getelementptr {e}, ptr {name}.p, i64 {PREFETCHED_ROWS * self.source_row}"
        size = self.vectors * self.target.width * ELEMENT_BYTES[e]
        for offset in (*range(0, size, CACHE_LINE), size - 1):  # rows begin anywhere within a line
            yield f"  {name}.f.{offset} = getelementptr i8, ptr {name}.f, i64 {offset}"
            yield f"  call void @llvm.prefetch.p0(ptr {name}.f.{offset}, i32 0, i32 3, i32 1)"

    def _load(self, label: str, n: int, part: int) -> Iterator[str]:
        t, row, x = self.loaded, f"%{label}.r.{part}", f"%{label}.x.{n}.{part}"
        size = ELEMENT_BYTES[t.element]
        yield f"  {x}.p = getelementptr {t.element}, ptr {row}.p, i64 {n * t.width if label == 'whole' else f'%o.{n}'}"
        if label == "whole":
            yield f"  {x} = load {t}, ptr {x}.p, align {size}"
            return
        place, mask = f"{x}.p", f"%m.{n}"
        if label == "guarded":
            # A masked load of an address that no page holds reads nothing, but traps to microcode.
            yield f"  {x}.f = select i1 {row}.in, ptr {x}.p, ptr %dst"
            yield f"  {x}.m = select i1 {row}.in, {t.truth} %m.{n}, {t.truth} zeroinitializer"
            place, mask = f"{x}.f", f"{x}.m"
        operands = f"ptr {place}, i32 {size}, {t.truth} {mask}, {t} zeroinitializer"
        yield f"  {x} = call {t} @llvm.masked.load.{t.suffix}.p0({operands})"


def get_loaded_element(source: str) -> str:
    """The type as which elements are loaded: bf16 has none of its own."""
    return "i16" if source == "bfloat" else source


def join_parts(d: str, source: str, own: RegisterType, t: RegisterType, parts: Sequence[str]) -> Iterator[str]:
    """The register of the target, of the registers of its parts, which are loaded as `own`."""
    if source == "half":
        yield f"  {d} = fpext {own} {parts[0]} to {t}"
    elif source == "bfloat":
        yield f"  {d}.w = zext {own} {parts[0]} to {t.integer}"
        yield f"  {d}.s = shl {t.integer} {d}.w, {t.integer.const(16)}"
        yield f"  {d} = bitcast {t.integer} {d}.s to {t}"
    elif len(parts) == 1:
        yield f"  {d} = bitcast {own} {parts[0]} to {t}"
    else:
        yield from _join_integers(d, own, t, parts)


def _join_integers(d: str, own: RegisterType, t: RegisterType, parts: Sequence[str]) -> Iterator[str]:
    """Each part in bits of its own, the first in the lowest."""
    total = f"{d}.w0"
    for n, part in enumerate(parts):
        yield f"  {d}.w{n} = zext {own} {part} to {t}"
        if n:
            to = d if n == len(parts) - 1 else f"{d}.o{n}"
            yield f"  {d}.s{n} = shl {t} {d}.w{n}, {t.const(n * t.bits // len(parts))}"
            yield f"  {to} = or {t} {total}, {d}.s{n}"
            total = to


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


def choose_source(source: DType, target: DType) -> str | None:
    """How elements of one type are copied to another: as integers of their size, or converted; None: not so."""
    if source == target:
        return f"i{8 * get_element_bytes(source)}"
    return {f16: "half", bf16: "bfloat"}.get(source) if target == f32 else None


def has_contiguous_rows(view: ClippedView | None) -> bool:
    """Whether rows of a view are contiguous, and its outer axes within bounds."""
    if view is None or not view.is_whole_but_for(2):
        return False
    return view.memory.strides[-1] == 1 and isinstance(view.memory.strides[-2], int)


def copy_rows(kernel: LlvmKernelContext, source: ClippedView, m: StridedMemRef, lanes: int) -> None:
    """Copy a matrix whose rows are contiguous; `m` has its shape, and room for whole registers in each row."""
    rows, columns = (int(n) for n in m.shape)
    vectors = -(-columns // lanes)
    whole, rest = vectors // STRIP, vectors % STRIP
    for first, count, size in ((0, whole, STRIP), (whole * STRIP, 1, rest)):
        if count and size:
            panels = m.at(
                emit_element_pointer(kernel, m, [ZERO_LANE, LaneValue(str(first * lanes))]),
                (size * lanes, m.strides[-2], 1), (count, rows, size * lanes),
            )  # fmt: skip
            copy_panels(kernel, source, panels, (first * lanes, lanes))


def copy_panels(
    kernel: LlvmKernelContext, source: ClippedView, panels: StridedMemRef, at: tuple[int, int], parts: int = 1,
    flipped: int = 0,
) -> None:  # fmt: skip
    """Copy columns of a matrix whose rows are contiguous to (panel, row, column); `at` has the first column and the
    lanes of a register."""
    count, rows, _ = (int(n) for n in panels.shape)
    first, lanes = at
    row = int(panels.strides[1])
    kind = f"i{8 * get_element_bytes(source.memory.dtype)}" if parts > 1 else None
    kind = kind or choose_source(source.memory.dtype, panels.dtype)
    assert kind is not None
    unit = get_memory_type(panels.dtype).element if parts > 1 or kind in CONVERTED else kind
    vectors = -(-int(panels.shape[2]) // lanes)
    copy = PanelCopy(
        kind, RegisterType(unit, lanes), parts, rows, vectors, int(source.memory.strides[-2]), row, flipped
    )
    name, text, columns = kernel.library.require(copy.name, copy.text), kernel.text, vectors * lanes
    with LoopBuilder(text, "0", str(count)) as loop:
        start = text.add(str(first), text.mul(loop.index, columns))
        begin = emit_element_pointer(kernel, source.memory, [ZERO_LANE, LaneValue(start)])
        end = emit_element_pointer(kernel, panels, [LaneValue(loop.index), ZERO_LANE, ZERO_LANE])
        held, limit = source.limits[-2:]
        left = str(int(limit) - int(start)) if is_number(limit) and is_number(start) else None
        left = left or (limit if start == "0" else text.let(f"sub i64 {limit}, {start}", "left"))
        for each in (source.memory, panels):
            kernel.scratch.record_access(each)
        text.line(f"call void @{name}(ptr {begin}, ptr {end}, i64 {held}, i64 {left})")
        for each in (source.memory, panels):
            kernel.scratch.record_access(each)
