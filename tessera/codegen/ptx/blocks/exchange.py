"""Elements handed between the threads of a team: written to memory in row-major order, read where they are wanted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.hazards import READ, WRITE
from tessera.codegen.ptx.layout import Layout, Sizes
from tessera.codegen.ptx.memory import Run
from tessera.codegen.ptx.scalars import words
from tessera.codegen.ptx.team import both
from tessera.codegen.ptx.types import size
from tessera.types import DType

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel


def handed(kernel: Kernel, dtype: DType, held: Sequence[str], source: Layout, to: Layout) -> tuple[str, ...]:
    """The elements of a block in another layout; the shapes hold as many elements in the same order."""
    put(kernel, dtype, held, source, math.prod(source.shape))
    return take(kernel, dtype, to)


def put(kernel: Kernel, dtype: DType, held: Sequence[str], layout: Layout, count: int) -> None:
    """Write a block to the exchange, each element by one thread."""
    if kernel.hazards.exchange(WRITE):
        kernel.team.meet(kernel.text)
    base = kernel.room.exchange(count * size(dtype))
    for run in runs(kernel, dtype, layout, base, once=True):
        words.store(kernel.text, space(kernel), dtype, run, held[run.first : run.first + run.count])


def take(kernel: Kernel, dtype: DType, layout: Layout) -> tuple[str, ...]:
    """Read a block from the exchange."""
    if kernel.hazards.exchange(READ):
        kernel.team.meet(kernel.text)
    base = kernel.room.exchange(0)
    found: list[str] = []
    for run in runs(kernel, dtype, layout, base, once=False):
        found += words.load(kernel.text, space(kernel), dtype, run)
    return tuple(found)


def space(kernel: Kernel) -> str:
    """The space of the exchange."""
    return "local" if kernel.room.own else "shared"


def runs(kernel: Kernel, dtype: DType, layout: Layout, base: str, once: bool, steps: Sizes | None = None) -> list[Run]:
    """Where the registers of a block lie in the exchange; `steps` are bytes along each axis, row-major when not given.

    Steps are multiples of the bytes moved at once, but for the last.
    """
    steps = steps or row_major(layout.shape, size(dtype))
    address = thread_address(kernel, layout, steps, base)
    length = _neighbours(layout, dtype, steps)
    found = []
    for first in range(0, layout.count, length):
        guards = tuple(_guard(kernel, layout, i, once) for i in range(first, first + length))
        offset = sum(n * step for n, step in zip(layout.offsets[first], steps, strict=True))
        found.append(Run(first, length, address, offset, guards))
    return found


def row_major(shape: Sizes, each: int) -> Sizes:
    """The bytes from an element to the next along each axis."""
    return tuple(math.prod(shape[a + 1 :]) * each for a in range(len(shape)))


def thread_address(kernel: Kernel, layout: Layout, steps: Sizes, base: str) -> str:
    """The address of a thread's first element."""
    team, own = kernel.team, kernel.room.own
    total = ""
    for axis, step in enumerate(steps):
        place = team.place(layout, axis)
        if place != "0":
            key = ("near", place, step)
            part = team.once(key, "mul.lo.u32", "b32", place, step)
            total = kernel.text.let("add.s32", "b32", total, part) if total else part
    if own or not total:
        return base
    return kernel.text.let("add.s32", "b32", base, total)


def _neighbours(layout: Layout, dtype: DType, steps: Sizes) -> int:
    """How many registers hold neighbours that one instruction moves: along the axis whose steps are an element's."""
    last, count = max((a for a, step in enumerate(steps) if step == size(dtype)), default=0), 0
    for i, bit in enumerate(layout.registers):
        if bit != (last, i):
            break
        count += 1
    length = min(1 << count, 16 // size(dtype))
    while length > 1 and (
        layout.shape[last] % length or any(s % (length * size(dtype)) for s in steps if s > size(dtype))
    ):
        length //= 2
    return length


def _guard(kernel: Kernel, layout: Layout, i: int, once: bool) -> str:
    owner = kernel.team.owner(layout) if once else ""
    return both(kernel.text, owner, *kernel.team.inside(layout, layout.offsets[i]))
