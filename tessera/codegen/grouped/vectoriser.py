"""Whole-function vectorisation (Karrenberg and Hack 2011): the tiles of a group become the leading axis of varying
blocks.

A processor runs the whole group as one program: each op is done for all tiles before the next begins, so that barriers
need no code. A varying scalar becomes a block of `group` elements, a varying block gets a leading axis of that size, a
uniform value stays as it is. Varying addresses become gathers and scatters; values exchanged between tiles become
reshapes and gathers along the leading axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tessera.codegen.contract import static_shape
from tessera.core.symbolic_dim import Dim
from tessera.core.types import REGISTER, SHARED, DType, RefType, bool_, int64
from tessera.ir.builder import Builder, evaluate_block
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.ir.rules import Op, Rules
from tessera.lower.passes.tail_duplication import duplicate_tails
from tessera.ops.dialects import control_flow, host, mbarrier, tile
from tessera.ops.dialects import tile as group_ops
from tessera.ops.dialects import tile as ops
from tessera.ops.tensor import basic, elementwise, shape
from tessera.ops.tensor import elementwise as e

LEVEL = "grouped"  # the level of a module after vectorisation
vectorise = Rules("group")
# Ops that are rewritten even where a group has one tile.
GROUP_OPS = (group_ops.collect, group_ops.exchange, group_ops.meet, tile.assert_, tile.print_, *mbarrier.MBARRIER_OPS)
RunBlock = Callable[..., list[Any]]


@dataclass(frozen=True)
class GroupValue:
    """A value of the vectorised function; if it is varying, it differs between tiles and its first axis is theirs."""

    value: Value
    varying: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape for one tile; a memory may have symbolic sizes."""
        full_shape = self.value.type.shape
        return tuple(full_shape[1:] if self.varying else full_shape)


class GroupVectoriser:
    """Vectorises one function; `active` is the active mask, None where all tiles are active.

    Code is for `size` tiles at once: all `total` of them, or one subgroup in a serial loop over subgroups, whose first
    tile is `subgroup_start`.
    """

    def __init__(self, size: int, counted: bool = False) -> None:
        self.size = self.total = size
        self.counted = counted  # whether loops have a known number of trips, as their reverse mode needs
        self.subgroup_start: Value | None = None
        self.builder = Builder()
        self.active: Value | None = None
        self.has_divergent_wait = False  # whether a vectorised wait differs between tiles

    def add(self, op: Op, *args: Value, **attrs: Any) -> Value:
        """Add a node; its result."""
        return self.builder.add(op, args, attrs).out

    def tile_numbers(self) -> Value:
        """The number of each tile that the code is for."""
        if self.subgroup_start is not None and self.size == 1:
            return self.reshape(self.subgroup_start, (1,))
        numbers = self.add(shape.iota, shape=(self.size,), axis=-1, dtype=int64)
        return (
            numbers
            if self.subgroup_start is None
            else self.add(elementwise.add, numbers, self.broadcast(self.subgroup_start, (self.size,)))
        )

    def first_tile(self) -> Value:
        """The number of the first tile that the code is for."""
        return self.full(0, int64) if self.subgroup_start is None else self.subgroup_start

    def expand_to_group(self, v: Value, mask: bool = False) -> Value:
        """A subgroup's block as a block of the whole group, for reports; a mask is false for all other tiles."""
        if self.subgroup_start is None:
            return v
        rest = tuple(int(n) for n in v.type.shape[1:])
        subgroups = self.total // self.size
        expanded = self.broadcast(self.reshape(v, (1, self.size, *rest)), (subgroups, self.size, *rest))
        if mask:
            subgroup_starts = self.add(shape.iota, shape=(subgroups,), axis=-1, dtype=int64)
            subgroup_starts = self.add(elementwise.mul, subgroup_starts, self.full(self.size, int64, subgroups))
            own_mask = self.add(elementwise.equal, subgroup_starts, self.broadcast(self.subgroup_start, (subgroups,)))
            own_mask = self.broadcast(
                self.reshape(own_mask, (subgroups, 1, *(1,) * len(rest))), (subgroups, self.size, *rest)
            )
            expanded = self.add(elementwise.bitwise_and, expanded, own_mask)
        return self.reshape(expanded, (self.total, *rest))

    def full(self, value: Any, dtype: DType, *sizes: int) -> Value:
        """A constant block; the constant may be a symbolic size."""
        if isinstance(value, Dim):
            return self.broadcast(self.add(basic.dim_value, size=value), sizes)
        return self.add(basic.full, shape=sizes, value=value, dtype=dtype)

    def to_varying(self, part: GroupValue) -> Value:
        """A value with the tiles' axis: a uniform one is broadcast along it."""
        return part.value if part.varying else self.broadcast(part.value, (self.size, *part.shape))

    def broadcast(self, v: Value, sizes: Sequence[int]) -> Value:
        """A block broadcast to a shape."""
        return v if tuple(v.type.shape) == tuple(sizes) else self.add(basic.broadcast_to, v, shape=tuple(sizes))

    def reshape(self, v: Value, sizes: Sequence[int]) -> Value:
        """A block in another shape."""
        return v if tuple(v.type.shape) == tuple(sizes) else self.add(shape.reshape, v, shape=tuple(sizes))

    def align_rank(self, part: GroupValue, rank: int) -> Value:
        """A value with axes of size 1 inserted, so that it broadcasts with blocks of `rank` axes for each tile."""
        missing = (1,) * (rank - len(part.shape))
        if part.varying:
            return self.reshape(part.value, (self.size, *missing, *part.shape))
        return self.reshape(part.value, (*missing, *part.shape))

    def and_masks(self, a: Value | None, b: Value | None) -> Value | None:
        """The conjunction of two masks, broadcast together; None stands for all true."""
        if a is None or b is None:
            return a or b
        sizes = _broadcast_shapes(a.type.shape, b.type.shape)
        return self.add(elementwise.bitwise_and, self.broadcast(a, sizes), self.broadcast(b, sizes))

    def active_mask(self, rank: int) -> Value | None:
        """The mask of active tiles, for blocks of `rank` axes."""
        return None if self.active is None else self.align_rank(GroupValue(self.active, True), rank)

    def vectorise_node(self, node: Node, args: list[GroupValue], run: RunBlock) -> Sequence[GroupValue]:
        """The results of a node, vectorised."""
        with self.builder.at(node.loc):
            return (
                vectorise.of(node.op)(self, node, args, run)
                if node.op in vectorise
                else _vectorise_by_default(self, node, args)
            )


