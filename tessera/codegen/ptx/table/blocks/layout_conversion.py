"""Layout conversion: blocks moved between threads by warp shuffles or shared memory; constants, ramps and views."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.codegen.ptx.context import EmissionContext, Registers
from tessera.codegen.ptx.layout import DistributedLayout, Sizes, match_reshape_bits
from tessera.codegen.ptx.ops import convert_layout
from tessera.codegen.ptx.passes.barrier_insertion import READ, WRITE
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.scalars import packing
from tessera.codegen.ptx.table.scalars.conversion import convert
from tessera.codegen.ptx.table.scalars.packing import materialise_operand
from tessera.codegen.ptx.text.builder import PtxBuilder
from tessera.codegen.ptx.text.memref import VectorAccess
from tessera.codegen.ptx.text.register_types import REGISTER_BITS, element_bytes, register_class, typed_literal
from tessera.codegen.ptx.text.thread_team import and_predicates
from tessera.core.types import DType, bool_, f32, f64, int64, uint64
from tessera.ir.core import Node, Value
from tessera.ops.tensor import basic, shape

# Elements handed between the threads of a team: written to memory in row-major order, read where they are wanted.


def convert_through_memory(
    ctx: EmissionContext, dtype: DType, held: Sequence[str], source: DistributedLayout, to: DistributedLayout
) -> tuple[str, ...]:
    """The elements of a block in another layout; the shapes hold as many elements in the same order."""
    write_exchange(ctx, dtype, held, source, math.prod(source.shape))
    return read_exchange(ctx, dtype, to)


def write_exchange(
    ctx: EmissionContext, dtype: DType, held: Sequence[str], layout: DistributedLayout, count: int
) -> None:
    """Write a block to the exchange, each element by one thread."""
    if ctx.smem.hazards.exchange(WRITE):
        ctx.team.synchronise()
    base = ctx.smem.allocator.exchange(count * element_bytes(dtype))
    for run in plan_exchange_accesses(ctx, dtype, layout, base, once=True):
        packing.store_elements(ctx.text, exchange_space(ctx), dtype, run, held[run.first : run.first + run.count])


def read_exchange(ctx: EmissionContext, dtype: DType, layout: DistributedLayout) -> tuple[str, ...]:
    """Read a block from the exchange."""
    if ctx.smem.hazards.exchange(READ):
        ctx.team.synchronise()
    base = ctx.smem.allocator.exchange(0)
    found: list[str] = []
    for run in plan_exchange_accesses(ctx, dtype, layout, base, once=False):
        found += packing.load_elements(ctx.text, exchange_space(ctx), dtype, run)
    return tuple(found)


def exchange_space(ctx: EmissionContext) -> str:
    """The space of the exchange."""
    return "local" if ctx.smem.allocator.own else "shared"


def plan_exchange_accesses(
    ctx: EmissionContext, dtype: DType, layout: DistributedLayout, base: str, once: bool, steps: Sizes | None = None
) -> list[VectorAccess]:
    """Where the registers of a block lie in the exchange; `steps` are bytes along each axis, row-major when not given.

    Steps are multiples of the bytes moved at once, but for the last.
    """
    steps = steps or row_major_strides(layout.shape, element_bytes(dtype))
    address = emit_thread_address(ctx, layout, steps, base)
    length = _find_vector_length(layout, dtype, steps)
    found = []
    for first in range(0, layout.count, length):
        guards = tuple(_element_guard(ctx, layout, i, once) for i in range(first, first + length))
        offset = sum(n * step for n, step in zip(layout.offsets[first], steps, strict=True))
        found.append(VectorAccess(first, length, address, offset, guards))
    return found


def row_major_strides(shape: Sizes, each: int) -> Sizes:
    """The bytes from an element to the next along each axis."""
    return tuple(math.prod(shape[a + 1 :]) * each for a in range(len(shape)))


def emit_thread_address(ctx: EmissionContext, layout: DistributedLayout, steps: Sizes, base: str) -> str:
    """The address of a thread's first element."""
    team, own = ctx.team, ctx.smem.allocator.own
    total = ""
    for axis, step in enumerate(steps):
        place = team.thread_offset(layout, axis)
        if place != "0":
            key = ("near", place, step)
            part = team.hoist(key, "mul.lo.u32", "b32", place, step)
            total = ctx.text.let("add.s32", "b32", total, part) if total else part
    if own or not total:
        return base
    return ctx.text.let("add.s32", "b32", base, total)


