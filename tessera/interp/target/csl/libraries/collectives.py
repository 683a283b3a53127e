"""Collective libraries: `<collectives_2d>` (broadcast, scatter, gather, reduce along a line of PEs) and
`<kernels/tally>` (termination detection).

The two colors of a line are in teardown between operations. An operation sets its routes at each PE and exits
teardown; the last word of a stream is a teardown command, so that a color is in teardown again before the next
operation changes its routes. The link from distance d to d - 1 of the root uses color d mod 2 on one side of the root
and the other color on the other side: no PE sends and receives on one color. The vendor's tally kernel is closed
source: this one counts at the north-east PE, where a message arrives one cycle later per hop, and uses no queue and no
wavelet.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.fabric.routing import (
    CONTROL_FLAG,
    EAST,
    NORTH,
    RAMP,
    SOUTH,
    WEST,
    Directions,
    Opcode,
    encode_payload,
)
from tessera.interp.target.csl.pe.pe_state import WaitCondition
from tessera.interp.target.csl.pe.processing_element import get_memory
from tessera.interp.target.csl.pe.scheduler import activate, resume_at_once, spawn
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ColorConfig, ComptimeValue, NativeFunction, Pointer
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault

# Threads of the operations of `<collectives_2d>`.


WORD = np.dtype(np.uint32)
TEARDOWN_COMMAND = CONTROL_FLAG | encode_payload([(Opcode.TEARDOWN, True)])
UP: Directions = (RAMP,)
CollectiveThread = Generator[Any, None, None]


@dataclass(frozen=True)
class PeLine:
    """One axis: its colors, and its two directions."""

    colors: tuple[int, int]
    back: Directions
    forth: Directions
    vertical: bool

    def place(self, pe: Any) -> int:
        """The index of a PE on its line."""
        return pe.y if self.vertical else pe.x

    def color(self, distance: int, behind: bool) -> int:
        """The color of the link between a distance and the next smaller one."""
        return self.colors[(distance + (not behind)) % 2]


class CollectiveRole:
    """The part of the PEs at one index of parallel lines in the operations of one root: the links to its neighbours.

    `inner` and `outer` are the colors of the links towards the root and away from it, `toward` and `away` their
    directions. `beyond` is the number of PEs farther from the root. `sides` are those of the root that have PEs:
    whether the side is the lower one, its number of PEs, its color and direction. Broadcasts use `color`.
    """

    __slots__ = (
        "away", "beyond", "color", "distance", "ends_here", "forwards", "inner", "last", "me", "outer", "sides",
        "toward",
    )  # fmt: skip

    def __init__(self, line: PeLine, me: int, last: int, root: int) -> None:
        below = me < root
        self.me, self.last, self.distance, self.color = me, last, abs(me - root), line.colors[0]
        self.ends_here = me in (0, last)
        self.beyond = me if below else last - me
        self.forwards = self.distance > 0 and self.beyond > 0
        self.inner, self.outer = line.color(self.distance, below), line.color(self.distance + 1, below)
        self.toward, self.away = (line.forth, line.back) if below else (line.back, line.forth)
        sides = ((True, root, line.color(1, True), line.back), (False, last - root, line.color(1, False), line.forth))
        self.sides = [side for side in sides if side[1]]


@lru_cache(maxsize=1024)
def await_word(color: int) -> WaitCondition:
    """The wait for a wavelet of a color."""
    return WaitCondition("in", color)


@lru_cache(maxsize=1024)
def await_room(color: int) -> WaitCondition:
    """The wait for room in the output queue of a color."""
    return WaitCondition("out", color)


@lru_cache(maxsize=1024)
def await_teardown(color: int) -> WaitCondition:
    """The wait for the teardown of a color."""
    return WaitCondition("state", ("rest", color))


def end_rest(pe: Any, waiting: WaitCondition, time: int) -> None:
    """Let the operation that waits for a teardown continue when it begins; one that looks later does not wait."""
    threads = pe.waiters.pop(waiting, None) if pe.waiters else None
    if threads:
        pe.events.at(time, partial(resume_at_once, pe, threads))


class CollectiveOperation:
    """One operation on a PE: its role, and the channels that it uses."""

    __slots__ = ("events", "node", "pe", "role", "used")

    def __init__(self, pe: Any, role: CollectiveRole) -> None:
        self.pe, self.role, self.node, self.events = pe, role, pe.fabric.node, pe.events
        self.used: list[Any] = []

    def open(self, color: int, rx: Directions, tx: Directions) -> None:
        """Set a color's route and exit its teardown."""
        node = self.node
        channel = node.channels.get(color) or node.get_routed_channel(color)
        channel.open(rx, tx)
        if color not in node.handlers:
            node.handlers[color] = partial(end_rest, self.pe, await_teardown(color))
        self.used.append(channel)

    def send(self, color: int, left: list[int]) -> CollectiveThread:
        """Send words."""
        output = self.node.get_output(color)
        while left and not output.offer(left):
            yield await_room(color)
        while output.words and not output.is_settled():
            yield await_room(color)

    def end(self, color: int) -> CollectiveThread:
        """Send the teardown command of a color."""
        output = self.node.get_output(color)
        while not output.offer_command(TEARDOWN_COMMAND):
            yield await_room(color)

    def receive(self, color: int, count: int, use: Callable[[int, list[int]], None]) -> CollectiveThread:
        """Receive `count` words; `use(start, words)` handles them, all at once if possible."""
        queue, events, done = self.node.get_input(color), self.events, 0
        arrived, whole = queue.words, self.node.fabric.streams
        while done < count:
            words = queue.take(events.now, count - done) if arrived.count else None
            if words:
                use(done, words)
                done += len(words)
                continue
            queue.await_stream(count - done, whole)
            yield await_word(color)

    def store(self, color: int, target: np.ndarray) -> CollectiveThread:
        """Receive the words of `target`."""

        def use(start: int, words: list[int]) -> None:
            target[start : start + len(words)] = np.array(words, WORD)

        return self.receive(color, target.size, use)

    def forward(
        self, source: int, color: int, count: int, change: Callable[[int, list[int]], list[int]] | None = None
    ) -> CollectiveThread:
        """Receive words on one color and send them, or `change(start, words)`, on another as they arrive.

        The event of their arrival sends them itself, unless they have to wait for room.
        """
        queue, output, events = self.node.get_input(source), self.node.get_output(color), self.events
        done, arrived, direct = 0, queue.words, self.pe.wide and self.node.fabric.steady

        def relay() -> bool:
            nonlocal done
            if output.words or (change is not None and self.pe.pending):
                return False
            words = queue.take(events.now, count - done)
            if not words:
                return False
            start = done
            done += len(words)
            output.offer(words if change is None else change(start, words))
            if output.words or done == count:
                return False
            queue.want(count - done)
            return True

        while done < count:
            words = queue.take(events.now, count - done) if arrived.count else None
            if words:
                start = done
                done += len(words)
                if change is not None:
                    words = change(start, words)
                while not output.offer(words):
                    yield await_room(color)
            else:
                queue.want(count - done)
                queue.relay = relay if direct else None
                yield await_word(source)
            while output.words and not output.is_settled():
                yield await_room(color)

    def rest(self) -> CollectiveThread:
        """Wait until the used colors are in teardown."""
        for channel in self.used:
            while not channel.route.in_teardown:
                yield await_teardown(channel.color)


