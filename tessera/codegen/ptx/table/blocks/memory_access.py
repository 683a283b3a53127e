"""Memory access: allocation, load, store, gather, scatter, and atomic updates.

An atomic update is one instruction where the hardware has it, otherwise a compare-and-swap loop.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from tessera.codegen.ptx.context import VECTOR_BYTES, EmissionContext, PtxMemRef, VectorAccess, find_run_length
from tessera.codegen.ptx.layout import DistributedLayout, and_predicates, make_blocked_layout
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.shared_memory import LOCAL_SYMBOL, SHARED_SYMBOL
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks import block_access
from tessera.codegen.ptx.table.blocks.block_access import load_block, plan_block_accesses, store_block
from tessera.codegen.ptx.table.blocks.layout_conversion import broadcast_registers, convert_through_memory
from tessera.codegen.ptx.table.blocks.staging_buffers import store_slot
from tessera.codegen.ptx.table.scalars.arithmetic import materialise_operand, round_to_narrow
from tessera.codegen.ptx.table.scalars.math_functions import ScalarContext, emit
from tessera.codegen.ptx.table.warpgroup.epilogue import RowStoreEmitter, TmaStoreEmitter
from tessera.codegen.ptx.text.builder import NARROW_FLOATS, PtxBuilder, element_bytes, ptx_type, register_class
from tessera.core.symbolic_dim import Size
from tessera.core.types import SHARED, DType, bool_, f32, f64, int32, int64, uint32, uint64
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e


@emission_rule(tile.alloc)
def _(ctx: EmissionContext, node: Node) -> None:
    dtype, shape = node.attrs["dtype"], tuple(int(n) for n in node.attrs["shape"])
    size, allocator = math.prod(shape) * element_bytes(dtype), ctx.smem.allocator
    # Memory of one tile is shared by its team; a team of one thread has it in local memory.
    local = node.attrs["space"] != SHARED and ctx.team.threads == 1
    offset = allocator.allocate_local(size) if local else allocator.allocate_shared(size, node.attrs["alignment"])
    base = ctx.text.let("mov.u64", "b64", LOCAL_SYMBOL if local else SHARED_SYMBOL)
    base = ctx.text.let("add.s64", "b64", base, offset) if offset else base
    ctx.memrefs[node.out] = PtxMemRef(dtype, "local" if local else "shared", base, shape)


@emission_rule(tile.load)
def _(ctx, node):
    m, rest = ctx.memrefs[node.args[0]], node.args[1:]
    rank, layout = len(m.shape), ctx.layout(node.out)
    mask = broadcast_registers(ctx, rest[rank], layout) if rest[rank:] else ()
    other = broadcast_registers(ctx, rest[rank + 1], layout) if rest[rank + 1 :] else ()
    clip, vector = node.attrs["edge"] == "clip", node.attrs["vector"]
    accesses = plan_block_accesses(ctx, m, rest[:rank], layout, clip, mask, once=False, vector=vector)
    ctx.values[node.out] = load_block(ctx, m, accesses, other)


@emission_rule(tile.store)
def _(ctx, node):
    ref, value, *rest = node.args
    if node in ctx.pipeline.tma_stores:
        TmaStoreEmitter(ctx, node, ctx.pipeline.tma_stores[node]).emit()
        return
    if node in ctx.pipeline.row_stores:
        RowStoreEmitter(ctx, node).emit()
        return
    layout = ctx.layout(value)
    if ref not in ctx.memrefs:
        store_slot(ctx, ref, rest[0], value)
        return
    m = ctx.memrefs[ref]
    rank = len(m.shape)
    mask = broadcast_registers(ctx, rest[rank], layout) if rest[rank:] else ()
    clip, vector = node.attrs["edge"] == "clip", node.attrs["vector"]
    accesses = plan_block_accesses(ctx, m, rest[:rank], layout, clip, mask, once=True, vector=vector)
    store_block(ctx, m, accesses, ctx.values[value])


def _plan_element_accesses(
    ctx: EmissionContext,
    m: PtxMemRef,
    indices: Sequence[Value],
    mask: Value | None,
    layout: DistributedLayout,
    once: bool,
    length: int = 1,
) -> list[VectorAccess]:
    """The accesses at blocks of indices, to single elements or to runs of `length` registers whose elements are
    neighbours in memory; with `once` a single thread accesses each element."""
    indices = [_strip_widening(ctx, v) for v in indices]
    indices, displacement = _split_displacements(ctx, m, indices)
    registers = [broadcast_registers(ctx, v, layout) for v in indices]
    places = [tuple(held[i] for held in registers) for i in range(layout.count)]
    guards = _make_guards(ctx, mask, layout, once)
    known: dict[tuple[str, ...], str] = {}  # addresses by the indices along the first axes
    accesses = []
    for first in range(0, layout.count, length):
        run = range(first, first + length)
        whole = len({(places[i][:-1], guards[i]) for i in run}) == 1
        for i in run[:1] if whole else run:
            address = m.base
            for axis, (v, stride) in enumerate(zip(indices, m.strides, strict=True)):
                key = places[i][: axis + 1]
                if key not in known:
                    known[key] = _add_index(ctx, v, places[i][axis], stride, address)
                address = known[key]
            count = length if whole else 1
            accesses.append(VectorAccess(i, count, address, displacement, tuple(guards[i : i + count])))
    return accesses


def _make_guards(ctx: EmissionContext, mask: Value | None, layout: DistributedLayout, once: bool) -> list[str]:
    """The predicate of each register of a layout: inside the block, unmasked, and with `once` in the owning thread."""
    masks = broadcast_registers(ctx, mask, layout) if mask is not None else ("",) * layout.count
    owner = ctx.team.owner_predicate(layout) if once else ""
    made: dict[tuple[str, ...], str] = {}
    found = []
    for offsets, masked in zip(layout.offsets, masks, strict=True):
        parts = (owner, *ctx.team.bounds_predicates(layout, offsets), masked)
        if parts not in made:
            made[parts] = and_predicates(ctx.text, *parts)
        found.append(made[parts])
    return found


def _find_run_length(ctx: EmissionContext, m: PtxMemRef, indices: Sequence[Value], layout: DistributedLayout) -> int:
    """How many of the first registers of a layout hold neighbours in memory, which one access moves."""
    held = itertools.takewhile(lambda pair: pair[1] == (len(layout.shape) - 1, pair[0]), enumerate(layout.registers))
    most = min(1 << len(list(held)), VECTOR_BYTES // element_bytes(m.dtype))
    return find_run_length(ctx.analyses.producers, m, indices, most) if most > 1 else 1


def _strip_widening(ctx: EmissionContext, v: Value) -> Value:
    """The 32-bit indices that became these: an instruction widens and multiplies them."""
    node = ctx.analyses.producers.get(v)
    if node is None or node.op is not basic.cast or node.args[0] not in ctx.values:
        return v
    source = node.args[0].type.dtype  # type: ignore[union-attr]
    return node.args[0] if source.is_integer and source.bits == 32 else v


MOST_STRIDE = 1 << 31  # bytes that a multiplication of 32 bits takes, and a displacement


def _split_displacements(ctx: EmissionContext, m: PtxMemRef, indices: Sequence[Value]) -> tuple[list[Value], int]:
    """Indices without the constants that are added to them, and the bytes that these make: an address has them free.

    A sum with a positive constant that leaves 32 bits is negative, so that no access is at it.
    """
    found, total = [], 0
    for v, stride in zip(indices, m.strides, strict=True):
        rest, constant = _split_constant(ctx, v)
        step = ctx.sizes.find(stride)
        more = constant * step if isinstance(step, int) else MOST_STRIDE
        fits = total + more < MOST_STRIDE
        found.append(rest if fits else v)
        total += more if fits else 0
    return found, total


def _split_constant(ctx: EmissionContext, v: Value) -> tuple[Value, int]:
    """A signed index as another one and a constant that is added to it."""
    node = ctx.analyses.producers.get(v)
    if node is None or node.op is not e.add or v.type.dtype.kind != "int":  # type: ignore[union-attr]
        return v, 0
    for rest, other in (node.args, reversed(node.args)):
        made = ctx.analyses.producers.get(other)
        if made is not None and made.op is basic.full and made.attrs["value"] >= 0 and rest in ctx.values:
            return rest, int(made.attrs["value"])
    return v, 0


def _add_index(ctx: EmissionContext, v: Value, index: str, stride: Size, address: str) -> str:
    """The address of an element, by its index along one more axis."""
    dtype, step = v.type.dtype, ctx.sizes.find(stride)  # type: ignore[union-attr]
    if dtype.bits == 64 or not index.startswith("%"):
        return ctx.text.let("mad.lo.s64", "b64", index, step, address)
    form = "u32" if dtype.kind == "uint" else "s32"
    if isinstance(step, int) and step < MOST_STRIDE:
        return ctx.text.let(f"mad.wide.{form}", "b64", index, step, address)
    return ctx.text.let("mad.lo.s64", "b64", ctx.text.let(f"cvt.s64.{form}", "b64", index), step, address)


@emission_rule(tile.gather)
def _(ctx, node):
    m, rest = ctx.memrefs[node.args[0]], node.args[1:]
    rank, layout = len(m.shape), ctx.layout(node.out)
    mask = rest[rank] if rest[rank:] else None
    length = _find_run_length(ctx, m, rest[:rank], layout)
    accesses = _plan_element_accesses(ctx, m, rest[:rank], mask, layout, once=False, length=length)
    other = broadcast_registers(ctx, rest[rank + 1], layout) if rest[rank + 1 :] else ()
    ctx.values[node.out] = load_block(ctx, m, accesses, other)


@emission_rule(tile.scatter)
def _(ctx, node):
    ref, value, *rest = node.args
    m, rank = ctx.memrefs[ref], node.args[0].type.rank
    layout = _find_broadcast_layout(ctx, (value, *rest[:rank]))
    mask = rest[rank] if rest[rank:] else None
    length = _find_run_length(ctx, m, rest[:rank], layout)
    accesses = _plan_element_accesses(ctx, m, rest[:rank], mask, layout, once=True, length=length)
    store_block(ctx, m, accesses, broadcast_registers(ctx, value, layout))


def _find_broadcast_layout(ctx: EmissionContext, blocks: Sequence[Value]) -> DistributedLayout:
    """The layout of the block that several blocks broadcast to."""
    rank = max(len(static_shape(v)) for v in blocks)
    shape = tuple(max(s) for s in zip(*((1,) * (rank - v.type.rank) + static_shape(v) for v in blocks), strict=True))
    full = next((ctx.layout(v) for v in blocks if static_shape(v) == shape), None)
    return full or make_blocked_layout(shape, ctx.team.threads, ctx.vector_width)


BITWISE_ATOMICS = {"and": "and.b", "or": "or.b", "xor": "xor.b", "exchange": "exch.b"}
ATOMIC_INTEGERS = (int32, int64, uint32, uint64)
NATIVE_ATOMICS: dict[tuple[str, DType], str] = {
    ("add", f32): "add.f32", ("add", f64): "add.f64", **{("add", d): f"add.u{d.bits}" for d in ATOMIC_INTEGERS},
    **{(k, d): f"{k}.{ptx_type(d)}" for k in ("max", "min") for d in ATOMIC_INTEGERS},
    **{(k, d): f"{w}{d.bits}" for k, w in BITWISE_ATOMICS.items() for d in ATOMIC_INTEGERS},
    ("exchange", f32): "exch.b32", ("exchange", f64): "exch.b64",
}  # fmt: skip
UPDATE_OPS = {
    "add": e.add,
    "max": e.maximum,
    "min": e.minimum,
    "and": e.bitwise_and,
    "or": e.bitwise_or,
    "xor": e.bitwise_xor,
}
SUM_OF_BOOLS = e.bitwise_or
ZERO_BITS = {"f32": "0f00000000", "f64": "0d0000000000000000"}
UpdateRule = Callable[[PtxBuilder, str], str]  # from the old element to the new one


@emission_rule(tile.atomic)
def _(ctx: EmissionContext, node: Node) -> None:
    ref, value, *rest = node.args
    kind, dtype = node.attrs["kind"], ref.type.dtype
    values = broadcast_registers(ctx, value, ctx.layout(node.out))

    def update(m: PtxMemRef, access: VectorAccess, i: int) -> str:
        if m.space != "local" and (kind, dtype) in NATIVE_ATOMICS:
            return _emit_native_atomic(ctx.text, m, access, NATIVE_ATOMICS[kind, dtype], dtype, values[i])

        def change(text: PtxBuilder, old: str) -> str:
            if kind == "exchange":
                return values[i]
            op = SUM_OF_BOOLS if dtype == bool_ and kind == "add" else UPDATE_OPS[kind]
            return emit.of(op)(ScalarContext(text, _compute_type(dtype), dtype), old, values[i])

        return _emit_update(ctx.text, m, access, dtype, change)

    _update_elements(ctx, node, rest, update)


@emission_rule(tile.compare_exchange)
def _(ctx, node):
    ref, value, expected, *rest = node.args
    layout, dtype = ctx.layout(node.out), ref.type.dtype
    new, old = broadcast_registers(ctx, value, layout), broadcast_registers(ctx, expected, layout)

    def update(m: PtxMemRef, access: VectorAccess, i: int) -> str:
        if m.space != "local" and dtype in ATOMIC_INTEGERS:
            return _emit_native_atomic(ctx.text, m, access, f"cas.b{dtype.bits}", dtype, old[i], new[i])

        def change(text: PtxBuilder, found: str) -> str:
            same = text.let(f"setp.eq.{ptx_type(dtype)}", "pred", found, old[i])
            return text.let(f"selp.{register_class(dtype)}", ptx_type(dtype), new[i], found, same)

        return _emit_update(ctx.text, m, access, dtype, change)

    _update_elements(ctx, node, rest, update)


def _compute_type(dtype: DType) -> DType:
    return f32 if dtype in NARROW_FLOATS else dtype


def _update_elements(
    ctx: EmissionContext,
    node: Node,
    rest: Sequence[Value],
    update: Callable[[PtxMemRef, VectorAccess, int], str],
) -> None:
    """Update each element by one thread; its replicas receive the old element through the exchange buffer."""
    m, layout = ctx.memrefs[node.args[0]], ctx.layout(node.out)
    _note_odd_byte_param(ctx, node.args[0])
    rank = len(m.shape)
    mask = rest[rank] if rest[rank:] else None
    accesses = _plan_element_accesses(ctx, m, rest[:rank], mask, layout, once=True)
    found = tuple(update(m, access, i) for i, access in enumerate(accesses))
    if layout.replicated_bits and node.out in ctx.analyses.use_counts:
        found = convert_through_memory(ctx, m.dtype, found, layout, layout)
    ctx.values[node.out] = found


def _note_odd_byte_param(ctx: EmissionContext, ref: Value) -> None:
    """Note a parameter whose last byte is swapped together with the byte after it."""
    m = ctx.memrefs[ref]
    if m.space == "global" and element_bytes(m.dtype) == 1 and math.prod(m.shape) % 2:
        ctx.entry.odd_byte_params.add(ctx.function.params.index(ref))


def _emit_native_atomic(
    text: PtxBuilder, m: PtxMemRef, access: VectorAccess, operation: str, dtype: DType, *operands: str
) -> str:
    """Emit one `atom` instruction; the old element."""
    kind, guard = register_class(dtype), access.guards[0]
    registers = [materialise_operand(text, kind, x) for x in operands]
    form = f"b{element_bytes(dtype) * 8}" if ".b" in operation else kind
    registers = [text.let(f"mov.{form}", form, x) for x in registers] if form != kind else registers
    old = text.new(form)
    if guard:
        text.do(f"mov.{form}", old, ZERO_BITS.get(form, 0))
    text.do(f"atom.{m.space}.{operation}", old, access.operand, *registers, guard=guard)
    return text.let(f"mov.{form}", kind, old) if form != kind else old


def _emit_update(text: PtxBuilder, m: PtxMemRef, access: VectorAccess, dtype: DType, change: UpdateRule) -> str:
    """Emit an update without a native atomic: by compare-and-swap, or in local memory by a load and a store."""
    guard, kind = access.guards[0], register_class(dtype)
    done = text.new_label("done")
    result = text.let(f"mov.{kind}", ptx_type(dtype), block_access.zero_literal(kind))
    if guard:
        text.do(f"bra {done}", guard=text.let("not.pred", "pred", guard))
    unguarded = VectorAccess(access.first, 1, access.address, access.offset, ("",))
    if m.space == "local":
        (old,) = block_access.load_elements(text, m.space, dtype, unguarded)
        block_access.store_elements(text, m.space, dtype, unguarded, [change(text, old)])
        text.do(f"mov.{kind}", result, old)
    else:
        _emit_cas_loop(text, m, unguarded, dtype, change, result)
    text.label(done)
    return result


# The load before a compare-and-swap: with a weak one, another thread's atomic would be a data race.
RELAXED = {"global": ".relaxed.gpu.global", "shared": ".relaxed.cta.shared", "local": ".local"}


def _emit_cas_loop(
    text: PtxBuilder, m: PtxMemRef, access: VectorAccess, dtype: DType, change: UpdateRule, result: str
) -> None:
    """Compare-and-swap loop: read, change, and swap unless another thread has changed the element meanwhile."""
    bits, retry = element_bytes(dtype) * 8, text.new_label("again")
    if bits < 32:
        _emit_halfword_cas_loop(text, m, access, dtype, change, result)
        return
    seen = text.let(f"ld{RELAXED[m.space]}.b{bits}", f"b{bits}", access.operand)
    text.label(retry)
    old = _from_bits(text, dtype, seen)
    new = _to_bits(text, dtype, change(text, old))
    found = text.let(f"atom.{m.space}.cas.b{bits}", f"b{bits}", access.operand, seen, new)
    text.do(f"mov.{register_class(dtype)}", result, old)
    changed = text.let(f"setp.ne.b{bits}", "pred", found, seen)
    text.do(f"mov.b{bits}", seen, found)
    text.do(f"bra {retry}", guard=changed)


def _from_bits(text: PtxBuilder, dtype: DType, bits: str) -> str:
    return text.let(f"mov.{ptx_type(dtype)}", ptx_type(dtype), bits) if dtype.is_float else bits


def _to_bits(text: PtxBuilder, dtype: DType, x: str) -> str:
    if not dtype.is_float:
        return x
    form = f"b{element_bytes(dtype) * 8}"
    return text.let(f"mov.{form}", form, _round_narrow(text, dtype, x))


def _round_narrow(text: PtxBuilder, dtype: DType, x: str) -> str:
    return round_to_narrow(text, dtype, x) if dtype in NARROW_FLOATS else x


def _emit_halfword_cas_loop(
    text: PtxBuilder, m: PtxMemRef, access: VectorAccess, dtype: DType, change: UpdateRule, result: str
) -> None:
    """Compare-and-swap loop for elements of one or two bytes, on the aligned 16 bits that contain them."""
    kind, retry = register_class(dtype), text.new_label("again")
    operand, shift = _align_to_halfword(text, access) if element_bytes(dtype) == 1 else (access.operand, "")
    seen = text.let(f"ld{RELAXED[m.space]}.b16", "b16", operand)
    text.label(retry)
    both = text.let("cvt.u32.u16", "b32", seen)
    old = block_access.DECODERS[dtype](text, text.let("shr.u32", "b32", both, shift) if shift else both, 0)
    new = block_access.encode_elements(text, dtype, [_round_narrow(text, dtype, change(text, old))])[0]
    new = text.let("bfi.b32", "b32", new, both, shift, 8) if shift else materialise_operand(text, "b32", new)
    found = text.let(f"atom.{m.space}.cas.b16", "b16", operand, seen, text.let("cvt.u16.u32", "b16", new))
    text.do(f"mov.{kind}", result, old)
    changed = text.let("setp.ne.s16", "pred", found, seen)
    text.do("mov.b16", seen, found)
    text.do(f"bra {retry}", guard=changed)


def _align_to_halfword(text: PtxBuilder, access: VectorAccess) -> tuple[str, str]:
    """The operand of the aligned 16 bits that contain a byte, and the byte's bit offset in them."""
    address = text.let("add.s64", "b64", access.address, access.offset) if access.offset else access.address
    odd = text.let("and.b64", "b64", address, 1)
    even = text.let("sub.s64", "b64", address, odd)
    return f"[{even}]", text.let("shl.b32", "b32", text.let("cvt.u32.u64", "b32", odd), 3)
