"""Data movement: mov, ld, st, cvta and isspacep, with cache and prefetch hints."""

from __future__ import annotations

import numpy as np

from tessera.core.errors import RaceError
from tessera.interp.target.ptx.isa.addressing import (
    STATE_SPACE_WORDS,
    LaneAccess,
    decode_address,
    require_known_modifiers,
    resolve_accesses,
)
from tessera.interp.target.ptx.isa.decoder import PtxDecoder, check_modifiers, decode_rule
from tessera.interp.target.ptx.isa.operands import get_vector_parts, make_bit_moving_step, make_elementwise_step
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import CTA_RANK_SHIFT, GENERIC_WINDOWS, WINDOW_BITS, PtxFault
from tessera.interp.target.ptx.machine.simt import LaneStep, PtxMachine
from tessera.interp.target.ptx.machine.special_registers import SPECIAL
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    ImmediateOperand,
    NameOperand,
    PtxInstruction,
    PtxOperand,
    PtxType,
    VectorOperand,
    values_to_bits,
)


@decode_rule("mov")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    words, t = check_modifiers(d, inst, "v2", "v4"), TYPES[inst.op[-1]]
    move_step = _move_parts(d, inst, t) if words or t.bits > 64 else make_elementwise_step(d, inst, lambda a: a, t, t)
    return make_bit_moving_step(d, inst, move_step)


def _move_parts(d: PtxDecoder, inst: PtxInstruction, t: PtxType) -> LaneStep:
    """A move of 128-bit registers or of vectors, part by part; four words are two 64-bit registers."""
    destinations, sources = (_get_vector_elements(o) for o in inst.operands)
    if t.bits > 64:
        t, destinations, sources = TYPES["b64"], _group_word_pairs(destinations), _group_word_pairs(sources)
    writers, readers = [d.writer(o, t) for o in destinations], [d.reader(o, t) for o in sources]
    if len(writers) != len(readers):
        raise d.unsupported(inst)

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        for write, value in zip(writers, [r(m, lanes) for r in readers], strict=True):
            write(m, lanes, value)

    return step


def _get_vector_elements(operand: PtxOperand) -> tuple[PtxOperand, ...]:
    """The elements of a vector; the fourth element of a special register is 0."""
    if isinstance(operand, NameOperand) and f"{operand.text}.x" in SPECIAL:
        return (*(NameOperand(f"{operand.text}.{c}") for c in "xyz"), ImmediateOperand(0))
    return get_vector_parts(operand)


def _group_word_pairs(parts: tuple[PtxOperand, ...]) -> tuple[PtxOperand, ...]:
    if len(parts) == 2:
        return parts
    return tuple(VectorOperand(parts[k : k + 2]) for k in range(0, len(parts), 2))


def _split_memory_operands(d: PtxDecoder, inst: PtxInstruction) -> None:
    """Require an address and a register operand, and a cache policy if the instruction has one."""
    if len(inst.operands) != 2 + ("L2::cache_hint" in inst.op):
        raise d.unsupported(inst)


def get_memory_element_type(t: PtxType) -> PtxType:
    """The type that memory instructions access: 128 bits are two elements."""
    return TYPES["b64"] if t.bits > 64 else t


@decode_rule("ld", "ldu")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t, parts = get_memory_element_type(TYPES[inst.op[-1]]), get_vector_parts(inst.operands[0])
    _split_memory_operands(d, inst)
    require_known_modifiers(d, inst, "v2", "v4", "v8")
    where, size = decode_address(d, inst, inst.operands[1]), t.bits // 8
    writers = [d.writer(p, t) for p in parts]
    strong, is_constant, destinations = is_strong(inst), _is_constant_access(inst), d.registers(inst.operands[0])

    def load(m: PtxMachine, lanes: LaneSet) -> None:
        for access in resolve_accesses(m, lanes, where, size * len(parts)):
            record_access(m, access, size * len(parts), "read", strong, is_constant)
            index = access.offset // size
            cells = m.flat[access.space].views[size]
            for k, write in enumerate(writers):
                write(m, access.lanes, cells[index + k if k else index].view(t.dtype))
            if m.debug and access.space == "local":
                known = m.shadow.known(access, size * len(parts))
                for register in destinations:
                    m.set_known(register, access.lanes, known)

    return load


