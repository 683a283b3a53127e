"""The pass that multiplies and adds at once: `x * y + z` and `x * y - z` of f32 blocks, rounded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tessera.codegen.ptx.ops import fused
from tessera.codegen.ptx.scalars.emit import emit
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import elementwise
from tessera.passes.dead_code import sweep
from tessera.types import TensorType, f32


@emit(fused)
def _(s, x, y, z):
    return s.do(f"fma.rn.{s.word}", x, y, z)


def contracted(function: Function) -> Function:
    """The function with each product that only a sum or difference takes made together with it."""
    producers = {v: n for n in function.body.walk() for v in n.results}
    uses = Counter(v for n in function.body.walk() for v in (*n.args, *(r for b in n.regions for r in b.results)))
    products = {
        v: n for v, n in producers.items() if n.op is elementwise.mul and uses[v] == 1 and _is_f32(v)
    }  # fmt: skip

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            place = next((i for i in SUMS.get(node.op, ()) if node.args[i] in products), None)
            if place is None:
                return copy(node, args, run)
            x, y = (run.env[v] for v in products[node.args[place]].args)
            z = args[1 - place]
            with builder.at(node.loc):
                z = builder.add(elementwise.neg, [z], {}).out if node.op is elementwise.sub else z
                return builder.add(fused, [x, y, z], {}).results

        return meaning

    return sweep(rebuild(function, meaning_of))


# Which operands of a sum or difference may be products.
SUMS = {elementwise.add: (0, 1), elementwise.sub: (0,)}


def _is_f32(v: Value) -> bool:
    return isinstance(v.type, TensorType) and v.type.dtype == f32
