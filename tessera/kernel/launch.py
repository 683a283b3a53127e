"""A compiled kernel run on arrays, which it writes in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import numpy as np

from tessera.ir.core import Module

Run = Callable[[Sequence[Any]], list[np.ndarray]]
KEPT = 256
# By the module's identity, which stays its own as long as it is kept here.
_PROGRAMS: OrderedDict[tuple[int, str], tuple[Module, Run]] = OrderedDict()
_LOCK = Lock()


def run(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module; what it returns comes back, what it writes is in the arrays."""
    packed = [np.ascontiguousarray(a) if a.ndim else a for a in arrays]  # kernels see rows one after the other
    outputs = execute(module, packed, target)
    for array, held in zip(arrays, packed, strict=True):
        if held is not array and array.flags.writeable:
            array[...] = held
    return outputs


def execute(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module on a target, or on the default device."""
    from tessera.device import INTERP, default_device, generator_of

    generator = generator_of(target or default_device())
    if generator == INTERP:
        from tessera.interp import tile  # not by the driver: a kernel needs nothing above its own level

        return tile.run(module, arrays)
    return compiled(module, generator)(arrays)


def compiled(module: Module, generator: str) -> Run:
    """What runs a Tile module on a target, compiled once as long as it is among the last ones used."""
    from tessera.driver import program

    place = (id(module), generator)
    with _LOCK:
        if place in _PROGRAMS:
            _PROGRAMS.move_to_end(place)
            return _PROGRAMS[place][1]
    run = program(module, generator)
    with _LOCK:
        _PROGRAMS[place] = (module, run)
        if len(_PROGRAMS) > KEPT:
            _PROGRAMS.popitem(last=False)
    return run
