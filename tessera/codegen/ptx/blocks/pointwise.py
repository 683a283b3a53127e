"""Pointwise ops: each register's worth of elements by the row of the table, widened before and rounded after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.ptx.scalars.convert import convert
from tessera.codegen.ptx.scalars.emit import Spot, emit
from tessera.codegen.ptx.scalars.policy import stored
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node, Value
from tessera.op import COMPUTE
from tessera.types import DType, TensorType

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel

LARGE = 64  # registers of a block from which on each element is computed all the way


def emit_chain(kernel: Kernel, nodes: Sequence[Node]) -> None:
    """Pointwise ops one after the other; of large blocks each element all the way, so that few are under way at once.

    Raises:
        UnsupportedOpError: the table has no row for an op.
    """
    rows = [_row(node) for node in nodes]
    counts = {kernel.layout(node.out).count for node in nodes}
    found: list[list[str]] = [[] for _ in nodes]
    known: list[dict[tuple[str, ...], str]] = [{} for _ in nodes]
    whole = len(counts) == 1 and min(counts) >= LARGE
    for first in range(min(counts) if whole else 1):
        for place, node in enumerate(nodes):
            made = {n.out: f for n, f in zip(nodes, found, strict=True)}
            held = [made[v] if v in made else kernel.values[v] for v in node.args]
            for i in (first,) if whole else range(kernel.layout(node.out).count):
                operands = tuple(h[i] for h in held)
                if operands not in known[place]:  # equal operands are computed with once
                    with kernel.at(node):
                        known[place][operands] = _element(kernel, node, rows[place], operands)
                found[place].append(known[place][operands])
    kernel.values.update((node.out, tuple(f)) for node, f in zip(nodes, found, strict=True))


def _row(node: Node) -> Callable[..., str]:
    found = emit.get(node.op)
    if found is None:
        raise UnsupportedOpError(
            f"the target ptx has no emission for {node.op.name}", location=node.loc,
            expected="an op with an @emit row in codegen/ptx, or a lowering",
        )  # fmt: skip
    return found


def _element(kernel: Kernel, node: Node, rule: Callable[..., str], operands: tuple[str, ...]) -> str:
    text, widths = kernel.text, [_wide(node, v) for v in node.args]
    xs = [convert(text, v.type.dtype, w, x) for v, w, x in zip(node.args, widths, operands, strict=True)]
    out = node.out.type
    assert isinstance(out, TensorType)
    found = rule(Spot(text, widths[-1], out.dtype, out.policy), *xs)
    return stored(text, widths[-1], out, found) if node.op.numerics == COMPUTE else found


def _wide(node: Node, v: Value) -> DType:
    return v.type.compute if node.op.numerics == COMPUTE else v.type.dtype  # type: ignore[union-attr]
