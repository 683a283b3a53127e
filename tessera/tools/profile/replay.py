"""Kernel replay: each launch of a program runs alone, on the buffers that it has in the program, and is timed.

A launch is emitted once and N times in one program; the difference of the two times, divided by N - 1, is the time of
the launch without that of the call. A device with a clock of its own measures the launch itself (`measure` of its
runtime: CUDA events). In an emulator what the launch executes is counted instead. Each launch leaves its
results in the buffers for the next: those of the runtime or the emulator, for the Tile interpreter may take a thousand
times as long.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tessera.codegen.contract import TimedRuntime, emit_artifact, get_backend, load_interpreter
from tessera.compiler.schedules import ScheduledKernel
from tessera.core.errors import Location, TesseraError
from tessera.core.types import RefType
from tessera.cuda.counters import LaunchCounters
from tessera.interp import graph as graph_interpreter
from tessera.interp.observers import OBSERVERS
from tessera.interp.target.ptx.module import LAUNCH_OBSERVER
from tessera.interp.tile import interpreter as tile_interpreter
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.levels import KERNEL_OP
from tessera.lower.op_chains import CONSTANT_OPS, VIEW_OPS
from tessera.lower.op_counts import count_flops
from tessera.ops.dialects import host
from tessera.runtime import driver
from tessera.tools.debug.profiler import KernelProfile, LaunchCounts

SECONDS, CYCLES, INSTRUCTIONS = "seconds", "cycles", "instructions"
HOST_CLOCK, DEVICE_EVENTS = "host clock", "device events"  # what seconds are measured by
REPEATS = 9  # the least of so many runs is taken
SHORTEST = 2e-3  # seconds that the repeated launches should take
COUNT_SECONDS = 5.0  # of the processor, that the interpreter may take to count a launch


@dataclass
class KernelMeasurement:
    """One launch: its cost in the unit of the profile, and what it does.

    `flops` and `bytes` are counted from the kernel's iteration space and its arrays (each byte once), or, where there
    is none, in the interpreter. `counters` are those of an emulator. `resources` are what each of its kernels takes of
    a GPU, as the driver tells.
    """

    name: str
    ops: tuple[str, ...]
    location: Location
    cost: float
    unit: str
    flops: int = 0
    bytes: int = 0
    programs: int = 1
    pattern: str = ""
    reads: tuple[Any, ...] = ()
    writes: tuple[Any, ...] = ()
    counters: LaunchCounters | None = None
    counts: LaunchCounts | None = field(default=None, repr=False)
    lines: Mapping[Location, float] = field(default_factory=dict)
    matrix: bool = False  # a product of matrices
    narrow: bool = False  # of 16-bit elements, for which GPUs have matrix units
    clock: str = HOST_CLOCK
    resources: Sequence[Mapping[str, Any]] = ()
    estimated: bool = False  # bytes are those of its arrays, operations unknown: counting it would take too long

    @property
    def moved(self) -> int | None:
        """The bytes of global memory that were moved, where an emulator has counted them."""
        if self.counters is None:
            return None
        return sum(n for kind, n in self.counters.bytes.items() if kind.startswith("global"))

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes if self.bytes else 0.0


# Launches alone.


def make_module(module: Module, node: Node, times: int) -> Module:
    """A Tile module that only runs one node of the entry function, some times, on its buffers."""
    used, views = find_memory(module.main, node)
    params = {v: Value(v.type, v.hint) for v in used}
    nodes = tuple(_rename(each, params) for each in (*views, *([node] * times)))
    # Regions have buffers of their own, at their places in the workspace.
    attrs = Attrs({"workspace": module.main.attrs.get("workspace", 0)})
    main = Function(module.main.name, Block(tuple(params.values()), nodes, ()), attrs, node.loc)
    return module.replace(main, *_find_launched(module, node))


def find_memory(main: Function, node: Node) -> tuple[tuple[Value, ...], tuple[Node, ...]]:
    """The buffers that a node uses, each once, and the views of them in the entry function that it uses."""
    made = {n.out: n for n in main.body.nodes if n.op is host.view}
    used: dict[Value, None] = {}
    views: dict[Node, None] = {}
    for value in dict.fromkeys([*node.args, *(v for r in node.regions for v in r.free)]):
        chain = []
        while value in made:
            chain.append(made[value])
            value = made[value].args[0]
        used[value] = None
        views |= dict.fromkeys(reversed(chain))
    return tuple(used), tuple(views)


def _rename(node: Node, params: Mapping[Value, Value]) -> Node:
    def inside(block: Block) -> Block:
        nodes = tuple(_rename(n, params) for n in block.nodes)
        return Block(block.params, nodes, tuple(params.get(v, v) for v in block.results))

    args = tuple(params.get(v, v) for v in node.args)
    return replace(node, args=args, regions=tuple(inside(r) for r in node.regions))


def _find_launched(module: Module, node: Node) -> list[Function]:
    nodes = [node, *(n for r in node.regions for n in r.walk())]
    names = dict.fromkeys(n.attrs["kernel"] for n in nodes if n.op is host.launch)
    return [module.function(name) for name in names]


@dataclass
class ReplayBuffers:
    """The memories of a program while its launches run one by one."""

    arrays: dict[Value, np.ndarray]
    main: Function

    @classmethod
    def of(cls, main: Function, arrays: Sequence[Any]) -> ReplayBuffers:
        """The arguments, and zeros for the outputs."""
        missing = main.params[len(arrays) :]
        made = [np.zeros(p.type.shape, p.type.dtype.numpy) for p in missing]  # type: ignore[union-attr]
        given = [np.array(a) if isinstance(p.type, RefType) else a for p, a in zip(main.params, arrays, strict=False)]
        return cls(dict(zip(main.params, [*given, *made], strict=True)), main)

    def define(self, node: Node) -> bool:
        """Whether a node only makes memory, or a view of it; memory is then made."""
        if node.op is host.alloc:
            type = node.out.type
            self.arrays[node.out] = np.zeros(type.shape, type.dtype.numpy)  # type: ignore[union-attr]
        return node.op in (host.alloc, host.view)

    def take(self, node: Node) -> list[Any]:
        """The buffers that a node uses."""
        return [self.arrays[v] for v in find_memory(self.main, node)[0]]


def replay(levels: Mapping[str, Module], arrays: Sequence[Any], target: str, detailed: bool) -> list[KernelMeasurement]:
    """Measure or count each launch of a program, in the order of the program."""
    with redirect_stdout(io.StringIO()):  # what kernels print, they print in every replay
        return _replay(levels, arrays, target, detailed)


def _replay(
    levels: Mapping[str, Module], arrays: Sequence[Any], target: str, detailed: bool
) -> list[KernelMeasurement]:
    module = levels["tile"]
    scheduled = _match_schedule(levels, module)
    buffers, found = ReplayBuffers.of(module.main, arrays), []
    for node in module.main.body.nodes:
        if buffers.define(node):
            continue
        given = buffers.take(node)
        one = _describe(module, node, scheduled.get(node))
        before = _copy(given)
        _COSTS[_find_manner(target)](one, module, node, given, target)
        if node.op is host.launch and (detailed or not one.bytes):
            _count_in_interpreter(one, make_module(module, node, 1), before, keep=node in scheduled)
        found.append(one)
    return found


def _match_schedule(levels: Mapping[str, Module], module: Module) -> dict[Node, ScheduledKernel]:
    """The kernel of the Schedule level of each launch: both modules have them in the same order."""
    if "schedule" not in levels:
        return {}
    kernels = [n for n in levels["schedule"].main.body.nodes if n.op.name == KERNEL_OP or n.op is host.launch]
    launches = [n for n in module.main.body.nodes if n.op is host.launch]
    if len(kernels) != len(launches):
        return {}
    pairs = zip(launches, kernels, strict=True)
    return {n: ScheduledKernel(k) for n, k in pairs if k.op.name == KERNEL_OP and not _has_symbols(k)}


def _has_symbols(kernel: Node) -> bool:
    return not all(isinstance(extent, int) for _, extent, _ in kernel.attrs["dims"])


def _describe(module: Module, node: Node, kernel: ScheduledKernel | None) -> KernelMeasurement:
    if node.op is not host.launch:
        name = f"host {node.attrs.get('op', node.op.name)}".replace("ts.", "")
        return KernelMeasurement(name, (node.op.name,), node.loc, 0.0, SECONDS)
    function = module.function(node.attrs["kernel"])
    ops = tuple(dict.fromkeys(n.op.name.removeprefix("ts.") for n in function.body.walk() if _computes(n)))
    written = {n.args[0] for n in function.body.walk() if n.op.name in ("tile.store", "tile.scatter", "tile.atomic")}
    pairs = list(zip(function.params, node.args, strict=True))
    one = KernelMeasurement(function.name, ops, node.loc, 0.0, SECONDS, matrix="dot" in ops)
    one.programs = math.prod(int(n) for n in node.attrs["grid"])
    one.reads = tuple(id(v) for p, v in pairs if p not in written)
    one.writes = tuple(id(v) for p, v in pairs if p in written)
    one.narrow = any(n.op.name == "ts.dot" and n.args[0].type.dtype.bits <= 16 for n in function.body.walk())  # type: ignore[union-attr]
    if kernel is not None:
        one.flops, one.bytes, one.pattern = (
            kernel.count_flops(), kernel.count_memory_bytes(), kernel.memory_access_pattern()
        )  # fmt: skip
    return one


def _computes(node: Node) -> bool:
    return node.op.name.startswith("ts.") and node.op not in (*VIEW_OPS, *CONSTANT_OPS) and not node.regions


def _count_in_interpreter(one: KernelMeasurement, module: Module, arrays: Sequence[Any], keep: bool) -> None:
    """Count a launch in the interpreter, or the bytes of its arrays where that takes too long."""
    try:
        one.counts = count_launch(module, arrays, COUNT_SECONDS)
    except _OutOfTimeError:
        one.estimated = True
    if keep or one.unit == INSTRUCTIONS:  # known from the iteration space, or counted by the emulator
        return
    if one.counts is not None:
        one.flops, one.bytes = one.counts.flops, one.counts.read["global"] + one.counts.written["global"]
    else:
        one.bytes = sum(a.nbytes for a in arrays if isinstance(a, np.ndarray))


class _OutOfTimeError(Exception):
    """The interpreter has not ended within the time that counting may take."""


class _LimitedCounter(KernelProfile):
    """Counts as `KernelProfile` does, for so many seconds of the processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__(places=False)
        self.limit = time.process_time() + seconds

    def meaning(self, machine: Any, inner: Any) -> Any:
        """Nodes as they are, counted."""
        mean = super().meaning(machine, inner)

        def limited(node: Node, args: list[Any], walk: Any) -> Any:
            if time.process_time() > self.limit:
                raise _OutOfTimeError
            return mean(node, args, walk)

        return limited


