"""Products by the tensor cores of a warp (mma.sync): both sides in shared memory, read by ldmatrix.

Rows in memory are 16 bytes longer than they need be: the eight rows that an ldmatrix reads at once then lie in
different banks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx import words
from tessera.codegen.ptx.exchange import runs
from tessera.codegen.ptx.hazards import READ, WRITE
from tessera.codegen.ptx.layout import Bit, Layout, width
from tessera.codegen.ptx.memory import Run
from tessera.codegen.ptx.products import HELD, LANES, STEP, enough_rows, fragments
from tessera.codegen.ptx.types import register_class, size
from tessera.codegen.ptx.words import half_words
from tessera.ir.core import Node
from tessera.types import bf16, f16, int8

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

GAP = 16  # bytes after each row
ROWS, COLUMNS = 16, 8  # of the sums of one instruction
HALF = 16  # bytes of the shared axis in one of the matrices that are loaded
FORMS = {
    bf16: "m16n8k16.row.col.f32.bf16.bf16.f32", f16: "m16n8k16.row.col.f32.f16.f16.f32",
    int8: "m16n8k32.row.col.s32.s8.s8.s32",
}  # fmt: skip


class Fragments:
    """One product under emission."""

    def __init__(self, kernel: Kernel, node: Node) -> None:
        self.kernel, self.text, self.node = kernel, kernel.text, node
        self.sides = node.args[-2:]
        self.wide = self.sides[0].type.accumulate  # type: ignore[union-attr]
        self.layout = kernel.layout(node.out)
        self.dtype = HELD[self.sides[0].type.dtype]
        each = size(self.dtype)
        self.step = STEP // each
        left, right = (kernel.layout(v) for v in self.sides)
        self.depth = left.shape[1]
        threads = kernel.team.threads
        own = all(form == fragments(form.shape, threads, True) for form in (left, self.layout))
        self.direct = own and each == 2 and enough_rows(left.shape[0], threads)
        # The right side lies in memory as its registers hold neighbours: by rows, or by columns. Elements of 8 bits
        # must lie by columns, since loads turn only pairs of bytes around.
        self.turned = each == 1 or (bool(right.registers) and right.registers[0] == (0, 0))
        # Rows and columns are filled up to what one instruction takes; what lies there is never looked at.
        self.pitches = [_pitch(each * n) for n in (left.shape[1], right.shape[0 if self.turned else 1])]
        self.tall = 1 << max(width(left.shape[0]), 4)
        self.offset = 0 if self.direct else self.tall * self.pitches[0]
        rows = 1 << max(width(right.shape[1]), 4) if self.turned else self.depth
        self.base = kernel.room.exchange(self.offset + rows * self.pitches[1] + _up(right.shape[1], 16) * each)

    def put(self) -> None:
        """Both sides into the exchange."""
        kernel = self.kernel
        if kernel.hazards.exchange(WRITE):
            kernel.team.meet(self.text)
        each = size(self.dtype)
        forms = [
            (0, (self.pitches[0], each)),
            (self.offset, (each, self.pitches[1]) if self.turned else (self.pitches[1], each)),
        ]
        for v, (at, steps) in list(zip(self.sides, forms, strict=True))[1 if self.direct else 0 :]:
            for run in runs(kernel, self.dtype, kernel.layout(v), self.base, once=True, steps=steps):
                moved = Run(run.first, run.count, run.address, run.offset + at, run.guards)
                words.store(self.text, "shared", self.dtype, moved, kernel.values[v][run.first : run.first + run.count])
        if kernel.hazards.exchange(READ):
            kernel.team.meet(self.text)

    def run(self) -> None:
        """The sums: for each 16 steps of the shared axis what the warp needs of both sides, then all products of it."""
        kind = register_class(self.wide)
        zero = words.zero(kind)
        given = self.kernel.values[self.node.args[0]] if len(self.node.args) > 2 else (zero,) * self.layout.count
        self.sums = [self.text.let(f"mov.{kind}", kind, x) for x in given]
        places = {offset: i for i, offset in enumerate(self.layout.offsets)}
        down = sorted({m - m % ROWS for m, _ in places})
        across = sorted({n - n % COLUMNS for _, n in places})
        left, right = "" if self.direct else self._left(), self._right()
        for k in range(0, self.depth, self.step):
            a = {m: self._rows(left, m, k) for m in down}
            b = self._columns(right, across, k)
            for m in down:
                for n in across:
                    self._multiply(places, m, n, a[m], b[n])

    def _multiply(self, places: dict[tuple[int, ...], int], m: int, n: int, a: list[str], b: list[str]) -> None:
        kind = register_class(self.wide)
        spots = [places.get((m + down, n + across)) for down in (0, 8) for across in (0, 1)]
        d = [self.sums[i] if i is not None else self.text.let(f"mov.{kind}", kind, words.zero(kind)) for i in spots]
        sums, left, right = (f"{{{', '.join(each)}}}" for each in (d, a, b))
        self.text.do(f"mma.sync.aligned.{FORMS[self.dtype]}", sums, left, right, sums)

    def _rows(self, left: str, m: int, k: int) -> list[str]:
        """The left side's part for 16 rows: from memory, or from the registers that hold it already."""
        if not self.direct:
            return self._four(left, m * self.pitches[0] + k * size(self.dtype), "")
        side = self.sides[0]
        held, index = self.kernel.values[side], self.kernel.layout(side).index
        spots = [(m + down, k + across) for across in (0, 8) for down in (0, 8)]
        # Rows that the block has not got are computed from others, and never looked at.
        pairs = [[held[index.get((r, c + n), index[m, c + n])] for n in (0, 1)] for r, c in spots]
        return [half_words(self.text, self.dtype, *pair) for pair in pairs]

    def _four(self, address: str, offset: int, form: str) -> list[str]:
        """Four 8 by 8 matrices: the addresses of their rows come from the 32 threads."""
        found = [self.text.new("b32") for _ in range(4)]
        place = f"[{address}+{offset}]" if offset else f"[{address}]"
        self.text.do(f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16", f"{{{', '.join(found)}}}", place)
        return found

    def _columns(self, right: str, across: list[int], k: int) -> dict[int, list[str]]:
        """The right side's parts for each 8 columns, two at a time where two are neighbours."""
        found: dict[int, list[str]] = {}
        for n in across:
            if n in found:
                continue
            along, across_ = (size(self.dtype), self.pitches[1]) if self.turned else (self.pitches[1], size(self.dtype))
            four = self._four(right, self.offset + k * along + n * across_, "" if self.turned else ".trans")
            found[n], second = four[:2], four[2:]
            if n + COLUMNS in across:
                found[n + COLUMNS] = second
        return found

    def _left(self) -> str:
        """Where a thread's row of the left side lies: by the first four bits of its lane; the half by the fifth."""
        rows = width(self.layout.shape[0])
        lanes = [(0, p) if p < rows else None for p in range(4)]
        warps = [b if b is not None and b[0] == 0 else None for b in self.layout.threads[LANES:]]
        return self._lane_address(Layout((self.tall, 2), (), (*lanes, (1, 0), *warps)), self.pitches[0])

    def _right(self) -> str:
        """The same for the right side: its rows are the shared axis, its halves 8 columns apart."""
        lanes = [(0, p) for p in range(4)]
        two = self.layout.shape[1] > COLUMNS and (1, 3) in self.layout.registers
        warps = [(1, b[1] - 3) if b is not None and b[0] == 1 else None for b in self.layout.threads[LANES:]]
        half = (1, 0) if two else None
        if self.turned:
            return self._columns_address(half, warps)
        return self._lane_address(Layout((16, 64), (), (*lanes, half, *warps)), self.pitches[1])

    def _columns_address(self, half: Bit | None, warps: list[Bit | None]) -> str:
        """The same where columns lie one after the other: eight columns, the half of the 16 steps, eight more."""
        eight: list[Bit | None] = [(0, 0), (0, 1), (0, 2), (1, 0)]
        more = (0, 3) if half else None
        columns = [None if b is None else (0, b[1] + 3) for b in warps]
        return self._lane_address(Layout((512, 2), (), (*eight, more, *columns)), self.pitches[1])

    def _lane_address(self, lanes: Layout, pitch: int) -> str:
        """The base, and a thread's row and half row."""
        team = self.kernel.team
        total = self.base
        for axis, step in enumerate((pitch, HALF)):
            place = team.place(lanes, axis)
            if place != "0":
                part = team.once(("near", place, step), "mul.lo.u32", "b32", place, step)
                total = self.text.let("add.s32", "b32", total, part)
        return total


def _pitch(count: int) -> int:
    """The bytes from one row of so many bytes to the next."""
    return _up(count, 2 * GAP) + GAP


def _up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
