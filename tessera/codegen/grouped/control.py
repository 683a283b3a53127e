"""Loops and branches of a group: where tiles part ways, both ways are walked under a mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from tessera.codegen.blocks import block_type, sizes
from tessera.codegen.grouped.rewrite import Group, Part, Run, lift
from tessera.ir.core import Block, Node, Value
from tessera.ops import control, elementwise, reduce
from tessera.types import TensorType, int64, scalar


@contextmanager
def within(group: Group, mask: Value | None) -> Any:
    """Only the tiles of a mask are active inside."""
    before = group.active
    group.active = mask
    try:
        yield
    finally:
        group.active = before


def some(group: Group, mask: Value) -> Value:
    """Whether any tile is in a mask."""
    return group.add(reduce.max, mask, axis=(-1,), keepdims=False)


def live(group: Group, mask: Value) -> Value:
    """A mask, without tiles that are not active."""
    return mask if group.active is None else group.add(elementwise.bitwise_and, mask, group.active)


def region(group: Group, types: Sequence[Any], body: Callable[..., Sequence[Value]]) -> Block:
    """A region of the new function."""
    params = tuple(Value(t) for t in types)
    with group.b.region() as nodes:
        results = tuple(body(*params))
    return Block(params, tuple(nodes), results)


def lifted(group: Group, part: Part, varying: bool) -> Value:
    """A value with the tiles' axis if the place it goes to has one."""
    return group.whole(part) if varying else part.value


def choose(group: Group, mask: Value, new: Part, old: Part) -> Part:
    """Per tile: the new value where the mask holds."""
    if new.value is old.value:
        return old
    a, b = group.whole(new), group.whole(old)
    whole = sizes(a.type)
    cond = group.broadcast(group.ranked(Part(mask, True), len(whole) - 1), whole)
    return Part(group.add(elementwise.where, cond, a, b), True)


def _type(v: Value, varying: bool, size: int) -> TensorType:
    type = block_type(v)
    return type.with_shape((size, *type.shape)) if varying else type


@lift(control.if_)
def _(group, node, args, run):
    (condition,) = args
    if condition.varying:
        return _divergent(group, node, condition.value, run)
    found: list[list[Part]] = []
    for block in node.regions:  # once to learn which results vary; what it records is dropped
        with group.b.region():
            found.append(run(block))
    varying = [any(p.varying for p in pair) for pair in zip(*found, strict=True)]
    types = tuple(_type(v, w, group.size) for v, w in zip(node.results, varying, strict=True))
    blocks = tuple(
        region(group, (), lambda b=b: [lifted(group, p, w) for p, w in zip(run(b), varying, strict=True)])
        for b in node.regions
    )
    results = group.b.add(control.if_, [condition.value], types=types, regions=blocks).results
    return [Part(v, w) for v, w in zip(results, varying, strict=True)]


def _divergent(group: Group, node: Node, condition: Value, run: Run) -> list[Part]:
    """Each side for the tiles that take it, if there are such; in turn where they wait for each other."""
    from tessera.codegen.grouped.tasks import interleaved, pauses  # it needs what stands here

    if pauses(node):
        return interleaved(group, node, run)
    no = group.add(elementwise.bitwise_not, condition)
    sides = [_side(group, node, live(group, m), b, run) for m, b in zip((condition, no), node.regions, strict=True)]
    return [choose(group, condition, a, b) for a, b in zip(*sides, strict=True)]


def _side(group: Group, node: Node, mask: Value, block: Block, run: Run) -> list[Part]:
    types = tuple(_type(v, True, group.size) for v in node.results)

    def taken() -> list[Value]:
        with within(group, mask):
            return [group.whole(p) for p in run(block)]

    def left() -> list[Value]:
        return [group.full(0, t.dtype, *sizes(t)) for t in types]

    blocks = (region(group, (), taken), region(group, (), left))
    results = group.b.add(control.if_, [some(group, mask)], types=types, regions=blocks).results
    return [Part(v, True) for v in results]


def settle(varying: list[bool], step: Callable[[list[bool]], list[Part]]) -> list[bool]:
    """Which carried values vary: those that begin so, or become so by others that do."""
    while True:
        after = [v or p.varying for v, p in zip(varying, step(varying), strict=True)]
        if after == varying:
            return varying
        varying = after


