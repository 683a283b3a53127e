"""Warp-group products (wgmma): consumer loops, asynchronous products, and the queue of those in flight.

Operands lie in shared memory as TMA copies with the 128-byte swizzle leave them, told by matrix descriptors (PTX ISA,
"Matrix descriptor"); accumulators are registers. Products are committed in program order and waited for where their
accumulators are first used; then the ring stage that they read is released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tessera.codegen.ptx.layout import mma_type_suffix
from tessera.codegen.ptx.ops import (
    async_mma,
    gemm_mainloop,
    pack_pairs,
    release_operand,
    resident_operand,
    wait_copy,
    wait_mma,
)
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.table import emit_node
from tessera.codegen.ptx.table.scalars.packing import pack_halves
from tessera.codegen.ptx.table.warpgroup.pingpong import pass_turn, wait_turn
from tessera.codegen.ptx.table.warpgroup.producer import BOX_COLUMNS, block_extent, stage_bytes
from tessera.codegen.ptx.table.warpgroup.ring_buffer import PipelineState, RingBuffer
from tessera.codegen.ptx.text.builder import PtxBuilder
from tessera.codegen.ptx.text.register_types import element_bytes, is_immediate, literal, register_class
from tessera.codegen.ptx.text.thread_team import ThreadTeam
from tessera.core.types import bf16, f16, fp8_e4m3, fp8_e5m2, int8, uint8
from tessera.ir.core import Block, Node, Value
from tessera.ops.tensor import elementwise

if TYPE_CHECKING:
    from tessera.codegen.ptx.emitter import PtxEmitter


# Products by warp groups (wgmma): both sides read from the stages of a ring, the sums in registers.
#
# Blocks lie in shared memory as tensor-map copies with the 128-byte swizzle leave them; descriptors tell the
# instruction so (PTX ISA, "Matrix descriptor").


K_STEP_BYTES = 32  # bytes of the shared axis, in one instruction
WARPGROUP_THREADS = 128  # threads, and
SWIZZLE_ROW_BYTES = 128  # bytes of a row of the swizzle
WGMMA_ROWS = 64  # rows of the sums of one instruction
SWIZZLE_ATOM_BYTES = 1024  # bytes of eight rows of the swizzle
SWIZZLE_128B = 1 << 62  # the 128-byte one
# Fields of a descriptor count 16 bytes: from one group of eight rows to the next, and between columns 64 apart.
K_MAJOR_DESCRIPTOR = SWIZZLE_128B | (SWIZZLE_ATOM_BYTES >> 4) << 32 | 1 << 16
MN_MAJOR_DESCRIPTOR = SWIZZLE_128B | (SWIZZLE_ATOM_BYTES >> 4) << 32 | (BOX_COLUMNS * 128 >> 4) << 16
# What follows the descriptors and whether to add: the signs, and whether either side lies by columns.
TRAILING_OPERANDS = {bf16: (1, 1, 0), f16: (1, 1, 0), fp8_e4m3: (1, 1), fp8_e5m2: (1, 1), int8: (), uint8: ()}
MIXED_INT8_ISA = (8, 4)  # the version whose instructions multiply int8 by uint8
# Sums of fp8 products keep fewer bits in the tensor cores than f32 has, so each round's are added up outside.
LOW_PRECISION_SUMS = (fp8_e4m3, fp8_e5m2)
PROMOTION_COLUMNS = 128  # columns of a round whose sums are apart at one time


@emit_node(gemm_mainloop)
def _(kernel: PtxEmitter, node: Node) -> None:
    MainloopConsumer(kernel, node).run()


class MainloopConsumer:
    """What the warp groups do for one `product_loop`."""

    def __init__(self, kernel: PtxEmitter, node: Node) -> None:
        assert kernel.ring is not None and kernel.pipeline_state is not None
        self.kernel, self.text, self.node, self.ring = kernel, kernel.text, node, kernel.ring
        self.pipeline_state: PipelineState = kernel.pipeline_state
        self.rows, self.columns, _ = node.attrs["block"]
        self.flipped, self.turned = node.attrs["flipped"], node.attrs["turned"]
        self.groups = kernel.team.threads // WARPGROUP_THREADS
        self.dtype, self.other = (v.type.dtype for v in node.args[1:3])
        if not self.dtype.is_float and self.dtype != self.other:
            kernel.isa = MIXED_INT8_ISA
        kind = register_class(node.out.type.dtype)
        self.sums = [self.text.let(f"mov.{kind}", kind, x) for x in kernel.values[node.args[0]]]
        apart = min(self.columns, PROMOTION_COLUMNS) // 2 if self.dtype in LOW_PRECISION_SUMS else 0
        self.apart = [self.text.let("mov.f32", "f32", literal("f32", 0.0)) for _ in range(apart)]

    def run(self) -> None:
        """A loop of rounds with one group of instructions under way: the stage before is given back a round later."""
        text, node, team = self.text, self.node, self.kernel.team
        lower, upper = (self.kernel.scalar_operand(v) for v in node.args[3:5])
        wait_turn(team)
        index, before = text.let("mov.b64", "b64", lower), text.let("mov.u32", "b32", -1)
        head, done = text.new_label("round"), text.new_label("summed")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
        self.pipeline_state.wait(self.ring.full)
        (self._promoted_round if self.apart else self._overlapped_round)(before)
        self.pipeline_state.advance()
        text.do("add.s64", index, index, node.attrs["step"])
        text.do(f"bra {head}")
        text.label(done)
        pass_turn(team)
        text.do("wgmma.wait_group.sync.aligned", 0)
        self._release_last(before)
        self.kernel.values[node.out] = tuple(self.sums)

    def _release_last(self, stage: str) -> None:
        """Give the last stage back. A loop of one round keeps an assembler from doing so after all that follows."""
        text, again = self.text, self.text.new_label("given")
        text.label(again)
        self._release(stage)
        text.do(f"bra {again}", guard=text.let("setp.lt.s32", "pred", stage, -1))

    def _overlapped_round(self, before: str) -> None:
        """A round whose instructions go on into the next one."""
        text = self.text
        text.do("wgmma.fence.sync.aligned")
        self._multiply(self.pipeline_state.buffer())
        text.do("wgmma.commit_group.sync.aligned")
        text.do("wgmma.wait_group.sync.aligned", 1)
        self._release(before)
        text.do("mov.u32", before, self.pipeline_state.stage)

    def _promoted_round(self, before: str) -> None:
        """A round whose sums are made apart, some columns at a time, and then added in f32."""
        text, buffer, size = self.text, self.pipeline_state.buffer(), len(self.apart)
        left, right = self._sides(buffer)
        for first in range(0, len(self.sums), size):
            part, columns = divmod(first * 2, self.columns)
            text.do("wgmma.fence.sync.aligned")
            for k in range(0, SWIZZLE_ROW_BYTES, K_STEP_BYTES):
                a = advance_descriptor(self.text, left, k + part * WGMMA_ROWS * self.groups * SWIZZLE_ROW_BYTES)
                b = advance_descriptor(self.text, right, k + columns * SWIZZLE_ROW_BYTES)
                self._instruction(self.apart, a, b, add=k > 0)
            text.do("wgmma.commit_group.sync.aligned")
            text.do("wgmma.wait_group.sync.aligned", 0)
            if first + size == len(self.sums):
                text.do("mov.u32", before, self.pipeline_state.stage)
                self._release(before)
                text.do("mov.u32", before, -1)
            for total, each in zip(self.sums[first : first + size], self.apart, strict=True):
                text.do("add.f32", total, total, each)

    def _release(self, stage: str) -> None:
        """Give a stage back; there is none before the first (-1)."""
        release_stage(self.kernel, self.ring, stage, self.text.let("setp.ge.s32", "pred", stage, 0))

    def _sides(self, buffer: str) -> tuple[str, str]:
        """The descriptors of where both sides of a stage begin."""
        form = K_MAJOR_DESCRIPTOR if self.flipped else MN_MAJOR_DESCRIPTOR
        own = warpgroup_row_offset(self.kernel.team)
        left = make_descriptor(self.text, buffer, own, MN_MAJOR_DESCRIPTOR if self.turned else K_MAJOR_DESCRIPTOR)
        return left, make_descriptor(self.text, buffer, str(stage_bytes(self.node)[0]), form)

    def _multiply(self, buffer: str) -> None:
        """The instructions of one round."""
        left, right = self._sides(buffer)
        apart = (
            K_STEP_BYTES // 2 * SWIZZLE_ROW_BYTES
        )  # from step to step where rows are of the shared axis: of 16-bit types alone
        further, along = apart if self.turned else K_STEP_BYTES, K_STEP_BYTES if self.flipped else apart
        high = WGMMA_ROWS * self.groups * SWIZZLE_ROW_BYTES
        each = len(self.sums) * WGMMA_ROWS * self.groups // self.rows
        for k in range(SWIZZLE_ROW_BYTES // K_STEP_BYTES):
            b = advance_descriptor(self.text, right, k * along)
            for part in range(self.rows // (WGMMA_ROWS * self.groups)):
                a = advance_descriptor(self.text, left, k * further + part * high)
                self._instruction(self.sums[part * each : (part + 1) * each], a, b)

    def _instruction(self, sums: list[str], a: str, b: str, add: bool = True) -> None:
        form = f"wgmma.mma_async.sync.aligned.m64n{len(sums) * 2}{mma_type_suffix(self.dtype, self.other)}"
        turned = (int(self.turned), 0 if self.flipped else 1) if self.dtype in (bf16, f16) else ()
        last = TRAILING_OPERANDS[self.dtype][:2]
        self.text.do(form, f"{{{', '.join(sums)}}}", a, b, int(add), *last, *turned)


def release_stage(kernel: PtxEmitter, ring: RingBuffer, stage: str, some: str = "") -> None:
    """One thread of each group says that a stage has been read, if `some` holds."""
    text, team = kernel.text, kernel.team
    rest = team.once(("in group",), "and.b32", "b32", team.thread, WARPGROUP_THREADS - 1)
    leader = team.once(("leader",), "setp.eq.u32", "pred", rest, 0)
    if ring.blocks > 1:
        _release_cluster_stage(kernel, ring, stage, some)
        return
    one = text.let("and.pred", "pred", some, leader) if some else leader
    place = text.let("mad.lo.u32", "b32", stage, 8, ring.empty)
    text.do("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{place}]", guard=one)


def _release_cluster_stage(kernel: PtxEmitter, ring: RingBuffer, stage: str, some: str) -> None:
    """The same in each block of the cluster: as many threads of the group arrive at one block's barrier each."""
    text, team = kernel.text, kernel.team
    rest = team.once(("in group",), "and.b32", "b32", team.thread, WARPGROUP_THREADS - 1)
    few = team.once(("first of group", ring.blocks), "setp.lt.u32", "pred", rest, ring.blocks)
    rank = team.once(("block", ring.blocks), "and.b32", "b32", team.thread, ring.blocks - 1)
    there = team.once(("there", ring.empty), "mapa.shared::cluster.u32", "b32", ring.empty, rank)
    one = text.let("and.pred", "pred", some, few) if some else few
    place = text.let("mad.lo.u32", "b32", stage, 8, there)
    # Without a scope: one of the cluster's costs a fence of all memory.
    text.do("mbarrier.arrive.shared::cluster.b64", "_", f"[{place}]", guard=one)


