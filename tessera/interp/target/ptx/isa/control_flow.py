"""Control flow and synchronisation: branches, exits, alloca, barriers of a CTA and of a cluster, fences, traps.

Also the addresses of distributed shared memory: mapa and getctarank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.core.errors import ExecutionError, ParseError
from tessera.interp.target.ptx.isa.addressing import STATE_SPACE_WORDS, get_operand_or_default
from tessera.interp.target.ptx.isa.decoder import CONTROL_RULES, PtxDecoder, check_modifiers, decode_rule
from tessera.interp.target.ptx.isa.operands import BranchTarget, Reader, make_constant_reader
from tessera.interp.target.ptx.machine.call_stack import InlinedFunction
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import CTA_RANK_SHIFT, GENERIC_WINDOWS, PtxFault
from tessera.interp.target.ptx.machine.named_barriers import BARRIER_COUNT, BarrierWaiters
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    BranchTargetList,
    ImmediateOperand,
    NameOperand,
    PtxInstruction,
    PtxOperand,
)

# Branches, exits, barriers, fences and traps.


@decode_rule("bra", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    check_modifiers(d, inst, "uni", types=0)
    target = _resolve_label(d, inst.operands[0], inst)
    _make_guarded_transfer(d, inst, line, lambda m, lanes: m.push(target, lanes))


def _resolve_label(d: PtxDecoder, operand: PtxOperand, inst: PtxInstruction) -> int:
    """The instruction of a branch target."""
    result = d.resolve(operand.text, inst.location) if isinstance(operand, NameOperand) else None
    if not isinstance(result, BranchTarget):
        raise PtxFault("the branch target is not a label", ParseError)
    return d.labels[result]


@decode_rule("brx", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    index, read_id = d.reader(inst.operands[0], TYPES["u32"]), inst.operands[1]
    check_modifiers(d, inst, "idx", "uni", types=0)
    assert isinstance(read_id, NameOperand)
    listed = d.resolve(read_id.text, inst.location)
    assert isinstance(listed, BranchTargetList)
    targets = [_resolve_label(d, NameOperand(t), inst) for t in listed.labels]

    def transfer(m: PtxMachine, lanes: LaneSet) -> None:
        chosen = index(m, lanes)
        if (invalid := lanes.select(chosen >= len(targets))).count:
            raise PtxFault("the index is beyond the branch targets", ExecutionError, int(invalid.flat[0]))
        for k, pc in enumerate(targets):
            m.push(pc, lanes.select(chosen == k))

    _make_guarded_transfer(d, inst, line, transfer)


@decode_rule("ret", "exit", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    check_modifiers(d, inst, "uni", types=0)
    if inst.op[0] == "ret" and d.names.end >= 0:
        end, instance = d.names.end, d.names.instance
        if instance is None:
            _make_guarded_transfer(d, inst, line, lambda m, lanes: m.push(d.labels[end], lanes))
        else:
            _make_guarded_transfer(
                d, inst, line, lambda m, lanes: _return_from_function(m, lanes, instance, d.labels[end])
            )
    else:
        _make_guarded_transfer(d, inst, line, lambda m, lanes: m.exit(lanes))


def _return_from_function(m: PtxMachine, lanes: LaneSet, instance: InlinedFunction, end: int) -> None:
    if m.stack is None:
        m.push(end, lanes)
    else:
        m.stack.return_lanes(m, lanes, instance, end)


@decode_rule("alloca", "stacksave", "stackrestore", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """The dynamic stack: allocate bytes, save its top, restore its top."""
    d.program.stack = True
    line.step = {"alloca": _decode_alloca, "stacksave": _decode_stacksave, "stackrestore": _decode_stackrestore}[
        inst.op[0]
    ](d, inst)


def _decode_alloca(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t, align = TYPES[inst.op[-1]], get_operand_or_default(inst.operands, 2, 8)
    write, size = d.writer(inst.operands[0], t), d.reader(inst.operands[1], t)
    assert isinstance(align, ImmediateOperand)
    return lambda m, lanes: write(
        m, lanes, m.stack.allocate(m, lanes, size(m, lanes).astype(np.uint64), align.value).astype(t.dtype)
    )


def _decode_stacksave(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t = TYPES[inst.op[-1]]
    write = d.writer(inst.operands[0], t)
    return lambda m, lanes: write(m, lanes, lanes.expand(m.stack.top[lanes.flat]).astype(t.dtype))


def _decode_stackrestore(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    read = d.reader(inst.operands[0], TYPES[inst.op[-1]])
    return lambda m, lanes: m.stack.release(m, lanes, read(m, lanes).astype(np.uint64))


@decode_rule("trap", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    def stop(m: PtxMachine, lanes: LaneSet) -> None:
        raise PtxFault("the program trapped", ExecutionError, int(lanes.flat[0]))

    _make_guarded_transfer(d, inst, line, stop)


@decode_rule("brkpt")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """No effect: no debugger is attached."""
    return lambda m, lanes: None


def _make_guarded_transfer(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction, transfer: LaneStep) -> None:
    guard = d.reader(inst.guard, TYPES["pred"]) if inst.guard else None

    def control(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
        if guard is None:
            transfer(m, lanes)
            return
        taken = guard(m, lanes)
        subset, rest = lanes.select(taken), lanes.select(~taken)
        m.push(pc + 1, rest)
        if subset.count:
            transfer(m, subset)

    line.control = control


@decode_rule("nanosleep", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """Suspend until all other lanes have run as far as they can, whatever the duration."""
    _make_guarded_transfer(d, inst, line, lambda m, lanes: m.suspend(m.pc + 1, lanes))


@decode_rule("bar", "barrier", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """A CTA barrier; `barrier.cluster` and `bar.warp` have rules in BARRIER_RULES."""
    result = BARRIER_RULES.get(inst.op[1])
    if result is not None:
        result(d, inst, line)
        return
    words = [w for w in inst.op[1:] if w not in ("cta", "aligned")]
    kinds = {"sync": _decode_barrier_sync, "arrive": _decode_barrier_arrive, "red": _decode_barrier_red}
    kinds[words[0]](d, inst, line, words[1:])


BARRIER_RULES: dict[str, Callable[[PtxDecoder, PtxInstruction, DecodedInstruction], None]] = {}


def _decode_barrier_operands(d: PtxDecoder, inst: PtxInstruction, first: int = 0) -> tuple[Reader, Reader]:
    u32, operand = TYPES["u32"], inst.operands[first]
    if isinstance(operand, ImmediateOperand) and not 0 <= operand.value < BARRIER_COUNT:
        raise PtxFault("the barrier number is above 15", ExecutionError)
    read_id = d.reader(operand, u32)
    return read_id, d.reader(get_operand_or_default(inst.operands, first + 1, 0), u32)


def _read_integers(read: Reader, m: PtxMachine, lanes: LaneSet) -> np.ndarray:
    return lanes.compress(read(m, lanes)).astype(np.int64)


def _read_barrier_ids(m: PtxMachine, lanes: LaneSet, read_id: Reader) -> np.ndarray:
    ids = _read_integers(read_id, m, lanes)
    if len(ids) and int(ids.max()) >= BARRIER_COUNT:
        raise PtxFault("the barrier number is above 15", ExecutionError, int(lanes.flat[np.argmax(ids)]))
    return ids


def _decode_barrier_sync(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction, words: list[str]) -> None:
    if words:
        raise d.unsupported(inst)
    read_id, expected = _decode_barrier_operands(d, inst)
    whole = len(inst.operands) == 1 and isinstance(inst.operands[0], ImmediateOperand)

    def control(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
        if whole and not m.debug and m.barriers.is_complete_for(lanes):
            m.push(pc + 1, lanes)
            return
        m.barriers.wait(
            BarrierWaiters(pc, lanes.flat, _read_barrier_ids(m, lanes, read_id), _read_integers(expected, m, lanes))
        )

    line.control = control


def _decode_barrier_arrive(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction, words: list[str]) -> None:
    if words:
        raise d.unsupported(inst)
    read_id, expected = _decode_barrier_operands(d, inst)

    def control(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
        m.push(pc + 1, lanes)
        m.barriers.arrive(lanes, _read_barrier_ids(m, lanes, read_id), _read_integers(expected, m, lanes))

    line.control = control


def _decode_barrier_red(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction, words: list[str]) -> None:
    kind, out = words[0], TYPES[words[1]]
    write = d.writer(inst.operands[0], out)
    expected: Reader = make_constant_reader(np.array([[0]], np.uint32))
    read_id = d.reader(inst.operands[1], TYPES["u32"])
    if len(inst.operands) == 4:
        expected = d.reader(inst.operands[2], TYPES["u32"])
    vote = d.reader(inst.operands[-1], TYPES["pred"])
    result = {
        "popc": lambda votes, total: votes,
        "and": lambda votes, total: votes == total,
        "or": lambda votes, total: votes > 0,
    }[kind]

    def deliver(m: PtxMachine, lanes: LaneSet, votes: np.ndarray, total: np.ndarray) -> None:
        write(m, lanes, lanes.expand(result(votes, total)))

    def control(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
        votes = lanes.compress(vote(m, lanes))
        m.barriers.wait(
            BarrierWaiters(
                pc,
                lanes.flat,
                _read_barrier_ids(m, lanes, read_id),
                _read_integers(expected, m, lanes),
                votes.astype(np.int64),
                deliver,
            )
        )

    line.control = control


@decode_rule("membar", "fence")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """Memory is sequentially consistent here; only a proxy fence matters, to the sanitizer."""
    if "proxy" in inst.op:
        return lambda m, lanes: m.shadow.fence(lanes) if m.debug else None
    return lambda m, lanes: None


# Clusters: addresses in another CTA's shared memory, and the cluster barrier.


_CTA_OFFSET_MASK = np.uint64((1 << CTA_RANK_SHIFT) - 1)
_MOST_RANKS = 64
_ORDERS = {"release", "acquire", "relaxed", "aligned"}


@decode_rule("mapa")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """The address of a shared memory location in the CTA of a rank."""
    check_modifiers(d, inst, *STATE_SPACE_WORDS)
    t = TYPES[inst.op[-1]]
    write = d.writer(inst.operands[0], t)
    address, rank = d.reader(inst.operands[1], TYPES["u64"]), d.reader(inst.operands[2], TYPES["u32"])
    window = np.uint64(0 if "shared::cluster" in inst.op else GENERIC_WINDOWS["shared"])

    def map_address(address: np.ndarray, to: np.ndarray) -> np.ndarray:
        # A rank beyond the cluster is an error when the address is used.
        ranks = np.minimum(to, np.uint32(_MOST_RANKS)).astype(np.uint64) + np.uint64(1)
        return ((address & _CTA_OFFSET_MASK) | ranks << np.uint64(CTA_RANK_SHIFT) | window).astype(t.dtype)

    return lambda m, lanes: write(m, lanes, map_address(address(m, lanes), rank(m, lanes)))


@decode_rule("getctarank")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    check_modifiers(d, inst, *STATE_SPACE_WORDS)
    write, address = d.writer(inst.operands[0], TYPES["u32"]), d.reader(inst.operands[1], TYPES["u64"])

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        named = (address(m, lanes) & np.uint64(0xFFFFFFFF)) >> np.uint64(CTA_RANK_SHIFT)
        own = lanes.view(m.special["%cluster_ctarank"])
        write(m, lanes, np.where(named == 0, own, named - np.uint64(1)).astype(np.uint32))

    return step


class ClusterBarrier:
    """For each cluster the arrivals and the phase; for each lane the phase in which it arrived."""

    def __init__(self, m: PtxMachine) -> None:
        clusters = m.cta_of_rank.shape[0]
        self.arrived, self.phase = np.zeros(clusters, np.int64), np.zeros(clusters, np.int64)
        self.arrival_phase = np.full(m.ctas * m.threads, -1)

    def complete_phases(self, m: PtxMachine) -> None:
        """Complete the phase of each cluster whose remaining threads have all arrived."""
        alive = np.bincount(m.cluster, m.alive.sum(axis=1), len(self.arrived))
        done = (self.arrived >= alive) & (self.arrived > 0)
        self.phase[done] += 1
        self.arrived[done] = 0
        if done.any():
            m.unblock()


def get_cluster_barrier(m: PtxMachine) -> ClusterBarrier:
    """The barrier state of the machine's clusters."""
    if "cluster" not in m.state:
        m.state["cluster"] = ClusterBarrier(m)
    return m.state["cluster"]


