"""Schedules of kernels: what a pass of a user sees of a kernel of the Schedule level, and the tiles that it sets."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tessera.core.errors import ArgumentError
from tessera.core.schedule import Schedule
from tessera.core.symbolic_dim import estimate_size
from tessera.core.types import RefType
from tessera.ir.core import Attrs, Module, Node, Value
from tessera.ir.levels import KERNEL_OP
from tessera.lower.indexing_maps import analyse_body
from tessera.lower.lowering_plan import LoweringPlan
from tessera.ops.dialects import schedule as dialect

STRIDED, CONTIGUOUS, BROADCAST = "strided", "contiguous", "broadcast"


@dataclass(frozen=True)
class TargetView:
    """What a schedule generator sees of the target: the limits and preferences of its lowering plan."""

    plan: LoweringPlan


class ScheduledKernel:
    """A kernel of the Schedule level: its dims, its counts, and the dims that `tile_m`, `tile_n` and `tile_k` mean.

    m and n are the last two parallel dims (a kernel with one parallel dim has only m), k the reduced dim.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.dims: tuple[tuple[str, Any, str], ...] = node.attrs["dims"]
        self.extents = [int(estimate_size(n)) for _, n, _ in self.dims]

    @property
    def name(self) -> str:
        """The ops that it computes, joined: "contract_add"."""
        ops = [n.op.name.split(".")[1] for n in self.node.regions[0].nodes]
        skipped = ("index", "load", "store", "full", "cast", "broadcast", "yield")
        return "_".join(dict.fromkeys(o for o in ops if o not in skipped)) or "copy"

    @property
    def location(self) -> Any:
        """The user's line."""
        return self.node.loc

    def count_flops(self) -> int:
        """Its arithmetic operations: two for each element of a product, one for each of another op."""
        total = 0
        forms = analyse_body(self.node.regions[0], self.dims)
        for node in self.node.regions[0].nodes:
            if node.op.name.startswith("ts.") and node.args:
                total += self._count_points(forms.depends[node.out])
            elif node.op in (dialect.reduce, dialect.contract):
                dims = set().union(*(forms.depends[v] for v in node.args)) | {node.attrs["dim"]}
                total += self._count_points(dims) * (2 if node.op is dialect.contract else 1)
        return total

    def _count_points(self, dims: Any) -> int:
        return math.prod(self.extents[d] for d in dims)

    def count_memory_bytes(self) -> int:
        """The bytes of the memory that it reads and writes, each once."""
        return sum(_count_bytes(v) for v in self.node.args)

    def arithmetic_intensity(self) -> float:
        """Operations for each byte."""
        return self.count_flops() / max(self.count_memory_bytes(), 1)

    def memory_access_pattern(self) -> str:
        """How it reads: "contiguous" if the last dim has unit stride in every load, else "strided"; or "broadcast"."""
        forms = analyse_body(self.node.regions[0], self.dims)
        kinds = set()
        for node in self.node.regions[0].nodes:
            if node.op is dialect.load:
                indices = forms.indices(node)
                units = {a.dim for a, c in indices[-1].terms if c == 1 and hasattr(a, "dim")} if indices else set()
                kinds.add(CONTIGUOUS if units else BROADCAST)
                if units and len(self.dims) > 1 and max(units) != self._find_fastest():
                    kinds.add(STRIDED)
        return STRIDED if STRIDED in kinds else CONTIGUOUS if CONTIGUOUS in kinds else BROADCAST

    def _find_fastest(self) -> int:
        return len(self.dims) - 1

    def find_axis(self, name: str) -> int | None:
        """The dim that m, n or k means; None where the kernel has none."""
        parallel = [i for i, (_, _, kind) in enumerate(self.dims) if kind == "parallel"]
        reduced = [i for i, (_, _, kind) in enumerate(self.dims) if kind == "reduce"]
        if name == "k":
            return reduced[-1] if reduced else None
        if name == "m":
            return parallel[-2] if len(parallel) > 1 else parallel[0] if parallel else None
        return parallel[-1] if len(parallel) > 1 else None

    @property
    def schedule(self) -> Schedule:
        """The tile sizes that it has."""
        tile = self.node.attrs["schedule"]["tile"]
        axes = {n: a for n in "mnk" if (a := self.find_axis(n)) is not None}
        return Schedule(**{f"tile_{n}": int(tile[a]) for n, a in axes.items()})

    def __repr__(self) -> str:
        dims = ", ".join(f"{n}={e}" for (n, _, _), e in zip(self.dims, self.extents, strict=True))
        return f"ScheduledKernel({self.name}: {dims})"


def _count_bytes(value: Value) -> int:
    type = value.type
    assert isinstance(type, RefType)
    return math.prod(int(estimate_size(n)) for n in type.shape) * type.dtype.bits // 8


