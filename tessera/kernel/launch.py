"""A compiled kernel run on arrays, which it writes in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, here
from tessera.ir.core import Module

Run = Callable[[Sequence[Any]], list[np.ndarray]]
KEPT = 256
# By the module's identity, which stays its own as long as it is kept here.
_PROGRAMS: OrderedDict[tuple[int, str], tuple[Module, Run]] = OrderedDict()
_LOCK = Lock()


def run(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module; what it returns comes back, what it writes is in the arrays."""
    if not all(a.flags.writeable for a in arrays):
        _check_writeable(module, arrays)
    packed = [np.ascontiguousarray(a) if a.ndim else a for a in arrays]  # kernels see rows one after the other
    outputs = execute(module, packed, target)
    for array, held in zip(arrays, packed, strict=True):
        if held is not array and array.flags.writeable:
            array[...] = held
    return outputs


def _check_writeable(module: Module, arrays: Sequence[np.ndarray]) -> None:
    for place in written(module):
        if not arrays[place].flags.writeable:
            name = module.functions[1].params[place].hint
            raise ArgumentError(
                f"`{name}` is written by the kernel, and may not be", location=here(),
                expected="an array that is writeable", received=f"a read-only one of shape {arrays[place].shape}",
                suggestion=f"pass {name}.copy()",
            )  # fmt: skip


@lru_cache(maxsize=1024)
def written(module: Module) -> tuple[int, ...]:
    """The places of the parameters that a kernel writes, its outputs apart."""
    kernel = module.functions[1]
    count = len(kernel.params) - int(module.main.attrs.get("outputs", 0))
    targets = {n.args[0] for n in kernel.body.walk() if n.op.effects & {"write"}}
    return tuple(i for i, p in enumerate(kernel.params[:count]) if p in targets)


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
