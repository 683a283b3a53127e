"""Adjoints of loops and branches in kernels: trips run backwards on values that the forward trips saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.symbolic_dim import Size
from tessera.core.types import TensorType, int64, scalar
from tessera.ir.core import Block, Node, Value
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor.basic import full, splat
from tessera.ops.tensor.elementwise import floor_divide, maximum
from tessera.ops.tensor.shape import reshape
from tessera.transforms.flow.launch_accesses import bound_trips
from tessera.transforms.flow.launch_derivatives import AdjointKernel, Step, reverse_rules

# Loops and branches.


@reverse_rules(control_flow.for_)
def _(adjoint: AdjointKernel, node: Node) -> Step | None:
    (body,) = node.regions
    carried = body.params[1:]
    _find_active_carry(adjoint, node)
    active = adjoint.is_active(body.results) or any(_touches_active(adjoint, n) for n in body.walk())
    bounds = [adjoint.get(v) for v in node.args[:3]]
    saves = adjoint.is_recording and active
    trips = _bound_trips(adjoint, node) if saves else 0
    scratch = [adjoint.allocate_scratch(c.type, trips) for c in carried] if saves else []  # type: ignore[arg-type]
    program = adjoint.program() if saves else None

    def forward(params: Sequence[Value]) -> Sequence[Value]:
        adjoint.values.update(zip(body.params, map(Tensor, params), strict=True))
        if saves:
            trip = floor_divide(Tensor(params[0]) - bounds[0], bounds[2])
            for ref, value in zip(scratch, params[1:], strict=True):
                _save(adjoint, ref, program, trip, Tensor(value))
        with adjoint.without_recording():
            adjoint.run(body)
        return [adjoint.get(v).data for v in body.results]

    starts = [adjoint.get(v).data for v in node.args[3:]]
    found = _add_loop(adjoint, [b.data for b in bounds], starts, forward)
    adjoint.values.update(zip(node.results, found, strict=True))
    if not saves:
        return None

    def pull() -> None:
        _reverse_loop(adjoint, node, bounds, program, scratch)

    return pull


def _touches_active(adjoint: AdjointKernel, node: Node) -> bool:
    return bool(node.args) and node.args[0] in adjoint.memory and bool(node.op.effects)


def _find_active_carry(adjoint: AdjointKernel, node: Node) -> None:
    """Mark the carried values that depend on operands that move, in any step."""
    (body,) = node.regions
    for init, param in zip(node.args[3:], body.params[1:], strict=True):
        if init in adjoint.active:
            adjoint.active.add(param)
    while True:
        mark_active(adjoint, body)
        grown = [
            p for p, r in zip(body.params[1:], body.results, strict=True)
            if r in adjoint.active and p not in adjoint.active
        ]  # fmt: skip
        if not grown:
            break
        adjoint.active.update(grown)
    adjoint.active.update(v for v, p in zip(node.results, body.params[1:], strict=True) if p in adjoint.active)


def mark_active(adjoint: AdjointKernel, block: Block) -> None:
    """Mark the values of a block that depend on operands that move."""
    for node in block.nodes:
        if node.op is control_flow.for_:
            _find_active_carry(adjoint, node)
            continue
        for region in node.regions:
            mark_active(adjoint, region)
        inner = [v for r in node.regions for v in r.results]
        if adjoint.is_active((*node.args, *inner)):
            adjoint.active.update(v for v in node.results if isinstance(v.type, TensorType) and v.type.dtype.is_float)
            if "write" in node.op.effects and node.args[0] not in adjoint.body.params:
                adjoint.active.add(node.args[0])


def _bound_trips(adjoint: AdjointKernel, node: Node) -> Size:
    """The most trips that a loop makes in any program, which may follow from symbolic sizes.

    Raises:
        UnsupportedOpError: nothing bounds them.
    """
    trips, _ = adjoint.accesses.measure_trips(node)
    if math.isfinite(trips):
        return int(trips)
    bound = bound_trips(adjoint.body, node, tuple(adjoint.node.attrs["grid"]) or (1,))
    if bound is None:
        raise adjoint.make_error(node, "a loop whose trips have no known bound")
    return bound


def _save(adjoint: AdjointKernel, ref: Value, program: Any, trip: Tensor, value: Tensor) -> None:
    block = reshape(value, shape=(1, 1, *value.shape))
    zero = full(shape=(), value=0, dtype=int64).data
    adjoint.builder.add(tile.store, [ref, block.data, program.data, trip.data, *[zero] * value.ndim], {})


def _restore(adjoint: AdjointKernel, ref: Value, program: Any, trip: Tensor, type: TensorType) -> Tensor:
    zero = full(shape=(), value=0, dtype=int64).data
    starts = [program.data, trip.data, *[zero] * type.rank]
    block = adjoint.builder.add(tile.load, [ref, *starts], {"shape": (1, 1, *type.shape)}).out
    return reshape(Tensor(block), shape=type.shape)


def _add_loop(
    adjoint: AdjointKernel, bounds: Sequence[Value], starts: Sequence[Value],
    body: Callable[[Sequence[Value]], Sequence[Value]],
) -> list[Tensor]:  # fmt: skip
    """A loop whose body is a function of the index and the carried values."""
    params = [Value(scalar(int64), "i"), *(Value(v.type, v.hint) for v in starts)]
    with adjoint.builder.region() as nodes:
        results = body(params)
    region = Block(tuple(params), tuple(nodes), tuple(results))
    types = tuple(v.type for v in starts)
    made = adjoint.builder.add(control_flow.for_, [*bounds, *starts], {}, types=types, regions=(region,))
    return [Tensor(v) for v in made.results]


def _reverse_loop(
    adjoint: AdjointKernel, node: Node, bounds: Sequence[Tensor], program: Any, scratch: Sequence[Value]
) -> None:
    """The loop from its last trip to its first: each computes its values again from what the way forward has saved."""
    (body,) = node.regions
    carried = [p for p in body.params[1:] if p in adjoint.active]
    outside = _find_captured(adjoint, [body])
    ends = [adjoint.take(v) for v, p in zip(node.results, body.params[1:], strict=True) if p in adjoint.active]
    starts = [splat(0, p.type) if g is None else g for p, g in zip(carried, ends, strict=True)]  # type: ignore[arg-type]
    starts += [adjoint.find_cotangent(v) for v in outside]
    trips = floor_divide(bounds[1] - bounds[0] + (bounds[2] - 1), bounds[2])
    count = maximum(trips, full(shape=(), value=0, dtype=int64))
    zero, one = (full(shape=(), value=n, dtype=int64).data for n in (0, 1))

    def back(params: Sequence[Value]) -> Sequence[Value]:
        trip = count - 1 - Tensor(params[0])
        adjoint.values[body.params[0]] = bounds[0] + trip * bounds[2]
        for ref, param in zip(scratch, body.params[1:], strict=True):
            adjoint.values[param] = _restore(adjoint, ref, program, trip, param.type)  # type: ignore[arg-type]
        steps = adjoint.run(body)
        given = [Tensor(v) for v in params[1:]]
        adjoint.cotangents = dict(zip(outside, given[len(carried) :], strict=True))
        results = [r for r, p in zip(body.results, body.params[1:], strict=True) if p in adjoint.active]
        for result, g in zip(results, given, strict=False):
            adjoint.accumulate(result, g)
        for step in reversed(steps):
            step()
        return [adjoint.find_cotangent(v).data for v in (*carried, *outside)]

    held = adjoint.cotangents
    found = _add_loop(adjoint, [zero, count.data, one], [t.data for t in starts], back)
    adjoint.cotangents = {**held, **dict(zip(outside, found[len(carried) :], strict=True))}
    inits = [v for v, p in zip(node.args[3:], body.params[1:], strict=True) if p in adjoint.active]
    for init, g in zip(inits, found, strict=False):
        adjoint.accumulate(init, g)


def _find_captured(adjoint: AdjointKernel, regions: Sequence[Block]) -> list[Value]:
    """The active blocks from outside that regions use, in the order of their use."""
    free = {v for r in regions for v in r.free}
    used = [v for r in regions for v in (*(a for n in r.walk() for a in n.args), *r.results)]
    listed = dict.fromkeys(v for v in used if v in free and isinstance(v.type, TensorType))
    return [v for v in listed if v in adjoint.active]


@reverse_rules(control_flow.if_)
def _(adjoint: AdjointKernel, node: Node) -> Step | None:
    mark_active(adjoint, Block((), (node,), ()))
    condition = adjoint.get(node.args[0])
    regions = []
    for region in node.regions:
        with adjoint.builder.region() as nodes, adjoint.without_recording():
            adjoint.run(region)
        regions.append(Block((), tuple(nodes), tuple(adjoint.get(v).data for v in region.results)))
    types = tuple(v.type for v in node.results)
    made = adjoint.builder.add(node.op, [condition.data], node.attrs, types=types, regions=tuple(regions))
    adjoint.values.update(zip(node.results, map(Tensor, made.results), strict=True))
    outside = _find_captured(adjoint, node.regions)

    def pull() -> None:
        given = [adjoint.take(v) for v in node.results]
        held, branches = adjoint.cotangents, []
        for region in node.regions:
            adjoint.cotangents = {v: held[v] for v in outside if v in held}
            with adjoint.builder.region() as nodes:
                steps = adjoint.run(region)
                for result, g in zip(region.results, given, strict=True):
                    if g is not None:
                        adjoint.accumulate(result, g)
                for step in reversed(steps):
                    step()
                results = [adjoint.find_cotangent(v).data for v in outside]
            branches.append(Block((), tuple(nodes), tuple(results)))
        types = tuple(v.type for v in outside)
        found = adjoint.builder.add(node.op, [condition.data], node.attrs, types=types, regions=tuple(branches))
        adjoint.cotangents = {**held, **dict(zip(outside, map(Tensor, found.results), strict=True))}

    return pull
