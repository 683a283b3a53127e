"""A compiled kernel run on arrays, which it writes in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.ir.core import Module


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
    from tessera.driver import program

    return program(module, generator)(arrays)
