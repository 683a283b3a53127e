"""SIMT scheduler: runs the lanes at the lowest program counter first (min-PC reconvergence).

A deadlock is detected when no lane can run, a livelock when the state of a machine whose lanes are all suspended
repeats.
"""

from __future__ import annotations

import hashlib

import numpy as np

from tessera.core.errors import BarrierError
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, PtxMachine, is_whole_thread_groups

FAIRNESS_INTERVAL = 64  # picks of the lowest counter before the fragment that has waited longest is picked
MAX_REPORTED_MBARRIERS = 16  # mbarriers that a deadlock report lists
MAX_IDLE_POLLS = 1 << 14  # idle rounds of polling before a deadlock is reported
_POWERS = np.uint64(1) << np.arange(32, dtype=np.uint64)


def run_machine(machine: PtxMachine) -> None:
    """Run until every lane has exited."""
    picks = 0
    while (
        machine.ready
        or machine.waiting
        or machine.blocked
        or machine.polling
        or machine.suspended
        or machine.barriers.waiters
    ):
        if not machine.ready:
            _resume_waiting(machine)
        picks += 1
        machine.pc = next(iter(machine.ready)) if picks % FAIRNESS_INTERVAL == 0 else min(machine.ready)
        _run_until_divergence(machine, machine.ready.pop(machine.pc))


def _run_until_divergence(machine: PtxMachine, lanes: LaneSet) -> None:
    lines, leaders = machine.program.lines, machine.program.block_starts
    while True:
        line = lines[machine.pc]
        if line.group_size:
            lanes = _converge(machine, line, lanes)
            if not lanes.count:
                return
        if machine.observer is not None:
            machine.observer.execute(machine, line.instruction, lanes)
        if line.control is not None:
            line.control(machine, lanes, machine.pc)
            return
        line.step(machine, lanes)  # type: ignore[misc]
        machine.pc += 1
        if machine.ready and machine.pc in leaders:
            machine.push(machine.pc, lanes)
            return


def _resume_waiting(machine: PtxMachine) -> None:
    """No lane is ready: resume suspended lanes, else polling lanes, else report a deadlock."""
    if machine.suspended:
        _resume_suspended(machine)
        return
    machine.polls += 1
    if not machine.polling or machine.polls > MAX_IDLE_POLLS:
        _raise_deadlock(machine)
    polling, machine.polling = machine.polling, []
    for pc, lanes in polling:
        machine.push(pc, lanes)


def _resume_suspended(machine: PtxMachine) -> None:
    """Resume suspended lanes, unless the machine's state repeats."""
    machine.suspend_rounds += 1
    if machine.suspend_rounds % LIVELOCK_CHECK_INTERVAL == 0:
        before, machine.last_fingerprint = machine.last_fingerprint, hash_machine_state(machine)
        if before == machine.last_fingerprint:
            _raise_deadlock(machine)
    resumed, machine.suspended = machine.suspended, []
    for pc, lanes in resumed:
        machine.push(pc, lanes)


def _converge(machine: PtxMachine, line: DecodedInstruction, lanes: LaneSet) -> LaneSet:
    """The lanes whose whole group is present; the others wait for the rest of their group."""
    old = machine.waiting.pop(machine.pc, None)
    if old is not None:
        lanes = lanes | old
    if is_whole_thread_groups(lanes, line.group_size):
        return lanes
    missing = machine.split_into_groups(machine.alive, line.group_size)
    present = np.zeros(machine.extent, bool)
    lanes.set_mask(present)
    missing = missing & ~machine.split_into_groups(present, line.group_size)
    group_index = lanes.ctas * missing.shape[1] + lanes.flat % machine.threads // line.group_size
    if line.member_mask is None:
        complete = ~missing.any(axis=2).reshape(-1)[group_index]
    else:
        absent_mask = (missing * _POWERS).sum(axis=2, dtype=np.uint64).reshape(-1)[group_index]
        complete = lanes.compress(line.member_mask(machine, lanes)).astype(np.uint64) & absent_mask == 0
    converged = lanes.select(lanes.expand(complete))
    if converged.count < lanes.count:
        machine.waiting[machine.pc] = lanes.select(lanes.expand(~complete))
    return converged


def _raise_deadlock(machine: PtxMachine) -> None:
    blocked_pcs = [p for p, _ in (*machine.blocked, *machine.polling)] + [p - 1 for p, _ in machine.suspended]
    pcs = [*machine.waiting, *blocked_pcs, *(p.pc for p in machine.barriers.waiters)]
    lines = [machine.program.lines[p] for p in sorted(set(pcs))]
    words = [f"{line.instruction.name} at {line.instruction.location}" for line in lines]
    machine.pc = pcs[0]
    words += [str(b) for b in list(machine.state.get("mbarriers", {}).values())[:MAX_REPORTED_MBARRIERS]]
    raise PtxFault("deadlock: no thread can continue: " + "; ".join(words), BarrierError)


# Livelock detection, for a machine whose lanes are all suspended.


LIVELOCK_CHECK_INTERVAL = 256  # rounds of suspension between two fingerprints


def hash_machine_state(machine: PtxMachine) -> bytes:
    """A hash of the machine's state: program counters, registers and memory.

    If two fingerprints are equal, the machine repeats the same states forever.
    """
    result = hashlib.blake2b(digest_size=16)
    for pc, lanes in machine.suspended:
        result.update(np.append(lanes.flat, pc).tobytes())
    result.update(np.array([len(p.lanes) for p in machine.barriers.waiters]).tobytes())
    for register in machine.registers:
        result.update(np.ascontiguousarray(register).data)
    for flat in machine.flat.values():
        result.update(flat.raw.data)
    return result.digest()
