"""Teams of warp groups with programs of their own: one multiplies while the other works on what it has multiplied.

The stages of a ring then belong to the teams in turn, as many in a row as a program has rounds. A team begins its
rounds when the other has begun its last: so nobody waits for a phase of a stage that lies more than one ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.ops import product_loop
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.pipeline import HALVES
from tessera.codegen.ptx.scalars.formula import TABLE
from tessera.ir.core import Function, Node
from tessera.ops import basic, tile

if TYPE_CHECKING:
    from tessera.codegen.ptx.team import Team

TEAMS = 2
ROWS = 128
TURN = 10  # the barrier at which the first of the teams waits for its turn
PROGRAMS = 256  # fewer are hardly more than one for each team of a GPU
GROUP = 128  # threads
# Registers of a thread for sums, by the groups of a team. Beside more an assembler does not weave the instructions of
# functions, which are worth two groups; without functions one is enough, and the other's instructions go on meanwhile.
SUMS = {1: 128, 2: 64}
# Instructions for each element: of a function, of an op, of a store. A round of products takes as long as four.
FUNCTION, PLAIN, STORE, ROUND = 15, 1, 3, 4
SHARE = {1: 20, 2: 8}  # what follows the products must take such a part of their time, at least; by groups


def abreast(function: Function, grid: Sequence[int]) -> int:
    """The groups of either team where a function with a `product_loop` is one for teams of their own, else 0."""
    loops = [n for n in function.body.nodes if n.op is product_loop]
    if len(loops) != 1 or math.prod(grid) < PROGRAMS or any(n.op is tile.alloc for n in function.body.walk()):
        return 0
    (loop,) = loops
    rows, columns, _ = loop.attrs["block"]
    after, count = _after(function, loop), rounds(function, loop)
    groups = 2 if any(n.op.__name__ in _functions() for n in after) else 1
    fits = rows == ROWS and rows * columns // (GROUP * groups) <= SUMS[groups]
    if not fits or count is None or loop.args[1].type.dtype not in HALVES:  # type: ignore[union-attr]
        return 0
    if groups > 1 and any(n.op is tile.load for n in after):  # whole blocks, for which there are no registers
        return 0
    return groups if sum(map(_cost, after)) * SHARE[groups] >= count * ROUND else 0


def rounds(function: Function, loop: Node) -> int | None:
    """The rounds of a `product_loop`, if they are the same for every program."""
    known = {n.out: int(n.attrs["value"]) for n in function.body.nodes if n.op is basic.full and not n.out.type.rank}  # type: ignore[union-attr]
    lower, upper = (known.get(v) for v in loop.args[3:5])
    return None if lower is None or upper is None else max(-((lower - upper) // loop.attrs["step"]), 0)


def _after(function: Function, loop: Node) -> list[Node]:
    """What is done for each element of a product once it is summed."""
    nodes = function.body.nodes[function.body.nodes.index(loop) + 1 :]
    whole = math.prod(sizes(loop.out))
    made = [n for n in nodes if n.op is tile.store or (n.results and math.prod(sizes(n.out)) == whole)]
    return [n for n in made if n.op.pointwise or n.op in (tile.load, tile.store)]


def _functions() -> set[str]:
    return {name for name, _ in TABLE}


def _cost(node: Node) -> int:
    """About how many instructions a node takes for each element."""
    if node.op in (tile.load, tile.store):
        return STORE
    return FUNCTION if node.op.__name__ in _functions() else PLAIN


def begin_turns(team: Team) -> None:
    """The first team may begin."""
    second = team.once(("second",), "setp.ne.u32", "pred", team.index, 0)
    team.text.do("bar.arrive", TURN, team.working, guard=second)


def take_turn(team: Team) -> None:
    """Wait for the other team."""
    if team.teams > 1:
        own = team.once(("turn of team",), "add.u32", "b32", team.index, TURN)
        team.text.do("bar.sync", own, team.working)


def give_turn(team: Team) -> None:
    """Let the other team begin."""
    if team.teams > 1:
        other = team.once(("other turn",), "sub.u32", "b32", TURN + 1, team.index)
        team.text.do("bar.arrive", other, team.working)
