"""The pass that adds products where they are summed: `acc + dot(a, b)` becomes one `multiply_add`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tessera.codegen.ptx.ops import multiply_add
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import elementwise, linalg

Meaning = Callable[[Node, list[Any], Any], Sequence[Any]]


def fuse_sums(function: Function) -> Function:
    """The function with each product that is only added to a block of its own type added in place."""
    fused = _sums(function)
    if not fused:
        return function
    dots = {dot.out for dot in fused.values()}

    def meaning_of(builder: Builder) -> Meaning:
        copy = copier(builder)
        operands: dict[Value, list[Value]] = {}

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            if node.results and node.results[0] in dots:
                operands[node.out] = args
                return [None]  # it is made where it is added
            if node.results and node.results[0] in fused:
                dot = fused[node.out]
                acc = next(a for a, v in zip(args, node.args, strict=True) if v is not dot.out)
                made = builder.add(multiply_add, [acc, *operands[dot.out]], {}, loc=dot.loc)
                return made.results
            return copy(node, args, run)

        return meaning

    return rebuild(function, meaning_of)


def _sums(function: Function) -> dict[Value, Node]:
    """The sums to fuse, with the product that each takes: made in the same region, of the accumulation type."""
    uses: Counter[Value] = Counter()
    for node in function.body.walk():
        uses.update(node.args)
        uses.update(v for region in node.regions for v in region.results)
    found: dict[Value, Node] = {}
    blocks = [function.body, *(r for node in function.body.walk() for r in node.regions)]
    for block in blocks:
        dots = {n.out: n for n in block.nodes if n.op is linalg.dot and _exact(n) and uses[n.out] == 1}
        for node in block.nodes:
            taken = [v for v in node.args if v in dots] if node.op is elementwise.add else []
            if len(taken) == 1:
                found[node.out] = dots[taken[0]]
    return found


def _exact(dot: Node) -> bool:
    return dot.args[0].type.accumulate == dot.out.type.dtype  # type: ignore[union-attr]
