"""The ids of a program, its own memory, and what needs no code on a processor."""

from __future__ import annotations

from tessera.codegen.llvm.scratch import row_major
from tessera.codegen.llvm.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ops import tile

GRID_RANK = 3


@visit(tile.program_id)
def _(kernel, node):
    kernel.scalars[node.out] = f"%pid{_axis(node)}" if node.attrs["axis"] < GRID_RANK else "0"


@visit(tile.grid_size)
def _(kernel, node):
    kernel.scalars[node.out] = f"%grid{_axis(node)}" if node.attrs["axis"] < GRID_RANK else "1"


def _axis(node):
    if node.attrs["axis"] < 0:
        raise UnsupportedOpError("a grid axis is negative", location=node.loc)
    return node.attrs["axis"]


@visit(tile.local_id)
def _(kernel, node):
    kernel.scalars[node.out] = "0"


@visit(tile.group_size)
def _(kernel, node):
    kernel.scalars[node.out] = str(kernel.function.attrs.get("group", 1))


@visit(tile.alloc)
def _(kernel, node):
    type = node.out.type
    shape = tuple(int(n) for n in type.shape)
    rows = (*shape[:-1], shape[-1] + node.attrs["padding"]) if shape else ()
    kernel.memories[node.out] = kernel.scratch.memory(type.dtype, shape, row_major(rows))
    kernel.scratch.touch(kernel.memories[node.out])  # alive from here: loops may write before they read


@visit(tile.barrier, tile.async_commit, tile.async_wait)
def _(kernel, node):
    """Nothing: a program runs alone, and copies are done at once."""
