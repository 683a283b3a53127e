"""Mesh collectives in the Tile interpreter: broadcast, all-reduce, shift and halo exchange along grid axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.core.errors import OutOfBoundsError
from tessera.core.types import TensorType
from tessera.interp.bound import apply_with_bounds
from tessera.interp.tile import memory
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import BlockAccess, read_blocks, write_blocks
from tessera.ir.core import Node
from tessera.ir.numerics.interval_arithmetic import require_exact
from tessera.ir.rules import Rules
from tessera.ops.dialects import mesh
from tessera.ops.tensor import contractions, elementwise, reduce

mesh_rules = Rules("tile mesh")
REDUCTIONS = {"sum": reduce.sum, "max": reduce.max, "min": reduce.min}


@mesh_rules(mesh.read)
def _(machine, node, args, run):
    place = _split_memory(machine, args[0], node.attrs["split"], node.attrs["shape"])
    return (read_blocks(place, None, None, None, True),)


@mesh_rules(mesh.write)
def _(machine, node, args, run):
    place = _split_memory(machine, args[0], node.attrs["split"], node.args[1].type.shape)
    write_blocks(place, args[1], None, None, True)
    return ()


def _split_memory(machine: TileMachine, memory: Any, split: tuple[int, ...], shape: tuple[int, ...]) -> BlockAccess:
    steps = [tuple(n if axis == s else 0 for axis in range(machine.rank)) for s, n in zip(split, shape, strict=True)]
    return BlockAccess(memory, [AffineScalar(0, s) for s in steps], tuple(shape), machine.count)


@mesh_rules(mesh.window)
def _(machine, node, args, run):
    lead = (*machine.count[: len(machine.grid)], *(1,) * (machine.rank - len(machine.grid)))
    type, bound = node.out.type, machine.bound
    own = memory.allocate_memory(lead, type.shape, type.dtype.numpy, args[0].name, bound)
    value = read_blocks(_locate_block(machine, node, args[0], type.shape), None, None, None, True)
    write_blocks(_access_whole(machine, own), value, None, None, False)
    return (own,)


@mesh_rules(mesh.copy_back)
def _(machine, node, args, run):
    value = read_blocks(_access_whole(machine, args[1]), None, None, None, False)
    write_blocks(_locate_block(machine, node, args[0], args[1].shape), value, None, None, True)
    return ()


def _access_whole(machine: TileMachine, own: Any) -> BlockAccess:
    return BlockAccess(own, [machine.constant(0)] * len(own.shape), own.shape, machine.count)


def _locate_block(machine: TileMachine, node: Node, host_memory: Any, shape: tuple[int, ...]) -> BlockAccess:
    """The windows of all programs; the axes of the grid are rows, columns and rounds."""
    rows, columns, *rounds = np.ix_(
        *(first + np.arange(n) for first, n in zip(machine.first, machine.count, strict=True))
    )
    number = rows * machine.grid[1] + columns + (rounds[0] * machine.grid[0] * machine.grid[1] if rounds else 0)
    known = node.attrs
    starts = mesh.locate_window(number, known["first"], known["steps"], known["tiles"])
    lifted = [np.asarray(s) + np.zeros_like(number) for s in starts]
    return BlockAccess(host_memory, lifted, tuple(shape), machine.count)


@mesh_rules(mesh.all_reduce)
def _(machine, node, args, run):
    axis, op = node.attrs["axis"], REDUCTIONS[node.attrs["kind"]]
    full = _gather_axis(machine, args[0], axis)
    lined = np.moveaxis(full, axis, -1)
    one = TensorType((*node.out.type.shape, machine.count[axis]), node.out.type.dtype)
    attrs = {"axis": (-1,), "keepdims": False}
    found = _evaluate_pure(machine, op, (one,), node.out.type, attrs, [lined])
    return (found.reshape(*full.shape[:axis], 1, *full.shape[axis + 1 :]),)


def _gather_axis(machine: TileMachine, x: Any, axis: int) -> Any:
    """Expand a value to one copy for each program along a mesh axis."""
    return np.broadcast_to(x, (*x.shape[:axis], machine.count[axis], *x.shape[axis + 1 :]))


@mesh_rules(mesh.broadcast, mesh.begin_broadcast)
def _(machine, node, args, run):
    axis, x = node.attrs["axis"], args[0]
    root = int(np.asarray(require_exact(args[1])).reshape(-1)[0]) // node.attrs["each"]
    return (_take_program(x, axis, slice(root, root + 1)) if x.shape[axis] > 1 else x,)


@mesh_rules(mesh.arrived)
def _(machine, node, args, run):
    return (args[0],)


def _take_program(x: Any, axis: int, index: slice) -> Any:
    return x[(slice(None),) * axis + (index,)]


@mesh_rules(mesh.shift)
def _(machine, node, args, run):
    axis, offset = node.attrs["axis"], node.attrs["offset"]
    full = _gather_axis(machine, args[0], axis)
    count = machine.count[axis]
    inner = _take_program(full, axis, slice(0, count - 1) if offset > 0 else slice(1, count))
    edge = np.zeros_like(_take_program(full, axis, slice(0, 1)))
    return (np.concatenate([edge, inner] if offset > 0 else [inner, edge], axis=axis),)


@mesh_rules(mesh.rotate, mesh.begin_rotate)
def _(machine, node, args, run):
    return (np.roll(_gather_axis(machine, args[0], node.attrs["axis"]), node.attrs["offset"], axis=node.attrs["axis"]),)


@mesh_rules(mesh.panel)
def _(machine, node, args, run):
    return (_select_panel(machine, node, args[0], np.asarray(require_exact(args[1]))),)


def _select_panel(machine: TileMachine, node: Node, x: Any, number: np.ndarray) -> Any:
    """Select a panel for each program by its number."""
    axis, count = node.attrs["axis"], node.attrs["count"]
    size = x.shape[axis] // count
    if x.shape[axis] == 1:  # uniform along the axis
        return x
    if number.size == 1:
        first = int(number.reshape(-1)[0]) * size
        return _take_program(x, x.ndim + axis, slice(first, first + size))
    lead = np.broadcast_shapes(x.shape[: machine.rank], number.shape)
    index = (number * size).reshape(*number.shape, *(1,) * (x.ndim - machine.rank))
    steps = np.arange(size).reshape((size,) + (1,) * (-axis - 1))
    whole = np.broadcast_to(x, (*lead, *x.shape[machine.rank :]))
    places = np.broadcast_to(
        index + steps, (*lead, *whole.shape[machine.rank : x.ndim + axis], size, *whole.shape[x.ndim + axis + 1 :])
    )
    return np.take_along_axis(whole, places, axis=axis)


@mesh_rules(mesh.halo)
def _(machine, node, args, run):
    axis, up = node.attrs["axis"], node.attrs["offset"] > 0
    x, edge = args
    lead = np.broadcast_shapes(x.shape[: machine.rank], edge.shape[: machine.rank])
    whole, slab = (np.broadcast_to(a, (*lead, *v.type.shape)) for a, v in zip(args, node.args, strict=True))
    place = whole.ndim + axis
    rest = _take_program(whole, place, slice(0, -1) if up else slice(1, None))
    return (np.concatenate([slab, rest] if up else [rest, slab], axis=axis),)


@mesh_rules(mesh.all_gather)
def _(machine, node, args, run):
    axis, along = node.attrs["axis"], node.attrs["along"]
    full = _gather_axis(machine, memory.expand_block(args[0], node.args[0].type.shape), along)
    pieces = [_take_program(full, along, slice(n, n + 1)) for n in range(machine.count[along])]
    joined = np.concatenate(pieces, axis=axis)
    return (_take_program(joined, joined.ndim + axis, slice(0, node.attrs["size"])),)


@mesh_rules(mesh.section)
def _(machine, node, args, run):
    x, known = memory.expand_block(args[0], node.args[0].type.shape), node.attrs
    ranges = zip(known["start"], known["stop"], known["step"], strict=True)
    index = (Ellipsis, *(slice(*r) for r in ranges))
    return (x[index],)


@mesh_rules(mesh.join)
def _(machine, node, args, run):
    lead = np.broadcast_shapes(*(a.shape[: machine.rank] for a in args))
    whole = [np.broadcast_to(a, (*lead, *v.type.shape)) for a, v in zip(args, node.args, strict=True)]
    return (np.concatenate(whole, axis=node.attrs["axis"]),)


@mesh_rules(mesh.pick)
def _(machine, node, args, run):
    rank, axis = machine.rank, node.attrs["axis"]
    lead = np.broadcast_shapes(*(a.shape[:rank] for a in args))
    x, indices = (np.broadcast_to(a, (*lead, *v.type.shape)) for a, v in zip(args, node.args, strict=True))
    at = x.ndim + axis
    places = np.asarray(require_exact(indices)).reshape(*lead, *(1,) * (at - rank), -1, *(1,) * (x.ndim - at - 1))
    _check_positions(places, x.shape[at])
    sizes = (*x.shape[:at], places.shape[at], *x.shape[at + 1 :])
    found = np.take_along_axis(x, np.broadcast_to(places, sizes), axis=at)
    return (found.reshape(*lead, *node.out.type.shape),)


def _check_positions(places: np.ndarray, size: int) -> None:
    wrong = places[(places < 0) | (places >= size)]
    if wrong.size:
        raise OutOfBoundsError(
            f"index {wrong.flat[0]} is outside an axis of size {size}", expected=f"indices from 0 to {size - 1}"
        )


@mesh_rules(mesh.put)
def _(machine, node, args, run):
    axis, number = node.attrs["axis"], int(np.asarray(require_exact(args[2])).reshape(-1)[0])
    lead = np.broadcast_shapes(*(a.shape[: machine.rank] for a in args[:2]))
    x, slab = (np.broadcast_to(a, (*lead, *v.type.shape)) for a, v in zip(args[:2], node.args[:2], strict=True))
    place = x.ndim + axis
    parts = [_take_program(x, place, slice(0, number)), slab, _take_program(x, place, slice(number + 1, None))]
    return (np.concatenate(parts, axis=axis),)


@mesh_rules(mesh.multiply_add)
def _(machine, node, args, run):
    total, a, b = node.args
    factors = [memory.expand_block(x, v.type.shape) for x, v in zip(args[1:], (a, b), strict=True)]
    types, attrs = (a.type, b.type), {"dtype": total.type.dtype}
    product = _evaluate_pure(machine, contractions.dot, types, total.type, attrs, factors)
    return (_evaluate_pure(machine, elementwise.add, (total.type, total.type), total.type, {}, [args[0], product]),)


def _evaluate_pure(
    machine: TileMachine, op: Any, types: tuple, out: Any, attrs: dict[str, Any], args: list[Any]
) -> Any:
    """Evaluate a pure op, with its bound in bound mode."""
    work = (
        apply_with_bounds
        if machine.bound
        else lambda op, types, outs, attrs, args: op.compute(types, outs, attrs, args)
    )
    return work(op, types, (out,), attrs, args)[0]
