"""Tile functions compiled for the interpreter: each node's dispatch decided once, constants computed once.

The meaning of ops is in the tables of `instances`; this only chooses their rows ahead, since looking them up
again for each node of each pass through a loop costs more than NumPy's work on a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from tessera.errors import Location, TesseraError
from tessera.interp import instances, moves
from tessera.interp.affine import Affine, combined
from tessera.interp.lifetimes import dropping, last_uses
from tessera.interp.machine import Machine
from tessera.ir.core import Block, Node, Value
from tessera.numerics.convert import convert, store
from tessera.op import COMPUTE, STORAGE, Op
from tessera.ops import tile
from tessera.types import DType, TensorType, Type, tf32

# step(run, env) computes a node: it reads its operands from env and puts its results there.
Step = Callable[["Run", dict[Value, Any]], None]

# calculate(env, operands) puts a node's results into env.
Calculate = Callable[[dict[Value, Any], list[Any]], None]

# A constant of more bytes than this is computed where it is used.
LARGEST_CONSTANT = 1 << 20


@dataclass
class Program:
    """A compiled function body: the steps of each of its blocks, and the values known before it runs."""

    blocks: dict[Block, list[Step]] = field(default_factory=dict)
    locations: dict[Block, list[Location]] = field(default_factory=dict)
    constants: dict[Value, Any] = field(default_factory=dict)


class Run:
    """A program under way on a machine: the values so far, and `run(block, *inputs)` for an inner region."""

    __slots__ = ("env", "machine", "program")

    def __init__(self, program: Program, machine: Machine, env: dict[Value, Any]) -> None:
        self.program, self.machine = program, machine
        self.env = {**program.constants, **env}

    def __call__(self, block: Block, *inputs: Any) -> list[Any]:
        env, steps = self.env, self.program.blocks[block]
        env.update(zip(block.params, inputs, strict=True))
        done = 0
        try:
            for step in steps:
                step(self, env)
                done += 1
        except TesseraError as error:
            raise error.at(self.program.locations[block][done]) from None
        return [env[v] for v in block.results]

    def beside(self, env: dict[Value, Any]) -> Run:
        """The same program on other values."""
        return Run(self.program, self.machine, env)


def run(body: Block, inputs: Sequence[Any], machine: Machine) -> None:
    """Run a tile function's body on a machine."""
    Run(_program(body, machine.rank), machine, {})(body, *inputs)


@lru_cache(maxsize=1024)
def _program(body: Block, rank: int) -> Program:
    program = Program()
    one = Machine.of((1,) * rank, (0,) * rank, (1,) * rank, 1, False)
    _compile(body, program, one)
    return program


def _compile(block: Block, program: Program, one: Machine) -> None:
    steps, locations = program.blocks.setdefault(block, []), program.locations.setdefault(block, [])
    last = last_uses(block)
    for node in block.nodes:
        step = _step(node)
        if not _fold(node, step, program, one):
            steps.append(dropping(step, tuple(v for v in last[node] if v not in program.constants)))
            locations.append(node.loc)
            for region in node.regions:
                _compile(region, program, one)


def _fold(node: Node, step: Step, program: Program, one: Machine) -> bool:
    """Compute a node now if its operands are known and it depends on nothing else."""
    known = program.constants
    if node.regions or node.op.effects or not node.op.name.startswith("ts.") or not all(a in known for a in node.args):
        return False
    env = {a: known[a] for a in node.args}
    try:
        step(Run(Program(), one, {}), env)
    except TesseraError:  # let it be raised where it is reached
        return False
    results = {v: env[v] for v in node.results}
    if sum(getattr(a, "nbytes", 0) for a in results.values()) > LARGEST_CONSTANT:
        return False
    known.update(results)
    return True


def _step(node: Node) -> Step:
    row = moves.rows.get(node.op)
    if row is not None:
        return _moved(node, row(node))
    place = instances.places.get(node.op)
    if place is not None:
        return _ruled(node, place, False)
    indices = any(v.type == tile.INDEX for v in node.args)
    rule = instances.rules.get(node.op)
    if rule is not None and node.op not in instances.prepared:
        return _ruled(node, rule, indices)
    return _pure(node, indices)


def _moved(node: Node, move: Callable[[Any, int], Any]) -> Step:
    """A node that only gives its operand's elements another shape."""
    source, out = node.args[0], node.out

    def step(run: Run, env: dict[Value, Any]) -> None:
        value = env[source]
        env[out] = move(value.array(run.machine.count) if type(value) is Affine else value, len(run.machine.count))

    return step


def _ruled(node: Node, rule: Callable[..., Any], indices: bool) -> Step:
    """A node of the rule tables; `indices` says that it takes arrays where operands may be affine."""
    args, results, single = node.args, node.results, len(node.results) == 1

    def step(run: Run, env: dict[Value, Any]) -> None:
        values = [env[a] for a in args]
        if indices:
            values = run.machine.arrays(values)
        found = rule(run.machine, node, values, run)
        if single:
            env[results[0]] = found[0]
        else:
            env.update(zip(results, found, strict=True))

    return step


def _pure(node: Node, indices: bool) -> Step:
    """An op that only computes; index scalars stay affine as long as they can, else they are arrays."""
    args, results = node.args, node.results
    calculate = _single(node) if len(results) == 1 else _several(node)
    prepare = instances.prepared.get(node.op)

    def step(run: Run, env: dict[Value, Any]) -> None:
        values = [env[a] for a in args]
        if indices and Affine in map(type, values):
            found = combined(node.op, values)
            if found is not None:
                env[results[0]] = found
                return
            values = run.machine.arrays(values)
        calculate(env, values if prepare is None else prepare(node, values))

    return step


def _single(node: Node) -> Calculate:
    """One result: operands widened, computed, rounded (as `Op.compute` does, its choices made ahead)."""
    op, out, type = node.op, node.out, node.out.type
    compute: Callable[..., Any] = partial(op.ref, **node.keywords) if node.attrs else op.ref
    wider = [_wider(op, t) for t in node.types]
    dtype, policy, always = type.dtype, type.policy, type.policy is not None or type.dtype is tf32

    def mixed(env: dict[Value, Any], values: list[Any]) -> None:
        direct(env, [v if w is None else convert(v, w) for v, w in zip(values, wider, strict=True)])

    def direct(env: dict[Value, Any], values: list[Any]) -> None:
        found = compute(*values)
        env[out] = store(found, dtype, policy) if always or found.dtype != dtype.numpy else found

    return mixed if any(wider) else direct


def _several(node: Node) -> Calculate:
    def calculate(env: dict[Value, Any], values: list[Any]) -> None:
        env.update(
            zip(node.results, node.op.compute(node.types, node.result_types, node.keywords, values), strict=True)
        )

    return calculate


def _wider(op: Op, type: Type) -> DType | None:
    """The type an operand is widened to, if it is not of it already."""
    if op.numerics == STORAGE:
        return None
    assert isinstance(type, TensorType)
    wide = type.compute if op.numerics == COMPUTE else type.accumulate
    return None if wide.numpy == type.dtype.numpy else wide
