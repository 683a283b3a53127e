"""Router: one channel for each routed color at each PE, with finite buffers, links and backpressure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tessera.interp.target.csl.fabric.data_path import DataPath
from tessera.interp.target.csl.fabric.output_queue import OutputQueue
from tessera.interp.target.csl.fabric.queues import HostSink, InputQueue
from tessera.interp.target.csl.fabric.routing import (
    ADVANCE_FLAG,
    CONTROL_FLAG,
    DIRECTION_NAMES,
    HOST,
    OPPOSITE,
    RAMP,
    WORD_MASK,
    ColorRoute,
    Directions,
    SwitchPosition,
    decode_commands,
    ends_in_routers,
)
from tessera.interp.target.csl.fabric.word_buffer import Run, WordBuffer
from tessera.interp.target.csl.sema.values import ColorConfig

if TYPE_CHECKING:
    from tessera.interp.target.csl.fabric.edge_channel import EdgeChannel
    from tessera.interp.target.csl.fabric.router_grid import Fabric


# A direction, the target, and the words that wait there.
Way = tuple[int, Any, WordBuffer]
CLOSED_DEPTH = 0  # words that a router takes from a direction which its switch position does not: slides of vectors
_DOWN = (RAMP,)
MAX_LOOKAHEAD = 512  # routers on the ways of a burst that are asked for room


class RouterNode:
    """The fabric's state at one PE."""

    __slots__ = (
        "ahead", "channels", "fabric", "handlers", "inputs", "links", "outputs", "path", "pe", "ramp", "traffic", "x",
        "y",
    )  # fmt: skip

    def __init__(self, fabric: Fabric, x: int, y: int) -> None:
        self.fabric, self.x, self.y = fabric, x, y
        self.pe: Any = None
        self.channels: dict[int, RouterChannel] = {}
        self.inputs: dict[int, InputQueue] = {}
        self.outputs: dict[int, OutputQueue] = {}
        self.links = [0] * len(DIRECTION_NAMES)  # the first free cycle of each outgoing link
        self.traffic = [0] * len(DIRECTION_NAMES)  # the number of wavelets sent in each direction
        # What a library does about a teardown that begins at a cycle, by color.
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.ramp = 0  # the last cycle in which the PE sent a word up the ramp
        self.ahead: OutputQueue | None = None  # the queue that sent words ahead of their time
        self.path = DataPath(self) if fabric.arch == "wse2" else None  # that of WSE-3 is wide enough for all

    @property
    def name(self) -> str:
        """The PE's name in reports."""
        return f"PE ({self.x}, {self.y})"

    def get_input(self, color: int) -> InputQueue:
        """The input queue of a color."""
        queue = self.inputs.get(color)
        if queue is None:
            queue = self.inputs[color] = InputQueue(self, color)
        return queue

    def get_routed_channel(self, color: int) -> RouterChannel:
        """The channel of a color whose first route the program sets at run time."""
        channel = RouterChannel(self, color, ColorRoute((), (), reconfigurable=True), ColorConfig((), ()))
        self.channels[color] = channel
        if color in self.outputs:
            self.outputs[color].connect(channel)
        return channel

    def get_output(self, color: int) -> OutputQueue:
        """The output queue of a color."""
        queue = self.outputs.get(color)
        if queue is None:
            queue = self.outputs[color] = OutputQueue(self, color, self.channels.get(color))
        return queue


