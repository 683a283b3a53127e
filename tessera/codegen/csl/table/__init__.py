"""Emission table: the CSL of each op, and the ops that this target refuses with the reason."""

from tessera.ir.rules import Op
from tessera.ops.dialects import inline_asm, tile
from tessera.ops.tensor import basic
from tessera.ops.tensor.random import round_by_chance

# Refusals: the ops for which this target has no row, with the reason that its error states.


REFUSED: dict[Op, str] = {
    tile.line: "stepping through source lines needs the interpreter",
    tile.pause: "stepping through source lines needs the interpreter",
    tile.print_: "a processing element cannot send text to the host while it runs",
    inline_asm.inline: "tile.inline takes no CSL text",
    basic.dim_value: "the sizes of a program for a mesh are known when it is built",
    round_by_chance: "stochastic rounding computes in f64, which processing elements do not have",
}


# Emission table: the CSL of each op.
