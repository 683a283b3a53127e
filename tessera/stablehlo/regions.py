"""Functions of scalars in regions: which known operation they are, and their evaluation on whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor import shape as s
from tessera.ops.tensor.scatter import scatter, scatter_add
from tessera.stablehlo import elementwise
from tessera.stablehlo.table import Site, as_list
from tessera.stablehlo.text import HloRegion
from tessera.transforms.batching import vmap
from tessera.transforms.flow import scan

Join = Callable[..., list[Tensor]]  # of the left and the right operands

# Regions.

MONOIDS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor] | None, Any]] = {
    # the function of two tensors, the reduction along axes, the neutral element
    "add": (elementwise.add, r.sum, 0),
    "multiply": (elementwise.multiply, r.prod, 1),
    "maximum": (elementwise.maximum, r.max, -math.inf),
    "minimum": (elementwise.minimum, r.min, math.inf),
    "and": (e.bitwise_and, None, -1),
    "or": (e.bitwise_or, None, 0),
    "xor": (e.bitwise_xor, None, 0),
}


def find_monoid(region: HloRegion) -> str:
    """The operation that a region of two scalars consists of; "set" where it returns the second; "" for others."""
    names = region.params
    if len(names) != 2 or not region.operations or len(region.operations[-1].operands) != 1:
        return ""
    *body, end = region.operations
    if not body:
        return "set" if end.operands == names[1:] else ""
    (only, *more) = body
    kind = only.name.removeprefix("stablehlo.")
    joined = [n for n, _ in only.results] == end.operands and sorted(only.operands) == sorted(names)
    return kind if not more and joined and kind in MONOIDS else ""


def vectorise(function: Join) -> Join:
    """A function of scalars as one of tensors of a common shape, element by element."""

    def apply(*operands: Tensor) -> list[Tensor]:
        shape = operands[0].shape
        if not shape:
            return as_list(function(*operands))
        flat = [s.reshape(x, shape=(-1,)) for x in operands]
        found = vmap(lambda *given: tuple(function(*given)))(*flat)
        return [s.reshape(x, shape=shape) for x in found]

    return apply


def find_join(site: Site, region: HloRegion) -> Join:
    """The function of a region on whole tensors."""
    monoid = find_monoid(region)
    if monoid in MONOIDS:
        return lambda x, y: [MONOIDS[monoid][0](x, y)]
    return vectorise(site.body())


def scatter_flat(
    site: Site, inputs: Sequence[Tensor], places: Tensor, updates: Sequence[Tensor], region: int
) -> list[Tensor]:
    """Inputs with updates joined to the elements of these row-major numbers; the number after the last is dropped."""
    size = math.prod(inputs[0].shape)
    longer = [s.pad(s.reshape(x, shape=(-1,)), low=(0,), high=(1,), value=0) for x in inputs]
    monoid = find_monoid(site.operation.regions[region])
    if len(inputs) == 1 and monoid in _SCATTERS and not (inputs[0].dtype.kind == "bool" and monoid != "set"):
        joined = [_SCATTERS[monoid](longer[0], places, updates[0])]
    else:
        joined = _scatter_in_order(vectorise(site.body(region)), longer, places, updates)
    return [
        s.reshape(s.slice_(j, start=(0,), stop=(size,)), shape=x.shape) for j, x in zip(joined, inputs, strict=True)
    ]


_SCATTERS: dict[Any, Callable[..., Tensor]] = {
    "add": lambda x, places, updates: scatter_add(x, places, updates, axis=0),
    "set": lambda x, places, updates: scatter(x, places, updates, axis=0),
    "multiply": lambda x, places, updates: scatter(x, places, updates, axis=0, mode="multiply"),
    "minimum": lambda x, places, updates: scatter(x, places, updates, axis=0, mode="min"),
    "maximum": lambda x, places, updates: scatter(x, places, updates, axis=0, mode="max"),
}


def _scatter_in_order(
    join: Callable[..., list[Tensor]], inputs: Sequence[Tensor], places: Tensor, updates: Sequence[Tensor]
) -> list[Tensor]:
    """One update after the other: what the region says of the element and the update."""

    def step(state: Any, x: Any) -> Any:
        place = s.reshape(x[0], shape=(1,))
        old = [s.gather(each, place, axis=0) for each in state]
        new = join(*old, *(s.reshape(u, shape=(1,)) for u in x[1:]))
        return tuple(scatter(each, place, n, axis=0) for each, n in zip(state, new, strict=True)), None

    return list(scan(step, tuple(inputs), (places, *updates))[0])