def _broadcast_shapes(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b), strict=True)
    return tuple(int(m if n == 1 else n) for m, n in pairs)


def vectorise_groups(module: Module) -> Module:
    """A Tile module whose kernels have groups of one tile."""
    return module.replace(module.main, *(vectorise_function(f) for f in module.functions[1:]), level=LEVEL)


def vectorise_function(function: Function, counted: bool = False) -> Function:
    """A tile function whose groups have one tile; each of its programs is a group."""
    size = int(function.attrs.get("group", 1))
    if size == 1 and not any(n.op in GROUP_OPS for n in function.body.walk()):
        return function
    function, group = duplicate_tails(function), GroupVectoriser(size, counted)
    params = [Value(p.type, p.hint) for p in function.params]
    evaluate_block(function.body, [GroupValue(p) for p in params], group.vectorise_node)
    attrs = Attrs({**function.attrs, "group": 1, "tiles": size})
    return Function(function.name, group.builder.block(params, ()), attrs, function.loc)


def _vectorise_by_default(group: GroupVectoriser, node: Node, args: list[GroupValue]) -> Sequence[GroupValue]:
    """An op that ignores leading axes: reductions count axes from the end, a dot has the tiles' axis as a batch."""
    varying = any(p.varying for p in args)
    values = [group.to_varying(p) if varying and not isinstance(p.value.type, RefType) else p.value for p in args]
    return [GroupValue(v, varying) for v in group.builder.add(node.op, values, node.attrs).results]


@vectorise(tile.local_id)
def _(group, node, args, run):
    return [GroupValue(group.tile_numbers(), True)]


@vectorise(tile.group_size)
def _(group, node, args, run):
    return [GroupValue(group.full(group.total, int64))]


@vectorise(tile.barrier, tile.async_commit, tile.async_wait)
def _(group, node, args, run):
    return []


@vectorise(basic.broadcast_to)
def _(group, node, args, run):
    (x,), sizes = args, node.attrs["shape"]
    if not x.varying:
        return [GroupValue(group.broadcast(x.value, sizes))]
    return [GroupValue(group.broadcast(group.align_rank(x, len(sizes)), (group.size, *sizes)), True)]


@vectorise(shape.reshape)
def _(group, node, args, run):
    (x,), sizes = args, node.attrs["shape"]
    return [GroupValue(group.reshape(x.value, (group.size, *sizes) if x.varying else sizes), x.varying)]


@vectorise(shape.permute)
def _(group, node, args, run):
    (x,), axes = args, node.attrs["axes"]
    moved = (0, *(a + 1 for a in axes)) if x.varying else axes
    return [GroupValue(group.add(shape.permute, x.value, axes=moved), x.varying)]


