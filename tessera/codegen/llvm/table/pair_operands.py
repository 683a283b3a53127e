"""Pair operands: operands packed so that a register lane holds two elements of 16 bits adjacent in K, or four of 8.

A is row-major, its rows filled up with zeros to whole lanes; B is in panels whose rows have a lane for each column. The
instruction for bf16 takes subnormal numbers as zero. Products whose operands' least exponents rule out subnormal
operands, products and sums use it; the others use the plain definition.

The products of bytes take one signed operand and one unsigned. Where B is of the other kind, the high bits of its
elements are inverted, which adds 128 to each or subtracts it, and `emit_offsets` computes what that changes in the sums
of a row of A. All of this is exact modulo 2^32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.contract import get_tensor_type
from tessera.codegen.llvm.table.loop_fusion import emit_element, emit_loop_nest, emit_operation, widen_lane
from tessera.codegen.llvm.table.microkernels import MicroKernel
from tessera.codegen.llvm.table.row_packing import mask_lanes
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import LaneIndex, LaneKind, LaneValue, LoopBody, get_register_type
from tessera.codegen.llvm.text.memory import StridedMemRef
from tessera.codegen.llvm.text.pair_products import BF16, INT8_UINT8, INT16, QUADS, UINT8_INT8, WIDTH, PairProduct
from tessera.core.symbolic_dim import round_up
from tessera.core.types import DType, bf16, f32, int4, int8, int16, int32, uint8
from tessera.ir.core import Value

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext

# The exponents (with their bias) of the least elements of A and B must add up to at least this: a unit in the last
# place of every product is then at least 2^-126, and so is every sum that is not zero.
LEAST_EXPONENTS = 2 * 127 + 2 * 7 - 126


def choose_pair_product(kernel: LlvmKernelContext, a: Value, b: Value, to: DType, width: int) -> PairProduct | None:
    """The product of pairs for operands whose products are summed in a type, or None."""
    dtypes = {get_tensor_type(v).dtype for v in (a, b)}
    if width != WIDTH:
        return None
    if dtypes == {bf16} and to == f32:
        return BF16 if kernel.pair_products else None
    if not (dtypes <= {int8, uint8, int4} and to == int32) or kernel.byte_products == 1:
        return None
    if kernel.byte_products == 2:
        return INT16
    return UINT8_INT8 if get_tensor_type(a).dtype == uint8 else INT8_UINT8


def get_packed_dtype(pair: PairProduct) -> DType:
    """The element type of a packed A."""
    return {BF16: bf16, INT16: int16, UINT8_INT8: uint8, INT8_UINT8: int8}[pair]


def view_as_pairs(view: StridedMemRef | None, pair: PairProduct | None) -> bool:
    """Whether lanes of adjacent elements of K can be read in place: K is the axis of stride 1, of whole lanes."""
    if view is None or pair is None or view.dtype != get_packed_dtype(pair):
        return False
    rows, depth = view.shape[-2:]
    return (
        view.strides[-1] == 1 and isinstance(view.strides[-2], int) and int(depth) % pair.parts == 0 and int(rows) > 0
    )


def clear_last_columns(kernel: LlvmKernelContext, m: StridedMemRef, depth: int, pair: PairProduct) -> None:
    """Zeros behind rows that end within a lane."""
    text, bytes_ = kernel.text, 4 // pair.parts

    def visit(body: LoopBody, index: LaneIndex) -> None:
        (row,) = index
        kernel.scratch.record_access(m)
        for column in range(depth, round_up(depth, pair.parts)):
            place = text.add(text.mul(row.name, int(m.strides[0])), str(column))
            at = text.let(f"getelementptr {pair.unit}, ptr {m.base}, i64 {place}", "p")
            text.line(f"store {pair.unit} 0, ptr {at}, align {bytes_}")

    emit_loop_nest(kernel, [int(m.shape[0])], 1, visit)


def find_flipped_bits(pair: PairProduct | None, b: Value) -> int:
    """The bits of a lane of B that are inverted: the highest of each byte, where B is of the other kind."""
    if pair not in QUADS:
        return 0
    is_signed = get_tensor_type(b).dtype != uint8
    return 0x80808080 if is_signed == (pair is INT8_UINT8) else 0


def pack_pairs(
    kernel: LlvmKernelContext, v: Value, m: StridedMemRef, place: object, depth: int, pair: PairProduct
) -> None:
    """Compute the panels of B: the element of a panel is a lane. `place(body, (panel, k, n))` is an index of B."""
    panels, lanes, columns = (int(n) for n in m.shape)
    parts, flipped = pair.parts, find_flipped_bits(pair, v)

    def emit(body: LoopBody, index: LaneIndex, count: int) -> None:
        panel, lane, n = index
        places = []
        with body.hoist(lane):
            first = LaneValue(body.text.mul(lane.name, parts), lane.kind)
            for part in range(count):
                places.append(LaneValue(body.text.add(first.name, str(part)), lane.kind) if part else first)
        found = [emit_part(body, v, place(body, (panel, k, n))) for k in places]  # type: ignore[operator]
        joined = _join(body, found, 32 // parts, flipped)
        memory.store_lane(LoopBody(kernel, body.width) if columns != 1 else body, m, index, joined)

    if whole := depth // parts:
        emit_loop_nest(kernel, [panels, whole, columns], WIDTH, lambda body, index: emit(body, index, parts))
    if rest := depth % parts:
        last = LaneValue(str(lanes - 1))
        nest = [panels, 1, columns]
        emit_loop_nest(kernel, nest, WIDTH, lambda body, index: emit(body, (index[0], last, index[2]), rest))


def emit_part(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    """An element as an integer of 32 bits whose low ones are its bits; the others are not defined."""
    dtype, lane = get_tensor_type(v).dtype, emit_element(body, v, index)
    if dtype != bf16:
        return widen_lane(body, dtype, int32, lane)

    def lines(width: int, d: str, x: str) -> Iterator[str]:
        t = get_register_type(bf16, width)
        yield f"{d}.b = bitcast {t} {x} to {t.integer}"
        yield f"{d} = lshr {t.integer} {d}.b, {t.integer.const(16)}"

    return emit_operation(body, lines, [(lane, dtype)])


def _join(body: LoopBody, parts: Sequence[LaneValue], bits: int, flipped: int) -> LaneValue:
    """Elements of so many bits as one integer, in every lane; then some of its bits inverted."""
    t, text = get_register_type(int32, body.width), body.text
    out = ""
    for n, part in enumerate(parts):
        lane = text.let(f"and {t} {body.broadcast_lane(part, t)}, {t.const((1 << bits) - 1)}")
        shifted = text.let(f"shl {t} {lane}, {t.const(n * bits)}") if n else lane
        out = text.let(f"or {t} {out}, {shifted}") if n else shifted
    out = text.let(f"xor {t} {out}, {t.const(flipped)}") if flipped else out
    return LaneValue(out, LaneKind.VARYING if body.width > 1 else LaneKind.INVARIANT)


# The sums of rows of A.


def emit_offsets(
    kernel: LlvmKernelContext, a: StridedMemRef, rows: int, depth: int, pair: PairProduct
) -> StridedMemRef:
    """What the sums of each row of A begin with, where the highest bits of B are inverted.

    The bytes 0x80 are -128 or 128, as which the product takes them: the change of every element of B.
    """
    offsets = kernel.scratch.allocate(int32, (rows,), (1,))
    name = kernel.library.require(f"ts.offsets.{pair.name}", lambda: _define_offsets(pair))
    kernel.library.require(pair.function, pair.text)
    for m in (a, offsets):
        kernel.scratch.record_access(m)
    stride = int(a.strides[0])
    kernel.text.line(f"call void @{name}(ptr {a.base}, i64 {rows}, i64 {stride}, i64 {depth}, ptr {offsets.base})")
    return offsets


def _define_offsets(pair: PairProduct) -> Iterator[str]:
    count = pair.parts * WIDTH
    t, lanes, mask = f"<{count} x i8>", f"<{WIDTH} x i32>", f"<{count} x i1>"
    parameters = "ptr %p, i64 %rows, i64 %stride, i64 %count, ptr %out"
    yield f"define internal void @ts.offsets.{pair.name}({parameters}) noinline #0 {{"
    yield "entry:"
    yield "  br label %row"
    yield "row:"
    yield "  %r = phi i64 [ 0, %entry ], [ %r.next, %end ]"
    yield "  %o = mul i64 %r, %stride"
    yield "  %pr = getelementptr i8, ptr %p, i64 %o"
    yield "  br label %column"
    yield "column:"
    yield "  %n = phi i64 [ 0, %row ], [ %n.next, %column ]"
    yield f"  %total = phi {lanes} [ zeroinitializer, %row ], [ %new, %column ]"
    yield "  %at = getelementptr i8, ptr %pr, i64 %n"
    yield from mask_lanes(count, "i8")
    yield f"  %x = call {t} @llvm.masked.load.v{count}i8.p0(ptr %at, i32 1, {mask} %m, {t} zeroinitializer)"
    yield f"  %y = bitcast {t} %x to {lanes}"
    yield f"  %new = {pair.call('%total', '%y', f'splat (i32 {0x80808080 - (1 << 32)})')}"
    yield f"  %n.next = add i64 %n, {count}"
    yield "  %more = icmp slt i64 %n.next, %count"
    yield "  br i1 %more, label %column, label %end"
    yield "end:"
    yield f"  %sum = call i32 @llvm.vector.reduce.add.v{WIDTH}i32({lanes} %new)"
    yield "  %first = sub i32 0, %sum"
    yield "  %po = getelementptr i32, ptr %out, i64 %r"
    yield "  store i32 %first, ptr %po, align 4"
    yield "  %r.next = add i64 %r, 1"
    yield "  %again = icmp slt i64 %r.next, %rows"
    yield "  br i1 %again, label %row, label %done"
    yield "done:"
    yield "  ret void"
    yield "}"


# The choice between the instruction and the plain definition.


FIND_LEAST = "ts.find_least.bf16"


def find_least(kernel: LlvmKernelContext, m: StridedMemRef, rows: int, stride: int, count: int) -> str:
    """The least magnitude but zero of `rows` rows of `count` bf16 elements, as its bits less 1; 0xFFFF if all are 0."""
    kernel.library.require(FIND_LEAST, _define_find_least)
    kernel.scratch.record_access(m)
    return kernel.text.let(f"call i32 @{FIND_LEAST}(ptr {m.base}, i64 {rows}, i64 {stride}, i64 {count})", "least")


def emit_choice(kernel: LlvmKernelContext, a: str, b: str) -> str:
    """Whether the instruction may be used, by the least elements of A and B."""
    text, exponents = kernel.text, []
    for least in (a, b):
        bits = text.let(f"add i32 {least}, 1", "e")
        exponents.append(text.let(f"lshr i32 {bits}, 7", "e"))
    tests = [text.let(f"icmp ne i32 {e}, 0", "b") for e in exponents]
    total = text.let(f"add i32 {exponents[0]}, {exponents[1]}", "e")
    tests.append(text.let(f"icmp uge i32 {total}, {LEAST_EXPONENTS}", "b"))
    both = text.let(f"and i1 {tests[0]}, {tests[1]}", "b")
    return text.let(f"and i1 {both}, {tests[2]}", "b")


def define_choice(name: str, native: MicroKernel, exact: MicroKernel) -> Iterator[str]:
    """A microkernel that calls one of two."""
    yield f"define internal void @{name}(ptr noalias %a, ptr noalias %b, ptr noalias %c, i1 %native) noinline #0 {{"
    yield "entry:"
    yield "  br i1 %native, label %fast, label %plain"
    for label, each in (("fast", native), ("plain", exact)):
        yield f"{label}:"
        yield f"  call void @{each.name}(ptr %a, ptr %b, ptr %c)"
        yield "  ret void"
    yield "}"


def _keep_least(tag: str, x: str, best: str, d: str) -> Iterator[str]:
    """The least magnitudes less 1 so far."""
    t, suffix = f"<{2 * WIDTH} x i16>", f"v{2 * WIDTH}i16"
    yield f"  %size.{tag} = and {t} {x}, splat (i16 32767)"
    yield f"  %less.{tag} = sub {t} %size.{tag}, splat (i16 1)"
    yield f"  {d} = call {t} @llvm.umin.{suffix}({t} {best}, {t} %less.{tag})"


def _define_find_least() -> Iterator[str]:
    t = f"<{2 * WIDTH} x i16>"
    mask, suffix = f"<{2 * WIDTH} x i1>", f"v{2 * WIDTH}i16"
    yield f"define internal i32 @{FIND_LEAST}(ptr %p, i64 %rows, i64 %stride, i64 %count) noinline #0 {{"
    yield "entry:"
    yield "  br label %row"
    yield "row:"
    yield "  %r = phi i64 [ 0, %entry ], [ %r.next, %end ]"
    yield f"  %old = phi {t} [ splat (i16 -1), %entry ], [ %new, %end ]"
    yield "  %o = mul i64 %r, %stride"
    yield "  %pr = getelementptr i16, ptr %p, i64 %o"
    yield f"  %whole = and i64 %count, {-2 * WIDTH}"
    yield "  %any = icmp ne i64 %whole, 0"
    yield "  br i1 %any, label %column, label %tail"
    yield "column:"
    yield "  %k = phi i64 [ 0, %row ], [ %k.next, %column ]"
    yield f"  %best = phi {t} [ %old, %row ], [ %better, %column ]"
    yield "  %pk = getelementptr i16, ptr %pr, i64 %k"
    yield f"  %xk = load {t}, ptr %pk, align 2"
    yield from _keep_least("k", "%xk", "%best", "%better")
    yield f"  %k.next = add i64 %k, {2 * WIDTH}"
    yield "  %more = icmp slt i64 %k.next, %whole"
    yield "  br i1 %more, label %column, label %tail"
    yield "tail:"
    yield f"  %last = phi {t} [ %old, %row ], [ %better, %column ]"
    yield "  %n = add i64 %whole, 0"
    yield "  %at = getelementptr i16, ptr %pr, i64 %n"
    yield from mask_lanes(2 * WIDTH, "i16")
    yield "  %held = icmp slt i64 %n, %count"
    yield "  %from = select i1 %held, ptr %at, ptr %p"
    yield f"  %x = call {t} @llvm.masked.load.{suffix}.p0(ptr %from, i32 2, {mask} %m, {t} zeroinitializer)"
    yield from _keep_least("n", "%x", "%last", "%new")
    yield "  br label %end"
    yield "end:"
    yield "  %r.next = add i64 %r, 1"
    yield "  %again = icmp slt i64 %r.next, %rows"
    yield "  br i1 %again, label %row, label %done"
    yield "done:"
    yield f"  %all = call i16 @llvm.vector.reduce.umin.{suffix}({t} %new)"
    yield "  %found = zext i16 %all to i32"
    yield "  ret i32 %found"
    yield "}"


def require_pair_kernel(kernel: LlvmKernelContext, micro: MicroKernel, exact: MicroKernel | None) -> str:
    """Define a microkernel of pairs with its product, or the choice between two; its name."""
    for each in (micro, exact):
        if each is not None and each.pair is not None:
            kernel.library.require(each.name, each.text)
            kernel.library.require(each.pair.function, each.pair.text)
    if exact is None:
        return micro.name
    return kernel.library.require(f"{micro.name}.choice", lambda: define_choice(f"{micro.name}.choice", micro, exact))
