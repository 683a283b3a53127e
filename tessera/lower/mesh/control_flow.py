"""Control flow on a mesh: each loop-carried value keeps one sharding, and every element takes the same branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.types import TensorType
from tessera.ir.core import Block, Value
from tessera.ir.rules import Rules
from tessera.lower.mesh.mesh_lowering import MeshLowering, ShardedTensor, Sharding, tensor_type_of
from tessera.ops.dialects import control_flow, mesh
from tessera.ops.dialects.mesh import UNSPLIT
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import shape

# rule(lowering, node, run, held) gives a sharded value for each result; run(region, *held) lowers a region.
region_rules = Rules("mesh regions")
RegionWalk = Callable[..., list[ShardedTensor]]


def emit_counted_loop(
    lowering: MeshLowering, passes: int, carried: Sequence[Value], step: Callable[..., list[Value]]
) -> tuple[Value, ...]:
    """Emit a loop: `step(number, *carried)` in each iteration."""
    params = tuple(Value(v.type) for v in (lowering.index(0), *carried))
    before = lowering.cycles
    with lowering.builder.region() as nodes:
        after = step(*params)
    lowering.cycles += (passes - 1) * (lowering.cycles - before)
    bounds = [lowering.index(n) for n in (0, passes, 1)]
    region = Block(params, tuple(nodes), tuple(after))
    types = tuple(v.type for v in carried)
    return lowering.builder.add(control_flow.for_, [*bounds, *carried], types=types, regions=(region,)).results


def _get_type(value: Any) -> TensorType:
    return value.type


def _resolve_shardings(lowering: MeshLowering, held: Sequence[ShardedTensor]) -> list[Sharding]:
    return [lowering.settle(x) for x in held]


def _infer_result_shardings(
    lowering: MeshLowering, run: RegionWalk, region: Block, given: Sequence[ShardedTensor]
) -> list[Sharding]:
    """The shardings of a region's results for given shardings of its parameters; the emitted nodes are dropped."""
    before = lowering.cycles
    with lowering.builder.region():
        found = _resolve_shardings(lowering, run(region, *given))
    lowering.cycles = before
    return found


def _emit_region(
    lowering: MeshLowering, run: RegionWalk, region: Block, given: Sequence[ShardedTensor], wanted: Sequence[Sharding]
) -> list[Value]:
    """Emit a region and reshard its results."""
    return [x.at(s) for x, s in zip(run(region, *given), wanted, strict=True)]


@dataclass
class _ScanLowering:
    """A scan being lowered: carried values, sliced stacks and constants, each with its sharding and its piece."""

    lowering: MeshLowering
    run: RegionWalk
    region: Block
    length: int
    carried: list[TensorType]
    stacks: list[tuple[ShardedTensor, Sharding, Value]]
    fixed: list[tuple[ShardedTensor, Sharding, Value]]

    def make_arguments(self, number: Value, values: Sequence[Value], splits: Sequence[Sharding]) -> list[ShardedTensor]:
        """The arguments of the region in one step."""
        held = [self.lowering.lying(t, s, v) for t, s, v in zip(self.carried, splits, values, strict=True)]
        held += [_emit_slice(self.lowering, x, s, v, number, self.length) for x, s, v in self.stacks]
        return held + [self.lowering.lying(x.type, s, v) for x, s, v in self.fixed]

    def natural(self, operands: Sequence[ShardedTensor]) -> list[Sharding]:
        """The shardings of the region's results."""
        splits = _resolve_shardings(self.lowering, operands)
        values = [x.at(s) for x, s in zip(operands, splits, strict=True)]
        with self.lowering.builder.region():
            given = self.make_arguments(self.lowering.index(0), values, splits)
            return _infer_result_shardings(self.lowering, self.run, self.region, given)


