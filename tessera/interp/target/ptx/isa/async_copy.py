"""Asynchronous copies: cp.async of threads and cp.async.bulk of contiguous bytes, with their completion mechanisms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from tessera.core.errors import AsyncCopyError, OutOfBoundsError
from tessera.interp.target.ptx.isa.addressing import (
    MEMORY_MODIFIERS,
    AddressOperandReader,
    decode_address,
    get_operand_or_default,
    resolve_accesses,
)
from tessera.interp.target.ptx.isa.atomics import reduce_cells
from tessera.interp.target.ptx.isa.data_movement import record_access
from tessera.interp.target.ptx.isa.decoder import CONTROL_RULES, DECODE_RULES, PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.mbarrier import complete_transaction, find_mbarrier, find_mbarrier_offsets
from tessera.interp.target.ptx.isa.operands import get_vector_parts
from tessera.interp.target.ptx.machine.lane_set import LaneSet, make_single_lane
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import TYPES, ImmediateOperand, PtxInstruction, values_to_bits

# cp.async, and the table of all `cp` instructions.


CopyRule = Callable[[PtxDecoder, PtxInstruction, DecodedInstruction], None]
COPY_RULES: dict[str, CopyRule] = {}  # by the words after cp; the longest match is chosen


@decode_rule("cp", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    name = inst.name[3:]
    best = max((k for k in COPY_RULES if name == k or name.startswith(k + ".")), key=len, default=None)
    if best is None:
        raise d.unsupported(inst)
    COPY_RULES[best](d, inst, line)


@decode_rule("async", table=COPY_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """4, 8 or 16 bytes; bytes beyond the source size are zero, as are all bytes if the source is ignored."""
    if any(
        w not in MEMORY_MODIFIERS | {"async", "shared", "shared::cta", "global"} and ":" not in w for w in inst.op[1:]
    ):
        raise d.unsupported(inst)
    destination, source = (
        decode_address(d, inst, inst.operands[0], "shared"),
        decode_address(d, inst, inst.operands[1], "global"),
    )
    size = inst.operands[2]
    assert isinstance(size, ImmediateOperand)
    rest = inst.operands[3 : len(inst.operands) - ("L2::cache_hint" in inst.op)]
    ignored = any(d.is_predicate(o) for o in rest)
    limit = d.reader(
        ImmediateOperand(size.value) if ignored else get_operand_or_default(rest, 0, size.value), TYPES["u32"]
    )
    skip = d.reader(rest[-1], TYPES["pred"]) if ignored else None

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        count = lanes.compress(limit(m, lanes)).astype(np.int64)
        if skip is not None:
            count = np.where(lanes.compress(skip(m, lanes)), 0, count)
        _copy_async(m, lanes, destination, source, size.value, count)

    line.step = step


def _copy_async(
    m: PtxMachine,
    lanes: LaneSet,
    destination: AddressOperandReader,
    source: AddressOperandReader,
    size: int,
    count: np.ndarray,
) -> None:
    (access,) = resolve_accesses(m, lanes, destination, size)
    offsets = lanes.compress(access.offset)
    if m.debug:
        m.shadow.record_copy(lanes, offsets, size)
    raw, unit = m.flat["shared"].raw, np.arange(size)
    raw[offsets[:, None] + unit] = 0
    for n in np.unique(count[count > 0]).tolist():
        subset = lanes.select(lanes.expand(count == n))
        (read,) = resolve_accesses(m, subset, source, n, align=size)
        record_access(m, read, n, "read")
        content = m.flat["global"].raw[subset.compress(read.offset)[:, None] + np.arange(n)]
        raw[offsets[count == n][:, None] + np.arange(n)] = content


@decode_rule("async.commit_group", "async.bulk.commit_group", table=COPY_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    kind = "bulk" if "bulk" in inst.op else "copy"
    line.step = lambda m, lanes: m.shadow.committed(lanes, kind) if m.debug else None


@decode_rule("async.wait_group", "async.wait_all", "async.bulk.wait_group", table=COPY_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """Copies complete when they are issued: only the sanitizer tracks which are in flight."""
    kind = "bulk" if "bulk" in inst.op else "copy"
    left = inst.operands[0].value if inst.operands and isinstance(inst.operands[0], ImmediateOperand) else 0
    everything = inst.op[2] == "wait_all"
    line.step = lambda m, lanes: m.shadow.wait_for_copy_groups(lanes, kind, left, everything) if m.debug else None


@decode_rule("async.bulk.prefetch", table=COPY_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """A hint to the cache."""
    line.step = lambda m, lanes: None


@decode_rule("async.mbarrier.arrive", table=COPY_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """An arrival when the thread's copies complete; without `noinc` the mbarrier first expects one more."""
    where = decode_address(d, inst, inst.operands[0])
    line.step = _defer_arrival(where, "noinc" in inst.op)


