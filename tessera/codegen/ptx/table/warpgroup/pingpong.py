"""Ping-pong schedule (CUTLASS): two consumer teams on tiles of their own; one multiplies while the other finishes.

The stages of the ring then belong to the teams in turn, as many in a row as a tile has rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.ops import gemm_mainloop
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.passes.mainloop import HALF_TYPES
from tessera.codegen.ptx.table.scalars.formula_translation import FORMULAS
from tessera.ir.core import Function, Node
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic

if TYPE_CHECKING:
    from tessera.codegen.ptx.text.thread_team import ThreadTeam

PINGPONG_TEAMS = 2
PINGPONG_ROWS = 128
TURN_BARRIER = 10  # the barrier at which the first of the teams waits for its turn
MIN_PROGRAMS = 256  # fewer are hardly more than one for each team of a GPU
WARPGROUP_THREADS = 128  # threads
# Registers of a thread for sums, by the groups of a team. Beside more an assembler does not weave the instructions of
# functions, which are worth two groups; without functions one is enough, and the other's instructions go on meanwhile.
ACCUMULATOR_REGISTERS = {1: 128, 2: 64}
# Instructions for each element: of a function, of an op, of a store. A round of products takes as long as four.
FUNCTION_COST, PLAIN_COST, STORE_COST, ROUND_COST = 15, 1, 3, 4
EPILOGUE_SHARE = {1: 20, 2: 8}  # what follows the products must take such a part of their time, at least; by groups


def choose_pingpong_groups(function: Function, grid: Sequence[int]) -> int:
    """The groups of either team where a function with a `product_loop` is one for teams of their own, else 0."""
    loops = [n for n in function.body.nodes if n.op is gemm_mainloop]
    if len(loops) != 1 or math.prod(grid) < MIN_PROGRAMS or any(n.op is tile.alloc for n in function.body.walk()):
        return 0
    (loop,) = loops
    rows, columns, _ = loop.attrs["block"]
    after, count = _epilogue_nodes(function, loop), find_trip_count(function, loop)
    groups = 2 if any(n.op.__name__ in _math_functions() for n in after) else 1
    fits = rows == PINGPONG_ROWS and rows * columns // (WARPGROUP_THREADS * groups) <= ACCUMULATOR_REGISTERS[groups]
    if not fits or count is None or loop.args[1].type.dtype not in HALF_TYPES:  # type: ignore[union-attr]
        return 0
    if groups > 1 and any(n.op is tile.load for n in after):  # whole blocks, for which there are no registers
        return 0
    return groups if sum(map(_estimate_cost, after)) * EPILOGUE_SHARE[groups] >= count * ROUND_COST else 0


def find_trip_count(function: Function, loop: Node) -> int | None:
    """The rounds of a `product_loop`, if they are the same for every program."""
    known = {n.out: int(n.attrs["value"]) for n in function.body.nodes if n.op is basic.full and not n.out.type.rank}  # type: ignore[union-attr]
    lower, upper = (known.get(v) for v in loop.args[3:5])
    return None if lower is None or upper is None else max(-((lower - upper) // loop.attrs["step"]), 0)


def _epilogue_nodes(function: Function, loop: Node) -> list[Node]:
    """What is done for each element of a product once it is summed."""
    nodes = function.body.nodes[function.body.nodes.index(loop) + 1 :]
    whole = math.prod(static_shape(loop.out))
    made = [n for n in nodes if n.op is tile.store or (n.results and math.prod(static_shape(n.out)) == whole)]
    return [n for n in made if n.op.pointwise or n.op in (tile.load, tile.store)]


def _math_functions() -> set[str]:
    return {name for name, _ in FORMULAS}


def _estimate_cost(node: Node) -> int:
    """About how many instructions a node takes for each element."""
    if node.op in (tile.load, tile.store):
        return STORE_COST
    return FUNCTION_COST if node.op.__name__ in _math_functions() else PLAIN_COST


def start_pingpong(team: ThreadTeam) -> None:
    """The first team may begin."""
    second = team.once(("second",), "setp.ne.u32", "pred", team.index, 0)
    team.text.do("bar.arrive", TURN_BARRIER, team.working, guard=second)


def wait_turn(team: ThreadTeam) -> None:
    """Wait for the other team."""
    if team.teams > 1:
        own = team.once(("turn of team",), "add.u32", "b32", team.index, TURN_BARRIER)
        team.text.do("bar.sync", own, team.working)


def pass_turn(team: ThreadTeam) -> None:
    """Let the other team begin."""
    if team.teams > 1:
        other = team.once(("other turn",), "sub.u32", "b32", TURN_BARRIER + 1, team.index)
        team.text.do("bar.arrive", other, team.working)
