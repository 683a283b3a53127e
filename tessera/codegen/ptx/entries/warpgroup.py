"""Products by warp groups (wgmma): both sides read from the stages of a ring, the sums in registers.

Blocks lie in shared memory as tensor-map copies with the 128-byte swizzle leave them; descriptors tell the
instruction so (PTX ISA, "Matrix descriptor").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.entries.abreast import give_turn, take_turn
from tessera.codegen.ptx.entries.fetch import INNER, stage_bytes
from tessera.codegen.ptx.entries.ring import Ring, Walker
from tessera.codegen.ptx.ops import product_loop
from tessera.codegen.ptx.passes.products import named
from tessera.codegen.ptx.team import Team
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import literal, register_class
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node
from tessera.types import bf16, f16, fp8_e4m3, fp8_e5m2, int8, uint8

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

STEP = 32  # bytes of the shared axis, in one instruction
GROUP = 128  # threads, and
ROW = 128  # bytes of a row of the swizzle
HEIGHT = 64  # rows of the sums of one instruction
EIGHT_ROWS = 1024  # bytes of eight rows of the swizzle
SWIZZLE = 1 << 62  # the 128-byte one
# Fields of a descriptor count 16 bytes: from one group of eight rows to the next, and between columns 64 apart.
ROWS_FIRST = SWIZZLE | (EIGHT_ROWS >> 4) << 32 | 1 << 16
COLUMNS_FIRST = SWIZZLE | (EIGHT_ROWS >> 4) << 32 | (INNER * 128 >> 4) << 16
# What follows the descriptors and whether to add: the signs, and whether either side lies by columns.
LAST = {bf16: (1, 1, 0), f16: (1, 1, 0), fp8_e4m3: (1, 1), fp8_e5m2: (1, 1), int8: (), uint8: ()}
MIXED_INTEGERS = (8, 4)  # the version whose instructions multiply int8 by uint8
# Sums of fp8 products keep fewer bits in the tensor cores than f32 has, so each round's are added up outside.
SHORT = (fp8_e4m3, fp8_e5m2)
PART = 128  # columns of a round whose sums are apart at one time


@visit(product_loop)
def _(kernel: Kernel, node: Node) -> None:
    Consumer(kernel, node).run()


class Consumer:
    """What the warp groups do for one `product_loop`."""

    def __init__(self, kernel: Kernel, node: Node) -> None:
        assert kernel.ring is not None and kernel.walker is not None
        self.kernel, self.text, self.node, self.ring = kernel, kernel.text, node, kernel.ring
        self.walker: Walker = kernel.walker
        self.rows, self.columns, _ = node.attrs["block"]
        self.flipped, self.turned = node.attrs["flipped"], node.attrs["turned"]
        self.groups = kernel.team.threads // GROUP
        self.dtype, self.other = (v.type.dtype for v in node.args[1:3])
        if not self.dtype.is_float and self.dtype != self.other:
            kernel.isa = MIXED_INTEGERS
        kind = register_class(node.out.type.dtype)
        self.sums = [self.text.let(f"mov.{kind}", kind, x) for x in kernel.values[node.args[0]]]
        apart = min(self.columns, PART) // 2 if self.dtype in SHORT else 0
        self.apart = [self.text.let("mov.f32", "f32", literal("f32", 0.0)) for _ in range(apart)]

    def run(self) -> None:
        """A loop of rounds with one group of instructions under way: the stage before is given back a round later."""
        text, node, team = self.text, self.node, self.kernel.team
        lower, upper = (self.kernel.one(v) for v in node.args[3:5])
        take_turn(team)
        index, before = text.let("mov.b64", "b64", lower), text.let("mov.u32", "b32", -1)
        head, done = text.new_label("round"), text.new_label("summed")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
        self.walker.wait(self.ring.full)
        (self._apart if self.apart else self._under_way)(before)
        self.walker.advance()
        text.do("add.s64", index, index, node.attrs["step"])
        text.do(f"bra {head}")
        text.label(done)
        give_turn(team)
        text.do("wgmma.wait_group.sync.aligned", 0)
        self._release_last(before)
        self.kernel.values[node.out] = tuple(self.sums)

    def _release_last(self, stage: str) -> None:
        """Give the last stage back. A loop of one round keeps an assembler from doing so after all that follows."""
        text, again = self.text, self.text.new_label("given")
        text.label(again)
        self._release(stage)
        text.do(f"bra {again}", guard=text.let("setp.lt.s32", "pred", stage, -1))

    def _under_way(self, before: str) -> None:
        """A round whose instructions go on into the next one."""
        text = self.text
        text.do("wgmma.fence.sync.aligned")
        self._multiply(self.walker.buffer())
        text.do("wgmma.commit_group.sync.aligned")
        text.do("wgmma.wait_group.sync.aligned", 1)
        self._release(before)
        text.do("mov.u32", before, self.walker.stage)

    def _apart(self, before: str) -> None:
        """A round whose sums are made apart, some columns at a time, and then added in f32."""
        text, buffer, size = self.text, self.walker.buffer(), len(self.apart)
        left, right = self._sides(buffer)
        for first in range(0, len(self.sums), size):
            part, columns = divmod(first * 2, self.columns)
            text.do("wgmma.fence.sync.aligned")
            for k in range(0, ROW, STEP):
                a = moved(self.text, left, k + part * HEIGHT * self.groups * ROW)
                b = moved(self.text, right, k + columns * ROW)
                self._instruction(self.apart, a, b, add=k > 0)
            text.do("wgmma.commit_group.sync.aligned")
            text.do("wgmma.wait_group.sync.aligned", 0)
            if first + size == len(self.sums):
                text.do("mov.u32", before, self.walker.stage)
                self._release(before)
                text.do("mov.u32", before, -1)
            for total, each in zip(self.sums[first : first + size], self.apart, strict=True):
                text.do("add.f32", total, total, each)

    def _release(self, stage: str) -> None:
        """Give a stage back; there is none before the first (-1)."""
        release(self.kernel, self.ring, stage, self.text.let("setp.ge.s32", "pred", stage, 0))

    def _sides(self, buffer: str) -> tuple[str, str]:
        """The descriptors of where both sides of a stage begin."""
        form = ROWS_FIRST if self.flipped else COLUMNS_FIRST
        own = own_rows(self.kernel.team)
        left = descriptor(self.text, buffer, own, COLUMNS_FIRST if self.turned else ROWS_FIRST)
        return left, descriptor(self.text, buffer, str(stage_bytes(self.node)[0]), form)

    def _multiply(self, buffer: str) -> None:
        """The instructions of one round."""
        left, right = self._sides(buffer)
        apart = STEP // 2 * ROW  # from step to step where rows are of the shared axis: of 16-bit types alone
        further, along = apart if self.turned else STEP, STEP if self.flipped else apart
        high = HEIGHT * self.groups * ROW
        each = len(self.sums) * HEIGHT * self.groups // self.rows
        for k in range(ROW // STEP):
            b = moved(self.text, right, k * along)
            for part in range(self.rows // (HEIGHT * self.groups)):
                a = moved(self.text, left, k * further + part * high)
                self._instruction(self.sums[part * each : (part + 1) * each], a, b)

    def _instruction(self, sums: list[str], a: str, b: str, add: bool = True) -> None:
        form = f"wgmma.mma_async.sync.aligned.m64n{len(sums) * 2}{named(self.dtype, self.other)}"
        turned = (int(self.turned), 0 if self.flipped else 1) if self.dtype in (bf16, f16) else ()
        last = LAST[self.dtype][:2]
        self.text.do(form, f"{{{', '.join(sums)}}}", a, b, int(add), *last, *turned)


def release(kernel: Kernel, ring: Ring, stage: str, some: str = "") -> None:
    """One thread of each group says that a stage has been read, if `some` holds."""
    text, team = kernel.text, kernel.team
    rest = team.once(("in group",), "and.b32", "b32", team.thread, GROUP - 1)
    leader = team.once(("leader",), "setp.eq.u32", "pred", rest, 0)
    if ring.blocks > 1:
        _release_all(kernel, ring, stage, some)
        return
    one = text.let("and.pred", "pred", some, leader) if some else leader
    place = text.let("mad.lo.u32", "b32", stage, 8, ring.empty)
    text.do("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{place}]", guard=one)


def _release_all(kernel: Kernel, ring: Ring, stage: str, some: str) -> None:
    """The same in each block of the cluster: as many threads of the group arrive at one block's barrier each."""
    text, team = kernel.text, kernel.team
    rest = team.once(("in group",), "and.b32", "b32", team.thread, GROUP - 1)
    few = team.once(("first of group", ring.blocks), "setp.lt.u32", "pred", rest, ring.blocks)
    rank = team.once(("block", ring.blocks), "and.b32", "b32", team.thread, ring.blocks - 1)
    there = team.once(("there", ring.empty), "mapa.shared::cluster.u32", "b32", ring.empty, rank)
    one = text.let("and.pred", "pred", some, few) if some else few
    place = text.let("mad.lo.u32", "b32", stage, 8, there)
    # Without a scope: one of the cluster's costs a fence of all memory.
    text.do("mbarrier.arrive.shared::cluster.b64", "_", f"[{place}]", guard=one)


def own_rows(team: Team) -> str:
    """Where a group's rows begin in the left side: the same number in all its threads."""
    if team.threads == GROUP:
        return "0"
    group = team.once(("group",), "shr.u32", "b32", team.thread, 7)
    even = team.once(("even group",), "shfl.sync.idx.b32", "b32", group, 0, 31, -1)
    return team.once(("own rows",), "mul.lo.u32", "b32", even, HEIGHT * ROW)


def descriptor(text: Text, buffer: str, offset: str, form: int) -> str:
    """What the instructions take for a side in shared memory."""
    place = text.let("add.u32", "b32", buffer, offset) if offset != "0" else buffer
    field = text.let("bfe.u32", "b32", place, 4, 14)
    return text.let("or.b64", "b64", text.let("cvt.u64.u32", "b64", field), form)


def moved(text: Text, start: str, count: int) -> str:
    """A descriptor so many bytes further on."""
    return text.let("add.s64", "b64", start, count >> 4) if count else start
