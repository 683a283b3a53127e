"""Block ops: one DSD operation on the whole block where CSL has one, otherwise a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.codegen.contract import check_default_policy
from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.csl.passes.pointwise_fusion import find_deferred_nodes, find_emission_points, find_last_uses
from tessera.codegen.csl.table import REFUSED
from tessera.codegen.csl.table.scalars import (
    NARROWING_CASTS,
    format_expression,
    format_literal,
    format_narrowing,
    format_widening,
    narrows_operands,
)
from tessera.codegen.csl.table.scalars import pointwise_rows as scalar_rows
from tessera.codegen.csl.text.context import CslContext
from tessera.codegen.csl.text.dsd import (
    CSL_TYPES,
    FLOAT_TYPES,
    MAX_DSD_STRIDE,
    PeArrayView,
    coalesce_axes,
    count_elements,
    make_row_major_strides,
    spell_type,
)
from tessera.codegen.csl.text.memory_allocation import (
    allocate_array,
    allocate_for,
    bind_value,
    declare_array,
    drop_value,
    export_in_place,
    release_view,
)
from tessera.codegen.csl.text.statements import (
    add_line,
    cast_to_index,
    emit_copy,
    emit_dsd_operation,
    emit_loop,
    get_dsd,
    make_contiguous,
    open_block,
)
from tessera.core.types import bool_, f16, f32, int16, int64, uint16
from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import Rules
from tessera.lower.scalar_functions.small_floats import SMALL_FLOAT_FORMATS
from tessera.ops.dialects import mesh, tile
from tessera.ops.tensor import basic, reduce, shape
from tessera.ops.tensor import elementwise as e

# The variable of a program that the host runs in rounds: the number of the round.
ROUND = "round"

# row(ctx, node, *views) emits a node and returns the view of its result.
emit = Rules("csl emission")

# DSD operations, by op and element type. One rounding to 16 bits gives the same value as f32 arithmetic.
_FLOAT_BUILTINS = {e.add: "@fadd", e.sub: "@fsub", e.mul: "@fmul", e.neg: "@fneg", e.abs: "@fabs"}
_BITWISE_BUILTINS = {e.bitwise_and: "@and16", e.bitwise_or: "@or16", e.bitwise_xor: "@xor16"}
DSD_BUILTINS = {
    **{(op, f32): f"{name}s" for op, name in _FLOAT_BUILTINS.items()},
    **{(op, f16): f"{name}h" for op, name in _FLOAT_BUILTINS.items()},
    **{(op, dtype): name for op, name in _BITWISE_BUILTINS.items() for dtype in (int16, uint16, bool_)},
    **{(op, dtype): name for op, name in ((e.add, "@add16"), (e.sub, "@sub16")) for dtype in (int16, uint16)},
}
DSD_CONVERSIONS = {(f16, f32): "@fh2s", (f32, f16): "@fs2h"}
REDUCTION_STEPS = {"sum": ("@fadds", "{0} + {1}"), "max": ("@fmaxs", "if ({1} > {0} or {1} != {1}) {1} else {0}"),
          "min": ("", "if ({1} < {0} or {1} != {1}) {1} else {0}")}  # fmt: skip


def emit_block(ctx: CslContext, block: Block) -> None:
    """Emit the nodes of a block; free the array of each value after its last use."""
    later = find_deferred_nodes(block, _needs_loop, scalar_rows.__contains__) if ctx.fuses else {}
    ctx.deferred_nodes.update(later)
    last, params = find_last_uses(block, find_emission_points(block, later)), frozenset(block.params)
    for position, node in enumerate(block.nodes):
        if node.results and node.results[0] in later:
            check_default_policy(node, "csl")
            continue
        ctx.params, ctx.last_used_values = params, frozenset(last.get(position, ()))
        row = emit.get(node.op)
        if row is None:
            raise make_refusal_error("csl", node, REFUSED)
        check_default_policy(node, "csl")
        _emit_source_comment(ctx, node)
        result = row(ctx, node, *(ctx.values.get(v) for v in node.args))
        if isinstance(result, PeArrayView):
            bind_value(ctx, node.out, result)
        for value in last.get(position, ()):
            if value not in params:  # the loop owns their arrays
                drop_value(ctx, value)


def _emit_source_comment(ctx: CslContext, node: Node) -> None:
    """Emit a comment with the source line where it changes."""
    text = f"// {node.loc}"
    if node.loc.line and ctx.comment != text:
        ctx.comment = text
        add_line(ctx, text)


@emit(*(op for op in scalar_rows))
def _(ctx, node, *operands):
    if not node.out.type.shape and all(v.literal for v in operands):
        texts = [v.literal for v in operands]
        return PeArrayView(spell_type(node.out.type), (), literal=format_expression(ctx, node, texts, index=True))
    out = allocate_for(ctx, node.out.type)
    if node.op is e.where and all(operands) and not any(operands[0].broadcast_axes(out.shape).strides):
        _emit_uniform_select(ctx, out, *operands)
        return out
    # Only commutative DSD operations and float subtraction take a scalar as the first operand.
    plain = all(operands) and not all(v.literal for v in operands)
    if plain and not _needs_loop(node) and not (_find_builtin(node) == "@sub16" and operands[0].literal):
        if emit_dsd_operation(ctx, str(_find_builtin(node)), [out, *(v.broadcast_axes(out.shape) for v in operands)]):
            return out
    leaves = _find_fusion_inputs(ctx, node)
    views = [cast_index_literal(ctx.values[v].broadcast_axes(out.shape), v) for v in leaves]
    emit_loop(
        ctx, [out, *views], lambda t: _emit_fused_statement(ctx, node, dict(zip(leaves, t[1:], strict=True)), t[0])
    )
    return out


def _emit_uniform_select(
    ctx: CslContext, out: PeArrayView, condition: PeArrayView, x: PeArrayView, y: PeArrayView
) -> None:
    """Select one of two blocks by a condition that is uniform over the block."""
    truth = condition.broadcast_axes(out.shape).at(["0"] * len(out.shape))
    for head, chosen in ((f"if ({truth} != 0)", x), ("else", y)):
        with open_block(ctx, head):
            emit_copy(ctx, out, chosen.broadcast_axes(out.shape))


def _needs_loop(node: Node) -> bool:
    """Whether a pointwise node has no DSD operation and needs a loop."""
    return _find_builtin(node) is None


def _find_builtin(node: Node) -> str | None:
    """The DSD operation of a pointwise node, or None."""
    types = tuple(t.dtype for t in (*node.types, node.out.type))
    if narrows_operands(node):
        return None
    if node.op is basic.cast:
        return DSD_CONVERSIONS.get(types)  # type: ignore[arg-type]
    return DSD_BUILTINS.get((node.op, types[0])) if len(set(types)) == 1 else None


def _find_fusion_inputs(ctx: CslContext, node: Node) -> list[Value]:
    """The values in memory that a node and the nodes fused into it read."""
    inputs: dict[Value, None] = {}
    for value in node.args:
        inputs.update(
            dict.fromkeys(
                _find_fusion_inputs(ctx, ctx.deferred_nodes[value]) if value in ctx.deferred_nodes else [value]
            )
        )
    return list(inputs)


def _emit_fused_statement(ctx: CslContext, node: Node, texts: dict[Value, str], target: str) -> str:
    """The loop body of a node: first the nodes fused into it, then the node."""
    lines: list[str] = []
    operands = [_format_fused_value(ctx, value, texts, lines) for value in node.args]
    lines.append(f"{target} = {format_expression(ctx, node, operands)};")
    return "\n".join(lines)


def _format_fused_value(ctx: CslContext, value: Value, texts: dict[Value, str], lines: list[str]) -> str:
    """The text of a value; a value of a fused node becomes a constant in the lines."""
    if value not in texts:
        inner = ctx.deferred_nodes[value]
        text = format_expression(ctx, inner, [_format_fused_value(ctx, a, texts, lines) for a in inner.args])
        texts[value] = f"v{next(ctx.names)}"
        lines.append(f"const {texts[value]}: {CSL_TYPES[inner.out.type.dtype]} = {text};")
    return texts[value]


def cast_index_literal(view: PeArrayView, value: Value) -> PeArrayView:
    """The view with a literal index cast to i64, the type of its value."""
    is_literal_index = view.literal and value.type.dtype == int64
    return replace(view, literal=f"@as(i64, {view.literal})") if is_literal_index else view


@emit(basic.full)
def _(ctx, node):
    text = format_literal(node.attrs["value"], node.attrs["dtype"])
    return PeArrayView(spell_type(node.out.type), tuple(node.attrs["shape"]), literal=text)


@emit(basic.broadcast_to)
def _(ctx, node, x):
    return x.broadcast_axes(tuple(node.attrs["shape"]))


@emit(shape.permute)
def _(ctx, node, x):
    return x.permute_axes([a % len(x.shape) for a in node.attrs["axes"]])


@emit(shape.reshape)
def _(ctx, node, x):
    target_shape = tuple(node.attrs["shape"])
    view = x.reshape_view(target_shape)
    if view is None:
        view = make_contiguous(ctx, x).reshape_view(target_shape)
    return view


@emit(shape.iota)
def _(ctx, node):
    sizes, axis = tuple(node.attrs["shape"]), node.attrs["axis"] % len(node.attrs["shape"])
    out = allocate_for(ctx, node.out.type)
    row = allocate_array(ctx, (sizes[axis],), out.type)
    with open_block(ctx, f"for (@range(i16, {sizes[axis]})) |place|"):
        add_line(
            ctx,
            f"{row.at(['place'])} = "
            f"{NARROWING_CASTS.get(node.attrs['dtype'], f'@as({out.type}, {{0}})').format('place')};",
        )
    spread = tuple(1 if a == axis else 0 for a in range(len(sizes)))
    emit_copy(ctx, out, PeArrayView(out.type, sizes, row.buffer, 0, spread))
    release_view(ctx, row)
    return out


@emit(tile.program_id)
def _(ctx, node):
    places = [name for name, _ in ctx.programs] or [cast_to_index(ctx, name) for name in ("row", "column", ROUND)]
    return PeArrayView("i32", (), literal=(*places, "0", "0")[node.attrs["axis"]])


@emit(tile.grid_size)
def _(ctx, node):
    sizes = [size for _, size in ctx.programs] or ctx.grid
    return PeArrayView("i32", (), literal=str((*sizes, 1, 1)[node.attrs["axis"]]))


@emit(tile.local_id, tile.group_size)
def _(ctx, node):
    return PeArrayView("i32", (), literal=str(int(node.op is tile.group_size)))


@emit(reduce.sum, reduce.max, reduce.min)
def _(ctx, node, x):
    out, dtype = allocate_for(ctx, node.out.type), node.types[0].dtype
    if dtype not in SMALL_FLOAT_FORMATS:
        if node.op is reduce.sum and out.type in ("f16", "half") and node.types[0].accumulate == f32:
            _emit_widened_sum(ctx, node, out, x)
        else:
            _emit_reduction(ctx, node, out, x)
        return out
    wide, total = allocate_array(ctx, x.shape, "f32"), allocate_array(ctx, out.shape, "f32")
    emit_loop(ctx, [wide, x], lambda t: f"{t[0]} = {format_widening(ctx, dtype, t[1])};")
    _emit_reduction(ctx, node, total, wide)
    emit_loop(ctx, [out, total], lambda t: f"{t[0]} = {format_narrowing(ctx, node.out.type.dtype, t[1])};")
    release_view(ctx, wide)
    release_view(ctx, total)
    return out


def _emit_widened_sum(ctx: CslContext, node: Node, out: PeArrayView, x: PeArrayView) -> None:
    """A sum of 16-bit floats, which accumulates in f32 and is rounded once."""
    total = allocate_array(ctx, out.shape, "f32")
    _emit_reduction(ctx, node, total, x)
    emit_loop(ctx, [out, total], lambda t: f"{t[0]} = @as({out.type}, {t[1]});")
    release_view(ctx, total)


def _emit_reduction(ctx: CslContext, node: Node, out: PeArrayView, x: PeArrayView) -> None:
    """Reduce along the axes of a node."""
    kind, axes = node.op.__name__, [a % len(x.shape) for a in node.attrs["axis"]]
    builtin, step = REDUCTION_STEPS[kind]
    zero = PeArrayView(out.type, out.shape, literal="0.0" if out.type in FLOAT_TYPES else "0")
    emit_copy(ctx, out, zero if kind == "sum" else _take_first_slice(x, axes, out.shape))
    kept = iter(out.strides if not node.attrs["keepdims"] else [s for a, s in enumerate(out.strides) if a not in axes])
    wide = PeArrayView(
        out.type, x.shape, out.buffer, 0, tuple(0 if a in axes else next(kept) for a in range(len(x.shape)))
    )
    if not (
        x.type == out.type == "f32" and builtin and not x.literal and _emit_dsd_reduction(ctx, builtin, wide, x, axes)
    ):
        emit_loop(ctx, [wide, x], lambda t: f"{t[0]} = {step.format(t[0], f'@as({out.type}, {t[1]})')};")


def _emit_dsd_reduction(ctx: CslContext, builtin: str, out: PeArrayView, x: PeArrayView, axes: Sequence[int]) -> bool:
    """Reduce with one DSD operation per kept element or per reduced element, whichever takes fewer operations."""
    kept = [a for a in range(len(x.shape)) if a not in axes]
    pairs = (coalesce_axes([_select_axes(v, group) for v in (out, x)]) for group in (kept, list(axes)))
    (kept_shape, (into, along)), (reduced_shape, (_, across)) = pairs
    if max(len(kept_shape), len(reduced_shape)) > 1 or not count_elements(x.shape):
        return False
    size, length = (*kept_shape, 1)[0], (*reduced_shape, 1)[0]
    steps = (*into.strides, 0)[0], (*along.strides, 0)[0], (*across.strides, 0)[0]
    outer, inner = (length, size) if size >= length else (size, length)
    strides = (steps[0], steps[1], 0, steps[2]) if size >= length else (0, steps[2], steps[0], steps[1])
    if max(map(abs, strides[:2])) > MAX_DSD_STRIDE:
        return False
    target, source = (
        get_dsd(ctx, PeArrayView(v.type, (inner,), v.buffer, v.offset, (s,)), (inner,))
        for v, s in ((out, strides[0]), (x, strides[1]))
    )
    name = f"r{next(ctx.names)}"
    with open_block(ctx, f"for (@range(i16, {outer})) |{name}|"):
        add_line(ctx, f"const into = @increment_dsd_offset({target}, {name} * {strides[2]}, f32);")
        add_line(ctx, f"{builtin}(into, into, @increment_dsd_offset({source}, {name} * {strides[3]}, f32));")
    return True


def _select_axes(x: PeArrayView, axes: Sequence[int]) -> PeArrayView:
    """The view restricted to some axes."""
    return PeArrayView(x.type, tuple(x.shape[a] for a in axes), x.buffer, x.offset, tuple(x.strides[a] for a in axes))


def _take_first_slice(x: PeArrayView, axes: Sequence[int], shape_: tuple[int, ...]) -> PeArrayView:
    """The first element along the reduced axes."""
    if x.literal:
        return replace(x, shape=shape_)
    kept = [s for a, s in enumerate(x.strides) if a not in axes]
    strides = tuple(kept) if len(kept) == len(shape_) else tuple(0 if a in axes else s for a, s in enumerate(x.strides))
    return PeArrayView(x.type, shape_, x.buffer, x.offset, strides)


@emit(mesh.read, mesh.window)
def _(ctx, node, ref):
    sizes = tuple(node.attrs["shape"])
    buffer = declare_array(ctx, node.args[0], sizes)
    return PeArrayView(buffer.type, sizes, buffer, 0, make_row_major_strides(sizes))


@emit(mesh.write, mesh.copy_back)
def _(ctx, node, ref, value):
    held = ctx.symbols.get(node.args[0])
    in_place = held is not None and held is value.buffer  # a window that the program changed in place
    if not in_place and not export_in_place(ctx, node.args[0], value):
        buffer = declare_array(ctx, node.args[0], node.args[1].type.shape)
        emit_copy(ctx, PeArrayView(buffer.type, value.shape, buffer, 0, make_row_major_strides(value.shape)), value)
    return None
