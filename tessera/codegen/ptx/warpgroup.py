"""Products by warp groups (wgmma): both sides read from the stages of a ring, the sums in registers.

Blocks lie in shared memory as tensor-map copies with the 128-byte swizzle leave them; descriptors tell the
instruction so (PTX ISA, "Matrix descriptor").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.fetch import INNER, stage_bytes
from tessera.codegen.ptx.ops import product_loop
from tessera.codegen.ptx.ring import Walker
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

STEP = 16  # of the shared axis, in one instruction
GROUP = 128  # threads, and
HEIGHT = 64  # rows of the sums of one instruction
EIGHT_ROWS = 1024  # bytes of eight rows of the swizzle
SWIZZLE = 1 << 62  # the 128-byte one
# Fields of a descriptor count 16 bytes: from one group of eight rows to the next, and between columns 64 apart.
ROWS_FIRST = SWIZZLE | (EIGHT_ROWS >> 4) << 32 | 1 << 16
COLUMNS_FIRST = SWIZZLE | (EIGHT_ROWS >> 4) << 32 | (INNER * 128 >> 4) << 16


@visit(product_loop)
def _(kernel: Kernel, node: Node) -> None:
    Consumer(kernel, node).run()


class Consumer:
    """What the warp groups do for one `product_loop`."""

    def __init__(self, kernel: Kernel, node: Node) -> None:
        assert kernel.ring is not None and kernel.walker is not None
        self.kernel, self.text, self.node, self.ring = kernel, kernel.text, node, kernel.ring
        self.walker: Walker = kernel.walker
        self.rows, self.columns, self.depth = node.attrs["block"]
        self.groups = kernel.team.threads // GROUP
        first = kernel.values[node.args[0]]
        self.sums = [self.text.let("mov.f32", "f32", x) for x in first]

    def run(self) -> None:
        """A loop of rounds with one group of instructions under way: the stage before is given back a round later."""
        text, node = self.text, self.node
        lower, upper = (self.kernel.one(v) for v in node.args[3:5])
        index, before = text.let("mov.b64", "b64", lower), text.let("mov.u32", "b32", -1)
        head, done = text.new_label("round"), text.new_label("summed")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.s64", "pred", index, upper))
        self.walker.wait(self.ring.full)
        text.do("wgmma.fence.sync.aligned")
        self._multiply(self.walker.buffer())
        text.do("wgmma.commit_group.sync.aligned")
        text.do("wgmma.wait_group.sync.aligned", 1)
        self._release(before)
        text.do("mov.u32", before, self.walker.stage)
        self.walker.advance()
        text.do("add.s64", index, index, node.attrs["step"])
        text.do(f"bra {head}")
        text.label(done)
        text.do("wgmma.wait_group.sync.aligned", 0)
        self._release(before)
        self.kernel.values[node.out] = tuple(self.sums)

    def _release(self, stage: str) -> None:
        """One thread of each group says that a stage has been read; there is none before the first (-1)."""
        text, team = self.text, self.kernel.team
        rest = team.once(("in group",), "and.b32", "b32", team.thread, GROUP - 1)
        some = text.let("setp.ge.s32", "pred", stage, 0)
        one = text.let("and.pred", "pred", some, team.once(("leader",), "setp.eq.u32", "pred", rest, 0))
        place = text.let("mad.lo.u32", "b32", stage, 8, self.ring.empty)
        text.do("mbarrier.arrive.release.cta.shared::cta.b64", "_", f"[{place}]", guard=one)

    def _multiply(self, buffer: str) -> None:
        """The instructions of one round."""
        flipped = self.node.attrs["flipped"]
        left = self._descriptor(buffer, self._own_rows(), ROWS_FIRST)
        right = self._descriptor(buffer, str(stage_bytes(self.node)[0]), ROWS_FIRST if flipped else COLUMNS_FIRST)
        along = STEP * 2 if flipped else STEP * 128
        high = HEIGHT * self.groups * 128
        each = len(self.sums) * HEIGHT * self.groups // self.rows
        for k in range(self.depth // STEP):
            b = self._moved(right, k * along)
            for part in range(self.rows // (HEIGHT * self.groups)):
                a = self._moved(left, k * STEP * 2 + part * high)
                self._instruction(self.sums[part * each : (part + 1) * each], a, b, 0 if flipped else 1)

    def _instruction(self, sums: list[str], a: str, b: str, turned: int) -> None:
        name = self.node.args[1].type.dtype.name
        form = f"wgmma.mma_async.sync.aligned.m64n{self.columns}k16.f32.{name}.{name}"
        self.text.do(form, f"{{{', '.join(sums)}}}", a, b, 1, 1, 1, 0, turned)

    def _own_rows(self) -> str:
        """Where a group's rows begin in the left side: the same number in all its threads."""
        team = self.kernel.team
        if self.groups == 1:
            return "0"
        group = team.once(("group",), "shr.u32", "b32", team.thread, 7)
        even = team.once(("even group",), "shfl.sync.idx.b32", "b32", group, 0, 31, -1)
        return team.once(("own rows",), "mul.lo.u32", "b32", even, HEIGHT * 128)

    def _descriptor(self, buffer: str, offset: str, form: int) -> str:
        text = self.text
        place = text.let("add.u32", "b32", buffer, offset) if offset != "0" else buffer
        field = text.let("bfe.u32", "b32", place, 4, 14)
        return text.let("or.b64", "b64", text.let("cvt.u64.u32", "b64", field), form)

    def _moved(self, descriptor: str, count: int) -> str:
        return self.text.let("add.s64", "b64", descriptor, count >> 4) if count else descriptor
