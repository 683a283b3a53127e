"""Call stack of each thread: frames of recursive calls, and memory allocated by alloca.

Other calls are inlined and need no frame. A frame holds all local memory of the program once more, so that a pointer
into an outer frame stays valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tessera.core.errors import ExecutionError
from tessera.interp.target.ptx.machine.fault import PtxFault
from tessera.interp.target.ptx.text.syntax import PtxFunction

if TYPE_CHECKING:
    from tessera.interp.target.ptx.isa.operands import PtxVariableAddress
    from tessera.interp.target.ptx.machine.lane_set import LaneSet
    from tessera.interp.target.ptx.machine.simt import PtxMachine

STACK_ALIGNMENT = 16


@dataclass
class InlinedFunction:
    """A function inlined: the labels of its start and end, where its results and parameters lie, and its registers."""

    function: PtxFunction
    start: int
    end: int
    results: list[PtxVariableAddress]
    params: list[PtxVariableAddress]
    first: int
    last: int = 0


@dataclass
class RecursiveCall:
    """One call of an instance from within: where the caller has results and parameters, and how many bytes each."""

    instance: InlinedFunction
    results: list[PtxVariableAddress]
    params: list[PtxVariableAddress]
    sizes: tuple[list[int], list[int]]


@dataclass
class _CallStackFrame:
    """What some lanes find again when they return."""

    call: RecursiveCall
    back: int
    flat: np.ndarray
    base: np.ndarray
    top: np.ndarray
    before: np.ndarray
    registers: list[np.ndarray]
    known: list[np.ndarray] = field(default_factory=list)


class PtxCallStack:
    """Of each lane: where its local memory begins and ends, and the frame that its last call left."""

    def __init__(self, m: PtxMachine) -> None:
        many = m.ctas * m.threads
        self.extent, self.frame_size = (
            m.extent,
            np.uint64(max(-(-m.program.local // STACK_ALIGNMENT), 1) * STACK_ALIGNMENT),
        )
        self.base = np.zeros(many, np.uint64)
        self.top = np.full(many, self.frame_size)
        self.last = np.full(many, -1)
        self.frames: list[_CallStackFrame] = []

    def base_of(self, lanes: LaneSet) -> np.ndarray:
        """Where the local memory of lanes begins."""
        return lanes.view(self.base.reshape(self.extent))

    def enter(self, m: PtxMachine, lanes: LaneSet, call: RecursiveCall, back: int) -> None:
        """Lanes begin the function once more."""
        flat, instance = lanes.flat, call.instance
        given = [_read_local(m, flat, self.base[flat], p, n) for p, n in zip(call.params, call.sizes[1], strict=True)]
        kept = range(instance.first, instance.last)
        frame = _CallStackFrame(
            call,
            back,
            flat,
            self.base[flat],
            self.top[flat],
            self.last[flat],
            [_registers_of_lanes(m, k, flat) for k in kept],
        )
        if m.debug:
            frame.known = [np.broadcast_to(m.written[k], m.extent).reshape(-1)[flat] for k in kept]
        self.frames.append(frame)
        self.last[flat] = len(self.frames) - 1
        self.base[flat] = _align_up(self.top[flat], STACK_ALIGNMENT)
        self._grow(m, lanes, self.base[flat] + self.frame_size)
        for place, content in zip(instance.params, given, strict=True):
            _write_local(m, flat, self.base[flat], place, content)

    def leave(self, m: PtxMachine, lanes: LaneSet, instance: InlinedFunction, end: int) -> None:
        """Lanes return: to a call from within where that was the last one, else behind the inlined function."""
        last = self.last[lanes.flat]
        for k in np.unique(last).tolist():
            some = lanes.select(lanes.spread(last == k))
            if k >= 0 and self.frames[k].call.instance is instance:
                self._restore(m, some, self.frames[k])
            else:
                m.push(end, some)

    def _restore(self, m: PtxMachine, lanes: LaneSet, frame: _CallStackFrame) -> None:
        flat, call = lanes.flat, frame.call
        found = [
            _read_local(m, flat, self.base[flat], p, n)
            for p, n in zip(call.instance.results, call.sizes[0], strict=True)
        ]
        at = np.searchsorted(frame.flat, flat)
        self.base[flat], self.top[flat], self.last[flat] = frame.base[at], frame.top[at], frame.before[at]
        for k, values in enumerate(frame.registers):
            m.write(call.instance.first + k, lanes, lanes.spread(values[at]))
            if m.debug:
                m.set_known(call.instance.first + k, lanes, lanes.spread(frame.known[k][at]))
        for place, content in zip(call.results, found, strict=True):
            _write_local(m, flat, self.base[flat], place, content)
        m.push(frame.back, lanes)

    def allocate(self, m: PtxMachine, lanes: LaneSet, size: np.ndarray, align: int) -> np.ndarray:
        """Memory of so many bytes; its addresses."""
        start = _align_up(self.top[lanes.flat], align)
        self._grow(m, lanes, start + lanes.compress(size))
        return lanes.spread(start)

    def release(self, m: PtxMachine, lanes: LaneSet, top: np.ndarray) -> None:
        """Go back to an earlier top."""
        self._grow(m, lanes, lanes.compress(top))

    def _grow(self, m: PtxMachine, lanes: LaneSet, top: np.ndarray) -> None:
        if (beyond := top > m.local_size).any():
            says = f"a stack of more than {m.local_size} bytes"
            raise PtxFault(says, ExecutionError, int(lanes.flat[np.argmax(beyond)]))
        self.top[lanes.flat] = top


def _registers_of_lanes(m: PtxMachine, register: int, flat: np.ndarray) -> np.ndarray:
    return np.broadcast_to(m.registers[register], m.extent).reshape(-1)[flat]


def _local_positions(
    m: PtxMachine, flat: np.ndarray, base: np.ndarray, place: PtxVariableAddress, size: int
) -> np.ndarray:
    return (flat * m.local_size + base.astype(np.int64) + place.address)[:, None] + np.arange(size)


def _read_local(m: PtxMachine, flat: np.ndarray, base: np.ndarray, place: PtxVariableAddress, size: int) -> np.ndarray:
    return m.flat["local"].raw[_local_positions(m, flat, base, place, size)]


def _write_local(
    m: PtxMachine, flat: np.ndarray, base: np.ndarray, place: PtxVariableAddress, content: np.ndarray
) -> None:
    where = _local_positions(m, flat, base, place, content.shape[1])
    m.flat["local"].raw[where] = content
    if m.debug:
        m.shadow.local[where] = True


def _align_up(address: np.ndarray, align: int) -> np.ndarray:
    one = np.uint64(align - 1)
    return (address + one) & ~one