# Memory: varying indices become gathers and scatters.


@vectorise(tile.alloc)
def _(group, node, args, run):
    attrs = dict(node.attrs)
    per_tile = attrs["space"] == REGISTER
    if per_tile:
        attrs["shape"] = (group.total, *attrs["shape"])
    return [GroupValue(group.builder.add(tile.alloc, [], attrs).out, per_tile)]


@vectorise(tile.load)
def _(group, node, args, run):
    ref, rest = args[0], args[1:]
    rank = len(ref.shape)
    return [load_blocks(group, ref, rest[:rank], node.attrs["shape"], node.attrs["edge"], rest[rank:])]


def load_blocks(
    group: GroupVectoriser,
    ref: GroupValue,
    starts: Sequence[GroupValue],
    block: tuple[int, ...],
    edge: str,
    rest: Sequence[GroupValue],
) -> GroupValue:
    """A block for each tile; one load for all of them where ref, indices and mask are uniform."""
    if ref.varying and not any(p.varying for p in starts):
        values = [p.value for p in starts]
        extra = [group.to_varying(_broadcast_to_block(group, p, block)) for p in rest]
        attrs = {"shape": (group.size, *block), "edge": edge}
        return GroupValue(
            group.builder.add(tile.load, [ref.value, group.first_tile(), *values, *extra], attrs).out, True
        )
    if not any(p.varying for p in (*starts, *rest)):
        attrs = {"shape": block, "edge": edge}
        return GroupValue(group.builder.add(tile.load, [ref.value, *(p.value for p in (*starts, *rest))], attrs).out)
    indices = build_indices(group, ref, starts, block)
    default = [group.align_rank(rest[1], len(block))] if len(rest) > 1 else []
    mask = _build_mask(group, ref, starts, block, edge, rest[0] if rest else None)
    if default:
        default = [group.broadcast(default[0], (group.size, *block))]
    keep = group.broadcast(mask, (group.size, *block)) if mask is not None else None
    result = group.add(tile.gather, ref.value, *indices, *([keep] if keep else []), *(default if keep else []))
    return GroupValue(group.broadcast(result, (group.size, *block)), True)


def _broadcast_to_block(group: GroupVectoriser, p: GroupValue, block: tuple[int, ...]) -> GroupValue:
    """A mask or default value, broadcast to the shape of its block."""
    if p.varying:
        return GroupValue(group.broadcast(group.align_rank(p, len(block)), (group.size, *block)), True)
    return GroupValue(group.broadcast(p.value, block))


def build_indices(
    group: GroupVectoriser, ref: GroupValue, starts: Sequence[GroupValue], block: tuple[int, ...]
) -> list[Value]:
    """The index of every element of every tile's block along each axis, with shapes that broadcast."""
    result = []
    for axis, (start, n) in enumerate(zip(starts, block, strict=True)):
        along = [1] * len(block)
        along[axis] = n
        steps = GroupValue(group.add(shape.iota, shape=tuple(along), axis=axis - len(block), dtype=int64))
        first = group.align_rank(GroupValue(_cast_to_int64(group, start.value), start.varying), len(block))
        full_shape = (group.size, *along) if start.varying else tuple(along)
        result.append(
            group.add(elementwise.add, group.broadcast(first, full_shape), group.broadcast(steps.value, full_shape))
        )
    # The tiles' axis of a varying ref is indexed by the tile's number.
    result[:0] = [_number_tiles(group, len(block))] if ref.varying else []
    return result


def _cast_to_int64(group: GroupVectoriser, v: Value) -> Value:
    return v if v.type.dtype == int64 else group.add(basic.cast, v, dtype=int64)


def _number_tiles(group: GroupVectoriser, rank: int) -> Value:
    """The number of each tile, for blocks of `rank` axes."""
    return group.align_rank(GroupValue(group.tile_numbers(), True), rank)


def _build_mask(
    group: GroupVectoriser,
    ref: GroupValue,
    starts: Sequence[GroupValue],
    block: tuple[int, ...],
    edge: str,
    own_mask: GroupValue | None,
) -> Value | None:
    """Which elements to access: of active tiles, within bounds (for `edge="clip"`), and in the program's own mask."""
    mask = group.active_mask(len(block))
    if own_mask is not None:
        mask = group.and_masks(mask, group.align_rank(own_mask, len(block)))
    if edge != "clip":
        return mask
    indices = build_indices(group, ref, starts, block)[1 if ref.varying else 0 :]
    for index, n in zip(indices, ref.shape, strict=True):
        zero, size = (group.full(v, int64, *static_shape(index.type)) for v in (0, n))
        mask = group.and_masks(mask, group.add(elementwise.greater_equal, index, zero))
        mask = group.and_masks(mask, group.add(elementwise.less, index, size))
    return mask


