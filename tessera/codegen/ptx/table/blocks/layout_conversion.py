"""Layout conversion: blocks moved between threads by shared memory or warp shuffles; constants, ramps and views.

The exchange buffer holds one block at a time in row-major order: each element is written by one thread, and read by
the threads that need it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from tessera.codegen.ptx.context import VECTOR_BYTES, EmissionContext, Registers, VectorAccess
from tessera.codegen.ptx.layout import WARP_THREADS, DistributedLayout, Sizes, and_predicates, match_reshape_bits
from tessera.codegen.ptx.ops import convert_layout
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.shared_memory import READ, WRITE
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks import block_access
from tessera.codegen.ptx.table.scalars.arithmetic import convert, materialise_operand
from tessera.codegen.ptx.text.builder import REGISTER_BITS, PtxBuilder, element_bytes, register_class, typed_literal
from tessera.core.types import DType, bool_, f32, f64, int64, uint64
from tessera.ir.core import Node, Value
from tessera.ops.tensor import basic, shape

FULL_WARP_MASK = "0xFFFFFFFF"


def convert_through_memory(
    ctx: EmissionContext, dtype: DType, held: Sequence[str], source: DistributedLayout, to: DistributedLayout
) -> Registers:
    """The elements of a block in another layout; both shapes hold equally many elements, in the same order."""
    strides = pad_rows(source, to, dtype) if source.shape == to.shape else None
    write_exchange(ctx, dtype, held, source, math.prod(source.shape), strides)
    return read_exchange(ctx, dtype, to, strides)


BANKS, BANK_BYTES, ROW_PADS = 32, 4, (0, 4, 8, 16)  # of shared memory; bytes by which rows may be longer
MOST_PADDED = 1 << 14  # bytes of a block whose rows are padded


def pad_rows(source: DistributedLayout, to: DistributedLayout, dtype: DType) -> Sizes | None:
    """The strides of a block in the exchange buffer that cost its writes and reads the fewest bank conflicts.

    None for rows as they are.
    """
    size, shape_ = element_bytes(dtype), source.shape
    if len(shape_) < 2 or math.prod(shape_) * size > MOST_PADDED:
        return None

    def pad(count: int) -> Sizes:
        return (*(n // (shape_[-1] * size) * (shape_[-1] * size + count) for n in plain[:-1]), size)

    def cost(count: int) -> float:
        return sum(count_bank_conflicts(layout, dtype, pad(count)) for layout in (source, to))

    plain = row_major_strides(shape_, size)
    best = min((count for count in ROW_PADS if count % size == 0), key=cost)
    return pad(best) if best and cost(best) < cost(0) else None


def count_bank_conflicts(layout: DistributedLayout, dtype: DType, strides: Sizes) -> float:
    """The cycles in which a warp accesses its part of a block in shared memory: each bank gives one word in each.

    >>> rows = DistributedLayout((32, 32), ((1, 0), (1, 1)), ((1, 2), (1, 3), (1, 4), (0, 0), (0, 1), (0, 2), (0, 3)))
    >>> count_bank_conflicts(rows, f32, (128, 4)), count_bank_conflicts(rows.permuted((1, 0)), f32, (128, 4))
    (4.0, 32.0)
    """
    size, length = element_bytes(dtype), _find_vector_length(layout, dtype, strides)
    words = set[int]()
    for lane in range(WARP_THREADS):
        bits = [bit for i, bit in enumerate(layout.threads) if bit is not None and lane >> i & 1]
        first = sum(strides[axis] << position for axis, position in bits)
        words |= {(first + n) // BANK_BYTES for n in range(0, length * size, min(size, BANK_BYTES))}
    most = max(Counter(word % BANKS for word in words).values())
    return most * layout.count / length


def write_exchange(
    ctx: EmissionContext, dtype: DType, held: Sequence[str], layout: DistributedLayout, count: int,
    strides: Sizes | None = None,
) -> None:  # fmt: skip
    """Write a block of `count` elements to the exchange buffer."""
    synchronise_exchange(ctx, WRITE)
    size = layout.shape[0] * strides[0] if strides else count * element_bytes(dtype)
    base = ctx.smem.allocator.reserve_exchange(size)
    for access in plan_exchange_accesses(ctx, dtype, layout, base, True, strides):
        elements = held[access.first : access.first + access.count]
        block_access.store_elements(ctx.text, exchange_space(ctx), dtype, access, elements)


def read_exchange(
    ctx: EmissionContext, dtype: DType, layout: DistributedLayout, strides: Sizes | None = None
) -> Registers:
    """Read a block from the exchange buffer."""
    synchronise_exchange(ctx, READ)
    base = ctx.smem.allocator.reserve_exchange(0)
    found: list[str] = []
    for access in plan_exchange_accesses(ctx, dtype, layout, base, False, strides):
        found += block_access.load_elements(ctx.text, exchange_space(ctx), dtype, access)
    return tuple(found)


def synchronise_exchange(ctx: EmissionContext, kind: str) -> None:
    """Emit the barrier that a read or write of the exchange buffer needs, if any."""
    if ctx.smem.hazards.needs_exchange_barrier(kind):
        ctx.team.synchronise()


def exchange_space(ctx: EmissionContext) -> str:
    """The state space of the exchange buffer: local for a team of one thread."""
    return "local" if ctx.smem.allocator.exchange_is_local else "shared"


def plan_exchange_accesses(
    ctx: EmissionContext, dtype: DType, layout: DistributedLayout, base: str, once: bool, strides: Sizes | None = None
) -> list[VectorAccess]:
    """The accesses to a block in the exchange buffer; with `once` a single thread accesses each element.

    `strides` are the bytes along each axis, row-major by default; all but the last are multiples of a vector access.
    """
    strides = strides or row_major_strides(layout.shape, element_bytes(dtype))
    address = emit_thread_address(ctx, layout, strides, base)
    length = _find_vector_length(layout, dtype, strides)
    found = []
    for first in range(0, layout.count, length):
        guards = tuple(_make_guard(ctx, layout, i, once) for i in range(first, first + length))
        offset = sum(n * stride for n, stride in zip(layout.offsets[first], strides, strict=True))
        found.append(VectorAccess(first, length, address, offset, guards))
    return found


def row_major_strides(shape: Sizes, size: int) -> Sizes:
    """The bytes from one element of `size` bytes to the next along each axis."""
    return tuple(math.prod(shape[a + 1 :]) * size for a in range(len(shape)))


def emit_thread_address(ctx: EmissionContext, layout: DistributedLayout, strides: Sizes, base: str) -> str:
    """The address of a thread's first element."""
    team, total = ctx.team, ""
    for axis, stride in enumerate(strides):
        offset = team.thread_offset(layout, axis)
        if offset != "0":
            scaled = team.hoist(("scaled", offset, stride), "mul.lo.u32", "b32", offset, stride)
            total = ctx.text.let("add.s32", "b32", total, scaled) if total else scaled
    if ctx.smem.allocator.exchange_is_local or not total:
        return base
    return ctx.text.let("add.s32", "b32", base, total)


