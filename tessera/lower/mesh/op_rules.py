"""Op rules: what each Graph op becomes on a mesh: computation on pieces, and the collectives between elements."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.types import TensorType, bool_, f16, f32, int32
from tessera.ir.core import Node, Value
from tessera.ir.rules import REGISTRY, Rules
from tessera.lower.mesh.mesh_lowering import (
    CONSTANT,
    OPEN,
    MeshLowering,
    NoMapping,
    ShardedTensor,
    Sharding,
    count_piece_elements,
    find_common_sharding,
    tensor_type_of,
)
from tessera.ops.dialects import mesh
from tessera.ops.dialects.mesh import UNSPLIT
from tessera.ops.tensor import basic, reduce, shape
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.reduce import find_neutral_element

# Rules of ops on a mesh: computation on pieces, and collectives.


# rule(lowering, node, *held) gives the sharded result of a node.
mesh_op_rules = Rules("mesh")


@mesh_op_rules(*(op for op in REGISTRY.values() if op.pointwise and op is not shape.check_index))
def _(lowering, node, *operands):
    split = find_common_sharding([x.split for x in operands])
    if split is None:  # cut against each other: as the one is of which most would have to move
        settled = [(x, lowering.settle(x)) for x in operands]
        split = max(settled, key=lambda pair: math.prod(lowering.mesh.local(pair[0].type, pair[1]).shape))[1]

    def make(wanted: Sharding) -> Value:
        return lowering.builder.add(node.op, [x.at(wanted) for x in operands], node.attrs).out

    if OPEN in split:
        return ShardedTensor(node.out.type, split, make)
    value = make(split)
    lowering.cycles += 24 + count_piece_elements(value)
    return lowering.hold(node, split, value)


@mesh_op_rules(basic.full)
def _(lowering, node):
    one = lowering.full(node.out.type.with_shape((1,) * node.out.type.rank), node.attrs["value"])
    return lowering.hold(node, (CONSTANT,) * node.out.type.rank, one)


@mesh_op_rules(basic.dim_value)
def _(lowering, node):
    return lowering.hold(node, (), lowering.full(node.out.type, node.attrs["size"]))


@mesh_op_rules(shape.iota)
def _(lowering, node):
    axis, type = node.attrs["axis"] % node.out.type.rank, node.out.type

    def make(wanted: Sharding) -> Value:
        local = lowering.mesh.local(type, wanted)
        return lowering.broadcast_axes(lowering.places(local, axis, wanted[axis], type.dtype), local)

    return ShardedTensor(type, tuple(OPEN if a == axis else CONSTANT for a in range(type.rank)), make)


@mesh_op_rules(basic.broadcast_to)
def _(lowering, node, x):
    type, extra = node.out.type, node.out.type.rank - x.type.rank
    kept = [int(n) == int(m) for n, m in zip(x.type.shape, type.shape[extra:], strict=True)]
    split = (CONSTANT,) * extra + tuple(s if same else CONSTANT for s, same in zip(x.split, kept, strict=True))

    def make(wanted: Sharding) -> Value:
        inner = tuple(w if same else CONSTANT for w, same in zip(wanted[extra:], kept, strict=True))
        value = x.at(inner)
        if extra:
            value = lowering.add(shape.reshape, value, shape=(1,) * extra + tuple(value.type.shape))
        return lowering.broadcast_axes(value, lowering.mesh.local(type, wanted))

    return ShardedTensor(type, split, make, x.clean)


@mesh_op_rules(shape.permute)
def _(lowering, node, x):
    axes = [a % x.type.rank for a in node.attrs["axes"]]

    def make(wanted: Sharding) -> Value:
        inner = tuple(wanted[axes.index(a)] for a in range(len(axes)))
        return lowering.add(shape.permute, x.at(inner), axes=tuple(axes))

    return ShardedTensor(node.out.type, tuple(x.split[a] for a in axes), make, x.clean)


@mesh_op_rules(shape.reshape)
def _(lowering, node, x):
    pairs = match_reshape_axes(x.type.shape, node.out.type.shape)
    merged = [a for before, after in pairs if not (len(before) == len(after) == 1) for a in before]
    source = lowering.unshard_axes(x, merged)
    split = [CONSTANT] * node.out.type.rank
    for before, after in pairs:
        for axis in after:
            split[axis] = source[before[0]] if len(before) == len(after) == 1 else UNSPLIT
    wanted = lowering.mesh.local(node.out.type, tuple(split))
    value = lowering.add(shape.reshape, x.at(source), shape=tuple(wanted.shape))
    return lowering.hold(node, tuple(split), value)


def match_reshape_axes(before: Any, after: Any) -> list[tuple[list[int], list[int]]]:
    """Axes of a shape and of its reshape that hold the same elements; axes of size 1 are in none."""
    left = [a for a, n in enumerate(before) if int(n) != 1]
    right = [a for a, n in enumerate(after) if int(n) != 1]
    found = []
    while left:
        one, other = [left.pop(0)], [right.pop(0)]
        sizes = [int(before[one[0]]), int(after[other[0]])]
        while sizes[0] != sizes[1]:
            short = sizes[0] > sizes[1]
            axis = (right if short else left).pop(0)
            (other if short else one).append(axis)
            sizes[short] *= int((after if short else before)[axis])
        found.append((one, other))
    return found


@mesh_op_rules(reduce.sum, reduce.max, reduce.min)
def _(lowering, node, x):
    axes, kind = [a % x.type.rank for a in node.attrs["axis"]], node.op.__name__
    split = list(lowering.settle(x))
    for axis in axes:
        if split[axis] == CONSTANT and int(x.type.shape[axis]) > 1:
            split[axis] = UNSPLIT
    value, short = x.at(tuple(split)), x.type.dtype.is_float and x.type.dtype.bits < 16
    if short:  # what leaves a maximum as it is may be none of its numbers
        value = lowering.add(basic.cast, value, dtype=f32)
    for axis in axes:
        value = lowering.fill_padding(x, tuple(split), axis, find_neutral_element(kind, x.type.dtype), value)
    summed = kind == "sum" and x.type.dtype.is_float
    wide = x.type.accumulate if summed else f32 if short else node.out.type.dtype
    if value.type.dtype != wide:
        value = lowering.add(basic.cast, value, dtype=wide)
    value = lowering.add(node.op, value, axis=node.attrs["axis"], keepdims=node.attrs["keepdims"])
    value = emit_all_reduce(lowering, value, [split[a] for a in axes], kind)
    if value.type.dtype != node.out.type.dtype:
        value = lowering.add(basic.cast, value, dtype=node.out.type.policy or node.out.type.dtype)
    left = [CONSTANT if a in axes else s for a, s in enumerate(split) if a not in axes or node.attrs["keepdims"]]
    return lowering.hold(node, tuple(left), value)


def emit_all_reduce(lowering: MeshLowering, value: Value, cuts: list[int], kind: str) -> Value:
    """All-reduce along the sharded axes; elements that memory holds as codes are exchanged as f32."""
    dtype = tensor_type_of(value).dtype
    if dtype.is_float and dtype.bits <= 16 and dtype != f16 and any(cut >= 0 for cut in cuts):
        wide = emit_all_reduce(lowering, lowering.add(basic.cast, value, dtype=f32), cuts, kind)
        return lowering.add(basic.cast, wide, dtype=dtype)
    for cut in cuts:
        if cut >= 0:
            value = lowering.add(mesh.all_reduce, value, axis=cut, kind=kind)
            lowering.cycles += 3 * count_piece_elements(value) + 8 * lowering.mesh.grid[cut]
    return value


@mesh_op_rules(shape.mesh_shift)
def _(lowering, node, x):
    axis, shift = node.attrs["axis"], node.attrs["shift"]
    split = lowering.settle(x)
    cut = split[axis]
    if cut == CONSTANT and shift:  # of size 1: nobody has a neighbour
        return lowering.hold(node, split, lowering.full(lowering.mesh.local(node.out.type, split), 0))
    value = lowering.fill_padding(x, split, axis % x.type.rank, 0)
    for _ in range(min(abs(shift), int(x.type.shape[axis]))):
        value = _shift_piece(lowering, value, axis, cut, 1 if shift > 0 else -1)
    return lowering.hold(node, split, value)


def _shift_piece(lowering: MeshLowering, value: Value, axis: int, cut: int, offset: int) -> Value:
    """Shift a piece by one index; the neighbour's edge or zeros fill the end."""
    length = int(value.type.shape[axis])
    edge = lowering.add(mesh.panel, value, lowering.index(length - 1 if offset > 0 else 0), axis=axis, count=length)
    if cut >= 0:
        edge = lowering.add(mesh.shift, edge, axis=cut, offset=offset)
    else:
        edge = lowering.full(tensor_type_of(edge), 0)
    return lowering.add(mesh.halo, value, edge, axis=axis, offset=offset)


