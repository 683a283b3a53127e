"""wgmma: the consumers' mainloop, and asynchronous MMAs of a warp group with the queue of those in flight.

Operands are in shared memory as TMA writes them with the 128-byte swizzle, described by matrix descriptors (PTX ISA,
"Matrix descriptor"); a left operand may be in registers instead. Accumulators are in registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tessera.codegen.ptx.context import EmissionContext, InFlightMma, Registers
from tessera.codegen.ptx.layout import WARPGROUP_THREADS, ThreadTeam
from tessera.codegen.ptx.ops import (
    async_mma,
    gemm_mainloop,
    mma_type_suffix,
    pack_pairs,
    release_operand,
    resident_operand,
    wait_copy,
    wait_mma,
)
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.table import emission_rule
from tessera.codegen.ptx.table.blocks.block_access import pack_halves
from tessera.codegen.ptx.table.warpgroup.pingpong import wait_mma_order, yield_mma_order
from tessera.codegen.ptx.table.warpgroup.ring_buffer import PipelineState, StageRingBuffer, release_stage
from tessera.codegen.ptx.table.warpgroup.tensor_map import (
    BOX_COLUMNS,
    SWIZZLE_ROW_BYTES,
    WGMMA_ROWS,
    block_extent,
    stage_bytes,
)
from tessera.codegen.ptx.text.builder import PtxBuilder, element_bytes, is_immediate, literal, register_class
from tessera.core.types import bf16, f16, fp8_e4m3, fp8_e5m2, int8, uint8
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


def find_accumulator(node: Node) -> Value | None:
    """The previous sums that an `async_mma` adds to."""
    return node.args[2] if node.op is async_mma and node.attrs["summed"] else None


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
        if mma.stage == "":
            continue  # a later product reads the stage, too
        committed = text.let("setp.ge.s32", "pred", mma.stage, 0) if mma.optional else ""
        release_stage(ctx.team, ring, mma.stage, committed)
    del queue[:count]


def record_commit(ctx: EmissionContext, node: Node, stage: str) -> None:
    """Append a committed MMA that reads a ring stage."""
    target = ctx.pipeline.carried_targets.get(node.out)
    reads_registers = node.args[0] not in ctx.pipeline.resident_operands
    if node.attrs["keeps"] and target is None:
        ctx.pipeline.in_flight.append(InFlightMma(node.out, "", False, reads_registers))
        return
    stage = str(NO_STAGE) if node.attrs["keeps"] else stage
    held = ctx.text.let("mov.u32", "b32", stage) if target is None else target[1]
    if target is not None:
        ctx.text.do("mov.u32", held, stage)
    ctx.pipeline.in_flight.append(InFlightMma(node.out, held, target is not None, reads_registers))


def can_accumulate_in_place(ctx: EmissionContext, v: Value) -> bool:
    """Whether an MMA may overwrite a block's registers: this is its only use, and no other value shares them.

    Registers of a sum that a loop carries are those of the product that makes the next one: others copy it.
    """
    held = ctx.values[v]
    if any(param is v for param, _ in ctx.pipeline.carried_targets.values()):
        return False
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


# Mainloop and asynchronous MMAs.


K_STEP_BYTES = 32  # bytes along the reduction axis in one instruction
SWIZZLE_ATOM_BYTES = 8 * SWIZZLE_ROW_BYTES
SWIZZLE_128B = 1 << 62  # the descriptor's swizzle mode
# Descriptor fields count units of 16 bytes: the stride from one swizzle atom to the next, and the leading dimension.
ATOM_STRIDE = (SWIZZLE_ATOM_BYTES >> 4) << 32
K_MAJOR_DESCRIPTOR = SWIZZLE_128B | ATOM_STRIDE | 1 << 16
MN_MAJOR_DESCRIPTOR = SWIZZLE_128B | ATOM_STRIDE | (BOX_COLUMNS * SWIZZLE_ROW_BYTES >> 4) << 16
# Operands after scale-d: the signs of both operands, and for 16-bit types whether an operand is MN-major.
TRAILING_OPERANDS = {bf16: (1, 1, 0), f16: (1, 1, 0), fp8_e4m3: (1, 1), fp8_e5m2: (1, 1), int8: (), uint8: ()}
MIXED_INT8_ISA = (8, 4)  # the PTX ISA version that multiplies int8 by uint8
# fp8 MMAs accumulate with fewer bits than f32: each iteration's sums are promoted to f32 registers (CUTLASS).
PROMOTED_TYPES = (fp8_e4m3, fp8_e5m2)
PROMOTION_COLUMNS = 128  # columns that are promoted together
ZERO_LITERAL = "0f00000000"


def make_descriptor(text: PtxBuilder, buffer: str, offset: str, form: int) -> str:
    """The matrix descriptor of an operand at `buffer + offset`."""
    address = text.let("add.u32", "b32", buffer, offset) if offset != "0" else buffer
    field = text.let("bfe.u32", "b32", address, 4, 14)
    return text.let("or.b64", "b64", text.let("cvt.u64.u32", "b64", field), form)


def advance_descriptor(text: PtxBuilder, descriptor: str, count: int) -> str:
    """The descriptor `count` bytes further on."""
    return text.let("add.s64", "b64", descriptor, count >> 4) if count else descriptor


def warpgroup_row_offset(team: ThreadTeam) -> str:
    """The byte offset of a warp group's rows in the left operand, uniform over the group."""
    if team.threads == WARPGROUP_THREADS:
        return "0"
    group = team.hoist(("group",), "shr.u32", "b32", team.thread, 7)
    uniform = team.hoist(("uniform group",), "shfl.sync.idx.b32", "b32", group, 0, 31, -1)
    return team.hoist(("group row offset",), "mul.lo.u32", "b32", uniform, WGMMA_ROWS * SWIZZLE_ROW_BYTES)


