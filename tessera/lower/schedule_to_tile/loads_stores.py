"""Loads and stores of tiles: a block access where the tile is a block of memory, else a gather or scatter."""

from __future__ import annotations

from tessera.ir.core import Node, Value
from tessera.lower.affine import IndexDigit
from tessera.lower.schedule_to_tile.tile_emitter import BlockLayout, BlockValue, TileEmitter, find_block_layout
from tessera.ops.dialects import schedule, tile
from tessera.ops.tensor import elementwise as e


def emit_load(emit: TileEmitter, node: Node) -> BlockValue:
    """Emit a schedule.load."""
    rank = node.args[0].type.rank
    exprs = emit.forms.indices(node)
    mask = emit.env[node.args[rank + 1]] if len(node.args) > rank + 1 else None
    found = find_block_layout(exprs, emit.tile)
    if found is None:
        return _emit_gather(emit, node, mask)
    ragged = any(emit.is_ragged(d) for d in emit.forms.depends[node.out])
    edge = "clip" if ragged or mask else "error"
    starts = [emit.emit_first_index(expr) for expr in exprs]
    data = emit.add(tile.load, [emit.refs[node.args[0]], *starts], shape=found.shape, edge=edge)
    block = _reorder_to_dims(emit, data, found)
    if mask is None:
        return block
    zero = BlockValue(emit.full((), _make_zero(data), data.type.dtype))
    return emit.add_pointwise(e.where, [mask, block, zero])


def _make_zero(data: Value) -> float | int:
    return 0.0 if data.type.dtype.is_float else 0


def _reorder_to_dims(emit: TileEmitter, data: Value, found: BlockLayout) -> BlockValue:
    """Permute a block of memory to one axis for each dim, in order."""
    parts = emit.reshape(data, tuple(p.size for p in found.parts))
    ordered = emit.permute(parts, found.order())
    return BlockValue(emit.reshape(ordered, emit.shape(found.dims)), found.dims)


def _emit_gather(emit: TileEmitter, node: Node, mask: BlockValue | None) -> BlockValue:
    indices = [emit.env[v] for v in node.args[1 : node.args[0].type.rank + 1]]
    axes = tuple(sorted({d for t in indices for d in t.axes}))
    # Elements past the end of a dim have no valid index.
    inside = emit.make_range_mask(axes)
    if inside is not None:
        mask = inside if mask is None else emit.add_pointwise(e.bitwise_and, [mask, inside])
    axes = tuple(sorted({*axes, *(mask.axes if mask else ())}))
    args = [emit.align_axes(t, axes) for t in [*indices, *([mask] if mask else [])]]
    shape = emit.shape(axes)
    if mask and any(args[-1].type.shape[i] != n for i, n in enumerate(shape)):
        args[-1] = emit.broadcast_to_dims(mask, axes)
    if not mask and indices:
        args[0] = emit.broadcast_to_dims(indices[0], axes)
    return BlockValue(emit.add(tile.gather, [emit.refs[node.args[0]], *args]), axes)


def emit_store(emit: TileEmitter, node: Node) -> None:
    """Emit a schedule.store."""
    exprs = emit.forms.indices(node)
    found = find_block_layout(exprs, emit.tile)
    value = emit.env[node.args[1]]
    ragged = {d for d in emit.forms.depends[node.args[1]] if emit.is_ragged(d)} | _find_ragged_dims(emit, found)
    if found is None or not all(ends_with_memory(emit, node, d) for d in ragged):
        _emit_scatter(emit, node, value)
        return
    assert set(value.axes) <= set(found.dims), "a value is stored at the same index more than once"
    block = _reorder_to_memory(emit, emit.broadcast_to_dims(value, found.dims), found)
    starts = [emit.emit_first_index(expr) for expr in exprs]
    edge = "clip" if ragged else "error"
    emit.builder.add(tile.store, [emit.refs[node.args[0]], block, *starts], {"edge": edge})


def _find_ragged_dims(emit: TileEmitter, found: BlockLayout | None) -> set[int]:
    return {d for d in found.dims if emit.is_ragged(d)} if found else set()


def _reorder_to_memory(emit: TileEmitter, value: Value, found: BlockLayout) -> Value:
    """Permute a block to memory order: the inverse of `_reorder_to_dims`."""
    order = found.order()
    parts = emit.reshape(value, tuple(found.parts[i].size for i in order))
    back = emit.permute(parts, [order.index(i) for i in range(len(order))])
    return emit.reshape(back, found.shape)


def _emit_scatter(emit: TileEmitter, node: Node, value: BlockValue) -> None:
    indices = [emit.env[v] for v in node.args[2:]]
    axes = tuple(sorted({d for t in (value, *indices) for d in t.axes}))
    mask = emit.make_range_mask(axes)
    args = [emit.broadcast_to_dims(value, axes), *(emit.broadcast_to_dims(i, axes) for i in indices)]
    if mask is not None:
        args.append(emit.broadcast_to_dims(mask, axes))
    emit.builder.add(tile.scatter, [emit.refs[node.args[0]], *args], {})


def ends_with_memory(emit: TileEmitter, node: Node, dim: int) -> bool:
    """Whether indices past the end of a dim are out of bounds of the memory, too."""
    extent = emit.forms.dims[dim][1]
    for expr, size in zip(emit.forms.indices(node), node.args[0].type.shape, strict=True):
        digits = [a for a, _ in expr.terms if isinstance(a, IndexDigit)]
        found = expr.bounds()
        if len(digits) == len(expr.terms) == 1 and digits[0].dim == dim and not digits[0].modulus:
            return extent % digits[0].divisor == 0 and found is not None and found[1] == size - 1
    return False


def reads_zero_padding(emit: TileEmitter, node: Node | None, dim: int) -> bool:
    """Whether a node is a load that gives 0 past the end of a dim."""
    unmasked = node is not None and node.op is schedule.load and len(node.args) == node.args[0].type.rank + 1
    if not unmasked or node is None or find_block_layout(emit.forms.indices(node), emit.tile) is None:
        return False
    return ends_with_memory(emit, node, dim)
