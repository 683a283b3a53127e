"""The Schedule interpreter: each kernel's loop nest in its scheduled order, tile by tile, on NumPy.

Within a tile every value is an array with one axis for each dim of the kernel, of size 1 for
dims the value does not depend on. The last tile along a dim is shorter where the tile does not divide it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.errors import OutOfBoundsError, TesseraError
from tessera.interp import host, reductions
from tessera.interp import tile as tile_interpreter
from tessera.ir.core import Module, Node, Value
from tessera.lower.forms import Dims, forms
from tessera.lower.stages import Stage, stages
from tessera.op import Op, Rules
from tessera.ops import basic
from tessera.ops import host as host_ops
from tessera.ops import schedule as ops

rules = Rules("schedule interpreter")
launches = Rules("schedule launch")


def run(module: Module, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Run a Schedule module on arrays; the outputs.

    Raises:
        OutOfBoundsError: a kernel reads or writes outside a buffer.
    """
    return host.run(module.main, arrays, lambda node, args: launches.of(node.op)(module, node, args))


@launches(host_ops.launch)
def _(module, node, args):
    tile_interpreter.launch(module.function(node.attrs["kernel"]), node.attrs["grid"], args)


@dataclass
class Nest:
    """A kernel's loop nest at one tile: the part of each dim it spans, and the values so far."""

    dims: Dims
    spans: list[tuple[int, int]]
    env: dict[Value, Any] = field(default_factory=dict)

    def along(self, dim: int) -> np.ndarray:
        """The indices of this tile along a dim, on their axis."""
        shape = [1] * len(self.dims)
        low, high = self.spans[dim]
        shape[dim] = high - low
        return np.arange(low, high).reshape(shape)

    def spread(self, array: np.ndarray, dim: int) -> np.ndarray:
        """An array with every element along a dim, where it holds 1 for all of them."""
        low, high = self.spans[dim]
        shape = list(self.level(array).shape)
        shape[dim] = high - low
        return np.broadcast_to(self.level(array), shape)

    def level(self, array: np.ndarray) -> np.ndarray:
        """An array with an axis for each dim (a constant has none)."""
        return array if array.ndim == len(self.dims) else np.reshape(array, (1,) * len(self.dims))

    def apply(self, nodes: Sequence[Node]) -> None:
        """Run nodes in order."""
        for node in nodes:
            args = [self.env[v] for v in node.args]
            try:
                out = _meaning(node.op)(self, node, args)
            except TesseraError as error:
                raise error.at(node.loc) from None
            self.env.update(zip(node.results, out, strict=True))


def _meaning(op: Op) -> Any:
    return rules.get(op) or _pure


def _pure(nest: Nest, node: Node, args: list[Any]) -> tuple[Any, ...]:
    types = tuple(v.type for v in node.args)
    return node.op.execute(types, tuple(v.type for v in node.results), node.attrs, args)


@launches(ops.kernel)
def _(module, node, args):
    (block,) = node.regions
    dims, tile, loop = node.attrs["dims"], node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    if any(n == 0 for _, n, kind in dims if kind == "parallel"):
        return
    order = stages(block, forms(block, dims), loop)
    outer = [[(0, n)] if d in loop else tiles(n, tile[d]) for d, (_, n, _) in enumerate(dims)]
    for spans in itertools.product(*outer):
        nest = Nest(dims, list(spans), dict(zip(block.params, args, strict=True)))
        for stage in order:
            _run(nest, stage, [(d, tiles(dims[d][1], tile[d])) for d in loop])


def tiles(extent: int, tile: int) -> list[tuple[int, int]]:
    """Where each tile of a dim begins and ends."""
    return [(low, min(low + tile, extent)) for low in range(0, extent, max(tile, 1))]


def _run(nest: Nest, stage: Stage, loop: list[tuple[int, list[tuple[int, int]]]]) -> None:
    nest.apply(stage.straight)
    if not loop or not (stage.loop or stage.ended):
        return
    ((dim, spans),) = loop
    sums: dict[Node, Any] = dict.fromkeys(stage.ended)
    for span in spans:
        nest.spans[dim] = span
        nest.apply(stage.loop)
        for node, total in sums.items():
            sums[node] = reductions.more(nest, node, [nest.env[v] for v in node.args], total)
    for node, total in sums.items():
        nest.env[node.out] = reductions.end(node, total)


@rules(ops.index)
def _(nest, node, args):
    return (nest.along(node.attrs["dim"]),)


@rules(basic.full)
def _(nest, node, args):
    return (np.asarray(basic.full.ref(**node.attrs)),)


@rules(ops.load)
def _(nest, node, args):
    array, rest = args[0], args[1:]
    mask = rest[array.ndim] if len(rest) > array.ndim else None
    indices = _checked(node, array, rest[: array.ndim], mask)
    data = array[tuple(indices)] if array.ndim else array
    return (data if mask is None else np.where(mask, data, np.zeros((), data.dtype)),)


@rules(ops.store)
def _(nest, node, args):
    array, value, indices = args[0], args[1], args[2:]
    array[tuple(_checked(node, array, indices, None))] = value if array.ndim else np.reshape(value, ())
    return ()


def _checked(node: Node, array: np.ndarray, indices: Sequence[Any], mask: Any) -> list[Any]:
    """Indices that lie in the array; those that are masked off become 0."""
    safe = []
    for axis, (index, size) in enumerate(zip(indices, array.shape, strict=True)):
        if index.size and (index.min() < 0 or index.max() >= size):
            bad = (index < 0) | (index >= size)
            wrong = bad if mask is None else bad & mask
            if wrong.any():
                raise _outside(node, axis, int(np.broadcast_to(index, wrong.shape)[wrong][0]), size)
            index = np.where(bad, 0, index)
        safe.append(index)
    return safe


def _outside(node: Node, axis: int, index: int, size: int) -> OutOfBoundsError:
    return OutOfBoundsError(
        f"index {index} is outside axis {axis} of {node.args[0].hint or 'a buffer'}, whose size is {size}",
        location=node.loc,
        expected=f"indices from 0 to {size - 1}",
        received=str(index),
    )


@rules(ops.reduce, ops.contract)
def _(nest, node, args):
    return (reductions.end(node, reductions.more(nest, node, args, None)),)
