"""Stores, scatters, copies and atomics: one loop nest each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tessera.codegen.blocks import sizes
from tessera.codegen.llvm import convert, memory
from tessera.codegen.llvm.element import as_index, broadcast_at, clipped, operand, placed, value_at
from tessera.codegen.llvm.lane import Body, Index, Lane
from tessera.codegen.llvm.nest import lanes_for, nest
from tessera.codegen.llvm.text import Text
from tessera.codegen.llvm.types import SIZE, Vec, register
from tessera.codegen.llvm.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops import tile
from tessera.types import DType

if TYPE_CHECKING:
    from tessera.codegen.llvm.kernel import Kernel


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
    **{(word, kind): word for word in ("and", "or", "xor") for kind in ("int", "uint")},
}  # fmt: skip


@visit(tile.atomic)
def _(kernel, node):
    dtype = node.args[0].type.dtype
    word = "xchg" if node.attrs["kind"] == "exchange" else ATOMIC.get((node.attrs["kind"], dtype.kind))
    if convert.has_form(dtype) and dtype.is_float and word in ATTEMPTED:
        return _atomic(kernel, node, 1, lambda text, *at: _attempted(text, dtype, ATTEMPTED[word], *at))
    if word is None or convert.has_form(dtype):
        raise UnsupportedOpError(f"the target llvm has no atomic {node.attrs['kind']} of {dtype}")
    t = register(dtype)

    def change(text: Text, pointer: str, value: str) -> str:
        return text.let(f"atomicrmw {word} ptr {pointer}, {t} {value} monotonic, align {SIZE[t.element]}")

    _atomic(kernel, node, 1, change)


# What an update that the processor has no instruction for makes of the old value and the new one: registers hold f32.
ATTEMPTED = {
    "fadd": "fadd float {0}, {1}", "fmaximum": "call float @llvm.maximum.f32(float {0}, float {1})",
    "fminimum": "call float @llvm.minimum.f32(float {0}, float {1})", "xchg": "fadd float {1}, -0.0",
}  # fmt: skip


def _attempted(text: Text, dtype: DType, combine: str, pointer: str, value: str) -> str:
    """An update of a float narrower than its register: computed, and tried until no other came between."""
    m, bits = memory.memory(dtype), f"i{8 * memory.size(dtype)}"
    align = f"align {memory.size(dtype)}"
    first = text.let(f"load atomic {bits}, ptr {pointer} monotonic, {align}")
    again, done, before = text.new_label("again"), text.new_label("updated"), text.label
    text.jump(again)
    held, seen = text.name(), text.name()
    text.line(f"{held} = phi {bits} [ {first}, %{before} ], [ {seen}, %{again} ]")
    raw = held if m.element == bits else text.let(f"bitcast {bits} {held} to {m}")
    old, new, stored = text.name(), text.name(), text.name()
    text.lines(convert.decode(dtype, 1, old, raw))
    text.lines(convert.rounded(dtype, 1, new, text.let(combine.format(old, value))))
    text.lines(convert.encode(dtype, 1, stored, new))
    wanted = stored if m.element == bits else text.let(f"bitcast {m} {stored} to {bits}")
    pair = text.let(f"cmpxchg ptr {pointer}, {bits} {held}, {bits} {wanted} monotonic monotonic, {align}")
    text.line(f"{seen} = extractvalue {{ {bits}, i1 }} {pair}, 0")
    won = text.let(f"extractvalue {{ {bits}, i1 }} {pair}, 1")
    text.line(f"br i1 {won}, label %{done}, label %{again}")
    text.begin(done)
    return old


@visit(tile.compare_exchange)
def _(kernel, node):
    t = register(node.args[0].type.dtype)

    def change(text: Text, pointer: str, value: str, expected: str) -> str:
        operands = f"ptr {pointer}, {t} {expected}, {t} {value}"
        pair = text.let(f"cmpxchg {operands} monotonic monotonic, align {SIZE[t.element]}")
        return text.let(f"extractvalue {{ {t}, i1 }} {pair}, 0")

    _atomic(kernel, node, 2, change)


def _atomic(kernel: Kernel, node: Node, count: int, change: Callable[..., str]) -> None:
    """A loop over the elements: `change(text, pointer, *operands)` updates one and names its old value."""
    ref, operands, rest = node.args[0], node.args[1 : 1 + count], node.args[1 + count :]
    m, rank, shape = kernel.memories[ref], ref.type.rank, sizes(node.out.type)
    held = kernel.room(node.out) if shape else None

    def body_of(body: Body, index: Index) -> None:
        place = tuple(as_index(body, v, broadcast_at(body, v, index)) for v in rest[:rank])
        values = [broadcast_at(body, v, index).name for v in operands]
        mask = operand(body, rest[rank:], 0, index)
        kernel.scratch.touch(m)
        pointer = memory.pointer(body, m, memory.address(body, m, place))
        old = _guarded(body.text, register(m.dtype), mask, lambda: change(body.text, pointer, *values))
        if held is None:
            kernel.scalars[node.out] = old.name
        else:
            memory.store(body, held, index, old)

    nest(kernel, shape, 1, body_of)
    if held is not None:
        kernel.buffers[node.out] = held


def _guarded(text: Text, t: Vec, mask: Lane | None, update: Callable[[], str]) -> Lane:
    """One element: behind a branch where there is a mask, since an atomic cannot be undone."""
    if mask is None:
        return Lane(update())
    yes, done = text.new_label("then"), text.new_label("done")
    before = text.label
    text.line(f"br i1 {mask.name}, label %{yes}, label %{done}")
    text.begin(yes)
    old, last = update(), text.label  # what an update ends in need not be the block that it began in
    text.jump(done)
    return Lane(text.let(f"phi {t} [ {old}, %{last} ], [ {t.const(0)}, %{before} ]"))