@vectorise(tile.store)
def _(group, node, args, run):
    ref, value, rest = args[0], args[1], args[2:]
    rank = len(ref.shape)
    store_blocks(group, ref, value, rest[:rank], node.attrs["edge"], rest[rank] if rest[rank:] else None)
    return []


def store_blocks(
    group: GroupVectoriser,
    ref: GroupValue,
    value: GroupValue,
    starts: Sequence[GroupValue],
    edge: str,
    own_mask: GroupValue | None,
) -> None:
    """Store each tile's block, or one block where everything is uniform."""
    block, masks = value.shape, [own_mask] if own_mask is not None else []
    if ref.varying and not any(p.varying for p in starts):
        mask = group.active_mask(len(block))
        if own_mask is not None:
            mask = group.and_masks(mask, group.align_rank(own_mask, len(block)))
        extra = [group.broadcast(mask, (group.size, *block))] if mask is not None else []
        values = [ref.value, group.to_varying(value), group.first_tile(), *(p.value for p in starts), *extra]
        group.builder.add(tile.store, values, {"edge": edge})
        return
    if not any(p.varying for p in (value, *starts, *masks)):
        # At least one tile is active here: the branch around it has checked that.
        group.builder.add(tile.store, [p.value for p in (ref, value, *starts, *masks)], {"edge": edge})
        return
    indices = build_indices(group, ref, starts, block)
    indices[0] = group.broadcast(indices[0], (group.size, *_get_trailing_shape(indices[0], len(block))))
    mask = _build_mask(group, ref, starts, block, edge, own_mask)
    group.builder.add(
        tile.scatter, [ref.value, group.to_varying(value), *indices, *([mask] if mask is not None else [])], {}
    )


def _get_trailing_shape(v: Value, rank: int) -> tuple[int, ...]:
    full_shape = static_shape(v.type)
    return full_shape[len(full_shape) - rank :] if rank else ()


@vectorise(tile.async_copy)
def _(group, node, args, run):
    dst, src, starts = args[0], args[1], args[2:]
    dst_rank, src_rank, block = len(dst.shape), len(src.shape), tuple(node.attrs["shape"])
    full = (1,) * (max(dst_rank, src_rank, len(block)) - len(block)) + block
    target, source = full[len(full) - dst_rank :], full[len(full) - src_rank :]
    data = load_blocks(group, src, starts[dst_rank:], source, node.attrs["edge"], [])
    full_shape = (group.size, *target) if data.varying else target
    store_blocks(
        group, dst, GroupValue(group.reshape(data.value, full_shape), data.varying), starts[:dst_rank], "error", None
    )
    return []


@vectorise(tile.gather)
def _(group, node, args, run):
    ref, rest = args[0], args[1:]
    rank, depth = len(ref.shape), len(node.out.type.shape)
    if not ref.varying and not any(p.varying for p in rest):
        return [GroupValue(group.add(tile.gather, ref.value, *(p.value for p in rest)))]
    indices, extra = (
        _broadcast_indices(group, ref, rest[:rank], depth),
        [group.align_rank(p, depth) for p in rest[rank:]],
    )
    mask = group.and_masks(group.active_mask(depth), extra[0] if extra else None)
    out = (group.size, *node.out.type.shape)
    extra = [group.broadcast(mask, out)] if mask is not None else []
    extra += [group.broadcast(extra[1], out)] if len(extra) > 1 else []
    return [GroupValue(group.broadcast(group.add(tile.gather, ref.value, *indices, *extra), out), True)]


def _broadcast_indices(
    group: GroupVectoriser, ref: GroupValue, indices: Sequence[GroupValue], depth: int
) -> list[Value]:
    """Index blocks with shapes that broadcast; for a varying ref the tile's number comes first."""
    tile_index = [_number_tiles(group, depth)] if ref.varying else []
    return [*tile_index, *(group.align_rank(p, depth) for p in indices)]


@vectorise(tile.scatter)
def _(group, node, args, run):
    ref, value, rest = args[0], args[1], args[2:]
    rank = len(ref.shape)
    depth = max((len(p.shape) for p in rest), default=0)
    if not ref.varying and not any(p.varying for p in (value, *rest)):
        group.builder.add(tile.scatter, [ref.value, value.value, *(p.value for p in rest)], {})
        return []
    indices, extra = (
        _broadcast_indices(group, ref, rest[:rank], depth),
        [group.align_rank(p, depth) for p in rest[rank:]],
    )
    mask = group.and_masks(group.active_mask(depth), extra[0] if extra else None)
    everyone = (group.size, *((1,) * depth))
    mask = group.and_masks(mask, group.full(True, bool_, *everyone))
    group.builder.add(
        tile.scatter, [ref.value, group.align_rank(value, depth), *indices, *([mask] if mask else [])], {}
    )
    return []


