"""Matrix products on one PE: row products (AXPY), outer products or inner products, by estimated cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tessera.codegen.csl.table.blocks import emit
from tessera.codegen.csl.table.scalars import format_literal, format_widening
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import MAX_DSD_STRIDE, PeArrayView, coalesce_axes
from tessera.codegen.csl.text.memory_allocation import allocate_array, allocate_for, release_view
from tessera.codegen.csl.text.statements import (
    add_constant,
    add_line,
    emit_copy,
    emit_dsd_operation,
    emit_loop,
    get_dsd,
    open_block,
    reuse_or_copy,
)
from tessera.core.types import DType
from tessera.lower.mesh.cost_model import (
    INNER_PRODUCTS,
    OUTER_PRODUCTS,
    ROW_PRODUCTS,
    choose_cheapest,
    estimate_matmul_cycles,
    estimate_row_cycles,
)
from tessera.ops.dialects import mesh
from tessera.ops.tensor import contractions


@emit(contractions.dot)
def _(ctx, node, a, b):
    out = allocate_for(ctx, node.out.type)
    emit_copy(ctx, out, PeArrayView(out.type, out.shape, literal=format_literal(0, node.out.type.dtype)))
    _emit_matmul(ctx, out, a, b, node.types)
    return out


@emit(mesh.multiply_add)
def _(ctx, node, total, a, b):
    out = reuse_or_copy(ctx, node.args[0], total)
    _emit_matmul(ctx, out, a, b, node.types[1:])
    return out


def _emit_matmul(ctx: CslContext, out: PeArrayView, a: PeArrayView, b: PeArrayView, types: Sequence[Any]) -> None:
    """out += a b, for each matrix of a batch; `types` are the types of the factors."""
    method = _choose_method(ctx, out, a, b)
    kept = (
        method == ROW_PRODUCTS
        and _MULTIPLY_ADD_BUILTINS.get((out.type, a.type, b.type))
        and not (a.literal or b.literal)
    )
    left, right = (
        (a, b) if kept else (_convert_operand(ctx, x, out.type, t.dtype) for x, t in zip((a, b), types, strict=True))
    )
    batch = out.shape[:-2]
    names = [f"b{next(ctx.names)}" for _ in batch]
    for name, size in zip(names, batch, strict=True):
        add_line(ctx, f"for (@range(i16, {size})) |{name}| {{")
        ctx.depth += 1
    if out.size * a.shape[-1] and not (
        method in MATMUL_METHODS and MATMUL_METHODS[method](ctx, out, left, right, names)
    ):
        _emit_row_products(ctx, out, left, right, names)
    for _ in batch:
        ctx.depth -= 1
        add_line(ctx, "}")
    for converted, operand in ((left, a), (right, b)):
        if converted is not operand:
            release_view(ctx, converted)


def _convert_operand(ctx: CslContext, x: PeArrayView, kind: str, dtype: DType) -> PeArrayView:
    """The view converted to the type of the sum."""
    if x.literal:
        return replace(x, type=kind, literal=f"@as({kind}, {format_widening(ctx, dtype, x.literal)})")
    if x.type == kind:
        return x
    converted = allocate_array(ctx, x.shape, kind)
    if (x.type, kind) != ("f16", "f32") or not emit_dsd_operation(ctx, "@fh2s", [converted, x]):
        emit_loop(ctx, [converted, x], lambda t: f"{t[0]} = @as({kind}, {format_widening(ctx, dtype, t[1])});")
    return converted


def _choose_method(ctx: CslContext, out: PeArrayView, a: PeArrayView, b: PeArrayView) -> str:
    """The method with the fewest estimated cycles among those that the operands allow."""
    if out.type != "f32" or a.literal or b.literal or not ctx.fuses or not out.size:
        return ROW_PRODUCTS
    cycles = estimate_matmul_cycles(out.shape[-2], out.shape[-1], a.shape[-1], ctx.is_wse3)
    if ctx.saves_memory:  # "outer" needs an array for the products
        cycles.pop(OUTER_PRODUCTS)
    return choose_cheapest(cycles)


def _emit_row_products(ctx: CslContext, out: PeArrayView, a: PeArrayView, b: PeArrayView, batch: list[str]) -> None:
    """Compute one row of the result at a time, or one column where that takes fewer cycles."""
    by_rows, by_columns = estimate_row_cycles(out.shape[-2], out.shape[-1], a.shape[-1])
    if by_rows > by_columns:  # the transposed product
        out, b, a = (v.permute_axes([*range(len(batch)), len(batch) + 1, len(batch)]) for v in (out, a, b))
    m, k = (f"{n}{next(ctx.names)}" for n in "mk")
    target, source = _get_row_dsd(ctx, out), _get_row_dsd(ctx, b)
    builtin = _MULTIPLY_ADD_BUILTINS.get((out.type, a.type, b.type))
    factor = a.at([*batch, m, k])
    with open_block(ctx, f"for (@range(i16, {out.shape[-2]})) |{m}|"):
        if builtin and target and source and not a.literal:
            into = _offset_dsd(target, out, [*batch, m])
            loop = f"for (@range(i16, {a.shape[-1]})) |{k}|"
            _emit_row_accumulation(ctx, builtin, into, (source, b, [*batch, k]), loop, factor)
            return
        with (
            open_block(ctx, f"for (@range(i16, {a.shape[-1]})) |{k}|"),
            open_block(ctx, f"for (@range(i16, {out.shape[-1]})) |n|"),
        ):
            add_line(ctx, f"{out.at([*batch, m, 'n'])} += {factor} * {b.at([*batch, k, 'n'])};")


def _emit_row_accumulation(
    ctx: CslContext, builtin: str, into: str, source: tuple[str, PeArrayView, list[str]], loop: str, factor: str
) -> None:
    """Accumulate all multiples in a row, which stays in DSRs; consecutive rows keep their DSRs."""
    text, x, names = source
    walks = x.strides[-2] == x.shape[-1] * x.strides[-1]
    names_of = (("dest", "sum_to_"), ("src0", "sum_of_"), ("src1", "row_"))
    to, at, row = (add_constant(ctx, f"@get_dsr(dsr_{kind}, 1)", name) for kind, name in names_of)
    for register in (to, at):
        add_line(ctx, f"@load_to_dsr({register}, {into}, .{{ .save_address = false }});")
    if walks:
        first = _offset_dsd(text, x, names[:-1]) if names[:-1] else text
        add_line(ctx, f"@load_to_dsr({row}, {first}, .{{ .save_address = true }});")
    with open_block(ctx, loop):
        add_line(ctx, f"{builtin}({to}, {at}, {row if walks else _offset_dsd(text, x, names)}, {factor});")


def _emit_outer_products(ctx: CslContext, out: PeArrayView, a: PeArrayView, b: PeArrayView, batch: list[str]) -> bool:
    """Add all products of a column and a row at a time."""
    shape, k = out.shape[-2:], f"k{next(ctx.names)}"
    products = allocate_array(ctx, shape, "f32")
    column = replace(a, shape=shape, strides=(a.strides[-2], 0))
    row = replace(b, shape=shape, strides=(0, b.strides[-1]))
    total = replace(out, shape=shape, strides=out.strides[-2:])
    parts = [get_dsd(ctx, v, shape) for v in (products, column, row)]
    sizes, (flat, into) = coalesce_axes([products, total])
    sums = [get_dsd(ctx, v, sizes) for v in (flat, into)]
    steps = [a.strides[-1], b.strides[-2]]
    with open_block(ctx, f"for (@range(i16, {a.shape[-1]})) |{k}|"):
        places = [
            _offset_batch_dsd(p, [v.strides[: len(batch)], batch], _format_product(k, s))
            for p, v, s in zip(parts[1:], (a, b), steps, strict=True)
        ]
        add_line(ctx, f"@fmuls({parts[0]}, {places[0]}, {places[1]});")
        target = _offset_batch_dsd(sums[1], [out.strides[: len(batch)], batch], "")
        add_line(ctx, f"@fadds({target}, {target}, {sums[0]});")
    release_view(ctx, products)
    return True


def _emit_inner_products(ctx: CslContext, out: PeArrayView, a: PeArrayView, b: PeArrayView, batch: list[str]) -> bool:
    """Compute one element of the result at a time."""
    summed, (m, n) = a.shape[-1], (f"{name}{next(ctx.names)}" for name in "mn")
    left, right = (replace(v, shape=(summed,), strides=(s,)) for v, s in ((a, a.strides[-1]), (b, b.strides[-2])))
    if max(abs(v.strides[0]) for v in (left, right)) > MAX_DSD_STRIDE:
        return False
    products = allocate_array(ctx, (summed,), "f32")
    parts = [get_dsd(ctx, v, (summed,)) for v in (products, left, right)]
    cell = get_dsd(ctx, replace(out, shape=(summed,), strides=(0,)), (summed,))
    rows, columns = out.shape[-2:]
    with open_block(ctx, f"for (@range(i16, {rows})) |{m}|"), open_block(ctx, f"for (@range(i16, {columns})) |{n}|"):
        one = _offset_batch_dsd(parts[1], [a.strides[: len(batch)], batch], _format_product(m, a.strides[-2]))
        other = _offset_batch_dsd(parts[2], [b.strides[: len(batch)], batch], _format_product(n, b.strides[-1]))
        add_line(ctx, f"@fmuls({parts[0]}, {one}, {other});")
        add_line(ctx, f"const into = {_offset_dsd(cell, out, [*batch, m, n])};")
        add_line(ctx, f"@fadds(into, into, {parts[0]});")
    release_view(ctx, products)
    return True


MATMUL_METHODS = {OUTER_PRODUCTS: _emit_outer_products, INNER_PRODUCTS: _emit_inner_products}
# Multiply-add DSD operations with a scalar factor, by the types of the sum and of the factors.
_MULTIPLY_ADD_BUILTINS = {("f32", "f32", "f32"): "@fmacs", ("f32", "f16", "f16"): "@fmachs"}


def _offset_dsd(text: str | None, x: PeArrayView, names: list[str]) -> str:
    """A DSD moved by indices of the first axes."""
    return f"@increment_dsd_offset({text}, {_format_offset(x, names)}, {x.type})"


def _offset_batch_dsd(text: str | None, batch: Any, first: str) -> str:
    """A DSD moved by an offset and by the batch index."""
    terms = [_format_product(n, s) for s, n in zip(*batch, strict=True) if s]
    terms += [first] if first else []
    return f"@increment_dsd_offset({text}, {' + '.join(terms)}, f32)" if terms else str(text)


def _get_row_dsd(ctx: CslContext, x: PeArrayView) -> str | None:
    """The DSD of the first row of a matrix."""
    if x.literal or not -128 < x.strides[-1] < 128:
        return None
    return get_dsd(ctx, replace(x, shape=(x.shape[-1],), strides=(x.strides[-1],)), (x.shape[-1],))


def _format_offset(x: PeArrayView, names: list[str]) -> str:
    return " + ".join(_format_product(n, s) for n, s in zip(names, x.strides, strict=False) if s) or "0"


def _format_product(name: str, stride: int) -> str:
    return name if stride == 1 else f"{name} * {stride}"
