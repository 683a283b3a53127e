"""Stores, scatters, copies and atomics: one loop nest each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.codegen.legality import static_shape
from tessera.codegen.llvm.table import scalar_functions
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import (
    allocate_block,
    cast_to_index,
    choose_vector_width,
    emit_bounds_mask,
    emit_broadcast_element,
    emit_element,
    emit_loop_nest,
    emit_optional_operand,
    offset_index,
)
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import LaneIndex, LaneValue, LlvmBuilder, LoopBody
from tessera.codegen.llvm.text.types import ELEMENT_BYTES, RegisterType, get_register_type
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType
from tessera.ir.core import Node
from tessera.ops.dialects import tile

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


@statement_rule(tile.store)
def _(kernel, node):
    group = kernel.plan.store_groups.get(node, (node,))
    if node is not group[-1]:
        return  # stored with the last one of the group
    value = node.args[1]

    def emit_element_stores(body: LoopBody, index: LaneIndex) -> None:
        # All elements are computed before one is stored.
        lanes = [emit_element(body, each.args[1], index) for each in group]
        for each, lane in zip(group, lanes, strict=True):
            _store_element(body, each, index, lane)

    emit_loop_nest(kernel, value.type.shape, choose_vector_width(kernel, value.type.dtype), emit_element_stores)


def _store_element(body: LoopBody, node: Node, index: LaneIndex, lane: LaneValue) -> None:
    ref, value, *rest = node.args
    m, rank = body.kernel.memrefs[ref], ref.type.rank
    position = offset_index(body, rest[:rank], index)
    mask = emit_optional_operand(body, rest[rank:], 0, index)
    if node.attrs["edge"] == "clip":
        mask = memory.intersect_masks(
            body, mask, emit_bounds_mask(body, m, rest[:rank], static_shape(value.type), position)
        )
    memory.store_lane(body, m, position, lane, mask)


@statement_rule(tile.scatter)
def _(kernel, node):
    ref, value, *rest = node.args
    m, rank, shape = kernel.memrefs[ref], ref.type.rank, _broadcast_shapes(*(v.type.shape for v in node.args[1:]))

    def emit_element_store(body: LoopBody, index: LaneIndex) -> None:
        position = tuple(cast_to_index(body, v, emit_broadcast_element(body, v, index)) for v in rest[:rank])
        memory.store_lane(
            body,
            m,
            position,
            emit_broadcast_element(body, value, index),
            emit_optional_operand(body, rest[rank:], 0, index),
        )

    emit_loop_nest(kernel, shape, choose_vector_width(kernel, value.type.dtype), emit_element_store)


def _broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a scatter's indices, value and mask broadcast to."""
    rank = max((len(s) for s in shapes), default=0)
    level = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*level, strict=True))


@statement_rule(tile.async_copy)
def _(kernel, node):
    # The copy is synchronous, which the memory model allows.
    dst, src, *starts = node.args
    dst_rank, src_rank, block = dst.type.rank, src.type.rank, tuple(node.attrs["shape"])
    rank = max(dst_rank, src_rank, len(block))
    full = (1,) * (rank - len(block)) + block
    target, source = kernel.memrefs[dst], kernel.memrefs[src]

    def emit_element_store(body: LoopBody, index: LaneIndex) -> None:
        position = offset_index(body, starts[dst_rank:], index[rank - src_rank :])
        mask = None
        if node.attrs["edge"] == "clip":
            mask = emit_bounds_mask(body, source, starts[dst_rank:], full[rank - src_rank :], position)
        lane = memory.load_lane(body, source, position, mask)
        memory.store_lane(body, target, offset_index(body, starts[:dst_rank], index[rank - dst_rank :]), lane)

    emit_loop_nest(kernel, full, choose_vector_width(kernel, dst.type.dtype), emit_element_store)


ATOMIC_OPERATIONS = {
    ("add", "float"): "fadd", ("max", "float"): "fmaximum", ("min", "float"): "fminimum",
    ("add", "int"): "add", ("max", "int"): "max", ("min", "int"): "min",
    ("add", "uint"): "add", ("max", "uint"): "umax", ("min", "uint"): "umin",
    **{(word, kind): word for word in ("and", "or", "xor") for kind in ("int", "uint")},
}  # fmt: skip


@statement_rule(tile.atomic)
def _(kernel, node):
    dtype = node.args[0].type.dtype
    word = "xchg" if node.attrs["kind"] == "exchange" else ATOMIC_OPERATIONS.get((node.attrs["kind"], dtype.kind))
    if scalar_functions.has_memory_format(dtype) and dtype.is_float and word in CAS_LOOP_OPERATIONS:
        return _emit_atomic(
            kernel, node, 1, lambda text, *at: _emit_cas_loop(text, dtype, CAS_LOOP_OPERATIONS[word], *at)
        )
    if word is None or scalar_functions.has_memory_format(dtype):
        raise UnsupportedOpError(f"the target llvm has no atomic {node.attrs['kind']} on {dtype}")
    t = get_register_type(dtype)

    def update(text: LlvmBuilder, pointer: str, value: str) -> str:
        return text.let(f"atomicrmw {word} ptr {pointer}, {t} {value} monotonic, align {ELEMENT_BYTES[t.element]}")

    _emit_atomic(kernel, node, 1, update)