@region_rules(control_flow.scan)
def _(lowering, node, run, operands):
    known, region, length = node.attrs, node.regions[0], int(node.attrs["length"])
    count, end = known["carry"], known["carry"] + known["xs"]
    stacks = [(x, s, x.at(s)) for x in operands[count:end] for s in (_unshard_first_axis(lowering, x),)]
    fixed = [(x, s, x.at(s)) for x in operands[end:] for s in (lowering.settle(x),)]
    scan = _ScanLowering(lowering, run, region, length, [_get_type(x) for x in operands[:count]], stacks, fixed)
    natural = scan.natural(operands[:count])
    splits, out = natural[:count], natural[count:]
    values = [x.at(s) for x, s in zip(operands[:count], splits, strict=True)]
    types = [v.type for v in region.results[count:]]
    values += [lowering.full(_make_stack_type(lowering, t, s, length), 0) for t, s in zip(types, out, strict=True)]

    def step(number: Value, *held: Value) -> list[Value]:
        place = lowering.add(e.sub, lowering.index(length - 1), number) if known["reverse"] else number
        found = _emit_region(lowering, run, region, scan.make_arguments(place, held[:count], splits), natural)
        pairs = zip(held[count:], found[count:], strict=True)
        return found[:count] + [_emit_put(lowering, stack, value, place) for stack, value in pairs]

    ends = [*splits, *((UNSPLIT, *s) for s in out)]
    results = emit_counted_loop(lowering, length, values, step)
    return [lowering.lying(tensor_type_of(v), s, r) for v, s, r in zip(node.results, ends, results, strict=True)]


def _unshard_first_axis(lowering: MeshLowering, x: ShardedTensor) -> Sharding:
    return (UNSPLIT, *lowering.unshard_axes(x, [0])[1:])


def _emit_slice(
    lowering: MeshLowering, x: ShardedTensor, split: Sharding, value: Value, number: Value, length: int
) -> ShardedTensor:
    """One slice of a stack."""
    slab = lowering.add(mesh.panel, value, number, axis=-x.type.rank, count=length)
    slab = lowering.add(shape.reshape, slab, shape=tuple(slab.type.shape)[1:])
    return lowering.lying(x.type.with_shape(tuple(x.type.shape)[1:]), split[1:], slab)


def _make_stack_type(lowering: MeshLowering, type: TensorType, split: Sharding, length: int) -> TensorType:
    local = lowering.mesh.local(type, split)
    return local.with_shape((length, *local.shape))


def _emit_put(lowering: MeshLowering, stack: Value, value: Value, number: Value) -> Value:
    slab = lowering.add(shape.reshape, value, shape=(1, *value.type.shape))
    return lowering.add(mesh.put, stack, slab, number, axis=-tensor_type_of(stack).rank)


@region_rules(control_flow.cond)
def _(lowering, node, run, operands):
    condition, given = operands[0].at(()), operands[1:]
    held = [(x, s, x.at(s)) for x, s in zip(given, _resolve_shardings(lowering, given), strict=True)]

    def fresh() -> list[ShardedTensor]:
        return [lowering.lying(x.type, s, v) for x, s, v in held]

    splits = _infer_result_shardings(lowering, run, node.regions[0], fresh())
    branches = []
    for region in node.regions:
        with lowering.builder.region() as nodes:
            results = _emit_region(lowering, run, region, fresh(), splits)
        branches.append(Block((), tuple(nodes), tuple(results)))
    types = tuple(v.type for v in branches[0].results)
    made = lowering.builder.add(control_flow.if_, [condition], types=types, regions=tuple(branches)).results
    return [lowering.lying(tensor_type_of(v), s, r) for v, s, r in zip(node.results, splits, made, strict=True)]


@region_rules(control_flow.while_loop)
def _(lowering, node, run, operands):
    first, test = node.attrs["carry"], node.attrs["test"]
    fixed = [
        (x, s, x.at(s)) for x, s in zip(operands[first:], _resolve_shardings(lowering, operands[first:]), strict=True)
    ]
    splits = _resolve_shardings(lowering, operands[:first])
    carried = [_get_type(x) for x in operands[:first]]

    def make_arguments(
        values: Sequence[Value], constants: Sequence[tuple[ShardedTensor, Sharding, Value]]
    ) -> list[ShardedTensor]:
        held = [lowering.lying(t, s, v) for t, s, v in zip(carried, splits, values, strict=True)]
        return held + [lowering.lying(x.type, s, v) for x, s, v in constants]

    values = [x.at(s) for x, s in zip(operands[:first], splits, strict=True)]
    blocks = []
    for region, constants, ends in (
        (node.regions[0], fixed[:test], [()]),
        (node.regions[1], fixed[test:], splits),
    ):
        params = tuple(Value(v.type) for v in values)
        with lowering.builder.region() as nodes:
            results = _emit_region(lowering, run, region, make_arguments(params, constants), ends)
        blocks.append(Block(params, tuple(nodes), tuple(results)))
    types = tuple(v.type for v in values)
    made = lowering.builder.add(control_flow.while_, values, types=types, regions=tuple(blocks)).results
    return [lowering.lying(tensor_type_of(v), s, r) for v, s, r in zip(node.results, splits, made, strict=True)]