class RouterChannel:
    """One color at one PE's router: a finite buffer for each direction, and its route."""

    __slots__ = (
        "_here", "_hop", "_last", "_later", "_links", "_log", "_onward", "_origin", "_serve", "_slots", "_traffic",
        "_ways", "ahead", "color", "config", "depth", "due", "events", "granted", "inputs", "marked", "neighbours",
        "node", "ramp_color", "route", "sink", "steady",
    )  # fmt: skip

    def __init__(self, node: RouterNode, color: int, route: ColorRoute, config: ColorConfig) -> None:
        self.node, self.color, self.route, self.config = node, color, route, config
        self.depth, self.events, self.steady = node.fabric.depth, node.fabric.events, node.fabric.steady
        self.inputs = tuple([WordBuffer(self.depth) for _ in DIRECTION_NAMES])
        self.open_inputs()
        self.neighbours: list[RouterChannel | EdgeChannel | None] = [None] * len(DIRECTION_NAMES)
        self.sink: HostSink | None = None  # words to the host
        # A swap on both axes also exchanges the colors of a pair at the ramp.
        self.ramp_color = color ^ 1 if config.swap_x and config.swap_y else color
        self.marked = 0  # the words in the buffers that are not plain data
        self.granted = 0  # words in the buffers whose way is known to be clear
        self.ahead: OutputQueue | None = None  # the queue that sent words ahead of their time
        self._last, self._later = 0, node.fabric.hop - 1  # cycles more of a hop than of the way down the ramp
        self.due: int | None = None
        self._links, self._traffic, self._log = node.links, node.traffic, node.fabric.log
        self._serve, self._slots = self._service, self.events.slots
        self._here: SwitchPosition = ((), ())  # the directions from and to which `_origin` and `_ways` are
        self._origin: WordBuffer | None = None  # the buffer of the only direction
        self._ways: list[Way] = []
        self._onward: list[Way] = []  # the ways that do not lead down the ramp
        self._hop = 1  # the cycles of a word from here to the end of the first way

    def open_inputs(self) -> None:
        """Take words from the directions of the present switch position; from the others `CLOSED_DEPTH` words.

        A route that the program changes at run time takes words from every side.
        """
        route, inputs = self.route, self.inputs
        if len(route.positions) == 1 or route.reconfigurable:
            for buffer in inputs:
                buffer.limit = self.depth
            return
        rx = route.here[0]
        for direction in route.sources:
            inputs[direction].limit = self.depth if direction in rx else CLOSED_DEPTH

    def make_reconfigurable(self) -> None:
        """Let the program change the route."""
        if not self.route.reconfigurable:
            self.route.reconfigurable = True
            self.open_inputs()

    def open(self, rx: Directions, tx: Directions) -> None:
        """Replace switch position 0, and end the teardown."""
        if not self.route.reconfigurable:
            self.make_reconfigurable()
        for direction in rx:
            if self.inputs[direction].count or not self.steady:  # with a seed the number of events decides its choices
                self.wake(self.events.now)
                break
        self.route.open(rx, tx)

    def _finish_switch(self, time: int) -> None:
        """Open the inputs of the new switch position to the senders that wait there."""
        self.open_inputs()
        for direction in self.route.here[0]:
            if self.inputs[direction].has_room():
                self.inputs[direction].wake_feeder(time)

    def add(self, direction: int, time: int, word: int) -> None:
        """Insert a word that arrives from `direction` at `time`."""
        self.check_direction(direction)
        buffer = self.inputs[direction]
        self.marked += word > WORD_MASK
        buffer.append(max(time, buffer.last + 1) if buffer.count else time, word)

    def receive(self, direction: int, time: int, word: int) -> None:
        """Insert a word of a neighbour, and schedule its step."""
        self.add(direction, time, word)
        self.wake(self.inputs[direction].runs[0][0])

    def check_direction(self, direction: int) -> None:
        """Raise the fault of words from a direction that no position of the route accepts."""
        route = self.route
        if route.reconfigurable or direction in route.sources:
            return
        takes = " or ".join(sorted({DIRECTION_NAMES[d] for rx, _ in self.route.positions for d in rx}))
        self.node.fabric.raise_fault(
            f"a wavelet of color {self.color} comes from {DIRECTION_NAMES[direction]} into {self.node.name}, "
            f"whose route takes it from {takes} only",
            self,
        )

    def get_host_sink(self) -> HostSink:
        """The sink of words that leave towards the host."""
        if self.sink is None:
            self.sink = HostSink()
        return self.sink

    def wake(self, time: int) -> None:
        """Schedule a step at that time, unless an earlier one is scheduled."""
        now, due = self.events.now, self.due
        if time < now:
            time = now
        if due is None or time < due:
            self.due = time
            calls = self._slots.get(time)
            if calls is None:
                self.events.at(time, self._serve)
            else:
                calls.append(self._serve)

    def _service(self) -> None:
        now = self.events.now
        if self.due != now:
            return  # an earlier schedule replaced this one
        self.due = None
        if self.ahead is not None:
            self.ahead.retract()
        route = self.route
        if route.in_teardown:
            return
        buffer = self._origin if route.here is self._here else self._find_origin()
        if buffer is not None and (not buffer.count or self._relay(buffer, now)):
            return
        while self._step(now):
            pass

    def _relay(self, buffer: WordBuffer, now: int) -> bool:
        """Forward the words of the only direction if they are a run of plain data for which every way has room, a
        control wavelet that ends in the routers, or both, or wait.

        Equal to `_step`, for the cases that are by far the most frequent. Returns whether nothing is left to do.
        """
        runs = buffer.runs
        start, words = runs[0]
        if words[0] > WORD_MASK:
            return len(runs) == 1 and self._relay_command(buffer, now)
        count, links, last, ways, blocked = len(words), self._links, self._last, self._ways, False
        if count != buffer.count and (len(runs) > 2 or runs[1][1][0] <= WORD_MASK):
            return False
        after = last + 1 if last >= now else now
        start = after if start < after else start
        for direction, _, room in ways:
            free = room.limit - room.count
            if free < count:
                if free > 0:
                    return self._fill(buffer, now, free)
                room.feeder = self
                blocked = True
            if links[direction] > start:
                start = links[direction]
        if blocked:
            return True
        del runs[0]
        self.granted = 0
        buffer.count -= count
        end = start + count
        self._last = end - 1
        if self._log is None and len(ways) == 1:  # as `_deliver_run`
            direction, target, room = ways[0]
            links[direction] = end
            self._traffic[direction] += count
            target.append(room, (start + self._hop, words), count)
        else:
            self._deliver_run((start + 1, words), count)
        if buffer.feeder is not None:
            buffer.wake_feeder(start)
        return not runs or (len(runs) == 1 and self._relay_command(buffer, now))

    def _fill(self, buffer: WordBuffer, now: int, free: int) -> bool:
        """Forward as many words of a run as some way takes; whether nothing is left to do.

        Equal to `_burst`. If the PE's queue is the only way, and no router asked for all of them, the others wait here.
        """
        direction, _, room = self._ways[0]
        ramp = direction == RAMP and len(self._ways) == 1
        if not ramp or free > self.depth or self.granted >= buffer.count:
            return not self._burst(buffer, now)
        (start, words), first = buffer.runs[0], max(now, self._last + 1, self._links[RAMP])
        buffer.runs[0] = start + free, words[free:]
        buffer.count -= free
        if start > first:
            first = start
        self.granted, self._last, room.feeder = 0, first + free - 1, self
        self._deliver_run((first + 1, words[:free]), free)
        if buffer.feeder is not None:
            buffer.wake_feeder(first)
        return True

    def _relay_command(self, buffer: WordBuffer, now: int) -> bool:
        """Forward the control wavelet at the head if it ends in the routers, or wait; equal to `_step`."""
        time, (word,) = buffer.runs[0]
        if not ends_in_routers(word):
            return False
        after = self._last + 1 if self._last >= now else now
        time, links, ways = after if time < after else time, self._links, self._onward
        for direction, _, room in ways:
            if room.count >= room.limit:
                room.feeder = self
                return True
            if links[direction] > time:
                time = links[direction]
        self._last, position = time, self.route.current
        buffer.runs.clear()
        buffer.count = 0
        self.marked -= 1
        onward = self._execute_command(word, time)
        for direction, target, _ in ways:
            self._count_wavelet(direction, time)
            target.extend(OPPOSITE[direction], [(time + 1 + self._later, [onward])], 1, 1)
        if buffer.feeder is not None:
            buffer.wake_feeder(time)
        if self.route.current == position:
            return True
        self._finish_switch(time)
        return False

    def _count_wavelet(self, direction: int, time: int) -> None:
        """Note that a wavelet leaves in a direction."""
        self._links[direction] = time + 1
        self._traffic[direction] += 1
        if self._log is not None:
            self._log(self.node.x, self.node.y, direction, time, time, 1)

    def _step(self, now: int) -> bool:
        """Forward one word, or a burst of data words, if possible."""
        route = self.route
        if route.in_teardown:
            return False
        rx, tx = route.here
        if len(rx) == 1:
            origin = rx[0]
        elif not (heads := [d for d in rx if self.inputs[d].count]):
            return False
        else:
            origin = heads[0] if len(heads) == 1 else min(heads, key=lambda d: self.inputs[d].runs[0][0])
        buffer = self.inputs[origin]
        if not buffer.count:
            return False
        arrival, words = buffer.runs[0]
        if arrival > now and len(rx) > 1:
            self.wake(arrival)  # an earlier word may still arrive from another direction
            return False
        if words[0] <= WORD_MASK and (route.here is self._here or self._find_plain_ways()):
            return self._burst(buffer, now)
        return self._send_head(origin, tx, max(arrival, now, self._last + 1), words[0])

    def _send_head(self, origin: int, tx: tuple[int, ...], time: int, word: int) -> bool:
        """Forward one word, if possible."""
        targets = self._find_targets(tx, word)
        if targets is None:
            return False
        self._send(origin, targets, time, word)
        return True

    def _burst(self, buffer: WordBuffer, now: int) -> bool:
        """Forward all data words at the head that have room, one per cycle; equal to repeated `_send`."""
        count, links = self.depth, self._links
        time = self._last if self._last >= now else now - 1
        for direction, _, room in self._ways:
            free = room.limit - room.count
            if free <= 0:
                room.feeder = self
            if free < count:
                count = free
            if links[direction] > time:
                time = links[direction] - 1
        if count <= 0:
            return False
        ahead = count < buffer.count  # more words than the next buffer holds
        if ahead:
            clear = self._count_ahead(self._here[1], buffer.count)
            count, ahead = max(count, clear), clear > count
        self.granted = 0
        sent, count, self._last = buffer.pop_paced(count, time)
        self._deliver(sent, count, ahead)
        if buffer.feeder is not None:
            buffer.wake_feeder(sent[0][0] - 1)
        return buffer.count > 0 and not (len(self._here[0]) == 1 and self._is_blocked(buffer))

    def _is_blocked(self, buffer: WordBuffer) -> bool:
        """Whether the next word of a buffer is plain and finds no room; then this router waits for room."""
        if buffer.runs[0][1][0] > WORD_MASK:
            return False
        blocked = False
        for _, _, room in self._ways:
            if room.limit <= room.count:
                room.feeder = self
                blocked = True
        return blocked

    def _deliver_run(self, run: Run, count: int) -> None:
        """Forward one run of words."""
        links, traffic, last, log = self._links, self._traffic, self._last + 1, self._log
        onward = (run[0] + self._later, run[1]) if self._later else run
        for direction, target, room in self._ways:
            links[direction] = last
            traffic[direction] += count
            if log is not None:
                log(self.node.x, self.node.y, direction, run[0] - 1, last - 1, count)
            target.append(room, run if direction == RAMP else onward, count)

    def _deliver(self, sent: list[Run], count: int, ahead: bool) -> None:
        """Forward the words of a burst; `ahead`: because their whole way is clear."""
        if len(sent) == 1 and not ahead:
            self._deliver_run(sent[0], count)
            return
        links, traffic, last, log = self._links, self._traffic, self._last + 1, self._log
        for direction, target, _ in self._ways:
            links[direction] = last
            traffic[direction] += count
            if log is not None:
                log(self.node.x, self.node.y, direction, sent[0][0] - 1, last - 1, count)
            later = 0 if direction == RAMP else self._later
            target.extend(
                OPPOSITE[direction], [(time + later, words) for time, words in sent] if later else sent, count
            )
            if ahead:
                target.granted += count

    def _find_plain_ways(self) -> bool:
        """Find the ways of the present switch position, unless each word must be looked at."""
        if not self.steady or self.route.filter is not None or HOST in self.route.here[1]:
            return False
        self._find_ways()
        return True

    def _find_origin(self) -> WordBuffer | None:
        """The buffer of the only direction that words come from, empty or with known ways; None: `_step` finds it."""
        rx = self.route.here[0]
        if len(rx) != 1:
            return None
        buffer = self.inputs[rx[0]]
        return buffer if not buffer.count or self._find_plain_ways() else None

    def _find_ways(self) -> None:
        """Find the buffer that words come from, and the queues and buffers that they enter."""
        rx, tx = here = self.route.here
        if tx is not self._here[1]:
            self._ways = ways = [self._find_way(direction) for direction in tx]
            self._onward = [way for way in ways if way[0] != RAMP] if RAMP in tx else ways
            self._hop = 1 if tx[:1] == _DOWN else 1 + self._later
        self._here, self._origin = here, self.inputs[rx[0]] if len(rx) == 1 else None

    def _find_way(self, direction: int) -> Way:
        """The queue or the router that words in a direction enter, if it accepts them, and where they wait there."""
        if direction == RAMP:
            queue = self.node.get_input(self.ramp_color)
            return direction, queue, queue.words
        target, side = self._neighbour(direction), OPPOSITE[direction]
        target.check_direction(side)
        return direction, target, target.inputs[side]

    def count_accepted(self, direction: int, wanted: int, steps: list[int] | None = None) -> int:
        """The number of words from `direction` that need not wait before this router, up to `wanted`.

        More words than the buffer holds are accepted if all of them leave it again at once: the way is clear to its
        ends, where operations wait for them. `steps` bounds the routers that are looked at.
        """
        buffer, steps = self.inputs[direction], [MAX_LOOKAHEAD] if steps is None else steps
        room = buffer.limit - buffer.count
        steps[0] -= 1
        if room >= wanted or self.marked or steps[0] <= 0 or not self.node.fabric.steady:
            return min(max(room, 0), wanted)
        rx, tx = self.route.here
        if self.route.in_teardown or rx != (direction,) or self.route.filter is not None or HOST in tx:
            return room
        return max(room, self._count_passing(tx, wanted + buffer.count, steps) - buffer.count)

    def _count_ahead(self, tx: tuple[int, ...], wanted: int) -> int:
        """The number of words whose whole way is clear: known already if a router before this one asked."""
        if self.granted >= wanted:
            return wanted
        if tx == _DOWN and self._ways[0][2].limit <= self._ways[0][1].depth:
            return 0  # no operation awaits words there
        return self._count_passing(tx, wanted, [MAX_LOOKAHEAD])

    def _count_passing(self, tx: tuple[int, ...], wanted: int, steps: list[int]) -> int:
        """The number of words that every output direction accepts, up to `wanted`."""
        for direction in tx:
            if direction == RAMP:
                path = self.node.path
                if path is not None and path.is_contended(self.events.now):
                    return 0
                queue = self.node.get_input(self.ramp_color)
                # Words that an operation awaits: equal however it removes them, unlike the room of the queue.
                wanted = min(wanted, queue.words.limit - queue.depth - queue.words.count)
            else:
                neighbour = self.neighbours[direction] or self._neighbour(direction)
                wanted = neighbour.count_accepted(OPPOSITE[direction], wanted, steps)
            if wanted <= 0:
                return 0
        return wanted

    def extend(self, direction: int, runs: list[Run], count: int, marked: int = 0) -> None:
        """Insert runs of `count` words that arrive from `direction`; `marked` of them are not plain data."""
        self.check_direction(direction)
        buffer = self.inputs[direction]
        if not buffer.count or buffer.last < runs[0][0]:
            buffer.runs += runs
            buffer.count += count
        else:  # the first word waits for a word before it, and so may the others
            for time, words in runs:
                buffer.extend([(max(time, buffer.last + 1), words)], len(words))
        if marked:
            self.marked += marked
        self.wake(buffer.runs[0][0])

    def append(self, buffer: WordBuffer, run: Run, count: int) -> None:
        """Insert one run of `count` data words into the buffer of a direction that the route accepts.

        Equal to `extend`.
        """
        runs, time = buffer.runs, run[0]
        if runs:
            start, words = runs[-1]
            if start + len(words) > time:
                self.extend(self.inputs.index(buffer), [run], count)
                return
            time = runs[0][0]
        runs.append(run)
        buffer.count += count
        due = self.due
        if due is None or time < due:
            calls = self._slots.get(time)
            if calls is not None:  # of the present cycle or a later one
                self.due = time
                calls.append(self._serve)
            elif time > self.events.now:
                self.due = time
                self.events.at(time, self._serve)
            else:
                self.wake(time)

    def _find_targets(self, tx: tuple[int, ...], word: int) -> list[int] | None:
        """The output directions of a word; None if one of them has no room."""
        targets = []
        for direction in tx:
            if direction == RAMP and not self._reaches_pe(word):
                continue
            if direction != HOST:
                room = self._find_room(direction)
                if not room.has_room():
                    room.feeder = self
                    return None
            targets.append(direction)
        return targets

    def _find_room(self, direction: int) -> WordBuffer:
        """The buffer that words in a direction enter."""
        if direction == RAMP:
            return self.node.get_input(self.ramp_color).words
        return self._neighbour(direction).inputs[OPPOSITE[direction]]

    def _reaches_pe(self, word: int) -> bool:
        """Whether a word that goes down the ramp reaches the PE's code."""
        control = bool(word & CONTROL_FLAG)
        if control and decode_commands(word)[0][1]:
            return False
        return self.route.filter is None or self.route.filter.passes(word, control)

    def _neighbour(self, direction: int) -> RouterChannel | EdgeChannel:
        neighbour = self.neighbours[direction]
        if neighbour is None:
            neighbour = self.node.fabric.find_neighbour(self, direction)
            self.neighbours[direction] = neighbour
        return neighbour

    def _send(self, origin: int, targets: list[int], time: int, word: int) -> None:
        """Send the head of `origin` in all of the directions in one cycle."""
        node = self.node
        for direction in targets:
            time = max(time, self._links[direction])
        self._last, position = time, self.route.current
        self.inputs[origin].pop()
        self.marked -= word > WORD_MASK
        advances, word = word & ADVANCE_FLAG, word & ~ADVANCE_FLAG
        if self.route.filter is not None and RAMP in self.route.here[1]:
            self.route.filter.count(bool(word & CONTROL_FLAG))
        onward = self._execute_command(word, time) if word & CONTROL_FLAG else word
        delay = node.fabric.delay
        for direction in targets:
            self._count_wavelet(direction, time)
            if direction == RAMP:
                node.inputs[self.ramp_color].add(time + 1, word)
                continue
            if direction == HOST:
                self.get_host_sink().take([] if word & CONTROL_FLAG else [word])  # a stream carries data
                continue
            self._neighbour(direction).receive(OPPOSITE[direction], time + delay(), onward)
        if advances:
            self.route.advance()
        self.inputs[origin].wake_feeder(time)
        if self.route.current != position:
            self._finish_switch(time)

    def _execute_command(self, word: int, time: int) -> int:
        """Execute the first command of a routed control word."""
        route = self.route
        before = route.in_teardown
        onward = route.command(word & WORD_MASK) | CONTROL_FLAG
        if route.in_teardown and not before:
            handler = self.node.handlers.get(self.color)
            if handler is None:
                self.events.at(time, self._torn_down)
            else:
                handler(time)
        return onward

    def _torn_down(self) -> None:
        self.node.pe.handle_teardown(self.color)
