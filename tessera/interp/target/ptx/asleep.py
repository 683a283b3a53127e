"""A machine in which every lane that could run has gone to sleep: whether anything has come of it since."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tessera.interp.target.ptx.machine import Machine

OFTEN = 256  # sleeps of all from one look to the next


def picture(machine: Machine) -> bytes:
    """What the machine's course follows from, in short: where lanes are, their registers, and memory.

    Where two are equal the machine has gone round in a circle, and will for ever.
    """
    found = hashlib.blake2b(digest_size=16)
    for pc, lanes in machine.dozing:
        found.update(np.append(lanes.flat, pc).tobytes())
    found.update(np.array([len(p.lanes) for p in machine.barriers.parked]).tobytes())
    for register in machine.registers:
        found.update(np.ascontiguousarray(register).data)
    for flat in machine.flat.values():
        found.update(flat.raw.data)
    return found.digest()
