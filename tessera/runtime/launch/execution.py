"""Kernel execution: runs a Tile module on arrays in place, with a program cache, and on the current stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.ir.core import Module

# A compiled kernel run on arrays, which it writes in place.


RunFunction = Callable[[Sequence[Any]], list[np.ndarray]]
MAX_CACHED_PROGRAMS = 256
# By the module's identity, which stays its own as long as it is kept here.
_PROGRAMS: OrderedDict[tuple[int, str], tuple[Module, RunFunction]] = OrderedDict()
_LOCK = Lock()


def run_module(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module; what it returns comes back, what it writes is in the arrays."""
    if not all(a.flags.writeable for a in arrays):
        _check_writeable(module, arrays)
    packed = [np.ascontiguousarray(a) if a.ndim else a for a in arrays]  # kernels see rows one after the other
    outputs = execute_module(module, packed, target)
    for array, held in zip(arrays, packed, strict=True):
        if held is not array and array.flags.writeable:
            array[...] = held
    return outputs


def _check_writeable(module: Module, arrays: Sequence[np.ndarray]) -> None:
    for place in find_written_params(module):
        if not arrays[place].flags.writeable:
            name = module.functions[1].params[place].hint
            raise ArgumentError(
                f"`{name}` is written by the kernel, and may not be", location=user_location(),
                expected="an array that is writeable", received=f"a read-only one of shape {arrays[place].shape}",
                suggestion=f"pass {name}.copy()",
            )  # fmt: skip


@lru_cache(maxsize=1024)
def find_written_params(module: Module) -> tuple[int, ...]:
    """The places of the parameters that a kernel writes, its outputs apart."""
    kernel = module.functions[1]
    count = len(kernel.params) - int(module.main.attrs.get("outputs", 0))
    targets = {n.args[0] for n in kernel.body.walk() if n.op.effects & {"write"}}
    return tuple(i for i, p in enumerate(kernel.params[:count]) if p in targets)


def execute_module(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module on a target, or on the default device."""
    from tessera.core.device import INTERP, default_device, find_generator_name

    generator = find_generator_name(target or default_device())
    if generator == INTERP:
        from tessera.interp.tile import interpreter  # not by the driver: a kernel needs nothing above its own level

        return interpreter.run(module, arrays)
    return compile_module(module, generator)(arrays)


def compile_module(module: Module, generator: str) -> RunFunction:
    """What runs a Tile module on a target, compiled once as long as it is among the last ones used."""
    from tessera.runtime.driver import compile_tile

    place = (id(module), generator)
    with _LOCK:
        if place in _PROGRAMS:
            _PROGRAMS.move_to_end(place)
            return _PROGRAMS[place][1]
    run = compile_tile(module, generator)
    with _LOCK:
        _PROGRAMS[place] = (module, run)
        if len(_PROGRAMS) > MAX_CACHED_PROGRAMS:
            _PROGRAMS.popitem(last=False)
    return run


# What a launch asks of streams: which one it goes to, and whether any launch is under way whose order matters.


# The stream that launches go to; None: they run at once.
CURRENT_STREAM: ContextVar[Any] = ContextVar("stream", default=None)
# What launches on streams have touched and nobody has waited for, in debug mode (stream_order.py).
UNORDERED_USES: list[Any] = []


def order_launch(module: Any, arrays: Any) -> Any:
    """A launch takes its place in the order of its stream, or of the host; its stream, or None.

    Raises:
        RaceError: in debug mode, it meets a launch that nothing orders.
    """
    stream = CURRENT_STREAM.get()
    if stream is not None or UNORDERED_USES:
        from tessera.runtime.launch.streams import HOST_STREAM, LAUNCH_ORDER  # only where there are streams

        LAUNCH_ORDER.launch(HOST_STREAM if stream is None else stream.number, module, arrays())
    return stream
