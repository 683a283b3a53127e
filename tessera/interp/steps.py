"""Tile functions compiled for the interpreter: each node's dispatch decided once, constants computed once.

The meaning of ops is in the tables of `instances`; this only chooses their rows ahead, since looking them up
again for each node of each pass through a loop costs more than NumPy's work on a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from tessera.errors import TesseraError
from tessera.interp import instances, moves
from tessera.interp.affine import Affine, arithmetic
from tessera.interp.machine import Machine
from tessera.ir.core import Block, Node, Value
from tessera.numerics.convert import convert, store
from tessera.op import COMPUTE, STORAGE, Op
from tessera.ops import tile
from tessera.types import DType, TensorType, Type, tf32

# step(run, env) computes a node: it reads its operands from env and puts its results there.
Step = Callable[["Run", dict[Value, Any]], None]

# A constant of more bytes than this is computed where it is used.
LARGEST_CONSTANT = 1 << 20


@dataclass
class Program:
    """A compiled function body: the steps of each of its blocks, and the values known before it runs."""

    blocks: dict[Block, list[tuple[Node, Step]]] = field(default_factory=dict)
    constants: dict[Value, Any] = field(default_factory=dict)


class Run:
    """A program under way on a machine: the values so far, and `run(block, *inputs)` for an inner region."""

    __slots__ = ("env", "machine", "program")

    def __init__(self, program: Program, machine: Machine, env: dict[Value, Any]) -> None:
        self.program, self.machine = program, machine
        self.env = {**program.constants, **env}

    def __call__(self, block: Block, *inputs: Any) -> list[Any]:
        env, node = self.env, None
        env.update(zip(block.params, inputs, strict=True))
        try:
            for node, step in self.program.blocks[block]:
                step(self, env)
        except TesseraError as error:
            assert node is not None
            raise error.at(node.loc) from None
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
    steps = program.blocks[block] = []
    for node in block.nodes:
        step = _step(node)
        if not _fold(node, step, program, one):
            steps.append((node, step))
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
    if rule is not None:
        return _ruled(node, rule, indices)
    plain = _pure(node)
    return _indexed(node, plain) if indices else plain


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


def _indexed(node: Node, plain: Step) -> Step:
    """A node some of whose operands are index scalars: affine as long as it can be, else on arrays."""
    args, out, rule = node.args, node.out, arithmetic.get(node.op)

    def step(run: Run, env: dict[Value, Any]) -> None:
        values = [env[a] for a in args]
        if Affine in map(type, values):
            found = rule(*values) if rule and all(type(v) is Affine for v in values) else None
            if found is None:
                env = dict(zip(args, run.machine.arrays(values), strict=True))
                plain(run, env)
                found = env[out]
            run.env[out] = found
        else:
            plain(run, env)

    return step


def _pure(node: Node) -> Step:
    """An op that only computes: operands widened, computed, the result rounded (as `Op.compute`)."""
    if len(node.results) != 1:
        return _several(node)
    op, out, type = node.op, node.out, node.out.type
    compute: Callable[..., Any] = partial(op.ref, **node.keywords) if node.attrs else op.ref
    operands = [(a, _wider(op, a.type)) for a in node.args]
    dtype, policy, always = type.dtype, type.policy, type.policy is not None or type.dtype is tf32

    def finish(env: dict[Value, Any], found: Any) -> None:
        env[out] = store(found, dtype, policy) if always or found.dtype != dtype.numpy else found

    def mixed(run: Run, env: dict[Value, Any]) -> None:
        finish(env, compute(*(env[a] if wide is None else convert(env[a], wide) for a, wide in operands)))

    def direct(run: Run, env: dict[Value, Any]) -> None:
        finish(env, compute(*[env[a] for a, _ in operands]))

    return mixed if any(wide for _, wide in operands) else direct


def _several(node: Node) -> Step:
    def step(run: Run, env: dict[Value, Any]) -> None:
        found = node.op.compute(node.types, node.result_types, node.keywords, [env[a] for a in node.args])
        env.update(zip(node.results, found, strict=True))

    return step


def _wider(op: Op, type: Type) -> DType | None:
    """The type an operand is widened to, if it is not of it already."""
    if op.numerics == STORAGE:
        return None
    assert isinstance(type, TensorType)
    wide = type.compute if op.numerics == COMPUTE else type.accumulate
    return None if wide.numpy == type.dtype.numpy else wide