def warpgroup_row_offset(team: ThreadTeam) -> str:
    """Where a group's rows begin in the left side: the same number in all its threads."""
    if team.threads == WARPGROUP_THREADS:
        return "0"
    group = team.once(("group",), "shr.u32", "b32", team.thread, 7)
    even = team.once(("even group",), "shfl.sync.idx.b32", "b32", group, 0, 31, -1)
    return team.once(("own rows",), "mul.lo.u32", "b32", even, WGMMA_ROWS * SWIZZLE_ROW_BYTES)


def make_descriptor(text: PtxBuilder, buffer: str, offset: str, form: int) -> str:
    """What the instructions take for a side in shared memory."""
    place = text.let("add.u32", "b32", buffer, offset) if offset != "0" else buffer
    field = text.let("bfe.u32", "b32", place, 4, 14)
    return text.let("or.b64", "b64", text.let("cvt.u64.u32", "b64", field), form)


def advance_descriptor(text: PtxBuilder, start: str, count: int) -> str:
    """A descriptor so many bytes further on."""
    return text.let("add.s64", "b64", start, count >> 4) if count else start


# The warp groups' part of `streamed` products: instructions that go on while other work is done.
#
# The left side is a block in shared memory, or words in registers that nobody writes meanwhile.


ZERO_LITERALS = ("0f00000000",)