def broadcast(part: CollectiveOperation, buffer: np.ndarray) -> CollectiveThread:
    """Broadcast the root's buffer; routers replicate the wavelets."""
    role, color = part.role, part.role.color
    if role.distance == 0:
        directions = sum([direction for _, _, _, direction in role.sides], ())
        if directions:
            part.open(color, UP, directions)
            yield from part.send(color, buffer.tolist())
            yield from part.end(color)
    else:
        part.open(color, role.toward, UP if role.ends_here else UP + role.away)
        yield from part.store(color, buffer)
    yield from part.rest()


def scatter(part: CollectiveOperation, send: np.ndarray, receive: np.ndarray) -> CollectiveThread:
    """Scatter the root's buffer: every PE keeps its first part, and forwards the rest."""
    role, count = part.role, receive.size
    if role.distance == 0:
        receive[:] = send[role.me * count : (role.me + 1) * count]
        for behind, number, color, direction in role.sides:
            part.open(color, UP, direction)
            for far in range(1, number + 1):
                index = role.me - far if behind else role.me + far
                yield from part.send(color, send[index * count : (index + 1) * count].tolist())
            yield from part.end(color)
    else:
        part.open(role.inner, role.toward, UP)
        if role.beyond:
            part.open(role.outer, UP, role.away)
        yield from part.store(role.inner, receive)
        if role.beyond:
            yield from part.forward(role.inner, role.outer, role.beyond * count)
            yield from part.end(role.outer)
    yield from part.rest()


