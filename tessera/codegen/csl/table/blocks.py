"""Block ops: one DSD operation on the whole block where CSL has one, else a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.codegen.csl.passes.pointwise_fusion import find_deferred_nodes, find_emission_points, find_last_uses
from tessera.codegen.csl.table.scalars import (
    NARROWING_CASTS,
    format_expression,
    format_literal,
    format_narrowing,
    format_widening,
)
from tessera.codegen.csl.table.scalars import pointwise_rows as scalar_rows
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
from tessera.codegen.csl.text.pe_program import CslEmitter, make_unsupported_error
from tessera.codegen.legality import check_default_policy
from tessera.codegen.small_floats import SMALL_FLOAT_FORMATS
from tessera.core.types import bool_, f16, f32, int16, int64
from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import mesh, tile
from tessera.ops.tensor import basic, reduce, shape
from tessera.ops.tensor import elementwise as e

# row(element, node, *views) emits a node and gives where its result lies.
emit = Rules("csl emission")

# Operations on whole blocks, by op and element type: what rounds once in 16 bits is as if computed in f32.
_FLOAT_BUILTINS = {e.add: "@fadd", e.sub: "@fsub", e.mul: "@fmul", e.neg: "@fneg", e.abs: "@fabs"}
_BITWISE_BUILTINS = {e.bitwise_and: "@and16", e.bitwise_or: "@or16", e.bitwise_xor: "@xor16"}
DSD_BUILTINS = {
    **{(op, f32): f"{name}s" for op, name in _FLOAT_BUILTINS.items()},
    **{(op, f16): f"{name}h" for op, name in _FLOAT_BUILTINS.items()},
    **{(op, dtype): name for op, name in _BITWISE_BUILTINS.items() for dtype in (int16, bool_)},
    (e.add, int16): "@add16",
    (e.sub, int16): "@sub16",
}
DSD_CONVERSIONS = {(f16, f32): "@fh2s", (f32, f16): "@fs2h"}
REDUCTION_STEPS = {"sum": ("@fadds", "{0} + {1}"), "max": ("@fmaxs", "if ({1} > {0} or {1} != {1}) {1} else {0}"),
          "min": ("", "if ({1} < {0} or {1} != {1}) {1} else {0}")}  # fmt: skip


def emit_block(element: CslEmitter, block: Block) -> None:
    """Emit the nodes of a block; values that nothing needs any more give their room back."""
    later = find_deferred_nodes(block, _needs_loop, scalar_rows.__contains__) if element.fuses else {}
    element.deferred_nodes.update(later)
    last, params = find_last_uses(block, find_emission_points(block, later)), frozenset(block.params)
    for place, node in enumerate(block.nodes):
        if node.results and node.results[0] in later:
            check_default_policy(node, "csl")
            continue
        element.params, element.last_used_values = params, frozenset(last.get(place, ()))
        row = emit.get(node.op)
        if row is None:
            raise make_unsupported_error(node, "there is no rule for it")
        check_default_policy(node, "csl")
        _emit_source_comment(element, node)
        found = row(element, node, *(element.values.get(v) for v in node.args))
        if isinstance(found, PeArrayView):
            element.hold(node.out, found)
        for value in last.get(place, ()):
            if value not in params:  # their room is the loop's
                element.drop(value)


def _emit_source_comment(element: CslEmitter, node: Node) -> None:
    """Name the source line where it changes."""
    text = f"// {node.loc}"
    if node.loc.line and element.comment != text:
        element.comment = text
        element.add_line(text)


@emit(*(op for op in scalar_rows))
def _(element, node, *operands):
    if not node.out.type.shape and all(v.literal for v in operands):
        texts = [v.literal for v in operands]
        return PeArrayView(spell_type(node.out.type), (), literal=format_expression(element, node, texts, index=True))
    out = element.allocate_for(node.out.type)
    if node.op is e.where and all(operands) and not any(operands[0].broadcast_axes(out.shape).strides):
        _emit_uniform_select(element, out, *operands)
        return out
    # Only those that take two operands in either order take a number first; subtraction of floats does as well.
    plain = all(operands) and not all(v.literal for v in operands)
    if plain and not _needs_loop(node) and not (_find_builtin(node) == "@sub16" and operands[0].literal):
        if element.operation(str(_find_builtin(node)), [out, *(v.broadcast_axes(out.shape) for v in operands)]):
            return out
    leaves = _find_fusion_inputs(element, node)
    views = [cast_index_literal(element.values[v].broadcast_axes(out.shape), v) for v in leaves]
    element.loop(
        [out, *views], lambda t: _emit_fused_statement(element, node, dict(zip(leaves, t[1:], strict=True)), t[0])
    )
    return out


def _emit_uniform_select(
    element: CslEmitter, out: PeArrayView, condition: PeArrayView, x: PeArrayView, y: PeArrayView
) -> None:
    """One block or another, where the condition is the same for all of it."""
    truth = condition.broadcast_axes(out.shape).at(["0"] * len(out.shape))
    for head, chosen in ((f"if ({truth} != 0)", x), ("else", y)):
        with element.inner(head):
            element.copy(out, chosen.broadcast_axes(out.shape))


def _needs_loop(node: Node) -> bool:
    """Whether a pointwise node needs a loop, having no operation on whole blocks."""
    return _find_builtin(node) is None


def _find_builtin(node: Node) -> str | None:
    """The operation on whole blocks that a pointwise node is, if there is one."""
    types = tuple(t.dtype for t in (*node.types, node.out.type))
    if node.op is basic.cast:
        return DSD_CONVERSIONS.get(types)  # type: ignore[arg-type]
    return DSD_BUILTINS.get((node.op, types[0])) if len(set(types)) == 1 else None


def _find_fusion_inputs(element: CslEmitter, node: Node) -> list[Value]:
    """The values that lie somewhere from which a node, with what is deferred to it, is computed."""
    found: dict[Value, None] = {}
    for value in node.args:
        found.update(
            dict.fromkeys(
                _find_fusion_inputs(element, element.deferred_nodes[value])
                if value in element.deferred_nodes
                else [value]
            )
        )
    return list(found)


def _emit_fused_statement(element: CslEmitter, node: Node, texts: dict[Value, str], target: str) -> str:
    """The statements that compute a node at one place, what is deferred to it first."""
    lines: list[str] = []

    def made(value: Value) -> str:
        if value not in texts:
            inner = element.deferred_nodes[value]
            text = format_expression(element, inner, [made(a) for a in inner.args])
            texts[value] = f"v{next(element.names)}"
            lines.append(f"const {texts[value]}: {CSL_TYPES[inner.out.type.dtype]} = {text};")
        return texts[value]

    lines.append(f"{target} = {format_expression(element, node, [made(a) for a in node.args])};")
    return "\n".join(lines)


def cast_index_literal(view: PeArrayView, value: Value) -> PeArrayView:
    """A view whose text has the type of its value: an index is of 32 bits, or a plain number."""
    known = view.literal and value.type.dtype == int64
    return replace(view, literal=f"@as(i64, {view.literal})") if known else view


@emit(basic.full)
def _(element, node):
    text = format_literal(node.attrs["value"], node.attrs["dtype"])
    return PeArrayView(spell_type(node.out.type), tuple(node.attrs["shape"]), literal=text)


@emit(basic.broadcast_to)
def _(element, node, x):
    return x.broadcast_axes(tuple(node.attrs["shape"]))


@emit(shape.permute)
def _(element, node, x):
    return x.permute_axes([a % len(x.shape) for a in node.attrs["axes"]])


@emit(shape.reshape)
def _(element, node, x):
    wanted = tuple(node.attrs["shape"])
    found = x.reshape_view(wanted)
    if found is None:
        found = element.plain(x).reshape_view(wanted)
    return found


@emit(shape.iota)
def _(element, node):
    sizes, axis = tuple(node.attrs["shape"]), node.attrs["axis"] % len(node.attrs["shape"])
    out = element.allocate_for(node.out.type)
    row = element.allocate((sizes[axis],), out.type)
    with element.inner(f"for (@range(i16, {sizes[axis]})) |place|"):
        element.add_line(
            f"{row.at(['place'])} = "
            f"{NARROWING_CASTS.get(node.attrs['dtype'], f'@as({out.type}, {{0}})').format('place')};"
        )
    spread = tuple(1 if a == axis else 0 for a in range(len(sizes)))
    element.copy(out, PeArrayView(out.type, sizes, row.buffer, 0, spread))
    element.release(row)
    return out


@emit(tile.program_id)
def _(element, node):
    places = [name for name, _ in element.programs] or ["row", "column"]
    return PeArrayView("i32", (), literal=(*places, "0", "0")[node.attrs["axis"]])


@emit(tile.grid_size)
def _(element, node):
    sizes = [size for _, size in element.programs] or element.grid
    return PeArrayView("i32", (), literal=str((*sizes, 1, 1)[node.attrs["axis"]]))


@emit(tile.local_id, tile.group_size)
def _(element, node):
    return PeArrayView("i32", (), literal=str(int(node.op is tile.group_size)))


@emit(reduce.sum, reduce.max, reduce.min)
def _(element, node, x):
    out, dtype = element.allocate_for(node.out.type), node.types[0].dtype
    if dtype not in SMALL_FLOAT_FORMATS:
        _emit_reduction(element, node, out, x)
        return out
    wide, total = element.allocate(x.shape, "f32"), element.allocate(out.shape, "f32")
    element.loop([wide, x], lambda t: f"{t[0]} = {format_widening(element, dtype, t[1])};")
    _emit_reduction(element, node, total, wide)
    element.loop([out, total], lambda t: f"{t[0]} = {format_narrowing(element, node.out.type.dtype, t[1])};")
    element.release(wide)
    element.release(total)
    return out


def _emit_reduction(element: CslEmitter, node: Node, out: PeArrayView, x: PeArrayView) -> None:
    """Reduce along a node's axes."""
    kind, axes = node.op.__name__, [a % len(x.shape) for a in node.attrs["axis"]]
    builtin, step = REDUCTION_STEPS[kind]
    zero = PeArrayView(out.type, out.shape, literal="0.0" if out.type in FLOAT_TYPES else "0")
    element.copy(out, zero if kind == "sum" else _take_first_slice(x, axes, out.shape))
    kept = iter(out.strides if not node.attrs["keepdims"] else [s for a, s in enumerate(out.strides) if a not in axes])
    wide = PeArrayView(
        out.type, x.shape, out.buffer, 0, tuple(0 if a in axes else next(kept) for a in range(len(x.shape)))
    )
    if not (
        x.type == out.type == "f32"
        and builtin
        and not x.literal
        and _emit_dsd_reduction(element, builtin, wide, x, axes)
    ):
        element.loop([wide, x], lambda t: f"{t[0]} = {step.format(t[0], f'@as({out.type}, {t[1]})')};")