def _defer_arrival(where: AddressOperandReader, signals_mbarrier: bool) -> LaneStep:
    def step(m: PtxMachine, lanes: LaneSet) -> None:
        offsets = find_mbarrier_offsets(m, lanes, where)
        if m.debug:
            m.shadow.wait_for_copy_groups(lanes, "copy", 0, True)
            m.shadow.arrive_at_mbarrier(lanes, offsets)
        flipped = False
        for offset in offsets.tolist():
            barrier = find_mbarrier(m, offset)
            barrier.pending += not signals_mbarrier
            flipped |= barrier.arrive(1)
        if flipped:
            m.unblock()

    return step


# Bulk copies between global and shared memory, and stores that signal an mbarrier.


BULK_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_BULK_WORDS = {
    "async", "bulk", "reduce", "shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "bulk_group",
    "multicast::cluster", "L2::cache_hint", "noftz", *BULK_REDUCTIONS,
}  # fmt: skip
_BULK_ALIGNMENT = 16


class BulkTransfer(NamedTuple):
    """One lane's copy: source and destination offsets in flat memory."""

    lane: int
    source: int
    destination: int
    size: int


def find_copy_spaces(inst: PtxInstruction) -> tuple[str, str]:
    """The destination and source state spaces of a copy."""
    named = [w for w in inst.op if w in ("shared::cluster", "shared::cta", "global")]
    return tuple("global" if w == "global" else "shared" for w in named[:2])  # type: ignore[return-value]


