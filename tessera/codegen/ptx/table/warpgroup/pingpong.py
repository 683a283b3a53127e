"""Ping-pong schedule (CUTLASS): two consumer teams on tiles of their own; one runs MMAs while the other its epilogue.

The stages of the ring alternate between the teams: each consumes as many in a row as its tile has iterations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.codegen.ptx.layout import WARPGROUP_THREADS, ThreadTeam
from tessera.codegen.ptx.ops import gemm_mainloop
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.mainloop import HALF_TYPES
from tessera.codegen.ptx.table.scalars.math_functions import MATH_FUNCTIONS
from tessera.ir.core import Function, Node
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic

PINGPONG_TEAMS = 2
PINGPONG_ROWS = 128
ORDER_BARRIER = 10  # the named barrier at which the first team waits for the MMAs of the second
MIN_PROGRAMS = 256  # with fewer there is hardly more than one tile for each team of a GPU
# Accumulator registers of a thread, by the warp groups of a team. With more, ptxas does not interleave the instructions
# of transcendental functions, which are worth two groups; without such functions one group is enough.
ACCUMULATOR_REGISTERS = {1: 128, 2: 64}
# Instructions for each element: of a transcendental function, another op, a store; an MMA iteration costs four. A load
# of a block waits for memory, too.
FUNCTION_COST, PLAIN_COST, STORE_COST, ITERATION_COST, LOAD_COST = 15, 1, 3, 4, 16
EPILOGUE_SHARE = {1: 20, 2: 8}  # the epilogue must cost at least this part of the mainloop, by warp groups


_MEMORY_COSTS = {tile.load: LOAD_COST, tile.store: STORE_COST}


def choose_pingpong_groups(function: Function, grid: Sequence[int]) -> int:
    """The warp groups of each team where a function with a `gemm_mainloop` profits from the schedule, else 0."""
    loops = [n for n in function.body.nodes if n.op is gemm_mainloop]
    if len(loops) != 1 or math.prod(grid) < MIN_PROGRAMS or any(n.op is tile.alloc for n in function.body.walk()):
        return 0
    (loop,) = loops
    rows, columns, _ = loop.attrs["block"]
    epilogue, trip_count = _find_epilogue(function, loop), find_trip_count(function, loop)
    groups = 2 if any(n.op in MATH_FUNCTIONS for n in epilogue) else 1
    fits = rows == PINGPONG_ROWS and rows * columns // (WARPGROUP_THREADS * groups) <= ACCUMULATOR_REGISTERS[groups]
    if not fits or trip_count is None or loop.args[1].type.dtype not in HALF_TYPES:  # type: ignore[union-attr]
        return 0
    cost = sum(map(_estimate_cost, epilogue))
    return groups if cost * EPILOGUE_SHARE[groups] >= trip_count * ITERATION_COST else 0


def find_trip_count(function: Function, loop: Node) -> int | None:
    """The iterations of a `gemm_mainloop`, if they are the same for every program."""
    known = {n.out: int(n.attrs["value"]) for n in function.body.nodes if n.op is basic.full and not n.out.type.rank}  # type: ignore[union-attr]
    lower, upper = (known.get(v) for v in loop.args[3:5])
    return None if lower is None or upper is None else max(-((lower - upper) // loop.attrs["step"]), 0)


def _find_epilogue(function: Function, loop: Node) -> list[Node]:
    """The nodes after the mainloop that work on each element of its result."""
    nodes = function.body.nodes[function.body.nodes.index(loop) + 1 :]
    size = math.prod(static_shape(loop.out))
    whole = [n for n in nodes if n.op is tile.store or (n.results and math.prod(static_shape(n.out)) == size)]
    return [n for n in whole if n.op.pointwise or n.op in (tile.load, tile.store)]


def _estimate_cost(node: Node) -> int:
    """The approximate number of instructions of a node for each element."""
    if node.op in _MEMORY_COSTS:
        return _MEMORY_COSTS[node.op]
    return FUNCTION_COST if node.op in MATH_FUNCTIONS else PLAIN_COST


def start_pingpong(team: ThreadTeam) -> None:
    """The second team lets the first one begin."""
    second = team.hoist(("second team",), "setp.ne.u32", "pred", team.team_index, 0)
    team.text.do("bar.arrive", ORDER_BARRIER, team.worker_threads, guard=second)


def wait_mma_order(team: ThreadTeam) -> None:
    """Wait until the other team has issued its MMAs."""
    if team.teams > 1:
        own = team.hoist(("own order barrier",), "add.u32", "b32", team.team_index, ORDER_BARRIER)
        team.text.do("bar.sync", own, team.worker_threads)


def yield_mma_order(team: ThreadTeam) -> None:
    """Let the other team issue its MMAs."""
    if team.teams > 1:
        other = team.hoist(("other order barrier",), "sub.u32", "b32", ORDER_BARRIER + 1, team.team_index)
        team.text.do("bar.arrive", other, team.worker_threads)
