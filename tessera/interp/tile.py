"""The Tile interpreter: all program instances of a grid side by side on NumPy arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, OutOfBoundsError
from tessera.evaluate import evaluate
from tessera.interp import host, instances, steps
from tessera.interp.checked import machine as watched
from tessera.interp.checked.monitor import Monitor
from tessera.interp.checked.observe import Observer, Started, observers_of
from tessera.interp.checked.report import ACTIVE, Stopped, as_checks
from tessera.interp.heap import keep_pages
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory
from tessera.ir.core import Block, Function, Module, Node
from tessera.numerics.bounded import Bounded, lift
from tessera.ops.tile import meets
from tessera.passes.behind import with_what_follows
from tessera.types import RefType, TensorType

# A chunk of the grid holds about this many bytes in its largest values: enough to make Python's
# cost per op small, little enough to stay in the cache.
CHUNK_BYTES = 1 << 20


def run(module: Module, arrays: Sequence[Any], debug: Any = None) -> list[np.ndarray]:
    """Run a Tile module on arrays; the outputs, or nothing where the program writes in place.

    `debug` (True, or Checks that say more) runs in debug mode; by default it is as `ts.debug.checked` says.

    Raises:
        OutOfBoundsError: a program reads or writes outside its memory.
        ExecutionError: debug mode found a program that breaks a rule of the memory model.
    """
    checks, observers = ACTIVE.get() if debug is None else as_checks(debug), observers_of(module)
    if checks is None and not observers:
        return host.run(module.main, arrays, _launcher(module, bound=False))
    monitor = Monitor(checks, arrays, observers)
    try:
        return host.run(module.main, arrays, _launcher(module, False, monitor), wrote=monitor.wrote)
    except Stopped:  # what the outputs hold has no meaning; only their shapes have
        return [np.zeros(p.type.shape, p.type.dtype.numpy) for p in _outputs(module.main)]


def _outputs(function: Function) -> Sequence[Any]:
    return function.params[len(function.params) - int(function.attrs.get("outputs", 0)) :]


def bounds(
    module: Module, arrays: Sequence[Any], written: Sequence[int] = (), observers: Sequence[Observer] = ()
) -> list[Bounded]:
    """The outputs, then the arrays at the `written` places, each with its rigorous error bound."""
    lifted = [
        a if isinstance(p.type, TensorType) else Bounded(a).copy()
        for p, a in zip(module.main.params, arrays, strict=False)
    ]
    monitor = Monitor(None, (), observers) if observers else None
    outputs = host.run(module.main, lifted, _launcher(module, True, monitor), lift=lift)
    return [*outputs, *(lifted[i] for i in written)]


def _launcher(module: Module, bound: bool, monitor: Monitor | None = None) -> host.Launch:
    def launch_node(node: Node, args: list[Any]) -> None:
        launch(module.function(node.attrs["kernel"]), node.attrs["grid"], args, bound, monitor)

    return launch_node


def launch(
    function: Function, grid: Sequence[int], args: Sequence[Any], bound: bool = False, monitor: Monitor | None = None
) -> None:
    """Run one tile function over a grid, chunk by chunk, in order; watched by a monitor in debug mode."""
    keep_pages()
    function = with_what_follows(function)
    grid = tuple(int(n) for n in grid) or (1,)
    if min(grid) < 0:
        raise ArgumentError(f"a grid cannot be {grid}", location=function.loc)
    if 0 in grid:
        return
    group = int(function.attrs.get("group", 1))
    box = _box(function, grid, group * (monitor.width(function, group) if monitor is not None else 1))
    written = _written(function, args)
    if monitor is not None:
        monitor.enter(Started(function, grid, group, args), written)
    for first in itertools.product(*(range(0, n, b) for n, b in zip(grid, box, strict=True))):
        size = tuple(min(b, n - f) for b, n, f in zip(box, grid, first, strict=True))
        machine = Machine.of(grid, first, size, group, bound)
        pairs = enumerate(zip(function.params, args, strict=True))
        inputs = [_argument(p, a, machine, i in written) for i, (p, a) in pairs]
        try:
            with np.errstate(all="ignore"):
                _execute(function.body, inputs, machine, monitor)
        except OutOfBoundsError as error:
            raise machine.named(error) from None
    if monitor is not None:
        monitor.leave()


def _execute(body: Block, inputs: list[Any], machine: Machine, monitor: Monitor | None) -> None:
    if monitor is not None:
        evaluate(body, inputs, watched.meaning(machine, monitor))
    elif machine.bound:
        evaluate(body, inputs, instances.meaning(machine))
    else:
        steps.run(body, inputs, machine)


def _argument(param: Any, value: Any, machine: Machine, written: bool) -> Any:
    if isinstance(param.type, RefType):
        return Memory(value, param.hint or "the array", written=written)
    return np.full((1,) * machine.rank, value, param.type.dtype.numpy)


def _written(function: Function, args: Sequence[Any]) -> set[int]:
    """The parameters a kernel may write, directly or as another name for the same memory."""
    direct = _targets(function.body)
    arrays = [i for i, p in enumerate(function.params) if isinstance(p.type, RefType)]
    return {i for i in arrays if any(i == d or _overlap(args[i], args[d]) for d in direct)}


def _overlap(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b))


def _box(function: Function, grid: tuple[int, ...], width: int) -> tuple[int, ...]:
    """How many programs of some width a chunk holds along each axis: the first axes are split first."""
    if "mesh" in function.attrs or meets(function.body):  # its programs tell each other things
        return grid
    room = max(1, CHUNK_BYTES // (_largest(function.body) * width))
    box: list[int] = []
    for size in reversed(grid):
        box.append(max(1, min(size, room)))
        room = max(1, room // size)
    return tuple(reversed(box))


@lru_cache(maxsize=1024)
def _targets(body: Block) -> tuple[int, ...]:
    """The parameters that a body writes."""
    written = {n.args[0] for n in body.walk() if n.op.effects & {"write"}}
    return tuple(i for i, p in enumerate(body.params) if p in written)


@lru_cache(maxsize=1024)
def _largest(body: Block) -> int:
    """The bytes of a body's largest block."""
    return max((_bytes(v.type) for n in body.walk() for v in n.results), default=8)


def _bytes(type: Any) -> int:
    return math.prod(map(int, type.shape)) * type.dtype.numpy.itemsize if isinstance(type, TensorType) else 8