def _find_vector_length(layout: DistributedLayout, dtype: DType, steps: Sizes) -> int:
    """How many registers hold neighbours that one instruction moves: along the axis whose steps are an element's."""
    last, count = max((a for a, step in enumerate(steps) if step == element_bytes(dtype)), default=0), 0
    for i, bit in enumerate(layout.registers):
        if bit != (last, i):
            break
        count += 1
    length = min(1 << count, 16 // element_bytes(dtype))
    while length > 1 and (
        layout.shape[last] % length
        or any(s % (length * element_bytes(dtype)) for s in steps if s > element_bytes(dtype))
    ):
        length //= 2
    return length


def _element_guard(ctx: EmissionContext, layout: DistributedLayout, i: int, once: bool) -> str:
    owner = ctx.team.owner_predicate(layout) if once else ""
    return and_predicates(ctx.text, owner, *ctx.team.bounds_predicates(layout, layout.offsets[i]))


# What needs no memory: constants, ramps, blocks seen in another shape; and the handing over between layouts.


@emission_rule(basic.full)
def _(ctx: EmissionContext, node: Node) -> None:
    dtype, value = node.attrs["dtype"], node.attrs["value"]
    one = ctx.team.constant_predicate(bool(value)) if dtype == bool_ else typed_literal(value, dtype)
    ctx.values[node.out] = (one,) * ctx.layout(node.out).count


@emission_rule(shape.iota)
def _(ctx, node):
    layout, dtype = ctx.layout(node.out), node.attrs["dtype"]
    axis = node.attrs["axis"] % len(layout.shape)
    place = ctx.team.thread_offset(layout, axis)
    if place != "0" and dtype in (int64, uint64):
        place = ctx.team.hoist(("wide", place), "cvt.u64.u32", "b64", place)
    found = {}
    for offset in dict.fromkeys(each[axis] for each in layout.offsets):
        found[offset] = _emit_ramp(ctx, dtype, place, offset)
    ctx.values[node.out] = tuple(found[each[axis]] for each in layout.offsets)


def _emit_ramp(ctx, dtype, place, offset):
    """A place along an axis as an element."""
    if place == "0":
        return typed_literal(offset, dtype)
    form = "s64" if dtype in (int64, uint64) else "s32"
    total = ctx.text.let(f"add.{form}", form, place, offset) if offset else place
    if not dtype.is_float:
        return total
    wide = "f64" if dtype.bits == 64 else "f32"
    return convert(ctx.text, f64 if wide == "f64" else f32, dtype, ctx.text.let(f"cvt.rn.{wide}.s32", wide, total))


def broadcast_registers(ctx: EmissionContext, v: Value, layout: DistributedLayout) -> Registers:
    """The registers of a block broadcast to a layout, one for each of the layout's registers."""
    source, held = ctx.layout(v), ctx.values[v]
    missing = len(layout.shape) - len(source.shape)
    return tuple(
        held[source.index[tuple(0 if n == 1 else i for n, i in zip(source.shape, indices[missing:], strict=True))]]
        for indices in layout.offsets
    )


@emission_rule(basic.broadcast_to)
def _(ctx, node):
    ctx.values[node.out] = broadcast_registers(ctx, node.args[0], ctx.layout(node.out))


@emission_rule(shape.permute)
def _(ctx, node):
    (x,), axes = node.args, node.attrs["axes"]
    ours, theirs = ctx.layout(node.out), ctx.layout(x)
    back = [axes.index(a) for a in range(len(axes))]
    ctx.values[node.out] = tuple(
        ctx.values[x][theirs.index[tuple(place[b] for b in back)]] for place in ours.offsets
    )  # fmt: skip


@emission_rule(shape.reshape)
def _(ctx, node):
    (x,) = node.args
    ours, theirs = ctx.layout(node.out), ctx.layout(x)
    names = match_reshape_bits(theirs.shape, ours.shape)
    if names is not None and theirs.renamed(ours.shape, names).threads == ours.threads:
        moved = theirs.renamed(ours.shape, names)
        ctx.values[node.out] = tuple(ctx.values[x][moved.index[place]] for place in ours.offsets)
    else:
        ctx.values[node.out] = convert_through_memory(ctx, x.type.dtype, ctx.values[x], theirs, ours)


@emission_rule(convert_layout)
def _(ctx, node):
    (x,) = node.args
    ours, theirs = ctx.layout(node.out), ctx.layout(x)
    assert static_shape(x) == static_shape(node.out)
    if ours.threads == theirs.threads:
        ctx.values[node.out] = tuple(ctx.values[x][theirs.index[place]] for place in ours.offsets)
    else:
        ctx.values[node.out] = convert_through_memory(ctx, x.type.dtype, ctx.values[x], theirs, ours)


# Elements handed between the threads of a warp through registers.


FULL_WARP_MASK = "0xFFFFFFFF"


def shuffle_register(
    text: PtxBuilder, dtype: DType, x: str, mode: str, lane: int | str, members: str = FULL_WARP_MASK
) -> str:
    """What another thread of the warp holds as `x`."""
    kind = register_class(dtype)
    if kind == "pred":
        bit = _shuffle_word(text, text.let("selp.b32", "b32", 1, 0, x), mode, lane, members)
        return text.let("setp.ne.u32", "pred", bit, 0)
    x = materialise_operand(text, kind, x)
    if REGISTER_BITS[kind] == 32:
        bits = text.let("mov.b32", "b32", x) if kind == "f32" else x
        moved = _shuffle_word(text, bits, mode, lane, members)
        return text.let("mov.b32", "f32", moved) if kind == "f32" else moved
    low, high = text.new("b32"), text.new("b32")
    text.do("mov.b64", f"{{{low}, {high}}}", x)
    parts = [_shuffle_word(text, each, mode, lane, members) for each in (low, high)]
    return text.let("mov.b64", kind, f"{{{', '.join(parts)}}}")


def _shuffle_word(text: PtxBuilder, x: str, mode: str, lane: int | str, members: str) -> str:
    return text.let(f"shfl.sync.{mode}.b32", "b32", x, lane, 31, members)
