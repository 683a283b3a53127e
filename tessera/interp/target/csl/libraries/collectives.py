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

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.fabric.routing import CONTROL_FLAG, Opcode, direction_numbers, encode_payload
from tessera.interp.target.csl.pe.pe_state import WaitCondition
from tessera.interp.target.csl.pe.processing_element import get_memory
from tessera.interp.target.csl.pe.scheduler import activate, notify, spawn
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ColorConfig, ComptimeValue, NativeFunction, Pointer
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault

# Threads of the operations of `<collectives_2d>`.


WORD = np.dtype(np.uint32)
TEARDOWN_WORD = encode_payload([(Opcode.TEARDOWN, True)])
CollectiveThread = Generator[Any, None, None]


@dataclass(frozen=True)
class PeLine:
    """One axis: its colors, and its two directions."""

    colors: tuple[int, int]
    back: str
    forth: str
    vertical: bool

    def place(self, pe: Any) -> int:
        """The index of a PE on its line."""
        return pe.y if self.vertical else pe.x

    def length(self, pe: Any) -> int:
        """The number of PEs on the line."""
        return pe.fabric.node.fabric.height if self.vertical else pe.fabric.node.fabric.width


class CollectiveRole:
    """One PE's part in an operation: the positions of the root and the neighbours, and the links to them."""

    def __init__(self, line: PeLine, pe: Any, root: int) -> None:
        self.line, self.pe = line, pe
        self.me, self.last, self.root = line.place(pe), line.length(pe) - 1, root
        self.distance = abs(self.me - root)
        self.used: list[int] = []

    @property
    def ends_here(self) -> bool:
        """Whether this PE is the last one on its side of the root."""
        return self.me in (0, self.last)

    @property
    def beyond(self) -> int:
        """The number of PEs farther from the root."""
        return self.me if self.me < self.root else self.last - self.me

    def sides(self) -> Iterator[tuple[bool, int]]:
        """The sides of the root that have PEs: whether the side is the lower one, and its number of PEs."""
        if self.root > 0:
            yield True, self.root
        if self.root < self.last:
            yield False, self.last - self.root

    def color(self, distance: int, behind: bool) -> int:
        """The color of the link between a distance and the next smaller one."""
        return self.line.colors[(distance + (not behind)) % 2]

    def inner(self) -> int:
        """The color of the link towards the root."""
        return self.color(self.distance, self.me < self.root)

    def outer(self) -> int:
        """The color of the link away from the root."""
        return self.color(self.distance + 1, self.me < self.root)

    def toward(self) -> str:
        """The direction of the root."""
        return self.line.forth if self.me < self.root else self.line.back

    def away(self) -> str:
        """The direction away from the root."""
        return self.line.back if self.me < self.root else self.line.forth

    def open(self, color: int, rx: tuple[str, ...], tx: tuple[str, ...]) -> None:
        """Set a color's route and exit its teardown."""
        pe, node = self.pe, self.pe.fabric.node
        channel = node.channels.get(color) or node.get_routed_channel(color)
        channel.open(direction_numbers(rx), direction_numbers(tx))
        if color not in node.handlers:
            node.handlers[color] = lambda: notify(pe, "state", ("rest", color))
        self.used.append(color)

    def send(self, color: int, left: list[int]) -> CollectiveThread:
        """Send words."""
        output = self.pe.fabric.node.get_output(color)
        while left and not output.offer(left):
            yield WaitCondition("out", color)
        while output.words and not output.is_settled():
            yield WaitCondition("out", color)

    def end(self, color: int) -> CollectiveThread:
        """Send the teardown command of a color."""
        output = self.pe.fabric.node.get_output(color)
        while not output.offer([TEARDOWN_WORD | CONTROL_FLAG]):
            yield WaitCondition("out", color)

    def receive(self, color: int, count: int, use: Callable[[int, list[int]], None]) -> CollectiveThread:
        """Receive `count` words; `use(start, words)` handles them, all at once if possible."""
        queue, events, waiting = self.pe.fabric.get_queue(color), self.pe.events, WaitCondition("in", color)
        done, whole = 0, self.pe.fabric.node.fabric.streams
        while done < count:
            words = queue.take(events.now, count - done)
            if words:
                use(done, words)
                done += len(words)
                continue
            queue.await_stream(count - done, whole)
            yield waiting

    def store(self, color: int, target: np.ndarray) -> CollectiveThread:
        """Receive the words of `target`."""

        def use(start: int, words: list[int]) -> None:
            target[start : start + len(words)] = np.array(words, np.uint32)

        return self.receive(color, target.size, use)

    def forward(
        self, source: int, color: int, count: int, change: Callable[[int, list[int]], list[int]] | None = None
    ) -> CollectiveThread:
        """Receive words on one color and send them, or `change(start, words)`, on another as they arrive."""
        queue, output, events = self.pe.fabric.get_queue(source), self.pe.fabric.node.get_output(color), self.pe.events
        arrival, room = WaitCondition("in", source), WaitCondition("out", color)
        done, arrived = 0, queue.words
        while done < count:
            words = queue.take(events.now, count - done) if arrived.count else None
            if not words:
                queue.want(count - done)
                yield arrival
                continue
            if change is not None:
                words = change(done, words)
            done += len(words)
            while not output.offer(words):
                yield room
            while output.words and not output.is_settled():
                yield room

    def rest(self) -> CollectiveThread:
        """Wait until the used colors are in teardown."""
        channels = self.pe.fabric.node.channels
        for color in self.used:
            while not channels[color].route.in_teardown:
                yield WaitCondition("state", ("rest", color))


