"""Message passing: the library `<message_passing>` of WSE-3, which sends short messages from any PE to any other.

The vendor's source is closed. Here a message arrives whole, the cycles of its hops after its words have left one per
cycle; messages to one PE arrive in order. No wavelet appears on the library's colors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.pe.pe_state import WaitCondition
from tessera.interp.target.csl.pe.scheduler import activate, notify, spawn, unblock
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ComptimeValue, NativeFunction, Pointer
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault

MAX_MESSAGE = 32  # wavelets
SEND_CYCLES = 20  # before the first word leaves; the vendor publishes no count
COMMUNICATION_COLOR = 14
_KEY = "message"


def make_message_passing(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """`init`, `send_message` and `recv_message`, and the queues and the color of the library."""
    if unit.options.arch != "wse3":
        raise CslError("<message_passing> exists on WSE-3 only", suggestion="compile with --arch=wse3")
    missing = [name for name in ("input_queue_id", "output_queue_id") if name not in params]
    if missing:
        raise CslError(f"<message_passing> needs the parameter '{missing[0]}'")
    incoming, outgoing = (int(params[name].data) for name in ("input_queue_id", "output_queue_id"))
    init = NativeFunction("init", lambda pe: pe.state.setdefault(_KEY, deque()), cycles=40, live=True)
    send = NativeFunction("send_message", send_message, cycles=SEND_CYCLES, live=True)
    receive = NativeFunction("recv_message", receive_message, cycles=SEND_CYCLES, live=True)
    return {
        "mp_input_queue": ComptimeValue(t.INPUT_QUEUE, incoming),
        "mp_output_queue": ComptimeValue(t.OUTPUT_QUEUE, outgoing),
        "mp_comm_color": ComptimeValue(t.COLOR, COMMUNICATION_COLOR),
        "init": ComptimeValue(t.CslFunctionType("", (), t.VOID), init),
        "send_message": ComptimeValue(t.CslFunctionType("", (t.U16, t.U16, None, t.U16, None), t.VOID), send),
        "recv_message": ComptimeValue(t.CslFunctionType("", (None, t.LOCAL_TASK, None), t.VOID), receive),
    }


def send_message(pe: Any, column: int, row: int, buffer: Pointer, count: int, ending: dict[str, Any]) -> None:
    """Send `count` elements to the PE at a column and a row of the rectangle.

    Raises:
        CslFault: there is no such PE, the message is too long, or the buffer too short.
    """
    _check_initialised(pe, "send_message")
    target = pe.fabric.node.fabric.nodes.get((int(column), int(row)))
    if target is None:
        raise CslFault(f"send_message: PE ({column}, {row}) is outside of the rectangle")
    if not 0 < count <= MAX_MESSAGE:
        raise CslFault(f"send_message: a message has 1 to {MAX_MESSAGE} wavelets", received=f"{count} elements")
    words = _view_buffer("send_message", buffer, count).copy()
    hops = (abs(pe.x - column) + abs(pe.y - row)) * COSTS.hop[pe.wide]
    spawn(pe, _send(pe, target.pe, words, hops), lambda: _finish(pe, ending), "send_message")


def receive_message(pe: Any, buffer: Pointer, callback: int, ending: dict[str, Any]) -> None:
    """Receive the next message into a buffer, then activate a task."""
    _check_initialised(pe, "recv_message")

    def done() -> None:
        activate(pe, int(callback))
        _finish(pe, ending)

    spawn(pe, _receive(pe, buffer), done, "recv_message")


def _check_initialised(pe: Any, name: str) -> None:
    if _KEY not in pe.state:
        raise CslFault(f"{name} is called before init()")


def _view_buffer(name: str, buffer: Pointer, count: int) -> np.ndarray:
    """The elements of a message.

    Raises:
        CslFault: the buffer has fewer, or they have neither 16 nor 32 bits.
    """
    cells = buffer.array.reshape(-1)[buffer.index : buffer.index + count]
    if cells.size < count or cells.dtype.itemsize not in (2, 4):
        received = f"{cells.size} elements of {8 * cells.dtype.itemsize} bits"
        raise CslFault(f"{name}: {count} elements of 16 or 32 bits pass the end of the buffer", received=received)
    return cells


def _send(pe: Any, target: Any, words: np.ndarray, hops: int) -> Generator[Any, None, None]:
    start = max(pe.state.get("message ramp", 0), pe.events.now)
    pe.state["message ramp"] = start + len(words)  # messages leave one after another
    yield start + len(words)
    pe.events.at(start + len(words) + hops, partial(_deliver, target, words))


def _deliver(target: Any, words: np.ndarray) -> None:
    target.state.setdefault(_KEY, deque()).append(words)
    notify(target, "state", _KEY)


def _receive(pe: Any, buffer: Pointer) -> Generator[Any, None, None]:
    while not pe.state[_KEY]:
        yield WaitCondition("state", _KEY)
    words = pe.state[_KEY].popleft()
    cells = _view_buffer("recv_message", buffer, len(words))
    cells[:] = words.view(cells.dtype) if words.dtype.itemsize == cells.dtype.itemsize else words.astype(cells.dtype)
    yield pe.events.now + len(words)


def _finish(pe: Any, ending: dict[str, Any]) -> None:
    if "activate" in ending:
        activate(pe, int(ending["activate"]))
    if "unblock" in ending:
        unblock(pe, int(ending["unblock"]))
