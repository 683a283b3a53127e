"""Control flow: loops and branches. Carried values stay in registers of their own, written at the end of each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.table import emit_node
from tessera.codegen.ptx.text.register_types import is_immediate, register_class
from tessera.ir.core import Node, Value
from tessera.ops.dialects import control_flow

if TYPE_CHECKING:
    from tessera.codegen.ptx.emitter import PtxEmitter

Registers = tuple[str, ...]


def new_registers(kernel: PtxEmitter, v: Value) -> Registers:
    """New registers for a block."""
    kind = register_class(v.type.dtype)
    return tuple(kernel.text.new(kind) for _ in range(kernel.layout(v).count))


def move_registers(kernel: PtxEmitter, values: Sequence[Value], targets: Sequence[Registers]) -> None:
    """Bring blocks into registers all at once: what is both read and written is set aside first."""
    text = kernel.text
    pairs = [
        (register_class(v.type.dtype), x, d)
        for v, registers in zip(values, targets, strict=True)
        for x, d in zip(kernel.values[v], registers, strict=True)
        if x != d
    ]
    written = {d for _, _, d in pairs}
    aside = {x: text.let(f"mov.{kind}", kind, x) for kind, x, _ in pairs if x in written}
    for kind, x, d in pairs:
        text.do(f"mov.{kind}", d, aside.get(x, x))


def _initialise_carried(
    kernel: PtxEmitter, node: Node, inits: Sequence[Value], kept: Mapping[int, Registers] | None = None
) -> list[Registers]:
    """The registers of what a loop carries, holding what it begins with; by place those that are `kept` as they are."""
    kept = kept or {}
    held = [kept.get(i) or new_registers(kernel, v) for i, v in enumerate(node.results)]
    moved = [i for i in range(len(held)) if i not in kept]
    move_registers(kernel, [inits[i] for i in moved], [held[i] for i in moved])
    return held


def _bind_registers(kernel: PtxEmitter, values: Sequence[Value], held: Sequence[Registers]) -> None:
    kernel.values.update(zip(values, held, strict=True))


@emit_node(control_flow.for_)
def _(kernel, node):
    text = kernel.text
    lower, upper, step = (kernel.scalar_operand(v) for v in node.args[:3])
    kernel.ranges.loop(node)
    (body,) = node.regions
    held = _initialise_carried(kernel, node, node.args[3:], kernel.mma_queue.enter(node))
    index = text.let("mov.b64", "b64", lower)
    kernel.rounds.begin(node)
    head, done = text.new_label("loop"), text.new_label("done")
    text.label(head)
    text.do(f"bra {done}", guard=_loop_done(kernel, index, upper, step))
    kernel.producers[body.params[0]] = node
    kernel.values[body.params[0]] = (index,)
    _bind_registers(kernel, body.params[1:], held)
    entry = set(kernel.hazards.open)
    kernel.run(body)
    kernel.mma_queue.end_round(node)
    move_registers(kernel, body.results, held)
    kernel.rounds.end(node)
    text.do("add.s64", index, index, step)
    text.do(f"bra.uni {head}" if kernel.team.threads > 1 else f"bra {head}")
    text.label(done)
    kernel.hazards.open |= entry
    _bind_registers(kernel, node.results, held)
    kernel.mma_queue.leave(node)


def _loop_done(kernel: PtxEmitter, index: str, upper: str, step: str) -> str:
    """Whether a loop is done: at its end or, where it counts down, below it."""
    text = kernel.text
    if is_immediate(step):
        return text.let(f"setp.{'ge' if int(step) > 0 else 'le'}.s64", "pred", index, upper)
    up = text.let("setp.gt.s64", "pred", step, 0)
    above, below = (text.let(f"setp.{word}.s64", "pred", index, upper) for word in ("ge", "le"))
    yes = text.let("and.pred", "pred", up, above)
    no = text.let("and.pred", "pred", text.let("not.pred", "pred", up), below)
    return text.let("or.pred", "pred", yes, no)


@emit_node(control_flow.while_)
def _(kernel, node):
    text = kernel.text
    condition, body = node.regions
    held = _initialise_carried(kernel, node, node.args)
    kernel.rounds.begin(node)
    head, done = text.new_label("loop"), text.new_label("done")
    text.label(head)
    entry = set(kernel.hazards.open)
    _bind_registers(kernel, condition.params, held)
    kernel.run(condition)
    ended = text.let("not.pred", "pred", kernel.scalar_operand(condition.results[0]))
    text.do(f"bra {done}", guard=ended)
    middle = set(kernel.hazards.open)
    _bind_registers(kernel, body.params, held)
    kernel.run(body)
    move_registers(kernel, body.results, held)
    kernel.rounds.end(node)
    text.do(f"bra {head}")
    text.label(done)
    kernel.hazards.open |= entry | middle
    _bind_registers(kernel, node.results, held)


@emit_node(control_flow.if_)
def _(kernel, node):
    text = kernel.text
    yes, no = node.regions
    held = [new_registers(kernel, v) for v in node.results]
    other, done = text.new_label("else"), text.new_label("done")
    denied = text.let("not.pred", "pred", kernel.scalar_operand(node.args[0]))
    before = set(kernel.hazards.open)
    text.do(f"bra {other}", guard=denied)
    kernel.run(yes)
    move_registers(kernel, yes.results, held)
    text.do(f"bra {done}")
    after, kernel.hazards.open = kernel.hazards.open, before
    text.label(other)
    kernel.run(no)
    move_registers(kernel, no.results, held)
    text.label(done)
    kernel.hazards.open |= after
    _bind_registers(kernel, node.results, held)
