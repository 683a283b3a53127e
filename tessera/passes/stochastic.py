"""Stochastic rounding made explicit: each result that a policy rounds by chance is computed wide, then rounded.

The draws depend on the seed and on the place in the whole tensor, so that tiles, levels and targets round alike. In a
tile function the whole is the blocks of all tiles of all programs, one after the other in the order of their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tessera.evaluate import Meaning, copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.op import COMPUTE, STORAGE, Op
from tessera.ops import basic, tile
from tessera.ops.chance import certain, draws_for, round_by_chance
from tessera.passes.retype import retype
from tessera.tensor import Tensor
from tessera.types import Type, f64


def stochastic(function: Function) -> Function:
    """A function in which no type rounds by chance, and ops that do so stand where one did."""
    body = function.body
    values = [*body.params, *(v for n in body.walk() for v in (*n.results, *(p for r in n.regions for p in r.params)))]
    if not any(by_chance(v.type) for v in values):
        return function
    return retype(rebuild(function, lambda builder: _meaning(builder, function)), _certain)


def by_chance(type: Type) -> bool:
    """Whether results of a type are rounded stochastically."""
    return type.policy is not None and type.policy.rounding == "stochastic"


def _certain(type: Type) -> Type:
    return replace(type, policy=certain(type.policy)) if by_chance(type) else type


def _meaning(builder: Builder, function: Function) -> Meaning:
    copy = copier(builder)

    def meaning(node: Node, args: list[Value], run: Callable[..., list[Any]]) -> Sequence[Value]:
        if not any(by_chance(v.type) for v in node.results) or not _rounds(node):
            return copy(node, args, run)
        with builder.at(node.loc):
            return _explicit(builder, node, args, lambda: _number(builder, function))

    return meaning


def _number(builder: Builder, function: Function) -> Any:
    """The number of a tile among all tiles of a launch; 0 where the function is of whole tensors."""

    def ask(op: Op, **attrs: int) -> Tensor:
        return Tensor(builder.add(op, [], attrs).out)

    found: Any = 0
    for axis in range(len(function.attrs.get("grid", ()))):
        place = ask(tile.program_id, axis=axis)
        found = found * ask(tile.grid_size, axis=axis) + place if axis else place
    group = int(function.attrs.get("group", 1))
    return found * group + ask(tile.local_id) if group > 1 else found


def _rounds(node: Node) -> bool:
    """Whether an op's results are new numbers: what only moves them finds them rounded."""
    return not node.regions and (node.op is basic.cast or node.op.numerics != STORAGE)


def _explicit(builder: Builder, node: Node, args: list[Value], number: Callable[[], Any]) -> tuple[Value, ...]:
    if node.op is basic.cast:
        return (_rounded(Tensor(args[0]), node.out.type, number),)
    wide = [_widened(Tensor(a), node).data for a in args]
    attrs = dict(node.attrs)
    if "dtype" in attrs:
        attrs["dtype"] = wide[0].type.dtype
    found = builder.add(node.op, wide, attrs, loc=node.loc).results
    return tuple(_rounded(Tensor(v), old.type, number) for v, old in zip(found, node.results, strict=True))


def _widened(x: Tensor, node: Node) -> Tensor:
    """An operand in the type that the op computes in."""
    if not x.dtype.is_float:
        return x
    return basic.cast(x, dtype=x.type.compute if node.op.numerics == COMPUTE else x.type.accumulate)


def _rounded(x: Tensor, type: Type, number: Callable[[], Any]) -> Value:
    """A wide result in its storage: rounded by chance, unless storage has every number of it."""
    policy, shape = type.policy, tuple(int(n) for n in type.shape)  # type: ignore[arg-type]
    if policy is None or not by_chance(type):
        return basic.cast(x, dtype=policy or type.dtype).data
    if x.dtype == type.dtype or policy.storage is f64:
        return basic.cast(x, dtype=certain(policy)).data
    draws = draws_for(shape, policy.seed, number() * math.prod(shape))
    return round_by_chance(basic.cast(x, dtype=f64), draws, dtype=policy).data