def _decode_cluster_barrier(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    kind, words = inst.op[2], inst.op[3:]
    if not set(words) <= _ORDERS:
        raise d.unsupported(inst)
    line.group_size = 32 if "aligned" in words else 0
    line.control = {"arrive": _arrive_at_cluster_barrier, "wait": _wait_at_cluster_barrier}[kind]


def _arrive_at_cluster_barrier(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
    barrier = get_cluster_barrier(m)
    cluster = m.cluster[lanes.ctas]
    barrier.arrival_phase[lanes.flat] = barrier.phase[cluster]
    np.add.at(barrier.arrived, cluster, 1)
    m.push(pc + 1, lanes)
    if m.debug:
        m.shadow.arrive_at_cluster_barrier(lanes)
    barrier.complete_phases(m)


def _wait_at_cluster_barrier(m: PtxMachine, lanes: LaneSet, pc: int) -> None:
    barrier = get_cluster_barrier(m)
    barrier.complete_phases(m)  # threads that have exited are not expected
    done = barrier.phase[m.cluster[lanes.ctas]] > barrier.arrival_phase[lanes.flat]
    subset = lanes.select(lanes.expand(done))
    if subset.count and m.debug:
        m.shadow.wait_at_cluster_barrier(subset)
    m.push(pc + 1, subset)
    m.block(pc, lanes.select(lanes.expand(~done)))


BARRIER_RULES["cluster"] = _decode_cluster_barrier