def raise_unmapped(lowering: MeshLowering, node: Node) -> ShardedTensor:
    """Raise the error for an op without a rule."""
    if "collective" in node.op.effects:
        raise NoMapping(
            f"{node.op.name} has no mapping onto a mesh of processing elements: they are one device, one rank",
            location=lowering.builder.location, suggestion="run it on another target",
        )  # fmt: skip
    raise lowering.make_mapping_error(f"{node.op.name} has no rule for one, whatever its grid")


_ARG_TO_VALUE_OPS = {reduce.argmax: reduce.max, reduce.argmin: reduce.min}


@mesh_op_rules(*_ARG_TO_VALUE_OPS)
def _(lowering, node, x):
    axis, best = node.attrs["axis"] % x.type.rank, _ARG_TO_VALUE_OPS[node.op]
    split = list(lowering.settle(x))
    split[axis] = UNSPLIT if split[axis] == CONSTANT else split[axis]
    kind, cut, type = best.__name__, split[axis], x.type
    value = lowering.fill_padding(x, tuple(split), axis, find_neutral_element(kind, type.dtype))
    if type.dtype == bool_:
        value = lowering.add(basic.cast, value, dtype=int32)
    extreme = lowering.add(best, value, axis=(axis - type.rank,), keepdims=True)
    extreme = lowering.broadcast_axes(emit_all_reduce(lowering, extreme, [cut], kind), tensor_type_of(value))
    places = lowering.broadcast_axes(
        lowering.places(tensor_type_of(value), axis, cut, int32), tensor_type_of(value).with_dtype(int32)
    )
    none = lowering.full(tensor_type_of(places), int(type.shape[axis]))
    first = lowering.add(e.where, _equal_or_both_nan(lowering, value, extreme), places, none)
    found = lowering.add(reduce.min, first, axis=(axis - type.rank,), keepdims=node.attrs["keepdims"])
    found = lowering.add(basic.cast, emit_all_reduce(lowering, found, [cut], "min"), dtype=node.out.type.dtype)
    kept = [CONSTANT if a == axis else s for a, s in enumerate(split) if a != axis or node.attrs["keepdims"]]
    return lowering.hold(node, tuple(kept), found)


