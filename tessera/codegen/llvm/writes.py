"""Stores, scatters, copies and atomics: one loop nest each."""

from __future__ import annotations

import math

from tessera.codegen.llvm import memory
from tessera.codegen.llvm.element import as_index, broadcast_at, clipped, operand, placed, value_at
from tessera.codegen.llvm.lane import Body, Index, Lane
from tessera.codegen.llvm.nest import lanes_for, nest
from tessera.codegen.llvm.scratch import Memory
from tessera.codegen.llvm.types import SIZE, register
from tessera.codegen.llvm.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ops import tile


@visit(tile.store)
def _(kernel, node):
    ref, value, *rest = node.args
    m, rank, shape = kernel.memories[ref], ref.type.rank, value.type.shape

    def body_of(body: Body, index: Index) -> None:
        place = placed(body, rest[:rank], index)
        mask = operand(body, rest[rank:], 0, index)
        if node.attrs["edge"] == "clip":
            mask = memory.both(body, mask, clipped(body, m, rest[:rank], shape, place))
        memory.store(body, m, place, value_at(body, value, index), mask)

    nest(kernel, shape, lanes_for(kernel, value.type.dtype), body_of)


@visit(tile.scatter)
def _(kernel, node):
    ref, value, *rest = node.args
    m, rank, shape = kernel.memories[ref], ref.type.rank, _broadcast(*(v.type.shape for v in node.args[1:]))

    def body_of(body: Body, index: Index) -> None:
        place = tuple(as_index(body, v, broadcast_at(body, v, index)) for v in rest[:rank])
        memory.store(body, m, place, broadcast_at(body, value, index), operand(body, rest[rank:], 0, index))

    nest(kernel, shape, lanes_for(kernel, value.type.dtype), body_of)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a scatter's index blocks, value and mask broadcast to."""
    rank = max((len(s) for s in shapes), default=0)
    level = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*level, strict=True))


@visit(tile.async_copy)
def _(kernel, node):
    # Done at once: one of the moments at which a copy may be done.
    dst, src, *starts = node.args
    here, there, block = dst.type.rank, src.type.rank, tuple(node.attrs["shape"])
    rank = max(here, there, len(block))
    full = (1,) * (rank - len(block)) + block
    target, source = kernel.memories[dst], kernel.memories[src]

    def body_of(body: Body, index: Index) -> None:
        place = placed(body, starts[here:], index[rank - there :])
        mask = None
        if node.attrs["edge"] == "clip":
            mask = clipped(body, source, starts[here:], full[rank - there :], place)
        lane = memory.load(body, source, place, mask)
        memory.store(body, target, placed(body, starts[:here], index[rank - here :]), lane)

    nest(kernel, full, lanes_for(kernel, dst.type.dtype), body_of)


ATOMIC = {
    ("add", "float"): "fadd", ("max", "float"): "fmaximum", ("min", "float"): "fminimum",
    ("add", "int"): "add", ("max", "int"): "max", ("min", "int"): "min",
    ("add", "uint"): "add", ("max", "uint"): "umax", ("min", "uint"): "umin",
}  # fmt: skip


@visit(tile.atomic)
def _(kernel, node):
    ref, value, *rest = node.args
    m, rank, shape = kernel.memories[ref], ref.type.rank, node.out.type.shape
    word = "xchg" if node.attrs["kind"] == "exchange" else ATOMIC.get((node.attrs["kind"], ref.type.dtype.kind))
    if word is None or register(ref.type.dtype) != memory.memory(ref.type.dtype):
        raise UnsupportedOpError(f"the target llvm has no atomic {node.attrs['kind']} of {ref.type.dtype}")
    held = kernel.room(node.out) if math.prod(shape) > 1 or shape else None

    def body_of(body: Body, index: Index) -> None:
        place = tuple(as_index(body, v, broadcast_at(body, v, index)) for v in rest[:rank])
        old = _atomic(body, m, place, word, broadcast_at(body, value, index), operand(body, rest[rank:], 0, index))
        if held is None:
            kernel.scalars[node.out] = old.name
        else:
            memory.store(body, held, index, old)

    nest(kernel, shape, 1, body_of)
    if held is not None:
        kernel.buffers[node.out] = held


def _atomic(body: Body, m: Memory, place: Index, word: str, value: Lane, mask: Lane | None) -> Lane:
    """One element: behind a branch where there is a mask, since an atomic cannot be undone."""
    text, t = body.text, register(m.dtype)
    body.kernel.scratch.touch(m)
    pointer = memory.pointer(body, m, memory.address(body, m, place))
    update = f"atomicrmw {word} ptr {pointer}, {t} {value.name} monotonic, align {SIZE[t.element]}"
    if mask is None:
        return Lane(text.let(update))
    yes, done = text.new_label("then"), text.new_label("done")
    before = text.label
    text.line(f"br i1 {mask.name}, label %{yes}, label %{done}")
    text.begin(yes)
    old = text.let(update)
    text.jump(done)
    return Lane(text.let(f"phi {t} [ {old}, %{yes} ], [ {t.const(0)}, %{before} ]"))
