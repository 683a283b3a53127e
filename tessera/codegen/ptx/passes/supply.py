"""The pass that has blocks brought ahead: a copy fetches what the next program loads while one is worked on.

Programs whose blocks fill a multiprocessor leave its memory idle while they compute. So those of a grid become a loop,
and what each loads whole, at places known ahead, is `supplied` in shared memory, a few programs early; blocks that are
the same for all programs come once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.ops import supplied
from tessera.codegen.ptx.passes.divisors import divisor
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.pipeline import known_ahead
from tessera.codegen.ptx.types import size
from tessera.codegen.ranges import Ranges
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import linalg, tile
from tessera.types import GLOBAL, RefType, int64

Producers = Mapping[Value, Node]
TEAM = 1024  # threads from which on a program has a multiprocessor for itself
PROGRAMS = 256  # fewer are hardly more than a GPU runs at once
ROOM = 228_352  # bytes of shared memory, less some for barriers and reductions
STAGES = 2  # programs that blocks are brought ahead for, at most
FIT = 2  # programs whose blocks must fit beside each other: larger ones gain nothing, their copies come too late
ALIGN = 16  # bytes that places and sizes of copies are multiples of
SMALL = 4096  # bytes of a block that is not worth a copy


@dataclass(frozen=True)
class Supply:
    """A function whose loads are `supplied`, for so many programs ahead."""

    function: Function
    stages: int


def supplying(function: Function, grid: Sequence[int], threads: int) -> Supply | None:
    """The function with its loads supplied, or None where that does not fit, or does not pay."""
    if math.prod(grid) < PROGRAMS or threads < TEAM or int(function.attrs.get("group", 1)) != 1:
        return None
    if any(n.op is linalg.dot for n in function.body.walk()):
        return None
    loads = _loads(function, grid)
    moving = sum(bytes_of(n) for n, same in loads.items() if not same)
    if not 0 < moving <= ROOM // FIT:
        return None
    still = sum(bytes_of(n) for n, same in loads.items() if same)
    if moving + still > ROOM:  # they stay in the L2 cache at any rate
        loads, still = {n: same for n, same in loads.items() if not same}, 0
    return Supply(_supplied(function, loads), min((ROOM - still) // moving, STAGES))


def bytes_of(node: Node) -> int:
    """The bytes of a load's block."""
    return math.prod(sizes(node.out)) * size(node.args[0].type.dtype)  # type: ignore[union-attr]


def _loads(function: Function, grid: Sequence[int]) -> dict[Node, bool]:
    """The loads that copies can make, and whether each is the same for all programs."""
    producers = {v: node for node in function.body.walk() for v in node.results}
    ranges = Ranges(producers, grid)
    written = {n.args[0] for n in function.body.walk() if "write" in n.op.effects}
    free = [n for n in function.body.nodes if n.op is tile.load and n.args[0] not in written]
    return {n: _same(producers, n) for n in free if _fits(function, producers, ranges, n)}


def _fits(function: Function, producers: Producers, ranges: Ranges, node: Node) -> bool:
    """Whether a load is of a stretch of a parameter's memory that lies wholly inside it, at a place known ahead."""
    ref, *starts = node.args
    type, block = ref.type, sizes(node.out)
    if not isinstance(type, RefType) or type.space != GLOBAL or ref not in function.params or len(starts) != type.rank:
        return False
    if ranges.loose(starts, node.attrs["shape"], sizes(ref)) or not _stretch(node.attrs["shape"], sizes(ref)):
        return False
    steps = [math.prod(sizes(ref)[a + 1 :]) * size(type.dtype) for a in range(type.rank)]
    even = all(divisor(producers, v) * step % ALIGN == 0 for v, step in zip(starts, steps, strict=True))
    whole = math.prod(block) * size(type.dtype) % ALIGN == 0 and bytes_of(node) >= SMALL
    return even and whole and all(v.type.dtype == int64 and known_ahead(producers, v) for v in starts)  # type: ignore[union-attr]


def _stretch(block: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a block is one stretch of memory: behind its first axis of more than one place all are whole."""
    first = next((a for a, n in enumerate(block) if n > 1), len(block))
    return list(block[first + 1 :]) == list(shape[first + 1 :])


def _same(producers: Producers, node: Node) -> bool:
    """Whether a load's place does not depend on the program's."""
    left, seen = list(node.args[1:]), set[Node]()
    while left:
        made = producers.get(left.pop())
        if made is not None and made not in seen:
            seen.add(made)
            left += made.args
    return not any(n.op is tile.program_id for n in seen)


def _supplied(function: Function, loads: Mapping[Node, bool]) -> Function:
    """The function with these loads as ops of their own."""

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node not in loads:
                return copy(node, args, run)
            attrs = {"shape": sizes(node.out), "same": loads[node]}
            return builder.add(supplied, args, attrs, loc=node.loc).results

        return meaning

    return rebuild(function, meaning_of)
