"""The pass that finds loops which multiply by blocks that a tensor-map copy can fetch: their products are `streamed`.

In such a loop, at the top of a function, the right side of each product is read from global memory at places known
ahead; the left side is whatever the loop computes, or a block that was read before it and stays (`resident`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.ops import multiply_add, pairs, released, resident, streamed
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.pipeline import HALVES, ROWS, Producers, Side, early, side_of
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import basic, control, linalg, shape, tile
from tessera.passes.dead_code import sweep
from tessera.types import TensorType, f32

COLUMNS = (64, 128, 256)
DEPTHS = (64, 128, 256)
REGISTERS = 200  # of a thread, for the sums and the left sides of all products
PRODUCTS = (linalg.dot, multiply_add)
VIEWS = (shape.permute, shape.reshape, basic.cast)


@dataclass(frozen=True)
class Found:
    """The products of a function with where their right sides lie, and the left sides that stay, in the same way."""

    right: dict[Node, Side]
    left: dict[Value, Side]
    last: dict[Value, Node]  # the last loop that reads a left side


def streaming(function: Function) -> Function:
    """The function with all its products `streamed`, if each of them can be."""
    found = _found(function)
    if found is None:
        return function

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            env = run.env
            if node in found.right:
                return [_streamed(builder, node, found.right[node], node.args[-2] in found.left, args, env)]
            if node.results and node.results[0] in found.left:
                side = found.left[node.out]
                operands = [env[side.ref], *(env[v] for v in side.starts)]
                return builder.add(resident, operands, {"shape": sizes(node.out)}, loc=node.loc).results
            results = copy(node, args, run)
            for v in (v for v, loop in found.last.items() if loop is node):
                builder.add(released, [env[v]], {}, loc=node.loc)
            return results

        return meaning

    return sweep(rebuild(function, meaning_of))


def _streamed(
    builder: Builder, node: Node, side: Side, kept: bool, args: Sequence[Value], env: dict[Value, Value]
) -> Value:
    """A product as one that reads its right side itself; its left side is `kept`, or goes to registers by twos."""
    summed = node.op is multiply_add
    depth, columns = sizes(node.args[-1])
    attrs = {"block": (depth, columns), "flipped": side.flipped, "summed": summed}
    left = args[-2] if kept else builder.add(pairs, [args[-2]], {}, loc=node.loc).out
    operands = [left, env[side.ref], *(args[:1] if summed else ()), *(env[v] for v in side.starts)]
    return builder.add(streamed, operands, attrs, loc=node.loc).out


def _found(function: Function) -> Found | None:
    """What there is to stream, or None if something does not fit."""
    producers = {v: node for node in function.body.walk() for v in node.results}
    loops = [n for n in function.body.nodes if n.op is control.for_]
    rights = {}
    for loop in loops:
        for node in loop.regions[0].nodes:
            if node.op in PRODUCTS and (side := _right(function, producers, loop, node)) is not None:
                rights[node] = side
    every = [n for n in function.body.walk() if n.op in PRODUCTS]
    rows = {sizes(n.out)[0] for n in rights}
    whole = bool(rights) and len(rights) == len(every) and len(rows) == 1 and rows <= set(ROWS)
    if not whole or int(function.attrs.get("group", 1)) != 1 or _registers(rights) > REGISTERS:
        return None
    if any(map(_brought, loops)) or _written(function) & {side.ref for side in rights.values()}:
        return None
    left = _left(function, producers, list(rights))
    reading = {v: [loop for loop in loops if any(v in n.args for n in loop.regions[0].nodes)][-1] for v in left}
    return Found(rights, left, reading)


def _brought(loop: Node) -> bool:
    """Whether a product's left side comes from memory in each round: other passes fetch that ahead as well."""
    inside = {v: n for n in loop.regions[0].nodes for v in n.results}
    for product in (n for n in loop.regions[0].nodes if n.op in PRODUCTS):
        made = inside.get(product.args[-2])
        while made is not None and made.op in VIEWS:
            made = inside.get(made.args[0])
        if made is not None and made.op is tile.load:
            return True
    return False


def _written(function: Function) -> set[Value]:
    return {n.args[0] for n in function.body.walk() if "write" in n.op.effects}


def _registers(rights: dict[Node, Side]) -> int:
    """About how many registers a thread needs: each product's sums, and its left side by twos."""
    groups = min(2, max(sizes(n.out)[0] for n in rights) // 64)
    elements = sum(sizes(n.out)[0] * (sizes(n.out)[1] + sizes(n.args[-2])[1] // 2) for n in rights)
    return elements // (128 * groups)


def _right(function: Function, producers: Producers, loop: Node, node: Node) -> Side | None:
    """Where the right side of a product lies, if it can be fetched and multiplied by."""
    left, right = node.args[-2:]
    dtype = right.type.dtype  # type: ignore[union-attr]
    inside = {v: n for n in loop.regions[0].nodes for v in n.results}
    side = side_of(inside, right)
    if side is None or dtype not in HALVES or left.type.dtype != dtype or node.out.type.dtype != f32:  # type: ignore[union-attr]
        return None
    depth, columns = sizes(right)
    step = producers.get(loop.args[2])
    counted = step is not None and step.op is basic.full and int(step.attrs["value"]) > 0
    known = {loop.regions[0].params[0], *function.params}
    ahead = all(_ahead(producers, known, v) for v in (*loop.args[:2], *side.starts))
    fits = depth in DEPTHS and columns in COLUMNS and side.ref in function.params
    return side if fits and counted and ahead and left.type.accumulate == f32 else None  # type: ignore[union-attr]


def _ahead(producers: Producers, known: set[Value], v: Value) -> bool:
    """Whether a scalar is computed from the program's place, parameters and the loop's index alone."""
    node = producers.get(v)
    if node is None:
        return v in known and isinstance(v.type, TensorType)
    return early(node) and all(_ahead(producers, known, x) for x in node.args)


def _left(function: Function, producers: Producers, products: Sequence[Node]) -> dict[Value, Side]:
    """The left sides that are read before the loops, and used for nothing else."""
    top = {v: n for n in function.body.nodes for v in n.results}
    uses: Counter[Value] = Counter(v for n in function.body.walk() for v in n.args)
    ours: Counter[Value] = Counter(n.args[-2] for n in products)
    written, found = _written(function), {}
    for v in ours:
        side = side_of(top, v) if uses[v] == ours[v] else None
        if side is None or side.flipped or side.ref in written or side.ref not in function.params:
            continue
        if all(_ahead(producers, set(function.params), s) for s in side.starts):
            found[v] = side
    return found
