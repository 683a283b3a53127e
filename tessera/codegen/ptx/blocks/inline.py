"""`tile.inline` as PTX: the user's own instructions, for each element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.access import spread_to
from tessera.codegen.ptx.scalars.convert import rounded
from tessera.codegen.ptx.scalars.words import in_register
from tessera.codegen.ptx.types import NARROW, register_class, word
from tessera.codegen.ptx.visit import visit
from tessera.errors import ArgumentError, UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops.inline import inline

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel


@visit(inline)
def _(kernel: Kernel, node: Node) -> None:
    if not node.attrs["ptx"]:
        raise UnsupportedOpError(
            "this tile.inline has no text for the target ptx", location=node.loc, expected='ptx="..."',
            suggestion='give the instructions: tile.inline(x, python=f, ptx="neg.f32 {out}, {0};")',
        )  # fmt: skip
    layout, out = kernel.layout(node.out), node.out.type.dtype
    operands = [spread_to(kernel, v, layout) for v in node.args]
    found = []
    for names in zip(*operands, strict=True):
        register = _filled(kernel, node, names)
        found.append(rounded(kernel.text, out, register) if out in NARROW else register)
    kernel.values[node.out] = tuple(found)


def _filled(kernel: Kernel, node: Node, names: tuple[str, ...]) -> str:
    """The text with registers put in, line by line; the register of its result."""
    text = kernel.text
    out = text.new(word(node.out.type.dtype))  # type: ignore[union-attr]
    given = [in_register(text, register_class(v.type.dtype), x) for v, x in zip(node.args, names, strict=True)]
    try:
        lines = node.attrs["ptx"].format(*given, out=out)
    except (KeyError, IndexError, ValueError) as error:
        raise ArgumentError(
            f"the ptx text of tile.inline cannot be filled in: {error}", location=node.loc,
            expected="{out}, and {0} for each operand; other braces doubled",
        ) from None  # fmt: skip
    for line in lines.split(";"):
        if line.strip():
            text.line(line.strip())
    return out