@emit_node(resident_operand)
def _(kernel: PtxEmitter, node: Node) -> None:
    walker = kernel.kept[node]
    walker.wait(walker.ring.full)
    begin = make_descriptor(kernel.text, walker.buffer(), warpgroup_row_offset(kernel.team), K_MAJOR_DESCRIPTOR)
    kernel.resident_operands[node.out] = (walker, begin)
    kernel.values[node.out] = ()


@emit_node(release_operand)
def _(kernel, node):
    kernel.mma_queue.wait_for_all()
    walker, _ = kernel.resident_operands[node.args[0]]
    release_stage(kernel, walker.ring, walker.stage)
    walker.advance()


@emit_node(wait_copy)
def _(kernel, node):
    # Waiting in a loop of its own keeps an assembler from waiting for products before the work beside them.
    kernel.pipeline_state.wait(kernel.pipeline_state.ring.full)


@emit_node(wait_mma)
def _(kernel, node):
    kernel.mma_queue.wait_for(node.args)


@emit_node(pack_pairs)
def _(kernel, node):
    (x,) = node.args
    kernel.mma_queue.wait_for_register_operands()  # what instructions under way read is not to be written
    held, index = kernel.values[x], kernel.layout(x).index
    places = ((r, 2 * c) for r, c in kernel.layout(node.out).offsets)
    kernel.values[node.out] = tuple(
        pack_halves(kernel.text, x.type.dtype, held[index[r, c]], held[index[r, c + 1]]) for r, c in places
    )


