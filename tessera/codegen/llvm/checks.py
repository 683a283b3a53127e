"""Assertions and prints: this target has none, and does not drop them in silence."""

from __future__ import annotations

from tessera.codegen.llvm.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ops import checks


@visit(checks.assert_, checks.print_)
def _(kernel, node):
    name = {checks.assert_: "tile.assert_", checks.print_: "tile.print"}[node.op]
    raise UnsupportedOpError(
        f"the target llvm has no {name}", location=node.loc, expected="a kernel without it, or the interpreter",
        suggestion='run this kernel with target="interp", or put the line behind a constexpr of the kernel',
    )  # fmt: skip