@emission_rule(gemm_mainloop)
def _(ctx: EmissionContext, node: Node) -> None:
    MainloopConsumer(ctx, node).emit()


class MainloopConsumer:
    """The consumers' loop of one `gemm_mainloop`."""

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        assert ctx.pipeline.ring is not None and ctx.pipeline.state is not None
        self.ctx, self.text, self.node = ctx, ctx.text, node
        self.ring: StageRingBuffer = ctx.pipeline.ring
        self.state: PipelineState = ctx.pipeline.state
        self.rows, self.columns, _ = node.attrs["block"]
        self.flipped, self.turned = node.attrs["flipped"], node.attrs["turned"]
        self.groups = ctx.team.threads // WARPGROUP_THREADS
        self.left_type, self.right_type = (v.type.dtype for v in node.args[1:3])
        if not self.left_type.is_float and self.left_type != self.right_type:
            ctx.entry.isa_version = MIXED_INT8_ISA
        kind = register_class(node.out.type.dtype)
        self.sums = [self.text.let(f"mov.{kind}", kind, x) for x in ctx.values[node.args[0]]]
        promoted = min(self.columns, PROMOTION_COLUMNS) // 2 if self.left_type in PROMOTED_TYPES else 0
        self.partial_sums = [self.text.let("mov.f32", "f32", literal("f32", 0.0)) for _ in range(promoted)]

    def emit(self) -> None:
        """Emit the loop with one wgmma group in flight: a stage is released one iteration after its MMAs."""
        text, node, team = self.text, self.node, self.ctx.team
        lower, upper = (self.ctx.scalar_operand(v) for v in node.args[3:5])
        wait_mma_order(team)
        index, previous = text.let("mov.b64", "b64", lower), text.let("mov.u32", "b32", NO_STAGE)
        head, done = text.new_label("round"), text.new_label("summed")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
        self.ctx.pipeline.wait_for_stage(0 if self.partial_sums else 1)  # the previous one
        if self.partial_sums:
            self._emit_promoted_iteration(previous)
        else:
            self._emit_overlapped_iteration(previous)
        self.state.advance()
        text.do("add.s64", index, index, node.attrs["step"])
        text.do(f"bra {head}")
        text.label(done)
        yield_mma_order(team)
        text.do("wgmma.wait_group.sync.aligned", 0)
        self._release_last(previous)
        self.ctx.values[node.out] = tuple(self.sums)

    def _release_last(self, stage: str) -> None:
        """Release the last stage, in a loop of one iteration: it keeps ptxas from sinking the release."""
        text, head = self.text, self.text.new_label("given")
        text.label(head)
        self._release(stage)
        text.do(f"bra {head}", guard=text.let("setp.lt.s32", "pred", stage, NO_STAGE))

    def _emit_overlapped_iteration(self, previous: str) -> None:
        """An iteration whose MMAs stay in flight during the next one."""
        text = self.text
        text.do("wgmma.fence.sync.aligned")
        self._emit_mmas(self.state.buffer())
        text.do("wgmma.commit_group.sync.aligned")
        text.do("wgmma.wait_group.sync.aligned", 1)
        self._release(previous)
        text.do("mov.u32", previous, self.state.stage)

    def _emit_promoted_iteration(self, previous: str) -> None:
        """An iteration whose partial sums are added to f32 registers, some columns at a time."""
        text, buffer, size = self.text, self.state.buffer(), len(self.partial_sums)
        left, right = self._make_descriptors(buffer)
        for first in range(0, len(self.sums), size):
            part, columns = divmod(first * 2, self.columns)
            text.do("wgmma.fence.sync.aligned")
            for k in range(0, SWIZZLE_ROW_BYTES, K_STEP_BYTES):
                a = advance_descriptor(self.text, left, k + part * WGMMA_ROWS * self.groups * SWIZZLE_ROW_BYTES)
                b = advance_descriptor(self.text, right, k + columns * SWIZZLE_ROW_BYTES)
                self._emit_mma(self.partial_sums, a, b, accumulate=k > 0)
            text.do("wgmma.commit_group.sync.aligned")
            text.do("wgmma.wait_group.sync.aligned", 0)
            if first + size == len(self.sums):
                text.do("mov.u32", previous, self.state.stage)
                self._release(previous)
                text.do("mov.u32", previous, NO_STAGE)
            for total, partial in zip(self.sums[first : first + size], self.partial_sums, strict=True):
                text.do("add.f32", total, total, partial)

    def _release(self, stage: str) -> None:
        """Release a stage, unless it is NO_STAGE: there is none before the first iteration."""
        release_stage(self.ctx.team, self.ring, stage, self.text.let("setp.ge.s32", "pred", stage, 0))

    def _make_descriptors(self, buffer: str) -> tuple[str, str]:
        """The matrix descriptors of both operands at the start of a stage."""
        form = K_MAJOR_DESCRIPTOR if self.flipped else MN_MAJOR_DESCRIPTOR
        rows = warpgroup_row_offset(self.ctx.team)
        left = make_descriptor(self.text, buffer, rows, MN_MAJOR_DESCRIPTOR if self.turned else K_MAJOR_DESCRIPTOR)
        return left, make_descriptor(self.text, buffer, str(stage_bytes(self.node)[0]), form)

    def _emit_mmas(self, buffer: str) -> None:
        """The instructions of one iteration."""
        left, right = self._make_descriptors(buffer)
        mn_step = K_STEP_BYTES // 2 * SWIZZLE_ROW_BYTES  # the k step of an MN-major operand: 16-bit types only
        left_step, right_step = mn_step if self.turned else K_STEP_BYTES, K_STEP_BYTES if self.flipped else mn_step
        part_bytes = WGMMA_ROWS * self.groups * SWIZZLE_ROW_BYTES
        part_sums = len(self.sums) * WGMMA_ROWS * self.groups // self.rows
        for k in range(SWIZZLE_ROW_BYTES // K_STEP_BYTES):
            b = advance_descriptor(self.text, right, k * right_step)
            for part in range(self.rows // (WGMMA_ROWS * self.groups)):
                a = advance_descriptor(self.text, left, k * left_step + part * part_bytes)
                first = part * part_sums  # registers for a power of two of columns, of which the last may have none
                self._emit_mma(self.sums[first : first + self.columns // 2], a, b)

    def _emit_mma(self, sums: list[str], a: str, b: str, accumulate: bool = True) -> None:
        types = mma_type_suffix(self.left_type, self.right_type)
        form = f"wgmma.mma_async.sync.aligned.m64n{len(sums) * 2}{types}"
        mn_major = (int(self.turned), 0 if self.flipped else 1) if self.left_type in (bf16, f16) else ()
        signs = TRAILING_OPERANDS[self.left_type][:2]
        self.text.do(form, f"{{{', '.join(sums)}}}", a, b, int(accumulate), *signs, *mn_major)


@emission_rule(resident_operand)
def _(ctx: EmissionContext, node: Node) -> None:
    state = ctx.pipeline.resident_states[node]
    state.wait(state.ring.full)
    descriptor = make_descriptor(ctx.text, state.buffer(), warpgroup_row_offset(ctx.team), K_MAJOR_DESCRIPTOR)
    ctx.pipeline.resident_operands[node.out] = (state, descriptor)
    ctx.values[node.out] = ()


@emission_rule(release_operand)
def _(ctx, node):
    wait_for_all(ctx)
    state, _ = ctx.pipeline.resident_operands[node.args[0]]
    release_stage(ctx.team, state.ring, state.stage)
    state.advance()


@emission_rule(wait_copy)
def _(ctx, node):
    # A separate wait loop keeps ptxas from moving the wait for MMAs above the work that overlaps them.
    ctx.pipeline.wait_for_stage()


@emission_rule(wait_mma)
def _(ctx, node):
    wait_for_results(ctx, node.args)


@emission_rule(pack_pairs)
def _(ctx, node):
    (x,) = node.args
    wait_for_register_operands(ctx)  # an MMA in flight may still read the registers
    held, index = ctx.values[x], ctx.layout(x).index
    first_of_pair = ((r, 2 * c) for r, c in ctx.layout(node.out).offsets)
    ctx.values[node.out] = tuple(
        pack_halves(ctx.text, x.type.dtype, held[index[r, c]], held[index[r, c + 1]]) for r, c in first_of_pair
    )


@emission_rule(async_mma)
def _(ctx, node):
    AsyncMmaEmitter(ctx, node).emit()


class AsyncMmaEmitter:
    """One `async_mma` under emission."""

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        assert ctx.pipeline.state is not None
        self.ctx, self.text, self.node = ctx, ctx.text, node
        self.state: PipelineState = ctx.pipeline.state
        self.dtype = node.args[1].type.dtype
        self.depth, self.columns = node.attrs["block"]
        self.groups = ctx.team.threads // WARPGROUP_THREADS
        self.parts = static_shape(node.out)[0] // (WGMMA_ROWS * self.groups)

    def emit(self) -> None:
        """Wait for the stage, issue and commit the instructions, and leave them in flight."""
        text, node = self.text, self.node
        accumulate, sums = self._prepare_accumulator()
        if not node.attrs["shares"]:
            self.ctx.pipeline.wait_for_stage()
        text.do("wgmma.fence.sync.aligned")
        self._emit_mmas(sums, accumulate)
        text.do("wgmma.commit_group.sync.aligned")
        self.ctx.values[node.out] = tuple(sums)
        record_commit(self.ctx, node, self.state.stage)
        if not node.attrs["keeps"]:
            self.state.advance()

    def _prepare_accumulator(self) -> tuple[bool, list[str]]:
        """Whether the MMA adds to previous sums, and the accumulator's registers."""
        text, ctx, summed = self.text, self.ctx, self.node.attrs["summed"]
        held = ctx.values[self.node.args[2]] if summed else ()
        target = ctx.pipeline.carried_targets.get(self.node.out)
        if target is not None:
            wait_for_results(ctx, [target[0]])
            carried = ctx.values[target[0]]
            if held and tuple(held) != tuple(carried):
                wait_for_results(ctx, self.node.args[2:3])
                for d, x in zip(carried, held, strict=True):
                    text.do("mov.f32", d, x)
            return summed, list(carried)
        if summed and can_accumulate_in_place(ctx, self.node.args[2]):
            return True, list(held)
        count = ctx.layout(self.node.out).count
        if set(held) <= {ZERO_LITERAL}:
            return False, [text.new("f32") for _ in range(count)]
        wait_for_results(ctx, self.node.args[2:3])
        return True, [text.let("mov.f32", "f32", x) for x in held]

    def _emit_mmas(self, sums: list[str], accumulate: bool) -> None:
        flipped, part_sums = self.node.attrs["flipped"], len(sums) // self.parts
        rows, _ = block_extent(self.node)
        # The leading dimension of an MN-major operand is one whole box: 64 columns.
        mn_major = SWIZZLE_128B | ATOM_STRIDE | (rows * SWIZZLE_ROW_BYTES >> 4) << 16
        right = make_descriptor(self.text, self.state.buffer(), "0", K_MAJOR_DESCRIPTOR if flipped else mn_major)
        step = K_STEP_BYTES // element_bytes(self.dtype)
        for k in range(0, self.depth, step):
            b = advance_descriptor(self.text, right, self._box_offset(k, rows) if flipped else k * SWIZZLE_ROW_BYTES)
            for part in range(self.parts):
                own = sums[part * part_sums : (part + 1) * part_sums]
                self._emit_mma(own, self._left_operand(k, part), b, accumulate or k > 0, flipped)

    def _box_offset(self, k: int, rows: int) -> int:
        """The byte offset of column `k` of a K-major operand, which is split into boxes."""
        box, inside = divmod(k, BOX_COLUMNS)
        return box * rows * SWIZZLE_ROW_BYTES + inside * element_bytes(self.dtype)

    def _left_operand(self, k: int, part: int) -> str:
        """The left operand of one instruction: a descriptor, or four registers."""
        side = self.node.args[0]
        resident = self.ctx.pipeline.resident_operands.get(side)
        row = WGMMA_ROWS * self.groups * part
        if resident is not None:
            offset = self._box_offset(k, static_shape(side)[0]) + row * SWIZZLE_ROW_BYTES
            return advance_descriptor(self.text, resident[1], offset)
        held, index = self.ctx.values[side], self.ctx.layout(side).index
        words = [held[index[row + down, k // 2 + across]] for across in (0, 4) for down in (0, 8)]
        return f"{{{', '.join(words)}}}"

    def _emit_mma(self, sums: list[str], a: str, b: str, accumulate: bool, flipped: bool) -> None:
        form = f"wgmma.mma_async.sync.aligned.m64n{len(sums) * 2}{mma_type_suffix(self.dtype, self.dtype)}"
        trailing = TRAILING_OPERANDS[self.dtype] if not a.startswith("{") else TRAILING_OPERANDS[self.dtype][:2]
        self.text.do(form, f"{{{', '.join(sums)}}}", a, b, int(accumulate), *trailing, 0 if flipped else 1)
