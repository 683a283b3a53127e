"""Divergent control flow: branches and loops on varying conditions, predicated by the active mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from tessera.codegen.contract import get_tensor_type, static_shape
from tessera.codegen.grouped.vectoriser import GroupValue, GroupVectoriser, RunBlock, vectorise
from tessera.core.types import TensorType, int64, scalar
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, elementwise, reduce


@contextmanager
def restrict_to_mask(group: GroupVectoriser, mask: Value | None) -> Any:
    """Make a mask the active mask inside the `with` block."""
    before = group.active
    group.active = mask
    try:
        yield
    finally:
        group.active = before


def any_active(group: GroupVectoriser, mask: Value) -> Value:
    """Whether a mask holds for any tile."""
    return group.add(reduce.max, mask, axis=(-1,), keepdims=False)


def intersect_active(group: GroupVectoriser, mask: Value) -> Value:
    """The conjunction of a mask and the active mask."""
    return mask if group.active is None else group.add(elementwise.bitwise_and, mask, group.active)


def build_region(group: GroupVectoriser, types: Sequence[Any], body: Callable[..., Sequence[Value]]) -> Block:
    """A region of the vectorised function."""
    params = tuple(Value(t) for t in types)
    with group.builder.region() as nodes:
        results = tuple(body(*params))
    return Block(params, tuple(nodes), results)


def match_varying(group: GroupVectoriser, part: GroupValue, varying: bool) -> Value:
    """A value with the tiles' axis if it must be varying."""
    return group.to_varying(part) if varying else part.value


def select_by_mask(group: GroupVectoriser, mask: Value, new: GroupValue, old: GroupValue) -> GroupValue:
    """Select for each tile: the new value where the mask holds, else the old one."""
    if new.value is old.value:
        return old
    a, b = group.to_varying(new), group.to_varying(old)
    whole = static_shape(a.type)
    cond = group.broadcast(group.align_rank(GroupValue(mask, True), len(whole) - 1), whole)
    return GroupValue(group.add(elementwise.where, cond, a, b), True)


def _make_group_type(v: Value, varying: bool, size: int) -> TensorType:
    type = get_tensor_type(v)
    return type.with_shape((size, *type.shape)) if varying else type


@vectorise(control_flow.if_)
def _(group, node, args, run):
    (condition,) = args
    if condition.varying:
        return _vectorise_divergent_if(group, node, condition.value, run)
    sides: list[list[GroupValue]] = []
    for block in node.regions:  # a trial run finds the varying results; its nodes are discarded
        with group.builder.region():
            sides.append(run(block))
    varying = [any(p.varying for p in pair) for pair in zip(*sides, strict=True)]
    types = tuple(_make_group_type(v, w, group.size) for v, w in zip(node.results, varying, strict=True))
    blocks = tuple(
        build_region(group, (), lambda b=b: [match_varying(group, p, w) for p, w in zip(run(b), varying, strict=True)])
        for b in node.regions
    )
    results = group.builder.add(control_flow.if_, [condition.value], types=types, regions=blocks).results
    return [GroupValue(v, w) for v, w in zip(results, varying, strict=True)]


def _vectorise_divergent_if(group: GroupVectoriser, node: Node, condition: Value, run: RunBlock) -> list[GroupValue]:
    """Both sides, each predicated by its mask and skipped if no tile takes it; as coroutines where they wait."""
    from tessera.codegen.grouped.coroutines import interleave_sides, may_suspend  # imports this module

    if may_suspend(node):
        return interleave_sides(group, node, run)
    no = group.add(elementwise.bitwise_not, condition)
    sides = [
        _vectorise_side(group, node, intersect_active(group, m), b, run)
        for m, b in zip((condition, no), node.regions, strict=True)
    ]
    return [select_by_mask(group, condition, a, b) for a, b in zip(*sides, strict=True)]


def _vectorise_side(group: GroupVectoriser, node: Node, mask: Value, block: Block, run: RunBlock) -> list[GroupValue]:
    """One side of a divergent branch, guarded by whether any tile takes it."""
    if group.counted and (found := _predicate_side(group, mask, block, run)) is not None:
        return found
    types = tuple(_make_group_type(v, True, group.size) for v in node.results)

    def taken() -> list[Value]:
        with restrict_to_mask(group, mask):
            return [group.to_varying(p) for p in run(block)]

    def left() -> list[Value]:
        return [group.full(0, t.dtype, *static_shape(t)) for t in types]

    blocks = (build_region(group, (), taken), build_region(group, (), left))
    results = group.builder.add(control_flow.if_, [any_active(group, mask)], types=types, regions=blocks).results
    return [GroupValue(v, True) for v in results]


