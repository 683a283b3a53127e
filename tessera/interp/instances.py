"""What each op means to all program instances at once; pure ops fall back to their own semantics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.errors import ExecutionError
from tessera.evaluate import Meaning
from tessera.interp import atomics, branching, checks, grid_meeting, groups, inline, mbarrier, mesh, moves
from tessera.interp.affine import Affine, combined
from tessera.interp.bound import apply
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory, Place, allocate, checked_indices, expand, last, read, scatter_to, write
from tessera.ir.core import Node
from tessera.numerics.bounded import certain
from tessera.numerics.convert import convert
from tessera.op import Rules
from tessera.ops import basic, control, linalg, reduce, shape, tile
from tessera.types import SHARED

# `places` take index scalars as they are (affine or arrays), `rules` take arrays alone.
places = Rules("tile places")
rules = Rules("tile interpreter")
for _table in (
    branching.rules, checks.rules, grid_meeting.rules, groups.rules, inline.rules, mbarrier.rules, mesh.rules
):  # fmt: skip
    for _op in _table:
        (places if _op is control.for_ else rules)(_op)(_table.of(_op))


def meaning(machine: Machine) -> Meaning:
    """The meaning of nodes on this machine."""

    def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
        rule = places.get(node.op)
        if rule is not None:
            return rule(machine, node, args, walk)
        if Affine in map(type, args):
            index = combined(node.op, args)
            if index is not None:
                return (index,)
            args = machine.arrays(args)
        rule = rules.get(node.op)
        return pure(machine, node, args) if rule is None else rule(machine, node, args, walk)

    return mean


def pure(machine: Machine, node: Node, args: list[Any]) -> Sequence[Any]:
    """An op that only computes: NumPy broadcasting takes care of the instance axes."""
    if machine.bound:
        return apply(node.op, node.types, node.result_types, node.attrs, args)
    return node.op.compute(node.types, node.result_types, node.keywords, args)


# prepare(node, operands) gives the operands of an op as NumPy wants them.
prepared = Rules("tile operands")


@prepared(basic.cast, reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin, reduce.mean, reduce.var)
def _(node, args):
    return [moves.whole(a, v.type.shape) for a, v in zip(args, node.args, strict=True)]


@prepared(linalg.dot)
def _(node, args):
    a, b = (moves.whole(x, v.type.shape) for x, v in zip(args, node.args, strict=True))
    if type(b) is np.ndarray and b.strides[-1] != b.itemsize:
        # BLAS is slower by a third on right operands that are turned round: more than a copy costs.
        b = np.ascontiguousarray(convert(b, node.types[1].accumulate))
    return [a, b]


@rules(*prepared)
def _(machine, node, args, run):
    return pure(machine, node, prepared.of(node.op)(node, args))


@places(tile.program_id)
def _(machine, node, args, run):
    axis = node.attrs["axis"]
    if axis >= len(machine.grid):
        return (machine.constant(0),)
    return (machine.place(axis),)


@places(tile.grid_size)
def _(machine, node, args, run):
    axis = node.attrs["axis"]
    return (machine.constant(machine.grid[axis] if axis < len(machine.grid) else 1),)


@places(tile.local_id)
def _(machine, node, args, run):
    return (machine.place(machine.rank - 1) if machine.group > 1 else machine.constant(0),)


@places(tile.group_size)
def _(machine, node, args, run):
    return (machine.constant(machine.group),)


@places(basic.full)
def _(machine, node, args, run):
    found = machine.constants.get(node)
    if found is None and node.out.type == tile.INDEX:
        found = machine.constants[node] = machine.constant(node.attrs["value"])
    if found is None:
        lead = (1,) * (machine.rank + len(node.attrs["shape"]))
        found = basic.full.ref(shape=lead, value=node.attrs["value"], dtype=node.attrs["dtype"])
        machine.constants[node] = found
    return (found,)


@rules(shape.iota)
def _(machine, node, args, run):
    sizes = node.attrs["shape"]
    one = [1] * len(sizes)
    one[node.attrs["axis"]] = sizes[node.attrs["axis"]]
    array = shape.iota.ref(shape=tuple(one), axis=node.attrs["axis"], dtype=node.attrs["dtype"])
    return (array.reshape((1,) * machine.rank + array.shape),)


@rules(*moves.rows)
def _(machine, node, args, run):
    return (moves.rows.of(node.op)(node, machine.rank)(args[0]),)


@places(tile.load)
def _(machine, node, args, run):
    memory, known = args[0], node.attrs
    if machine.active is None and len(args) == 1 + len(memory.shape):
        view = memory.view(args[1:], known["shape"], machine.count)
        if view is not None:
            return (view.copy() if memory.written else view,)
    place, rest = _place(machine, node, args, tuple(known["shape"]), 1)
    mask, other = (*rest, None, None)[:2]
    return (read(place, mask, other, machine.active, known["edge"] == "clip"),)


@places(tile.store)
def _(machine, node, args, run):
    memory, block = args[0], node.args[1].type.shape
    if machine.active is None and len(args) == 2 + len(memory.shape) and type(args[1]) is np.ndarray:
        view = memory.view(args[2:], block, machine.count)
        if view is not None:
            view[...] = last(args[1], view.shape)
            return ()
    place, rest = _place(machine, node, args, block, 2)
    write(place, machine.arrays([args[1]])[0], rest[0] if rest else None, machine.active, node.attrs["edge"] == "clip")
    return ()


def _place(machine: Machine, node: Node, args: list[Any], block: tuple, skip: int) -> tuple[Place, list[Any]]:
    memory: Memory = args[0]
    end = skip + len(memory.shape)
    starts, rest = args[skip:end], args[end:]
    if machine.bound:
        starts = [certain(a) for a in starts]
    if machine.active is not None:  # what inactive instances would index does not matter
        starts = [s if s.size == 1 else np.where(machine.active, s, 0) for s in machine.arrays(starts)]
    if rest:
        rest = machine.arrays(rest)
        rest[0] = certain(rest[0])
    return Place(memory, starts, block, machine.count), rest


@rules(tile.gather)
def _(machine, node, args, run):
    memory, indices, rest = _indexed(machine, node, args, 1)
    mask, other = (*rest, None, None)[:2]
    depth = node.out.type.rank
    wanted = _wanted(machine, mask, depth)
    safe, _ = checked_indices(memory, indices, wanted)
    data = memory.array[tuple(safe)]
    if mask is None:
        return (data,)
    return (np.where(mask, data, np.zeros((), data.dtype) if other is None else other),)


@rules(tile.scatter)
def _(machine, node, args, run):
    memory, indices, rest = _indexed(machine, node, args, 2)
    depth = max(v.type.rank for v in node.args[2:]) if node.args[2:] else 0
    keep = _wanted(machine, rest[0] if rest else None, depth)
    safe, _ = checked_indices(memory, indices, keep)
    scatter_to(memory.array, safe, args[1], keep)
    return ()


def _wanted(machine: Machine, mask: Any, depth: int) -> Any:
    if machine.active is None:
        return mask
    lanes = expand(machine.active, depth)
    return lanes if mask is None else lanes & mask


def _indexed(machine: Machine, node: Node, args: list[Any], skip: int) -> tuple[Memory, list[Any], list[Any]]:
    """The memory, an index for each axis of its array, and what follows; all of one rank."""
    memory: Memory = args[0]
    values = list(zip(args[skip:], node.args[skip:], strict=True))
    depth = max((v.type.rank for _, v in values), default=0)
    level = [
        a.reshape(a.shape[: machine.rank] + (1,) * (depth - v.type.rank) + a.shape[machine.rank :]) for a, v in values
    ]
    own = [_instance_index(n, a, machine.rank + depth) for a, n in enumerate(memory.array.shape[: memory.lead])]
    count = len(memory.shape)
    sure = [certain(a) for a in level[: count + 1]]  # the indices and the mask
    return memory, [*own, *sure[:count]], sure[count:] + level[count + 1 :]


def _instance_index(size: int, axis: int, rank: int) -> np.ndarray:
    return np.arange(size).reshape((1,) * axis + (size,) + (1,) * (rank - axis - 1))


@rules(tile.atomic, tile.compare_exchange)
def _(machine, node, args, run):
    skip = 2 if node.op is tile.atomic else 3
    memory, indices, rest = _indexed(machine, node, args, skip)
    keep = _wanted(machine, rest[0] if rest else None, node.out.type.rank)
    safe, _ = checked_indices(memory, indices, keep)
    full = machine.count + node.out.type.shape
    kind = node.attrs.get("kind", "compare")
    return (atomics.update(memory, node.args[0].type.dtype, safe, keep, full, kind, args[1:skip]),)


@rules(tile.alloc)
def _(machine, node, args, run):
    grid_axes = len(machine.grid)
    shared = (1,) * (machine.rank - grid_axes) if node.attrs["space"] == SHARED else machine.count[grid_axes:]
    type, name = node.out.type, f"the {node.out.type.space} memory of line {node.loc.line}"
    lead = (*machine.count[:grid_axes], *shared)
    return (allocate(lead, type.shape, type.dtype.numpy, name, machine.bound, node.attrs["padding"]),)


@places(tile.async_copy)
def _(machine, node, args, run):
    # Done at once: one of the moments at which a copy may be done.
    dst, src, starts = args[0], args[1], [certain(a) for a in args[2:]]
    block, clip = node.attrs["shape"], node.attrs["edge"] == "clip"
    here, there = len(dst.shape), len(src.shape)
    rank = max(here, there, len(block))
    full = (1,) * (rank - len(block)) + tuple(block)
    source = Place(src, starts[here:], full[rank - there :], machine.count)
    data = read(source, None, None, machine.active, clip)
    target = Place(dst, starts[:here], full[rank - here :], machine.count)
    write(target, data.reshape(*data.shape[: machine.rank], *target.block), None, machine.active, False)
    return ()


@rules(tile.async_commit, tile.async_wait)
def _(machine, node, args, run):
    return ()


@rules(tile.barrier)
def _(machine, node, args, run):
    # Instances run in step, so what came before is done; only divergence can go wrong.
    if machine.divergent:
        raise ExecutionError(
            "a barrier is reached by some tiles of a group and not by others",
            expected="every tile of the group at the same barrier",
            received=f"a condition that differs between the {machine.group} tiles",
            suggestion="move the barrier out of the `if` or loop whose condition differs between tiles",
        )
    return ()