def count_launch(module: Module, arrays: Sequence[Any], seconds: float = math.inf) -> LaunchCounts | None:
    """What the Tile interpreter counts while a launch runs on its buffers, within a limit of processor time."""
    profile = _LimitedCounter(seconds)
    token = OBSERVERS.set((profile,))
    try:
        tile_interpreter.run(module, arrays)
    finally:
        OBSERVERS.reset(token)
    return profile.launches[0] if profile.launches else None


def _copy(arrays: Sequence[Any]) -> list[Any]:
    return [a.copy() if isinstance(a, np.ndarray) else a for a in arrays]


# Costs: seconds of a runtime, or counts of an emulator. The launch has then run once on the arrays that were given.


def _find_manner(target: str) -> str:
    generator = get_backend(target)
    has_device = hasattr(generator, "runtime") and getattr(generator, "has_device", True)
    return "runtime" if has_device else "emulator" if target.partition(":")[0] == "ptx" else "interpreter"


def _time_runtime(one: KernelMeasurement, module: Module, node: Node, arrays: Sequence[Any], target: str) -> None:
    runtime = driver.make_runtime(make_module(module, node, 1), target)
    run = runtime.run
    if isinstance(runtime, TimedRuntime):
        one.cost, one.clock, one.resources = runtime.measure(arrays), DEVICE_EVENTS, runtime.describe_kernels()
        run(arrays)
        return
    once = _time_module(run, arrays)
    times = int(min(max(SHORTEST / max(once, 1e-7), 4), 256))
    many = _time_module(driver.make_runtime(make_module(module, node, 1 + times), target).run, arrays)
    # On a loaded machine one launch may have taken longer than many: then its share of all, with that of the call.
    one.cost = (many - once) / times if many > once else many / (1 + times)
    run(arrays)


