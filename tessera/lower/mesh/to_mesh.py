"""Graph to a tile module for a mesh: how the inputs are cut is chosen by what the program then costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tessera.errors import ShapeError
from tessera.evaluate import evaluate
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.lower.mesh import contests, products, structure
from tessera.lower.mesh.loops import regions
from tessera.lower.mesh.lowering import ROOM, Lowering, NoMapping, count
from tessera.lower.mesh.memory import needed
from tessera.lower.mesh.pieces import CONSTANT, Held, Mesh, Split, tensor
from tessera.lower.mesh.rules import refuse, rules
from tessera.ops import host, mesh
from tessera.ops.mesh import WHOLE
from tessera.passes.dead_code import swept
from tessera.shapes import symbols
from tessera.types import RefType, TensorType

assert contests and products and structure  # fill the table

# How a tensor's last two axes may be cut, the most even first.
CHOICES: tuple[tuple[int, int], ...] = ((0, 1), (0, WHOLE), (1, WHOLE), (WHOLE, 1), (WHOLE, 0), (1, 0), (WHOLE, WHOLE))
# The share of its cycles that a copy by the host counts for.
COPYING = 1 / 4
# How often the choices for all inputs are gone through for something better.
ROUNDS = 3


def to_mesh(module: Module, shape: Mesh) -> Module:
    """The Tile module in which each element of a mesh computes its pieces of a graph of primitives.

    Raises:
        UnsupportedOpError: an op has no mapping onto the mesh, however the inputs are cut.
        ShapeError: a size is symbolic.
    """
    function = module.main
    _check(function)
    choices = [_choices(shape, tensor(p)) for p in function.params]
    chosen = [0] * len(choices)
    best = _cost(function, shape, choices, chosen)
    for _ in range(ROUNDS if math.prod(shape.grid) > 1 else 0):
        before = list(chosen)
        for place, number in _steps(choices):
            tried = [number if i == place else c for i, c in enumerate(chosen)]
            cost = _cost(function, shape, choices, tried)
            if cost < best:
                best, chosen = cost, tried
        if chosen == before:
            break
    return _module(function, shape, [c[i] for c, i in zip(choices, chosen, strict=True)])


def _check(function: Function) -> None:
    for value in function.params:
        if symbols(value.type.shape):
            raise ShapeError(
                "a program of symbolic sizes cannot be laid out", location=function.loc, received=str(value.type)
            )


def _steps(choices: Sequence[Sequence[Split]]) -> list[tuple[int, int]]:
    return list(itertools.chain.from_iterable([(i, n) for n in range(len(c))] for i, c in enumerate(choices)))


def _choices(shape: Mesh, type: TensorType) -> list[Split]:
    found = []
    for pair in CHOICES:
        tail = pair[-min(type.rank, 2) :] if type.rank else ()
        split = (*(WHOLE,) * (type.rank - len(tail)), *tail)
        cut = shape.plain(split)
        fixed = tuple(CONSTANT if int(n) == 1 else s for s, n in zip(cut, type.shape, strict=True))
        if fixed not in found:
            found.append(fixed)
    return found


def _cost(function: Function, shape: Mesh, choices: Sequence[Sequence[Split]], chosen: Sequence[int]) -> tuple:
    """What a choice costs: the nodes that cannot be mapped first, then the memory there is not, then the cycles."""
    lowering = Lowering(shape)
    splits = [c[i] for c, i in zip(choices, chosen, strict=True)]
    reached = [0]
    try:
        with lowering.builder.region() as nodes:
            _body(lowering, function, splits, reached)
    except NoMapping:
        return (-reached[0], math.inf, math.inf)
    return (-math.inf, max(0, needed(swept(Block((), tuple(nodes), ()))) - ROOM), lowering.cycles)


def _body(lowering: Lowering, function: Function, splits: Sequence[Split], reached: list[int]) -> Block:
    refs = [Value(_ref(tensor(p)), p.hint or f"x{i}") for i, p in enumerate(function.params)]
    held = [_read(lowering, ref, tensor(p), s) for ref, p, s in zip(refs, function.params, splits, strict=True)]

    def meaning(node: Node, args: list[Held], run: Any) -> list[Held]:
        reached[0] += 1
        with lowering.builder.at(node.loc):
            if node.op in regions:
                return regions.of(node.op)(lowering, node, run, args)
            row = rules.get(node.op)
            return [refuse(lowering, node) if row is None else row(lowering, node, *args)]

    results = evaluate(function.body, held, meaning)
    outs = [
        Value(_ref(tensor(v)), "out" if len(results) == 1 else f"out{i}") for i, v in enumerate(function.body.results)
    ]
    for result, out in zip(results, outs, strict=True):
        split = _spread(lowering, result.type, lowering.settle(result))
        value = result.at(split)
        _copied(lowering, value)
        lowering.builder.add(mesh.write, [out, value], {"split": _plain(split)})
    return Block((*refs, *outs), (), ())


def _spread(lowering: Lowering, type: TensorType, split: Split) -> Split:
    """A split with axes cut, the last first, that all elements along a mesh axis would hand over alike."""
    found, free = list(split), [a for a in (1, 0) if lowering.mesh.grid[a] > 1 and a not in split]
    for axis in reversed(range(type.rank)):
        if free and found[axis] == WHOLE and int(type.shape[axis]) >= lowering.mesh.grid[free[0]]:
            found[axis] = free.pop(0)
    return tuple(found)


def _read(lowering: Lowering, ref: Value, type: TensorType, split: Split) -> Held:
    attrs = {"split": _plain(split), "shape": tuple(lowering.mesh.local(type, split).shape)}
    value = lowering.builder.add(mesh.read, [ref], attrs).out
    _copied(lowering, value)
    return lowering.lying(type, split, value, clean=True)


def _copied(lowering: Lowering, value: Value) -> None:
    """What the host copies stays in memory; it comes and goes along all rows at once, a word for each cycle.

    A program may run often on what came once, so that copying counts for less than computing.
    """
    held = count(value) * value.type.dtype.numpy.itemsize
    lowering.kept += held
    lowering.cycles += held / 4 * lowering.mesh.columns * COPYING


def _plain(split: Split) -> Split:
    return tuple(max(s, WHOLE) for s in split)


def _ref(type: TensorType) -> RefType:
    return RefType(tuple(int(n) for n in type.shape), type.dtype, policy=type.policy)


def _module(function: Function, shape: Mesh, splits: Sequence[Split]) -> Module:
    lowering = Lowering(shape)
    with lowering.builder.at(function.loc), lowering.builder.region() as nodes:
        block = _body(lowering, function, splits, [0])
    name = f"{function.name}_on_mesh"
    body = swept(Block(block.params, tuple(nodes), ()))
    program = Function(name, body, Attrs({"group": 1, "mesh": shape.grid}), function.loc)
    builder = Builder()
    params = tuple(Value(v.type, v.hint) for v in block.params)
    with builder.at(function.loc):
        builder.add(host.launch, params, {"kernel": name, "grid": shape.grid}, types=())
    outputs = len(params) - len(function.params)
    main = Function(function.name, builder.block(params, ()), Attrs({"outputs": outputs}), function.loc)
    return Module("tile", (main, program))
