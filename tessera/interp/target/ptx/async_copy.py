"""Asynchronous copies of single threads (cp.async), and the table of all that begins with cp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.interp.target.ptx.address import HINTS, Target, number_or, spots, target
from tessera.interp.target.ptx.decode import CONTROL, Decoder, rule
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Line, Machine, Step
from tessera.interp.target.ptx.mbarrier import find, places
from tessera.interp.target.ptx.syntax import Instruction, Number
from tessera.interp.target.ptx.types import TYPES

Rule = Callable[[Decoder, Instruction, Line], None]
COPIES: dict[str, Rule] = {}  # by the words behind cp, the longest match first


@rule("cp", table=CONTROL)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    name = inst.name[3:]
    best = max((k for k in COPIES if name == k or name.startswith(k + ".")), key=len, default=None)
    if best is None:
        raise d.unsupported(inst)
    COPIES[best](d, inst, line)


@rule("async", table=COPIES)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """4, 8 or 16 bytes; those beyond the source size are zeros, all of them where the source is to be ignored."""
    if any(w not in HINTS | {"async", "shared", "shared::cta", "global"} and ":" not in w for w in inst.op[1:]):
        raise d.unsupported(inst)
    to, source = target(d, inst, inst.operands[0], "shared"), target(d, inst, inst.operands[1], "global")
    size = inst.operands[2]
    assert isinstance(size, Number)
    rest = inst.operands[3 : len(inst.operands) - ("L2::cache_hint" in inst.op)]
    ignored = any(d.reads_predicate(o) for o in rest)
    limit = d.reader(Number(size.value) if ignored else number_or(rest, 0, size.value), TYPES["u32"])
    skip = d.reader(rest[-1], TYPES["pred"]) if ignored else None

    def step(m: Machine, lanes: Lanes) -> None:
        count = lanes.compress(limit(m, lanes)).astype(np.int64)
        if skip is not None:
            count = np.where(lanes.compress(skip(m, lanes)), 0, count)
        _copy(m, lanes, to, source, size.value, count)

    line.step = step


def _copy(m: Machine, lanes: Lanes, to: Target, source: Target, size: int, count: np.ndarray) -> None:
    (spot,) = spots(m, lanes, to, size)
    into = lanes.compress(spot.offset)
    if m.debug:
        m.shadow.copy_issued(lanes, into, size)
    raw, unit = m.flat["shared"].raw, np.arange(size)
    raw[into[:, None] + unit] = 0
    for n in np.unique(count[count > 0]).tolist():
        some = lanes.select(lanes.spread(count == n))
        (read,) = spots(m, some, source, n, align=size)
        content = m.flat["global"].raw[some.compress(read.offset)[:, None] + np.arange(n)]
        raw[into[count == n][:, None] + np.arange(n)] = content


@rule("async.commit_group", "async.bulk.commit_group", table=COPIES)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    kind = "bulk" if "bulk" in inst.op else "copy"
    line.step = lambda m, lanes: m.shadow.committed(lanes, kind) if m.debug else None


@rule("async.wait_group", "async.wait_all", "async.bulk.wait_group", table=COPIES)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """Copies are done as they are issued: only the debug mode keeps track of what is still under way."""
    kind = "bulk" if "bulk" in inst.op else "copy"
    left = inst.operands[0].value if inst.operands and isinstance(inst.operands[0], Number) else 0
    everything = inst.op[2] == "wait_all"
    line.step = lambda m, lanes: m.shadow.group_waited(lanes, kind, left, everything) if m.debug else None


@rule("async.bulk.prefetch", table=COPIES)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """A hint to the cache."""
    line.step = lambda m, lanes: None


@rule("async.mbarrier.arrive", table=COPIES)
def _(d: Decoder, inst: Instruction, line: Line) -> None:
    """An arrival when the thread's copies are done; without `noinc` the barrier first expects one more."""
    where = target(d, inst, inst.operands[0])
    line.step = _deferred_arrival(where, "noinc" in inst.op)


def _deferred_arrival(where: Target, counted: bool) -> Step:
    def step(m: Machine, lanes: Lanes) -> None:
        offsets = places(m, lanes, where)
        if m.debug:
            m.shadow.group_waited(lanes, "copy", 0, True)
            m.shadow.arrived_at(lanes, offsets)
        flipped = False
        for offset in offsets.tolist():
            barrier = find(m, offset)
            barrier.pending += not counted
            flipped |= barrier.arrive(1)
        if flipped:
            m.wake()

    return step