def _emit_dsd_reduction(
    element: CslEmitter, builtin: str, out: PeArrayView, x: PeArrayView, axes: Sequence[int]
) -> bool:
    """Reduce by an operation for each element that is kept, or for each that is not: whichever are fewer."""
    kept = [a for a in range(len(x.shape)) if a not in axes]
    pairs = (coalesce_axes([_select_axes(v, group) for v in (out, x)]) for group in (kept, list(axes)))
    (held, (into, along)), (gone, (_, across)) = pairs
    if max(len(held), len(gone)) > 1 or not count_elements(x.shape):
        return False
    size, length = (*held, 1)[0], (*gone, 1)[0]
    steps = (*into.strides, 0)[0], (*along.strides, 0)[0], (*across.strides, 0)[0]
    outer, inner = (length, size) if size >= length else (size, length)
    strides = (steps[0], steps[1], 0, steps[2]) if size >= length else (0, steps[2], steps[0], steps[1])
    if max(map(abs, strides[:2])) > MAX_DSD_STRIDE:
        return False
    target, source = (
        element.get_dsd(PeArrayView(v.type, (inner,), v.buffer, v.offset, (s,)), (inner,))
        for v, s in ((out, strides[0]), (x, strides[1]))
    )
    name = f"r{next(element.names)}"
    with element.inner(f"for (@range(i16, {outer})) |{name}|"):
        element.add_line(f"const into = @increment_dsd_offset({target}, {name} * {strides[2]}, f32);")
        element.add_line(f"{builtin}(into, into, @increment_dsd_offset({source}, {name} * {strides[3]}, f32));")
    return True


