"""Pair operands: operands of 16 bits packed so that a register lane holds two adjacent elements of K.

A is row-major, its rows of even length; B is in panels whose rows have a pair for each column. The instruction for bf16
takes subnormal numbers as zero. Products whose operands' least exponents rule out subnormal operands, products and
sums use it; the others use the plain definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tessera.codegen.contract import get_tensor_type
from tessera.codegen.llvm.table.loop_fusion import emit_element, emit_loop_nest, emit_operation, widen_lane
from tessera.codegen.llvm.table.microkernels import MicroKernel
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import LaneIndex, LaneKind, LaneValue, LoopBody, get_register_type
from tessera.codegen.llvm.text.memory import StridedMemRef
from tessera.codegen.llvm.text.pair_products import BF16, INT16, WIDTH, PairProduct
from tessera.core.types import DType, bf16, f32, int4, int8, int16, int32, uint8
from tessera.ir.core import Value

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext

# The exponents (with their bias) of the least elements of A and B must add up to at least this: a unit in the last
# place of every product is then at least 2^-126, and so is every sum that is not zero.
LEAST_EXPONENTS = 2 * 127 + 2 * 7 - 126


def choose_pair_product(kernel: LlvmKernelContext, a: Value, b: Value, to: DType, width: int) -> PairProduct | None:
    """The product of pairs for operands whose products are summed in a type, or None."""
    if not kernel.pair_products or width != WIDTH:
        return None
    dtypes = {get_tensor_type(v).dtype for v in (a, b)}
    if dtypes == {bf16} and to == f32:
        return BF16
    return INT16 if dtypes <= {int8, uint8, int4} and to == int32 else None


def get_packed_dtype(pair: PairProduct) -> DType:
    """The element type of a packed A."""
    return bf16 if pair is BF16 else int16


def view_as_pairs(view: StridedMemRef | None, pair: PairProduct | None) -> bool:
    """Whether pairs of adjacent elements of K can be read in place: K is the axis of stride 1, of even length."""
    if view is None or pair is not BF16 or view.dtype != bf16:
        return False
    rows, depth = view.shape[-2:]
    return view.strides[-1] == 1 and isinstance(view.strides[-2], int) and int(depth) % 2 == 0 and int(rows) > 0


def clear_last_column(kernel: LlvmKernelContext, m: StridedMemRef, depth: int) -> None:
    """Zeros behind rows of odd length: the other half of their last pair."""
    text = kernel.text

    def visit(body: LoopBody, index: LaneIndex) -> None:
        (row,) = index
        place = text.add(text.mul(row.name, int(m.strides[0])), str(depth))
        at = text.let(f"getelementptr i16, ptr {m.base}, i64 {place}", "p")
        kernel.scratch.record_access(m)
        text.line(f"store i16 0, ptr {at}, align 2")

    emit_loop_nest(kernel, [int(m.shape[0])], 1, visit)


def pack_pairs(kernel: LlvmKernelContext, v: Value, m: StridedMemRef, place: object, depth: int) -> None:
    """Compute the panels of B: the element of a panel is a pair. `place(body, (panel, k, n))` is an index of B."""
    panels, pairs, columns = (int(n) for n in m.shape)
    whole = depth // 2

    def emit(body: LoopBody, index: LaneIndex, single: bool) -> None:
        panel, pair, n = index
        with body.hoist(pair):
            first = LaneValue(body.text.mul(pair.name, 2), pair.kind)
            second = LaneValue(body.text.add(first.name, "1"), pair.kind)
        low = emit_half(body, v, place(body, (panel, first, n)))  # type: ignore[operator]
        high = None if single else emit_half(body, v, place(body, (panel, second, n)))  # type: ignore[operator]
        memory.store_lane(LoopBody(kernel, body.width) if columns != 1 else body, m, index, _join(body, low, high))

    if whole:
        emit_loop_nest(kernel, [panels, whole, columns], WIDTH, lambda body, index: emit(body, index, False))
    if depth % 2:
        last = LaneValue(str(pairs - 1))
        nest = [panels, 1, columns]
        emit_loop_nest(kernel, nest, WIDTH, lambda body, index: emit(body, (index[0], last, index[2]), True))


def emit_half(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    """An element as an integer of 32 bits whose low half is its bits; the high half is not defined."""
    dtype, lane = get_tensor_type(v).dtype, emit_element(body, v, index)
    if dtype != bf16:
        return widen_lane(body, dtype, int32, lane)

    def lines(width: int, d: str, x: str) -> Iterator[str]:
        t = get_register_type(bf16, width)
        yield f"{d}.b = bitcast {t} {x} to {t.integer}"
        yield f"{d} = lshr {t.integer} {d}.b, {t.integer.const(16)}"

    return emit_operation(body, lines, [(lane, dtype)])


def _join(body: LoopBody, low: LaneValue, high: LaneValue | None) -> LaneValue:
    """Two halves as one integer, in every lane."""
    t = get_register_type(int32, body.width)
    out = body.text.let(f"and {t} {body.broadcast_lane(low, t)}, {t.const(0xFFFF)}")
    if high is not None:
        shifted = body.text.let(f"shl {t} {body.broadcast_lane(high, t)}, {t.const(16)}")
        out = body.text.let(f"or {t} {out}, {shifted}")
    return LaneValue(out, LaneKind.VARYING if body.width > 1 else LaneKind.INVARIANT)


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
    yield "  br label %column"
    yield "column:"
    yield "  %n = phi i64 [ 0, %row ], [ %n.next, %column ]"
    yield f"  %best = phi {t} [ %old, %row ], [ %new, %column ]"
    yield "  %at = getelementptr i16, ptr %pr, i64 %n"
    yield f"  %m = call {mask} @llvm.get.active.lane.mask.v{2 * WIDTH}i1.i64(i64 %n, i64 %count)"
    yield f"  %x = call {t} @llvm.masked.load.{suffix}.p0(ptr %at, i32 2, {mask} %m, {t} zeroinitializer)"
    yield f"  %size = and {t} %x, splat (i16 32767)"
    yield f"  %less = sub {t} %size, splat (i16 1)"
    yield f"  %new = call {t} @llvm.umin.{suffix}({t} %best, {t} %less)"
    yield f"  %n.next = add i64 %n, {2 * WIDTH}"
    yield "  %more = icmp slt i64 %n.next, %count"
    yield "  br i1 %more, label %column, label %end"
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