# Compare-and-swap loops: the new value of an update without an instruction, computed in f32 registers.
CAS_LOOP_OPERATIONS = {
    "fadd": "fadd float {0}, {1}", "fmaximum": "call float @llvm.maximum.f32(float {0}, float {1})",
    "fminimum": "call float @llvm.minimum.f32(float {0}, float {1})", "xchg": "fadd float {1}, -0.0",
}  # fmt: skip


def _emit_cas_loop(text: LlvmBuilder, dtype: DType, combine: str, pointer: str, value: str) -> str:
    """An atomic update of a narrow float: a compare-and-swap loop around decode, compute, round and encode."""
    m, bits = memory.get_memory_type(dtype), f"i{8 * memory.get_element_bytes(dtype)}"
    align = f"align {memory.get_element_bytes(dtype)}"
    first = text.let(f"load atomic {bits}, ptr {pointer} monotonic, {align}")
    again, done, before = text.new_label("again"), text.new_label("updated"), text.label
    text.branch_to(again)
    result_memory, reloaded = text.new_name(), text.new_name()
    text.line(f"{result_memory} = phi {bits} [ {first}, %{before} ], [ {reloaded}, %{again} ]")
    raw = result_memory if m.element == bits else text.let(f"bitcast {bits} {result_memory} to {m}")
    old, new, stored = text.new_name(), text.new_name(), text.new_name()
    text.lines(scalar_functions.decode_from_memory(dtype, 1, old, raw))
    text.lines(scalar_functions.round_to_format(dtype, 1, new, text.let(combine.format(old, value))))
    text.lines(scalar_functions.encode_to_memory(dtype, 1, stored, new))
    desired = stored if m.element == bits else text.let(f"bitcast {m} {stored} to {bits}")
    pair = text.let(f"cmpxchg ptr {pointer}, {bits} {result_memory}, {bits} {desired} monotonic monotonic, {align}")
    text.line(f"{reloaded} = extractvalue {{ {bits}, i1 }} {pair}, 0")
    succeeded = text.let(f"extractvalue {{ {bits}, i1 }} {pair}, 1")
    text.line(f"br i1 {succeeded}, label %{done}, label %{again}")
    text.begin_block(done)
    return old


@statement_rule(tile.compare_exchange)
def _(kernel, node):
    t = get_register_type(node.args[0].type.dtype)

    def update(text: LlvmBuilder, pointer: str, value: str, expected: str) -> str:
        operands = f"ptr {pointer}, {t} {expected}, {t} {value}"
        pair = text.let(f"cmpxchg {operands} monotonic monotonic, align {ELEMENT_BYTES[t.element]}")
        return text.let(f"extractvalue {{ {t}, i1 }} {pair}, 0")

    _emit_atomic(kernel, node, 2, update)


def _emit_atomic(kernel: LlvmKernelContext, node: Node, count: int, update: Callable[..., str]) -> None:
    """A loop over elements; `update(text, pointer, *operands)` emits one update and gives the old value."""
    ref, operands, rest = node.args[0], node.args[1 : 1 + count], node.args[1 + count :]
    m, rank, shape = kernel.memrefs[ref], ref.type.rank, static_shape(node.out.type)
    result_memory = allocate_block(kernel, node.out) if shape else None

    def emit_element_store(body: LoopBody, index: LaneIndex) -> None:
        position = tuple(cast_to_index(body, v, emit_broadcast_element(body, v, index)) for v in rest[:rank])
        values = [emit_broadcast_element(body, v, index).name for v in operands]
        mask = emit_optional_operand(body, rest[rank:], 0, index)
        kernel.scratch.record_access(m)
        pointer = memory.emit_pointer(body, m, memory.compute_address(body, m, position))
        old = _emit_guarded(body.text, get_register_type(m.dtype), mask, lambda: update(body.text, pointer, *values))
        if result_memory is None:
            kernel.scalars[node.out] = old.name
        else:
            memory.store_lane(body, result_memory, index, old)

    emit_loop_nest(kernel, shape, 1, emit_element_store)
    if result_memory is not None:
        kernel.buffers[node.out] = result_memory


def _emit_guarded(text: LlvmBuilder, t: RegisterType, mask: LaneValue | None, update: Callable[[], str]) -> LaneValue:
    """One update, behind a branch if there is a mask."""
    if mask is None:
        return LaneValue(update())
    yes, done = text.new_label("then"), text.new_label("done")
    before = text.label
    text.line(f"br i1 {mask.name}, label %{yes}, label %{done}")
    text.begin_block(yes)
    old, last = update(), text.label  # a compare-and-swap loop ends in another basic block
    text.branch_to(done)
    return LaneValue(text.let(f"phi {t} [ {old}, %{last} ], [ {t.const(0)}, %{before} ]"))