@lift(control.for_)
def _(group, node, args, run):
    bounds, inits, body = args[:3], args[3:], node.regions[0]
    if any(p.varying for p in bounds):
        return _for_each(group, node, bounds, inits, run)

    def parts(values: Sequence[Value], varying: list[bool]) -> list[Part]:
        return [Part(values[0]), *(Part(v, w) for v, w in zip(values[1:], varying, strict=True))]

    def types(varying: list[bool]) -> list[Any]:
        return [scalar(int64), *(_type(v, w, group.size) for v, w in zip(node.results, varying, strict=True))]

    def trial(varying: list[bool]) -> list[Part]:
        with group.b.region():
            return run(body, *parts([Value(t) for t in types(varying)], varying))

    varying = settle([p.varying for p in inits], trial)

    def round_of(*values: Value) -> list[Value]:
        return [lifted(group, p, w) for p, w in zip(run(body, *parts(values, varying)), varying, strict=True)]

    block = region(group, types(varying), round_of)
    first = [lifted(group, p, w) for p, w in zip(inits, varying, strict=True)]
    values = [*(p.value for p in bounds), *first]
    results = group.b.add(control.for_, values, types=tuple(types(varying)[1:]), regions=(block,)).results
    return [Part(v, w) for v, w in zip(results, varying, strict=True)]


def _for_each(group: Group, node: Node, bounds: Sequence[Part], inits: Sequence[Part], run: Run) -> list[Part]:
    """Bounds that differ between tiles: rounds for as long as any tile has one left."""
    lower, upper, step = (group.whole(p) for p in bounds)
    zero = group.full(0, int64, group.size)
    up = group.add(elementwise.greater, step, zero)

    def holds(i: Part, *rest: Part) -> Value:
        below, above = (group.add(op, i.value, upper) for op in (elementwise.less, elementwise.greater))
        return group.add(elementwise.where, up, below, above)

    def body(i: Part, *rest: Part) -> list[Part]:
        after = run(node.regions[0], i, *rest)
        return [Part(group.add(elementwise.add, i.value, step), True), *after]

    return _masked_loop(group, node, [Part(lower, True), *inits], holds, body)[1:]


def _masked_loop(
    group: Group, node: Node, inits: Sequence[Part], holds: Callable[..., Value], body: Callable[..., Sequence[Part]]
) -> list[Part]:
    """A loop that goes on while any tile is in it; those that have left keep their values.

    The mask of the next round is carried, so that the condition is computed once for each round.
    """
    first = [group.whole(p) for p in inits]
    mask = live(group, holds(*(Part(v, True) for v in first)))
    types = [mask.type, *(v.type for v in first)]

    def going(m: Value, *values: Value) -> list[Value]:
        return [some(group, m)]

    def inside(m: Value, *values: Value) -> list[Value]:
        old = [Part(v, True) for v in values]
        with within(group, m):
            new = [choose(group, m, n, o) for n, o in zip(body(*old), old, strict=True)]
            left = group.add(elementwise.bitwise_and, m, holds(*new))
        return [left, *(p.value for p in new)]

    blocks = (region(group, types, going), region(group, types, inside))
    results = group.b.add(control.while_, [mask, *first], types=tuple(types), regions=blocks).results
    return [Part(v, True) for v in results[1:]]


@lift(control.while_)
def _(group, node, args, run):
    condition, body = node.regions

    def trial(varying: list[bool]) -> list[Part]:
        params = [Part(Value(_type(v, w, group.size)), w) for v, w in zip(node.results, varying, strict=True)]
        with group.b.region():
            (held,) = run(condition, *params)
            after = run(body, *params)
        return [Part(p.value, p.varying or held.varying) for p in after] + [held]

    varying = settle([p.varying for p in args] + [False], lambda w: trial(w[:-1]))
    if varying[-1]:

        def holds(*parts: Part) -> Value:
            return group.whole(run(condition, *parts)[0])

        return _masked_loop(group, node, args, holds, lambda *parts: run(body, *parts))
    return _uniform_while(group, node, args, varying[:-1], run)


def _uniform_while(group: Group, node: Node, args: Sequence[Part], varying: list[bool], run: Run) -> list[Part]:
    types = [_type(v, w, group.size) for v, w in zip(node.results, varying, strict=True)]

    def of(block: Block) -> Callable[..., list[Value]]:
        def emit(*values: Value) -> list[Value]:
            found = run(block, *(Part(v, w) for v, w in zip(values, varying, strict=True)))
            kinds = varying if block is node.regions[1] else [False]
            return [lifted(group, p, w) for p, w in zip(found, kinds, strict=True)]

        return emit

    blocks = tuple(region(group, types, of(b)) for b in node.regions)
    first = [lifted(group, p, w) for p, w in zip(args, varying, strict=True)]
    results = group.b.add(control.while_, first, types=tuple(types), regions=blocks).results
    return [Part(v, w) for v, w in zip(results, varying, strict=True)]
