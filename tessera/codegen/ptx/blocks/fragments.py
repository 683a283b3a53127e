"""Products by the tensor cores of a warp (mma.sync): both sides in shared memory, read by ldmatrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.exchange import runs
from tessera.codegen.ptx.blocks.operands import HALF, Exchanged, Home, pitch
from tessera.codegen.ptx.hazards import READ, WRITE
from tessera.codegen.ptx.layout import Bit, Layout, width
from tessera.codegen.ptx.memory import Run
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.products import HELD, LANES, STEP, enough_rows, fragments, named
from tessera.codegen.ptx.scalars import words
from tessera.codegen.ptx.scalars.words import half_words
from tessera.codegen.ptx.types import register_class, size
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

ROWS, COLUMNS = 16, 8  # of the sums of one instruction


class Fragments:
    """One product under emission."""

    def __init__(self, kernel: Kernel, node: Node) -> None:
        self.kernel, self.text, self.node = kernel, kernel.text, node
        self.sides = node.args[-2:]
        self.wide = self.sides[0].type.accumulate  # type: ignore[union-attr]
        self.layout = kernel.layout(node.out)
        self.held = [HELD[v.type.dtype] for v in self.sides]  # type: ignore[union-attr]
        self.dtype = self.held[0]
        self.each = size(self.dtype)
        self.step = STEP // self.each
        self.depth = sizes(self.sides[0])[1]
        self.lying = [kernel.lying.get(v) for v in self.sides]
        self.direct = self.lying[0] is None and self._in_registers()
        # The right side lies in memory as its registers hold neighbours: by rows, or by columns. Elements of 8 bits
        # must lie by columns, since loads turn only pairs of bytes around.
        first = kernel.layout(self.sides[1]).registers[:1]
        self.turned = [bool(each and each.flipped) for each in self.lying]
        if self.lying[1] is None:
            self.turned[1] = self.each == 1 or first == ((0, 0),)
        self.homes = self._homes()

    def _in_registers(self) -> bool:
        """Whether the left side is in the registers that the instructions read."""
        left, threads = self.kernel.layout(self.sides[0]), self.kernel.team.threads
        own = all(form == fragments(form.shape, threads, True) for form in (left, self.layout))
        return own and self.each == 2 and enough_rows(left.shape[0], threads)

    def _homes(self) -> list[Home | None]:
        """Where both sides lie; None for what is in registers.

        Rows and columns in the exchange are filled up to what one instruction takes: that is never looked at.
        """
        (rows, depth), columns = sizes(self.sides[0]), sizes(self.sides[1])[1]
        tall = 1 << max(width(rows), 4)
        pitches = [pitch(self.each * n) for n in (depth, depth if self.turned[1] else columns)]
        offset = 0 if self.direct or self.lying[0] else tall * pitches[0]
        more = 1 << max(width(columns), 4) if self.turned[1] else depth
        end = offset if self.lying[1] else offset + more * pitches[1] + -(-columns // 16) * 16 * self.each
        base = self.kernel.room.exchange(end) if end else ""
        left, right = (Exchanged(self.kernel, base, *at) for at in zip((0, offset), pitches, strict=True))
        return [None if self.direct else self.lying[0] or left, self.lying[1] or right]

    def put(self) -> None:
        """What does not lie in memory yet into the exchange."""
        kernel, each = self.kernel, self.each
        homes = [(v, home, turned) for v, home, turned in zip(self.sides, self.homes, self.turned, strict=True)]
        ours = [(v, home, turned) for v, home, turned in homes if isinstance(home, Exchanged)]
        if ours and kernel.hazards.exchange(WRITE):
            kernel.team.meet(self.text)
        for v, home, turned in ours:
            steps = (each, home.pitch) if turned else (home.pitch, each)
            for run in runs(kernel, self.dtype, kernel.layout(v), home.base, once=True, steps=steps):
                moved = Run(run.first, run.count, run.address, run.offset + home.offset, run.guards)
                words.store(self.text, "shared", self.dtype, moved, kernel.values[v][run.first : run.first + run.count])
        if ours and kernel.hazards.exchange(READ):
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
        left, right = (self._own(home, lanes) for home, lanes in zip(self.homes, self._lanes(), strict=True))
        for k in range(0, self.depth, self.step):
            a = {m: self._rows(left, m, k) for m in down}
            b = self._columns(right, across, k)
            for m in down:
                for n in across:
                    self._multiply(places, m, n, a[m], b[n])

    def _own(self, home: Home | None, lanes: Layout) -> str:
        return home.own(lanes, HALF) if home is not None else ""

    def _multiply(self, places: dict[tuple[int, ...], int], m: int, n: int, a: list[str], b: list[str]) -> None:
        kind = register_class(self.wide)
        spots = [places.get((m + down, n + across)) for down in (0, 8) for across in (0, 1)]
        d = [self.sums[i] if i is not None else self.text.let(f"mov.{kind}", kind, words.zero(kind)) for i in spots]
        sums, left, right = (f"{{{', '.join(each)}}}" for each in (d, a, b))
        deep, total, *types = named(*self.held).split(".")
        form = ".".join([f"m16n8{deep}", "row.col", total, *types, total])
        self.text.do(f"mma.sync.aligned.{form}", sums, left, right, sums)

    def _rows(self, left: str, m: int, k: int) -> list[str]:
        """The left side's part for 16 rows: from memory, or from the registers that hold it already."""
        home, turned = self.homes[0], self.turned[0]
        if home is not None:
            row, place = (k, m) if turned else (m, k)
            return self._four(home.at(left, row, place * self.each), ".trans" if turned else "")
        side = self.sides[0]
        held, index = self.kernel.values[side], self.kernel.layout(side).index
        spots = [(m + down, k + across) for across in (0, 8) for down in (0, 8)]
        # Rows that the block has not got are computed from others, and never looked at.
        pairs = [[held[index.get((r, c + n), index[m, c + n])] for n in (0, 1)] for r, c in spots]
        return [half_words(self.text, self.dtype, *pair) for pair in pairs]

    def _four(self, place: str, form: str) -> list[str]:
        """Four 8 by 8 matrices: the addresses of their rows come from the 32 threads."""
        found = [self.text.new("b32") for _ in range(4)]
        self.text.do(f"ldmatrix.sync.aligned.m8n8.x4{form}.shared.b16", f"{{{', '.join(found)}}}", place)
        return found

    def _columns(self, right: str, across: list[int], k: int) -> dict[int, list[str]]:
        """The right side's parts for each 8 columns, two at a time where two are neighbours."""
        found: dict[int, list[str]] = {}
        home, turned = self.homes[1], self.turned[1]
        assert home is not None
        for n in across:
            if n in found:
                continue
            row, place = (n, k) if turned else (k, n)
            four = self._four(home.at(right, row, place * self.each), "" if turned else ".trans")
            found[n], second = four[:2], four[2:]
            if n + COLUMNS in across:
                found[n + COLUMNS] = second
        return found

    def _lanes(self) -> tuple[Layout, Layout]:
        """Which row each thread gives the address of, and which piece of 16 bytes along it, in either side."""
        down, across = ([b if b is not None and b[0] == axis else None for b in self._warps()] for axis in (0, 1))
        rows = width(self.layout.shape[0])
        ours: list[Bit | None] = [(0, p) if p < rows else None for p in range(4)]
        left = Layout((1 << max(rows, 4), 2), (), (*ours, (1, 0), *down))
        if self.turned[0]:
            turned = [None if b is None else (1, b[1] - 3) for b in down]
            left = Layout((16, 64), (), ((0, 0), (0, 1), (0, 2), (1, 0), (0, 3), *turned))
        two = self.layout.shape[1] > COLUMNS and (1, 3) in self.layout.registers
        if self.turned[1]:  # eight columns, the half of the 16 steps, eight more
            columns = [None if b is None else (0, b[1]) for b in across]
            more = (0, 3) if two else None
            return left, Layout((512, 2), (), ((0, 0), (0, 1), (0, 2), (1, 0), more, *columns))
        pieces = [None if b is None else (1, b[1] - 3) for b in across]
        return left, Layout((16, 64), (), ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0) if two else None, *pieces))

    def _warps(self) -> tuple[Bit | None, ...]:
        return self.layout.threads[LANES:]
