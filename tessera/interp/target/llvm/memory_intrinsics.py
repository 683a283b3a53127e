"""Intrinsics that touch memory or say something about it: masked accesses, copies, hints."""

from __future__ import annotations

import numpy as np

from tessera.interp.target.llvm.access import Access, access
from tessera.interp.target.llvm.effects import Build
from tessera.interp.target.llvm.fault import Fault
from tessera.interp.target.llvm.frame import Frame, Step
from tessera.interp.target.llvm.lanes import widen
from tessera.interp.target.llvm.memory import Memory
from tessera.interp.target.llvm.syntax import Instruction, Number
from tessera.interp.target.llvm.types import Int, Type

_BYTE = np.dtype(np.uint8)


def _split_align(i: Instruction, args: tuple[int, ...], pointer: int) -> tuple[int, tuple[int, ...]]:
    """The alignment, an argument of its own before LLVM 22, and the other arguments."""
    at = pointer + 1
    operand = i.operands[at]
    if isinstance(operand, Number) and isinstance(operand.type, Int):
        return int(operand.value), args[:at] + args[at + 1 :]
    return i.aligns[pointer] or 1, args


def _grid(pointer: np.ndarray, mask: np.ndarray, element: Type) -> tuple[np.ndarray, np.ndarray]:
    """The address of every element and whether it takes part, for all lanes."""
    count = mask.shape[1]
    if pointer.ndim == 1:
        pointer = pointer[:, None] + np.arange(count) * element.size
    shape = (max(len(pointer), len(mask)), count)
    return np.broadcast_to(pointer, shape), np.broadcast_to(mask, shape)


def _masked(memory: Memory, where: np.ndarray, mask: np.ndarray, kind: Access, value: np.ndarray | None) -> np.ndarray:
    """Load or store the elements that take part; a fault names the lane, not the element."""
    try:
        if value is None:
            return memory.load(where[mask], kind, "masked load")
        memory.store(where[mask], value[mask], kind, "masked store")
        return value
    except Fault as fault:
        fault.lane = int(np.nonzero(mask)[0][fault.lane or 0])
        raise


def _element(type: Type, align: int) -> Access:
    return access(type, min(align, type.align))


def _load(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    """llvm.masked.load, llvm.masked.gather"""
    align, (pointer, chosen, other) = _split_align(i, args, 0)
    element, kind = i.type.scalar, _element(i.type.scalar, align)
    whole = access(i.type, align)

    def step(f: Frame) -> None:
        address, mask = f.w[pointer], f.w[chosen]
        if address.ndim == 1 and mask.all():
            f.w[out] = f.memory.load(address, whole)
            return
        where, mask = _grid(address, mask, element)
        rest = f.w[other]
        result = np.array(np.broadcast_to(rest, (max(len(where), len(rest)), where.shape[1])))
        where, mask = (np.broadcast_to(x, result.shape) for x in (where, mask))
        if mask.any():
            result[mask] = _masked(f.memory, where, mask, kind, None)
        f.w[out] = result

    return step


def _store(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    """llvm.masked.store, llvm.masked.scatter"""
    align, (value, pointer, chosen) = _split_align(i, args, 1)
    type = i.operands[0].type
    element, kind = type.scalar, _element(type.scalar, align)
    whole = access(type, align)

    def step(f: Frame) -> None:
        data, address, mask = f.w[value], f.w[pointer], f.w[chosen]
        if address.ndim == 1 and mask.all():
            f.memory.store(address, data, whole)
            return
        where, mask = _grid(address, mask, element)
        shape = (max(len(where), len(data)), where.shape[1])
        where, mask, data = (np.broadcast_to(x, shape) for x in (where, mask, data))
        if mask.any():
            _masked(f.memory, where, mask, kind, data)

    return step


def _bytes(size: int) -> Access:
    return Access(_BYTE, size, True, size, 1)


def _by_size(size: np.ndarray, lanes: int) -> list[tuple[int, slice | int]]:
    """The sizes of a copy and the lanes that have each: mostly one for all."""
    if (size == size[0]).all():
        return [(int(size[0]), slice(None))]
    return [(int(n), lane) for lane, n in enumerate(widen(size, lanes))]


def _rows(x: np.ndarray, lanes: slice | int, total: int) -> np.ndarray:
    """The value of some lanes, still with a lane axis."""
    return x if isinstance(lanes, slice) else widen(x, total)[lanes : lanes + 1]


def _copy(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    """llvm.memcpy, llvm.memmove: all is read before anything is written."""
    target, source, size = args[:3]

    def step(f: Frame) -> None:
        for count, lanes in _by_size(f.w[size], f.n):
            if count:
                kind = _bytes(count)
                data = f.memory.load(_rows(f.w[source], lanes, f.n), kind, "memcpy load")
                f.memory.store(_rows(f.w[target], lanes, f.n), data, kind, "memcpy store")

    return step


def _fill(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    """llvm.memset"""
    target, byte, size = args[:3]

    def step(f: Frame) -> None:
        for count, lanes in _by_size(f.w[size], f.n):
            if count:
                value = _rows(f.w[byte], lanes, f.n).view(np.uint8)
                row = np.broadcast_to(value[:, None], (len(value), count))
                f.memory.store(_rows(f.w[target], lanes, f.n), row, _bytes(count), "memset store")

    return step


def _assume(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    def step(f: Frame) -> None:
        if not f.w[args[0]].all():
            raise Fault("llvm.assume of what is false", lane=int(np.argmin(f.w[args[0]])))

    return step


def _trap(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    def step(f: Frame) -> None:
        raise Fault(f"reached {i.word}")

    return step


def _nothing(i: Instruction, args: tuple[int, ...], out: int) -> Step:
    return lambda f: None


_HINTS = (
    "lifetime.start lifetime.end prefetch experimental.noalias.scope.decl donothing sideeffect "
    "dbg.value dbg.declare dbg.label dbg.assign invariant.end pseudoprobe"
).split()

TABLE: dict[str, Build] = {
    **dict.fromkeys(_HINTS, _nothing),
    **dict.fromkeys(("masked.load", "masked.gather"), _load),
    **dict.fromkeys(("masked.store", "masked.scatter"), _store),
    **dict.fromkeys(("memcpy", "memmove", "memcpy.inline"), _copy),
    **dict.fromkeys(("memset", "memset.inline"), _fill),
    **dict.fromkeys(("trap", "ubsantrap", "debugtrap"), _trap),
    "assume": _assume,
}