def broadcast(part: CollectiveRole, buffer: np.ndarray) -> CollectiveThread:
    """Broadcast the root's buffer; routers replicate the wavelets."""
    color = part.line.colors[0]
    if part.distance == 0:
        directions = tuple(part.line.back if behind else part.line.forth for behind, _ in part.sides())
        if directions:
            part.open(color, ("RAMP",), directions)
            yield from part.send(color, buffer.tolist())
            yield from part.end(color)
    else:
        part.open(color, (part.toward(),), ("RAMP",) if part.ends_here else ("RAMP", part.away()))
        yield from part.store(color, buffer)
    yield from part.rest()


def scatter(part: CollectiveRole, send: np.ndarray, receive: np.ndarray) -> CollectiveThread:
    """Scatter the root's buffer: every PE keeps its first part, and forwards the rest."""
    count = receive.size
    if part.distance == 0:
        receive[:] = send[part.me * count : (part.me + 1) * count]
        for behind, number in part.sides():
            color = part.color(1, behind)
            part.open(color, ("RAMP",), (part.line.back if behind else part.line.forth,))
            for far in range(1, number + 1):
                index = part.me - far if behind else part.me + far
                yield from part.send(color, send[index * count : (index + 1) * count].tolist())
            yield from part.end(color)
    else:
        part.open(part.inner(), (part.toward(),), ("RAMP",))
        if part.beyond:
            part.open(part.outer(), ("RAMP",), (part.away(),))
        yield from part.store(part.inner(), receive)
        yield from part.forward(part.inner(), part.outer(), part.beyond * count)
        if part.beyond:
            yield from part.end(part.outer())
    yield from part.rest()


def gather(part: CollectiveRole, send: np.ndarray, receive: np.ndarray) -> CollectiveThread:
    """Gather all buffers at the root: every PE sends its own first, then forwards."""
    count = send.size
    if part.distance == 0:
        receive[part.me * count : (part.me + 1) * count] = send
        for behind, number in part.sides():
            part.open(part.color(1, behind), (part.line.back if behind else part.line.forth,), ("RAMP",))
            for far in range(1, number + 1):
                index = part.me - far if behind else part.me + far
                yield from part.store(part.color(1, behind), receive[index * count : (index + 1) * count])
    else:
        part.open(part.inner(), ("RAMP",), (part.toward(),))
        if part.beyond:
            part.open(part.outer(), (part.away(),), ("RAMP",))
        yield from part.send(part.inner(), send.tolist())
        yield from part.forward(part.outer(), part.inner(), part.beyond * count)
        yield from part.end(part.inner())
    yield from part.rest()


