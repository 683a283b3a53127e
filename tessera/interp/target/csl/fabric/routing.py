"""Routing: wavelets and switch commands, the route of one color at one PE (switch positions, filters, teardown), and
the router registers of WSE-2.

A register has one word for each color. At 0x7f20 + color, the route: outputs in bits 0 to 4, inputs in bits 5 to 9
(west, east, south, north, ramp), the pop mode in bits 12 and 13, teardown in bit 14. At 0x7f40 + color, the switch:
four bits for each of positions 1 to 3 (a direction, or 5 for none, and a bit that marks an input), ring mode in bit 12,
the current position in bits 13 and 14. The layout follows a program in the vendor's example repository; the order of
the pop modes is specific to this simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.interp.target.csl.sema.values import DIRECTIONS
from tessera.interp.target.csl.text.diagnostics import CslFault

# Wavelets: 32 data bits and a control flag. The payload of a control wavelet holds switch commands.


CONTROL_FLAG = 1 << 32  # the flag of a control wavelet above its 32 bits
WORD_MASK = CONTROL_FLAG - 1
ADVANCE_FLAG = 1 << 33  # the flag of the last word, which advances the switch of its color
CONTROL_MARK = 3 << 30  # the upper two bits of a control wavelet that is received as data
NO_ENTRY = 31

# The bit positions of the eight commands of a payload: the opcode's lowest bit, and the ce_ignore bit.
_COMMAND_FIELDS = ((22, 24), (25, 27), (28, 0), (1, 3), (4, 6), (7, 9), (10, 12), (13, 15))
_COMMAND_BITS = sum((3 << low) | (1 << ignore) for low, ignore in _COMMAND_FIELDS)


class Opcode(IntEnum):
    """A switch command."""

    NOP = 0
    SWITCH_ADV = 1
    SWITCH_RST = 2
    TEARDOWN = 3


_OPCODES = tuple(Opcode)
# Looked up once: an attribute of an enumeration takes longer than the rest of a command.
_NOP, _ADVANCE, _RESET, _TEARDOWN = _OPCODES


def decode_entry_point(word: int) -> int | None:
    """The control task that a payload names, or None.

    >>> decode_entry_point(43 << 16), decode_entry_point(31 << 16)
    (43, None)
    """
    task_id = (word >> 16) & 0x3F
    return None if task_id == NO_ENTRY else task_id


@lru_cache(maxsize=4096)
def decode_commands(word: int) -> list[tuple[Opcode, bool]]:
    """The eight commands of a payload, each with its ce_ignore.

    >>> decode_commands((5 << 22) | (4 << 25))[:2]
    [(<Opcode.SWITCH_ADV: 1>, True), (<Opcode.NOP: 0>, True)]
    """
    return [(_OPCODES[word >> low & 3], bool(word >> ignore & 1)) for low, ignore in _COMMAND_FIELDS]


@lru_cache(maxsize=4096)
def ends_in_routers(word: int) -> bool:
    """Whether a word with its flags is a control wavelet whose first command hides it from PEs.

    >>> ends_in_routers(CONTROL_FLAG | encode_payload([(Opcode.TEARDOWN, True)])), ends_in_routers(7)
    (True, False)
    """
    return word & ~WORD_MASK == CONTROL_FLAG and decode_commands(word)[0][1]


def encode_payload(cmds: list[tuple[Opcode, bool]], entry: int = NO_ENTRY) -> int:
    """A payload with up to eight commands; missing commands are NOPs with ce_ignore.

    >>> hex(encode_payload([(Opcode.TEARDOWN, True)]))
    '0x9df9249'
    """
    word = entry << 16
    for index, (low, ignore) in enumerate(_COMMAND_FIELDS):
        opcode, keep = cmds[index] if index < len(cmds) else (Opcode.NOP, True)
        word |= int(opcode) << low | int(keep) << ignore
    return word


@lru_cache(maxsize=4096)
def pop_command(word: int) -> int:
    """The payload without its first command: the others shift, and a NOP with ce_ignore fills the end.

    >>> hex(pop_command(0x9DF9249))
    '0x91f9249'
    """
    return (word & ~_COMMAND_BITS) | (encode_payload(decode_commands(word)[1:], 0) & _COMMAND_BITS)


# Routes at run time: switch positions, pop modes, filters, teardown.


WEST, EAST, NORTH, SOUTH, RAMP, HOST = range(6)  # HOST: the entrance and exit of an `SdkLayout` stream
DIRECTION_NAMES = ("WEST", "EAST", "NORTH", "SOUTH", "RAMP", "HOST")
OPPOSITE = (EAST, WEST, SOUTH, NORTH, RAMP, HOST)
DIRECTION_STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1), (0, 0), (0, 0))
_DIRECTION_INDEX = {name: index for index, name in enumerate(DIRECTION_NAMES)}


@lru_cache(maxsize=1024)
def direction_numbers(names: Any) -> tuple[int, ...]:
    """Directions as numbers; one name means a tuple of one direction.

    >>> direction_numbers(("RAMP", "EAST")), direction_numbers("WEST")
    ((4, 1), (0,))
    """
    names = (names,) if isinstance(names, str) else names
    return tuple(_DIRECTION_INDEX[name] for name in names)


@dataclass
class WaveletFilter:
    """A filter of the wavelets of a color that may go down the ramp.

    "range": accepts data whose upper half (the index) is in `low .. high`, and all control wavelets. "counter": counts
    wavelets modulo `limit` + 1, and accepts a wavelet while the counter is at most `top` (with `control_at_top` it
    accepts a control wavelet only at `top`). "sparse_counter": as "counter", but after each round the next value of
    `later` becomes the limit, and after the last one all wavelets pass.

    >>> WaveletFilter("range", 3, 5).passes(4 << 16, False)
    True
    >>> WaveletFilter("counter", counter=2, limit=3, top=1).passes(0, False)
    False
    """

    kind: str
    low: int = 0
    high: int = 0
    counter: int = 0
    limit: int = 0
    top: int = 0
    count_data: bool = False
    count_control: bool = False
    control_at_top: bool = False
    later: tuple[int, ...] = ()
    off: bool = False

    def passes(self, word: int, control: bool) -> bool:
        """Whether the wavelet may pass."""
        if self.off:
            return True
        if self.kind == "range":
            return control or self.low <= (word >> 16) & 0xFFFF <= self.high
        return self.counter == self.top if control and self.control_at_top else self.counter <= self.top

    def count(self, control: bool) -> None:
        """Count a wavelet."""
        if self.kind == "range" or not (self.count_control if control else self.count_data):
            return
        if self.counter < self.limit:
            self.counter += 1
            return
        self.counter = 0
        if self.kind == "sparse_counter":
            self.off = not self.later
            self.limit, self.later = (self.later[0], self.later[1:]) if self.later else (self.limit, ())


Directions = tuple[int, ...]
SwitchPosition = tuple[Directions, Directions]  # the directions from and to which it is


@lru_cache(maxsize=1024)
def _only_position(rx: Directions, tx: Directions) -> tuple[SwitchPosition, tuple[SwitchPosition, ...], frozenset[int]]:
    """The position of a route without switches, all its positions, and its sources; equal routes share them."""
    here = rx, tx
    return here, (here,), frozenset(rx)


@dataclass(slots=True)
class ColorRoute:
    """The route of one color: position 0, the changes of positions 1 to 3 to their predecessor, and the present
    position.

    >>> route = ColorRoute((WEST,), (RAMP, EAST), [((), (EAST,)), ((RAMP,), ())], pop="pop_on_advance")
    >>> route.command((5 << 22) | (4 << 25)) != (5 << 22) | (4 << 25), route.here
    (True, ((0,), (1,)))
    """

    rx: Directions
    tx: Directions
    switches: list[SwitchPosition | None] = field(default_factory=list)
    current: int = 0
    ring: bool = False
    pop: str = "no_pop"
    filter: WaveletFilter | None = None
    in_teardown: bool = False
    # In teardown the program may change the route: a wavelet that no position accepts waits.
    reconfigurable: bool = False
    here: SwitchPosition = field(init=False)
    positions: tuple[SwitchPosition, ...] = field(init=False)
    sources: frozenset[int] = field(init=False)  # the directions from which some position accepts wavelets

    def __post_init__(self) -> None:
        self.reconfigurable = self.reconfigurable or self.in_teardown
        self.refresh()

    def refresh(self) -> None:
        """Recompute the positions after a change."""
        self.switches += [None] * (3 - len(self.switches))
        if self.switches[0] is None:
            self.here, self.positions, self.sources = _only_position(self.rx, self.tx)
            self.current = 0
            return
        positions = [(self.rx, self.tx)]
        for change in self.switches:
            if change is None:
                break
            rx, tx = positions[-1]
            positions.append((change[0] or rx, change[1] or tx))
        self.positions = tuple(positions)
        self.sources = frozenset(direction for rx, _ in positions for direction in rx)
        self.current = min(self.current, len(positions) - 1)
        self.here = positions[self.current]

    def open(self, rx: Directions, tx: Directions) -> None:
        """Replace position 0, and end the teardown; the program may change the route."""
        self.rx, self.tx, self.in_teardown, self.reconfigurable = rx, tx, False, True
        if self.switches[0] is None:
            self.here, self.positions, self.sources = _only_position(rx, tx)
        else:
            self.refresh()

    def accepts(self, direction: int) -> bool:
        """Whether some position accepts wavelets from a direction."""
        return self.reconfigurable or direction in self.sources

    def move(self, position: int) -> None:
        """Select a position, if it exists."""
        if 0 <= position < len(self.positions):
            self.current = position
            self.here = self.positions[position]

    def advance(self) -> None:
        """Advance to the next position; after the last one ring mode returns to the first."""
        last = self.current + 1 >= len(self.positions)
        self.move(0 if last and self.ring else self.current + 1)

    def command(self, word: int) -> int:
        """Execute the first command of a payload; returns the payload to send on."""
        opcode, before = decode_commands(word)[0][0], self.current
        if opcode is _ADVANCE:
            self.advance()
        elif opcode is _RESET:
            self.move(0)
        elif opcode is _TEARDOWN:
            self.in_teardown = self.reconfigurable = True
        if self.pop == "no_pop":
            return word
        # A router that is already at its last position leaves the command to the next router.
        moved = self.current != before
        pops = {
            "always_pop": True,
            "pop_on_advance": moved,
            "pop_on_advance_nop": moved or opcode is _NOP,
        }.get(self.pop, False)
        return pop_command(word) if pops else word


# Router registers of WSE-2 (see the module docstring).


ROUTE_REGISTERS, SWITCH_REGISTERS, REGISTER_COLORS = 0x7F20, 0x7F40, 24
# Word addresses by the vendor's names. Those of the cycle counter are specific to this simulator.
REGISTER_ADDRESSES = {
    "COLOR_CONFIG": ROUTE_REGISTERS,
    "SWITCH_CONFIG": SWITCH_REGISTERS,
    "TIMESTAMP_COUNTER": 0x7FC0,
    "PERF_COUNTER_CONTROL": 0x7FC4,
}
# The settings of the input queues, which public programs change for the priority of a microthread (bits 8 and 9).
QUEUE_REGISTERS = range(0x7F58, 0x7F60)
TIMESTAMP_REGISTERS = range(REGISTER_ADDRESSES["TIMESTAMP_COUNTER"], REGISTER_ADDRESSES["TIMESTAMP_COUNTER"] + 3)
POP_MODES = ("no_pop", "always_pop", "pop_on_advance", "pop_on_advance_nop")
_REGISTER_DIRECTIONS = direction_numbers(DIRECTIONS)  # directions in the order of the register
_NO_DIRECTION = 5


def encode_route(route: ColorRoute) -> int:
    """The register value of a route."""
    bits = sum(1 << i for i, d in enumerate(_REGISTER_DIRECTIONS) if d in route.tx)
    bits |= sum(1 << (5 + i) for i, d in enumerate(_REGISTER_DIRECTIONS) if d in route.rx)
    return bits | POP_MODES.index(route.pop) << 12 | route.in_teardown << 14


def decode_route(route: ColorRoute, bits: int) -> None:
    """Set a route from its register value."""
    route.tx = tuple(d for i, d in enumerate(_REGISTER_DIRECTIONS) if bits >> i & 1)
    route.rx = tuple(d for i, d in enumerate(_REGISTER_DIRECTIONS) if bits >> (5 + i) & 1)
    route.pop, route.in_teardown = POP_MODES[bits >> 12 & 3], bool(bits >> 14 & 1)
    route.refresh()


def encode_switch(route: ColorRoute, inputs: int = 0) -> int:
    """The register value of a switch; `inputs` has the input bits of unused positions."""
    bits = route.ring << 12 | route.current << 13
    for place, change in enumerate(route.switches):
        side = (change[0] or change[1]) if change else ()
        bits |= (_REGISTER_DIRECTIONS.index(side[0]) if side else _NO_DIRECTION) << 4 * place
        bits |= bool(change[0]) << (4 * place + 3) if change and side else inputs & 8 << 4 * place
    return bits


def decode_switch(route: ColorRoute, bits: int) -> None:
    """Set a switch from its register value."""
    for place in range(3):
        side, incoming = bits >> 4 * place & 7, bits >> (4 * place + 3) & 1
        directions = (_REGISTER_DIRECTIONS[side],) if side < _NO_DIRECTION else ()
        route.switches[place] = ((directions, ()) if incoming else ((), directions)) if directions else None
    route.ring, route.current = bool(bits >> 12 & 1), bits >> 13 & 3
    route.refresh()


def is_simulated_register(address: int) -> bool:
    """Whether the register at a word's address is simulated.

    >>> is_simulated_register(0x7f21), is_simulated_register(0x7f59), is_simulated_register(0x7e00)
    (True, True, False)
    """
    return (
        address in TIMESTAMP_REGISTERS
        or address in QUEUE_REGISTERS
        or address == REGISTER_ADDRESSES["PERF_COUNTER_CONTROL"]
        or ROUTE_REGISTERS <= address < ROUTE_REGISTERS + REGISTER_COLORS
        or SWITCH_REGISTERS <= address < SWITCH_REGISTERS + REGISTER_COLORS
    )


class RouterRegisters:
    """The router registers of a PE, indexed by 16-bit word address."""

    dtype, itemsize = np.dtype(np.uint16), 2

    def __init__(self, pe: Any) -> None:
        self.pe = pe
        self.inputs: dict[int, int] = {}  # the last written switch register of each color
        self.queues = dict.fromkeys(QUEUE_REGISTERS, 0)  # kept; receivers go first at every priority
        self.control = 0  # of the cycle counter
        self.started = 0  # the cycle at which the cycle counter was reset

    def __len__(self) -> int:
        return 1 << 15

    def item(self, address: int) -> int:
        """The register at a word address."""
        if address in TIMESTAMP_REGISTERS:
            return (self.pe.clock - self.started) >> 16 * TIMESTAMP_REGISTERS.index(address) & 0xFFFF
        if address == REGISTER_ADDRESSES["PERF_COUNTER_CONTROL"]:
            return self.control
        if address in self.queues:
            return self.queues[address]
        if ROUTE_REGISTERS <= address < ROUTE_REGISTERS + REGISTER_COLORS:
            return encode_route(self.pe.fabric.get_route(address - ROUTE_REGISTERS))
        color = self._switch(address)
        return encode_switch(self.pe.fabric.get_route(color), self.inputs.get(color, 0))

    __getitem__ = item

    def __setitem__(self, address: int, bits: int) -> None:
        if address in TIMESTAMP_REGISTERS:
            self.started = self.pe.clock  # programs write zeros, which reset the counter
            return
        if address == REGISTER_ADDRESSES["PERF_COUNTER_CONTROL"]:
            self.control = int(bits)
            return
        if address in self.queues:
            self.queues[address] = int(bits)
            return
        if ROUTE_REGISTERS <= address < ROUTE_REGISTERS + REGISTER_COLORS:
            decode_route(self.pe.fabric.change_route(address - ROUTE_REGISTERS), int(bits))
            return
        color = self._switch(address)
        self.inputs[color] = int(bits)
        decode_switch(self.pe.fabric.change_route(color), int(bits))

    def _switch(self, address: int) -> int:
        if not SWITCH_REGISTERS <= address < SWITCH_REGISTERS + REGISTER_COLORS:
            raise CslFault(f"the register at address {2 * address:#x} is not simulated", suggestion="use <tile_config>")
        return address - SWITCH_REGISTERS
