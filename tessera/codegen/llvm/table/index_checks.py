"""Checked indices: the first failure of a launch, by program and then by site, is reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tessera.codegen.artifact import describe_size
from tessera.codegen.llvm.table.loop_fusion import (
    cast_to_index,
    element_rule,
    emit_element,
)
from tessera.codegen.llvm.table.program_ops import describe_site
from tessera.codegen.llvm.text.builder import (
    LaneValue,
    RegisterType,
    format_step_vector,
)
from tessera.codegen.llvm.text.protocol import (
    FAILURE_PROGRAM_BIT,
    FAILURE_WORD,
    REPORT_CONTEXT,
    REPORT_FUNCTION,
)
from tessera.core.symbolic_dim import proves_less
from tessera.ir.core import Node
from tessera.ops.tensor import shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


_PROGRAM_PARAMETERS = "i64 %pid0, i64 %pid1, i64 %pid2, i64 %grid1, i64 %grid2"


@element_rule(shape.check_index)
def _(body, node, index):
    (v,), size = node.args, node.attrs["size"]
    lane = cast_to_index(body, v, emit_element(body, v, index))
    low, high = body.kernel.ranges.of(v)
    if low >= 0 and proves_less(high, size):
        return lane
    bound = body.kernel.sizes.find(size)
    t = RegisterType("i64", body.width_of(lane))
    library = body.kernel.library
    name = library.require(f"ts.check_index.{t.suffix}", lambda: _define_check(t))
    library.require(f"ts.wrap_index.{t.suffix}", lambda: _define_wrap(t))
    library.require(f"ts.report_index.{t.suffix}", lambda: _define_report(t))
    site = _add_index_site(body.kernel, node)
    counted = (body.mask if t.width > 1 else None) or t.truth.const(1)
    with body.hoist(lane):
        found = body.text.let(
            f"call {t} @{name}({t} {body.broadcast_lane(lane, t)}, {t.truth} {counted}, i64 {bound}, "
            f"i64 {bound if node.attrs['wrap'] else 0}, i64 {site}, {_PROGRAM_PARAMETERS})",
            "i",
        )
    return LaneValue(found, body.kind_of(lane))


def _add_index_site(kernel: LlvmKernelContext, node: Node) -> int:
    """The number of a check's site; one node that several loops compute has one."""
    if node not in kernel.index_sites:
        described = {**describe_site(kernel, node), "kind": "index", "operands": [{"shape": [], "dtype": "int64"}]}
        described["size"] = describe_size(node.attrs["size"])
        kernel.index_sites[node] = kernel.library.add_site(described)
    return kernel.index_sites[node]


def _define_check(t: RegisterType) -> Iterator[str]:
    """The function that checks a register of indices; inlined up to the first index that is not in bounds as it is."""
    parameters = f"{t} %x, {t.truth} %counted, i64 %size, i64 %add, i64 %site, {_PROGRAM_PARAMETERS}"
    yield f"define internal {t} @ts.check_index.{t.suffix}({parameters}) alwaysinline #0 {{"
    yield "entry:"
    yield from _define_splat(t, "size")
    yield f"  %beyond = icmp uge {t} %x, %size.v"
    yield f"  %other = and {t.truth} %beyond, %counted"
    yield f"  %any = {_format_any(t, '%other')}"
    yield "  br i1 %any, label %rare, label %leave"
    yield "rare:"
    yield f"  %wrapped = call {t} @ts.wrap_index.{t.suffix}({parameters})"
    yield "  br label %leave"
    yield "leave:"
    yield f"  %place = phi {t} [ %x, %entry ], [ %wrapped, %rare ]"
    yield f"  ret {t} %place"
    yield "}"


def _format_any(t: RegisterType, mask: str) -> str:
    """Whether a lane of a mask is true."""
    if t.width == 1:
        return f"and i1 {mask}, true"
    return f"call i1 @llvm.vector.reduce.or.{t.truth.suffix}({t.truth} {mask})"


