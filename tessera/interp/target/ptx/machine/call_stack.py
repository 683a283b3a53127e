"""Call stack of each thread: frames of recursive calls, and memory allocated by alloca.

Other calls are inlined and need no frame. A frame contains all local memory of the program, so that a pointer into an
outer frame stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tessera.core.errors import ExecutionError
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.text.syntax import PtxFunction

if TYPE_CHECKING:
    from tessera.interp.target.ptx.isa.operands import PtxVariableAddress
    from tessera.interp.target.ptx.machine.lane_set import LaneSet
    from tessera.interp.target.ptx.machine.simt import PtxMachine

STACK_ALIGNMENT = 16


@dataclass
class InlinedFunction:
    """An inlined function: the labels of its start and end, its parameters (addresses or registers), its registers."""

    function: PtxFunction
    start: int
    end: int
    results: list[PtxVariableAddress | int]
    params: list[PtxVariableAddress | int]
    first: int
    last: int = 0


@dataclass
class RecursiveCall:
    """A call of a function within itself: the caller's results and parameters, and their sizes."""

    instance: InlinedFunction
    results: list[PtxVariableAddress | int]
    params: list[PtxVariableAddress | int]
    sizes: tuple[list[int], list[int]]


@dataclass
class _CallStackFrame:
    """What some lanes restore when they return."""

    call: RecursiveCall
    return_pc: int
    flat: np.ndarray
    base: np.ndarray
    top: np.ndarray
    before: np.ndarray
    registers: list[np.ndarray]
    known: list[np.ndarray] = field(default_factory=list)


class PtxCallStack:
    """For each lane the bounds of its local memory, and the frame of its last call."""

    def __init__(self, m: PtxMachine) -> None:
        lane_count = m.ctas * m.threads
        self.extent, self.frame_size = (
            m.extent,
            np.uint64(max(-(-m.program.local // STACK_ALIGNMENT), 1) * STACK_ALIGNMENT),
        )
        self.base = np.zeros(lane_count, np.uint64)
        self.top = np.full(lane_count, self.frame_size)
        self.last_frame = np.full(lane_count, -1)
        self.frames: list[_CallStackFrame] = []

    def find_base(self, lanes: LaneSet) -> np.ndarray:
        """The base of lanes' local memory."""
        return lanes.view(self.base.reshape(self.extent))

    def push_frame(self, m: PtxMachine, lanes: LaneSet, call: RecursiveCall, back: int) -> None:
        """Save a frame and begin the function again."""
        flat, instance = lanes.flat, call.instance
        arguments = [
            _read_variable(m, flat, self.base[flat], p, n) for p, n in zip(call.params, call.sizes[1], strict=True)
        ]
        saved_registers = range(instance.first, instance.last)
        frame = _CallStackFrame(
            call,
            back,
            flat,
            self.base[flat],
            self.top[flat],
            self.last_frame[flat],
            [_read_registers(m, k, flat) for k in saved_registers],
        )
        if m.debug:
            frame.known = [np.broadcast_to(m.written[k], m.extent).reshape(-1)[flat] for k in saved_registers]
        self.frames.append(frame)
        self.last_frame[flat] = len(self.frames) - 1
        self.base[flat] = _align_up(self.top[flat], STACK_ALIGNMENT)
        self._set_top(m, lanes, self.base[flat] + self.frame_size)
        for variable, data in zip(instance.params, arguments, strict=True):
            _write_variable(m, lanes, self.base[flat], variable, data)

    def return_lanes(self, m: PtxMachine, lanes: LaneSet, instance: InlinedFunction, end: int) -> None:
        """Return to the last recursive call of the function, or behind the inlined function if there is none."""
        last = self.last_frame[lanes.flat]
        for k in np.unique(last).tolist():
            subset = lanes.select(lanes.expand(last == k))
            if k >= 0 and self.frames[k].call.instance is instance:
                self._pop_frame(m, subset, self.frames[k])
            else:
                m.push(end, subset)

    def _pop_frame(self, m: PtxMachine, lanes: LaneSet, frame: _CallStackFrame) -> None:
        flat, call = lanes.flat, frame.call
        found = [
            _read_variable(m, flat, self.base[flat], p, n)
            for p, n in zip(call.instance.results, call.sizes[0], strict=True)
        ]
        at = np.searchsorted(frame.flat, flat)
        self.base[flat], self.top[flat], self.last_frame[flat] = frame.base[at], frame.top[at], frame.before[at]
        for k, values in enumerate(frame.registers):
            m.write(call.instance.first + k, lanes, lanes.expand(values[at]))
            if m.debug:
                m.set_known(call.instance.first + k, lanes, lanes.expand(frame.known[k][at]))
        for variable, data in zip(call.results, found, strict=True):
            _write_variable(m, lanes, self.base[flat], variable, data)
        m.push(frame.return_pc, lanes)

    def allocate(self, m: PtxMachine, lanes: LaneSet, size: np.ndarray, align: int) -> np.ndarray:
        """Allocate local memory; its addresses."""
        start = _align_up(self.top[lanes.flat], align)
        self._set_top(m, lanes, start + lanes.compress(size))
        return lanes.expand(start)

    def release(self, m: PtxMachine, lanes: LaneSet, top: np.ndarray) -> None:
        """Reset the top of the stack."""
        self._set_top(m, lanes, lanes.compress(top))

    def _set_top(self, m: PtxMachine, lanes: LaneSet, top: np.ndarray) -> None:
        if (overflowing := top > m.local_size).any():
            message = f"a stack of more than {m.local_size} bytes"
            raise PtxFault(message, ExecutionError, int(lanes.flat[np.argmax(overflowing)]))
        self.top[lanes.flat] = top


def _read_variable(
    m: PtxMachine, flat: np.ndarray, base: np.ndarray, variable: PtxVariableAddress | int, size: int
) -> np.ndarray:
    """The values of a parameter in local memory, or in a register."""
    if isinstance(variable, int):
        return _read_registers(m, variable, flat)
    return _read_local(m, flat, base, variable, size)


def _write_variable(
    m: PtxMachine, lanes: LaneSet, base: np.ndarray, variable: PtxVariableAddress | int, data: np.ndarray
) -> None:
    if not isinstance(variable, int):
        _write_local(m, lanes.flat, base, variable, data)
        return
    m.write(variable, lanes, lanes.expand(data))
    if m.debug:
        m.set_known(variable, lanes, lanes.expand(np.ones(len(data), bool)))


def _read_registers(m: PtxMachine, register: int, flat: np.ndarray) -> np.ndarray:
    return np.broadcast_to(m.registers[register], m.extent).reshape(-1)[flat]


def _find_local_positions(
    m: PtxMachine, flat: np.ndarray, base: np.ndarray, variable: PtxVariableAddress, size: int
) -> np.ndarray:
    return (flat * m.local_size + base.astype(np.int64) + variable.address)[:, None] + np.arange(size)


def _read_local(
    m: PtxMachine, flat: np.ndarray, base: np.ndarray, variable: PtxVariableAddress, size: int
) -> np.ndarray:
    return m.flat["local"].raw[_find_local_positions(m, flat, base, variable, size)]


def _write_local(
    m: PtxMachine, flat: np.ndarray, base: np.ndarray, variable: PtxVariableAddress, data: np.ndarray
) -> None:
    where = _find_local_positions(m, flat, base, variable, data.shape[1])
    m.flat["local"].raw[where] = data
    if m.debug:
        m.shadow.local[where] = True


def _align_up(address: np.ndarray, align: int) -> np.ndarray:
    one = np.uint64(align - 1)
    return (address + one) & ~one