def _time_module(run: Callable[[Sequence[Any]], Any], arrays: Sequence[Any]) -> float:
    best, given = math.inf, _copy(arrays)
    run(given)
    for _ in range(REPEATS):
        start = time.perf_counter()
        run(given)
        best = min(best, time.perf_counter() - start)
    return best


def _count_emulator(one: KernelMeasurement, module: Module, node: Node, arrays: Sequence[Any], target: str) -> None:
    one.unit = INSTRUCTIONS
    alone = make_module(module, node, 1)
    if node.op is host.call:  # runs on the host
        tile_interpreter.run(alone, arrays)
        return
    generator, counters = get_backend(target), LaunchCounters()
    run = load_interpreter(generator, emit_artifact(generator, alone, {}))
    token = LAUNCH_OBSERVER.set(counters)
    try:
        run(arrays)
    finally:
        LAUNCH_OBSERVER.reset(token)
    one.counters = counters
    one.cost = float(sum(counters.instructions.values()))
    one.lines = {place: float(c.instructions) for place, c in counters.lines.items()}
    if not one.bytes:
        one.bytes, one.flops = one.moved or 0, counters.flops + counters.matrix_flops


def _time_interpreter(one: KernelMeasurement, module: Module, node: Node, arrays: Sequence[Any], target: str) -> None:
    generator = get_backend(target)
    run = load_interpreter(generator, emit_artifact(generator, make_module(module, node, 1), {}))
    start = time.perf_counter()
    run(arrays)
    one.cost = time.perf_counter() - start