def _define_wrap(t: RegisterType) -> Iterator[str]:
    """The function for a register with negative indices, or with indices out of bounds: they become 0."""
    yield f"define internal {t} @ts.wrap_index.{t.suffix}({t} %x, {t.truth} %counted, i64 %size, i64 %add, i64 %site, "
    yield f"    {_PROGRAM_PARAMETERS}) cold noinline #0 {{"
    yield "entry:"
    for name in ("size", "add"):
        yield from _define_splat(t, name)
    yield f"  %negative = icmp slt {t} %x, {t.const(0)}"
    yield f"  %moved = add {t} %x, %add.v"
    yield f"  %place = select {t.truth} %negative, {t} %moved, {t} %x"
    yield f"  %outside = icmp uge {t} %place, %size.v"
    yield f"  %bad = and {t.truth} %outside, %counted"
    yield f"  %any = {_format_any(t, '%bad')}"
    yield "  br i1 %any, label %failed, label %passed"
    yield "failed:"
    yield f"  call void @ts.report_index.{t.suffix}({t} %x, {t.truth} %bad, i64 %site, {_PROGRAM_PARAMETERS})"
    yield "  br label %passed"
    yield "passed:"
    yield f"  %safe = select {t.truth} %outside, {t} {t.const(0)}, {t} %place"
    yield f"  ret {t} %safe"
    yield "}"


def _define_splat(t: RegisterType, name: str) -> Iterator[str]:
    """The register %name.v of a scalar parameter."""
    if t.width == 1:
        yield f"  %{name}.v = add i64 %{name}, 0"
        return
    yield f"  %{name}.s = insertelement {t} poison, i64 %{name}, i64 0"
    yield f"  %{name}.v = shufflevector {t} %{name}.s, {t} poison, <{t.width} x i32> zeroinitializer"


def _define_report(t: RegisterType) -> Iterator[str]:
    """The function that reports the first bad index of a register, unless an earlier failure is known."""
    yield f"define internal void @ts.report_index.{t.suffix}({t} %x, {t.truth} %bad, i64 %site,"
    yield f"    {_PROGRAM_PARAMETERS}) cold noinline #0 {{"
    yield "entry:"
    yield "  %rows = mul i64 %pid0, %grid1"
    yield "  %row = add i64 %rows, %pid1"
    yield "  %base = mul i64 %row, %grid2"
    yield "  %program = add i64 %base, %pid2"
    yield "  %number = add i64 %program, 1"
    yield f"  %high = shl i64 %number, {FAILURE_PROGRAM_BIT}"
    yield "  %key = or i64 %high, %site"
    yield f"  %old = atomicrmw umin ptr @{FAILURE_WORD}, i64 %key monotonic"
    yield "  %new = icmp ult i64 %key, %old"
    yield "  br i1 %new, label %report, label %known"
    yield "report:"
    yield "  %slot = alloca i64, align 8"
    yield "  %table = alloca ptr, align 8"
    yield from _extract_first(t)
    yield "  store i64 %first, ptr %slot, align 8"
    yield "  store ptr %slot, ptr %table, align 8"
    yield f"  %context = load i64, ptr @{REPORT_CONTEXT}, align 8"
    yield f"  call void @{REPORT_FUNCTION}(i64 %context, i64 %site, i64 %program, ptr %table)"
    yield "  br label %known"
    yield "known:"
    yield "  ret void"
    yield "}"


def _extract_first(t: RegisterType) -> Iterator[str]:
    """The register %first: the element of %x in the first lane of %bad."""
    if t.width == 1:
        yield "  %first = add i64 %x, 0"
        return
    yield f"  %lanes = select {t.truth} %bad, {t} {format_step_vector(t)}, {t} {t.const(t.width)}"
    yield f"  %lane = call i64 @llvm.vector.reduce.umin.{t.suffix}({t} %lanes)"
    yield f"  %first = extractelement {t} %x, i64 %lane"