@emit_node(async_mma)
def _(kernel, node):
    AsyncMmaEmitter(kernel, node).run()


class AsyncMmaEmitter:
    """One such product under emission."""

    def __init__(self, kernel: PtxEmitter, node: Node) -> None:
        assert kernel.pipeline_state is not None
        self.kernel, self.text, self.node = kernel, kernel.text, node
        self.pipeline_state: PipelineState = kernel.pipeline_state
        self.mma_queue = kernel.mma_queue
        self.dtype = node.args[1].type.dtype
        self.depth, self.columns = node.attrs["block"]
        self.groups = kernel.team.threads // WARPGROUP_THREADS
        self.parts = static_shape(node.out)[0] // (WGMMA_ROWS * self.groups)

    def run(self) -> None:
        """Wait for the stage, commit the instructions, and go on."""
        text, node = self.text, self.node
        adds, sums = self._sums()
        self.pipeline_state.wait(self.pipeline_state.ring.full)
        text.do("wgmma.fence.sync.aligned")
        self._multiply(sums, adds)
        text.do("wgmma.commit_group.sync.aligned")
        self.kernel.values[node.out] = tuple(sums)
        self.mma_queue.begun(node, self.pipeline_state.stage)
        self.pipeline_state.advance()

    def _sums(self) -> tuple[bool, list[str]]:
        """Whether there is something to add to, and the registers of the sums."""
        text, summed = self.text, self.node.attrs["summed"]
        held = self.kernel.values[self.node.args[2]] if summed else ()
        kept = self.mma_queue.targets.get(self.node.out)
        if kept is not None:
            self.mma_queue.wait_for([kept[0]])
            own = self.kernel.values[kept[0]]
            for d, x in zip(own, held, strict=False):
                if d != x:
                    text.do("mov.f32", d, x)
            return summed, list(own)
        if summed and self.mma_queue.in_place(self.node.args[2]):
            return True, list(held)
        count = self.kernel.layout(self.node.out).count
        if set(held) <= set(ZERO_LITERALS):
            return False, [text.new("f32") for _ in range(count)]
        return True, [text.let("mov.f32", "f32", x) for x in held]

    def _multiply(self, sums: list[str], adds: bool) -> None:
        flipped, each = self.node.attrs["flipped"], len(sums) // self.parts
        rows, _ = block_extent(self.node)
        buffer = self.pipeline_state.buffer()
        # From 64 columns to the next there is a whole box where the sides' columns lie side by side.
        apart = (
            K_MAJOR_DESCRIPTOR
            if flipped
            else SWIZZLE_128B | (SWIZZLE_ATOM_BYTES >> 4) << 32 | (rows * SWIZZLE_ROW_BYTES >> 4) << 16
        )
        right = make_descriptor(self.text, buffer, "0", apart)
        step = K_STEP_BYTES // element_bytes(self.dtype)
        for k in range(0, self.depth, step):
            b = advance_descriptor(self.text, right, self._along(k, rows) if flipped else k * SWIZZLE_ROW_BYTES)
            for part in range(self.parts):
                own = sums[part * each : (part + 1) * each]
                self._instruction(own, self._left(k, part), b, adds or k > 0, flipped)

    def _along(self, k: int, rows: int) -> int:
        """The bytes to a place along the rows of boxes."""
        box, inside = divmod(k, BOX_COLUMNS)
        return box * rows * SWIZZLE_ROW_BYTES + inside * element_bytes(self.dtype)

    def _left(self, k: int, part: int) -> str:
        """The left side's part for some rows: a descriptor, or four words."""
        side = self.node.args[0]
        stays = self.kernel.resident_operands.get(side)
        high = WGMMA_ROWS * self.groups * part
        if stays is not None:
            return advance_descriptor(
                self.text, stays[1], self._along(k, static_shape(side)[0]) + high * SWIZZLE_ROW_BYTES
            )
        held, index = self.kernel.values[side], self.kernel.layout(side).index
        words = [held[index[high + down, k // 2 + across]] for across in (0, 4) for down in (0, 8)]
        return f"{{{', '.join(words)}}}"

    def _instruction(self, sums: list[str], a: str, b: str, add: bool, flipped: bool) -> None:
        form = f"wgmma.mma_async.sync.aligned.m64n{len(sums) * 2}{mma_type_suffix(self.dtype, self.dtype)}"
        last = TRAILING_OPERANDS[self.dtype] if not a.startswith("{") else TRAILING_OPERANDS[self.dtype][:2]
        self.text.do(form, f"{{{', '.join(sums)}}}", a, b, int(add), *last, 0 if flipped else 1)


# Products under way: committed in the order of the program, waited for where their sums are first used.
#
# A stage of the ring is given back when the product that reads it is done. A loop may end with products under way:
# their
# sums have registers that the loop carries. It then begins with them, or with none: to wait until no more than so many
# are under way, which is all that is asked for, is right for both.


NO_STAGE = -1  # the stage of what is not under way
FRESH_RESULT_OPS = (
    elementwise.mul,
    elementwise.add,
    elementwise.sub,
    async_mma,
)  # whose results have registers of their own


@dataclass(frozen=True)
class InFlightMma:
    """A product under way: its sums, the register with its stage, whether that may be none, and where its left side
    lies: in words of registers, or in memory."""

    sums: Value
    stage: str
    maybe: bool = False
    words: bool = False


class AsyncMmaQueue:
    """The products under way of one kernel, in the order of their commitment."""

    def __init__(self, kernel: PtxEmitter) -> None:
        self.kernel = kernel
        self.in_flight: list[InFlightMma] = []
        self.targets: dict[Value, tuple[Value, str]] = {}  # sums that a loop carries: its parameter, and a stage
        nodes = list(kernel.function.body.walk())
        self.uses = Counter(v for n in nodes for v in (*n.args, *(v for r in n.regions for v in r.results)))
        params = {p for n in nodes for r in n.regions for p in r.params}
        self._replay_round = params | {v for n in nodes if n.op in FRESH_RESULT_OPS for v in n.results}

    def wait_for(self, values: Iterable[Value]) -> None:
        """Wait for the products that give some of these values, and so for all before them."""
        wanted = set(values)
        places = [i for i, e in enumerate(self.in_flight) if e.sums in wanted]
        if places:
            self._wait(places[-1] + 1)

    def wait_for_register_operands(self) -> None:
        """Wait for the products that read words of registers."""
        self.wait_for(e.sums for e in self.in_flight if e.words)

    def wait_for_all(self) -> None:
        """Wait for every product."""
        if self.in_flight:
            self._wait(len(self.in_flight))

    def _wait(self, count: int) -> None:
        text, ring = self.kernel.text, self.kernel.ring
        assert ring is not None
        text.do("wgmma.wait_group.sync.aligned", len(self.in_flight) - count)
        for e in self.in_flight[:count]:
            some = text.let("setp.ge.s32", "pred", e.stage, 0) if e.maybe else ""
            release_stage(self.kernel, ring, e.stage, some)
        del self.in_flight[:count]

    def begun(self, node: Node, stage: str) -> None:
        """A product has been committed."""
        kept = self.targets.get(node.out)
        mine = self.kernel.text.let("mov.u32", "b32", stage) if kept is None else kept[1]
        if kept is not None:
            self.kernel.text.do("mov.u32", mine, stage)
        words = node.args[0] not in self.kernel.resident_operands
        self.in_flight.append(InFlightMma(node.out, mine, kept is not None, words))

    def in_place(self, v: Value) -> bool:
        """Whether a block's registers may be written: nobody reads them again, and they are no one else's."""
        held = self.kernel.values[v]
        own = v in self._replay_round and self.uses[v] == 1 and len(set(held)) == len(held)
        return own and not any(is_immediate(x) or x.startswith("0f") for x in held)

    def enter(self, loop: Node) -> Mapping[int, tuple[str, ...]]:
        """A loop begins: the registers of what it carries that stays under way, by place."""
        (body,) = loop.regions
        carried, flying = _carried_sums(body), _carried_in_flight(body)
        inits = [loop.args[3 + i] for i in flying]
        before = [e.sums for e in self.in_flight]
        if before != inits or any(self.uses[v] != 1 for v in before):
            self.wait_for_all()
        stages = {i: e.stage for i, e in zip(flying, self.in_flight, strict=False)}
        kept = {i: self.kernel.values[loop.args[3 + i]] for i in stages}
        words = [n.out for n in body.nodes if n.op is async_mma and n.args[0] not in self.kernel.resident_operands]
        for i in carried:
            stages.setdefault(i, self.kernel.text.let("mov.u32", "b32", NO_STAGE))
            self.targets[body.results[i]] = (body.params[i + 1], stages[i])
        self.in_flight = [InFlightMma(body.params[i + 1], stages[i], True, body.results[i] in words) for i in flying]
        return kept

    def end_round(self, loop: Node) -> None:
        """At a round's end the same is under way as at its begin."""
        (body,) = loop.regions
        sums = [body.results[i] for i in _carried_in_flight(body)]
        if [e.sums for e in self.in_flight] != sums:
            self.wait_for_all()
            for v in sums:
                self.kernel.text.do("mov.u32", self.targets[v][1], NO_STAGE)
            self.in_flight = [InFlightMma(v, self.targets[v][1], True) for v in sums]

    def leave(self, loop: Node) -> None:
        """A loop is over: what is under way are its results."""
        (body,) = loop.regions
        names = {body.results[i]: loop.results[i] for i in _carried_in_flight(body)}
        self.in_flight = [replace(e, sums=names[e.sums]) for e in self.in_flight]


def _carried_sums(body: Block) -> list[int]:
    """The places of a loop's results that are products' sums and whose values before nobody reads after that."""
    found = []
    for place, node in enumerate(body.nodes):
        if node.op is async_mma and list(body.results).count(node.out) == 1:
            i = body.results.index(node.out)
            after = {v for n in body.nodes[place + 1 :] for v in n.args} | set(body.results)
            inner = {v for n in body.nodes[place + 1 :] for r in n.regions for m in r.walk() for v in m.args}
            if body.params[i + 1] not in after | inner:
                found.append(i)
    return found


def _carried_in_flight(body: Block) -> list[int]:
    """Those of these places whose products are not waited for in the round that begins them."""
    done = {n.args[0] for n in body.nodes if n.op is wait_mma}
    return [i for i in _carried_sums(body) if body.results[i] not in done]
