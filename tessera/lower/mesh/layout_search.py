"""Layout search: chooses the sharding of the inputs by the estimated cost of the mesh program, then builds it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tessera.core.errors import UnsupportedOpError
from tessera.core.symbolic_dim import symbol_names
from tessera.core.types import RefType, TensorType
from tessera.ir.builder import Builder, evaluate_block
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.rewrite import eliminate_dead_nodes
from tessera.lower.mesh import launch_lowering, matmul, op_rules
from tessera.lower.mesh.control_flow import region_rules
from tessera.lower.mesh.cost_model import bound_peak_memory, estimate_peak_memory
from tessera.lower.mesh.launch_programs import partition_launch
from tessera.lower.mesh.mesh_lowering import (
    CONSTANT,
    LAUNCH_SHARE,
    PIECE_MEMORY_BYTES,
    MeshLowering,
    MeshShape,
    NoMapping,
    ShardedTensor,
    Sharding,
    count_piece_elements,
    tensor_type_of,
)
from tessera.lower.mesh.op_rules import mesh_op_rules, raise_unmapped
from tessera.ops.dialects import host, mesh
from tessera.ops.dialects.mesh import UNSPLIT

assert launch_lowering and matmul and op_rules  # fill the tables

# Candidate shardings of a tensor's last two axes, the most even first.
CHOICES: tuple[tuple[int, int], ...] = (
    (0, 1),
    (0, UNSPLIT),
    (1, UNSPLIT),
    (UNSPLIT, 1),
    (UNSPLIT, 0),
    (1, 0),
    (UNSPLIT, UNSPLIT),
)
# The weight of the cycles of a host copy in the cost.
HOST_COPY_WEIGHT = 1 / 4
# The number of passes of coordinate descent over the shardings of all inputs.
SEARCH_ROUNDS = 3


def to_mesh(module: Module, shape: MeshShape, pinned: Sequence[Sharding | None] = ()) -> Module:
    """Lower a Graph module of primitives to a Tile module: one program, which each element runs on its pieces.

    `pinned` fixes the sharding of parameters; None, and parameters after its end, are left to the search.

    Raises:
        UnsupportedOpError: an op has no mapping onto the mesh, however the inputs are cut.
        UnsupportedOpError: a size is symbolic, or a tensor has no elements.
    """
    function = module.main
    _check_concrete(function)
    _check_elements(function)
    if (launched := partition_launch(function, shape.grid, int(PIECE_MEMORY_BYTES * LAUNCH_SHARE))) is not None:
        return launched
    wishes = (*pinned, *(None,) * (len(function.params) - len(pinned)))
    choices = [_list_shardings(shape, tensor_type_of(p), wish) for p, wish in zip(function.params, wishes, strict=True)]
    chosen = [0] * len(choices)
    best = _estimate_cost(function, shape, choices, chosen)
    costs = {tuple(chosen): best}
    for _ in range(SEARCH_ROUNDS if math.prod(shape.grid) > 1 else 0):
        before = list(chosen)
        for place, number in _list_moves(choices):
            tried = [number if i == place else c for i, c in enumerate(chosen)]
            cost = costs.get(tuple(tried))
            if cost is None:
                cost = costs[tuple(tried)] = _estimate_cost(function, shape, choices, tried, best)
            if cost < best:
                best, chosen = cost, tried
        if chosen == before:
            break
    return _make_module(function, shape, [c[i] for c, i in zip(choices, chosen, strict=True)])


def _check_elements(function: Function) -> None:
    """Check that the mesh has something to hold: an axis of no elements cannot be cut."""
    pairs = [(p, function.loc) for p in function.params]
    pairs += [(v, n.loc) for n in function.body.walk() for v in n.results]
    for value, location in pairs:
        if isinstance(value.type, TensorType) and 0 in value.type.shape:
            raise UnsupportedOpError(
                "the target csl has no tensors without elements", location=location, received=str(value.type),
                suggestion="compute this part on the host, or with another target",
            )  # fmt: skip


def _check_concrete(function: Function) -> None:
    for value in function.params:
        if symbol_names(value.type.shape):
            raise UnsupportedOpError(
                "the target csl needs the value of each size", location=function.loc, received=str(value.type),
                suggestion="build without dynamic=: the elements' memory is planned for one size",
            )  # fmt: skip


def _list_moves(choices: Sequence[Sequence[Sharding]]) -> list[tuple[int, int]]:
    return list(itertools.chain.from_iterable([(i, n) for n in range(len(c))] for i, c in enumerate(choices)))


def _list_shardings(shape: MeshShape, type: TensorType, pinned: Sharding | None = None) -> list[Sharding]:
    """The shardings that the search may choose for a parameter: one where it is pinned."""
    found: list[Sharding] = []
    tails = [pair[-min(type.rank, 2) :] if type.rank else () for pair in CHOICES]
    for split in [(*(UNSPLIT,) * (type.rank - len(tail)), *tail) for tail in tails] if pinned is None else [pinned]:
        cut = shape.plain(split)
        fixed = tuple(CONSTANT if int(n) == 1 else s for s, n in zip(cut, type.shape, strict=True))
        if fixed not in found:
            found.append(fixed)
    return found


class _TooManyCycles(Exception):
    """A choice takes as many cycles as the best one before its lowering is complete."""


def _estimate_cost(
    function: Function,
    shape: MeshShape,
    choices: Sequence[Sequence[Sharding]],
    chosen: Sequence[int],
    best: tuple = (0, math.inf, math.inf),
) -> tuple:
    """The cost of a choice, in order: nodes that cannot be mapped, bytes beyond memory, cycles.

    Of a choice that takes no fewer cycles than the `best` one, which fits into memory, only a part is computed.
    """
    lowering = MeshLowering(shape)
    splits = [c[i] for c, i in zip(choices, chosen, strict=True)]
    reached = [0]
    most = best[2] if best[:2] == (-math.inf, 0) else math.inf
    try:
        with lowering.builder.at(function.loc), lowering.builder.region() as nodes:
            _lower_body(lowering, function, splits, reached, most)
    except NoMapping:
        return (-reached[0], math.inf, math.inf)
    except _TooManyCycles:
        return (-math.inf, 0, lowering.cycles)
    block = Block((), tuple(nodes), ())
    fits = bound_peak_memory(block) <= PIECE_MEMORY_BYTES
    memory = 0 if fits else estimate_peak_memory(eliminate_dead_nodes(block))
    return (-math.inf, max(0, memory - PIECE_MEMORY_BYTES), lowering.cycles)


def _lower_body(
    lowering: MeshLowering,
    function: Function,
    splits: Sequence[Sharding],
    reached: list[int],
    most_cycles: float = math.inf,
) -> Block:
    refs = [Value(_make_ref(tensor_type_of(p)), p.hint or f"x{i}") for i, p in enumerate(function.params)]
    held = [
        _emit_read(lowering, ref, tensor_type_of(p), s) for ref, p, s in zip(refs, function.params, splits, strict=True)
    ]
    for param, ref, x in zip(function.params, refs, held, strict=True):
        x.source = ref if _count_uses(function, param) == 1 else None

    outermost = set(function.body.nodes)

    def meaning(node: Node, args: list[ShardedTensor], run: Any) -> list[ShardedTensor]:
        # Between two of the outermost nodes the cycles only grow; within a region they are those of one branch.
        if lowering.cycles >= most_cycles and node in outermost:
            raise _TooManyCycles
        reached[0] += 1
        with lowering.builder.at(node.loc):
            if node.op in region_rules:
                return region_rules.of(node.op)(lowering, node, run, args)
            row = mesh_op_rules.get(node.op)
            return [raise_unmapped(lowering, node) if row is None else row(lowering, node, *args)]

    results = evaluate_block(function.body, held, meaning)
    if lowering.cycles >= most_cycles:
        raise _TooManyCycles
    outs = [
        Value(_make_ref(tensor_type_of(v)), "out" if len(results) == 1 else f"out{i}")
        for i, v in enumerate(function.body.results)
    ]
    for result, out in zip(results, outs, strict=True):
        if result.copy_back is not None and not result.made and sum(r is result for r in results) == 1:
            result.copy_back(out)
            continue
        split = _shard_output(lowering, result.type, lowering.settle(result))
        value = result.at(split)
        _count_host_copy(lowering, value)
        lowering.builder.add(mesh.write, [out, value], {"split": _drop_markers(split)})
    return Block((*refs, *outs), (), ())


def _count_uses(function: Function, param: Value) -> int:
    return sum(node.args.count(param) for node in function.body.nodes) + function.body.results.count(param)


def _shard_output(lowering: MeshLowering, type: TensorType, split: Sharding) -> Sharding:
    """Shard axes, the last first, whose pieces would be replicated along a mesh axis."""
    found, free = list(split), [a for a in (1, 0) if lowering.mesh.grid[a] > 1 and a not in split]
    for axis in reversed(range(type.rank)):
        if free and found[axis] == UNSPLIT and int(type.shape[axis]) >= lowering.mesh.grid[free[0]]:
            found[axis] = free.pop(0)
    return tuple(found)


def _emit_read(lowering: MeshLowering, ref: Value, type: TensorType, split: Sharding) -> ShardedTensor:
    attrs = {"split": _drop_markers(split), "shape": tuple(lowering.mesh.local(type, split).shape)}
    value = lowering.builder.add(mesh.read, [ref], attrs).out
    _count_host_copy(lowering, value)
    return lowering.lying(type, split, value, clean=True)


def _count_host_copy(lowering: MeshLowering, value: Value) -> None:
    """The cycles of host copies: all rows at once, a word in each cycle. The buffers stay allocated.

    A program may run often on inputs that are copied once, so copying counts for less than computing.
    """
    held = count_piece_elements(value) * value.type.dtype.numpy.itemsize
    lowering.kept += held
    lowering.cycles += held / 4 * lowering.mesh.columns * HOST_COPY_WEIGHT


def _drop_markers(split: Sharding) -> Sharding:
    return tuple(max(s, UNSPLIT) for s in split)


def _make_ref(type: TensorType) -> RefType:
    return RefType(tuple(int(n) for n in type.shape), type.dtype, policy=type.policy)


def _make_module(function: Function, shape: MeshShape, splits: Sequence[Sharding]) -> Module:
    lowering = MeshLowering(shape)
    with lowering.builder.at(function.loc), lowering.builder.region() as nodes:
        block = _lower_body(lowering, function, splits, [0])
    name = f"{function.name}_on_mesh"
    body = eliminate_dead_nodes(Block(block.params, tuple(nodes), ()))
    program = Function(name, body, Attrs({"group": 1, "mesh": shape.grid}), function.loc)
    builder = Builder()
    params = tuple(Value(v.type, v.hint) for v in block.params)
    with builder.at(function.loc):
        builder.add(host.launch, params, {"kernel": name, "grid": shape.grid}, types=())
    outputs = len(params) - len(function.params)
    main = Function(function.name, builder.block(params, ()), Attrs({"outputs": outputs}), function.loc)
    return Module("tile", (main, program))
