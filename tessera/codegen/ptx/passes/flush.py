"""The pass for powers of two that are 0 where they would be subnormal: the hardware's own instruction gives them so.

`where(x < -126, 0, exp2(x))` is one instruction, where `exp2(x)` alone needs four.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tessera.codegen.ptx.ops import exp2_flushed
from tessera.codegen.ptx.scalars.emit import emit
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import basic, elementwise
from tessera.passes.dead_code import sweep
from tessera.types import f32

LEAST = -126  # the exponent of the least normal f32


@emit(exp2_flushed)
def _(s, x):
    return s.text.let("ex2.approx.ftz.f32", "f32", x)


def flushed(function: Function) -> Function:
    """The function with such powers of f32 as the hardware's."""
    producers = {v: n for n in function.body.walk() for v in n.results}
    powers = {n: x for n in function.body.walk() if (x := _power(producers, n)) is not None}
    if not powers:
        return function

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node in powers:
                return builder.add(exp2_flushed, [run.env[powers[node]]], {}, loc=node.loc).results
            return copy(node, args, run)

        return meaning

    return sweep(rebuild(function, meaning_of))


def _power(producers: Mapping[Value, Node], node: Node) -> Value | None:
    """What a node is such a power of."""
    if node.op is not elementwise.where or node.out.type.dtype != f32:  # type: ignore[union-attr]
        return None
    small, zero, power = (producers.get(v) for v in node.args)
    found = power is not None and power.op is elementwise.exp2 and small is not None and small.op is elementwise.less
    if not found or small is None or power is None or small.args[0] is not power.args[0]:
        return None
    limit = _number(producers, small.args[1]) == LEAST and _number(producers, node.args[1]) == 0
    return power.args[0] if limit and zero is not None else None


def _number(producers: Mapping[Value, Node], v: Value) -> Any:
    """The number that a block is full of, or None."""
    node = producers.get(v)
    while node is not None and node.op is basic.broadcast_to:
        node = producers.get(node.args[0])
    return node.attrs["value"] if node is not None and node.op is basic.full else None
