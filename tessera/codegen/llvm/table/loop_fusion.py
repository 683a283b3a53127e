"""Loop fusion: loop nests over blocks, in which the elements of fused producers are computed at the index of the
consumer.

Outer axes are scalar loops; the innermost one is strip-mined into vectors with a masked remainder. `tile.inline` is a
row
of the table with the user's own instructions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tessera.codegen.block_types import get_tensor_type, static_shape
from tessera.codegen.llvm.table import conversions
from tessera.codegen.llvm.table.emission import RowTypes, find_row
from tessera.codegen.llvm.text import memory
from tessera.codegen.llvm.text.builder import (
    ZERO_LANE,
    LaneIndex,
    LaneKind,
    LaneValue,
    LoopBody,
    LoopBuilder,
    format_prefix_mask,
)
from tessera.codegen.llvm.text.memory import StridedMemRef, fit_vector_width, store_lane
from tessera.codegen.llvm.text.types import RegisterType, format_literal, get_element_bytes, get_register_type
from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.core.types import DType, TensorType, int4, int64
from tessera.ir.core import Node, Value
from tessera.ir.rules import COMPUTE, Rules
from tessera.ops.dialects import tile
from tessera.ops.dialects.inline_asm import inline
from tessera.ops.tensor import basic, elementwise, shape, stochastic_rounding

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_emitter import LlvmKernelEmitter


# What the elements of a block are at an index: one row for each op, computed where a loop asks for them.


element_rule = Rules("llvm element")


def emit_element(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    """The elements of a value at an index; computed here unless they were before."""
    known = body.kernel.scalars.get(v)
    if known is not None:
        return LaneValue(known)
    memo = body.memo(*index)
    if (v, index) not in memo:
        with body.hoisted(*index):
            memo[v, index] = _compute_element(body, v, index)
    return memo[v, index]


def _compute_element(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    kernel = body.kernel
    held = kernel.buffers.get(v)
    if held is not None:
        return round_accumulator(body, v, held.dtype, memory.load_lane(body, held, index))
    node = kernel.producers[v]
    with kernel.at(node):
        return (element_rule.get(node.op) or emit_pointwise)(body, node, index)


def round_accumulator(body: LoopBody, v: Value, wide: DType, lane: LaneValue) -> LaneValue:
    """A value held in a wider type than its own (a dot's accumulator) as its own type."""
    return round_to_storage(body, get_tensor_type(v), wide, lane)


def round_to_storage(body: LoopBody, type: TensorType, wide: DType, lane: LaneValue) -> LaneValue:
    """A lane of the type that was computed in, as its storage and policy have it."""
    if wide == type.dtype and wide is not int4 and not conversions.is_special_policy(type.policy):
        return lane
    return emit_operation(
        body, lambda width, d, x: conversions.round_by_policy(wide, type, width, d, x), [(lane, wide)]
    )


def emit_operation(body: LoopBody, lines: Any, operands: Sequence[tuple[LaneValue, DType]]) -> LaneValue:
    """The lane that `lines(width, d, *names)` gives; ahead of the loop where no operand varies."""
    lanes = [lane for lane, _ in operands]
    width = body.width_of(*lanes)
    with body.hoisted(*lanes):
        names = [body.broadcast_lane(lane, get_register_type(dtype, width)) for lane, dtype in operands]
        d = body.text.name()
        body.text.lines(lines(width, d, *names))
    return LaneValue(d, body.kind_of(*lanes))


def emit_pointwise(body: LoopBody, node: Node, index: LaneIndex) -> LaneValue:
    """A pointwise op: operands widened to what it computes in, the result rounded to its own type."""
    lanes = [emit_element(body, v, index) for v in node.args]
    ramp = _shift_ramp(body, node, lanes)
    if ramp is not None:
        return ramp
    emission, widths = find_row(node), [_choose_compute_type(node, v) for v in node.args]
    operands = []
    for v, lane, wide in zip(node.args, lanes, widths, strict=True):
        operands.append((widen_lane(body, v.type.dtype, wide, lane), wide))
    spot = widths[-1]
    out = emit_operation(
        body, lambda width, d, *x: emission(RowTypes(get_register_type(spot, width), spot), d, *x), operands
    )
    return _round_result(body, node, spot, out)


def _choose_compute_type(node: Node, v: Value) -> DType:
    return get_tensor_type(v).compute if node.op.numerics == COMPUTE else v.type.dtype


def widen_lane(body: LoopBody, source: DType, to: DType, lane: LaneValue) -> LaneValue:
    """A lane in a wider type."""
    if conversions.is_register_copy(source, to):
        return lane
    return emit_operation(body, lambda width, d, x: conversions.cast_lanes(source, to, width, d, x), [(lane, source)])


def _round_result(body: LoopBody, node: Node, wide: DType, lane: LaneValue) -> LaneValue:
    """A result rounded once to its storage type."""
    return round_to_storage(body, get_tensor_type(node.out), wide, lane) if node.op.numerics == COMPUTE else lane


def _shift_ramp(body: LoopBody, node: Node, lanes: list[LaneValue]) -> LaneValue | None:
    """A ramp plus or minus a scalar stays a ramp: contiguous memory is found by it."""
    if node.op not in (elementwise.add, elementwise.sub) or node.out.type.dtype != int64:
        return None
    x, y = lanes
    plus = node.op is elementwise.add
    if (x.kind is LaneKind.RAMP and y.uniform) or (plus and x.uniform and y.kind is LaneKind.RAMP):
        name = body.text.let(f"{'add' if plus else 'sub'} i64 {x.name}, {y.name}", "i")
        return LaneValue(name, LaneKind.RAMP, math.gcd(x.divisor, y.divisor))
    return None


@element_rule(basic.cast)
def _(body, node, index):
    return round_to_storage(
        body, get_tensor_type(node.out), node.args[0].type.dtype, emit_element(body, node.args[0], index)
    )


@element_rule(stochastic_rounding.round_by_chance)
def _(body, node, index):
    operands = [(emit_element(body, v, index), v.type.dtype) for v in node.args]
    return emit_operation(
        body, lambda width, d, *x: conversions.round_stochastically(node.attrs["dtype"], width, d, *x), operands
    )


@element_rule(basic.full)
def _(body, node, index):
    return LaneValue(format_constant(node.attrs["value"], node.attrs["dtype"]))


def format_constant(value: Any, dtype: DType) -> str:
    """A number as a literal of an element type, rounded to it."""
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
    for place, axis in enumerate(node.attrs["axes"]):
        inner[axis] = index[place]
    return emit_element(body, node.args[0], tuple(inner))


@element_rule(shape.reshape)
def _(body, node, index):
    x = node.args[0]
    return emit_element(body, x, map_reshaped_index(body, index, node.out.type.shape, x.type.shape))


def map_reshaped_index(body: LoopBody, index: LaneIndex, here: tuple[int, ...], there: tuple[int, ...]) -> LaneIndex:
    """The index in the shape `there` of what lies at `index` in the shape `here`."""
    if [n for n in here if n != 1] == [n for n in there if n != 1]:
        held = iter(i for i, n in zip(index, here, strict=True) if n != 1)
        return tuple(ZERO_LANE if n == 1 else next(held) for n in there)
    kept = _count_common_inner_axes(here, there)
    inner = index[len(index) - kept :] if kept else ()
    outer = _delinearise_index(
        body, _linearise_index(body, index[: len(index) - kept], here), there[: len(there) - kept]
    )
    return (*outer, *inner)


def _count_common_inner_axes(here: tuple[int, ...], there: tuple[int, ...]) -> int:
    """How many of the last axes a reshape leaves as they are."""
    count = 0
    while count < min(len(here), len(there)) and here[-1 - count] == there[-1 - count]:
        count += 1
    return count


def _linearise_index(body: LoopBody, index: LaneIndex, sizes: tuple[int, ...]) -> LaneValue:
    """The row-major number of an index; a ramp where only the last axis that counts is one."""
    total, step = ZERO_LANE, 1
    for lane, n in reversed(list(zip(index, sizes, strict=False))):
        if n != 1:
            total = _add_indices(body, total, _scale_index(body, lane, step))
        step *= n
    return total


def _scale_index(body: LoopBody, lane: LaneValue, factor: int) -> LaneValue:
    if factor == 1:
        return lane
    if lane.uniform:
        with body.hoisted(lane):
            return LaneValue(body.text.mul(lane.name, factor), lane.kind, lane.divisor * factor)
    t = RegisterType("i64", body.width)
    return LaneValue(body.text.let(f"mul {t} {body.broadcast_lane(lane, t)}, {t.const(factor)}", "i"), LaneKind.VARYING)


def _add_indices(body: LoopBody, a: LaneValue, b: LaneValue) -> LaneValue:
    multiple = math.gcd(a.divisor, b.divisor)
    if a.uniform and b.uniform:
        with body.hoisted(a, b):
            return LaneValue(body.text.add(a.name, b.name), body.kind_of(a, b), multiple)
    if LaneKind.VARYING not in (a.kind, b.kind) and (a.uniform or b.uniform):
        return LaneValue(body.text.add(a.name, b.name), LaneKind.RAMP, multiple)
    t = RegisterType("i64", body.width)
    return LaneValue(
        body.text.let(f"add {t} {body.broadcast_lane(a, t)}, {body.broadcast_lane(b, t)}", "i"), LaneKind.VARYING
    )


def _delinearise_index(body: LoopBody, linear: LaneValue, sizes: tuple[int, ...]) -> list[LaneValue]:
    """A row-major number as an index of these sizes."""
    found = []
    for axis, n in enumerate(sizes):
        step = math.prod(sizes[axis + 1 :])
        found.append(
            ZERO_LANE if n == 1 else _emit_quotient(body, linear, step, n if any(s != 1 for s in sizes[:axis]) else 0)
        )
    return found


def _emit_quotient(body: LoopBody, linear: LaneValue, step: int, modulus: int) -> LaneValue:
    """linear / step % modulus; a modulus of 0 leaves the quotient as it is."""
    if step == 1 and not modulus:
        return linear
    if linear.kind is LaneKind.RAMP and linear.divisor % body.width == 0:
        if step % body.width == 0:  # a whole register lies within one step
            return _emit_division(body, LaneValue(linear.name, LaneKind.UNIFORM), step, modulus)
        if step == 1 and modulus % body.width == 0:  # or within one round of the modulus
            rest = body.text.let(f"urem i64 {linear.name}, {modulus}", "i")
            return LaneValue(rest, LaneKind.RAMP, math.gcd(linear.divisor, modulus))
    return _emit_division(body, linear, step, modulus)


def _emit_division(body: LoopBody, linear: LaneValue, step: int, modulus: int) -> LaneValue:
    t = RegisterType("i64", body.width_of(linear))
    with body.hoisted(linear):
        name = body.broadcast_lane(linear, t)
        if step != 1:
            name = body.text.let(f"udiv {t} {name}, {t.const(step)}", "i")
        if modulus:
            name = body.text.let(f"urem {t} {name}, {t.const(modulus)}", "i")
    return LaneValue(name, body.kind_of(linear))


@element_rule(shape.iota)
def _(body, node, index):
    lane, dtype = index[node.attrs["axis"]], node.attrs["dtype"]
    if dtype == int64:
        return lane
    return emit_operation(body, lambda width, d, x: conversions.cast_lanes(int64, dtype, width, d, x), [(lane, int64)])


@element_rule(tile.load)
def _(body, node, index):
    ref, rest = node.args[0], node.args[1:]
    m = body.kernel.memories[ref]
    starts, more = rest[: ref.type.rank], rest[ref.type.rank :]
    place = offset_index(body, starts, index)
    mask, other = emit_optional_operand(body, more, 0, index), emit_optional_operand(body, more, 1, index)
    if node.attrs["edge"] == "clip":
        mask = memory.intersect_masks(body, mask, emit_bounds_mask(body, m, starts, node.attrs["shape"], place))
    return memory.load_lane(body, m, place, mask, other)


def offset_index(body: LoopBody, starts: Sequence[Value], index: LaneIndex) -> LaneIndex:
    """Where in a memory an element of a block lies that begins at `starts`."""
    origin = [cast_to_index(body, s, emit_element(body, s, ())) for s in starts]
    return tuple(_add_indices(body, start, i) for start, i in zip(origin, index, strict=True))


def emit_bounds_mask(
    body: LoopBody, m: StridedMemRef, starts: Sequence[Value], block: tuple[int, ...], place: LaneIndex
) -> LaneValue | None:
    """Whether elements lie inside; None where the block is known to lie inside whole."""
    return memory.emit_inside_mask(body, m, place, body.kernel.ranges.find_unproven_axes(starts, block, m.shape))


def emit_optional_operand(body: LoopBody, values: Sequence[Value], place: int, index: LaneIndex) -> LaneValue | None:
    """An optional operand at an index, broadcast to the block it belongs to."""
    if len(values) <= place:
        return None
    return emit_broadcast_element(body, values[place], index)


def emit_broadcast_element(body: LoopBody, v: Value, index: LaneIndex) -> LaneValue:
    """A value of fewer or unit axes, at an index of the block it is broadcast to."""
    tail = index[len(index) - v.type.rank :]
    return emit_element(body, v, tuple(ZERO_LANE if n == 1 else i for n, i in zip(v.type.shape, tail, strict=True)))


@element_rule(tile.gather)
def _(body, node, index):
    ref, rest = node.args[0], node.args[1:]
    rank = ref.type.rank
    place = tuple(cast_to_index(body, v, emit_broadcast_element(body, v, index)) for v in rest[:rank])
    mask, other = (emit_optional_operand(body, rest[rank:], i, index) for i in (0, 1))
    return memory.load_lane(body, body.kernel.memories[ref], place, mask, other)


def cast_to_index(body: LoopBody, v: Value, lane: LaneValue) -> LaneValue:
    """An index of any integer type as i64."""
    return lane if v.type.dtype == int64 else widen_lane(body, v.type.dtype, int64, lane)


# `tile.inline` as LLVM text: the user's own instructions, for a register's worth of elements or for each one.


InlineLines = Iterator[str]


@element_rule(inline)
def _(body, node, index):
    if not node.attrs["llvm"]:
        raise UnsupportedOpError(
            "this tile.inline has no text for the target llvm", location=node.loc, expected='llvm="..."',
            suggestion='give the instructions: tile.inline(x, python=f, llvm="{out} = fneg {t} {0}")',
        )  # fmt: skip
    operands = [(emit_element(body, v, index), get_tensor_type(v).dtype) for v in node.args]
    return emit_operation(body, lambda width, d, *names: _emit_inline(node, width, d, names), operands)


def _emit_inline(node: Node, width: int, d: str, names: Sequence[str]) -> InlineLines:
    """The text with names put in, then the rounding to a type narrower than its register."""
    out = node.out.type.dtype
    narrow = conversions.needs_rounding(out)
    to = f"{d}.x" if narrow else d
    wide = "{t}" in node.attrs["llvm"]
    yield from (
        _fill_template(node, width, to, names) if wide or width == 1 else _emit_scalarised(node, width, to, names)
    )
    if narrow:
        yield from conversions.round_to_format(out, width, d, to)


def _fill_template(node: Node, width: int, d: str, names: Sequence[str]) -> InlineLines:
    t = get_register_type(node.out.type.dtype, width)
    fields: dict[str, object] = {"out": d, "t": t, "s": t.suffix}
    for place, v in enumerate(node.args):
        own = get_register_type(get_tensor_type(v).dtype, width)
        fields |= {f"t{place}": own, f"s{place}": own.suffix}
    try:
        text = node.attrs["llvm"].format(*names, **fields)
    except (KeyError, IndexError, ValueError) as error:
        raise ArgumentError(
            f"the llvm text of tile.inline cannot be filled in: {error}", location=node.loc,
            expected="{out}, {t}, {s}, and {0}, {t0}, {s0} for each operand; other braces doubled",
        ) from None  # fmt: skip
    yield from (line.strip() for line in text.replace(";", "\n").splitlines() if line.strip())


def _emit_scalarised(node: Node, width: int, d: str, names: Sequence[str]) -> InlineLines:
    """The text once for each element of the registers."""
    whole = "poison"
    t = get_register_type(node.out.type.dtype, width)
    for place in range(width):
        own = []
        for number, (v, name) in enumerate(zip(node.args, names, strict=True)):
            own.append(f"{d}.i{number}.{place}")
            yield f"{own[-1]} = extractelement {get_register_type(get_tensor_type(v).dtype, width)} {name}, i64 {place}"
        yield from _fill_template(node, 1, f"{d}.e{place}", own)
        last = d if place == width - 1 else f"{d}.w{place}"
        yield f"{last} = insertelement {t} {whole}, {RegisterType(t.element)} {d}.e{place}, i64 {place}"
        whole = last


# Loop nests over a block: outer axes as loops, the innermost one in vectors with a masked rest.


LoopBodyEmitter = Callable[[LoopBody, LaneIndex], None]


def choose_vector_width(kernel: LlvmKernelEmitter, *dtypes: DType) -> int:
    """How many elements a vector holds, by the widest type among them (at least 4 bytes)."""
    return kernel.vector_bytes // max([4, *(get_element_bytes(t) for t in dtypes)])


def emit_loop_nest(kernel: LlvmKernelEmitter, shape: Sequence[int], width: int, visit: LoopBodyEmitter) -> None:
    """Call `visit(body, index)` where the code for each register's worth of a block goes."""
    if 0 in shape:
        return
    axes = [a for a, n in enumerate(shape) if n != 1]
    emit_scalar_loops(
        kernel,
        shape,
        axes[:-1],
        [ZERO_LANE] * len(shape),
        lambda index: _emit_innermost_loop(kernel, shape, axes[-1:], width, index, visit),
    )


def emit_scalar_loops(
    kernel: LlvmKernelEmitter, shape: Sequence[int], axes: Sequence[int], index: list[LaneValue], inside: Callable
) -> None:
    """Scalar loops over some axes, around what `inside(index)` emits."""
    if not axes:
        inside(index)
        return
    first, *rest = axes
    with LoopBuilder(kernel.text, "0", str(shape[first])) as loop:
        here = [*index]
        here[first] = LaneValue(loop.index)
        emit_scalar_loops(kernel, shape, rest, here, inside)


def _emit_innermost_loop(
    kernel: LlvmKernelEmitter,
    shape: Sequence[int],
    axes: list[int],
    width: int,
    index: list[LaneValue],
    visit: LoopBodyEmitter,
) -> None:
    if not axes:
        visit(LoopBody(kernel), tuple(index))
        return
    (axis,) = axes
    if width == 1:
        emit_scalar_loops(kernel, shape, axes, index, lambda here: visit(LoopBody(kernel), tuple(here)))
        return
    before, outer = kernel.text.section(), dict[object, LaneValue]()
    for start, stop, step, mask in strip_mine(shape[axis], fit_vector_width(width, shape[axis])):
        with LoopBuilder(kernel.text, start, stop, step) as loop:
            visit(LoopBody(kernel, step, mask, before, outer), make_ramp_index(index, axis, loop.index, step))


def strip_mine(count: int, width: int) -> list[tuple[str, str, int, str | None]]:
    """An axis as whole vectors and, masked, the rest: (start, stop, step, mask)."""
    full = count // width * width
    whole = [("0", str(full), width, None)] if full else []
    rest = [(str(full), str(count), width, format_prefix_mask(width, count - full))] if count > full else []
    return [*whole, *rest]


def make_ramp_index(index: Sequence[LaneValue], axis: int, base: str, width: int) -> LaneIndex:
    """An index whose elements run along one axis from `base`, a multiple of the width."""
    here = [*index]
    here[axis] = LaneValue(base, LaneKind.RAMP, width)
    return tuple(here)


def materialise_block(kernel: LlvmKernelEmitter, v: Value, target: StridedMemRef) -> None:
    """Compute a block into a memory."""
    width = choose_vector_width(kernel, v.type.dtype)
    emit_loop_nest(
        kernel,
        static_shape(v.type),
        width,
        lambda body, index: store_lane(body, target, index, emit_element(body, v, index)),
    )
