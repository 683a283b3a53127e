"""Tile interpreter: runs a launch chunk by chunk, all program instances of a chunk side by side on NumPy arrays."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.errors import ArgumentError, OutOfBoundsError
from tessera.core.progress import track
from tessera.core.types import RefType, TensorType
from tessera.interp import host
from tessera.interp.bound import BoundSample, call_between
from tessera.interp.host import keep_heap_pages
from tessera.interp.observers import ObservedLaunch, Observer, find_observers
from tessera.interp.sanitizer.report import ACTIVE_CHECKS, Checks, SanitizerStopped, as_checks
from tessera.interp.tile import block_compiler, op_rules
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import InstanceMemory
from tessera.interp.tile.op_rules import expand_target_ops
from tessera.ir.builder import evaluate_block
from tessera.ir.core import Block, Function, Module, Node
from tessera.ir.numerics.interval_arithmetic import IntervalArray, to_interval
from tessera.lower.passes.tail_duplication import duplicate_tails
from tessera.lower.passes.type_conversion import bind_to_arrays
from tessera.ops.dialects import host as host_ops
from tessera.ops.dialects import tile
from tessera.ops.dialects.tile import uses_grid_barrier

if TYPE_CHECKING:
    from tessera.interp.sanitizer.monitor import Monitor

# A chunk of the grid holds about this many bytes in its largest values: enough to make Python's
# cost per op small, little enough to stay in the cache.
CHUNK_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16  # where a sample of the programs is run: small steps towards a limit on time
_MEMORY_PLAN_OPS = (host_ops.launch, host_ops.alloc, host_ops.view)


def run(module: Module, arrays: Sequence[Any], debug: Any = None) -> list[np.ndarray]:
    """Run a Tile module on arrays and return its outputs (none where the program writes in place).

    `debug` (True, or Checks that say more) runs in debug mode; by default it is as `ts.debug.checked` says.

    Raises:
        OutOfBoundsError: a program reads or writes outside its memory.
        ExecutionError: debug mode found a program that breaks a rule of the memory model.
    """
    module = bind_to_arrays(module, arrays)
    checks, observers = ACTIVE_CHECKS.get() if debug is None else as_checks(debug), find_observers(module)
    if checks is None and not observers:
        return host.run(module.main, arrays, _make_launcher(module, bound=False))
    monitor = _make_monitor(checks, arrays, observers)
    try:
        return host.run(module.main, arrays, _make_launcher(module, False, monitor), wrote=monitor.wrote)
    except SanitizerStopped:  # only the shapes of the outputs matter; their values are undefined
        return [np.zeros(p.type.shape, p.type.dtype.numpy) for p in _output_params(module.main)]


def run_graph_launch(node: Node, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Run a launch of a Graph function on arrays, which do not change; return the memories that it writes."""
    return host_ops.launch_on_copies(host_ops.launched_function(node), node.attrs["written"], arrays, run)


def run_graph_launch_with_bounds(node: Node, values: Sequence[Any]) -> list[IntervalArray]:
    """As `run_graph_launch`, with error bounds."""
    function = host_ops.launched_function(node)
    new = [np.zeros(p.type.shape, p.type.dtype.numpy) for p in function.params[len(values) :]]
    memories = [to_interval(v).copy() for v in (*values, *new)]
    launch(function, node.attrs["grid"], memories, bound=True)
    return [memories[i] for i in node.attrs["written"]]


def _make_monitor(checks: Checks | None, inputs: Sequence[Any], observers: Sequence[Observer]) -> Monitor:
    """Make the monitor of a run in debug mode; only debug mode imports the sanitizer."""
    from tessera.interp.sanitizer.monitor import Monitor

    return Monitor(checks, inputs, observers)


def _output_params(function: Function) -> Sequence[Any]:
    return function.params[len(function.params) - int(function.attrs.get("outputs", 0)) :]


