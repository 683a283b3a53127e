"""In-flight MMAs: the queue of committed wgmma groups, with the waits for them and the releases of their ring stages.

MMAs commit in program order; the wait for one comes before the first use of its accumulator, and covers all earlier
ones. A loop may end with MMAs in flight, whose accumulators it carries. The next iteration then begins with as many in
flight, or with none: wgmma.wait_group bounds the number in flight, so it is right in both cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tessera.codegen.ptx.context import EmissionContext, InFlightMma, Registers
from tessera.codegen.ptx.ops import async_mma, wait_mma
from tessera.codegen.ptx.table.warpgroup.ring_buffer import release_stage
from tessera.codegen.ptx.text.builder import is_immediate
from tessera.ir.core import Block, Function, Node, Value
from tessera.ops.tensor import elementwise

NO_STAGE = -1  # the stage of an MMA that is not in flight
# Ops whose results own their registers.
FRESH_RESULT_OPS = (elementwise.mul, elementwise.add, elementwise.sub, async_mma)


def wait_for_results(ctx: EmissionContext, values: Iterable[Value]) -> None:
    """Wait for the MMAs that define some of these values, and so for all that were committed earlier."""
    wanted = set(values)
    found = [i for i, mma in enumerate(ctx.pipeline.in_flight) if mma.result in wanted]
    if found:
        _wait(ctx, found[-1] + 1)


def wait_for_register_operands(ctx: EmissionContext) -> None:
    """Wait for the MMAs that read their left operand from registers."""
    wait_for_results(ctx, [mma.result for mma in ctx.pipeline.in_flight if mma.reads_registers])


def wait_for_all(ctx: EmissionContext) -> None:
    """Wait for every MMA."""
    if ctx.pipeline.in_flight:
        _wait(ctx, len(ctx.pipeline.in_flight))


def _wait(ctx: EmissionContext, count: int) -> None:
    """Wait for the first `count` MMAs and release their stages."""
    text, ring, queue = ctx.text, ctx.pipeline.ring, ctx.pipeline.in_flight
    assert ring is not None
    text.do("wgmma.wait_group.sync.aligned", len(queue) - count)
    for mma in queue[:count]:
        committed = text.let("setp.ge.s32", "pred", mma.stage, 0) if mma.optional else ""
        release_stage(ctx.team, ring, mma.stage, committed)
    del queue[:count]


def record_commit(ctx: EmissionContext, node: Node, stage: str) -> None:
    """Append a committed MMA that reads a ring stage."""
    target = ctx.pipeline.carried_targets.get(node.out)
    held = ctx.text.let("mov.u32", "b32", stage) if target is None else target[1]
    if target is not None:
        ctx.text.do("mov.u32", held, stage)
    reads_registers = node.args[0] not in ctx.pipeline.resident_operands
    ctx.pipeline.in_flight.append(InFlightMma(node.out, held, target is not None, reads_registers))


def can_accumulate_in_place(ctx: EmissionContext, v: Value) -> bool:
    """Whether an MMA may overwrite a block's registers: this is its only use, and no other value shares them."""
    held = ctx.values[v]
    owned = _owns_registers(ctx.function, v) and ctx.analyses.use_counts[v] == 1 and len(set(held)) == len(held)
    return owned and not any(is_immediate(x) or x.startswith("0f") for x in held)


def _owns_registers(function: Function, v: Value) -> bool:
    """Whether a value is a block parameter or the result of an op that writes new registers."""
    for node in function.body.walk():
        if (node.op in FRESH_RESULT_OPS and v in node.results) or any(v in region.params for region in node.regions):
            return True
    return False


def enter_loop(ctx: EmissionContext, loop: Node) -> Mapping[int, Registers]:
    """Begin a loop: the registers of the carried values that stay in flight, by position."""
    (body,) = loop.regions
    pipeline, flying = ctx.pipeline, _find_carried_in_flight(body)
    inits = [loop.args[3 + i] for i in flying]
    before = [mma.result for mma in pipeline.in_flight]
    if before != inits or any(ctx.analyses.use_counts[v] != 1 for v in before):
        wait_for_all(ctx)
    stages = {i: mma.stage for i, mma in zip(flying, pipeline.in_flight, strict=False)}
    kept = {i: ctx.values[loop.args[3 + i]] for i in stages}
    for i in _find_carried_sums(body):
        stages.setdefault(i, ctx.text.let("mov.u32", "b32", NO_STAGE))
        pipeline.carried_targets[body.results[i]] = (body.params[i + 1], stages[i])
    reading = {n.out for n in body.nodes if n.op is async_mma and n.args[0] not in pipeline.resident_operands}
    pipeline.in_flight = [
        InFlightMma(body.params[i + 1], stages[i], True, body.results[i] in reading) for i in flying
    ]  # fmt: skip
    return kept


def end_iteration(ctx: EmissionContext, loop: Node) -> None:
    """End an iteration with the same MMAs in flight as at its start."""
    (body,) = loop.regions
    pipeline, results = ctx.pipeline, [body.results[i] for i in _find_carried_in_flight(body)]
    if [mma.result for mma in pipeline.in_flight] != results:
        wait_for_all(ctx)
        for v in results:
            ctx.text.do("mov.u32", pipeline.carried_targets[v][1], NO_STAGE)
        pipeline.in_flight = [InFlightMma(v, pipeline.carried_targets[v][1], True) for v in results]


def leave_loop(ctx: EmissionContext, loop: Node) -> None:
    """End a loop: the MMAs in flight define the loop's results."""
    (body,) = loop.regions
    renamed = {body.results[i]: loop.results[i] for i in _find_carried_in_flight(body)}
    ctx.pipeline.in_flight = [replace(mma, result=renamed[mma.result]) for mma in ctx.pipeline.in_flight]


def _find_carried_sums(body: Block) -> list[int]:
    """The positions of a loop's results that are MMA accumulators whose previous value nothing reads afterwards."""
    found = []
    for position, node in enumerate(body.nodes):
        if node.op is async_mma and list(body.results).count(node.out) == 1:
            i, later = body.results.index(node.out), body.nodes[position + 1 :]
            used = {v for n in later for v in n.args} | set(body.results)
            used_inside = {v for n in later for region in n.regions for m in region.walk() for v in m.args}
            if body.params[i + 1] not in used | used_inside:
                found.append(i)
    return found


def _find_carried_in_flight(body: Block) -> list[int]:
    """Those positions whose MMA is not waited for in the iteration that commits it."""
    done = {n.args[0] for n in body.nodes if n.op is wait_mma}
    return [i for i in _find_carried_sums(body) if body.results[i] not in done]