_COSTS: dict[str, Callable[..., None]] = {
    "runtime": _time_runtime,
    "emulator": _count_emulator,
    "interpreter": _time_interpreter,
}


# Graph functions op by op: in the interpreter, and on a mesh, whose programs are one function.


def time_graph(function: Function, arrays: Sequence[Any]) -> list[KernelMeasurement]:
    """The seconds of each op in the Graph interpreter."""
    return _merge_runs([replace(one, cost=seconds) for one, seconds in _walk_graph(function, arrays, _time_node)])


def count_mesh_cycles(function: Function, arrays: Sequence[Any], target: str) -> list[KernelMeasurement]:
    """The cycles of each op, compiled and simulated alone; ops that a mesh does not have alone are left out."""

    def count(alone: Function, given: Sequence[Any]) -> float | None:
        try:
            runtime = driver.make_runtime(driver.lower(alone, target)["tile"], target)
            runtime.run([np.array(a) for a in given])
        except TesseraError:
            return None
        return float(runtime.cycles)  # type: ignore[attr-defined]

    found = [replace(one, cost=c, unit=CYCLES) for one, c in _walk_graph(function, arrays, count) if c is not None]
    return _merge_runs(found)


LONGEST_RUN = 8  # ops of one call of the user that are shown apart


def _merge_runs(found: Sequence[KernelMeasurement]) -> list[KernelMeasurement]:
    """Long runs of ops at one source location, as of a random number, as one row each."""
    runs: list[list[KernelMeasurement]] = []
    for one in found:
        if runs and runs[-1][-1].location == one.location:
            runs[-1].append(one)
        else:
            runs.append([one])
    return [one for run in runs for one in ([_merge(run)] if len(run) > LONGEST_RUN else run)]


def _merge(run: Sequence[KernelMeasurement]) -> KernelMeasurement:
    ops = tuple(dict.fromkeys(o for one in run for o in one.ops))
    name = f"{max(run, key=lambda one: one.cost).name} and {len(run) - 1} more"
    sums = {k: sum(getattr(one, k) for one in run) for k in ("cost", "flops", "bytes")}
    return replace(run[0], name=name, ops=ops, writes=run[-1].writes, **sums)


def _time_node(function: Function, arrays: Sequence[Any]) -> float:
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        graph_interpreter.run(function, list(arrays))
        best = min(best, time.perf_counter() - start)
    return best


def _walk_graph(
    function: Function, arrays: Sequence[Any], measure: Callable[[Function, Sequence[Any]], Any]
) -> Iterator[tuple[KernelMeasurement, Any]]:
    env: dict[Value, Any] = dict(zip(function.params, arrays, strict=True))
    for node in function.body.nodes:
        used = tuple(dict.fromkeys([*node.args, *(v for r in node.regions for v in r.free)]))
        alone = Function("op", Block(used, (node,), node.results), loc=node.loc)
        given = [env[v] for v in used]
        env.update(zip(node.results, graph_interpreter.run(alone, given), strict=True))
        if node.op in (*VIEW_OPS, *CONSTANT_OPS):
            continue
        name = node.op.name.removeprefix("ts.")
        one = KernelMeasurement(name, (name,), node.loc, 0.0, SECONDS, matrix=name == "dot")
        one.reads, one.writes = tuple(map(id, used)), tuple(map(id, node.results))
        if not node.regions:
            one.bytes = sum(np.asarray(env[v]).nbytes for v in (*used, *node.results))
            one.flops = count_flops(node)
        yield one, measure(alone, given)
