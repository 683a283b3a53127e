"""Products on tensor cores whose fragments are read element by element: doubles, and f32 in two parts of tf32.

Operands are in slots of shared memory, as cp.async copies them, or in the exchange buffer.

An f32 is the sum of a tf32, its first 11 bits, and a rest that is exact in f32 and of which tensor cores read 11 bits.
Three of the four products of such parts are added up, smallest first ("3xTF32", CUTLASS); the fourth and the bits not
read are at most 2**-22 of a product of operands. Tensor cores cut off the bits of a sum below an f32 once for eight
elements, and a block's sums are added to those before it in f32.

Parts of numbers below 2**-113 lose bits, and infinities have no parts. A warp with a result that is not finite, or that
is small but not 0, or with a large operand, computes its results again by multiply-add. Operands below 2**-137 count as
0 where no other operand contributes to a result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tessera.codegen.ptx.context import EmissionContext
from tessera.codegen.ptx.layout import (
    LANE_BITS,
    DistributedLayout,
    LayoutBit,
    Sizes,
    bit_width,
    has_enough_rows,
    make_mma_layout,
)
from tessera.codegen.ptx.ops import DOUBLE_MMA, FRAGMENT_PADDINGS
from tessera.codegen.ptx.passes.shared_memory import SHARED_SYMBOL
from tessera.codegen.ptx.table.blocks.fma_product import OPERAND_ALIGN, FmaProduct, row_strides, store_shifted
from tessera.codegen.ptx.table.blocks.layout_conversion import (
    FULL_WARP_MASK,
    emit_thread_address,
    plan_exchange_accesses,
)
from tessera.core.types import f32, f64
from tessera.ir.core import Node

MMA_ROWS, MMA_COLUMNS = 16, 8  # of one instruction's accumulator
UNROLLED = 2  # steps along the contraction
GROUP_COLUMNS = 64  # of a group of sums
LONGEST_SUM = 64  # elements of a contraction that tensor cores add up


class FragmentProduct(FmaProduct):
    """A product by mma.sync: a thread loads each element of its fragments from shared memory."""

    # Where the lanes of a group of four are along the contraction, as bits of its index; then elements of a fragment.
    depth_bits: tuple[int, int]
    depth_steps: tuple[int, int]
    loops = True  # whether all fragments are in memory
    parts: tuple[tuple[int, int], ...] = ((0, 0),)  # of the operands, whose products are added up

    def _hold_shape(self, shape: Sizes) -> Sizes:
        """Rows and columns up to those that fragments cover; nothing reads the sums of the added ones."""
        rows, columns = (1 << bit_width(n) for n in shape)
        return rows, columns

    def emit(self) -> None:
        """Emit the sums of each group of places."""
        found: dict[Sizes, str] = {}
        for places in self._group_places():
            self.places = places
            self._emit_group()
            found.update(zip(self.places, self.sums, strict=True))
        self.sums = [found[p] for p in self.layout.offsets]

    def _group_places(self) -> list[tuple[Sizes, ...]]:
        return [self.layout.offsets]

    def _emit_group(self) -> None:
        """Emit the MMAs: a loop along the reduction axis, unrolled."""
        self.sums, self.index = self._initialise_sums(), {p: i for i, p in enumerate(self.places)}
        pointers, step = self._make_lane_pointers(), DOUBLE_MMA[2]
        rounds, rest = divmod(self.depth, step * UNROLLED)
        if rounds < 2 or not self.loops:
            self._emit_steps(pointers, 0, self.depth)
            return
        self._emit_loop(pointers, rounds, step * UNROLLED)
        self._emit_steps(pointers, 0, rest)

    def _emit_steps(self, pointers: Sequence[str], first: int, count: int) -> None:
        """For each step along the reduction axis the fragments of both operands, then all products."""
        rows = sorted({m - m % MMA_ROWS for m, _ in self.places})
        columns = sorted({n - n % MMA_COLUMNS for _, n in self.places if n < self.layout.shape[1]})
        for k in range(first, first + count, DOUBLE_MMA[2]):
            a = {m: self._load_left_fragment(pointers[0], m, k) for m in rows}
            b = {n: self._load_right_fragment(pointers[1], n, k) for n in columns}
            for part in self.parts:  # an instruction waits for the one before it on the same sums
                for m, n in itertools.product(rows, columns):
                    self._emit_mma(m, n, a[m], b[n], part)

    def _make_lane_pointers(self) -> list[str]:
        """The addresses of a thread's first elements of both operands."""
        warps, deep = self.layout.threads[LANE_BITS:], self.depth_bits
        down, across = ([b if b is not None and b[0] == axis else None for b in warps] for axis in (0, 1))
        left: list[LayoutBit | None] = [*((1, p) for p in deep), (0, 0), (0, 1), (0, 2), *down]
        right: list[LayoutBit | None] = [*((0, p) for p in deep), (1, 0), (1, 1), (1, 2), *across]
        held = [self._hold_shape(s) for s in self.shapes]
        return [self._make_lane_pointer(side, lanes, held[side]) for side, lanes in enumerate((left, right))]

    def _make_lane_pointer(self, side: int, lanes: Sequence[LayoutBit | None], held: Sizes) -> str:
        layout = DistributedLayout(held, (), tuple(lanes))
        address = emit_thread_address(self.ctx, layout, self.strides[side], self.bases[side])
        return self.text.let("add.s32", "b32", address, self.starts[side])

    def _load_left_fragment(self, pointer: str, m: int, k: int) -> list[str]:
        """Rows m and m + 8, at one place along the contraction and then at another."""
        found = [self._load_pair(0, pointer, m + 8 * i, k) for i in (0, 1)]
        return [found[i][j] for j in (0, 1) for i in (0, 1)]

    def _load_right_fragment(self, pointer: str, n: int, k: int) -> list[str]:
        return self._load_pair(1, pointer, n, k)

    def _load_pair(self, side: int, pointer: str, kept: int, k: int) -> list[str]:
        """Two elements along the contraction of a row of the left operand, or of a column of the right one."""
        first, second = (k + step for step in self.depth_steps)
        along, across = self.strides[side][1 - side], self.strides[side][side]
        if second == first + 1 and along == self.size:
            return self._load_run(side, pointer, kept * across + first * along, ("", ""))
        return [x for at in (first, second) for x in self._load_run(side, pointer, kept * across + at * along, ("",))]

    def _emit_mma(self, m: int, n: int, a: list[str], b: list[str], part: tuple[int, int]) -> None:
        raise NotImplementedError

    def _do_mma(self, form: str, *registers: list[str]) -> None:
        sums, left, right = (f"{{{', '.join(each)}}}" for each in registers)
        self.text.do(f"mma.sync.aligned.{form}", sums, left, right, sums)

    def _find_sums(self, sums: list[str], m: int, n: int) -> list[str]:
        return [sums[self.index[m + down, n + across]] for down in (0, 8) for across in (0, 1)]