class ScheduleGenerator:
    """Chooses the schedule of each kernel: override `generate(kernel, target)`, which gives a Schedule or None.

    Fields that a schedule leaves out keep the compiler's choice, as None does. The sizes of tiles are bounds: a dim
    that is shorter is one tile.
    """

    def generate(self, kernel: ScheduledKernel, target: TargetView) -> Schedule | None:
        """The schedule of a kernel; by default what the compiler has chosen."""
        return kernel.schedule


class ScheduleOptimizer:
    """Changes the schedule that a kernel has: override `optimize(schedule, kernel)`.

    The methods below are steps that `optimize` may take; each gives a new schedule.
    """

    def optimize(self, schedule: Schedule, kernel: ScheduledKernel) -> Schedule:
        """The schedule after these steps; by default the same."""
        return schedule

    def tile_loops(self, schedule: Schedule, **tiles: int) -> Schedule:
        """Set tile sizes."""
        return schedule.derive(**tiles) if tiles else schedule

    def unroll_loops(self, schedule: Schedule, factor: int | None = None) -> Schedule:
        """Set the unroll factor of loops of the kernel language; the target unrolls kernels of the lowering."""
        return schedule.derive(unroll=factor) if factor else schedule

    def vectorize(self, schedule: Schedule, width: int | None = None) -> Schedule:
        """Set the vector width."""
        return schedule.derive(vector=width) if width else schedule

    def optimize_data_layout(self, schedule: Schedule, swizzle: str | None = None) -> Schedule:
        """Set the swizzle of shared memory."""
        return schedule.derive(swizzle=swizzle) if swizzle else schedule

    def insert_prefetching(self, schedule: Schedule, stages: int | None = None) -> Schedule:
        """Set the stages of the software pipeline."""
        return schedule.derive(stages=stages) if stages else schedule

    def parallelize(self, schedule: Schedule, warps: int | None = None) -> Schedule:
        """Set the warps of a group."""
        return schedule.derive(warps=warps) if warps else schedule


def optimize_schedules(name: str, source: Any) -> Callable[[Module, LoweringPlan], Module]:
    """The pipeline pass that asks an object for the schedule of each kernel.

    Raises (when it runs):
        ArgumentError: the object gives something else than a schedule.
        ResourceError: the target refuses the kernel with these tiles.
    """

    def run(module: Module, plan: LoweringPlan) -> Module:
        nodes = tuple(_reschedule(name, source, n, plan) for n in module.main.body.nodes)
        if all(a is b for a, b in zip(nodes, module.main.body.nodes, strict=True)):
            return module
        main = replace(module.main, body=replace(module.main.body, nodes=nodes))
        return module.replace(main, *module.functions[1:])

    return run


def _reschedule(name: str, source: Any, node: Node, plan: LoweringPlan) -> Node:
    if node.op.name != KERNEL_OP:
        regions = tuple(
            replace(r, nodes=tuple(_reschedule(name, source, n, plan) for n in r.nodes)) for r in node.regions
        )
        return replace(node, regions=regions) if regions else node
    kernel = ScheduledKernel(node)
    wanted = _ask(name, source, kernel, plan)
    if wanted is None or wanted == kernel.schedule:
        return node
    tile = list(node.attrs["schedule"]["tile"])
    for axis in "mnk":
        size, place = getattr(wanted, f"tile_{axis}"), kernel.find_axis(axis)
        if size is not None and place is not None:
            tile[place] = min(size, kernel.extents[place])
    return replace(node, attrs=Attrs({**node.attrs, "schedule": _loop_cut_dims(node, kernel, tile)}))


def _loop_cut_dims(node: Node, kernel: ScheduledKernel, tile: list[int]) -> Attrs:
    """The schedule with these tiles: a dim that is reduced and cut is walked by a loop, of which a kernel has one.

    A second dim of that kind keeps its whole extent.
    """
    held = node.attrs["schedule"]
    reduced = {n.attrs["dim"] for n in node.regions[0].nodes if n.op in (dialect.reduce, dialect.contract)}
    cut = [d for d in sorted(reduced) if tile[d] < kernel.extents[d]]
    looped = [d for d in held["loop"] if d in cut or d not in reduced][:1] or cut[:1]
    for dim in cut:
        if dim not in looped:
            tile[dim] = kernel.extents[dim]
    rest = {k: v for k, v in held.items() if k != "peel" or looped}
    return Attrs({**rest, "tile": tuple(tile), "loop": tuple(looped)})


def _ask(name: str, source: Any, kernel: ScheduledKernel, plan: LoweringPlan) -> Schedule | None:
    if hasattr(source, "generate"):
        wanted = source.generate(kernel, TargetView(plan))
    else:
        call = source.optimize if hasattr(source, "optimize") else source
        count = len(inspect.signature(call).parameters)
        wanted = call(*(kernel.schedule, kernel)[:count])
    if wanted is None or isinstance(wanted, Schedule):
        return wanted
    raise ArgumentError(
        f"the schedule pass {name} gives no schedule for {kernel.name}", location=kernel.location,
        expected="a ts.Schedule, or None to keep the compiler's choice", received=repr(wanted)[:80],
    )  # fmt: skip
