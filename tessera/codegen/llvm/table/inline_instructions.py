"""`tile.inline` in loops: the user's instructions, for a vector register or for each element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera.codegen.contract import get_tensor_type
from tessera.codegen.llvm.table import scalar_functions
from tessera.codegen.llvm.table.loop_fusion import element_rule, emit_element, emit_operation
from tessera.codegen.llvm.text.builder import RegisterType, get_register_type
from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops.dialects.inline_asm import inline


@element_rule(inline)
def _(body, node, index):
    if not node.attrs["llvm"]:
        raise UnsupportedOpError(
            "this tile.inline has no instructions for the target llvm", location=node.loc, expected='llvm="..."',
            suggestion='give them: tile.inline(x, python=f, llvm="{out} = fneg {t} {0}")',
        )  # fmt: skip
    operands = [(emit_element(body, v, index), get_tensor_type(v).dtype) for v in node.args]
    return emit_operation(body, lambda width, d, *names: _emit_inline(node, width, d, names), operands)


def _emit_inline(node: Node, width: int, d: str, names: Sequence[str]) -> Iterator[str]:
    """The instructions with names filled in, then the rounding to a narrow type."""
    out = node.out.type.dtype
    narrow = scalar_functions.needs_rounding(out)
    to = f"{d}.x" if narrow else d
    wide = "{t}" in node.attrs["llvm"]
    yield from (
        _fill_template(node, width, to, names) if wide or width == 1 else _emit_scalarised(node, width, to, names)
    )
    if narrow:
        yield from scalar_functions.round_to_format(out, width, d, to)


def _fill_template(node: Node, width: int, d: str, names: Sequence[str]) -> Iterator[str]:
    t = get_register_type(node.out.type.dtype, width)
    fields: dict[str, object] = {"out": d, "t": t, "s": t.suffix}
    for position, v in enumerate(node.args):
        own = get_register_type(get_tensor_type(v).dtype, width)
        fields |= {f"t{position}": own, f"s{position}": own.suffix}
    try:
        text = node.attrs["llvm"].format(*names, **fields)
    except (KeyError, IndexError, ValueError) as error:
        raise ArgumentError(
            f"the placeholders of tile.inline's llvm text cannot be filled in: {error}", location=node.loc,
            expected="{out}, {t}, {s}, and {0}, {t0}, {s0} for each operand; other braces doubled",
        ) from None  # fmt: skip
    yield from (line.strip() for line in text.replace(";", "\n").splitlines() if line.strip())


def _emit_scalarised(node: Node, width: int, d: str, names: Sequence[str]) -> Iterator[str]:
    """The instructions once for each element of the registers."""
    whole = "poison"
    t = get_register_type(node.out.type.dtype, width)
    for position in range(width):
        own = []
        for number, (v, name) in enumerate(zip(node.args, names, strict=True)):
            own.append(f"{d}.i{number}.{position}")
            vector = get_register_type(get_tensor_type(v).dtype, width)
            yield f"{own[-1]} = extractelement {vector} {name}, i64 {position}"
        yield from _fill_template(node, 1, f"{d}.e{position}", own)
        last = d if position == width - 1 else f"{d}.w{position}"
        yield f"{last} = insertelement {t} {whole}, {RegisterType(t.element)} {d}.e{position}, i64 {position}"
        whole = last
