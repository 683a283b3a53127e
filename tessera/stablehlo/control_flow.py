"""Rows of control flow: calls, loops, branches, tuples, custom calls, and operations that are refused by name.

A while loop that counts from one constant to another becomes a scan, which has a reverse-mode derivative.
"""

from __future__ import annotations

from typing import Any

from tessera.ir.tensor import Tensor
from tessera.ops.tensor import elementwise as e
from tessera.stablehlo.elementwise import comparison_of
from tessera.stablehlo.reductions import take_largest
from tessera.stablehlo.table import ROWS, Site, row
from tessera.stablehlo.text import TOKEN_TYPE, Operation
from tessera.transforms.flow.region_ops import bind_cond, bind_scan, bind_while

MAX_STEPS = 1 << 31  # of a loop that becomes a scan


@row("call", "func.call", "stablehlo.call")
def _(site: Site, *operands: Any) -> list[Any]:
    numbers = [site.constant(i) for i in range(len(operands))]
    return site.program.call(site.get("callee"), operands, numbers)


@row("stablehlo.composite")
def _(site: Site, *operands: Any) -> list[Any]:
    return site.program.call(site.get("decomposition"), operands, [None] * len(operands))


# Loops.


@row("stablehlo.while")
def _(site: Site, *carry: Tensor) -> list[Tensor]:
    test, body = site.body(0), site.body(1)
    steps = _count_steps(site)
    if steps == 0:
        return list(carry)
    if steps is not None:
        return bind_scan(lambda given: body(*given), list(carry), [], [], steps)
    return bind_while(lambda given: test(*given)[0], lambda given: body(*given), list(carry))


def _count_steps(site: Site) -> int | None:
    """The number of steps of `for (i = constant; i < constant; i += constant)`; None for another loop."""
    condition, body = site.operation.regions
    compared = [o for o in condition.operations if o.name == "stablehlo.compare"]
    end = condition.operations[-1]
    if len(compared) != 1 or end.operands != [compared[0].results[0][0]]:
        return None
    direction, _ = comparison_of(compared[0])
    counter, bound = compared[0].operands
    if direction not in ("LT", "LE") or counter not in condition.params:
        return None
    place = condition.params.index(counter)
    limit = _find_number(site, condition.operations, bound)
    start, step = site.constant(place), _find_increment(site, place)
    if not all(isinstance(n, int) for n in (start, step, limit)) or step <= 0:
        return None
    count = (limit - start + step - 1) // step if direction == "LT" else (limit - start) // step + 1
    return max(0, count) if count < MAX_STEPS else None


def _find_number(site: Site, operations: list[Operation], name: str) -> Any:
    """The number that a name has: a constant of the region or of the program around it."""
    for operation in operations:
        if name in [n for n, _ in operation.results]:
            value = operation.attrs.get("value") if operation.name == "stablehlo.constant" else None
            return value.item() if value is not None and value.ndim == 0 and value.dtype.kind in "iu" else None
    return site.scope.numbers.get(name)


def _find_increment(site: Site, place: int) -> Any:
    """What the body adds to the value that it carries at a place."""
    body = site.operation.regions[1]
    counter, name = body.params[place], body.operations[-1].operands[place]
    for operation in body.operations:
        if operation.name == "stablehlo.add" and operation.results == [(name, 1)]:
            left, right = operation.operands
            other = right if left == counter else left if right == counter else ""
            return _find_number(site, body.operations, other) if other else None
    return None


# Branches.


@row("stablehlo.if")
def _(site: Site, condition: Tensor) -> list[Tensor]:
    return bind_cond(condition, [lambda given: site.body(0)(), lambda given: site.body(1)()], [])


@row("stablehlo.case")
def _(site: Site, index: Tensor) -> list[Tensor]:
    return _choose(site, index, 0)


def _choose(site: Site, index: Tensor, first: int) -> list[Tensor]:
    """The branch of an index from `first` on; the last one for an index outside."""
    if first == len(site.operation.regions) - 1:
        return site.body(first)()
    here = e.equal(index, first)
    return bind_cond(here, [lambda given: site.body(first)(), lambda given: _choose(site, index, first + 1)], [])


# Tuples, tokens and barriers.


@row("stablehlo.tuple")
def _(site: Site, *parts: Any) -> list[Any]:
    return [tuple(parts)]


@row("stablehlo.get_tuple_element")
def _(site: Site, whole: tuple[Any, ...]) -> list[Any]:
    ranges = site.get("ranges")
    return [whole[ranges[0][0] if ranges else site.get("index")]]


@row("stablehlo.after_all", "stablehlo.create_token")
def _(site: Site, *tokens: Any) -> list[Any]:
    return [TOKEN_TYPE]


@row("stablehlo.optimization_barrier", "mhlo.optimization_barrier")
def _(site: Site, *values: Any) -> list[Any]:
    return list(values)


# Custom calls.

_SAME = ("Sharding", "annotate_device_placement", "LayoutConstraint", "MoveToHost", "MoveToDevice")
_KNOWN = {"mhlo.erf": "chlo.erf", "mhlo.topk": "chlo.top_k", "mhlo.tan": "chlo.tan", "mhlo.sinh": "chlo.sinh",
          "mhlo.cosh": "chlo.cosh", "mhlo.asin": "chlo.asin", "mhlo.acos": "chlo.acos", "mhlo.atanh": "chlo.atanh",
          "mhlo.asinh": "chlo.asinh", "mhlo.acosh": "chlo.acosh", "chlo.erf": "chlo.erf"}  # fmt: skip


@row("stablehlo.custom_call", "mhlo.custom_call")
def _(site: Site, *operands: Any) -> Any:
    target = str(site.get("callee") or site.get("call_target_name"))
    given = site.program.custom_call(target)
    if given is not None:
        found = given(*operands)
        return [] if not site.operation.types else found
    if target in _SAME:
        return list(operands)
    if target == "mhlo.topk":
        return _topk_call(site, *operands)
    if target in _KNOWN:
        return ROWS[_KNOWN[target]](site, *operands)
    kind = "a LAPACK routine" if target.startswith(("lapack_", "blas_")) else "a custom call"
    raise site.refuse(
        f"{target} is {kind} of another library",
        f'give it a meaning: ts.stablehlo.load(text, custom_calls={{"{target}": function}})',
    )


def _topk_call(site: Site, x: Tensor) -> list[Tensor]:
    attributes = site.get("mhlo.attributes", {})
    return take_largest(x, attributes["k"], bool(attributes.get("largest", True)), site.operation.types[1].dtype)


# Refusals: what needs several devices, a host, or sizes that are known only at run time.

_REASONS = {
    "it communicates between devices": (
        "all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute", "reduce_scatter",
        "partition_id", "replica_id", "send", "recv",
    ),
    "it communicates with a host": ("infeed", "outfeed"),
    "complex numbers": ("complex", "fft"),
    "its sizes are known only when the program runs": (
        "dynamic_conv", "dynamic_gather", "dynamic_pad", "real_dynamic_slice", "set_dimension_size",
    ),
    "its numbers are not specified: use rng_bit_generator, as jax.random does": ("rng",),
    "quantised types": ("uniform_quantize", "uniform_dequantize"),
}  # fmt: skip


def _refuse(reason: str) -> Any:
    def refuse(site: Site, *operands: Any) -> Any:
        raise site.refuse(reason)

    return refuse


for _reason, _names in _REASONS.items():
    row(*(f"stablehlo.{n}" for n in _names))(_refuse(_reason))
