"""Tile functions compiled for the interpreter to Python functions, one for each block; constants computed once.

The meaning of ops is in the tables of `instances`; this only chooses their rows ahead, since looking them up
again for each node of each pass through a loop costs more than NumPy's work on a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tessera.errors import Location, TesseraError
from tessera.evaluate import Walk
from tessera.interp import instances
from tessera.interp.machine import Machine
from tessera.interp.steps_text import Text
from tessera.ir.core import Block, Node, Value

# A constant of more bytes than this is computed where it is used.
LARGEST_CONSTANT = 1 << 20

# function(run, env, *inputs) runs a block: outer values come from env, its results are handed back.
Compiled = Callable[..., list[Any]]


@dataclass
class Program:
    """A compiled function body: a function for each of its blocks, and the node's location of each of their lines."""

    blocks: dict[Block, Compiled]
    locations: list[Location | None]

    def place(self, error: TesseraError) -> Location:
        """Where an error came from that has just left a compiled block."""
        trace = error.__traceback__
        assert trace is not None and trace.tb_next is not None
        location = self.locations[trace.tb_next.tb_lineno - 1]
        assert location is not None
        return location


class Run:
    """A program under way on a machine: what inner regions use, and `run(block, *inputs)` for one of them."""

    __slots__ = ("env", "machine", "program")

    def __init__(self, program: Program, machine: Machine, env: dict[Value, Any]) -> None:
        self.program, self.machine, self.env = program, machine, env

    def __call__(self, block: Block, *inputs: Any) -> list[Any]:
        try:
            return self.program.blocks[block](self, self.env, *inputs)
        except TesseraError as error:
            raise error.at(self.program.place(error)) from None

    def beside(self, env: dict[Value, Any]) -> Run:
        """The same program on other values."""
        return Run(self.program, self.machine, env)


def run(body: Block, inputs: Sequence[Any], machine: Machine) -> None:
    """Run a tile function's body on a machine."""
    Run(_program(body, machine.rank), machine, {})(body, *inputs)


@lru_cache(maxsize=1024)
def _program(body: Block, rank: int) -> Program:
    constants: dict[Value, Any] = {}
    text = Text(constants, rank)
    one = Machine.of((1,) * rank, (0,) * rank, (1,) * rank, 1, False)
    defined = Counter(v for n in body.walk() for v in n.results)
    again = {v for v, count in defined.items() if count > 1}  # in sides that end alike: no constants of the program
    names = {
        block: text.block(
            block, [n for n in block.nodes if not again.isdisjoint(n.results) or not _fold(n, constants, one)]
        )
        for block in _all(body)
    }
    found = text.functions()
    return Program({block: found[name] for block, name in names.items()}, text.locations)


def _all(body: Block) -> Sequence[Block]:
    """A block and those within, outer ones first."""
    return [body, *(inner for node in body.nodes for region in node.regions for inner in _all(region))]


def _fold(node: Node, known: dict[Value, Any], one: Machine) -> bool:
    """Compute a node now if its operands are known and it depends on nothing else."""
    if node.regions or node.op.effects or not node.op.name.startswith("ts.") or not all(a in known for a in node.args):
        return False
    mean = instances.meaning(one)
    try:
        results = mean(node, [known[a] for a in node.args], Walk(mean, {}))
    except TesseraError:  # let it be raised where it is reached
        return False
    if sum(getattr(a, "nbytes", 0) for a in results) > LARGEST_CONSTANT:
        return False
    known.update(zip(node.results, results, strict=True))
    return True