def _predicate_side(group: GroupVectoriser, mask: Value, block: Block, run: RunBlock) -> list[GroupValue] | None:
    """A side under its mask alone, where all its accesses have it; None where one would be made for no tile."""
    with group.builder.region() as nodes, restrict_to_mask(group, mask):
        results = [GroupValue(group.to_varying(p), True) for p in run(block)]
    inner = [n for node in nodes for n in (node, *(m for r in node.regions for m in r.walk()))]
    if any(n.op in (tile.load, tile.store) for n in inner):
        return None
    for node in nodes:
        group.builder.append(node)
    return results


def solve_varying(varying: list[bool], step: Callable[[list[bool]], list[GroupValue]]) -> list[bool]:
    """Fixed point: which loop-carried values vary, starting with those whose initial values do."""
    while True:
        after = [v or p.varying for v, p in zip(varying, step(varying), strict=True)]
        if after == varying:
            return varying
        varying = after


@vectorise(control_flow.for_)
def _(group, node, args, run):
    bounds, inits, body = args[:3], args[3:], node.regions[0]
    if any(p.varying for p in bounds):
        return _vectorise_divergent_for(group, node, bounds, inits, run)

    def parts(values: Sequence[Value], varying: list[bool]) -> list[GroupValue]:
        return [GroupValue(values[0]), *(GroupValue(v, w) for v, w in zip(values[1:], varying, strict=True))]

    def types(varying: list[bool]) -> list[Any]:
        return [
            scalar(int64),
            *(_make_group_type(v, w, group.size) for v, w in zip(node.results, varying, strict=True)),
        ]

    def trial(varying: list[bool]) -> list[GroupValue]:
        with group.builder.region():
            return run(body, *parts([Value(t) for t in types(varying)], varying))

    varying = solve_varying([p.varying for p in inits], trial)

    def emit_iteration(*values: Value) -> list[Value]:
        return [match_varying(group, p, w) for p, w in zip(run(body, *parts(values, varying)), varying, strict=True)]

    block = build_region(group, types(varying), emit_iteration)
    first = [match_varying(group, p, w) for p, w in zip(inits, varying, strict=True)]
    values = [*(p.value for p in bounds), *first]
    results = group.builder.add(control_flow.for_, values, types=tuple(types(varying)[1:]), regions=(block,)).results
    return [GroupValue(v, w) for v, w in zip(results, varying, strict=True)]


def _vectorise_divergent_for(
    group: GroupVectoriser, node: Node, bounds: Sequence[GroupValue], inits: Sequence[GroupValue], run: RunBlock
) -> list[GroupValue]:
    """A loop whose bounds differ between tiles: iterates while any tile has an iteration left."""
    if group.counted and _is_positive(group, bounds[2]):
        return _emit_counted_loop(group, node, bounds, inits, run)
    lower, upper, step = (group.to_varying(p) for p in bounds)
    zero = group.full(0, int64, group.size)
    up = group.add(elementwise.greater, step, zero)

    def holds(i: GroupValue, *rest: GroupValue) -> Value:
        below, above = (group.add(op, i.value, upper) for op in (elementwise.less, elementwise.greater))
        return group.add(elementwise.where, up, below, above)

    def body(i: GroupValue, *rest: GroupValue) -> list[GroupValue]:
        after = run(node.regions[0], i, *rest)
        return [GroupValue(group.add(elementwise.add, i.value, step), True), *after]

    return _emit_masked_loop(group, node, [GroupValue(lower, True), *inits], holds, body)[1:]


def _is_positive(group: GroupVectoriser, step: GroupValue) -> bool:
    """Whether a step is a constant of at least 1."""
    node = group.builder.producers.get(step.value)
    return node is not None and node.op is basic.full and not step.varying and int(node.attrs["value"]) > 0