@decode_rule("st")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t, parts = get_memory_element_type(TYPES[inst.op[-1]]), get_vector_parts(inst.operands[1])
    if inst.op[1] == "async":
        raise d.unsupported(inst)
    _split_memory_operands(d, inst)
    require_known_modifiers(d, inst, "v2", "v4", "v8")
    where, size = decode_address(d, inst, inst.operands[0]), t.bits // 8
    readers = [d.reader(p, t) for p in parts]
    strong, is_constant, sources = is_strong(inst), _is_constant_access(inst), d.registers(inst.operands[1])

    def store(m: PtxMachine, lanes: LaneSet) -> None:
        for access in resolve_accesses(m, lanes, where, size * len(parts)):
            subset, cells = access.lanes, m.flat[access.space].views[size]
            index = subset.compress(access.offset // size)
            m.allow_uninitialised = access.space == "local"
            values = [subset.compress(values_to_bits(read(m, subset), t, t.bits)) for read in readers]
            if m.debug:
                changed = np.logical_or.reduce([cells[index + k] != value for k, value in enumerate(values)])
                record_access(m, access, size * len(parts), "write", strong, is_constant, changed)
            for k, value in enumerate(values):
                cells[index + k if k else index] = value
                if m.debug and (overwritten := cells[index + k] != value).any():
                    _check_conflicts(m, access, index, overwritten)
            m.allow_uninitialised = False
            if m.debug and access.space == "local" and len(sources) == len(readers):
                m.shadow.set_known(access, size, [m.known(k, subset) for k in sources])

    return store


def _check_conflicts(m: PtxMachine, access: LaneAccess, index: np.ndarray, overwritten: np.ndarray) -> None:
    """Lanes of a store wrote different values to one address: in shared memory copies may round differently."""
    if not (m.launch.replicated and access.space == "shared"):
        raise _make_conflict_fault(m, access.lanes, index, int(np.argmax(overwritten)))


def _make_conflict_fault(m: PtxMachine, lanes: LaneSet, index: np.ndarray, first: int) -> PtxFault:
    """The fault of a store whose lanes write different values to one address: the first that is overwritten."""
    last = int(np.flatnonzero(index == index[first])[-1])
    other, inst = m.describe_lane(int(lanes.flat[last])), m.program.lines[m.pc].instruction
    source = f" ({inst.source})" if inst.source else ""
    message = f"two threads write different values to one address: it is also written{source} by {other}"
    return PtxFault(message, RaceError, int(lanes.flat[first]))


def is_strong(inst: PtxInstruction) -> bool:
    """Whether an access is strong, so that threads may synchronise through it."""
    return not _STRONG.isdisjoint(inst.op)


def _is_constant_access(inst: PtxInstruction) -> bool:
    """Whether an access is to constants or an entry's parameters, which are never written."""
    return any(w == "const" or w.startswith("param") for w in inst.op)


_STRONG = {"volatile", "relaxed", "acquire", "release", "mmio", "atom", "red"}


def record_access(
    m: PtxMachine,
    access: LaneAccess,
    size: int,
    kind: str,
    strong: bool = False,
    is_constant: bool = False,
    changed: np.ndarray | None = None,
) -> None:
    """Report an access to the sanitizer."""
    if m.debug and not (is_constant and access.space == "global"):
        m.shadow.record_access(kind, access, size, strong, changed)


@decode_rule("cvta")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst, "to", *STATE_SPACE_WORDS)
    t, space = TYPES[inst.op[-1]], inst.op[-2].split("::")[0]
    base = np.uint64(0 if space in ("global", "const") else GENERIC_WINDOWS["global" if space == "param" else space])
    if "to" in inst.op:
        return make_elementwise_step(d, inst, lambda a: a - base, t, t)
    return make_elementwise_step(d, inst, lambda a: a + base, t, t)


@decode_rule("isspacep")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """Constants and parameters share the global window, and another CTA's memory the shared window."""
    check_modifiers(d, inst, types=1)
    space, _, part = inst.op[-1].partition("::")
    window = GENERIC_WINDOWS.get(space, GENERIC_WINDOWS["global"]) >> WINDOW_BITS
    write, read = d.writer(inst.operands[0], TYPES["pred"]), d.reader(inst.operands[1], TYPES["u64"])

    def test(m: PtxMachine, lanes: LaneSet) -> None:
        address = read(m, lanes)
        values = address >> np.uint64(WINDOW_BITS) == window
        if space in ("const", "param"):
            values = values & m.arena.is_in_space(
                space, (address - np.uint64(GENERIC_WINDOWS["global"])).view(np.int64)
            )
        if space == "shared" and part != "cluster":
            rank = address >> np.uint64(CTA_RANK_SHIFT) & np.uint64((1 << WINDOW_BITS - CTA_RANK_SHIFT) - 1)
            values = values & ((rank == 0) | (rank == lanes.view(m.special["%cluster_ctarank"]) + np.uint64(1)))
        write(m, lanes, values)

    return test


@decode_rule("prefetch", "prefetchu", "applypriority", "discard", "setmaxnreg", "griddepcontrol", "pmevent")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """Hints to caches, registers and the scheduler change no value."""
    return lambda m, lanes: None


@decode_rule("createpolicy")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """A cache policy is opaque: its value is 1."""
    write = d.writer(inst.operands[0], TYPES["b64"])
    return lambda m, lanes: write(m, lanes, np.array([[1]], np.uint64))