class DoubleMmaProduct(FragmentProduct):
    """A product of doubles (PTX ISA, "Matrix fragments for mma.m16n8k8" and "mma.m8n8k4" with .f64)."""

    row_paddings = FRAGMENT_PADDINGS[f64]
    depth_bits, depth_steps = (0, 1), (0, 4)

    def _emit_mma(self, m: int, n: int, a: list[str], b: list[str], part: tuple[int, int]) -> None:
        d, types = self._find_sums(self.sums, m, n), "row.col.f64.f64.f64.f64"
        if self.ctx.entry.arch == "sm_80":  # eight rows and four elements of the contraction at a time
            for half in (0, 1):
                for j in (0, 1):
                    self._do_mma(f"m8n8k4.{types}", d[2 * half : 2 * half + 2], [a[2 * j + half]], [b[j]])
        else:
            self._do_mma(f"m16n8k8.{types}", d, a, b)


LARGE, SMALL = "0f58800000", 0x21800000 << 1  # 2**50; and twice the bits of 2**-60
LARGE_RESULT = "0f71800000"  # 2**100


class SplitMmaProduct(FragmentProduct):
    """A product of f32 in parts of tf32 (PTX ISA, "Matrix fragments for mma.m16n8k8").

    The lanes of a group of four take pairs of neighbours along the contraction, whose order is free. So the result of
    another product is a left operand as it is in registers, where each warp has whole rows.
    """

    row_paddings = FRAGMENT_PADDINGS[f32]
    depth_bits, depth_steps = (1, 2), (0, 1)
    parts = ((1, 0), (0, 1), (0, 0))

    def __init__(self, ctx: EmissionContext, node: Node) -> None:
        super().__init__(ctx, node)
        self.loops = not self.direct
        if self.direct:
            self.strides[0] = row_strides(self.held[0], self.size, OPERAND_ALIGN)
            self.bases[0], self.starts[0] = self._reserve_left(), 0
        self.again = _SharedProduct(self)
        self.totals: list[str] = []
        self.split: dict[str, tuple[str, str]] = {}
        self.greatest = ""  # of the thread's operands

    def _find_stored(self) -> list[bool]:
        """A left operand with the layout of fragments stays in registers."""
        left, threads = self.ctx.layout(self.operands[0]), self.ctx.team.threads
        by_rows = all(form == make_mma_layout(form.shape, threads, True) for form in (left, self.layout))
        self.direct = self.in_place[0] is None and by_rows and has_enough_rows(left.shape[0], threads)
        return [self.in_place[0] is None and not self.direct, self.in_place[1] is None]

    def _reserve_left(self) -> str:
        """The address of memory for a left operand in registers, of which each warp uses its own rows."""
        ctx, count = self.ctx, self.held[0][0] * self.strides[0][0]
        key = (self.held[0][0], self.strides[0][0])
        if key not in ctx.smem.left_rows:
            offset = ctx.smem.allocator.allocate_shared(count, OPERAND_ALIGN)
            with ctx.text.at_entry_head():
                start = ctx.text.let("mov.u32", "b32", SHARED_SYMBOL)
                ctx.smem.left_rows[key] = ctx.text.let("add.u32", "b32", start, offset)
        return ctx.smem.left_rows[key]

    def _group_places(self) -> list[tuple[Sizes, ...]]:
        """The places by columns: the sums of a group are added to those before them, and need registers no longer."""
        numbers = sorted({n // GROUP_COLUMNS for _, n in self.layout.offsets})
        return [tuple(p for p in self.layout.offsets if p[1] // GROUP_COLUMNS == number) for number in numbers]

    def _emit_group(self) -> None:
        """The sums of this block, added to those before it; by multiply-add where parts are not exact."""
        given, self.given = self.given, ()
        self.greatest = self.greatest or self.text.let("mov.f32", "f32", "0f00000000")
        super()._emit_group()
        self._recompute_inexact()
        self.given, index = given, self.layout.index
        if given:
            every = zip(self.places, self.sums, strict=True)
            self.sums = [self.text.let("add.rn.f32", "f32", given[index[p]], x) for p, x in every]

    def _emit_loop(self, pointers: Sequence[str], rounds: int, unrolled: int) -> None:
        """Long contractions are added up in f32 round by round: what tensor cores cut off grows with a sum's length."""
        self.totals = self._initialise_sums() if self.depth > LONGEST_SUM else []
        super()._emit_loop(pointers, rounds, unrolled)
        self.sums = self.totals or self.sums

    def _emit_round(self, pointers: Sequence[str], count: int) -> None:
        for x in self.sums if self.totals else ():
            self.text.do("mov.f32", x, "0f00000000")
        super()._emit_round(pointers, count)
        for total, x in zip(self.totals, self.sums, strict=False):
            self.text.do("add.rn.f32", total, total, x)

    def _recompute_inexact(self) -> None:
        """Compute the sums of a warp again by multiply-add if one of them may be wrong."""
        text, exact = self.text, self.text.new_label("exact")
        text.do(f"bra {exact}", guard=f"!{self._emit_vote()}")
        if self.direct:
            self._share_left()
        self.again.places = self.places
        self.again.emit()
        for total, again in zip(self.sums, self.again.sums, strict=True):
            text.do("mov.f32", total, again)
        text.label(exact)

    def _share_left(self) -> None:
        """Write a warp's rows of the left operand to shared memory."""
        ctx, (left, _) = self.ctx, self.operands
        ctx.text.do("bar.warp.sync", FULL_WARP_MASK)
        layout = ctx.layout(left)
        for access in plan_exchange_accesses(ctx, self.dtypes[0], layout, self.bases[0], True, self.strides[0]):
            store_shifted(ctx, self.dtypes[0], access, 0, ctx.values[left], "shared")
        ctx.text.do("bar.warp.sync", FULL_WARP_MASK)

    def _load_left_fragment(self, pointer: str, m: int, k: int) -> list[str]:
        if not self.direct:
            return super()._load_left_fragment(pointer, m, k)
        (left, _), ctx = self.operands, self.ctx
        held, index = ctx.values[left], ctx.layout(left).index
        return [held[index[m + down, k + across]] for across in (0, 1) for down in (0, 8)]

    def _emit_vote(self) -> str:
        """Whether a thread of the warp has a large operand, or a result that is small but not 0, or not finite."""
        text = self.text
        largest, least = text.let("mov.f32", "f32", "0f00000000"), text.let("mov.u32", "b32", "0xFFFFFFFF")
        for x in self.sums:
            text.do("max.NaN.f32", largest, largest, text.let("abs.f32", "f32", x))
            twice = text.let("shl.b32", "b32", text.let("mov.b32", "b32", x), 1)
            text.do("min.u32", least, least, text.let("sub.u32", "b32", twice, 1))
        tests = [
            text.let("setp.geu.f32", "pred", largest, LARGE_RESULT),
            text.let("setp.lt.u32", "pred", least, SMALL),
            text.let("setp.ge.f32", "pred", self.greatest, LARGE),
        ]
        any_ = text.let("or.pred", "pred", text.let("or.pred", "pred", *tests[:2]), tests[2])
        return text.let("vote.sync.any.pred", "pred", any_, FULL_WARP_MASK)

    def _emit_mma(self, m: int, n: int, a: list[str], b: list[str], part: tuple[int, int]) -> None:
        left, right = ([self._split(x)[i] for x in each] for each, i in zip((a, b), part, strict=True))
        self._do_mma("m16n8k8.row.col.f32.tf32.tf32.f32", self._find_sums(self.sums, m, n), left, right)

    def _split(self, x: str) -> tuple[str, str]:
        """The two parts of an element, as bits."""
        if x not in self.split:
            text = self.text
            text.do("max.f32", self.greatest, self.greatest, text.let("abs.f32", "f32", x))
            high = text.let("cvt.rna.tf32.f32", "b32", x)
            rest = text.let("sub.rn.f32", "f32", x, text.let("mov.b32", "f32", high))
            self.split[x] = high, text.let("mov.b32", "b32", rest)
        return self.split[x]


class _SharedProduct(FmaProduct):
    """A product by multiply-add, from the memory in which another product has its operands."""

    def __init__(self, other: FmaProduct) -> None:
        super().__init__(other.ctx, other.node)
        self.strides, self.bases, self.starts, self.given = other.strides, other.bases, other.starts, ()

    def _find_stored(self) -> list[bool]:
        return [False, False]
