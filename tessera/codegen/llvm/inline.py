"""`tile.inline` as LLVM text: the user's own instructions, for a register's worth of elements or for each one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tessera.codegen.blocks import block_type
from tessera.codegen.llvm import convert
from tessera.codegen.llvm.element import apply, element, value_at
from tessera.codegen.llvm.types import Vec, register
from tessera.errors import ArgumentError, UnsupportedOpError
from tessera.ir.core import Node
from tessera.ops.inline import inline

Lines = Iterator[str]


@element(inline)
def _(body, node, index):
    if not node.attrs["llvm"]:
        raise UnsupportedOpError(
            "this tile.inline has no text for the target llvm", location=node.loc, expected='llvm="..."',
            suggestion='give the instructions: tile.inline(x, python=f, llvm="{out} = fneg {t} {0}")',
        )  # fmt: skip
    operands = [(value_at(body, v, index), block_type(v).dtype) for v in node.args]
    return apply(body, lambda width, d, *names: _lines(node, width, d, names), operands)


def _lines(node: Node, width: int, d: str, names: Sequence[str]) -> Lines:
    """The text with names put in, then the rounding to a type narrower than its register."""
    out = node.out.type.dtype
    narrow = convert.needs_rounding(out)
    to = f"{d}.x" if narrow else d
    wide = "{t}" in node.attrs["llvm"]
    yield from _filled(node, width, to, names) if wide or width == 1 else _each(node, width, to, names)
    if narrow:
        yield from convert.rounded(out, width, d, to)


def _filled(node: Node, width: int, d: str, names: Sequence[str]) -> Lines:
    t = register(node.out.type.dtype, width)
    fields: dict[str, object] = {"out": d, "t": t, "s": t.suffix}
    for place, v in enumerate(node.args):
        own = register(block_type(v).dtype, width)
        fields |= {f"t{place}": own, f"s{place}": own.suffix}
    try:
        text = node.attrs["llvm"].format(*names, **fields)
    except (KeyError, IndexError, ValueError) as error:
        raise ArgumentError(
            f"the llvm text of tile.inline cannot be filled in: {error}", location=node.loc,
            expected="{out}, {t}, {s}, and {0}, {t0}, {s0} for each operand; other braces doubled",
        ) from None  # fmt: skip
    yield from (line.strip() for line in text.replace(";", "\n").splitlines() if line.strip())


def _each(node: Node, width: int, d: str, names: Sequence[str]) -> Lines:
    """The text once for each element of the registers."""
    whole = "poison"
    t = register(node.out.type.dtype, width)
    for place in range(width):
        own = []
        for number, (v, name) in enumerate(zip(node.args, names, strict=True)):
            own.append(f"{d}.i{number}.{place}")
            yield f"{own[-1]} = extractelement {register(block_type(v).dtype, width)} {name}, i64 {place}"
        yield from _filled(node, 1, f"{d}.e{place}", own)
        last = d if place == width - 1 else f"{d}.w{place}"
        yield f"{last} = insertelement {t} {whole}, {Vec(t.element)} {d}.e{place}, i64 {place}"
        whole = last
