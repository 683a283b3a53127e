"""The stack of each thread: calls of functions that are under way already, and memory allocated as a program runs.

Other calls are inlined and need none. A frame holds all local memory of the program once more, so that what a pointer
into an outer frame points to stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tessera.errors import ExecutionError
from tessera.interp.target.ptx.fault import Fault
from tessera.interp.target.ptx.syntax import Function

if TYPE_CHECKING:
    from tessera.interp.target.ptx.lanes import Lanes
    from tessera.interp.target.ptx.machine import Machine
    from tessera.interp.target.ptx.operands import Place

ALIGNED = 16


@dataclass
class Instance:
    """A function inlined: the labels of its start and end, where its results and parameters lie, and its registers."""

    function: Function
    start: int
    end: int
    results: list[Place]
    params: list[Place]
    first: int
    last: int = 0


@dataclass
class Call:
    """One call of an instance from within: where the caller has results and parameters, and how many bytes each."""

    instance: Instance
    results: list[Place]
    params: list[Place]
    sizes: tuple[list[int], list[int]]


@dataclass
class _Frame:
    """What some lanes find again when they return."""

    call: Call
    back: int
    flat: np.ndarray
    base: np.ndarray
    top: np.ndarray
    before: np.ndarray
    registers: list[np.ndarray]
    known: list[np.ndarray] = field(default_factory=list)


class Stack:
    """Of each lane: where its local memory begins and ends, and the frame that its last call left."""

    def __init__(self, m: Machine) -> None:
        many = m.ctas * m.threads
        self.extent, self.frame_size = m.extent, np.uint64(max(-(-m.program.local // ALIGNED), 1) * ALIGNED)
        self.base = np.zeros(many, np.uint64)
        self.top = np.full(many, self.frame_size)
        self.last = np.full(many, -1)
        self.frames: list[_Frame] = []

    def base_of(self, lanes: Lanes) -> np.ndarray:
        """Where the local memory of lanes begins."""
        return lanes.view(self.base.reshape(self.extent))

    def enter(self, m: Machine, lanes: Lanes, call: Call, back: int) -> None:
        """Lanes begin the function once more."""
        flat, instance = lanes.flat, call.instance
        given = [_read(m, flat, self.base[flat], p, n) for p, n in zip(call.params, call.sizes[1], strict=True)]
        kept = range(instance.first, instance.last)
        frame = _Frame(
            call, back, flat, self.base[flat], self.top[flat], self.last[flat], [_of(m, k, flat) for k in kept]
        )
        if m.debug:
            frame.known = [np.broadcast_to(m.written[k], m.extent).reshape(-1)[flat] for k in kept]
        self.frames.append(frame)
        self.last[flat] = len(self.frames) - 1
        self.base[flat] = _aligned(self.top[flat], ALIGNED)
        self._extend(m, lanes, self.base[flat] + self.frame_size)
        for place, content in zip(instance.params, given, strict=True):
            _write(m, flat, self.base[flat], place, content)

    def leave(self, m: Machine, lanes: Lanes, instance: Instance, end: int) -> None:
        """Lanes return: to a call from within where that was the last one, else behind the inlined function."""
        last = self.last[lanes.flat]
        for k in np.unique(last).tolist():
            some = lanes.select(lanes.spread(last == k))
            if k >= 0 and self.frames[k].call.instance is instance:
                self._restore(m, some, self.frames[k])
            else:
                m.push(end, some)

    def _restore(self, m: Machine, lanes: Lanes, frame: _Frame) -> None:
        flat, call = lanes.flat, frame.call
        found = [
            _read(m, flat, self.base[flat], p, n) for p, n in zip(call.instance.results, call.sizes[0], strict=True)
        ]
        at = np.searchsorted(frame.flat, flat)
        self.base[flat], self.top[flat], self.last[flat] = frame.base[at], frame.top[at], frame.before[at]
        for k, values in enumerate(frame.registers):
            m.write(call.instance.first + k, lanes, lanes.spread(values[at]))
            if m.debug:
                m.set_known(call.instance.first + k, lanes, lanes.spread(frame.known[k][at]))
        for place, content in zip(call.results, found, strict=True):
            _write(m, flat, self.base[flat], place, content)
        m.push(frame.back, lanes)

    def allocate(self, m: Machine, lanes: Lanes, size: np.ndarray, align: int) -> np.ndarray:
        """Memory of so many bytes; its addresses."""
        start = _aligned(self.top[lanes.flat], align)
        self._extend(m, lanes, start + lanes.compress(size))
        return lanes.spread(start)

    def release(self, m: Machine, lanes: Lanes, top: np.ndarray) -> None:
        """Go back to an earlier top."""
        self._extend(m, lanes, lanes.compress(top))

    def _extend(self, m: Machine, lanes: Lanes, top: np.ndarray) -> None:
        if (beyond := top > m.local_size).any():
            says = f"a stack of more than {m.local_size} bytes"
            raise Fault(says, ExecutionError, int(lanes.flat[np.argmax(beyond)]))
        self.top[lanes.flat] = top


def _of(m: Machine, register: int, flat: np.ndarray) -> np.ndarray:
    return np.broadcast_to(m.registers[register], m.extent).reshape(-1)[flat]


def _places(m: Machine, flat: np.ndarray, base: np.ndarray, place: Place, size: int) -> np.ndarray:
    return (flat * m.local_size + base.astype(np.int64) + place.address)[:, None] + np.arange(size)


def _read(m: Machine, flat: np.ndarray, base: np.ndarray, place: Place, size: int) -> np.ndarray:
    return m.flat["local"].raw[_places(m, flat, base, place, size)]


def _write(m: Machine, flat: np.ndarray, base: np.ndarray, place: Place, content: np.ndarray) -> None:
    where = _places(m, flat, base, place, content.shape[1])
    m.flat["local"].raw[where] = content
    if m.debug:
        m.shadow.local[where] = True


def _aligned(address: np.ndarray, align: int) -> np.ndarray:
    one = np.uint64(align - 1)
    return (address + one) & ~one
