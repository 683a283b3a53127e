"""The router's registers of WSE-2 as a PE's code reads and writes them at their addresses: one word for each color.

At 0x7f20 + color, the route: outputs in bits 0 to 4, inputs in bits 5 to 9 (west, east, south, north, ramp), the pop
mode in bits 12 and 13, teardown in bit 14. At 0x7f40 + color, the switch: four bits for each of positions 1 to 3 (a
direction, or 5 for none, and a bit that says that it is an input), ring mode in bit 12, the present position in bits 13
and 14. The layout is that of the comments of a program in the vendor's example repository; the order of the pop modes
is this simulator's own (programs keep those bits as they are).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.interp.target.csl.faults import CslFault
from tessera.interp.target.csl.routes import Route, directions
from tessera.interp.target.csl.values import DIRECTIONS

ROUTES, SWITCHES, COLORS = 0x7F20, 0x7F40, 24
POPS = ("no_pop", "always_pop", "pop_on_advance", "pop_on_advance_nop")
_BITS = directions(DIRECTIONS)  # the router's numbers, in the order of the register
_NONE = 5


def route_bits(route: Route) -> int:
    """The register of a route."""
    bits = sum(1 << i for i, d in enumerate(_BITS) if d in route.tx)
    bits |= sum(1 << (5 + i) for i, d in enumerate(_BITS) if d in route.rx)
    return bits | POPS.index(route.pop) << 12 | route.tearing << 14


def set_route(route: Route, bits: int) -> None:
    """A route from its register."""
    route.tx = tuple(d for i, d in enumerate(_BITS) if bits >> i & 1)
    route.rx = tuple(d for i, d in enumerate(_BITS) if bits >> (5 + i) & 1)
    route.pop, route.tearing = POPS[bits >> 12 & 3], bool(bits >> 14 & 1)
    route.refresh()


def switch_bits(route: Route, inputs: int = 0) -> int:
    """The register of a switch; `inputs` has the bits that say so of positions that are not in use."""
    bits = route.ring << 12 | route.current << 13
    for place, change in enumerate(route.switches):
        side = (change[0] or change[1]) if change else ()
        bits |= (_BITS.index(side[0]) if side else _NONE) << 4 * place
        bits |= bool(change[0]) << (4 * place + 3) if change and side else inputs & 8 << 4 * place
    return bits


def set_switch(route: Route, bits: int) -> None:
    """A switch from its register."""
    for place in range(3):
        side, incoming = bits >> 4 * place & 7, bits >> (4 * place + 3) & 1
        way = (_BITS[side],) if side < _NONE else ()
        route.switches[place] = ((way, ()) if incoming else ((), way)) if way else None
    route.ring, route.current = bool(bits >> 12 & 1), bits >> 13 & 3
    route.refresh()


def known_register(address: int) -> bool:
    """Whether the register at a word's address is simulated.

    >>> known_register(0x7f21), known_register(0x7e00)
    (True, False)
    """
    return ROUTES <= address < ROUTES + COLORS or SWITCHES <= address < SWITCHES + COLORS


class Registers:
    """What stands at the addresses of a PE, as an array of words of 16 bits."""

    dtype, itemsize = np.dtype(np.uint16), 2

    def __init__(self, pe: Any) -> None:
        self.pe = pe
        self.inputs: dict[int, int] = {}  # by color, the switch register as it was last written

    def __len__(self) -> int:
        return 1 << 15

    def item(self, address: int) -> int:
        """The register at a word's address."""
        if ROUTES <= address < ROUTES + COLORS:
            return route_bits(self.pe.fabric.route(address - ROUTES))
        color = self._switch(address)
        return switch_bits(self.pe.fabric.route(color), self.inputs.get(color, 0))

    __getitem__ = item

    def __setitem__(self, address: int, bits: int) -> None:
        if ROUTES <= address < ROUTES + COLORS:
            set_route(self.pe.fabric.changed(address - ROUTES), int(bits))
            return
        color = self._switch(address)
        self.inputs[color] = int(bits)
        set_switch(self.pe.fabric.changed(color), int(bits))

    def _switch(self, address: int) -> int:
        if not SWITCHES <= address < SWITCHES + COLORS:
            raise CslFault(f"the register at address {2 * address:#x} is not simulated", suggestion="use <tile_config>")
        return address - SWITCHES
