"""Memory operations: load, store, alloca, atomics, masked accesses, memory intrinsics, and hints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd

import numpy as np

from tessera.core.errors import UnsupportedOpError
from tessera.interp.target.llvm.arithmetic import BinaryFunction, as_unsigned, get_float_function, get_integer_function
from tessera.interp.target.llvm.control_flow import LlvmFrame, RegisterStep
from tessera.interp.target.llvm.lanes import LaneFault, RegisterValue, broadcast_lanes, copy_broadcast
from tessera.interp.target.llvm.memory import MemoryFormat, SegmentedMemory, get_memory_format
from tessera.interp.target.llvm.scalar_intrinsics import get_float_math
from tessera.interp.target.llvm.text.syntax import (
    LlvmAggregate,
    LlvmFloat,
    LlvmInstruction,
    LlvmInt,
    LlvmType,
    NumberConstant,
)

# Memory instructions.


# build(instruction, operand registers, result register) gives the step that executes it.
BuildStep = Callable[[LlvmInstruction, tuple[int, ...], int], RegisterStep]


def _build_load(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    (pointer,), type = args, i.source
    align = i.align or type.align
    if isinstance(type, LlvmAggregate):
        return lambda f: f.active.__setitem__(out, _load_members(f.memory, f.active[pointer], type, align))
    kind = get_memory_format(type, align)

    def step(f: LlvmFrame) -> None:
        f.active[out] = f.memory.load(f.active[pointer], kind)

    return step


def _load_members(memory: SegmentedMemory, address: np.ndarray, type: LlvmType, align: int) -> RegisterValue:
    """A scalar or vector in one load, an aggregate member by member."""
    if not isinstance(type, LlvmAggregate):
        return memory.load(address, get_memory_format(type, align))
    return tuple(_load_members(memory, address + at, part, gcd(align, at)) for at, part in type.parts)


def _build_store(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    (value, pointer), type = args, i.source
    align = i.align or type.align
    if isinstance(type, LlvmAggregate):
        return lambda f: _store_members(f.memory, f.active[pointer], f.active[value], type, align)
    kind = get_memory_format(type, align)

    def step(f: LlvmFrame) -> None:
        f.memory.store(f.active[pointer], f.active[value], kind)

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
        count = int(f.active[args[0]].max()) if args else 1
        address = f.memory.allocate(name, size * count, align, f.active_count)
        f.allocated.append(int(address[0]))
        f.active[out] = address

    return step


def _split_conflicting_lanes(address: np.ndarray) -> Iterator[np.ndarray]:
    """Sets of lanes with distinct addresses: lanes with one address are in successive sets, in lane order."""
    order = np.argsort(address, kind="stable")
    ordered = address[order]
    first = np.r_[True, ordered[1:] != ordered[:-1]]
    starts = np.flatnonzero(first)
    rounds = np.arange(len(address)) - np.repeat(starts, np.diff(np.r_[starts, len(address)]))
    for number in range(int(rounds.max()) + 1):
        yield order[rounds == number]


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
    """The new value of an atomicrmw, from the old value and the operand."""
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
    result = get_float_math(_FLOAT_WORDS.get(word, ""), type)
    if result is None:
        raise UnsupportedOpError(f"atomicrmw {word} is not supported")
    return result


def _update_serially(f: LlvmFrame, pointer: np.ndarray, kind: MemoryFormat, update: Callable) -> np.ndarray:
    """Update memory lane by lane; the old values. `update` maps old values and lanes to new values."""
    address = broadcast_lanes(pointer, f.active_count)
    old = np.array(
        broadcast_lanes(f.memory.load(address, kind, "atomic update"), f.active_count)
    )  # checks all addresses first
    for lanes in _split_conflicting_lanes(address):
        old[lanes] = current = f.memory.load(address[lanes], kind, "atomic update")
        f.memory.store(address[lanes], update(current, lanes), kind, "atomic update")
    return old


def _build_atomicrmw(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    (pointer, operand), kind = args, get_memory_format(i.type, i.align)
    update = _find_atomic_function(i.word, i.type)

    def step(f: LlvmFrame) -> None:
        operands = broadcast_lanes(f.active[operand], f.active_count)
        f.active[out] = _update_serially(
            f, f.active[pointer], kind, lambda current, lanes: update(current, operands[lanes])
        )

    return step


def _build_cmpxchg(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    (pointer, expected, new), kind = args, get_memory_format(i.operands[1].type, i.align)

    def step(f: LlvmFrame) -> None:
        expected_value, desired = (broadcast_lanes(f.active[register], f.active_count) for register in (expected, new))
        old = _update_serially(
            f,
            f.active[pointer],
            kind,
            lambda current, at: np.where(current == expected_value[at], desired[at], current),
        )
        f.active[out] = (old, old == expected_value)

    return step


MEMORY_INSTRUCTIONS: dict[str, BuildStep] = {
    "load": _build_load,
    "store": _build_store,
    "alloca": _build_alloca,
    "atomicrmw": _build_atomicrmw,
    "cmpxchg": _build_cmpxchg,
    "fence": lambda i, args, out: lambda f: None,
}


# Memory intrinsics and hints.


_BYTE = np.dtype(np.uint8)


def _split_alignment(i: LlvmInstruction, args: tuple[int, ...], pointer: int) -> tuple[int, tuple[int, ...]]:
    """The alignment, which was an argument before LLVM 22, and the other arguments."""
    at = pointer + 1
    operand = i.operands[at]
    if isinstance(operand, NumberConstant) and isinstance(operand.type, LlvmInt):
        return int(operand.value), args[:at] + args[at + 1 :]
    return i.aligns[pointer] or 1, args


def _spread_addresses(pointer: np.ndarray, mask: np.ndarray, element: LlvmType) -> tuple[np.ndarray, np.ndarray]:
    """The address and mask of every element, for all lanes."""
    count = mask.shape[1]
    if pointer.ndim == 1:
        pointer = pointer[:, None] + np.arange(count) * element.size
    shape = (max(len(pointer), len(mask)), count)
    return np.broadcast_to(pointer, shape), np.broadcast_to(mask, shape)


def _access_masked(
    memory: SegmentedMemory, where: np.ndarray, mask: np.ndarray, kind: MemoryFormat, value: np.ndarray | None
) -> np.ndarray:
    """Load or store the elements that the mask selects; a fault names the lane, not the element."""
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
    """Build llvm.masked.load or llvm.masked.gather."""
    align, (pointer, mask_register, other) = _split_alignment(i, args, 0)
    element, kind = i.type.scalar, _get_element_format(i.type.scalar, align)
    whole = get_memory_format(i.type, align)

    def step(f: LlvmFrame) -> None:
        address, mask = f.active[pointer], f.active[mask_register]
        if address.ndim == 1 and np.count_nonzero(mask) == mask.size:
            f.active[out] = f.memory.load(address, whole)
            return
        where, mask = _spread_addresses(address, mask, element)
        rest = f.active[other]
        result = copy_broadcast(rest, (max(len(where), len(rest)), where.shape[1]))
        where, mask = (x if x.shape == result.shape else np.broadcast_to(x, result.shape) for x in (where, mask))
        if np.count_nonzero(mask):
            result[mask] = _access_masked(f.memory, where, mask, kind, None)
        f.active[out] = result

    return step


def _build_masked_store(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    """Build llvm.masked.store or llvm.masked.scatter."""
    align, (value, pointer, mask_register) = _split_alignment(i, args, 1)
    type = i.operands[0].type
    element, kind = type.scalar, _get_element_format(type.scalar, align)
    whole = get_memory_format(type, align)

    def step(f: LlvmFrame) -> None:
        data, address, mask = f.active[value], f.active[pointer], f.active[mask_register]
        if address.ndim == 1 and np.count_nonzero(mask) == mask.size:
            f.memory.store(address, data, whole)
            return
        where, mask = _spread_addresses(address, mask, element)
        shape = (max(len(where), len(data)), where.shape[1])
        where, mask, data = (x if x.shape == shape else np.broadcast_to(x, shape) for x in (where, mask, data))
        if np.count_nonzero(mask):
            _access_masked(f.memory, where, mask, kind, data)

    return step


def _make_byte_format(size: int) -> MemoryFormat:
    return MemoryFormat(_BYTE, size, True, size, 1)


def _group_lanes_by_size(size: np.ndarray, lanes: int) -> list[tuple[int, slice | int]]:
    """The sizes of a copy, each with its lanes; one group if all are equal."""
    if (size == size[0]).all():
        return [(int(size[0]), slice(None))]
    return [(int(n), lane) for lane, n in enumerate(broadcast_lanes(size, lanes))]


def _select_rows(x: np.ndarray, lanes: slice | int, total: int) -> np.ndarray:
    """The value of some lanes, with a lane axis."""
    return x if isinstance(lanes, slice) else broadcast_lanes(x, total)[lanes : lanes + 1]


def _build_memcpy(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    """Build llvm.memcpy or llvm.memmove: everything is read before anything is written."""
    target, source, size = args[:3]

    def step(f: LlvmFrame) -> None:
        for count, lanes in _group_lanes_by_size(f.active[size], f.active_count):
            if count:
                kind = _make_byte_format(count)
                data = f.memory.load(_select_rows(f.active[source], lanes, f.active_count), kind, "memcpy load")
                f.memory.store(_select_rows(f.active[target], lanes, f.active_count), data, kind, "memcpy store")

    return step


def _build_memset(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    """Build llvm.memset."""
    target, byte, size = args[:3]

    def step(f: LlvmFrame) -> None:
        for count, lanes in _group_lanes_by_size(f.active[size], f.active_count):
            if count:
                value = _select_rows(f.active[byte], lanes, f.active_count).view(np.uint8)
                row = np.broadcast_to(value[:, None], (len(value), count))
                f.memory.store(
                    _select_rows(f.active[target], lanes, f.active_count), row, _make_byte_format(count), "memset store"
                )

    return step


def _build_assume(i: LlvmInstruction, args: tuple[int, ...], out: int) -> RegisterStep:
    def step(f: LlvmFrame) -> None:
        if not f.active[args[0]].all():
            raise LaneFault("the condition of llvm.assume is false", lane=int(np.argmin(f.active[args[0]])))

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
