"""Loops and branches on a mesh: what is carried keeps one split, and every element goes the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.ir.core import Block, Value
from tessera.lower.mesh.lowering import Lowering
from tessera.lower.mesh.pieces import Held, Split, tensor
from tessera.op import Rules
from tessera.ops import control, flow, mesh, shape
from tessera.ops import elementwise as e
from tessera.ops.mesh import WHOLE
from tessera.types import TensorType

# rule(lowering, node, run, held) gives a Held for each result; run(region, *held) walks a region.
regions = Rules("mesh regions")
Run = Callable[..., list[Held]]


def loop(
    lowering: Lowering, passes: int, carried: Sequence[Value], step: Callable[..., list[Value]]
) -> tuple[Value, ...]:
    """`step(number, *carried)` again and again."""
    params = tuple(Value(v.type) for v in (lowering.index(0), *carried))
    before = lowering.cycles
    with lowering.builder.region() as nodes:
        after = step(*params)
    lowering.cycles += (passes - 1) * (lowering.cycles - before)
    bounds = [lowering.index(n) for n in (0, passes, 1)]
    region = Block(params, tuple(nodes), tuple(after))
    types = tuple(v.type for v in carried)
    return lowering.builder.add(control.for_, [*bounds, *carried], types=types, regions=(region,)).results


def _type(value: Any) -> TensorType:
    return value.type


def _settled(lowering: Lowering, held: Sequence[Held]) -> list[Split]:
    return [lowering.settle(x) for x in held]


def _natural(lowering: Lowering, run: Run, region: Block, given: Sequence[Held]) -> list[Split]:
    """How the results of a region come to lie where its parameters lie as given; nothing is kept of the walk."""
    before = lowering.cycles
    with lowering.builder.region():
        found = _settled(lowering, run(region, *given))
    lowering.cycles = before
    return found


def _within(lowering: Lowering, run: Run, region: Block, given: Sequence[Held], wanted: Sequence[Split]) -> list[Value]:
    """The results of a region at splits."""
    return [x.at(s) for x, s in zip(run(region, *given), wanted, strict=True)]


@dataclass
class _Scan:
    """A scan being laid out: what is carried, what is sliced and what stays, each with its split and its piece."""

    lowering: Lowering
    run: Run
    region: Block
    length: int
    carried: list[TensorType]
    stacks: list[tuple[Held, Split, Value]]
    fixed: list[tuple[Held, Split, Value]]

    def given(self, number: Value, values: Sequence[Value], splits: Sequence[Split]) -> list[Held]:
        """What the region takes at one step."""
        held = [self.lowering.lying(t, s, v) for t, s, v in zip(self.carried, splits, values, strict=True)]
        held += [_slice(self.lowering, x, s, v, number, self.length) for x, s, v in self.stacks]
        return held + [self.lowering.lying(x.type, s, v) for x, s, v in self.fixed]

    def natural(self, operands: Sequence[Held]) -> list[Split]:
        """How what the region gives comes to lie."""
        splits = _settled(self.lowering, operands)
        values = [x.at(s) for x, s in zip(operands, splits, strict=True)]
        with self.lowering.builder.region():
            given = self.given(self.lowering.index(0), values, splits)
            return _natural(self.lowering, self.run, self.region, given)


@regions(flow.scan)
def _(lowering, node, run, operands):
    known, region, length = node.attrs, node.regions[0], int(node.attrs["length"])
    count, end = known["carry"], known["carry"] + known["xs"]
    stacks = [(x, s, x.at(s)) for x in operands[count:end] for s in (_first_whole(lowering, x),)]
    fixed = [(x, s, x.at(s)) for x in operands[end:] for s in (lowering.settle(x),)]
    scan = _Scan(lowering, run, region, length, [_type(x) for x in operands[:count]], stacks, fixed)
    natural = scan.natural(operands[:count])
    splits, out = natural[:count], natural[count:]
    values = [x.at(s) for x, s in zip(operands[:count], splits, strict=True)]
    types = [v.type for v in region.results[count:]]
    values += [lowering.full(_stacked(lowering, t, s, length), 0) for t, s in zip(types, out, strict=True)]

    def step(number: Value, *held: Value) -> list[Value]:
        place = lowering.add(e.sub, lowering.index(length - 1), number) if known["reverse"] else number
        found = _within(lowering, run, region, scan.given(place, held[:count], splits), natural)
        pairs = zip(held[count:], found[count:], strict=True)
        return found[:count] + [_put(lowering, stack, value, place) for stack, value in pairs]

    ends = [*splits, *((WHOLE, *s) for s in out)]
    results = loop(lowering, length, values, step)
    return [lowering.lying(tensor(v), s, r) for v, s, r in zip(node.results, ends, results, strict=True)]


def _first_whole(lowering: Lowering, x: Held) -> Split:
    return (WHOLE, *lowering.whole(x, [0])[1:])


def _slice(lowering: Lowering, x: Held, split: Split, value: Value, number: Value, length: int) -> Held:
    """One slice of a stack."""
    slab = lowering.add(mesh.panel, value, number, axis=-x.type.rank, count=length)
    slab = lowering.add(shape.reshape, slab, shape=tuple(slab.type.shape)[1:])
    return lowering.lying(x.type.with_shape(tuple(x.type.shape)[1:]), split[1:], slab)


def _stacked(lowering: Lowering, type: TensorType, split: Split, length: int) -> TensorType:
    local = lowering.mesh.local(type, split)
    return local.with_shape((length, *local.shape))


def _put(lowering: Lowering, stack: Value, value: Value, number: Value) -> Value:
    slab = lowering.add(shape.reshape, value, shape=(1, *value.type.shape))
    return lowering.add(mesh.put, stack, slab, number, axis=-tensor(stack).rank)


@regions(flow.cond)
def _(lowering, node, run, operands):
    condition, given = operands[0].at(()), operands[1:]
    held = [(x, s, x.at(s)) for x, s in zip(given, _settled(lowering, given), strict=True)]

    def fresh() -> list[Held]:
        return [lowering.lying(x.type, s, v) for x, s, v in held]

    splits = _natural(lowering, run, node.regions[0], fresh())
    branches = []
    for region in node.regions:
        with lowering.builder.region() as nodes:
            results = _within(lowering, run, region, fresh(), splits)
        branches.append(Block((), tuple(nodes), tuple(results)))
    types = tuple(v.type for v in branches[0].results)
    made = lowering.builder.add(control.if_, [condition], types=types, regions=tuple(branches)).results
    return [lowering.lying(tensor(v), s, r) for v, s, r in zip(node.results, splits, made, strict=True)]


@regions(flow.while_loop)
def _(lowering, node, run, operands):
    first, test = node.attrs["carry"], node.attrs["test"]
    fixed = [(x, s, x.at(s)) for x, s in zip(operands[first:], _settled(lowering, operands[first:]), strict=True)]
    splits = _settled(lowering, operands[:first])
    carried = [_type(x) for x in operands[:first]]

    def given(values: Sequence[Value], constants: Sequence[tuple[Held, Split, Value]]) -> list[Held]:
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
            results = _within(lowering, run, region, given(params, constants), ends)
        blocks.append(Block(params, tuple(nodes), tuple(results)))
    types = tuple(v.type for v in values)
    made = lowering.builder.add(control.while_, values, types=types, regions=tuple(blocks)).results
    return [lowering.lying(tensor(v), s, r) for v, s, r in zip(node.results, splits, made, strict=True)]
