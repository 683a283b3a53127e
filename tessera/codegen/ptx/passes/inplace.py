"""The pass that leaves blocks where copies put them: products whose sides lie in slots read them there, by ldmatrix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.ops import lying, slots
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.products import HELD, tensor_cores
from tessera.codegen.ptx.types import size
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import shape, tile
from tessera.passes.dead_code import sweep

PART = 16  # rows and columns that ldmatrix reads at once
Producers = Mapping[Value, Node]


@dataclass(frozen=True)
class Side:
    """A side of a product that lies in a slot."""

    ref: Value
    slot: Value
    flipped: bool


def in_place(function: Function) -> Function:
    """The function with each block of slots that only tensor cores read left where it lies."""
    producers = {v: node for node in function.body.walk() for v in node.results}
    found = _sides(function, producers)
    swizzled = {side.ref for side in found.values()}
    if not found:
        return function

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node.op is slots and node.out in swizzled:
                return builder.add(slots, [], {**node.attrs, "swizzled": True}, loc=node.loc).results
            sides = [(i, found[node, i]) for i in range(len(args)) if (node, i) in found]
            for i, side in sides:
                operands = [run.env[side.ref], run.env[side.slot]]
                args[i] = builder.add(lying, operands, {"flipped": side.flipped}, loc=node.loc).out
            return copy(node, args, run)

        return meaning

    return sweep(rebuild(function, meaning_of))


def _sides(function: Function, producers: Producers) -> dict[tuple[Node, int], Side]:
    """The operands of products that lie in slots which nothing else reads, by node and place."""
    used = Counter(v for n in function.body.walk() for v in (*n.args, *(r for b in n.regions for r in b.results)))
    products = [n for n in function.body.walk() if tensor_cores(n)]
    places = {(n, len(n.args) - 2 + right): bool(right) for n in products for right in (0, 1)}
    found = {at: side for at, right in places.items() if (side := _side(producers, used, *at, right)) is not None}
    readers = Counter(n.args[0] for n in function.body.walk() if n.op is tile.load)
    ours = Counter(side.ref for side in found.values())
    return {at: side for at, side in found.items() if ours[side.ref] == readers[side.ref]}


def _side(producers: Producers, used: Mapping[Value, int], node: Node, place: int, right: bool) -> Side | None:
    """An operand as what lies in a slot, if the instructions can read it there."""
    v, flipped = node.args[place], False
    made = producers.get(v)
    while made is not None and made.op in (shape.permute, shape.reshape) and used[v] == 1:
        (x,) = made.args
        turned = made.op is shape.permute
        if turned and tuple(made.attrs["axes"]) != (1, 0):
            return None
        if not turned and [n for n in sizes(x) if n != 1] != [n for n in sizes(v) if n != 1]:
            return None
        flipped, v = flipped != turned, x
        made = producers.get(v)
    if made is None or made.op is not tile.load or used[v] != 1:
        return None
    ref = made.args[0]
    origin = producers.get(ref)
    fits = origin is not None and origin.op is slots and _readable(ref, right, flipped)
    return Side(ref, made.args[1], flipped) if fits else None


def _readable(ref: Value, right: bool, flipped: bool) -> bool:
    """Whether ldmatrix reads such blocks as the instructions want them: pairs of bytes can be turned, bytes cannot."""
    dtype = ref.type.dtype  # type: ignore[union-attr]
    rows, columns = math.prod(sizes(ref)[1:-1]), sizes(ref)[-1]
    whole = rows % PART == 0 and columns * size(dtype) % (2 * PART) == 0
    return whole and HELD.get(dtype) == dtype and (size(dtype) == 2 or right == flipped)
