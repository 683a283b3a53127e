"""Control flow: loops and branches. Carried values own registers, which the end of each iteration overwrites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.codegen.ptx.context import EmissionContext, Registers
from tessera.codegen.ptx.emitter import emit_block
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.diagnostics import advance_loop_counter, start_loop_counter
from tessera.codegen.ptx.table.warpgroup import wgmma
from tessera.codegen.ptx.text.builder import is_immediate, register_class
from tessera.ir.core import Node, Value
from tessera.ops.dialects import control_flow


def new_registers(ctx: EmissionContext, v: Value) -> Registers:
    """New registers for a block."""
    kind = register_class(v.type.dtype)
    return tuple(ctx.text.new(kind) for _ in range(ctx.layout(v).count))


def move_registers(ctx: EmissionContext, values: Sequence[Value], targets: Sequence[Registers]) -> None:
    """Copy blocks to registers in parallel: sources that the copy overwrites go through temporaries."""
    text = ctx.text
    moves = [
        (register_class(v.type.dtype), x, d)
        for v, registers in zip(values, targets, strict=True)
        for x, d in zip(ctx.values[v], registers, strict=True)
        if x != d
    ]
    written = {d for _, _, d in moves}
    saved = {x: text.let(f"mov.{kind}", kind, x) for kind, x, _ in moves if x in written}
    for kind, x, d in moves:
        text.do(f"mov.{kind}", d, saved.get(x, x))


def _initialise_carried(
    ctx: EmissionContext, node: Node, inits: Sequence[Value], kept: Mapping[int, Registers] | None = None
) -> list[Registers]:
    """The registers of a loop's carried values, with the initial values; those of `kept` positions are not copied."""
    kept = kept or {}
    held = [kept.get(i) or new_registers(ctx, v) for i, v in enumerate(node.results)]
    moved = [i for i in range(len(held)) if i not in kept]
    move_registers(ctx, [inits[i] for i in moved], [held[i] for i in moved])
    return held


def _bind_registers(ctx: EmissionContext, values: Sequence[Value], held: Sequence[Registers]) -> None:
    ctx.values.update(zip(values, held, strict=True))


@emission_rule(control_flow.for_)
def _(ctx: EmissionContext, node: Node) -> None:
    text, hazards = ctx.text, ctx.smem.hazards
    lower, upper, step = (ctx.scalar_operand(v) for v in node.args[:3])
    ctx.analyses.ranges.loop(node)
    (body,) = node.regions
    held = _initialise_carried(ctx, node, node.args[3:], wgmma.enter_loop(ctx, node))
    index = text.let("mov.b64", "b64", lower)
    start_loop_counter(ctx, node)
    head, done = text.new_label("loop"), text.new_label("done")
    text.label(head)
    text.do(f"bra {done}", guard=_emit_exit_condition(ctx, index, upper, step))
    ctx.analyses.producers[body.params[0]] = node
    ctx.values[body.params[0]] = (index,)
    _bind_registers(ctx, body.params[1:], held)
    entry = set(hazards.open)
    emit_block(ctx, body)
    wgmma.end_iteration(ctx, node)
    move_registers(ctx, body.results, held)
    advance_loop_counter(ctx, node)
    text.do("add.s64", index, index, step)
    text.do(f"bra.uni {head}" if ctx.team.threads > 1 else f"bra {head}")
    text.label(done)
    hazards.open |= entry
    _bind_registers(ctx, node.results, held)
    wgmma.leave_loop(ctx, node)


def _emit_exit_condition(ctx: EmissionContext, index: str, upper: str, step: str) -> str:
    """The predicate that a loop is done: the index has reached its end, in the direction of the step."""
    text = ctx.text
    if is_immediate(step):
        return text.let(f"setp.{'ge' if int(step) > 0 else 'le'}.s64", "pred", index, upper)
    up = text.let("setp.gt.s64", "pred", step, 0)
    above, below = (text.let(f"setp.{word}.s64", "pred", index, upper) for word in ("ge", "le"))
    done_up = text.let("and.pred", "pred", up, above)
    done_down = text.let("and.pred", "pred", text.let("not.pred", "pred", up), below)
    return text.let("or.pred", "pred", done_up, done_down)


@emission_rule(control_flow.while_)
def _(ctx, node):
    text, hazards = ctx.text, ctx.smem.hazards
    condition, body = node.regions
    held = _initialise_carried(ctx, node, node.args)
    start_loop_counter(ctx, node)
    head, done = text.new_label("loop"), text.new_label("done")
    text.label(head)
    entry = set(hazards.open)
    _bind_registers(ctx, condition.params, held)
    emit_block(ctx, condition)
    ended = text.let("not.pred", "pred", ctx.scalar_operand(condition.results[0]))
    text.do(f"bra {done}", guard=ended)
    at_exit = set(hazards.open)
    _bind_registers(ctx, body.params, held)
    emit_block(ctx, body)
    move_registers(ctx, body.results, held)
    advance_loop_counter(ctx, node)
    text.do(f"bra {head}")
    text.label(done)
    hazards.open |= entry | at_exit
    _bind_registers(ctx, node.results, held)


@emission_rule(control_flow.if_)
def _(ctx, node):
    text, hazards = ctx.text, ctx.smem.hazards
    then, otherwise = node.regions
    held = [new_registers(ctx, v) for v in node.results]
    other, done = text.new_label("else"), text.new_label("done")
    not_taken = text.let("not.pred", "pred", ctx.scalar_operand(node.args[0]))
    before = set(hazards.open)
    text.do(f"bra {other}", guard=not_taken)
    emit_block(ctx, then)
    move_registers(ctx, then.results, held)
    text.do(f"bra {done}")
    after_then, hazards.open = hazards.open, before
    text.label(other)
    emit_block(ctx, otherwise)
    move_registers(ctx, otherwise.results, held)
    text.label(done)
    hazards.open |= after_then
    _bind_registers(ctx, node.results, held)
