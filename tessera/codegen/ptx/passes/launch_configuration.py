"""Launch configuration: how a tile function is launched, and the mapping of threads: how many work on a tile, how many
neighbours each holds, and the occupancy to ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.codegen.artifact import parse_size
from tessera.codegen.host_plan import build_host_plan, find_aliased_kernels
from tessera.codegen.ptx.layout import WARP_THREADS, WARPGROUP_THREADS, uses_tensor_cores
from tessera.codegen.ptx.ops import (
    LEVEL,
    UNIFORM,
    WARP_SPECIALISED,
    LaunchFacts,
    async_mma,
    gemm_mainloop,
    get_fact,
    prefetched_load,
    set_facts,
)
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.table.scalars.conversion import has_policies
from tessera.codegen.ptx.table.warpgroup.pingpong import PINGPONG_TEAMS, choose_pingpong_groups
from tessera.codegen.ptx.table.warpgroup.tensor_map import WGMMA_ROWS
from tessera.codegen.ptx.text.builder import element_bytes
from tessera.codegen.ptx.text.memref import VECTOR_BYTES
from tessera.core.errors import ResourceError
from tessera.core.symbolic_dim import Size, find_size_divisor, proves_less
from tessera.core.types import TensorType
from tessera.ir.core import Function, Module, Node, Value
from tessera.ops.dialects import host, tile

TEAM_THREADS = (32, 1024)  # the fewest and the most threads of a team
ELEMENTS_PER_THREAD = 8  # elements of the largest block that a thread holds, where the team can be as large
MMA_ELEMENTS_PER_THREAD = 128  # the same with tensor cores: what a warp reads serves 64 rows and columns
WIDE_ELEMENTS_PER_THREAD = 32  # from so many on a team grows past PREFERRED_THREADS
PREFERRED_THREADS = 256
SM_REGISTERS = 1 << 16  # registers of a multiprocessor
MAX_RESIDENT_BLOCKS = 8  # the most blocks that are asked to share its registers
EPILOGUE_VECTOR = 8  # neighbours that a thread of a warp-specialised kernel holds
MAX_WARPGROUPS = 2  # warp groups that multiply, in a kernel without ping-pong


def map_threads(function: Function) -> Function:
    """The function with its team size, vector width and occupancy as attributes."""
    if get_fact(function, "kernel") == WARP_SPECIALISED:
        return _map_warp_groups(function)
    threads = 1 if int(function.attrs.get("group", 1)) > 1 else choose_team_size(function)
    resident = choose_resident_blocks(function) if get_fact(function, "kernel") == UNIFORM else 0
    return set_facts(function, threads=threads, teams=1, vector=choose_vector_width(function), resident=resident)


def _map_warp_groups(function: Function) -> Function:
    """Two ping-pong teams where their epilogues are long enough; else one team of one or two warp groups."""
    own = 0 if get_fact(function, "cluster") else choose_pingpong_groups(function, LaunchFacts.of(function).grid)
    teams, groups = (PINGPONG_TEAMS, own) if own else (1, min(MAX_WARPGROUPS, _product_rows(function) // WGMMA_ROWS))
    return set_facts(function, threads=WARPGROUP_THREADS * groups, teams=teams, vector=EPILOGUE_VECTOR, resident=0)


def _product_rows(function: Function) -> int:
    """The rows of the blocks that are multiplied."""
    return next(static_shape(n.out)[0] for n in function.body.walk() if n.op in (gemm_mainloop, async_mma))


def choose_team_size(function: Function) -> int:
    """The threads for a tile: so many that none holds many elements of the largest block."""
    most = max((_element_count(v) for node in function.body.walk() for v in node.results), default=1)
    if any(uses_tensor_cores(node) for node in function.body.walk()):
        return min(
            max(1 << max(most // MMA_ELEMENTS_PER_THREAD - 1, 0).bit_length(), 4 * WARP_THREADS), PREFERRED_THREADS
        )
    wanted = (
        most // ELEMENTS_PER_THREAD
        if most // ELEMENTS_PER_THREAD <= PREFERRED_THREADS
        else max(PREFERRED_THREADS, most // WIDE_ELEMENTS_PER_THREAD)
    )
    return min(max(1 << max(wanted - 1, 0).bit_length(), TEAM_THREADS[0]), TEAM_THREADS[1])


def choose_resident_blocks(function: Function) -> int:
    """The blocks that a multiprocessor should hold at once where one product takes another's result; 0: any.

    Without a limit the assembler keeps more registers alive than pays. With it a thread has four registers for each
    element that it holds of the largest block: sums, the operands of the next instructions, and addresses.
    """
    if sum(uses_tensor_cores(node) for node in function.body.walk()) < 2:
        return 0
    most = max(_element_count(v) for node in function.body.walk() for v in node.results)
    return max(1, min(SM_REGISTERS // (4 * most), MAX_RESIDENT_BLOCKS))


def choose_vector_width(function: Function) -> int:
    """The neighbours that a thread holds: 16 bytes of the narrowest elements that are loaded or stored."""
    accesses = (tile.load, tile.store, prefetched_load)
    narrow = [n.args[0].type.dtype for n in function.body.walk() if n.op in accesses]
    return max(1, min(8, 16 // min((element_bytes(d) for d in narrow), default=4)))


def _element_count(v: Value) -> int:
    return math.prod(static_shape(v)) if isinstance(v.type, TensorType) else 1


# Launch analysis: records how a tile function is launched (grids, aliasing, alignment) as function attributes. The
# first pass of the pipeline: its result is a module of the level `ptx`.


MAX_PROGRAMS = (1 << 31) - 1  # of a launch: the limit of a grid's first axis


def analyse_launches(module: Module, arch: str) -> Module:
    """The module with the facts of each tile function's launches, for an architecture.

    Raises:
        ResourceError: a grid has more programs than a launch may have.
    """
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    aliased, plan = find_aliased_kernels(module), build_host_plan(module, {})
    functions = [
        _record_launches(f, arch, list_launch_grids(launches, f), f.name not in aliased, plan)
        for f in module.functions[1:]
    ]
    return module.replace(module.main, *functions, level=LEVEL)


def _record_launches(
    function: Function, arch: str, grids: Sequence[tuple[Size, ...]], noalias: bool, plan: Mapping[str, Any]
) -> Function:
    alignments = tuple(_parameter_alignments(plan, function))
    special = {"rounding": True} if has_policies(function) else {}
    return set_facts(function, arch=arch, grids=tuple(grids), noalias=noalias, alignments=alignments, **special)


def _parameter_alignments(plan: Mapping[str, Any], function: Function) -> list[int]:
    """For each parameter a number of bytes that divides its address: a vector's, or less where a slice moves it."""
    args = [each["args"] for each in plan["launches"] if each["kernel"] == function.name]
    moves = [[n for given in args for _, n in given[i].get("moves", ())] for i in range(len(function.params))]
    return [math.gcd(VECTOR_BYTES, *(find_size_divisor(parse_size(n), VECTOR_BYTES) for n in c)) for c in moves]


def list_launch_grids(launches: Sequence[Node], function: Function) -> list[tuple[Size, ...]]:
    """The grids that a function is launched over, all of one rank: an axis that one lacks has one program."""
    grids = [_launch_grid(n) for n in launches if n.attrs["kernel"] == function.name]
    rank = max(map(len, grids), default=1)
    return [(*g, *(1,) * (rank - len(g))) for g in grids]


def _launch_grid(node: Node) -> tuple[Size, ...]:
    grid = tuple(node.attrs["grid"])
    if proves_less(MAX_PROGRAMS, math.prod(grid)):
        raise ResourceError(
            f"a grid of {math.prod(grid):,} programs", location=node.loc, expected=f"at most {MAX_PROGRAMS:,} on a GPU",
            received=f"{math.prod(grid):,}", suggestion="fewer programs that do more each, in a loop",
        )  # fmt: skip
    return grid or (1,)
