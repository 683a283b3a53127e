"""Atomic operations (atom, red, multimem): conflicting lanes are serialised in lane order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.interp.target.ptx.isa.addressing import (
    AddressOperandReader,
    decode_address,
    find_state_space,
    require_known_modifiers,
    resolve_accesses,
)
from tessera.interp.target.ptx.isa.data_movement import record_access
from tessera.interp.target.ptx.isa.decoder import DECODE_RULES, PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.floating_point import flush_subnormals
from tessera.interp.target.ptx.isa.operands import Reader, Writer, get_vector_parts
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    NameOperand,
    PtxInstruction,
    PtxOperand,
    PtxType,
    bits_to_values,
    values_to_bits,
)

Update = Callable[..., Any]
_ASSOCIATIVE: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_ASSOCIATIVE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_ZERO, _ONE = np.uint32(0), np.uint32(1)
_OTHER: dict[str, Update] = {
    "exch": lambda old, b: b,
    "cas": lambda old, b, c: np.where(old == b, c, old),
    "inc": lambda old, b: np.where(old >= b, _ZERO, old + _ONE),
    "dec": lambda old, b: np.where((old == _ZERO) | (old > b), b, old - _ONE),
}


@decode_rule("atom", "red")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """Lanes update in lane order here; on hardware the order is unspecified."""
    if inst.op[1] == "async":
        raise d.unsupported(inst)
    type = next((w for w in inst.op[1:] if w in TYPES), "")  # in vector forms the type precedes the operation
    inst = replace(inst, op=(*(w for w in inst.op if w != type), type))
    t = TYPES[type]
    words = [w for w in inst.op[1:-1] if w in _ASSOCIATIVE or w in _OTHER]
    require_known_modifiers(d, inst, "noftz", "v2", "v4", "v8", *words)
    (name,) = words
    returns = inst.op[0] == "atom"
    where = decode_address(d, inst, inst.operands[returns])
    sources = inst.operands[returns + 1 : len(inst.operands) - ("L2::cache_hint" in inst.op)]
    if len(sources) != (2 if name == "cas" else 1):
        raise d.unsupported(inst)
    if t.bits > 64:
        return _exchange_128_bits(d, inst, where, name, sources)
    vector = [get_vector_parts(o) for o in sources]
    readers = [[d.reader(p, t) for p in parts] for parts in zip(*vector, strict=True)]
    results = get_vector_parts(inst.operands[0]) if returns else (NameOperand("_"),) * len(readers)
    writers = [d.writer(r, t) for r in results]
    return _make_atomic_step(where, name, t, readers, writers, returns)


def _make_atomic_step(
    where: Any, name: str, t: PtxType, readers: list[list[Reader]], writers: list[Writer], returns: bool
) -> LaneStep:
    size, kind = t.bits // 8, "atomic" if returns else "write"

    def update(m: PtxMachine, lanes: LaneSet) -> None:
        for access in resolve_accesses(m, lanes, where, size * len(readers)):
            record_access(m, access, size * len(readers), kind, strong=True)
            index, cells = access.lanes.compress(access.offset) // size, m.flat[access.space].views[size]
            # In global memory a float add flushes subnormals.
            flush = t.name == "f32" and name == "add" and access.space == "global"
            for k, (read, write) in enumerate(zip(readers, writers, strict=True)):
                sources = [access.lanes.compress(values_to_bits(r(m, access.lanes), t, t.bits)) for r in read]
                old = _update_cells(cells, index + k, sources, name, t, flush, returns)
                if old is not None:
                    write(m, access.lanes, bits_to_values(access.lanes.expand(old), t))

    return update


def _exchange_128_bits(
    d: PtxDecoder, inst: PtxInstruction, where: AddressOperandReader, name: str, sources: tuple[PtxOperand, ...]
) -> LaneStep:
    """An exchange of 128 bits: two 64-bit registers."""
    u64, size = TYPES["u64"], 16
    readers = [[d.reader(p, u64) for p in get_vector_parts(o)] for o in sources]
    writers = [d.writer(p, u64) for p in get_vector_parts(inst.operands[0])]
    function = {"exch": _OTHER["exch"], "cas": _exchange_pair}[name]

    def update(m: PtxMachine, lanes: LaneSet) -> None:
        for access in resolve_accesses(m, lanes, where, size):
            record_access(m, access, size, "atomic", strong=True)
            subset, cells = access.lanes, m.flat[access.space].views[8].reshape(-1, 2)
            operands = [np.stack([subset.compress(r(m, subset)) for r in parts], axis=1) for parts in readers]
            old = _update_in_lane_order(cells, subset.compress(access.offset) // size, operands, function, u64)
            for k, write in enumerate(writers):
                write(m, subset, subset.expand(old[:, k]))

    return update


def _exchange_pair(old: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.where((old == b).all(axis=1, keepdims=True), c, old)


def _update_cells(
    cells: np.ndarray, index: np.ndarray, sources: list[np.ndarray], name: str, t: PtxType, flush: bool, returns: bool
) -> np.ndarray | None:
    """Apply an operation; the old value for each lane, if the instruction returns it."""
    old, function = None, _make_update_function(name, t)
    if flush:
        sources = [flush_subnormals(t, s.view(t.dtype)).view(s.dtype) for s in sources]
    if not returns and name in _ASSOCIATIVE and t.parts == 1 and (t.kind != "f" or t.bits >= 32):
        # `ufunc.at` updates in lane order, in machine code.
        function.at(cells.view(t.dtype), index, bits_to_values(sources[0], t))  # type: ignore[attr-defined]
    else:
        old = _update_in_lane_order(cells, index, sources, function, t)
    if flush:  # only the final sum is flushed, not intermediate ones
        cells[index] = flush_subnormals(t, cells[index].view(t.dtype)).view(cells.dtype)
    return old if returns else None


def _make_update_function(name: str, t: PtxType) -> Update:
    """The function from old value and operands to the new value."""
    if t.kind == "f" and name in ("min", "max"):
        return np.fmin if name == "min" else np.fmax
    return _ASSOCIATIVE.get(name) or _OTHER[name]


def _update_in_lane_order(
    cells: np.ndarray, index: np.ndarray, sources: list[np.ndarray], function: Update, t: PtxType
) -> np.ndarray:
    old = np.empty((len(index), *cells.shape[1:]), cells.dtype)
    for lanes_of_round in split_by_conflict(index):
        old[lanes_of_round] = cells[index[lanes_of_round]]
        new = function(bits_to_values(old[lanes_of_round], t), *(bits_to_values(s[lanes_of_round], t) for s in sources))
        cells[index[lanes_of_round]] = values_to_bits(np.asarray(new), t, t.bits)
    return old


def split_by_conflict(index: np.ndarray) -> list[np.ndarray]:
    """Positions in rounds, so that no index occurs twice in a round.

    >>> [p.tolist() for p in split_by_conflict(np.array([5, 7, 5]))]
    [[0, 1], [2]]
    """
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    rank = np.arange(len(index)) - np.repeat(starts, np.diff(np.r_[starts, len(index)]))
    by_rank = order[np.argsort(rank, kind="stable")]
    return np.split(by_rank, np.cumsum(np.bincount(rank))[:-1])


def reduce_cells(cells: np.ndarray, index: np.ndarray, bits: np.ndarray, name: str, t: PtxType) -> None:
    """A reduction into memory that returns nothing, in the order of the values."""
    _update_in_lane_order(cells, index, [bits], _make_update_function(name, t), t)


# multimem: one device has one copy of a multicast object, so a multimem address is the address of that memory.


_INTEGERS, _HALVES, _WHOLE = ("u32", "s32", "u64"), ("f16", "f16x2", "bf16", "bf16x2"), ("f32", "f64")
_REDUCED_TYPES = {  # of each operation of multimem.ld_reduce and multimem.red
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    **dict.fromkeys(("min", "max"), (*_INTEGERS, "s64", *_HALVES)),
    "add": (*_INTEGERS, *_HALVES, *_WHOLE),
}
_VECTOR_EXTENTS = {"v2": 2, "v4": 4, "v8": 8}


@decode_rule("multimem")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """A reducing load is a load, for lack of other copies; a store and a reduction are those of the one copy."""
    opcode, type = {"ld_reduce": "ld", "st": "st", "red": "red"}.get(inst.op[1]), inst.op[-1]
    words = list(inst.op[2:-1])
    if opcode is None or find_state_space(inst) not in ("global", "generic"):
        raise d.unsupported(inst)
    operations = [w for w in words if w in _REDUCED_TYPES]
    _require_multimem_types(d, inst, opcode, operations)
    if opcode == "ld":  # the sum of one copy is that copy, in any precision
        words = [w for w in words if w not in operations and w != "acc::f32"]
    if opcode != "red":
        type = f"b{TYPES[type].bits}"
    return DECODE_RULES[opcode](d, replace(inst, op=(opcode, *words, type)))


def _require_multimem_types(d: PtxDecoder, inst: PtxInstruction, opcode: str, operations: list[str]) -> None:
    """Refuse types that an operation does not have, and vectors that are not of 32, 64 or 128 bits of floats."""
    type, is_float = inst.op[-1], inst.op[-1] in (*_HALVES, *_WHOLE)
    extents = [_VECTOR_EXTENTS[w] for w in inst.op if w in _VECTOR_EXTENTS]
    is_sized = math.prod(extents) * TYPES[type].bits in (32, 64, 128)
    if len(operations) != (opcode != "st") or any(type not in _REDUCED_TYPES[name] for name in operations):
        raise d.unsupported(inst)
    if not is_sized or (extents and (not is_float or type == "f64")):
        raise d.unsupported(inst)
    if "acc::f32" in inst.op and (opcode, operations, type in _HALVES) != ("ld", ["add"], True):
        raise d.unsupported(inst)