@vectorise(tile.atomic, tile.compare_exchange)
def _(group, node, args, run):
    count = 1 if node.op is tile.atomic else 2
    ref, values, rest = args[0], args[1 : 1 + count], args[1 + count :]
    rank, depth = len(ref.shape), len(node.out.type.shape)
    indices, extra = (
        _broadcast_indices(group, ref, rest[:rank], depth),
        [group.align_rank(p, depth) for p in rest[rank:]],
    )
    mask = group.and_masks(group.active_mask(depth), extra[0] if extra else None)
    # Every tile does its own update, even where address and value are uniform.
    out = (group.size, *node.out.type.shape)
    keep = group.broadcast(mask if mask is not None else group.full(True, bool_), out)
    operands = [group.align_rank(p, depth) for p in values]
    old = group.builder.add(node.op, [ref.value, *operands, *indices, keep], node.attrs).out
    return [GroupValue(old, True)]


# Exchange of values between tiles: along the tiles' axis.


@vectorise(ops.collect)
def _(group, node, args, run):
    (x,), width, size = args, node.attrs["width"], group.size
    if not x.varying:
        return [GroupValue(group.broadcast(x.value, (width, *x.shape)))]
    if width == size:  # every tile reads every tile's value
        return [GroupValue(x.value)]
    each = group.reshape(x.value, (size // width, 1, width, *x.shape))
    seen = group.broadcast(each, (size // width, width, width, *x.shape))
    return [GroupValue(group.reshape(seen, (size, width, *x.shape)), True)]


@vectorise(ops.meet)
def _(group, node, args, run):
    return []  # each op is done for all tiles before the next begins


@vectorise(ops.exchange)
def _(group, node, args, run):
    x, lane = args
    if not x.varying:
        return [x]
    attrs = {"shape": (group.size, *x.shape), "dtype": x.value.type.dtype, "space": SHARED}
    memory = group.builder.add(tile.alloc, [], attrs).out
    zero = group.full(0, int64)
    group.builder.add(tile.store, [memory, x.value, *[zero] * (len(x.shape) + 1)], {"edge": "error"})
    starts = [_find_source_tile(group, lane, node.attrs["width"]), *[GroupValue(zero)] * len(x.shape)]
    result = load_blocks(group, GroupValue(memory), starts, (1, *x.shape), "error", [])
    return [GroupValue(group.reshape(result.value, (group.size, *x.shape)), True)]


def _find_source_tile(group: GroupVectoriser, lane: GroupValue, width: int) -> GroupValue:
    """The number of the tile that each tile reads from."""
    tile_numbers = group.add(shape.iota, shape=(group.size,), axis=-1, dtype=int64)
    each = group.full(width, int64, group.size)
    first = group.add(e.sub, tile_numbers, group.add(e.remainder, tile_numbers, each))
    return GroupValue(group.add(e.add, first, group.add(e.remainder, group.to_varying(lane), each)), True)


# Launches: a launch at the Graph level with groups of tiles becomes one of single programs.


def ungroup_launches(function: Function) -> Function:
    """The function with each launch of groups as one program per group, in regions too; the same one if it has none."""
    body = _ungroup_block(function.body)
    return function if body is function.body else replace(function, body=body)


def _ungroup_block(block: Block) -> Block:
    nodes = tuple(_ungroup_node(n) for n in block.nodes)
    return block if all(a is b for a, b in zip(nodes, block.nodes, strict=True)) else replace(block, nodes=nodes)


def _ungroup_node(node: Node) -> Node:
    if node.op is control_flow.launch:
        return ungroup_launch(node) if int(node.attrs["attrs"].get("group", 1)) > 1 else node
    regions = tuple(map(_ungroup_block, node.regions))
    return node if all(a is b for a, b in zip(regions, node.regions, strict=True)) else replace(node, regions=regions)


def ungroup_launch(node: Node, counted: bool = False) -> Node:
    """The launch with one program for each group of tiles; `counted` loops have a known number of trips."""
    made = vectorise_function(host.launched_function(node), counted)
    hints = Attrs({name: value for name, value in made.attrs.items() if name not in ("grid", "tiles")})
    return replace(node, regions=(made.body,), attrs=Attrs({**node.attrs, "attrs": hints}))