def _equal_or_both_nan(lowering: MeshLowering, x: Value, y: Value) -> Value:
    """Elementwise equality, in which NaNs are equal."""
    equal = lowering.add(e.equal, x, y)
    if not tensor_type_of(x).dtype.is_float:
        return equal
    both = [lowering.add(e.not_equal, v, v) for v in (x, y)]
    return lowering.add(e.bitwise_or, equal, lowering.add(e.bitwise_and, *both))


@mesh_op_rules(shape.slice_)
def _(lowering, node, x):
    known, sizes = node.attrs, [int(n) for n in x.type.shape]
    ranges = list(zip(known["start"], known["stop"], known["step"], strict=True))
    changed = [a for a, (n, r) in enumerate(zip(sizes, ranges, strict=True)) if r != (0, n, 1)]
    split = lowering.unshard_axes(x, changed)
    value = x.at(split)
    local = [r if a in changed else (0, int(value.type.shape[a]), 1) for a, r in enumerate(ranges)]
    start, stop, step = (tuple(r[i] for r in local) for i in range(3))
    value = lowering.add(mesh.section, value, start=start, stop=stop, step=step)
    return lowering.hold(node, _mark_unit_axes(split, node.out.type), value)


def _mark_unit_axes(split: Sharding, type: TensorType) -> Sharding:
    """A sharding in which whole axes of size 1 are constant."""
    return tuple(CONSTANT if s == UNSPLIT and int(n) == 1 else s for s, n in zip(split, type.shape, strict=True))