def _select_axes(x: PeArrayView, axes: Sequence[int]) -> PeArrayView:
    """A view walked along some of its axes alone."""
    return PeArrayView(x.type, tuple(x.shape[a] for a in axes), x.buffer, x.offset, tuple(x.strides[a] for a in axes))


def _take_first_slice(x: PeArrayView, axes: Sequence[int], shape_: tuple[int, ...]) -> PeArrayView:
    """The first element along the reduced axes."""
    if x.literal:
        return replace(x, shape=shape_)
    kept = [s for a, s in enumerate(x.strides) if a not in axes]
    strides = tuple(kept) if len(kept) == len(shape_) else tuple(0 if a in axes else s for a, s in enumerate(x.strides))
    return PeArrayView(x.type, shape_, x.buffer, x.offset, strides)


@emit(mesh.read)
def _(element, node, ref):
    sizes = tuple(node.attrs["shape"])
    buffer = element.declare(node.args[0], sizes)
    return PeArrayView(buffer.type, sizes, buffer, 0, make_row_major_strides(sizes))


@emit(mesh.write)
def _(element, node, ref, value):
    if element.export_in_place(node.args[0], value):
        return None
    buffer = element.declare(node.args[0], node.args[1].type.shape)
    element.copy(PeArrayView(buffer.type, value.shape, buffer, 0, make_row_major_strides(value.shape)), value)
    return None
