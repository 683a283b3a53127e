"""Stochastic rounding: each result that a policy rounds stochastically is computed in the wide type, then rounded by
an explicit op.

The random bits depend on the seed and on the position in the whole tensor, so that tiles, levels and targets round
alike. In a tile function the whole tensor is the blocks of all tiles of all programs, in the order of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tessera.core.types import Type, f64
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, rewrite_function, verify_rewritten
from tessera.ir.rules import COMPUTE, STORAGE, Op
from tessera.ir.tensor import Tensor
from tessera.lower.passes.type_conversion import convert_types
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic
from tessera.ops.tensor.random import draw_rounding_bits, drop_stochastic_clause, round_by_chance

stochastic_rounding = RewritePatterns("stochastic rounding")


def expand_stochastic_rounding(function: Function) -> Function:
    """Replace stochastic rounding by explicit ops; no type of the result has a stochastic policy."""
    body = function.body
    values = [*body.params, *(v for n in body.walk() for v in (*n.results, *(p for r in n.regions for p in r.params)))]
    if not any(rounds_stochastically(v.type) for v in values):
        return function
    rounded = rewrite_function(function, stochastic_rounding, final=False)
    return verify_rewritten(convert_types(rounded, _drop_stochastic_policy))


def rounds_stochastically(type: Type) -> bool:
    """Whether results of a type are rounded stochastically."""
    return type.policy is not None and type.policy.rounding == "stochastic"


def _drop_stochastic_policy(type: Type) -> Type:
    return replace(type, policy=drop_stochastic_clause(type.policy)) if rounds_stochastically(type) else type


@stochastic_rounding.any_op
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> tuple[Value, ...] | None:
    if not any(rounds_stochastically(v.type) for v in node.results) or not _computes_numbers(node):
        return None
    return _round_results(rewriter, node, args, lambda: _number_tile(rewriter))


def _number_tile(rewriter: Rewriter) -> Any:
    """The number of a tile among all tiles of a launch; 0 for a function of whole tensors."""
    attrs = rewriter.function.attrs

    def add(op: Op, **attributes: int) -> Tensor:
        return Tensor(rewriter.add(op, **attributes))

    found: Any = 0
    for axis in range(len(attrs.get("grid", ()))):
        position = add(tile.program_id, axis=axis)
        found = found * add(tile.grid_size, axis=axis) + position if axis else position
    group = int(attrs.get("group", 1))
    return found * group + add(tile.local_id) if group > 1 else found


def _computes_numbers(node: Node) -> bool:
    """Whether an op computes new numbers; an op that only moves numbers finds them rounded already."""
    return not node.regions and (node.op is basic.cast or node.op.numerics != STORAGE)


def _round_results(rewriter: Rewriter, node: Node, args: list[Value], number: Callable[[], Any]) -> tuple[Value, ...]:
    if node.op is basic.cast:
        return (_round_result(Tensor(args[0]), node.out.type, number),)
    wide = [_widen_operand(Tensor(a), node).data for a in args]
    attrs = dict(node.attrs)
    if "dtype" in attrs:
        attrs["dtype"] = wide[0].type.dtype
    found = rewriter.builder.add(node.op, wide, attrs).results
    return tuple(_round_result(Tensor(v), old.type, number) for v, old in zip(found, node.results, strict=True))


def _widen_operand(x: Tensor, node: Node) -> Tensor:
    """An operand in the type that the op computes in."""
    if not x.dtype.is_float:
        return x
    return basic.cast(x, dtype=x.type.compute if node.op.numerics == COMPUTE else x.type.accumulate)


def _round_result(x: Tensor, type: Type, number: Callable[[], Any]) -> Value:
    """A wide result in its storage type: rounded stochastically, unless the storage type holds it exactly."""
    policy, shape = type.policy, tuple(int(n) for n in type.shape)  # type: ignore[arg-type]
    if policy is None or not rounds_stochastically(type):
        return basic.cast(x, dtype=policy or type.dtype).data
    if x.dtype == type.dtype or policy.storage is f64:
        return basic.cast(x, dtype=drop_stochastic_clause(policy)).data
    draws = draw_rounding_bits(shape, policy.seed, number() * math.prod(shape))
    return round_by_chance(basic.cast(x, dtype=f64), draws, dtype=policy).data
