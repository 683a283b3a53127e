"""What needs no memory: constants, ramps, blocks seen in another shape; and the handing over between layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tessera.codegen.ptx.blocks.exchange import handed
from tessera.codegen.ptx.layout import same_bits
from tessera.codegen.ptx.ops import relayout
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.scalars.convert import convert
from tessera.codegen.ptx.types import constant
from tessera.codegen.ptx.visit import visit
from tessera.ir.core import Node
from tessera.ops import basic, shape
from tessera.types import bool_, f32, f64, int64, uint64

if TYPE_CHECKING:
    from tessera.codegen.ptx.kernel import Kernel


@visit(basic.full)
def _(kernel: Kernel, node: Node) -> None:
    dtype, value = node.attrs["dtype"], node.attrs["value"]
    one = kernel.team.truth(bool(value)) if dtype == bool_ else constant(value, dtype)
    kernel.values[node.out] = (one,) * kernel.layout(node.out).count


@visit(shape.iota)
def _(kernel, node):
    layout, dtype = kernel.layout(node.out), node.attrs["dtype"]
    axis = node.attrs["axis"] % len(layout.shape)
    place = kernel.team.place(layout, axis)
    if place != "0" and dtype in (int64, uint64):
        place = kernel.team.once(("wide", place), "cvt.u64.u32", "b64", place)
    found = {}
    for offset in dict.fromkeys(each[axis] for each in layout.offsets):
        found[offset] = _ramp(kernel, dtype, place, offset)
    kernel.values[node.out] = tuple(found[each[axis]] for each in layout.offsets)


def _ramp(kernel, dtype, place, offset):
    """A place along an axis as an element."""
    if place == "0":
        return constant(offset, dtype)
    form = "s64" if dtype in (int64, uint64) else "s32"
    total = kernel.text.let(f"add.{form}", form, place, offset) if offset else place
    if not dtype.is_float:
        return total
    wide = "f64" if dtype.bits == 64 else "f32"
    return convert(
        kernel.text, f64 if wide == "f64" else f32, dtype, kernel.text.let(f"cvt.rn.{wide}.s32", wide, total)
    )


@visit(basic.broadcast_to)
def _(kernel, node):
    (x,) = node.args
    ours, theirs = kernel.layout(node.out), kernel.layout(x)
    held, missing = kernel.values[x], len(ours.shape) - len(theirs.shape)
    inner = [
        tuple(0 if n == 1 else at for n, at in zip(theirs.shape, place[missing:], strict=True))
        for place in ours.offsets
    ]  # fmt: skip
    kernel.values[node.out] = tuple(held[theirs.index[place]] for place in inner)


@visit(shape.permute)
def _(kernel, node):
    (x,), axes = node.args, node.attrs["axes"]
    ours, theirs = kernel.layout(node.out), kernel.layout(x)
    back = [axes.index(a) for a in range(len(axes))]
    kernel.values[node.out] = tuple(
        kernel.values[x][theirs.index[tuple(place[b] for b in back)]] for place in ours.offsets
    )  # fmt: skip


@visit(shape.reshape)
def _(kernel, node):
    (x,) = node.args
    ours, theirs = kernel.layout(node.out), kernel.layout(x)
    names = same_bits(theirs.shape, ours.shape)
    if names is not None and theirs.renamed(ours.shape, names).threads == ours.threads:
        moved = theirs.renamed(ours.shape, names)
        kernel.values[node.out] = tuple(kernel.values[x][moved.index[place]] for place in ours.offsets)
    else:
        kernel.values[node.out] = handed(kernel, x.type.dtype, kernel.values[x], theirs, ours)


@visit(relayout)
def _(kernel, node):
    (x,) = node.args
    ours, theirs = kernel.layout(node.out), kernel.layout(x)
    assert sizes(x) == sizes(node.out)
    if ours.threads == theirs.threads:
        kernel.values[node.out] = tuple(kernel.values[x][theirs.index[place]] for place in ours.offsets)
    else:
        kernel.values[node.out] = handed(kernel, x.type.dtype, kernel.values[x], theirs, ours)
