"""Addresses: operands in brackets, the windows of generic addresses, and where an access lies in flat memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tessera.errors import OutOfBoundsError
from tessera.interp.target.ptx.decode import Decoder
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.lanes import Lanes
from tessera.interp.target.ptx.machine import Machine
from tessera.interp.target.ptx.memory import RANK_BITS, WINDOW_BITS, WINDOWS, alignment_fault, misaligned
from tessera.interp.target.ptx.operands import Place, constant, on_stack
from tessera.interp.target.ptx.syntax import Address, Instruction, Name, Number, Operand
from tessera.interp.target.ptx.types import TYPES

# Words that say how caches, memory order and scope treat an access: nothing that one interpreter could see.
HINTS = {
    "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "volatile", "relaxed", "acquire", "release", "acq_rel", "weak",
    "gpu", "cta", "sys", "cluster", "mmio", "unified",
}  # fmt: skip
_WORDS = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared", "local": "local",
    "param": "global", "const": "global", "param::entry": "global", "param::func": "local",
}  # fmt: skip
SPACES = set(_WORDS)
_PARAM = WINDOWS["global"]


@dataclass(frozen=True)
class Target:
    """An operand in brackets: the space it names, and what reads addresses in that space."""

    space: str
    read: Callable[[Machine, Lanes], np.ndarray]


@dataclass(frozen=True)
class Spot:
    """An access of some lanes: a space that is not generic, the byte offset of each in its flat memory."""

    space: str
    lanes: Lanes
    offset: np.ndarray


def space_of(inst: Instruction) -> str:
    """The space an instruction names first, or "generic"."""
    return next((_WORDS[w] for w in inst.op if w in _WORDS), "generic")


def known_words(d: Decoder, inst: Instruction, *more: str, types: int = 1) -> None:
    """Each word of an access must be known."""
    words = inst.op[1 : len(inst.op) - types]
    if any(w not in HINTS and w not in SPACES and w not in more and not w.startswith(("L1::", "L2::")) for w in words):
        raise d.unsupported(inst)


def target(d: Decoder, inst: Instruction, operand: Operand, space: str | None = None) -> Target:
    """An address operand of an instruction; the space is the one it names unless one is given."""
    if not isinstance(operand, Address):
        raise d.unsupported(inst)
    space = space or space_of(inst)
    offset = np.uint64(operand.offset & (1 << 64) - 1)
    if operand.base is None:
        return Target(space, constant(np.array([[offset]])))
    found = d.resolve(operand.base, inst.location)
    if isinstance(found, Place):
        # Parameters lie in global memory, at the bottom of their own space; those of an inlined call are local.
        base, space = (_PARAM, "global") if found.space == "param" else (0, found.space)
        place = np.array([[base + found.address + operand.offset]]).astype(np.uint64)
        return Target(space, on_stack(place) if space == "local" else constant(place))
    read = d.reader(Name(operand.base), TYPES["u64"])
    if "param" in inst.op or "param::entry" in inst.op:
        offset += np.uint64(_PARAM)
    if not offset:
        return Target(space, read)
    return Target(space, lambda m, lanes: read(m, lanes) + offset)


def fill(lanes: Lanes, address: np.ndarray) -> np.ndarray:
    """Addresses with those of masked lanes replaced by an active one's."""
    if lanes.mask is None:
        return address
    wide = np.broadcast_to(address, lanes.shape)
    return np.where(lanes.mask, wide, wide[lanes.mask][0])


def spots(m: Machine, lanes: Lanes, where: Target, size: int, align: int = 0) -> list[Spot]:
    """Checked places of an access of `size` bytes; the offsets broadcast to the shape of their lanes.

    A generic access may touch several spaces, and then gives several.
    """
    address = where.read(m, lanes)
    if where.space != "generic":
        return [Spot(where.space, lanes, locate(m, where.space, fill(lanes, address), lanes, size, align or size))]
    filled = fill(lanes, address)
    found = []
    for some, space in windows(filled, lanes):
        at = filled if some is lanes else fill(some, where.read(m, some))
        at = at if space == "global" else at - np.uint64(WINDOWS[space])
        found.append(Spot(space, some, locate(m, space, at, some, size, align or size)))
    return found


def windows(address: np.ndarray, lanes: Lanes) -> list[tuple[Lanes, str]]:
    """Generic addresses by the space they lie in."""
    window = address >> np.uint64(WINDOW_BITS)
    low, high = int(window.min()), int(window.max())
    names = {WINDOWS[n] >> WINDOW_BITS: n for n in ("shared", "local")}
    if low == high:
        return [(lanes, names.get(low, "global"))]
    divided = [(lanes.select(window == k), n) for k, n in names.items()]
    divided.append((lanes.select((window != 1) & (window != 2)), "global"))
    return [(some, n) for some, n in divided if some.count]


def locate(m: Machine, space: str, address: np.ndarray, lanes: Lanes, size: int, align: int) -> np.ndarray:
    """Byte offsets in a space's flat memory of addresses within the space, checked."""
    if (at := misaligned(address, align)) >= 0:
        raise alignment_fault(address, at, align, _lane(lanes, address, at))
    if space == "global":
        offset = (address - np.uint64(WINDOWS["global"])).view(np.int64)
        if (at := m.arena.check(offset, size)) >= 0:
            words = m.arena.describe(int(offset.reshape(-1)[at]))
            raise Fault(f"access of {size} bytes at {words}", OutOfBoundsError, _lane(lanes, offset, at))
        return offset
    if space == "shared":
        return _shared(m, address, lanes, size)
    offset = address.view(np.int64)
    _within(offset, size, m.program.local if m.stack is None else m.local_size, "local", lanes)
    return offset + (lanes.cta * m.threads + lanes.thread) * m.local_size


def _shared(m: Machine, address: np.ndarray, lanes: Lanes, size: int) -> np.ndarray:
    offset, cta = address.view(np.int64), lanes.cta
    if int(offset.max()) >= 1 << RANK_BITS:
        rank = (offset >> RANK_BITS) - 1
        offset = offset & ((1 << RANK_BITS) - 1)
        if int(rank.max()) >= m.row_of.shape[1]:
            raise Fault("a shared::cluster address of no CTA of the cluster", OutOfBoundsError, int(lanes.flat[0]))
        cta = np.where(rank < 0, cta, m.row_of[m.cluster[cta], rank])
    _within(offset, size, m.shared_bytes, "shared", lanes)
    return offset + cta * m.shared_size


def _within(offset: np.ndarray, size: int, limit: int, space: str, lanes: Lanes) -> None:
    if int(offset.min()) >= 0 and int(offset.max()) + size <= limit:
        return
    bad = (offset < 0) | (offset + size > limit)
    at = int(np.argmax(bad))
    words = f"byte {int(offset.reshape(-1)[at])} of {space} memory, which has {limit} bytes"
    raise Fault(f"access of {size} bytes at {words}", OutOfBoundsError, _lane(lanes, offset, at))


def _lane(lanes: Lanes, value: np.ndarray, position: int) -> int:
    """The lane that a position in a value of these lanes belongs to."""
    wide = np.zeros(value.shape, bool)
    wide.reshape(-1)[position] = True
    return int(lanes.flat[np.argmax(lanes.compress(wide))])


def number_or(operands: tuple[Operand, ...], index: int, otherwise: int) -> Operand:
    """An operand that may be left out."""
    return operands[index] if index < len(operands) else Number(otherwise)