def run_with_bounds(
    module: Module, arrays: Sequence[Any], written: Sequence[int] = (), observers: Sequence[Observer] = (),
    between: Callable[[], None] | None = None,
) -> list[IntervalArray]:  # fmt: skip
    """Run with error bounds: return the outputs, then the arrays at the `written` indices, with their bounds.

    `between` is called before each op; what it raises ends the run.
    """
    module = bind_to_arrays(module, arrays)
    lifted = _lift_arguments(module, arrays)
    monitor = _make_monitor(None, (), observers) if observers else None
    outputs = host.run(module.main, lifted, _make_launcher(module, True, monitor, between), lift=to_interval)
    return [*outputs, *(lifted[i] for i in written)]


def _lift_arguments(module: Module, arrays: Sequence[Any]) -> list[Any]:
    pairs = zip(module.main.params, arrays, strict=False)
    return [a if isinstance(p.type, TensorType) else _lift_array(a) for p, a in pairs]


def _lift_array(array: Any) -> IntervalArray:
    """An array as intervals that can be written without changing it: a conversion to f64 has copied it already."""
    found = IntervalArray(array)
    return found.copy() if np.may_share_memory(found.value, array) else found


def sample_with_bounds(
    module: Module, arrays: Sequence[Any], written: Sequence[int], seconds: float
) -> BoundSample | None:
    """Run as many programs of the grid with error bounds as `seconds` allow: first, last, then spread over the grid.

    An element that no such program wrote has the radius −0.0. None where programs communicate, or where
    the module has more than one launch.
    """
    if not has_independent_programs(module):
        return None
    end = time.perf_counter() + seconds
    lifted = _lift_arguments(module, arrays)
    for i in written:
        lifted[i] = IntervalArray(lifted[i].value, np.full(lifted[i].shape, -0.0))
    counts = [0, 0]

    def launch_sample(node: Node, args: list[Any]) -> None:
        launched = Launch.of(module.function(node.attrs["kernel"]), node.attrs["grid"], args)
        chunks = launched.chunks(SAMPLE_BYTES)
        counts[1] = math.prod(launched.grid)
        for number in _spread(len(chunks)):
            launched.run_chunk(*chunks[number], bound=True)
            counts[0] += math.prod(chunks[number][1])
            if time.perf_counter() > end:
                return

    outputs = host.run(module.main, lifted, launch_sample, lift=_mark_unwritten)
    return BoundSample([*outputs, *(lifted[i] for i in written)], *counts)


def _mark_unwritten(array: Any) -> IntervalArray:
    return IntervalArray(np.array(array), np.full(np.shape(array), -0.0))


def _spread(count: int) -> list[int]:
    """The first, the last, and the others in an order that is spread over all and the same each time."""
    inner = np.random.default_rng(0).permutation(np.arange(1, max(count - 1, 1))).tolist()
    return [*dict.fromkeys((0, count - 1)), *inner] if count else []


def has_independent_programs(module: Module) -> bool:
    """Whether the module is one launch whose programs do not communicate: any of them can run alone."""
    launches = [n for n in module.main.body.walk() if n.op is host_ops.launch]
    if len(launches) != 1 or any(n.op not in _MEMORY_PLAN_OPS for n in module.main.body.walk()):
        return False
    function = module.function(launches[0].attrs["kernel"])
    atomic = any({"read", "write"} <= n.op.effects and "async" not in n.op.effects for n in function.body.walk())
    return "mesh" not in function.attrs and not atomic and not uses_grid_barrier(function.body)


def _make_launcher(
    module: Module, bound: bool, monitor: Monitor | None = None, between: Callable[[], None] | None = None
) -> host.LaunchFunction:
    def launch_node(node: Node, args: list[Any]) -> None:
        launch(module.function(node.attrs["kernel"]), node.attrs["grid"], args, bound, monitor, between)

    return launch_node


