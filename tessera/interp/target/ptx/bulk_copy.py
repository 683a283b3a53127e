"""Bulk copies of rows of bytes between global and shared memory, and stores that count at a barrier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tessera.errors import AsyncCopyError, OutOfBoundsError
from tessera.interp.target.ptx.address import Target, spots, target
from tessera.interp.target.ptx.async_copy import COPIES
from tessera.interp.target.ptx.atomics import reduce_cells
from tessera.interp.target.ptx.decode import RULES, Decoder, rule
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes, single
from tessera.interp.target.ptx.machine import Line, Machine, Step
from tessera.interp.target.ptx.mbarrier import complete_bytes, find, places
from tessera.interp.target.ptx.operands import parts_of
from tessera.interp.target.ptx.syntax import Instruction
from tessera.interp.target.ptx.types import TYPES, bits_of

REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_WORDS = {
    "async", "bulk", "reduce", "shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "bulk_group",
    "multicast::cluster", "L2::cache_hint", "noftz", *REDUCTIONS,
}  # fmt: skip
_ALIGNED = 16


class Copy(NamedTuple):
    """One lane's copy: where from and to, in flat memory."""

    lane: int
    source: int
    into: int
    size: int


def spaces_of(inst: Instruction) -> tuple[str, str]:
    """The spaces a copy goes to and comes from."""
    named = [w for w in inst.op if w in ("shared::cluster", "shared::cta", "global")]
    return tuple("global" if w == "global" else "shared" for w in named[:2])  # type: ignore[return-value]


@rule("async.bulk", "reduce.async.bulk", table=COPIES)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    if not {w for w in inst.op[1:] if w not in TYPES} <= _WORDS:
        raise d.unsupported(inst)
    into_space, from_space = spaces_of(inst)
    into, source = target(d, inst, inst.operands[0], into_space), target(d, inst, inst.operands[1], from_space)
    size = d.reader(inst.operands[2], TYPES["u32"])
    counted = "mbarrier::complete_tx::bytes" in inst.op
    barrier = target(d, inst, inst.operands[3], "shared") if counted else None
    mask = d.reader(inst.operands[4], TYPES["b16"]) if "multicast::cluster" in inst.op else None
    name = next((w for w in inst.op if w in REDUCTIONS), None)
    t = TYPES[inst.op[-1]] if name else TYPES["b8"]

    def step(m: Machine, lanes: Lanes) -> None:
        sizes = lanes.compress(size(m, lanes)).tolist()
        masks = lanes.compress(mask(m, lanes)).tolist() if mask else [None] * len(sizes)
        bars = places(m, lanes, barrier).tolist() if barrier else [0] * len(sizes)
        for copy, bar, where in zip(_copies(m, lanes, source, into, sizes), bars, masks, strict=True):
            content = m.flat[from_space].raw[copy.source : copy.source + copy.size]
            for shift in multicast(m, copy.lane, where):
                if name is not None:
                    _reduce(m, into_space, copy, name, t, content)
                else:
                    m.flat[into_space].raw[copy.into + shift : copy.into + shift + copy.size] = content
                if m.debug:
                    tell(m, copy, (from_space, into_space), shift, bar if counted else None)
                if counted:
                    complete_bytes(m, bar + shift, copy.size)

    line.step = step


def _copies(m: Machine, lanes: Lanes, source: Target, into: Target, sizes: list[int]) -> Iterator[Copy]:
    """Each lane's copy, checked."""
    for lane, size in zip(lanes.flat.tolist(), sizes, strict=True):
        one = single(lane, m.extent)
        if size % _ALIGNED:
            raise Fault(f"a bulk copy of {size} bytes is no multiple of 16", OutOfBoundsError, lane)
        if not size:
            continue
        (read,), (write,) = spots(m, one, source, size, _ALIGNED), spots(m, one, into, size, _ALIGNED)
        yield Copy(lane, int(read.offset.reshape(-1)[0]), int(write.offset.reshape(-1)[0]), size)


def _reduce(m: Machine, space: str, copy: Copy, name: str, t: object, content: np.ndarray) -> None:
    size = t.bits // 8  # type: ignore[attr-defined]
    index = np.arange(copy.into // size, (copy.into + copy.size) // size)
    reduce_cells(m.flat[space].views[size], index, content.view(f"u{size}"), name, t)  # type: ignore[arg-type]


def multicast(m: Machine, lane: int, mask: int | None) -> list[int]:
    """How far the shared memory of each CTA that a copy goes to lies from the issuing one's."""
    if mask is None:
        return [0]
    row = lane // m.threads
    rows = m.row_of[m.cluster[row]]
    if mask >> len(rows):
        raise Fault(f"a multicast mask {mask:#x} beyond the cluster", AsyncCopyError, lane)
    return [int(rows[k] - row) * m.shared_size for k in range(len(rows)) if mask >> k & 1]


def tell(m: Machine, copy: Copy, spaces: tuple[str, str], shift: int, barrier: int | None) -> None:
    """Show the debug mode what a copy reads and writes in shared memory."""
    if spaces[0] == "shared":
        m.shadow.bulk_read(copy.lane, copy.source, copy.size)
    if spaces[1] == "shared" and barrier is not None:
        phase = find(m, barrier + shift).phase
        m.shadow.bulk_write(copy.lane, copy.into + shift, copy.size, barrier + shift, phase)


def _counted_store(d: Decoder, inst: Instruction) -> Step:
    """`st.async` and `red.async`: to another CTA's shared memory, counted at its barrier."""
    t, name = TYPES[inst.op[-1]], next((w for w in inst.op if w in REDUCTIONS), None)
    where, barrier = target(d, inst, inst.operands[0], "shared"), target(d, inst, inst.operands[2], "shared")
    readers, size = [d.reader(o, t) for o in parts_of(inst.operands[1])], t.bits // 8

    def step(m: Machine, lanes: Lanes) -> None:
        (spot,) = spots(m, lanes, where, size * len(readers))
        index, cells = lanes.compress(spot.offset) // size, m.flat["shared"].views[size]
        for k, read in enumerate(readers):
            bits = lanes.compress(bits_of(read(m, lanes), t, t.bits))
            if name is not None:
                reduce_cells(cells, index + k, bits, name, t)
            else:
                cells[index + k] = bits
        offsets = places(m, lanes, barrier)
        if m.debug:
            starts = lanes.compress(spot.offset).tolist()
            for lane, start, bar in zip(lanes.flat.tolist(), starts, offsets.tolist(), strict=True):
                tell(m, Copy(lane, 0, start, size * len(readers)), ("", "shared"), 0, bar)
        for offset in offsets.tolist():
            complete_bytes(m, offset, size * len(readers))

    return step


def _or_async(plain: object) -> object:
    def choose(d: Decoder, inst: Instruction) -> Step:
        return _counted_store(d, inst) if inst.op[1] == "async" else plain(d, inst)  # type: ignore[operator]

    return choose


for _name in ("st", "red"):
    RULES[_name] = _or_async(RULES[_name])  # type: ignore[assignment]
