"""Wavelets: 32 data bits and a control flag, and the switch commands inside a control wavelet's payload."""

from __future__ import annotations

from enum import IntEnum

CONTROL = 1 << 32  # a word of the fabric is its 32 bits, with this flag where it is a control wavelet
WORD = CONTROL - 1
ADVANCE = 1 << 33  # the word that leaves a PE last, and moves the switch of its color there
MARKED = 3 << 30  # the upper two bits of a control wavelet that is kept as data
NO_ENTRY = 31

# Where the eight commands of a payload stand: the opcode's lowest bit, and the bit that keeps the wavelet from the CE.
_FIELDS = ((22, 24), (25, 27), (28, 0), (1, 3), (4, 6), (7, 9), (10, 12), (13, 15))
_COMMAND_BITS = sum((3 << low) | (1 << ignore) for low, ignore in _FIELDS)


class Opcode(IntEnum):
    """What a command asks of the router."""

    NOP = 0
    SWITCH_ADV = 1
    SWITCH_RST = 2
    TEARDOWN = 3


def entry_point(word: int) -> int | None:
    """The control task that a payload names, or None.

    >>> entry_point(43 << 16), entry_point(31 << 16)
    (43, None)
    """
    found = (word >> 16) & 0x3F
    return None if found == NO_ENTRY else found


def commands(word: int) -> list[tuple[Opcode, bool]]:
    """The eight commands of a payload, each with its ce_ignore.

    >>> commands((5 << 22) | (4 << 25))[:2]
    [(<Opcode.SWITCH_ADV: 1>, True), (<Opcode.NOP: 0>, True)]
    """
    return [(Opcode((word >> low) & 3), bool((word >> ignore) & 1)) for low, ignore in _FIELDS]


def encode(cmds: list[tuple[Opcode, bool]], entry: int = NO_ENTRY) -> int:
    """A payload with up to eight commands; those not given are NOP, kept from the CE.

    >>> hex(encode([(Opcode.TEARDOWN, True)]))
    '0x9df9249'
    """
    word = entry << 16
    for index, (low, ignore) in enumerate(_FIELDS):
        opcode, keep = cmds[index] if index < len(cmds) else (Opcode.NOP, True)
        word |= int(opcode) << low | int(keep) << ignore
    return word


def popped(word: int) -> int:
    """The payload without its first command: the others move up, and a NOP that is kept from the CE follows.

    >>> hex(popped(0x9DF9249))
    '0x91f9249'
    """
    return (word & ~_COMMAND_BITS) | (encode(commands(word)[1:], 0) & _COMMAND_BITS)