@dataclass(frozen=True)
class Launch:
    """One launch of a tile function over a grid."""

    function: Function
    grid: tuple[int, ...]
    args: Sequence[Any]
    group: int
    written: set[int]

    @classmethod
    def of(cls, function: Function, grid: Sequence[int], args: Sequence[Any]) -> Launch:
        """A launch of a function as written."""
        keep_heap_pages()
        function = duplicate_tails(expand_target_ops(function))
        sizes = tuple(int(n) for n in grid) or (1,)
        if min(sizes) < 0:
            raise ArgumentError(f"a grid cannot be {sizes}", location=function.loc)
        group = int(function.attrs.get("group", 1))
        return cls(function, sizes, args, group, find_written_params(function, args))

    def chunks(self, size: int, width: int = 1) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The first program and the counts of each chunk in order; a chunk's largest values hold about `size` bytes."""
        if 0 in self.grid:
            return []
        box = choose_chunk_shape(self.function, self.grid, self.group * width, size)
        firsts = itertools.product(*(range(0, n, b) for n, b in zip(self.grid, box, strict=True)))
        return [(f, tuple(min(b, n - i) for b, n, i in zip(box, self.grid, f, strict=True))) for f in firsts]

    def run_chunk(
        self, first: tuple[int, ...], count: tuple[int, ...], bound: bool = False, monitor: Monitor | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Run the programs of a chunk side by side."""
        machine = TileMachine.of(self.grid, first, count, self.group, bound)
        pairs = enumerate(zip(self.function.params, self.args, strict=True))
        inputs = [wrap_argument(p, a, machine, i in self.written) for i, (p, a) in pairs]
        try:
            with np.errstate(all="ignore"):
                _execute(self.function.body, inputs, machine, monitor, between)
        except OutOfBoundsError as error:
            raise machine.named(error) from None


def launch(
    function: Function, grid: Sequence[int], args: Sequence[Any], bound: bool = False, monitor: Monitor | None = None,
    between: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Run one tile function over a grid, chunk by chunk in order, under a monitor in debug mode."""
    launched = Launch.of(function, grid, args)
    if 0 in launched.grid:
        return
    width = monitor.width(launched.function, launched.group) if monitor is not None else 1
    if monitor is not None:
        monitor.enter(ObservedLaunch(launched.function, launched.grid, launched.group, args), launched.written)
    name = f"{'bounding' if bound else 'interpreting'} {launched.function.name}"
    for first, count in track(launched.chunks(CHUNK_BYTES, width), name):
        launched.run_chunk(first, count, bound, monitor, between)
    if monitor is not None:
        monitor.leave()


def _execute(
    body: Block, inputs: list[Any], machine: TileMachine, monitor: Monitor | None,
    between: Callable[[], None] | None,
) -> None:  # fmt: skip
    if monitor is not None:
        from tessera.interp.sanitizer.op_checks import make_checked_evaluator  # in debug mode alone: a build loads none

        evaluate_block(body, inputs, make_checked_evaluator(machine, monitor))
    elif machine.bound:
        evaluate_block(body, inputs, call_between(op_rules.make_evaluator(machine), between))
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


def choose_chunk_shape(
    function: Function, grid: tuple[int, ...], width: int, size: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """Choose how many programs of some width a chunk holds along each axis; the first axes are split first."""
    if "mesh" in function.attrs or uses_grid_barrier(function.body):  # its programs communicate
        return grid
    room = max(1, size // (_largest_value_bytes(function.body) * width))
    box: list[int] = []
    for size in reversed(grid):
        box.append(max(1, min(size, room)))
        room = max(1, room // size)
    return tuple(reversed(box))


@lru_cache(maxsize=1024)
def _find_store_targets(body: Block) -> tuple[int, ...]:
    """Yield the refs that a body writes."""
    written = tile.find_written_refs(body)
    return tuple(i for i, p in enumerate(body.params) if p in written)


@lru_cache(maxsize=1024)
def _largest_value_bytes(body: Block) -> int:
    """Return the bytes of a body's largest block."""
    return max((_byte_size(v.type) for n in body.walk() for v in n.results), default=8)


def _byte_size(type: Any) -> int:
    return math.prod(map(int, type.shape)) * type.dtype.numpy.itemsize if isinstance(type, TensorType) else 8