@decode_rule("async.bulk", "reduce.async.bulk", table=COPY_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    if not {w for w in inst.op[1:] if w not in TYPES} <= _BULK_WORDS:
        raise d.unsupported(inst)
    into_space, from_space = find_copy_spaces(inst)
    destination, source = (
        decode_address(d, inst, inst.operands[0], into_space),
        decode_address(d, inst, inst.operands[1], from_space),
    )
    size = d.reader(inst.operands[2], TYPES["u32"])
    signals_mbarrier = "mbarrier::complete_tx::bytes" in inst.op
    barrier = decode_address(d, inst, inst.operands[3], "shared") if signals_mbarrier else None
    mask = d.reader(inst.operands[4], TYPES["b16"]) if "multicast::cluster" in inst.op else None
    name = next((w for w in inst.op if w in BULK_REDUCTIONS), None)
    t = TYPES[inst.op[-1]] if name else TYPES["b8"]

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        sizes = lanes.compress(size(m, lanes)).tolist()
        masks = lanes.compress(mask(m, lanes)).tolist() if mask else [None] * len(sizes)
        barrier_offsets = find_mbarrier_offsets(m, lanes, barrier).tolist() if barrier else [0] * len(sizes)
        for copy, barrier_offset, where in zip(
            _check_transfers(m, lanes, source, destination, sizes), barrier_offsets, masks, strict=True
        ):
            content = m.flat[from_space].raw[copy.source : copy.source + copy.size]
            for shift in find_multicast_offsets(m, copy.lane, where):
                if name is not None:
                    _reduce_transfer(m, into_space, copy, name, t, content)
                else:
                    m.flat[into_space].raw[copy.destination + shift : copy.destination + shift + copy.size] = content
                if m.debug:
                    record_bulk_transfer(
                        m, copy, (from_space, into_space), shift, barrier_offset if signals_mbarrier else None
                    )
                if signals_mbarrier:
                    complete_transaction(m, barrier_offset + shift, copy.size)

    line.step = step


def _check_transfers(
    m: PtxMachine, lanes: LaneSet, source: AddressOperandReader, destination: AddressOperandReader, sizes: list[int]
) -> Iterator[BulkTransfer]:
    """Each lane's copy, checked."""
    for lane, size in zip(lanes.flat.tolist(), sizes, strict=True):
        one = make_single_lane(lane, m.extent)
        if size % _BULK_ALIGNMENT:
            raise PtxFault(
                f"the size of a bulk copy is {size} bytes, which is not a multiple of 16", OutOfBoundsError, lane
            )
        if not size:
            continue
        (read,), (write,) = (
            resolve_accesses(m, one, source, size, _BULK_ALIGNMENT),
            resolve_accesses(m, one, destination, size, _BULK_ALIGNMENT),
        )
        yield BulkTransfer(lane, int(read.offset.reshape(-1)[0]), int(write.offset.reshape(-1)[0]), size)


def _reduce_transfer(m: PtxMachine, space: str, copy: BulkTransfer, name: str, t: object, content: np.ndarray) -> None:
    size = t.bits // 8  # type: ignore[attr-defined]
    index = np.arange(copy.destination // size, (copy.destination + copy.size) // size)
    reduce_cells(m.flat[space].views[size], index, content.view(f"u{size}"), name, t)  # type: ignore[arg-type]


def find_multicast_offsets(m: PtxMachine, lane: int, mask: int | None) -> list[int]:
    """The offsets from the issuing CTA's shared memory to that of each destination CTA."""
    if mask is None:
        return [0]
    row = lane // m.threads
    rows = m.cta_of_rank[m.cluster[row]]
    if mask >> len(rows):
        raise PtxFault(f"the multicast mask {mask:#x} has CTAs outside the cluster", AsyncCopyError, lane)
    return [int(rows[k] - row) * m.shared_size for k in range(len(rows)) if mask >> k & 1]


def record_bulk_transfer(
    m: PtxMachine, copy: BulkTransfer, spaces: tuple[str, str], shift: int, barrier: int | None
) -> None:
    """Report the shared memory that a bulk copy reads and writes to the sanitizer."""
    if spaces[0] == "shared":
        m.shadow.record_bulk_read(copy.lane, copy.source, copy.size, grouped=barrier is None)
    if spaces[1] == "shared" and barrier is not None:
        phase = find_mbarrier(m, barrier + shift).phase
        m.shadow.record_bulk_write(copy.lane, copy.destination + shift, copy.size, barrier + shift, phase)


def _decode_async_store(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """`st.async` and `red.async`: to another CTA's shared memory, signalled at its mbarrier."""
    t, name = TYPES[inst.op[-1]], next((w for w in inst.op if w in BULK_REDUCTIONS), None)
    where, barrier = (
        decode_address(d, inst, inst.operands[0], "shared"),
        decode_address(d, inst, inst.operands[2], "shared"),
    )
    readers, size = [d.reader(o, t) for o in get_vector_parts(inst.operands[1])], t.bits // 8

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        (access,) = resolve_accesses(m, lanes, where, size * len(readers))
        index, cells = lanes.compress(access.offset) // size, m.flat["shared"].views[size]
        for k, read in enumerate(readers):
            bits = lanes.compress(values_to_bits(read(m, lanes), t, t.bits))
            if name is not None:
                reduce_cells(cells, index + k, bits, name, t)
            else:
                cells[index + k] = bits
        offsets = find_mbarrier_offsets(m, lanes, barrier)
        if m.debug:
            starts = lanes.compress(access.offset).tolist()
            for lane, start, barrier_offset in zip(lanes.flat.tolist(), starts, offsets.tolist(), strict=True):
                record_bulk_transfer(
                    m, BulkTransfer(lane, 0, start, size * len(readers)), ("", "shared"), 0, barrier_offset
                )
        for offset in offsets.tolist():
            complete_transaction(m, offset, size * len(readers))

    return step


def _select_async(plain: object) -> object:
    def choose(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
        return _decode_async_store(d, inst) if inst.op[1] == "async" else plain(d, inst)  # type: ignore[operator]

    return choose


for _name in ("st", "red"):
    DECODE_RULES[_name] = _select_async(DECODE_RULES[_name])  # type: ignore[assignment]
