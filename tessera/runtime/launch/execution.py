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

RunFunction = Callable[[Sequence[Any]], list[np.ndarray]]
MAX_CACHED_PROGRAMS = 256
# Keyed by the module's id: the cache keeps the module alive, so no other module has that id.
_PROGRAMS: OrderedDict[tuple[int, str], tuple[Module, RunFunction]] = OrderedDict()
_LOCK = Lock()


def run_module(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module: return its results; the arrays that it writes are updated in place."""
    if not all(a.flags.writeable for a in arrays):
        _check_writeable(module, arrays)
    packed = [np.ascontiguousarray(a) if a.ndim else a for a in arrays]  # kernels index contiguous rows
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
                f"`{name}` is written by the kernel, but is read-only", location=user_location(),
                expected="a writeable array", received=f"a read-only one of shape {arrays[place].shape}",
                suggestion=f"pass {name}.copy()",
            )  # fmt: skip


@lru_cache(maxsize=1024)
def find_written_params(module: Module) -> tuple[int, ...]:
    """Return the indices of the parameters that a kernel writes, without its outputs."""
    kernel = module.functions[1]
    count = len(kernel.params) - int(module.main.attrs.get("outputs", 0))
    targets = {n.args[0] for n in kernel.body.walk() if n.op.effects & {"write"}}
    return tuple(i for i, p in enumerate(kernel.params[:count]) if p in targets)


def execute_module(module: Module, arrays: Sequence[np.ndarray], target: str | None) -> list[np.ndarray]:
    """Run a Tile module on a target, or on the default device."""
    from tessera.core.device import INTERP, default_device, find_generator_name

    generator = find_generator_name(target or default_device())
    if generator == INTERP:
        from tessera.interp.tile import (
            interpreter,
        )  # the Tile interpreter directly: a kernel needs none of the levels above

        return interpreter.run(module, arrays)
    return compile_module(module, generator)(arrays)


def compile_module(module: Module, generator: str) -> RunFunction:
    """Compile a Tile module for a target; the last `MAX_CACHED_PROGRAMS` compiled programs are cached."""
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


# The stream that launches are queued on; None: they run synchronously.
CURRENT_STREAM: ContextVar[Any] = ContextVar("stream", default=None)
# Debug mode: array uses by queued launches that the host has not synchronised with (streams.py).
UNORDERED_USES: list[Any] = []


def order_launch(module: Any, arrays: Any) -> Any:
    """Order a launch on the current stream, or on the host; return its stream, or None.

    Raises:
        RaceError: in debug mode, another launch uses the same memory and nothing orders the two.
    """
    stream = CURRENT_STREAM.get()
    if stream is not None or UNORDERED_USES:
        from tessera.runtime.launch.streams import HOST_STREAM, LAUNCH_ORDER  # imported only where streams are in use

        LAUNCH_ORDER.launch(HOST_STREAM if stream is None else stream.number, module, arrays())
    return stream
