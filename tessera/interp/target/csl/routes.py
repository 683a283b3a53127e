"""The route of one color at one PE while a program runs: switch positions, pop modes, filters, teardown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.interp.target.csl.wavelets import Opcode, commands, popped

WEST, EAST, NORTH, SOUTH, RAMP, HOST = range(6)  # HOST: a stream of an `SdkLayout` enters or leaves here
NAMES = ("WEST", "EAST", "NORTH", "SOUTH", "RAMP", "HOST")
OPPOSITE = (EAST, WEST, SOUTH, NORTH, RAMP, HOST)
STEP = ((-1, 0), (1, 0), (0, -1), (0, 1), (0, 0), (0, 0))
_INDEX = {name: index for index, name in enumerate(NAMES)}


def directions(names: Any) -> tuple[int, ...]:
    """Directions by name, as numbers; one name stands for a tuple of one.

    >>> directions(("RAMP", "EAST")), directions("WEST")
    ((4, 1), (0,))
    """
    names = (names,) if isinstance(names, str) else names
    return tuple(_INDEX[name] for name in names)


@dataclass
class Filter:
    """Which wavelets of a color may go down the ramp.

    "range": data whose upper half (the index) lies in `low .. high`, and all control wavelets. "counter": a counter
    steps with each wavelet that counts, and starts again after `limit`; a wavelet passes while the counter is at most
    `top` (with `control_at_top` a control wavelet only at `top`). "sparse_counter": as "counter", but after each round
    the next of `later` is the limit, and after the last one all pass.

    >>> Filter("range", 3, 5).passes(4 << 16, False), Filter("counter", counter=2, limit=3, top=1).passes(0, False)
    (True, False)
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
        """Note that a wavelet went by."""
        if self.kind == "range" or not (self.count_control if control else self.count_data):
            return
        if self.counter < self.limit:
            self.counter += 1
            return
        self.counter = 0
        if self.kind == "sparse_counter":
            self.off = not self.later
            self.limit, self.later = (self.later[0], self.later[1:]) if self.later else (self.limit, ())


@dataclass
class Route:
    """Position 0, the changes that positions 1 to 3 make to the one before them, and the present position.

    >>> route = Route((WEST,), (RAMP, EAST), [((), (EAST,)), ((RAMP,), ())], pop="pop_on_advance")
    >>> route.command((5 << 22) | (4 << 25)) != (5 << 22) | (4 << 25), route.here
    (True, ((0,), (1,)))
    """

    rx: tuple[int, ...]
    tx: tuple[int, ...]
    switches: list[tuple[tuple[int, ...], tuple[int, ...]] | None] = field(default_factory=list)
    current: int = 0
    ring: bool = False
    pop: str = "no_pop"
    filter: Filter | None = None
    tearing: bool = False
    flexible: bool = False  # teardown lets the program change it: a wavelet that no position takes may only wait

    def __post_init__(self) -> None:
        self.flexible = self.flexible or self.tearing
        self.refresh()

    def refresh(self) -> None:
        """Work out the positions again after a change."""
        self.switches += [None] * (3 - len(self.switches))
        positions = [(self.rx, self.tx)]
        for change in self.switches:
            if change is None:
                break
            rx, tx = positions[-1]
            positions.append((change[0] or rx, change[1] or tx))
        self.positions = positions
        self.sources = frozenset(direction for rx, _ in positions for direction in rx)
        self.current = min(self.current, len(positions) - 1)
        self.here = positions[self.current]

    def accepts(self, direction: int) -> bool:
        """Whether some position takes wavelets from there."""
        return self.flexible or direction in self.sources

    def move(self, position: int) -> None:
        """Take a position, if there is one of that number."""
        if 0 <= position < len(self.positions):
            self.current = position
            self.here = self.positions[position]

    def advance(self) -> None:
        """Take the next position: the first again after the last in ring mode, else the last stays."""
        last = self.current + 1 >= len(self.positions)
        self.move(0 if last and self.ring else self.current + 1)

    def command(self, word: int) -> int:
        """Execute the first command of a payload; the payload as it travels on."""
        opcode, before = commands(word)[0][0], self.current
        if opcode is Opcode.SWITCH_ADV:
            self.advance()
        elif opcode is Opcode.SWITCH_RST:
            self.move(0)
        elif opcode is Opcode.TEARDOWN:
            self.tearing = self.flexible = True
        # A router that is at its last position already leaves the command to the next one.
        moved = self.current != before
        pops = {
            "always_pop": True,
            "pop_on_advance": moved,
            "pop_on_advance_nop": moved or opcode is Opcode.NOP,
        }.get(self.pop, False)
        return popped(word) if pops else word
