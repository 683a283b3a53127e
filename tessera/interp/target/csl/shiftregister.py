"""The random numbers of a PE: shift registers with the documented feedback, x^23 + x^18 + 1, and beginning.

What the documentation leaves open is this simulator's own: the number is the upper 16 of a register's 23 bits, and a PE
has four registers.
"""

from __future__ import annotations

from typing import Any

BEGINNING = 0xDEADBEEF
REGISTERS = 4


def advanced(state: int) -> int:
    """The register after 128 steps, 16 of them at a time.

    >>> hex(advanced(BEGINNING))
    '0x1469c532'
    """
    for _ in range(8):
        state = (state << 16 | (state >> 7 ^ state >> 2) & 0xFFFF) & 0xFFFFFFFF
    return state


def drawn(pe: Any) -> int:
    """The next number of 16 bits."""
    states = pe.state.setdefault("random", {})
    active = pe.state.get("active random", 0)
    state = advanced(states.get(active, BEGINNING))
    states[active] = state
    return state >> 7 & 0xFFFF


def select(pe: Any, number: int) -> None:
    """Which register the numbers come from."""
    pe.state["active random"] = number % REGISTERS


def seeded(pe: Any, seed: int) -> None:
    """Begin the active register anew; a register of zeros would stay so."""
    pe.state.setdefault("random", {})[pe.state.get("active random", 0)] = seed & 0xFFFFFFFF or BEGINNING


def fraction(pe: Any) -> float:
    """A number in [0, 1) of 32 bits."""
    return (drawn(pe) << 16 | drawn(pe)) / 2**32
