"""Memory operations: load, store, alloca, atomics, masked accesses, copies, and intrinsics that are hints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

import numpy as np

from tessera.core.errors import UnsupportedOpError
from tessera.interp.target.llvm.arithmetic import BinaryFunction, as_unsigned, get_float_function, get_integer_function
from tessera.interp.target.llvm.control_flow import LlvmFrame, RegisterStep
from tessera.interp.target.llvm.lanes import LaneFault, RegisterValue, broadcast_lanes
from tessera.interp.target.llvm.memory import MemoryFormat, SegmentedMemory, get_memory_format
from tessera.interp.target.llvm.scalar_intrinsics import get_float_math
from tessera.interp.target.llvm.text.syntax import LlvmInstruction, NumberConstant
from tessera.interp.target.llvm.text.types import LlvmAggregate, LlvmFloat, LlvmInt, LlvmType

# Instructions that touch memory: load, store, alloca and the atomics.


# From an instruction, the registers of its operands and of its result, to what it does.
BuildStep = Callable[[LlvmInstruction, tuple[int, ...], int], RegisterStep]


def _build_load(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    (pointer,), type = args, i.source
    align = i.align or type.align
    if isinstance(type, LlvmAggregate):
        return lambda f: f.w.__setitem__(out, _load_members(f.memory, f.w[pointer], type, align))
    kind = get_memory_format(type, align)

    def step(f: LlvmFrame) -> None:
        f.w[out] = f.memory.load(f.w[pointer], kind)

    return step


def _load_members(memory: SegmentedMemory, address: np.ndarray, type: LlvmType, align: int) -> RegisterValue:
    """A scalar or vector at once, an aggregate member by member."""
    if not isinstance(type, LlvmAggregate):
        return memory.load(address, get_memory_format(type, align))
    return tuple(_load_members(memory, address + at, part, gcd(align, at)) for at, part in type.parts)


def _build_store(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    (value, pointer), type = args, i.source
    align = i.align or type.align
    if isinstance(type, LlvmAggregate):
        return lambda f: _store_members(f.memory, f.w[pointer], f.w[value], type, align)
    kind = get_memory_format(type, align)

    def step(f: LlvmFrame) -> None:
        f.memory.store(f.w[pointer], f.w[value], kind)

    return step


def _store_members(
    memory: SegmentedMemory, address: np.ndarray, value: RegisterValue, type: LlvmType, align: int
) -> None:
    if not isinstance(type, LlvmAggregate):
        memory.store(address, np.asarray(value), get_memory_format(type, align))
        return
    for (at, part), member in zip(type.parts, value, strict=True):
        _store_members(memory, address + at, member, part, gcd(align, at))


def _build_alloca(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    name, size, align = f"alloca %{i.result}", i.source.stride, i.align or i.source.align

    def step(f: LlvmFrame) -> None:
        count = int(f.w[args[0]].max()) if args else 1
        address = f.memory.allocate(name, size * count, align, f.n)
        f.allocated.append(int(address[0]))
        f.w[out] = address

    return step


def _split_conflicting_lanes(address: np.ndarray) -> Iterator[np.ndarray]:
    """Sets of lanes with different addresses: those that share one take turns, in order."""
    order = np.argsort(address, kind="stable")
    ordered = address[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    starts = np.flatnonzero(first)
    turn = np.arange(len(address)) - np.repeat(starts, np.diff(np.r_[starts, len(address)]))
    for number in range(int(turn.max()) + 1):
        yield order[turn == number]


def _increment_wrapping(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, np.zeros_like(old), old + old.dtype.type(1))


def _decrement_wrapping(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


_FLOAT_WORDS = {"fmax": "maxnum", "fmin": "minnum", "fmaximum": "maximum", "fminimum": "minimum"}
_SIGNED_WORDS: dict[str, BinaryFunction] = {"max": np.maximum, "min": np.minimum, "nand": lambda a, b: ~(a & b)}
_UNSIGNED_WORDS: dict[str, BinaryFunction] = {
    "umax": np.maximum,
    "umin": np.minimum,
    "uinc_wrap": _increment_wrapping,
    "udec_wrap": _decrement_wrapping,
}


def _find_atomic_function(word: str, type: LlvmType) -> BinaryFunction:
    """What an atomicrmw makes of the old value and its operand."""
    if word == "xchg":
        return lambda old, new: new
    if word in _SIGNED_WORDS:
        return _SIGNED_WORDS[word]
    if word in _UNSIGNED_WORDS:
        return as_unsigned(_UNSIGNED_WORDS[word], type)
    if word in ("add", "sub", "and", "or", "xor"):
        return get_integer_function(word, type)
    if word in ("fadd", "fsub") and isinstance(type, LlvmFloat):
        return get_float_function(word, type)
    found = get_float_math(_FLOAT_WORDS.get(word, ""), type)
    if found is None:
        raise UnsupportedOpError(f"atomicrmw {word} is not supported")
    return found


def _update_serially(f: LlvmFrame, pointer: np.ndarray, kind: MemoryFormat, change: Callable) -> np.ndarray:
    """Change memory lane after lane; the old values. `change` maps old values and lanes to new values."""
    address = broadcast_lanes(pointer, f.n)
    old = np.array(broadcast_lanes(f.memory.load(address, kind, "atomic update"), f.n))  # checks all lanes beforehand
    for lanes in _split_conflicting_lanes(address):
        old[lanes] = now = f.memory.load(address[lanes], kind, "atomic update")
        f.memory.store(address[lanes], change(now, lanes), kind, "atomic update")
    return old


def _build_atomicrmw(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    (pointer, operand), kind = args, get_memory_format(i.type, i.align)
    change = _find_atomic_function(i.word, i.type)

    def step(f: LlvmFrame) -> None:
        by = broadcast_lanes(f.w[operand], f.n)
        f.w[out] = _update_serially(f, f.w[pointer], kind, lambda now, lanes: change(now, by[lanes]))

    return step


def _build_cmpxchg(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    (pointer, expected, new), kind = args, get_memory_format(i.operands[1].type, i.align)

    def step(f: LlvmFrame) -> None:
        want, put = (broadcast_lanes(f.w[register], f.n) for register in (expected, new))
        old = _update_serially(f, f.w[pointer], kind, lambda now, at: np.where(now == want[at], put[at], now))
        f.w[out] = (old, old == want)

    return step


MEMORY_INSTRUCTIONS: dict[str, BuildStep] = {
    "load": _build_load,
    "store": _build_store,
    "alloca": _build_alloca,
    "atomicrmw": _build_atomicrmw,
    "cmpxchg": _build_cmpxchg,
    "fence": lambda i, args, out: lambda f: None,
}


# Intrinsics that touch memory or say something about it: masked accesses, copies, hints.


_BYTE = np.dtype(np.uint8)


def _split_alignment(i: LlvmInstruction, args: tuple[int, ...], pointer: int) -> tuple[int, tuple[int, ...]]:
    """The alignment, an argument of its own before LLVM 22, and the other arguments."""
    at = pointer + 1
    operand = i.operands[at]
    if isinstance(operand, NumberConstant) and isinstance(operand.type, LlvmInt):
        return int(operand.value), args[:at] + args[at + 1 :]
    return i.aligns[pointer] or 1, args


def _spread_addresses(pointer: np.ndarray, mask: np.ndarray, element: LlvmType) -> tuple[np.ndarray, np.ndarray]:
    """The address of every element and whether it takes part, for all lanes."""
    count = mask.shape[1]
    if pointer.ndim == 1:
        pointer = pointer[:, None] + np.arange(count) * element.size
    shape = (max(len(pointer), len(mask)), count)
    return np.broadcast_to(pointer, shape), np.broadcast_to(mask, shape)


def _access_masked(
    memory: SegmentedMemory, where: np.ndarray, mask: np.ndarray, kind: MemoryFormat, value: np.ndarray | None
) -> np.ndarray:
    """Load or store the elements that take part; a fault names the lane, not the element."""
    try:
        if value is None:
            return memory.load(where[mask], kind, "masked load")
        memory.store(where[mask], value[mask], kind, "masked store")
        return value
    except LaneFault as fault:
        fault.lane = int(np.nonzero(mask)[0][fault.lane or 0])
        raise


def _get_element_format(type: LlvmType, align: int) -> MemoryFormat:
    return get_memory_format(type, min(align, type.align))


def _build_masked_load(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    """llvm.masked.load, llvm.masked.gather"""
    align, (pointer, chosen, other) = _split_alignment(i, args, 0)
    element, kind = i.type.scalar, _get_element_format(i.type.scalar, align)
    whole = get_memory_format(i.type, align)

    def step(f: LlvmFrame) -> None:
        address, mask = f.w[pointer], f.w[chosen]
        if address.ndim == 1 and mask.all():
            f.w[out] = f.memory.load(address, whole)
            return
        where, mask = _spread_addresses(address, mask, element)
        rest = f.w[other]
        result = np.array(np.broadcast_to(rest, (max(len(where), len(rest)), where.shape[1])))
        where, mask = (np.broadcast_to(x, result.shape) for x in (where, mask))
        if mask.any():
            result[mask] = _access_masked(f.memory, where, mask, kind, None)
        f.w[out] = result

    return step


def _build_masked_store(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    """llvm.masked.store, llvm.masked.scatter"""
    align, (value, pointer, chosen) = _split_alignment(i, args, 1)
    type = i.operands[0].type
    element, kind = type.scalar, _get_element_format(type.scalar, align)
    whole = get_memory_format(type, align)

    def step(f: LlvmFrame) -> None:
        data, address, mask = f.w[value], f.w[pointer], f.w[chosen]
        if address.ndim == 1 and mask.all():
            f.memory.store(address, data, whole)
            return
        where, mask = _spread_addresses(address, mask, element)
        shape = (max(len(where), len(data)), where.shape[1])
        where, mask, data = (np.broadcast_to(x, shape) for x in (where, mask, data))
        if mask.any():
            _access_masked(f.memory, where, mask, kind, data)

    return step


def _make_byte_format(size: int) -> MemoryFormat:
    return MemoryFormat(_BYTE, size, True, size, 1)


def _group_lanes_by_size(size: np.ndarray, lanes: int) -> list[tuple[int, slice | int]]:
    """The sizes of a copy and the lanes that have each: mostly one for all."""
    if (size == size[0]).all():
        return [(int(size[0]), slice(None))]
    return [(int(n), lane) for lane, n in enumerate(broadcast_lanes(size, lanes))]


def _select_rows(x: np.ndarray, lanes: slice | int, total: int) -> np.ndarray:
    """The value of some lanes, still with a lane axis."""
    return x if isinstance(lanes, slice) else broadcast_lanes(x, total)[lanes : lanes + 1]


def _build_memcpy(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    """llvm.memcpy, llvm.memmove: all is read before anything is written."""
    target, source, size = args[:3]

    def step(f: LlvmFrame) -> None:
        for count, lanes in _group_lanes_by_size(f.w[size], f.n):
            if count:
                kind = _make_byte_format(count)
                data = f.memory.load(_select_rows(f.w[source], lanes, f.n), kind, "memcpy load")
                f.memory.store(_select_rows(f.w[target], lanes, f.n), data, kind, "memcpy store")

    return step


def _build_memset(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    """llvm.memset"""
    target, byte, size = args[:3]

    def step(f: LlvmFrame) -> None:
        for count, lanes in _group_lanes_by_size(f.w[size], f.n):
            if count:
                value = _select_rows(f.w[byte], lanes, f.n).view(np.uint8)
                row = np.broadcast_to(value[:, None], (len(value), count))
                f.memory.store(_select_rows(f.w[target], lanes, f.n), row, _make_byte_format(count), "memset store")

    return step


def _build_assume(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    def step(f: LlvmFrame) -> None:
        if not f.w[args[0]].all():
            raise LaneFault("llvm.assume of what is false", lane=int(np.argmin(f.w[args[0]])))

    return step


def _build_trap(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    def step(f: LlvmFrame) -> None:
        raise LaneFault(f"reached {i.word}")

    return step


def _build_no_op(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    return lambda f: None


_HINT_NAMES = (
    "lifetime.start lifetime.end prefetch experimental.noalias.scope.decl donothing sideeffect "
    "dbg.value dbg.declare dbg.label dbg.assign invariant.end pseudoprobe"
).split()

MEMORY_INTRINSICS: dict[str, BuildStep] = {
    **dict.fromkeys(_HINT_NAMES, _build_no_op),
    **dict.fromkeys(("masked.load", "masked.gather"), _build_masked_load),
    **dict.fromkeys(("masked.store", "masked.scatter"), _build_masked_store),
    **dict.fromkeys(("memcpy", "memmove", "memcpy.inline"), _build_memcpy),
    **dict.fromkeys(("memset", "memset.inline"), _build_memset),
    **dict.fromkeys(("trap", "ubsantrap", "debugtrap"), _build_trap),
    "assume": _build_assume,
}
