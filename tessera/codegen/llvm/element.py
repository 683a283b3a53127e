"""What the elements of a block are at an index: one row for each op, computed where a loop asks for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.codegen.blocks import block_type
from tessera.codegen.llvm import convert, memory, policy
from tessera.codegen.llvm.emit import Spot, row
from tessera.codegen.llvm.lane import ZERO, Body, Index, Kind, Lane
from tessera.codegen.llvm.scratch import Memory
from tessera.codegen.llvm.types import Vec, literal, register
from tessera.ir.core import Node, Value
from tessera.op import COMPUTE, Rules
from tessera.ops import basic, chance, elementwise, shape, tile
from tessera.types import DType, TensorType, int4, int64

element = Rules("llvm element")


def value_at(body: Body, v: Value, index: Index) -> Lane:
    """The elements of a value at an index; computed here unless they were before."""
    known = body.kernel.scalars.get(v)
    if known is not None:
        return Lane(known)
    memo = body.memo(*index)
    if (v, index) not in memo:
        with body.hoisted(*index):
            memo[v, index] = _computed(body, v, index)
    return memo[v, index]


def _computed(body: Body, v: Value, index: Index) -> Lane:
    kernel = body.kernel
    held = kernel.buffers.get(v)
    if held is not None:
        return rounded(body, v, held.dtype, memory.load(body, held, index))
    node = kernel.producers[v]
    with kernel.at(node):
        return (element.get(node.op) or pointwise)(body, node, index)


def rounded(body: Body, v: Value, wide: DType, lane: Lane) -> Lane:
    """A value held in a wider type than its own (a dot's accumulator) as its own type."""
    return stored(body, block_type(v), wide, lane)


def stored(body: Body, type: TensorType, wide: DType, lane: Lane) -> Lane:
    """A lane of the type that was computed in, as its storage and policy have it."""
    if wide == type.dtype and wide is not int4 and not policy.special(type.policy):
        return lane
    return apply(body, lambda width, d, x: policy.store(wide, type, width, d, x), [(lane, wide)])


def apply(body: Body, lines: Any, operands: Sequence[tuple[Lane, DType]]) -> Lane:
    """The lane that `lines(width, d, *names)` gives; ahead of the loop where no operand varies."""
    lanes = [lane for lane, _ in operands]
    width = body.width_of(*lanes)
    with body.hoisted(*lanes):
        names = [body.spread(lane, register(dtype, width)) for lane, dtype in operands]
        d = body.text.name()
        body.text.lines(lines(width, d, *names))
    return Lane(d, body.kind_of(*lanes))


def pointwise(body: Body, node: Node, index: Index) -> Lane:
    """A pointwise op: operands widened to what it computes in, the result rounded to its own type."""
    lanes = [value_at(body, v, index) for v in node.args]
    ramp = _shifted(body, node, lanes)
    if ramp is not None:
        return ramp
    emission, widths = row(node), [_compute(node, v) for v in node.args]
    operands = []
    for v, lane, wide in zip(node.args, lanes, widths, strict=True):
        operands.append((widened(body, v.type.dtype, wide, lane), wide))
    spot = widths[-1]
    out = apply(body, lambda width, d, *x: emission(Spot(register(spot, width), spot), d, *x), operands)
    return _stored(body, node, spot, out)


def _compute(node: Node, v: Value) -> DType:
    return block_type(v).compute if node.op.numerics == COMPUTE else v.type.dtype


def widened(body: Body, source: DType, to: DType, lane: Lane) -> Lane:
    """A lane in a wider type."""
    if convert.is_copy(source, to):
        return lane
    return apply(body, lambda width, d, x: convert.cast(source, to, width, d, x), [(lane, source)])


def _stored(body: Body, node: Node, wide: DType, lane: Lane) -> Lane:
    """A result rounded once to its storage type."""
    return stored(body, block_type(node.out), wide, lane) if node.op.numerics == COMPUTE else lane


def _shifted(body: Body, node: Node, lanes: list[Lane]) -> Lane | None:
    """A ramp plus or minus a scalar stays a ramp: contiguous memory is found by it."""
    if node.op not in (elementwise.add, elementwise.sub) or node.out.type.dtype != int64:
        return None
    x, y = lanes
    plus = node.op is elementwise.add
    if (x.kind is Kind.RAMP and y.uniform) or (plus and x.uniform and y.kind is Kind.RAMP):
        name = body.text.let(f"{'add' if plus else 'sub'} i64 {x.name}, {y.name}", "i")
        return Lane(name, Kind.RAMP, math.gcd(x.divisor, y.divisor))
    return None


@element(basic.cast)
def _(body, node, index):
    return stored(body, block_type(node.out), node.args[0].type.dtype, value_at(body, node.args[0], index))


@element(chance.round_by_chance)
def _(body, node, index):
    operands = [(value_at(body, v, index), v.type.dtype) for v in node.args]
    return apply(body, lambda width, d, *x: policy.by_chance(node.attrs["dtype"], width, d, *x), operands)


@element(basic.full)
def _(body, node, index):
    return Lane(constant(node.attrs["value"], node.attrs["dtype"]))


def constant(value: Any, dtype: DType) -> str:
    """A number as a literal of an element type, rounded to it."""
    number = dtype.numpy.type(value) if not dtype.is_float else _nearest(value, dtype)
    return literal(register(dtype).element, number)


def _nearest(value: Any, dtype: DType) -> float:
    return float(basic.full.ref(shape=(), value=value, dtype=dtype))


@element(basic.broadcast_to)
def _(body, node, index):
    x = node.args[0]
    tail = index[len(index) - x.type.rank :]
    return value_at(body, x, tuple(ZERO if n == 1 else i for n, i in zip(x.type.shape, tail, strict=True)))


@element(shape.permute)
def _(body, node, index):
    inner = [ZERO] * len(index)
    for place, axis in enumerate(node.attrs["axes"]):
        inner[axis] = index[place]
    return value_at(body, node.args[0], tuple(inner))


@element(shape.reshape)
def _(body, node, index):
    x = node.args[0]
    return value_at(body, x, reshaped(body, index, node.out.type.shape, x.type.shape))


def reshaped(body: Body, index: Index, here: tuple[int, ...], there: tuple[int, ...]) -> Index:
    """The index in the shape `there` of what lies at `index` in the shape `here`."""
    if [n for n in here if n != 1] == [n for n in there if n != 1]:
        held = iter(i for i, n in zip(index, here, strict=True) if n != 1)
        return tuple(ZERO if n == 1 else next(held) for n in there)
    kept = _same_inner(here, there)
    inner = index[len(index) - kept :] if kept else ()
    outer = _split(body, _linear(body, index[: len(index) - kept], here), there[: len(there) - kept])
    return (*outer, *inner)


def _same_inner(here: tuple[int, ...], there: tuple[int, ...]) -> int:
    """How many of the last axes a reshape leaves as they are."""
    count = 0
    while count < min(len(here), len(there)) and here[-1 - count] == there[-1 - count]:
        count += 1
    return count


def _linear(body: Body, index: Index, sizes: tuple[int, ...]) -> Lane:
    """The row-major number of an index; a ramp where only the last axis that counts is one."""
    total, step = ZERO, 1
    for lane, n in reversed(list(zip(index, sizes, strict=False))):
        if n != 1:
            total = _plus(body, total, _times(body, lane, step))
        step *= n
    return total


def _times(body: Body, lane: Lane, factor: int) -> Lane:
    if factor == 1:
        return lane
    if lane.uniform:
        with body.hoisted(lane):
            return Lane(body.text.mul(lane.name, factor), lane.kind, lane.divisor * factor)
    t = Vec("i64", body.width)
    return Lane(body.text.let(f"mul {t} {body.spread(lane, t)}, {t.const(factor)}", "i"), Kind.VARYING)


def _plus(body: Body, a: Lane, b: Lane) -> Lane:
    multiple = math.gcd(a.divisor, b.divisor)
    if a.uniform and b.uniform:
        with body.hoisted(a, b):
            return Lane(body.text.add(a.name, b.name), body.kind_of(a, b), multiple)
    if Kind.VARYING not in (a.kind, b.kind) and (a.uniform or b.uniform):
        return Lane(body.text.add(a.name, b.name), Kind.RAMP, multiple)
    t = Vec("i64", body.width)
    return Lane(body.text.let(f"add {t} {body.spread(a, t)}, {body.spread(b, t)}", "i"), Kind.VARYING)


def _split(body: Body, linear: Lane, sizes: tuple[int, ...]) -> list[Lane]:
    """A row-major number as an index of these sizes."""
    found = []
    for axis, n in enumerate(sizes):
        step = math.prod(sizes[axis + 1 :])
        found.append(ZERO if n == 1 else _quotient(body, linear, step, n if any(s != 1 for s in sizes[:axis]) else 0))
    return found


def _quotient(body: Body, linear: Lane, step: int, modulus: int) -> Lane:
    """linear / step % modulus; a modulus of 0 leaves the quotient as it is."""
    if step == 1 and not modulus:
        return linear
    if linear.kind is Kind.RAMP and linear.divisor % body.width == 0:
        if step % body.width == 0:  # a whole register lies within one step
            return _divided(body, Lane(linear.name, Kind.EVEN), step, modulus)
        if step == 1 and modulus % body.width == 0:  # or within one round of the modulus
            rest = body.text.let(f"urem i64 {linear.name}, {modulus}", "i")
            return Lane(rest, Kind.RAMP, math.gcd(linear.divisor, modulus))
    return _divided(body, linear, step, modulus)


def _divided(body: Body, linear: Lane, step: int, modulus: int) -> Lane:
    t = Vec("i64", body.width_of(linear))
    with body.hoisted(linear):
        name = body.spread(linear, t)
        if step != 1:
            name = body.text.let(f"udiv {t} {name}, {t.const(step)}", "i")
        if modulus:
            name = body.text.let(f"urem {t} {name}, {t.const(modulus)}", "i")
    return Lane(name, body.kind_of(linear))


@element(shape.iota)
def _(body, node, index):
    lane, dtype = index[node.attrs["axis"]], node.attrs["dtype"]
    if dtype == int64:
        return lane
    return apply(body, lambda width, d, x: convert.cast(int64, dtype, width, d, x), [(lane, int64)])


@element(tile.load)
def _(body, node, index):
    ref, rest = node.args[0], node.args[1:]
    m = body.kernel.memories[ref]
    starts, more = rest[: ref.type.rank], rest[ref.type.rank :]
    place = placed(body, starts, index)
    mask, other = operand(body, more, 0, index), operand(body, more, 1, index)
    if node.attrs["edge"] == "clip":
        mask = memory.both(body, mask, clipped(body, m, starts, node.attrs["shape"], place))
    return memory.load(body, m, place, mask, other)


def placed(body: Body, starts: Sequence[Value], index: Index) -> Index:
    """Where in a memory an element of a block lies that begins at `starts`."""
    origin = [as_index(body, s, value_at(body, s, ())) for s in starts]
    return tuple(_plus(body, start, i) for start, i in zip(origin, index, strict=True))


def clipped(body: Body, m: Memory, starts: Sequence[Value], block: tuple[int, ...], place: Index) -> Lane | None:
    """Whether elements lie inside; None where the block is known to lie inside whole."""
    return memory.inside(body, m, place, body.kernel.ranges.loose(starts, block, m.shape))


def operand(body: Body, values: Sequence[Value], place: int, index: Index) -> Lane | None:
    """An optional operand at an index, broadcast to the block it belongs to."""
    if len(values) <= place:
        return None
    return broadcast_at(body, values[place], index)


def broadcast_at(body: Body, v: Value, index: Index) -> Lane:
    """A value of fewer or unit axes, at an index of the block it is broadcast to."""
    tail = index[len(index) - v.type.rank :]
    return value_at(body, v, tuple(ZERO if n == 1 else i for n, i in zip(v.type.shape, tail, strict=True)))


@element(tile.gather)
def _(body, node, index):
    ref, rest = node.args[0], node.args[1:]
    rank = ref.type.rank
    place = tuple(as_index(body, v, broadcast_at(body, v, index)) for v in rest[:rank])
    mask, other = (operand(body, rest[rank:], i, index) for i in (0, 1))
    return memory.load(body, body.kernel.memories[ref], place, mask, other)


def as_index(body: Body, v: Value, lane: Lane) -> Lane:
    """An index of any integer type as i64."""
    return lane if v.type.dtype == int64 else widened(body, v.type.dtype, int64, lane)
