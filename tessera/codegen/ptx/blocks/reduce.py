"""Reductions: over a thread's registers, then between the threads of a warp, then between warps through memory.

The tree is fixed: the same elements in the same places give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.exchange import put, take
from tessera.codegen.ptx.blocks.shuffle import shuffled
from tessera.codegen.ptx.layout import Bit, Layout
from tessera.codegen.ptx.passes.infer import reduced_axes
from tessera.codegen.ptx.scalars.combine import PLACES, Combine, Part, combiner
from tessera.codegen.ptx.scalars.convert import convert
from tessera.codegen.ptx.scalars.policy import stored
from tessera.codegen.ptx.scalars.words import select
from tessera.codegen.ptx.team import both
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node
from tessera.ops import reduce
from tessera.types import DType, int64

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

LANES = 5  # bits of a thread's number that tell the threads of a warp apart
MANY = 3  # bits that tell warps apart from which on each lane reads one warp's result


@visit(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
def _(kernel: Kernel, node: Node) -> None:
    x = node.args[0]
    source, dtype = x.type.dtype, _accumulator(node)
    combine = combiner(node.op, dtype)
    held: list[Part] = [(convert(kernel.text, source, dtype, r),) for r in kernel.values[x]]
    layout, axes = kernel.layout(x), reduced_axes(node)
    if node.op in PLACES:
        held = [(*part, place) for part, place in zip(held, _places(kernel, layout, axes[0]), strict=True)]
    parts = Reduction(kernel, combine, layout, axes).run(held)
    ours = kernel.layout(node.out)
    kept = layout.reduced(axes, keep=False) if not node.attrs["keepdims"] else layout.reduced(axes, keep=True)
    found = [parts[kept.index[place]][-1] for place in ours.offsets]
    made = int64 if node.op in PLACES else dtype
    kernel.values[node.out] = tuple(stored(kernel.text, made, node.out.type, r) for r in found)  # type: ignore[arg-type]


def _accumulator(node: Node) -> DType:
    """The type that elements are combined in."""
    type, out = node.args[0].type, node.out.type.dtype
    if node.op is not reduce.sum:
        return type.dtype
    return type.accumulate if out.is_float else out  # type: ignore[union-attr]


def _places(kernel: Kernel, layout: Layout, axis: int) -> list[str]:
    """The place along an axis of the element in each register."""
    place = kernel.team.place(layout, axis)
    if place == "0":
        return [str(offset[axis]) for offset in layout.offsets]
    wide = kernel.team.once(("wide", place), "cvt.u64.u32", "b64", place)
    known = {n: kernel.text.let("add.s64", "b64", wide, n) for n in {o[axis]: None for o in layout.offsets}}
    return [known[offset[axis]] for offset in layout.offsets]


class Reduction:
    """One reduction of a block in a layout along axes."""

    def __init__(self, kernel: Kernel, combine: Combine, layout: Layout, axes: Sequence[int]) -> None:
        self.kernel, self.combine, self.layout, self.axes = kernel, combine, layout, axes

    def run(self, held: Sequence[Part]) -> list[Part]:
        """The results, in the order of the reduced layout's registers."""
        parts = self._registers(self._filled(held))
        parts = self._lanes(parts)
        return self._warps(parts) if self._across(LANES, None) else parts

    def _filled(self, held: Sequence[Part]) -> list[Part]:
        """Places past the block's end along the axes hold what changes nothing."""
        if not any(self.layout.padded(a) for a in self.axes):
            return list(held)
        team, text = self.kernel.team, self.kernel.text
        neutral = [team.truth(bool(n)) if isinstance(n, bool) else n for n in self.combine.constants()]
        found = []
        for part, place in zip(held, self.layout.offsets, strict=True):
            inside = both(text, *(p for a in self.axes if (p := team.within(self.layout, a, place[a]))))
            chosen = zip(self.combine.dtypes, part, neutral, strict=True)
            found.append(tuple(select(text, d, inside, x, str(n)) for d, x, n in chosen) if inside else part)
        return found

    def _registers(self, held: Sequence[Part]) -> list[Part]:
        """What a thread holds combined by halves, for each register of the result."""
        groups: dict[tuple[int, ...], list[Part]] = {}
        for part, place in zip(held, self.layout.offsets, strict=True):
            rest = tuple(0 if a in self.axes else n for a, n in enumerate(place))
            groups.setdefault(rest, []).append(part)
        return [self._tree(parts) for parts in groups.values()]

    def _tree(self, parts: list[Part]) -> Part:
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self.join(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        return parts[0]

    def join(self, a: Part, b: Part) -> Part:
        """Two parts combined."""
        return self.combine.join(self.kernel.text, a, b)

    def _across(self, first: int, last: int | None) -> list[int]:
        """Bits of the thread's number that stand for places along the axes."""
        bits = list(enumerate(self.layout.threads))[first:last]
        return [i for i, bit in bits if bit is not None and bit[0] in self.axes]

    def _lanes(self, parts: list[Part]) -> list[Part]:
        return self._shuffled(parts, self._across(0, LANES))

    def _shuffled(self, parts: list[Part], bits: Sequence[int]) -> list[Part]:
        """The parts of lanes apart by these bits of their number combined, the same in all of them."""
        for i in bits:
            others = [
                tuple(shuffled(self.kernel.text, d, x, "bfly", 1 << i) for d, x in self._typed(p)) for p in parts
            ]  # fmt: skip
            parts = [self.join(a, b) for a, b in zip(parts, others, strict=True)]
        return parts

    def _typed(self, part: Part) -> list[tuple[DType, str]]:
        return list(zip(self.combine.dtypes, part, strict=True))

    def _warps(self, parts: list[Part]) -> list[Part]:
        """Each warp's results to memory, along one more axis; all of them read by every thread, or one by each lane."""
        writing, reading, lanes = self._exchanged()
        columns = []
        for place, dtype in enumerate(self.combine.dtypes):
            put(self.kernel, dtype, [p[place] for p in parts], writing, _count(writing))
            columns.append(take(self.kernel, dtype, reading))
        warps = 1 if lanes else writing.shape[-1]
        rows: list[Part] = list(zip(*columns, strict=True))
        return self._shuffled([self._tree(rows[i : i + warps]) for i in range(0, len(rows), warps)], lanes)

    def _exchanged(self) -> tuple[Layout, Layout, Sequence[int]]:
        """The layouts of the warps' results as they are written and as they are read, and the lanes that share them."""
        rest = self.layout.reduced(self.axes, keep=True)
        across, last = self._across(LANES, None), len(rest.shape)
        shape = (*rest.shape, 1 << len(across))
        bits: list[Bit] = [(last, n) for n in range(len(across))]
        given = dict(zip(across, bits, strict=True))
        threads = tuple(given.get(i, bit) for i, bit in enumerate(rest.threads))
        writing = Layout(shape, rest.registers, threads)
        if len(bits) >= MANY and len(bits) <= LANES and not any(rest.threads[: len(bits)]):
            return writing, Layout(shape, rest.registers, (*bits, *rest.threads[len(bits) :])), range(len(bits))
        return writing, Layout(shape, (*bits, *rest.registers), rest.threads), ()


def _count(layout: Layout) -> int:
    total = 1
    for n in layout.shape:
        total *= n
    return total