def _find_vector_length(layout: DistributedLayout, dtype: DType, strides: Sizes) -> int:
    """The leading registers that one access can move: neighbours along the contiguous axis."""
    size, count = element_bytes(dtype), 0
    last = max((a for a, stride in enumerate(strides) if stride == size), default=0)
    for i, bit in enumerate(layout.registers):
        if bit != (last, i):
            break
        count += 1
    length = min(1 << count, VECTOR_BYTES // size)
    outer = [stride for stride in strides if stride > size]
    while length > 1 and (layout.shape[last] % length or any(stride % (length * size) for stride in outer)):
        length //= 2
    return length


def _make_guard(ctx: EmissionContext, layout: DistributedLayout, i: int, once: bool) -> str:
    owner = ctx.team.owner_predicate(layout) if once else ""
    return and_predicates(ctx.text, owner, *ctx.team.bounds_predicates(layout, layout.offsets[i]))


@emission_rule(basic.full)
def _(ctx: EmissionContext, node: Node) -> None:
    dtype, value = node.attrs["dtype"], node.attrs["value"]
    constant = ctx.team.constant_predicate(bool(value)) if dtype == bool_ else typed_literal(value, dtype)
    ctx.values[node.out] = (constant,) * ctx.layout(node.out).count


@emission_rule(basic.dim_value)
def _(ctx: EmissionContext, node: Node) -> None:
    ctx.values[node.out] = (str(ctx.sizes.find(node.attrs["size"])),)


@emission_rule(shape.iota)
def _(ctx, node):
    layout, dtype = ctx.layout(node.out), node.attrs["dtype"]
    axis = node.attrs["axis"] % len(layout.shape)
    thread = ctx.team.thread_offset(layout, axis)
    if thread != "0" and dtype in (int64, uint64):
        thread = ctx.team.hoist(("wide", thread), "cvt.u64.u32", "b64", thread)
    indices = [offset[axis] for offset in layout.offsets]
    found = {i: _emit_index(ctx, dtype, thread, i) for i in dict.fromkeys(indices)}
    ctx.values[node.out] = tuple(found[i] for i in indices)


def _emit_index(ctx: EmissionContext, dtype: DType, thread: str, offset: int) -> str:
    """An index along an axis as an element: the thread's offset plus the register's."""
    if thread == "0":
        return typed_literal(offset, dtype)
    form = "s64" if dtype in (int64, uint64) else "s32"
    total = ctx.text.let(f"add.{form}", form, thread, offset) if offset else thread
    if not dtype.is_float:
        return total
    wide = f64 if dtype.bits == 64 else f32
    return convert(ctx.text, wide, dtype, ctx.text.let(f"cvt.rn.{wide.name}.s32", wide.name, total))


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
    source, inverse = ctx.layout(x), [axes.index(a) for a in range(len(axes))]
    ctx.values[node.out] = tuple(
        ctx.values[x][source.index[tuple(offset[a] for a in inverse)]] for offset in ctx.layout(node.out).offsets
    )


@emission_rule(shape.reshape)
def _(ctx, node):
    (x,) = node.args
    to, source = ctx.layout(node.out), ctx.layout(x)
    names = match_reshape_bits(source.shape, to.shape)
    if names is not None and source.renamed(to.shape, names).threads == to.threads:
        view = source.renamed(to.shape, names)
        ctx.values[node.out] = tuple(ctx.values[x][view.index[offset]] for offset in to.offsets)
    else:
        ctx.values[node.out] = convert_through_memory(ctx, x.type.dtype, ctx.values[x], source, to)


@emission_rule(convert_layout)
def _(ctx, node):
    (x,) = node.args
    to, source = ctx.layout(node.out), ctx.layout(x)
    assert static_shape(x) == static_shape(node.out)
    if to.threads == source.threads:
        ctx.values[node.out] = tuple(ctx.values[x][source.index[offset]] for offset in to.offsets)
    else:
        ctx.values[node.out] = convert_through_memory(ctx, x.type.dtype, ctx.values[x], source, to)


def shuffle_register(
    text: PtxBuilder, dtype: DType, x: str, mode: str, lane: int | str, members: str = FULL_WARP_MASK
) -> str:
    """The value of `x` in another lane (shfl.sync); 64-bit values are shuffled as two words."""
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
    words = [_shuffle_word(text, each, mode, lane, members) for each in (low, high)]
    return text.let("mov.b64", kind, f"{{{', '.join(words)}}}")


def _shuffle_word(text: PtxBuilder, x: str, mode: str, lane: int | str, members: str) -> str:
    return text.let(f"shfl.sync.{mode}.b32", "b32", x, lane, WARP_THREADS - 1, members)
