"""How many rounds ahead loops of products fetch: as a Schedule says, or as many as shared memory has room for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tessera.codegen.ptx.ops import slots
from tessera.codegen.ptx.passes.fetches import Fetches, fetches_of
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.inplace import in_place
from tessera.codegen.ptx.passes.prefetch import prefetched
from tessera.codegen.ptx.passes.products import tensor_cores
from tessera.ir.core import Function, Node, Value
from tessera.ops import basic
from tessera.types import TensorType

MOST, LEAST = 4, 2
REGISTERS = 1 << 16  # of a multiprocessor
OWN = 64  # registers of a thread beside the elements of the largest block
BLOCKS = 8  # on a multiprocessor: more of them hide more than more stages do
HELD = 64  # registers that a thread holds of the sums and of the next round's blocks: more halve the blocks under way
SPARE = 2048  # bytes of shared memory for what else a block has there
Producers = Mapping[Value, Node]


def staged(function: Function, apart: bool, aligned: Sequence[int], threads: int, limit: int) -> Function:
    """The function with its loops' blocks fetched ahead, where that fits `limit` bytes of shared memory.

    `apart` and `aligned` are as for `fetches_of`, `threads` those of a block.
    """
    producers = {v: node for node in function.body.walk() for v in node.results}
    found = {n: _fitting(n, f, threads) for n, f in fetches_of(function, apart, aligned).items()}
    loops = {n: f for n, f in found.items() if f.loads and _rounds(producers, n) >= LEAST and _pays(n)}
    asked = function.attrs.get("stages")
    stages = _stages(function, loops, threads, limit) if asked is None else int(asked)
    if not loops or stages < LEAST:
        return function
    if not any(f.copied for f in loops.values()):
        stages = LEAST  # what registers hold is a round ahead
    return in_place(prefetched(function, stages, loops, slots))


def _pays(loop: Node) -> bool:
    return any(tensor_cores(n) for n in loop.regions[0].nodes)


def _fitting(loop: Node, fetches: Fetches, threads: int) -> Fetches:
    """What a loop fetches ahead, without what registers have no room for beside the sums."""
    most = max((math.prod(sizes(n.out)) for n in loop.regions[0].nodes if tensor_cores(n)), default=0)
    fits = most + sum(fetches.held.values()) <= HELD * threads
    return fetches if fits else replace(fetches, held={})


def _rounds(producers: Producers, loop: Node) -> float:
    """The rounds of a loop; what is not known counts as many."""
    ends = [producers.get(v) for v in loop.args[:3]]
    if any(n is None or n.op is not basic.full for n in ends):
        return math.inf
    lower, upper, step = (int(n.attrs["value"]) for n in ends if n is not None)
    return -((lower - upper) // step)


def _stages(function: Function, loops: Mapping[Node, Fetches], threads: int, limit: int) -> int:
    """As many stages as fit with the blocks of threads that registers suffice for; one where not even two do."""
    each = sum(f.bytes for f in loops.values())
    held = [v for n in function.body.walk() for v in n.results if isinstance(v.type, TensorType)]
    largest = max(math.prod(sizes(v)) for v in held)
    blocks = max(1, min(REGISTERS // (threads * (largest // threads + OWN)), BLOCKS))
    fits = [n for n in range(LEAST, MOST + 1) if n * each <= limit // blocks - SPARE]
    whole = [n for n in range(LEAST, MOST + 1) if n * each <= limit - SPARE]
    return max(fits, default=min(whole, default=1))
