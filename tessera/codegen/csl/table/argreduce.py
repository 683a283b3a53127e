"""Arg reductions: the index of the largest or smallest element along an axis of a block."""

from __future__ import annotations

from tessera.codegen.csl.table.blocks import emit
from tessera.codegen.csl.table.memory import loop_over_elements
from tessera.codegen.csl.text.dsd import PeArrayView
from tessera.codegen.csl.text.faults import make_unsupported_error
from tessera.codegen.csl.text.memory_allocation import allocate_for
from tessera.codegen.csl.text.statements import add_line, open_block
from tessera.lower.scalar_functions.small_floats import SMALL_FLOAT_FORMATS
from tessera.ops.tensor import reduce

ARG_COMPARISONS = {reduce.argmax: ">", reduce.argmin: "<"}


@emit(*ARG_COMPARISONS)
def _(ctx, node, x):
    if node.types[0].dtype in SMALL_FLOAT_FORMATS:
        raise make_unsupported_error(node, f"CSL has no comparison of {node.types[0].dtype}; cast to f32 first")
    axis, out = node.attrs["axis"] % len(x.shape), allocate_for(ctx, node.out.type)
    kept = tuple(n for a, n in enumerate(x.shape) if a != axis)
    level = PeArrayView(
        out.type, kept, out.buffer, out.offset, _drop_axis_stride(out, axis, bool(node.attrs["keepdims"]))
    )
    best, place, step = (f"{name}{next(ctx.names)}" for name in ("best", "place", "step"))
    beats = ARG_COMPARISONS[node.op]
    with loop_over_elements(ctx, kept) as names:
        first, present = (x.at([*names[:axis], at, *names[axis:]]) for at in ("0", step))
        add_line(ctx, f"var {best}: {x.type} = {first};")
        add_line(ctx, f"var {place}: i16 = 0;")
        with open_block(ctx, f"for (@range(i16, {x.shape[axis]})) |{step}|"):
            condition = f"{present} {beats} {best}"
            if node.types[0].dtype.is_float:  # the first NaN wins
                condition = f"{best} == {best} and ({condition} or {present} != {present})"
            add_line(ctx, f"if ({condition}) {{ {best} = {present}; {place} = {step}; }}")
        add_line(ctx, f"{level.at(names)} = @as({out.type}, {place});")
    return out


def _drop_axis_stride(out: PeArrayView, axis: int, kept: bool) -> tuple[int, ...]:
    """The strides without that of the reduced axis."""
    return tuple(s for a, s in enumerate(out.strides) if not kept or a != axis)
