"""Addressing: address operands, the windows of generic addresses, and checked byte offsets in each state space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tessera.core.errors import OutOfBoundsError
from tessera.interp.target.ptx.isa.decoder import PtxDecoder
from tessera.interp.target.ptx.isa.operands import PtxVariableAddress, make_constant_reader, make_stack_relative_reader
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import (
    CTA_RANK_SHIFT,
    GENERIC_WINDOWS,
    WINDOW_BITS,
    PtxFault,
    find_misaligned,
    make_alignment_fault,
)
from tessera.interp.target.ptx.machine.simt import PtxMachine
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    AddressOperand,
    ImmediateOperand,
    NameOperand,
    PtxInstruction,
    PtxOperand,
)

# Modifiers for caches, memory order and scope: they have no effect, since memory is sequentially consistent here.
MEMORY_MODIFIERS = {
    "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "relaxed", "acquire", "release", "acq_rel", "weak",
    "gpu", "cta", "sys", "cluster", "mmio", "unified",
}  # fmt: skip
_STATE_SPACE_OF_WORD = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared", "local": "local",
    "param": "global", "const": "global", "param::entry": "global", "param::func": "local",
}  # fmt: skip
STATE_SPACE_WORDS = set(_STATE_SPACE_OF_WORD)
_PARAM = GENERIC_WINDOWS["global"]


@dataclass(frozen=True)
class AddressOperandReader:
    """An address operand: its state space, and the reader of addresses in it."""

    space: str
    read: Callable[[PtxMachine, LaneSet], np.ndarray]


@dataclass(frozen=True)
class LaneAccess:
    """An access of some lanes: a state space that is not generic, and each lane's byte offset in its flat memory."""

    space: str
    lanes: LaneSet
    offset: np.ndarray


def find_state_space(inst: PtxInstruction) -> str:
    """The first state space that an instruction names, or "generic"."""
    return next((_STATE_SPACE_OF_WORD[w] for w in inst.op if w in _STATE_SPACE_OF_WORD), "generic")


def require_known_modifiers(d: PtxDecoder, inst: PtxInstruction, *more: str, types: int = 1) -> None:
    """Every modifier of a memory access must be known."""
    words = inst.op[1 : len(inst.op) - types]
    if any(
        w not in MEMORY_MODIFIERS
        and w not in STATE_SPACE_WORDS
        and w not in more
        and not w.startswith(("L1::", "L2::"))
        for w in words
    ):
        raise d.unsupported(inst)


def decode_address(
    d: PtxDecoder, inst: PtxInstruction, operand: PtxOperand, space: str | None = None
) -> AddressOperandReader:
    """The reader of an address operand; the state space is the instruction's unless given."""
    if not isinstance(operand, AddressOperand):
        raise d.unsupported(inst)
    space = space or find_state_space(inst)
    offset = np.uint64(operand.offset & (1 << 64) - 1)
    if operand.base is None:
        return AddressOperandReader(space, make_constant_reader(np.array([[offset]])))
    result = d.resolve(operand.base, inst.location)
    if isinstance(result, PtxVariableAddress):
        # An entry's parameters are in global memory, at the start of their own space; those of an inlined call are
        # local.
        base, space = (_PARAM, "global") if result.space == "param" else (0, result.space)
        place = np.array([[base + result.address + operand.offset]]).astype(np.uint64)
        return AddressOperandReader(
            space, make_stack_relative_reader(place) if space == "local" else make_constant_reader(place)
        )
    read = d.reader(NameOperand(operand.base), TYPES["u64"])
    if "param" in inst.op or "param::entry" in inst.op:
        offset += np.uint64(_PARAM)
    if not offset:
        return AddressOperandReader(space, read)
    return AddressOperandReader(space, lambda m, lanes: read(m, lanes) + offset)


def fill_masked_lanes(lanes: LaneSet, address: np.ndarray) -> np.ndarray:
    """Addresses in which masked lanes have the address of an active lane."""
    if lanes.mask is None:
        return address
    wide = np.broadcast_to(address, lanes.shape)
    return np.where(lanes.mask, wide, wide[lanes.mask][0])


def resolve_accesses(
    m: PtxMachine, lanes: LaneSet, where: AddressOperandReader, size: int, align: int = 0
) -> list[LaneAccess]:
    """The checked accesses of `size` bytes; the offsets broadcast to the shape of their lanes.

    A generic access may be several, one for each state space.
    """
    result = _split_accesses(m, lanes, where, size, align or size)
    if m.observer is not None:
        for access in result:
            m.observer.access(m, access.space, access.lanes, access.offset, size)
    return result