def reduce_fadds(part: CollectiveRole, send: np.ndarray, receive: np.ndarray) -> CollectiveThread:
    """Reduce all buffers to the root: from both ends, every PE adds its own and sends the sum on."""
    own = send.view(np.float32)
    if part.distance == 0:
        total = own.copy()

        def add(start: int, words: list[int]) -> None:
            total[start : start + len(words)] += np.array(words, np.uint32).view(np.float32)

        for behind, _ in part.sides():
            part.open(part.color(1, behind), (part.line.back if behind else part.line.forth,), ("RAMP",))
        for behind, _ in part.sides():
            yield from part.receive(part.color(1, behind), own.size, add)
        receive[:] = total.view(np.uint32)
    else:
        part.open(part.inner(), ("RAMP",), (part.toward(),))
        if part.beyond:
            part.open(part.outer(), (part.away(),), ("RAMP",))

            def add_own(start: int, words: list[int]) -> list[int]:
                sums = own[start : start + len(words)] + np.array(words, np.uint32).view(np.float32)
                return sums.view(np.uint32).tolist()  # type: ignore[no-any-return]

            yield from part.forward(part.outer(), part.inner(), own.size, add_own)
        else:
            yield from part.send(part.inner(), send.tolist())
        yield from part.end(part.inner())
    yield from part.rest()


# The libraries `<collectives_2d/params>` and `<collectives_2d/pe>`.


AXIS_DIRECTIONS = {"x": ("WEST", "EAST", False), "y": ("NORTH", "SOUTH", True)}
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

    def operation(
        name: str, thread: Callable[..., CollectiveThread], kinds: tuple[t.CslType, ...], sizes: Callable
    ) -> ComptimeValue:
        def run(pe: Any, root: int, *args: Any) -> None:
            *pointers, count, callback = args
            part = CollectiveRole(line, pe, int(root))
            if part.root > part.last:
                raise CslFault(f"{name}: root {part.root} is not on a line of {part.last + 1} PEs")
            buffers = [view_words(name, p, n) for p, n in zip(pointers, sizes(part, int(count)), strict=True)]
            setup = COSTS.collective_setup
            if thread is not broadcast and part.distance > 0 and part.beyond > 0:  # it forwards words
                setup += COSTS.collective_forwarding
            spawn(pe, thread(part, *buffers), lambda: activate(pe, int(callback)), name, setup)

        return ComptimeValue(
            t.CslFunctionType("", (t.U16, *kinds, t.U16, t.LOCAL_TASK), t.VOID),
            NativeFunction(name, run, cycles=20, deferrable=True, live=True),
        )

    pair = (WORD_POINTER, WORD_POINTER)
    return {
        "pe_id": number,
        "init": ComptimeValue(t.CslFunctionType("", (), t.VOID), NativeFunction("init", init, cycles=40, live=True)),
        "broadcast": operation("broadcast", broadcast, (WORD_POINTER,), lambda part, n: (n,)),
        "scatter": operation("scatter", scatter, pair, lambda part, n: (count_root_words(part, n), n)),
        "gather": operation("gather", gather, pair, lambda part, n: (n, count_root_words(part, n))),
        "reduce_fadds": operation("reduce_fadds", reduce_fadds, (FLOAT_POINTER, FLOAT_POINTER), lambda part, n: (n, n)),
    }


def count_root_words(part: CollectiveRole, count: int) -> int:
    """The number of words of the buffer that only the root uses."""
    return count * (part.last + 1) if part.distance == 0 else 0


def view_words(name: str, pointer: Pointer, count: int) -> np.ndarray:
    """The 32-bit words at a pointer.

    Raises:
        CslFault: the variable has fewer words.
    """
    array, index = pointer
    flat = array if array.ndim == 1 else array.reshape(-1)
    words: Any = flat[index : index + count] if array.itemsize == 4 else ()
    if len(words) < count:
        raise CslFault(
            f"{name} of {count} words passes the end of its buffer", received=f"{array.size - index} elements"
        )
    return words.view(WORD)  # type: ignore[no-any-return]


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
