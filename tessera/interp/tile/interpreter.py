"""Tile interpreter: runs a launch chunk by chunk, all program instances of a chunk side by side on NumPy arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import ArgumentError, OutOfBoundsError
from tessera.core.types import RefType, TensorType
from tessera.interp import host
from tessera.interp.host import keep_heap_pages
from tessera.interp.observers import ObservedLaunch, Observer, find_observers
from tessera.interp.sanitizer.report import ACTIVE_CHECKS, Checks, SanitizerStopped, as_checks
from tessera.interp.tile import block_compiler, op_rules
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import InstanceMemory
from tessera.interp.tile.target_ops import expand_target_ops
from tessera.ir.core import Block, Function, Module, Node
from tessera.ir.evaluator import evaluate_block
from tessera.ir.numerics.interval_arithmetic import IntervalArray, to_interval
from tessera.lower.passes.tail_duplication import duplicate_tails
from tessera.ops.dialects.tile import uses_grid_barrier

if TYPE_CHECKING:
    from tessera.interp.sanitizer.monitor import Monitor

# A chunk of the grid holds about this many bytes in its largest values: enough to make Python's
# cost per op small, little enough to stay in the cache.
CHUNK_BYTES = 1 << 20


def run(module: Module, arrays: Sequence[Any], debug: Any = None) -> list[np.ndarray]:
    """Run a Tile module on arrays and return its outputs (none where the program writes in place).

    `debug` (True, or Checks that say more) runs in debug mode; by default it is as `ts.debug.checked` says.

    Raises:
        OutOfBoundsError: a program reads or writes outside its memory.
        ExecutionError: debug mode found a program that breaks a rule of the memory model.
    """
    checks, observers = ACTIVE_CHECKS.get() if debug is None else as_checks(debug), find_observers(module)
    if checks is None and not observers:
        return host.run(module.main, arrays, _make_launcher(module, bound=False))
    monitor = _make_monitor(checks, arrays, observers)
    try:
        return host.run(module.main, arrays, _make_launcher(module, False, monitor), wrote=monitor.wrote)
    except SanitizerStopped:  # only the shapes of the outputs matter; their values are undefined
        return [np.zeros(p.type.shape, p.type.dtype.numpy) for p in _output_params(module.main)]


def _make_monitor(checks: Checks | None, inputs: Sequence[Any], observers: Sequence[Observer]) -> Monitor:
    """Make the monitor of a run in debug mode; only debug mode imports the sanitizer."""
    from tessera.interp.sanitizer.monitor import Monitor

    return Monitor(checks, inputs, observers)


def _output_params(function: Function) -> Sequence[Any]:
    return function.params[len(function.params) - int(function.attrs.get("outputs", 0)) :]


def run_with_bounds(
    module: Module, arrays: Sequence[Any], written: Sequence[int] = (), observers: Sequence[Observer] = ()
) -> list[IntervalArray]:
    """Run with error bounds: return the outputs, then the arrays at the `written` indices, with their bounds."""
    lifted = [
        a if isinstance(p.type, TensorType) else IntervalArray(a).copy()
        for p, a in zip(module.main.params, arrays, strict=False)
    ]
    monitor = _make_monitor(None, (), observers) if observers else None
    outputs = host.run(module.main, lifted, _make_launcher(module, True, monitor), lift=to_interval)
    return [*outputs, *(lifted[i] for i in written)]


def _make_launcher(module: Module, bound: bool, monitor: Monitor | None = None) -> host.LaunchFunction:
    def launch_node(node: Node, args: list[Any]) -> None:
        launch(module.function(node.attrs["kernel"]), node.attrs["grid"], args, bound, monitor)

    return launch_node


def launch(
    function: Function, grid: Sequence[int], args: Sequence[Any], bound: bool = False, monitor: Monitor | None = None
) -> None:
    """Run one tile function over a grid, chunk by chunk in order, under a monitor in debug mode."""
    keep_heap_pages()
    function = duplicate_tails(expand_target_ops(function))
    grid = tuple(int(n) for n in grid) or (1,)
    if min(grid) < 0:
        raise ArgumentError(f"a grid cannot be {grid}", location=function.loc)
    if 0 in grid:
        return
    group = int(function.attrs.get("group", 1))
    box = choose_chunk_shape(function, grid, group * (monitor.width(function, group) if monitor is not None else 1))
    written = find_written_params(function, args)
    if monitor is not None:
        monitor.enter(ObservedLaunch(function, grid, group, args), written)
    for first in itertools.product(*(range(0, n, b) for n, b in zip(grid, box, strict=True))):
        size = tuple(min(b, n - f) for b, n, f in zip(box, grid, first, strict=True))
        machine = TileMachine.of(grid, first, size, group, bound)
        pairs = enumerate(zip(function.params, args, strict=True))
        inputs = [wrap_argument(p, a, machine, i in written) for i, (p, a) in pairs]
        try:
            with np.errstate(all="ignore"):
                _execute(function.body, inputs, machine, monitor)
        except OutOfBoundsError as error:
            raise machine.named(error) from None
    if monitor is not None:
        monitor.leave()


def _execute(body: Block, inputs: list[Any], machine: TileMachine, monitor: Monitor | None) -> None:
    if monitor is not None:
        from tessera.interp.sanitizer.op_checks import make_checked_evaluator  # in debug mode alone: a build loads none

        evaluate_block(body, inputs, make_checked_evaluator(machine, monitor))
    elif machine.bound:
        evaluate_block(body, inputs, op_rules.make_evaluator(machine))
    else:
        block_compiler.run_compiled(body, inputs, machine)


def wrap_argument(param: Any, value: Any, machine: TileMachine, written: bool) -> Any:
    if isinstance(param.type, RefType):
        return InstanceMemory(value, param.hint or "the array", written=written)
    return np.full((1,) * machine.rank, value, param.type.dtype.numpy)


def find_written_params(function: Function, args: Sequence[Any]) -> set[int]:
    """The parameters that a kernel may write, directly or through an alias."""
    direct = _find_store_targets(function.body)
    arrays = [i for i, p in enumerate(function.params) if isinstance(p.type, RefType)]
    return {i for i in arrays if any(i == d or _may_overlap(args[i], args[d]) for d in direct)}


def _may_overlap(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b))


def choose_chunk_shape(function: Function, grid: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Choose how many programs of some width a chunk holds along each axis; the first axes are split first."""
    if "mesh" in function.attrs or uses_grid_barrier(function.body):  # its programs communicate
        return grid
    room = max(1, CHUNK_BYTES // (_largest_value_bytes(function.body) * width))
    box: list[int] = []
    for size in reversed(grid):
        box.append(max(1, min(size, room)))
        room = max(1, room // size)
    return tuple(reversed(box))


@lru_cache(maxsize=1024)
def _find_store_targets(body: Block) -> tuple[int, ...]:
    """Yield the refs that a body writes."""
    written = {n.args[0] for n in body.walk() if n.op.effects & {"write"}}
    return tuple(i for i, p in enumerate(body.params) if p in written)


@lru_cache(maxsize=1024)
def _largest_value_bytes(body: Block) -> int:
    """Return the bytes of a body's largest block."""
    return max((_byte_size(v.type) for n in body.walk() for v in n.results), default=8)


def _byte_size(type: Any) -> int:
    return math.prod(map(int, type.shape)) * type.dtype.numpy.itemsize if isinstance(type, TensorType) else 8