def gather(part: CollectiveOperation, send: np.ndarray, receive: np.ndarray) -> CollectiveThread:
    """Gather all buffers at the root: every PE sends its own first, then forwards."""
    role, count = part.role, send.size
    if role.distance == 0:
        receive[role.me * count : (role.me + 1) * count] = send
        for behind, number, color, direction in role.sides:
            part.open(color, direction, UP)
            for far in range(1, number + 1):
                index = role.me - far if behind else role.me + far
                yield from part.store(color, receive[index * count : (index + 1) * count])
    else:
        part.open(role.inner, UP, role.toward)
        if role.beyond:
            part.open(role.outer, role.away, UP)
        yield from part.send(role.inner, send.tolist())
        if role.beyond:
            yield from part.forward(role.outer, role.inner, role.beyond * count)
        yield from part.end(role.inner)
    yield from part.rest()


def reduce_fadds(part: CollectiveOperation, send: np.ndarray, receive: np.ndarray) -> CollectiveThread:
    """Reduce all buffers to the root: from both ends, every PE adds its own and sends the sum on."""
    role, own = part.role, send.view(np.float32)
    if role.distance == 0:
        total = own.copy()

        def add(start: int, words: list[int]) -> None:
            total[start : start + len(words)] += np.array(words, WORD).view(np.float32)

        for _, _, color, direction in role.sides:
            part.open(color, direction, UP)
        for _, _, color, _ in role.sides:
            yield from part.receive(color, own.size, add)
        receive[:] = total.view(WORD)
    else:
        part.open(role.inner, UP, role.toward)
        if role.beyond:
            part.open(role.outer, role.away, UP)

            def add_own(start: int, words: list[int]) -> list[int]:
                sums = own[start : start + len(words)] + np.array(words, WORD).view(np.float32)
                return sums.view(WORD).tolist()  # type: ignore[no-any-return]

            yield from part.forward(role.outer, role.inner, own.size, add_own)
        else:
            yield from part.send(role.inner, send.tolist())
        yield from part.end(role.inner)
    yield from part.rest()


# The libraries `<collectives_2d/params>` and `<collectives_2d/pe>`.


AXIS_DIRECTIONS = {"x": ((WEST,), (EAST,), False), "y": ((NORTH,), (SOUTH,), True)}
# The configuration of a library color between operations.
RESTING_CONFIG = ColorConfig(("RAMP",), ("RAMP",), teardown=True)
WORD_POINTER = t.CslPointer("", t.U32, many=True)
FLOAT_POINTER = t.CslPointer("", t.F32, many=True)


