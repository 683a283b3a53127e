"""Stochastic rounding: each result that a policy rounds stochastically is computed wide, then rounded by an explicit
op.

The draws depend on the seed and on the position in the whole tensor, so that tiles, levels and targets round alike.
In a tile function the whole is the blocks of all tiles of all programs, in the order of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera.core.types import Type, f64
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ir.evaluator import NodeSemantics, make_copier, rebuild_function
from tessera.ir.rules import COMPUTE, STORAGE, Op
from tessera.ir.tensor import Tensor
from tessera.lower.passes.type_conversion import convert_types
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic
from tessera.ops.tensor.stochastic_rounding import draw_rounding_bits, drop_stochastic_clause, round_by_chance


def expand_stochastic_rounding(function: Function) -> Function:
    """A function in which no type rounds by chance, and ops that do so stand where one did."""
    body = function.body
    values = [*body.params, *(v for n in body.walk() for v in (*n.results, *(p for r in n.regions for p in r.params)))]
    if not any(rounds_stochastically(v.type) for v in values):
        return function
    return convert_types(
        rebuild_function(function, lambda builder: _make_rewriter(builder, function)), _drop_stochastic_policy
    )


def rounds_stochastically(type: Type) -> bool:
    """Whether results of a type are rounded stochastically."""
    return type.policy is not None and type.policy.rounding == "stochastic"


def _drop_stochastic_policy(type: Type) -> Type:
    return replace(type, policy=drop_stochastic_clause(type.policy)) if rounds_stochastically(type) else type


def _make_rewriter(builder: Builder, function: Function) -> NodeSemantics:
    copy = make_copier(builder)

    def meaning(node: Node, args: list[Value], run: Callable[..., list[Any]]) -> Sequence[Value]:
        if not any(rounds_stochastically(v.type) for v in node.results) or not _computes_numbers(node):
            return copy(node, args, run)
        with builder.at(node.loc):
            return _round_results(builder, node, args, lambda: _number_tile(builder, function))

    return meaning


def _number_tile(builder: Builder, function: Function) -> Any:
    """The number of a tile among all tiles of a launch; 0 where the function is of whole tensors."""

    def ask(op: Op, **attrs: int) -> Tensor:
        return Tensor(builder.add(op, [], attrs).out)

    found: Any = 0
    for axis in range(len(function.attrs.get("grid", ()))):
        place = ask(tile.program_id, axis=axis)
        found = found * ask(tile.grid_size, axis=axis) + place if axis else place
    group = int(function.attrs.get("group", 1))
    return found * group + ask(tile.local_id) if group > 1 else found


def _computes_numbers(node: Node) -> bool:
    """Whether an op's results are new numbers: what only moves them finds them rounded."""
    return not node.regions and (node.op is basic.cast or node.op.numerics != STORAGE)


def _round_results(builder: Builder, node: Node, args: list[Value], number: Callable[[], Any]) -> tuple[Value, ...]:
    if node.op is basic.cast:
        return (_round_result(Tensor(args[0]), node.out.type, number),)
    wide = [_widen_operand(Tensor(a), node).data for a in args]
    attrs = dict(node.attrs)
    if "dtype" in attrs:
        attrs["dtype"] = wide[0].type.dtype
    found = builder.add(node.op, wide, attrs, loc=node.loc).results
    return tuple(_round_result(Tensor(v), old.type, number) for v, old in zip(found, node.results, strict=True))


def _widen_operand(x: Tensor, node: Node) -> Tensor:
    """An operand in the type that the op computes in."""
    if not x.dtype.is_float:
        return x
    return basic.cast(x, dtype=x.type.compute if node.op.numerics == COMPUTE else x.type.accumulate)


def _round_result(x: Tensor, type: Type, number: Callable[[], Any]) -> Value:
    """A wide result in its storage: rounded by chance, unless storage has every number of it."""
    policy, shape = type.policy, tuple(int(n) for n in type.shape)  # type: ignore[arg-type]
    if policy is None or not rounds_stochastically(type):
        return basic.cast(x, dtype=policy or type.dtype).data
    if x.dtype == type.dtype or policy.storage is f64:
        return basic.cast(x, dtype=drop_stochastic_clause(policy)).data
    draws = draw_rounding_bits(shape, policy.seed, number() * math.prod(shape))
    return round_by_chance(basic.cast(x, dtype=f64), draws, dtype=policy).data
