"""Loop fusion: loop nests over blocks, which compute the elements of fused producers at the consumer's index.

Outer axes are scalar loops; the innermost one is strip-mined into vectors with a masked remainder.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tessera.codegen.contract import get_tensor_type, static_shape
from tessera.codegen.llvm.table import index_sets, scalar_functions
from tessera.codegen.llvm.table.emission import RowTypes, find_row
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import (
    NARROW_FLOATS,
    ZERO_LANE,
    LaneIndex,
    LaneKind,
    LaneValue,
    LoopBody,
    LoopBuilder,
    RegisterType,
    format_literal,
    get_element_bytes,
    get_register_type,
    is_number,
)
from tessera.codegen.llvm.text.memory import StridedMemRef, fit_vector_width, store_lane
from tessera.core.types import DType, TensorType, bool_, f32, int4, int64, join_compute_types
from tessera.ir.core import Node, Value
from tessera.ir.rules import COMPUTE, Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, bits, elementwise, random, shape

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


# Element rules: rule(body, node, index) computes the elements of a fused node at an index.

element_rule = Rules("llvm element")


def emit_element(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    """The elements of a value at an index; computed once in a loop body."""
    known = body.kernel.scalars.get(v)
    if known is not None:
        return LaneValue(known, span=body.kernel.assumed.get(v))
    memo = body.find_memo(*index)
    if (v, index) not in memo:
        with body.hoist(*index):
            memo[v, index] = _compute_element(body, v, index)
    return memo[v, index]


def _compute_element(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    kernel = body.kernel
    stored = kernel.buffers.get(v)
    if stored is not None:
        return round_accumulator(body, v, stored.dtype, memory.load_lane(body, stored, index))
    node = kernel.producers[v]
    with kernel.at_node(node):
        lane: LaneValue = (element_rule.get(node.op) or emit_pointwise)(body, node, index)
        if v in kernel.joined:
            store_lane(body, kernel.joined[v], index, lane)
        return lane


def round_accumulator(body: LoopBody, v: Value, wide: DType, lane: LaneValue) -> LaneValue:
    """A value stored in a wider type than its own (a dot's accumulator), rounded to its own type."""
    return round_to_storage(body, get_tensor_type(v), wide, lane)


def round_to_storage(body: LoopBody, type: TensorType, wide: DType, lane: LaneValue) -> LaneValue:
    """A value of the compute type, rounded to a storage type by its policy."""
    if wide == type.dtype and wide is not int4 and not scalar_functions.is_special_policy(type.policy):
        return lane
    return emit_operation(
        body, lambda width, d, x: scalar_functions.round_by_policy(wide, type, width, d, x), [(lane, wide)]
    )


def emit_operation(body: LoopBody, lines: Any, operands: Sequence[tuple[LaneValue, DType]]) -> LaneValue:
    """The lane value that `lines(width, d, *names)` defines; hoisted if all operands are invariant."""
    lanes = [lane for lane, _ in operands]
    width = body.width_of(*lanes)
    with body.hoist(*lanes):
        names = [body.broadcast_lane(lane, get_register_type(dtype, width)) for lane, dtype in operands]
        d = body.text.new_name()
        body.text.lines(lines(width, d, *names))
    return LaneValue(d, body.kind_of(*lanes))


def emit_pointwise(body: LoopBody, node: Node, index: LaneIndex) -> LaneValue:
    """A pointwise op: operands are widened to the compute type, the result is rounded to its storage type."""
    lanes = [emit_element(body, v, index) for v in node.args]
    known = index_sets.compare_spans(node, lanes) or _shift_ramp(body, node, lanes)
    if known is not None:
        return known
    emission, compute_types = find_row(node), [_choose_compute_type(node, v) for v in node.args]
    compute_type, operands = join_compute_types(compute_types), []
    for v, lane, own in zip(node.args, lanes, compute_types, strict=True):
        wide = compute_type if own.is_float and compute_type.is_float else own
        operands.append((widen_lane(body, own, wide, widen_lane(body, v.type.dtype, own, lane)), wide))
    out = emit_operation(
        body,
        lambda width, d, *x: emission(RowTypes(get_register_type(compute_type, width), compute_type), d, *x),
        operands,
    )
    return _round_result(body, node, compute_type, out)


def _choose_compute_type(node: Node, v: Value) -> DType:
    return get_tensor_type(v).compute if node.op.numerics == COMPUTE else v.type.dtype


def widen_lane(body: LoopBody, source: DType, to: DType, lane: LaneValue) -> LaneValue:
    """A lane value converted to a wider type."""
    if scalar_functions.is_register_copy(source, to):
        return lane
    return emit_operation(
        body, lambda width, d, x: scalar_functions.cast_lanes(source, to, width, d, x), [(lane, source)]
    )


def _round_result(body: LoopBody, node: Node, wide: DType, lane: LaneValue) -> LaneValue:
    """A result rounded to its storage type; first to the compute type, if a policy names one that is narrow."""
    if node.op.numerics != COMPUTE:
        return lane
    type = get_tensor_type(node.out)
    if wide in NARROW_FLOATS and type.dtype.is_float:  # it is computed in registers of f32
        lane = round_to_storage(body, TensorType((), wide), f32, lane)
    return round_to_storage(body, type, wide, lane)


def _shift_ramp(body: LoopBody, node: Node, lanes: list[LaneValue]) -> LaneValue | None:
    """A ramp plus, minus or times a scalar as a ramp: accesses are recognised as contiguous or strided."""
    if node.op not in (elementwise.add, elementwise.sub, elementwise.mul) or node.out.type.dtype != int64:
        return None
    x, y = lanes
    if x.uniform and y.uniform:
        return _shift_index(body, node, x, y)
    if node.op is not elementwise.sub and x.uniform:
        x, y = y, x
    if node.op is elementwise.mul:
        scales = x.kind is LaneKind.RAMP and y.uniform and is_number(y.name)
        return scale_index(body, x, int(y.name)) if scales else None
    step = x.step if x.kind is LaneKind.RAMP else -y.step
    if not (x.kind is LaneKind.RAMP and y.uniform) and not (x.uniform and y.kind is LaneKind.RAMP):
        return None
    name = body.text.let(f"{'add' if node.op is elementwise.add else 'sub'} i64 {x.name}, {y.name}", "i")
    span = index_sets.shift_span(x, y, 1 if node.op is elementwise.add else -1)
    return LaneValue(name, LaneKind.RAMP, math.gcd(x.divisor, y.divisor), step, span=span)


def _shift_index(body: LoopBody, node: Node, x: LaneValue, y: LaneValue) -> LaneValue | None:
    """The sum or difference of two scalars whose least and greatest numbers are known."""
    span = index_sets.shift_span(x, y, 1 if node.op is elementwise.add else -1)
    if node.op is elementwise.mul or span is None:
        return None
    if span[0] == span[1]:
        return LaneValue(str(span[0]))
    with body.hoist(x, y):
        name = body.text.let(f"{'add' if node.op is elementwise.add else 'sub'} i64 {x.name}, {y.name}", "i")
    return LaneValue(name, body.kind_of(x, y), span=span)


@element_rule(elementwise.where)
def _(body, node, index):
    condition = emit_element(body, node.args[0], index)
    if condition.name in ("true", "false"):
        return emit_element(body, node.args[1 if condition.name == "true" else 2], index)
    return emit_pointwise(body, node, index)


@element_rule(elementwise.bitwise_and)
def _(body, node, index):
    lanes = [emit_element(body, v, index) for v in node.args]
    names = [lane.name for lane in lanes]
    if node.out.type.dtype == bool_ and {"true", "false"} & {*names}:
        # A constant decides, or leaves the other operand.
        return lanes[names.index("false")] if "false" in names else lanes[1 - names.index("true")]
    return emit_pointwise(body, node, index)


@element_rule(bits.bitcast_elements)
def _(body, node, index):
    source, to = node.args[0].type.dtype, node.attrs["dtype"]

    def lines(width: int, d: str, x: str) -> Any:
        yield f"{d} = bitcast {get_register_type(source, width)} {x} to {get_register_type(to, width)}"

    return emit_operation(body, lines, [(emit_element(body, node.args[0], index), source)])


@element_rule(random.round_by_chance)
def _(body, node, index):
    operands = [(emit_element(body, v, index), v.type.dtype) for v in node.args]
    return emit_operation(
        body, lambda width, d, *x: scalar_functions.round_stochastically(node.attrs["dtype"], width, d, *x), operands
    )


@element_rule(basic.full)
def _(body, node, index):
    return LaneValue(format_constant(node.attrs["value"], node.attrs["dtype"]))


@element_rule(basic.dim_value)
def _(body, node, index):
    return LaneValue(body.kernel.sizes.find(node.attrs["size"]))


def format_constant(value: Any, dtype: DType) -> str:
    """A constant as a literal of an element type, rounded to it."""
    number = dtype.numpy.type(value) if not dtype.is_float else _round_constant(value, dtype)
    return format_literal(get_register_type(dtype).element, number)


def _round_constant(value: Any, dtype: DType) -> float:
    return float(basic.full.ref(shape=(), value=value, dtype=dtype))


@element_rule(basic.broadcast_to)
def _(body, node, index):
    x = node.args[0]
    tail = index[len(index) - x.type.rank :]
    return emit_element(body, x, tuple(ZERO_LANE if n == 1 else i for n, i in zip(x.type.shape, tail, strict=True)))


@element_rule(shape.permute)
def _(body, node, index):
    inner = [ZERO_LANE] * len(index)
    for position, axis in enumerate(node.attrs["axes"]):
        inner[axis] = index[position]
    return emit_element(body, node.args[0], tuple(inner))


@element_rule(shape.reshape)
def _(body, node, index):
    x = node.args[0]
    return emit_element(body, x, map_reshaped_index(body, index, node.out.type.shape, x.type.shape))


def map_reshaped_index(
    body: LoopBody, index: LaneIndex, out_shape: tuple[int, ...], in_shape: tuple[int, ...]
) -> LaneIndex:
    """The index before a reshape, from shape `in_shape`, of the element at `index` in shape `out_shape`."""
    if [n for n in out_shape if n != 1] == [n for n in in_shape if n != 1]:
        stored = iter(i for i, n in zip(index, out_shape, strict=True) if n != 1)
        return tuple(ZERO_LANE if n == 1 else next(stored) for n in in_shape)
    kept = _count_common_inner_axes(out_shape, in_shape)
    inner = index[len(index) - kept :] if kept else ()
    outer = _delinearise_index(
        body, _linearise_index(body, index[: len(index) - kept], out_shape), in_shape[: len(in_shape) - kept]
    )
    return (*outer, *inner)


def _count_common_inner_axes(out_shape: tuple[int, ...], in_shape: tuple[int, ...]) -> int:
    """The number of last axes that a reshape leaves unchanged."""
    count = 0
    while count < min(len(out_shape), len(in_shape)) and out_shape[-1 - count] == in_shape[-1 - count]:
        count += 1
    return count


def _linearise_index(body: LoopBody, index: LaneIndex, sizes: tuple[int, ...]) -> LaneValue:
    """The row-major offset of an index; a ramp if only the innermost axis of more than one element is one."""
    total, step = ZERO_LANE, 1
    for lane, n in reversed(list(zip(index, sizes, strict=False))):
        if n != 1:
            total = add_indices(body, total, scale_index(body, lane, step))
        step *= n
    return total


def scale_index(body: LoopBody, lane: LaneValue, factor: int) -> LaneValue:
    """An index times a constant."""
    if factor == 1:
        return lane
    if lane.uniform:
        with body.hoist(lane):
            return LaneValue(body.text.mul(lane.name, factor), lane.kind, lane.divisor * factor)
    if lane.kind is LaneKind.RAMP:
        scaled = body.text.mul(lane.name, factor)
        return LaneValue(scaled, LaneKind.RAMP, abs(lane.divisor * factor), lane.step * factor)
    t = RegisterType("i64", body.width)
    return LaneValue(body.text.let(f"mul {t} {body.broadcast_lane(lane, t)}, {t.const(factor)}", "i"), LaneKind.VARYING)


def add_indices(body: LoopBody, a: LaneValue, b: LaneValue) -> LaneValue:
    """The sum of two indices."""
    multiple = math.gcd(a.divisor, b.divisor)
    if a.uniform and b.uniform:
        with body.hoist(a, b):
            span = index_sets.shift_span(a, b)
            return LaneValue(body.text.add(a.name, b.name), body.kind_of(a, b), multiple, span=span)
    if LaneKind.VARYING not in (a.kind, b.kind) and (a.uniform or b.uniform):
        step = a.step if a.kind is LaneKind.RAMP else b.step
        return LaneValue(body.text.add(a.name, b.name), LaneKind.RAMP, multiple, step, span=index_sets.shift_span(a, b))
    t = RegisterType("i64", body.width)
    name = body.text.let(f"add {t} {body.broadcast_lane(a, t)}, {body.broadcast_lane(b, t)}", "i")
    repeated, other = (a, b) if a.repeat else (b, a)
    if not repeated.repeat or not other.uniform:
        return LaneValue(name, LaneKind.VARYING)
    base = body.text.add(repeated.base, other.name)
    return LaneValue(name, LaneKind.VARYING, repeat=repeated.repeat, base=base)


def _delinearise_index(body: LoopBody, linear: LaneValue, sizes: tuple[int, ...]) -> list[LaneValue]:
    """The index with a row-major offset."""
    result = []
    for axis, n in enumerate(sizes):
        step = math.prod(sizes[axis + 1 :])
        modulus = n if any(s != 1 for s in sizes[:axis]) else 0
        result.append(ZERO_LANE if n == 1 else _emit_quotient(body, linear, step, modulus, math.prod(sizes)))
    return result


def _emit_quotient(body: LoopBody, linear: LaneValue, step: int, modulus: int, bound: int) -> LaneValue:
    """linear / step % modulus; modulus 0 leaves out the remainder, and linear numbers are below `bound`."""
    if step == 1 and not modulus:
        return linear
    if linear.kind is LaneKind.RAMP and linear.step == 1 and linear.divisor % body.width == 0:
        if step % body.width == 0:  # all lanes have one quotient
            return _emit_division(body, LaneValue(linear.name, LaneKind.UNIFORM), step, modulus, bound)
        if step == 1 and modulus % body.width == 0:  # no lane wraps around the modulus
            rest = body.text.let(f"urem i64 {linear.name}, {modulus}", "i")
            return LaneValue(rest, LaneKind.RAMP, math.gcd(linear.divisor, modulus))
        if body.width > 1 and step == 1 and body.width % modulus == 0:  # the same numbers in every register
            numbers = ", ".join(f"i64 {i % modulus}" for i in range(body.width))
            return LaneValue(f"<{numbers}>", LaneKind.VARYING, cycle=modulus)
        if 1 < step < body.width and body.width % step == 0 and (modulus * step) % body.width == 0:
            return _emit_repeated_quotient(body, linear, step, modulus)
    return _emit_division(body, linear, step, modulus, bound)


def _emit_repeated_quotient(body: LoopBody, linear: LaneValue, step: int, modulus: int) -> LaneValue:
    """linear / step % modulus where all lanes of a register count up without a wrap, each number `step` times."""
    base = body.text.let(f"udiv i64 {linear.name}, {step}", "i")
    base = body.text.let(f"urem i64 {base}, {modulus}", "i") if modulus else base
    t = RegisterType("i64", body.width)
    whole = body.broadcast_lane(LaneValue(base, LaneKind.UNIFORM), t)
    counts = ", ".join(f"i64 {i // step}" for i in range(body.width))
    name = body.text.let(f"add {t} {whole}, <{counts}>", "i")
    return LaneValue(name, LaneKind.VARYING, repeat=step, base=base)


def _emit_division(body: LoopBody, linear: LaneValue, step: int, modulus: int, bound: int) -> LaneValue:
    """A quotient, and its remainder; lanes of 64 bits have no high product, by which constants are divided."""
    whole = RegisterType("i64", body.width_of(linear))
    # The lanes of a last vector that are past the end are below twice the bound.
    t = whole.of("i32") if whole.width > 1 and 2 * bound + whole.width < 2**31 else whole
    with body.hoist(linear):
        name = body.broadcast_lane(linear, whole)
        if t != whole:
            name = body.text.let(f"trunc {whole} {name} to {t}", "i")
        if step != 1:
            name = body.text.let(f"udiv {t} {name}, {t.const(step)}", "i")
        if modulus:
            name = body.text.let(f"urem {t} {name}, {t.const(modulus)}", "i")
        if t != whole:
            name = body.text.let(f"zext {t} {name} to {whole}", "i")
    return LaneValue(name, body.kind_of(linear))


@element_rule(shape.iota)
def _(body, node, index):
    lane, dtype = index[node.attrs["axis"]], node.attrs["dtype"]
    if dtype == int64:
        return lane
    return emit_operation(
        body, lambda width, d, x: scalar_functions.cast_lanes(int64, dtype, width, d, x), [(lane, int64)]
    )


PREFETCHED_BYTES = 4096  # of a stream: processors do not prefetch beyond a page


@element_rule(tile.load)
def _(body, node, index):
    ref, rest = node.args[0], node.args[1:]
    m = body.kernel.memrefs[ref]
    if node.out in body.hints.streamed:
        m = replace(m, ahead=PREFETCHED_BYTES)
    starts, more = rest[: ref.type.rank], rest[ref.type.rank :]
    position = offset_index(body, starts, index)
    mask, other = emit_optional_operand(body, more, 0, index), emit_optional_operand(body, more, 1, index)
    if node.attrs["edge"] == "clip":
        if mask is None and other is None and any(lane.repeat for lane in position):
            axes = body.kernel.ranges.find_unproven_axes(starts, node.attrs["shape"], m.shape)
            if axes and all(m.shape[a] == 1 for a in axes):
                return memory.load_then_mask(body, m, position, memory.emit_inside_mask(body, m, position, axes))
        mask = memory.intersect_masks(body, mask, emit_bounds_mask(body, m, starts, node.attrs["shape"], position))
    return memory.load_lane(body, m, position, mask, other)


def offset_index(body: LoopBody, starts: Sequence[Value], index: LaneIndex) -> LaneIndex:
    """The index in memory of an element of a block that starts at `starts`."""
    origin = [cast_to_index(body, s, emit_element(body, s, ())) for s in starts]
    return tuple(add_indices(body, start, i) for start, i in zip(origin, index, strict=True))


def emit_bounds_mask(
    body: LoopBody, m: StridedMemRef, starts: Sequence[Value], block: tuple[int, ...], position: LaneIndex
) -> LaneValue | None:
    """The mask of elements within bounds; None if value-range analysis proves that all are."""
    return memory.emit_inside_mask(body, m, position, body.kernel.ranges.find_unproven_axes(starts, block, m.shape))


def emit_optional_operand(body: LoopBody, values: Sequence[Value], position: int, index: LaneIndex) -> LaneValue | None:
    """An optional operand at an index, broadcast to its block; None if it is absent."""
    if len(values) <= position:
        return None
    return emit_broadcast_element(body, values[position], index)


def emit_broadcast_element(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    """A value at an index of the block that it is broadcast to."""
    tail = index[len(index) - v.type.rank :]
    return emit_element(body, v, tuple(ZERO_LANE if n == 1 else i for n, i in zip(v.type.shape, tail, strict=True)))


@element_rule(tile.gather)
def _(body, node, index):
    ref, rest = node.args[0], node.args[1:]
    rank = ref.type.rank
    position = tuple(cast_to_index(body, v, emit_broadcast_element(body, v, index)) for v in rest[:rank])
    mask, other = (emit_optional_operand(body, rest[rank:], i, index) for i in (0, 1))
    return memory.load_lane(body, body.kernel.memrefs[ref], position, mask, other)


def cast_to_index(body: LoopBody, v: Value, lane: LaneValue) -> LaneValue:
    """An index of any integer type as i64."""
    return lane if v.type.dtype == int64 else widen_lane(body, v.type.dtype, int64, lane)


# Loop nests over a block.
LoopBodyEmitter = Callable[[LoopBody, LaneIndex], None]


def choose_vector_width(kernel: LlvmKernelContext, *dtypes: DType) -> int:
    """The number of elements in a vector register, for the widest of some types (at least 4 bytes)."""
    return kernel.vector_bytes // max([4, *(get_element_bytes(t) for t in dtypes)])


def emit_loop_nest(
    kernel: LlvmKernelContext,
    shape: Sequence[int],
    width: int,
    visit: LoopBodyEmitter,
    counts: Mapping[int, str] | None = None,
) -> None:
    """Emit loops over a block; `visit(body, index)` emits the body for one vector register.

    From the index `counts[axis]` on, which a register holds, the body of an axis has no effect.
    """
    if 0 in shape:
        return
    axes = [a for a, n in enumerate(shape) if n != 1]
    parts = {} if counts or kernel.is_long else _divide_one_axis(kernel, shape, axes[:-1])
    emit_scalar_loops(
        kernel,
        shape,
        axes[:-1],
        [ZERO_LANE] * len(shape),
        lambda index: _emit_innermost_loop(kernel, shape, axes[-1:], width, index, visit, counts or {}),
        counts,
        parts,
    )


def _divide_one_axis(
    kernel: LlvmKernelContext, shape: Sequence[int], axes: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """The parts of the first axis in which comparisons of its index are constant; only one: copies multiply."""
    found = ((a, index_sets.divide_axis(kernel, shape[a])) for a in axes)
    return dict(itertools.islice(((a, parts) for a, parts in found if len(parts) > 1), 1))


def emit_scalar_loops(
    kernel: LlvmKernelContext,
    shape: Sequence[int],
    axes: Sequence[int],
    index: list[LaneValue],
    inside: Callable,
    counts: Mapping[int, str] | None = None,
    parts: Mapping[int, Sequence[tuple[int, int]]] | None = None,
) -> None:
    """Scalar loops over some axes, around what `inside(index)` emits.

    An axis may end at `counts[axis]`, and be divided into `parts[axis]`, each with a loop.
    """
    if not axes:
        inside(index)
        return
    first, *rest = axes
    for start, stop in (parts or {}).get(first, ((0, shape[first]),)):
        with LoopBuilder(kernel.text, str(start), (counts or {}).get(first, str(stop))) as loop:
            out_shape = [*index]
            out_shape[first] = LaneValue(loop.index, span=None if parts is None else (start, stop - 1))
            emit_scalar_loops(kernel, shape, rest, out_shape, inside, counts, parts)


def _emit_innermost_loop(
    kernel: LlvmKernelContext,
    shape: Sequence[int],
    axes: list[int],
    width: int,
    index: list[LaneValue],
    visit: LoopBodyEmitter,
    counts: Mapping[int, str],
) -> None:
    if not axes:
        visit(LoopBody(kernel), tuple(index))
        return
    (axis,) = axes
    if width == 1:
        emit_scalar_loops(
            kernel, shape, axes, index, lambda out_shape: visit(LoopBody(kernel), tuple(out_shape)), counts
        )
        return
    before, outer = kernel.text.new_section(), dict[object, LaneValue]()
    count = shape[axis]
    strips = index_sets.strip_mine(count, fit_vector_width(width, count), index_sets.find_cuts(kernel, count))
    for strip in strips:
        # A loop runs at least once: only the first one of an axis may have no element.
        stop = counts.get(axis, str(strip.stop)) if len(strips) == 1 else str(strip.stop)
        with LoopBuilder(kernel.text, str(strip.start), stop, strip.width) as loop:
            ramp = make_ramp_index(index, axis, loop.index, strip.width, (strip.start, strip.stop - 1))
            visit(LoopBody(kernel, strip.width, strip.mask, before, outer), ramp)


def emit_row_loops(
    kernel: LlvmKernelContext,
    shape: Sequence[int],
    width: int,
    visit_rows: Callable[[LoopBody, Sequence[LaneIndex]], None],
    visit: LoopBodyEmitter,
) -> None:
    """Loops over a block of short rows: `visit_rows(body, indices)` emits the body for a register of rows, with an
    index for each element of a row; `visit` emits it for the rows that are left."""
    *outer, rows, columns = (a for a, n in enumerate(shape) if n != 1 or a >= len(shape) - 2)
    whole = shape[rows] // width * width

    def inside(index: list[LaneValue]) -> None:
        before, memo = kernel.text.new_section(), dict[object, LaneValue]()
        with LoopBuilder(kernel.text, "0", str(whole), width) as loop:
            ramp = make_ramp_index(index, rows, loop.index, width, (0, whole - 1))
            indices = [(*ramp[:columns], LaneValue(str(n))) for n in range(shape[columns])]
            visit_rows(LoopBody(kernel, width, None, before, memo), indices)
        if whole < shape[rows]:
            with LoopBuilder(kernel.text, str(whole), str(shape[rows])) as loop:
                row = (*index[:rows], LaneValue(loop.index), *index[columns:])
                _emit_innermost_loop(kernel, shape, [columns], width, [*row], visit, {})

    emit_scalar_loops(kernel, shape, outer, [ZERO_LANE] * len(shape), inside)


def make_ramp_index(
    index: Sequence[LaneValue], axis: int, base: str, width: int, span: tuple[int, int] | None = None
) -> LaneIndex:
    """An index that is a ramp along one axis, from `base`, a multiple of the width."""
    out_shape = [*index]
    out_shape[axis] = LaneValue(base, LaneKind.RAMP, width, span=span)
    return tuple(out_shape)


def materialise_block(kernel: LlvmKernelContext, v: Value, target: StridedMemRef) -> None:
    """Compute a block into memory."""
    width = choose_vector_width(kernel, v.type.dtype)
    emit_loop_nest(
        kernel,
        static_shape(v.type),
        width,
        lambda body, index: store_lane(body, target, index, emit_element(body, v, index)),
    )


def move_block(kernel: LlvmKernelContext, v: Value, target: StridedMemRef) -> None:
    """Compute or copy a block into a memory, unless it is there."""
    if kernel.buffers.get(v) is not target:
        materialise_block(kernel, v, target)


def allocate_block(kernel: LlvmKernelContext, v: Value) -> StridedMemRef:
    """Memory for a block: that of the loop-carried parameter it becomes, if computed in place, or new memory."""
    param = kernel.plan.target.get(v)
    return kernel.buffers[param] if param is not None else allocate_new(kernel, v)


def allocate_new(kernel: LlvmKernelContext, v: Value) -> StridedMemRef:
    """New memory for a block."""
    width = choose_vector_width(kernel, v.type.dtype)
    return kernel.scratch.allocate_block(v.type.dtype, static_shape(v.type), width)
