"""Comparisons of places in 32 bits: one number of a thread's own against a constant for each element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tessera.codegen.ptx.ops import places_below
from tessera.codegen.ptx.passes.affine import Sum, excess
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.peel import Scalars
from tessera.codegen.ptx.visit import visit
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node
from tessera.passes.dead_code import sweep

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

FAR = 1 << 30  # further than any place in a block: so much of a limit is enough


def placed(function: Function) -> Function:
    """The function with each comparison of blocks of places against a sum of scalars as one op."""
    producers = {v: n for n in function.body.walk() for v in n.results}

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            found = excess(producers, node)
            if found is None or not found.places:
                return copy(node, args, run)
            with builder.at(node.loc):
                scalars = {run.env[v]: c for v, c in found.scalars.items()}
                limit = Scalars(builder).negative(Sum(found.number, scalars))
            shape = sizes(node.out)
            steps = tuple(found.places.get(a - len(shape), 0) for a in range(len(shape)))
            return builder.add(places_below, [limit], {"shape": shape, "steps": steps}, loc=node.loc).results

        return meaning

    return sweep(rebuild(function, meaning_of))


@visit(places_below)
def _(kernel: Kernel, node: Node) -> None:
    """What is left of the limit by the thread's own place is compared with what registers add to that."""
    text, team, layout = kernel.text, kernel.team, kernel.layout(node.out)
    near = text.let("max.s64", "b64", text.let("min.s64", "b64", kernel.one(node.args[0]), FAR), -FAR)
    left = text.let("cvt.u32.u64", "b32", near)
    for axis, step in enumerate(node.attrs["steps"]):
        place = team.place(layout, axis) if step else "0"
        if place != "0":
            part = team.once(("steps", place, step), "mul.lo.s32", "b32", place, -step)
            left = text.let("add.s32", "b32", left, part)
    known: dict[int, str] = {}
    found = []
    for offsets in layout.offsets:
        more = sum(n * step for n, step in zip(offsets, node.attrs["steps"], strict=True))
        known[more] = known.get(more) or text.let("setp.gt.s32", "pred", left, more)
        found.append(known[more])
    kernel.values[node.out] = tuple(found)
