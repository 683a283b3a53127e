"""What programs on a mesh tell each other: the instance axes of the grid, read across."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.interp.affine import Affine
from tessera.interp.bound import apply
from tessera.interp.machine import Machine
from tessera.interp.memory import Place, read, write
from tessera.ir.core import Node
from tessera.numerics.bounded import certain
from tessera.op import Rules
from tessera.ops import mesh, reduce
from tessera.types import TensorType

rules = Rules("tile mesh")
REDUCE = {"sum": reduce.sum, "max": reduce.max, "min": reduce.min}


@rules(mesh.read)
def _(machine, node, args, run):
    place = _pieces(machine, args[0], node.attrs["split"], node.attrs["shape"])
    return (read(place, None, None, None, True),)


@rules(mesh.write)
def _(machine, node, args, run):
    place = _pieces(machine, args[0], node.attrs["split"], node.args[1].type.shape)
    write(place, args[1], None, None, True)
    return ()


def _pieces(machine: Machine, memory: Any, split: tuple[int, ...], shape: tuple[int, ...]) -> Place:
    steps = [tuple(n if axis == s else 0 for axis in range(machine.rank)) for s, n in zip(split, shape, strict=True)]
    return Place(memory, [Affine(0, s) for s in steps], tuple(shape), machine.count)


@rules(mesh.all_reduce)
def _(machine, node, args, run):
    axis, op = node.attrs["axis"], REDUCE[node.attrs["kind"]]
    full = _across(machine, args[0], axis)
    lined = np.moveaxis(full, axis, -1)
    one = TensorType((*node.out.type.shape, machine.count[axis]), node.out.type.dtype)
    attrs = {"axis": (-1,), "keepdims": False}
    if machine.bound:
        (found,) = apply(op, (one,), (node.out.type,), attrs, [lined])
    else:
        (found,) = op.compute((one,), (node.out.type,), attrs, [lined])
    return (found.reshape(*full.shape[:axis], 1, *full.shape[axis + 1 :]),)


def _across(machine: Machine, x: Any, axis: int) -> Any:
    """A value with one copy for each program along a mesh axis."""
    return np.broadcast_to(x, (*x.shape[:axis], machine.count[axis], *x.shape[axis + 1 :]))


@rules(mesh.broadcast)
def _(machine, node, args, run):
    axis, x = node.attrs["axis"], args[0]
    root = int(np.asarray(certain(args[1])).reshape(-1)[0])
    return (_at(x, axis, slice(root, root + 1)) if x.shape[axis] > 1 else x,)


def _at(x: Any, axis: int, index: slice) -> Any:
    return x[(slice(None),) * axis + (index,)]


@rules(mesh.shift)
def _(machine, node, args, run):
    axis, offset = node.attrs["axis"], node.attrs["offset"]
    full = _across(machine, args[0], axis)
    count = machine.count[axis]
    inner = _at(full, axis, slice(0, count - 1) if offset > 0 else slice(1, count))
    edge = np.zeros_like(_at(full, axis, slice(0, 1)))
    return (np.concatenate([edge, inner] if offset > 0 else [inner, edge], axis=axis),)


@rules(mesh.rotate)
def _(machine, node, args, run):
    return (np.roll(_across(machine, args[0], node.attrs["axis"]), node.attrs["offset"], axis=node.attrs["axis"]),)


@rules(mesh.panel)
def _(machine, node, args, run):
    return (_panel(machine, node, args[0], np.asarray(certain(args[1]))),)


def _panel(machine: Machine, node: Node, x: Any, number: np.ndarray) -> Any:
    """A panel for each program: numbers differ between programs where each takes its own."""
    axis, count = node.attrs["axis"], node.attrs["count"]
    size = x.shape[axis] // count
    if x.shape[axis] == 1:  # the same all along
        return x
    if number.size == 1:
        first = int(number.reshape(-1)[0]) * size
        return _at(x, x.ndim + axis, slice(first, first + size))
    lead = np.broadcast_shapes(x.shape[: machine.rank], number.shape)
    index = (number * size).reshape(*number.shape, *(1,) * (x.ndim - machine.rank))
    steps = np.arange(size).reshape((size,) + (1,) * (-axis - 1))
    whole = np.broadcast_to(x, (*lead, *x.shape[machine.rank :]))
    places = np.broadcast_to(
        index + steps, (*lead, *whole.shape[machine.rank : x.ndim + axis], size, *whole.shape[x.ndim + axis + 1 :])
    )
    return np.take_along_axis(whole, places, axis=axis)


@rules(mesh.halo)
def _(machine, node, args, run):
    axis, up = node.attrs["axis"], node.attrs["offset"] > 0
    x, edge = args
    lead = np.broadcast_shapes(x.shape[: machine.rank], edge.shape[: machine.rank])
    whole, slab = (np.broadcast_to(a, (*lead, *v.type.shape)) for a, v in zip(args, node.args, strict=True))
    place = whole.ndim + axis
    rest = _at(whole, place, slice(0, -1) if up else slice(1, None))
    return (np.concatenate([slab, rest] if up else [rest, slab], axis=axis),)
