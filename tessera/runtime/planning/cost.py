"""Schedule cost: the time of a Tile module by a roofline over what each program of its launches executes.

The launches of a module are dealt out to a device's processors in rounds. A program takes the longer of its arithmetic
and its loads and stores, plus a fixed price for each op; a launch takes at least what it costs to move each byte of its
arrays once (Williams et al. 2009).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tessera.core.symbolic_dim import estimate_size
from tessera.core.types import TensorType
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import basic, contractions

UNKNOWN_ROUNDS = 4  # of a loop whose bounds depend on the program
TRANSCENDENTAL_FLOPS = 12  # of an element of exp, tanh, …: a polynomial with its argument reduction
MATRIX_BITS = 16  # at most, of the elements that matrix units multiply


@dataclass(frozen=True)
class MachineModel:
    """The rates of a device, per second: of all its processors, but for `cache`, the bytes that one has from a cache.

    `op` and `launch` are the seconds that an op on a block and a launch cost beside their work.
    """

    name: str
    flops: float
    matrix: float
    bandwidth: float
    processors: int
    cache: float
    op: float
    launch: float


@dataclass(frozen=True)
class ProgramWork:
    """What one program executes: operations, those of matrix units among them, bytes loaded and stored, and ops."""

    flops: float = 0.0
    matrix_flops: float = 0.0
    bytes: float = 0.0
    ops: float = 0.0

    def __add__(self, other: ProgramWork) -> ProgramWork:
        return ProgramWork(
            self.flops + other.flops, self.matrix_flops + other.matrix_flops,
            self.bytes + other.bytes, self.ops + other.ops,
        )  # fmt: skip

    def repeated(self, rounds: float) -> ProgramWork:
        """The work of so many rounds."""
        return ProgramWork(*(n * rounds for n in (self.flops, self.matrix_flops, self.bytes, self.ops)))


def estimate_seconds(module: Module, machine: MachineModel) -> float:
    """The time of a Tile module's launches on a machine, one after the other; loops of the host count one round."""
    work = {f.name: count_work(f.body) for f in module.functions[1:]}
    return sum((_estimate_launch(n, work[n.attrs["kernel"]], machine) for n in _find_launches(module.main)), 0.0)


def _find_launches(function: Function) -> Iterator[Node]:
    return (n for n in function.body.walk() if n.op is host.launch)


def _estimate_launch(node: Node, work: ProgramWork, machine: MachineModel) -> float:
    programs = math.prod(int(estimate_size(n)) for n in node.attrs["grid"])
    rounds = -(-programs // machine.processors)
    ordinary, matrix = work.flops / machine.flops, work.matrix_flops / machine.matrix
    arithmetic = (ordinary + matrix) * machine.processors
    program = max(arithmetic, work.bytes / machine.cache) + work.ops * machine.op
    least = sum(_count_bytes(v) for v in {v: None for v in node.args}) / machine.bandwidth
    return machine.launch + max(least, rounds * program)


def count_work(block: Block, producers: Mapping[Value, Node] | None = None) -> ProgramWork:
    """The work of one execution of a block of a tile function, its loops unrolled by their bounds."""
    known = {**(producers or {}), **{v: n for n in block.nodes for v in n.results}}
    return sum((_count_node(n, known) for n in block.nodes), ProgramWork())


def _count_node(node: Node, producers: Mapping[Value, Node]) -> ProgramWork:
    if node.regions:
        inside = sum((count_work(r, producers) for r in node.regions), ProgramWork())
        return inside.repeated(_count_rounds(node, producers))
    elements = max((_count_elements(v) for v in (*node.args, *node.results)), default=0)
    if elements <= 1 or node.op is basic.full:  # index arithmetic
        return ProgramWork()
    if node.op in (tile.load, tile.store):
        block = node.results[0] if node.op is tile.load else node.args[1]
        return ProgramWork(bytes=_count_bytes(block), ops=1)
    if node.op is contractions.dot:
        return _count_product(node)
    return ProgramWork(elements * (TRANSCENDENTAL_FLOPS if node.op.is_transcendental else 1), ops=1)


def _count_product(node: Node) -> ProgramWork:
    left = node.args[0].type
    assert isinstance(left, TensorType)
    flops = 2.0 * _count_elements(node.out) * int(estimate_size(left.shape[-1]))
    narrow = left.dtype.bits <= MATRIX_BITS
    return ProgramWork(0.0 if narrow else flops, flops if narrow else 0.0, ops=1)


def _count_rounds(node: Node, producers: Mapping[Value, Node]) -> float:
    if node.op is control_flow.if_:
        return 0.5  # one of two regions
    if node.op is not control_flow.for_:
        return UNKNOWN_ROUNDS
    bounds = [producers.get(v) for v in node.args[:3]]
    if any(n is None or n.op is not basic.full for n in bounds):
        return UNKNOWN_ROUNDS
    lower, upper, step = (int(n.attrs["value"]) for n in bounds if n is not None)
    return len(range(lower, upper, step))


def _count_elements(value: Value) -> int:
    type: Any = value.type
    return math.prod(int(estimate_size(n)) for n in type.shape) if isinstance(type, TensorType) else 0


def _count_bytes(value: Value) -> float:
    type: Any = value.type
    return math.prod(int(estimate_size(n)) for n in type.shape) * type.dtype.bits / 8