@mesh_op_rules(shape.pad)
def _(lowering, node, x):
    low, high, rank = node.attrs["low"], node.attrs["high"], x.type.rank
    changed = [a for a in range(rank) if low[a] or high[a]]
    split = _unshard_constant_axes(lowering.unshard_axes(x, changed), changed)
    value = x.at(split)
    for axis in changed:
        ends = [_make_padding(lowering, value, axis, n, node.attrs["value"]) for n in (low[axis], high[axis])]
        parts = [part for part in (ends[0], value, ends[1]) if part is not None]
        value = lowering.add(mesh.join, *parts, axis=axis - rank)
    return lowering.hold(node, split, value)


def _unshard_constant_axes(split: Sharding, axes: list[int]) -> Sharding:
    """A sharding in which some constant axes are whole."""
    return tuple(UNSPLIT if a in axes else s for a, s in enumerate(split))


def _make_padding(lowering: MeshLowering, like: Value, axis: int, length: int, fill: float) -> Value | None:
    sizes = tuple(length if a == axis else int(n) for a, n in enumerate(like.type.shape))
    return lowering.full(tensor_type_of(like).with_shape(sizes), fill) if length else None


@mesh_op_rules(shape.concatenate)
def _(lowering, node, *operands):
    axis = node.attrs["axis"] % node.out.type.rank
    widest = max(operands, key=lambda x: int(x.type.shape[axis]))
    split = _unshard_constant_axes(lowering.unshard_axes(widest, [axis]), [axis])
    value = lowering.add(mesh.join, *(x.at(split) for x in operands), axis=node.attrs["axis"])
    return lowering.hold(node, split, value)


def _check_indices(lowering: MeshLowering, x: ShardedTensor, split: Sharding, attrs: Any) -> Value:
    """Checked indices; padding past the tensor's end is 0, which is an index of every axis."""
    value = x.at(split)
    for axis in range(len(split)):
        value = lowering.fill_padding(x, split, axis, 0, value)
    return lowering.builder.add(shape.check_index, [value], attrs).out


@mesh_op_rules(shape.check_index)
def _(lowering, node, x):
    split = lowering.settle(x)
    value = _check_indices(lowering, x, split, node.attrs)
    lowering.cycles += 24 + count_piece_elements(value)
    return lowering.hold(node, split, value)


@mesh_op_rules(shape.gather)
def _(lowering, node, x, indices):
    axis = node.attrs["axis"] % x.type.rank
    split = _unshard_constant_axes(lowering.unshard_axes(x, [axis]), [axis])
    chosen = tuple(UNSPLIT if s in split else s for s in lowering.settle(indices))
    size, signed = int(x.type.shape[axis]), indices.type.dtype.kind == "int"
    known = {"size": size, "along": axis, "what": "index", "wrap": signed}
    places = _check_indices(lowering, indices, chosen, known)
    value = lowering.add(mesh.pick, x.at(split), places, axis=node.attrs["axis"])
    return lowering.hold(node, (*split[:axis], *chosen, *split[axis + 1 :]), value)


@mesh_op_rules(basic.recompute, basic.fusion_barrier)
def _(lowering, node, x):
    # On a mesh every value is computed once, and held.
    return ShardedTensor(x.type, x.split, x.at, x.clean)