def make_collectives_params(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """`get_params(Px, Py, ids)`: the axes for which colors are given; equal for every PE."""

    def get_params(unit: Any, x: ComptimeValue, y: ComptimeValue, ids: ComptimeValue) -> ComptimeValue:
        axes = {axis: make_axis_params(axis, ids.data) for axis in AXIS_DIRECTIONS if f"{axis}_colors" in ids.data}
        if not axes:
            raise CslError("collectives_2d needs x_colors or y_colors", expected=".x_colors = .{ c0, c1 }, …")
        return ComptimeValue(t.ANON, axes)

    kind = t.CslFunctionType("", (None, None, None), t.ANON)
    return {"get_params": ComptimeValue(kind, NativeFunction("get_params", get_params, comptime=True))}


def make_axis_params(axis: str, ids: dict[str, ComptimeValue]) -> ComptimeValue:
    """The `dim_params` of `<collectives_2d/pe>`.

    Raises:
        CslError: the colors or task ids of the axis are not two distinct ones.
    """
    for name in ("colors", "entrypoints"):
        values = ids.get(f"{axis}_{name}")
        numbers = [value.data for value in values.data.values()] if values else []
        if len(set(numbers)) != 2 or len(numbers) != 2:
            raise CslError(f"collectives_2d needs two distinct {axis}_{name}", received=str(numbers))
    fields = {"axis": ComptimeValue(t.STRING, axis), "colors": ids[f"{axis}_colors"]}
    return ComptimeValue(t.ANON, fields)


def make_collectives_pe(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, Any]:
    """The operations along one axis, and `pe_id`, this PE's index on its line, which `init()` sets."""
    if "dim_params" not in params:
        raise CslError("collectives_2d/pe needs dim_params", expected="the x or y field of the result of get_params()")
    fields = params["dim_params"].data
    colors = tuple(int(value.data) for value in fields["colors"].data.values())
    line = PeLine((colors[0], colors[1]), *AXIS_DIRECTIONS[fields["axis"].data])
    number = unit.add_variable("pe_id", t.U16, 0)
    for color in line.colors:
        unit.set_color(color, RESTING_CONFIG)

    def init(pe: Any) -> None:
        get_memory(pe, number)[0] = line.place(pe)

    roles: dict[tuple[int, int, int], CollectiveRole] = {}

    def find_role(pe: Any, root: int, name: str) -> CollectiveRole:
        fabric = pe.fabric.node.fabric
        place, last = (pe.y, fabric.height - 1) if line.vertical else (pe.x, fabric.width - 1)
        role = roles.get((place, last, root))
        if role is None:
            if root > last:
                raise CslFault(f"{name}: root {root} is not on a line of {last + 1} PEs")
            role = roles[place, last, root] = CollectiveRole(line, place, last, root)
        return role

    def operation(
        name: str, thread: Callable[..., CollectiveThread], kinds: tuple[t.CslType, ...], sizes: Callable
    ) -> ComptimeValue:
        def run(pe: Any, root: int, *args: Any) -> None:
            *pointers, count, callback = args
            role = find_role(pe, int(root), name)
            buffers = [view_words(name, p, n) for p, n in zip(pointers, sizes(role, int(count)), strict=True)]
            setup = COSTS.collective_setup
            if role.forwards and thread is not broadcast:
                setup += COSTS.collective_forwarding
            part = CollectiveOperation(pe, role)
            spawn(pe, thread(part, *buffers), lambda: activate(pe, int(callback)), name, setup)

        return ComptimeValue(
            t.CslFunctionType("", (t.U16, *kinds, t.U16, t.LOCAL_TASK), t.VOID),
            NativeFunction(name, run, cycles=20, deferrable=True, live=True),
        )

    pair = (WORD_POINTER, WORD_POINTER)
    return {
        "pe_id": number,
        "init": ComptimeValue(t.CslFunctionType("", (), t.VOID), NativeFunction("init", init, cycles=40, live=True)),
        "broadcast": operation("broadcast", broadcast, (WORD_POINTER,), lambda role, n: (n,)),
        "scatter": operation("scatter", scatter, pair, lambda role, n: (count_root_words(role, n), n)),
        "gather": operation("gather", gather, pair, lambda role, n: (n, count_root_words(role, n))),
        "reduce_fadds": operation("reduce_fadds", reduce_fadds, (FLOAT_POINTER, FLOAT_POINTER), lambda role, n: (n, n)),
    }


def count_root_words(role: CollectiveRole, count: int) -> int:
    """The number of words of the buffer that only the root uses."""
    return count * (role.last + 1) if role.distance == 0 else 0


def view_words(name: str, pointer: Pointer, count: int) -> np.ndarray:
    """The 32-bit words at a pointer.

    Raises:
        CslFault: the variable has fewer words.
    """
    array, index = pointer
    flat = array if array.ndim == 1 else array.reshape(-1)
    if array.itemsize == 4:
        words = flat[index : index + count]
        if words.size == count:
            return words.view(WORD)  # type: ignore[no-any-return]
    raise CslFault(f"{name} of {count} words passes the end of its buffer", received=f"{array.size - index} elements")


# The libraries `<kernels/tally/layout>` and `<kernels/tally/pe>`: termination detection.


TALLY_FIELDS = ("kernel_height", "kernel_width", "phase2_tally", "colors", "output_color")


@dataclass
class Tally:
    """The state of the counting PE: the finished PEs, the count, and whether it has reported."""

    width: int
    height: int
    goal: int
    done: set[tuple[int, int]] = field(default_factory=set)
    total: int = 0
    told: bool = False

    @property
    def complete(self) -> bool:
        """Whether every PE has finished and the goal of the second phase is reached."""
        return len(self.done) == self.width * self.height and self.total >= self.goal


def make_tally_layout(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """`get_params(x, y)`: the parameters of `<kernels/tally/pe>`; equal for all PEs."""
    lacking = [name for name in TALLY_FIELDS if name not in params]
    if lacking:
        raise CslError("wrong parameters of <kernels/tally/layout>", expected=", ".join(TALLY_FIELDS))
    run = NativeFunction("get_params", lambda unit, x, y: ComptimeValue(t.ANON, dict(params)), comptime=True)
    return {"get_params": ComptimeValue(t.CslFunctionType("", (None, None), t.ANON), run)}


def make_tally_pe(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """`signal_completion()`, `bump_tally(n)`, and `local_tally`: the total, on the north-east PE at the end.

    That PE activates the task `callback`; without that parameter it sends the total on the output color.
    """
    fields = params.get("tally_params")  # SDK 1.4 merges the fields into the parameters, 2.10 passes the struct
    params = {**fields.data, **params} if fields is not None else params
    width, height, goal = (int(params[name].data) for name in ("kernel_width", "kernel_height", "phase2_tally"))
    total = unit.add_variable("local_tally", t.U32, np.uint32(0))
    callback = params.get("callback")

    def finish(pe: Any, tally: Tally) -> None:
        if tally.told or not tally.complete:
            return
        tally.told = True
        get_memory(pe, total)[0] = tally.total
        if callback is not None:
            activate(pe, int(callback.data))
        else:
            pe.fabric.push(int(params["output_color"].data), [tally.total])

    def message(pe: Any, done: bool, count: int) -> None:
        grid = pe.fabric.node.fabric
        tally = grid.shared.setdefault("tally", Tally(width, height, goal))
        place, corner = (pe.x, pe.y), grid.nodes[width - 1, 0].pe

        def come() -> None:
            tally.total += count
            if done:
                tally.done.add(place)
            finish(corner, tally)

        pe.events.at(max(pe.clock, pe.events.now) + width - 1 - pe.x + pe.y, come)

    signal = NativeFunction("signal_completion", lambda pe: message(pe, True, 0), cycles=20, live=True)
    bump = NativeFunction("bump_tally", lambda pe, count: message(pe, False, int(count)), cycles=20, live=True)
    return {
        "local_tally": total,
        "signal_completion": ComptimeValue(t.CslFunctionType("", (), t.VOID), signal),
        "bump_tally": ComptimeValue(t.CslFunctionType("", (t.U32,), t.VOID), bump),
    }