def _emit_counted_loop(
    group: GroupVectoriser, node: Node, bounds: Sequence[GroupValue], inits: Sequence[GroupValue], run: RunBlock
) -> list[GroupValue]:
    """A loop with a positive step whose bounds differ between tiles as one of a known number of trips."""
    lower, upper = (group.to_varying(p) for p in bounds[:2])
    step, one = bounds[2].value, group.full(1, int64)
    low = group.add(reduce.min, lower, axis=(-1,), keepdims=False)
    high = group.add(reduce.max, upper, axis=(-1,), keepdims=False) if bounds[1].varying else bounds[1].value
    span = group.add(elementwise.sub, high, low)
    rest = group.add(elementwise.sub, step, one)
    trips = group.add(elementwise.floor_divide, group.add(elementwise.add, span, rest), step)
    first = [group.to_varying(p) for p in inits]

    def emit_iteration(j: Value, *values: Value) -> list[Value]:
        offset = group.broadcast(group.add(elementwise.mul, j, step), (group.size,))
        index = group.add(elementwise.add, lower, offset)
        mask = intersect_active(group, group.add(elementwise.less, index, upper))
        old = [GroupValue(v, True) for v in values]
        with restrict_to_mask(group, mask):
            new = run(node.regions[0], GroupValue(index, True), *old)
            return [select_by_mask(group, mask, n, o).value for n, o in zip(new, old, strict=True)]

    types = [scalar(int64), *(v.type for v in first)]
    block = build_region(group, types, emit_iteration)
    values = [group.full(0, int64), trips, one, *first]
    results = group.builder.add(control_flow.for_, values, types=tuple(types[1:]), regions=(block,)).results
    return [GroupValue(v, True) for v in results]


def _emit_masked_loop(
    group: GroupVectoriser,
    node: Node,
    inits: Sequence[GroupValue],
    holds: Callable[..., Value],
    body: Callable[..., Sequence[GroupValue]],
) -> list[GroupValue]:
    """A loop that runs while any tile is active in it; tiles that have left keep their values.

    The mask of the next iteration is loop-carried, so that the condition is computed once for each iteration.
    """
    first = [group.to_varying(p) for p in inits]
    mask = intersect_active(group, holds(*(GroupValue(v, True) for v in first)))
    types = [mask.type, *(v.type for v in first)]

    def emit_test(m: Value, *values: Value) -> list[Value]:
        return [any_active(group, m)]

    def emit_body(m: Value, *values: Value) -> list[Value]:
        old = [GroupValue(v, True) for v in values]
        with restrict_to_mask(group, m):
            new = [select_by_mask(group, m, n, o) for n, o in zip(body(*old), old, strict=True)]
            left = group.add(elementwise.bitwise_and, m, holds(*new))
        return [left, *(p.value for p in new)]

    blocks = (build_region(group, types, emit_test), build_region(group, types, emit_body))
    results = group.builder.add(control_flow.while_, [mask, *first], types=tuple(types), regions=blocks).results
    return [GroupValue(v, True) for v in results[1:]]


@vectorise(control_flow.while_)
def _(group, node, args, run):
    condition, body = node.regions

    def trial(varying: list[bool]) -> list[GroupValue]:
        params = [
            GroupValue(Value(_make_group_type(v, w, group.size)), w) for v, w in zip(node.results, varying, strict=True)
        ]
        with group.builder.region():
            (condition_part,) = run(condition, *params)
            after = run(body, *params)
        return [GroupValue(p.value, p.varying or condition_part.varying) for p in after] + [condition_part]

    varying = solve_varying([p.varying for p in args] + [False], lambda w: trial(w[:-1]))
    if varying[-1]:

        def holds(*parts: GroupValue) -> Value:
            return group.to_varying(run(condition, *parts)[0])

        return _emit_masked_loop(group, node, args, holds, lambda *parts: run(body, *parts))
    return _emit_uniform_while(group, node, args, varying[:-1], run)


def _emit_uniform_while(
    group: GroupVectoriser, node: Node, args: Sequence[GroupValue], varying: list[bool], run: RunBlock
) -> list[GroupValue]:
    types = [_make_group_type(v, w, group.size) for v, w in zip(node.results, varying, strict=True)]

    def of(block: Block) -> Callable[..., list[Value]]:
        def emit(*values: Value) -> list[Value]:
            parts = run(block, *(GroupValue(v, w) for v, w in zip(values, varying, strict=True)))
            wanted = varying if block is node.regions[1] else [False]
            return [match_varying(group, p, w) for p, w in zip(parts, wanted, strict=True)]

        return emit

    blocks = tuple(build_region(group, types, of(b)) for b in node.regions)
    first = [match_varying(group, p, w) for p, w in zip(args, varying, strict=True)]
    results = group.builder.add(control_flow.while_, first, types=tuple(types), regions=blocks).results
    return [GroupValue(v, w) for v, w in zip(results, varying, strict=True)]
