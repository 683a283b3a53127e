"""In which order a loop over programs takes them: those that read the same one after the other, long ones first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.entries.feed import starts
from tessera.codegen.ptx.ops import streamed
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.types import size
from tessera.ir.core import Function, Node, Value
from tessera.op import Rules
from tessera.ops import basic, control, elementwise, tile

Producers = Mapping[Value, Node]
CACHE = 1 << 25  # bytes that stay in the L2 cache of such a GPU while others pass through
AT_ONCE = 128  # programs that such a GPU runs at one time, or nearly
trend = Rules("trend along the grid")  # rule(producers, node, axis): 1 rises, 0 stays, -1 falls, None unknown


@dataclass(frozen=True)
class Order:
    """The grid's axes, the one whose programs follow each other first; whether the last is walked from its end; and of
    the others together so many programs for which all of the last are done before the next ones (0: all)."""

    axes: tuple[int, ...]
    falling: bool = False
    section: int = 0


def order_of(function: Function, grid: Sequence[int]) -> Order | None:
    """The order for a function with `streamed` products, or None where nothing asks for one.

    What they read is shared by programs along axes that its place does not depend on. Where there is one such axis, it
    is walked last, in sections of programs whose blocks a cache holds. Where a loop has more rounds the further along
    an axis its program is, that axis is walked last and from its end, in such sections.
    """
    reading = [n for n in function.body.walk() if n.op is streamed]
    if not reading:
        return None
    producers = {v: n for n in function.body.walk() for v in n.results}
    bounds = [n.args[1] for n in function.body.nodes if n.op is control.for_]
    known = axes_of(producers, (v for n in reading for v in starts(n)))
    long = [a for a in range(len(grid)) if bounds and all(trend_of(producers, v, a) == 1 for v in bounds)]
    shared = [a for a in range(len(grid)) if a not in known and a not in long]
    rest = [a for a in range(len(grid)) if a in known and a not in long]
    if not long and len(shared) == 1:
        # Measured: programs that all read the same rows at one time are slower than those that read a few stretches.
        return Order((*rest, *shared), False, _section(producers, reading, grid, rest, CACHE // 2))
    if len(long) != 1:
        return Order((*shared, *rest, *long))
    if math.prod(grid[a] for a in (*shared, *rest)) < AT_ONCE:  # programs under way share what they read as it is
        return Order((*shared, *rest, *long), True)
    return Order((*shared, *rest, *long), True, _section(producers, reading, grid, (*shared, *rest), CACHE))


def _section(
    producers: Producers, reading: Sequence[Node], grid: Sequence[int], axes: Sequence[int], cache: int
) -> int:
    """How many programs along some axes there are at a time, whose blocks a cache holds: an even share of all."""
    total, each = math.prod(grid[a] for a in axes), _read(producers, reading, grid)
    return max((n for n in range(1, total + 1) if total % n == 0 and n * each <= cache), default=1)


def _read(producers: Producers, reading: Sequence[Node], grid: Sequence[int]) -> int:
    """The bytes of memory that one program can read, at most: an equal share of each array."""
    refs = {n.args[1]: n for n in reading}
    shares = (
        math.prod(sizes(v)) * size(v.type.dtype) // math.prod(grid[a] for a in axes_of(producers, starts(n)))  # type: ignore[union-attr]
        for v, n in refs.items()
    )
    return sum(shares)


def axes_of(producers: Producers, values: Iterable[Value]) -> set[int]:
    """The axes of the grid that scalars depend on."""
    found, seen, left = set(), set(), list(values)
    while left:
        node = producers.get(left.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        left += node.args
        if node.op is tile.program_id:
            found.add(node.attrs["axis"])
    return found


def trend_of(producers: Producers, v: Value, axis: int) -> int | None:
    """Whether a scalar rises (1), stays (0) or falls (-1) along an axis of the grid; None where that is not known."""
    node = producers.get(v)
    rule = trend.get(node.op) if node is not None else None
    return rule(producers, node, axis) if rule is not None else None


@trend(tile.program_id)
def _(producers: Producers, node: Node, axis: int) -> int | None:
    return 1 if node.attrs["axis"] == axis else 0


@trend(basic.full)
def _(producers, node, axis):
    return 0


@trend(elementwise.add, elementwise.minimum, elementwise.maximum)
def _(producers, node, axis):
    x, y = (trend_of(producers, v, axis) for v in node.args)
    return None if x is None or y is None or x * y < 0 else x or y


@trend(elementwise.sub)
def _(producers, node, axis):
    x, y = (trend_of(producers, v, axis) for v in node.args)
    return None if x is None or y is None or x * y > 0 else x or -y


@trend(elementwise.mul)
def _(producers, node, axis):
    for v, other in (node.args, node.args[::-1]):
        factor = producers.get(other)
        if factor is not None and factor.op is basic.full:
            found, number = trend_of(producers, v, axis), factor.attrs["value"]
            return found and found * ((number > 0) - (number < 0))
    return None