def _split_accesses(
    m: PtxMachine, lanes: LaneSet, where: AddressOperandReader, size: int, align: int
) -> list[LaneAccess]:
    address = where.read(m, lanes)
    if where.space != "generic":
        filled = fill_masked_lanes(lanes, address)
        return [LaneAccess(where.space, lanes, check_address(m, where.space, filled, lanes, size, align))]
    filled = fill_masked_lanes(lanes, address)
    result = []
    for subset, space in split_by_state_space(filled, lanes):
        position = filled if subset is lanes else fill_masked_lanes(subset, where.read(m, subset))
        position = position if space == "global" else position - np.uint64(GENERIC_WINDOWS[space])
        result.append(LaneAccess(space, subset, check_address(m, space, position, subset, size, align)))
    return result


def split_by_state_space(address: np.ndarray, lanes: LaneSet) -> list[tuple[LaneSet, str]]:
    """Generic addresses by state space."""
    window = address >> np.uint64(WINDOW_BITS)
    low, high = int(window.min()), int(window.max())
    names = {GENERIC_WINDOWS[n] >> WINDOW_BITS: n for n in ("shared", "local")}
    if low == high:
        return [(lanes, names.get(low, "global"))]
    divided = [(lanes.select(window == k), n) for k, n in names.items()]
    divided.append((lanes.select((window != 1) & (window != 2)), "global"))
    return [(subset, n) for subset, n in divided if subset.count]


def check_address(m: PtxMachine, space: str, address: np.ndarray, lanes: LaneSet, size: int, align: int) -> np.ndarray:
    """The byte offsets in a state space's flat memory of addresses in that space, checked."""
    if (position := find_misaligned(address, align)) >= 0:
        raise make_alignment_fault(address, position, align, _find_lane_at(lanes, address, position))
    if space == "global":
        offset = (address - np.uint64(GENERIC_WINDOWS["global"])).view(np.int64)
        if (position := m.arena.find_out_of_bounds(offset, size)) >= 0:
            if (translated := m.arena.translate(address, size)) is not None:
                return translated
            words = m.arena.describe(int(offset.reshape(-1)[position]))
            raise PtxFault(
                f"access of {size} bytes at {words}", OutOfBoundsError, _find_lane_at(lanes, offset, position)
            )
        return offset
    if space == "shared":
        return _check_shared_address(m, address, lanes, size)
    offset = address.view(np.int64)
    _check_bounds(offset, size, m.program.local if m.stack is None else m.local_size, "local", lanes)
    return offset + (lanes.cta * m.threads + lanes.thread) * m.local_size


def _check_shared_address(m: PtxMachine, address: np.ndarray, lanes: LaneSet, size: int) -> np.ndarray:
    offset, cta = address.view(np.int64), lanes.cta
    if int(offset.max()) >= 1 << CTA_RANK_SHIFT:
        rank = (offset >> CTA_RANK_SHIFT) - 1
        offset = offset & ((1 << CTA_RANK_SHIFT) - 1)
        if int(rank.max()) >= m.cta_of_rank.shape[1]:
            raise PtxFault("a shared::cluster address is outside the cluster", OutOfBoundsError, int(lanes.flat[0]))
        cta = np.where(rank < 0, cta, m.cta_of_rank[m.cluster[cta], rank])
    _check_bounds(offset, size, m.shared_bytes, "shared", lanes)
    return offset + cta * m.shared_size


def _check_bounds(offset: np.ndarray, size: int, limit: int, space: str, lanes: LaneSet) -> None:
    if int(offset.min()) >= 0 and int(offset.max()) + size <= limit:
        return
    bad = (offset < 0) | (offset + size > limit)
    position = int(np.argmax(bad))
    words = f"byte {int(offset.reshape(-1)[position])} of {space} memory, which has {limit} bytes"
    raise PtxFault(f"access of {size} bytes at {words}", OutOfBoundsError, _find_lane_at(lanes, offset, position))


def _find_lane_at(lanes: LaneSet, value: np.ndarray, position: int) -> int:
    """The lane of a position in a value of these lanes."""
    wide = np.zeros(value.shape, bool)
    wide.reshape(-1)[position] = True
    return int(lanes.flat[np.argmax(lanes.compress(wide))])


def get_operand_or_default(operands: tuple[PtxOperand, ...], index: int, default: int) -> PtxOperand:
    """An optional operand."""
    return operands[index] if index < len(operands) else ImmediateOperand(default)
