"""Schedule interpreter: runs each kernel's loop nest in its scheduled order, tile by tile, on NumPy.

Reductions accumulate across tiles and are rounded once. Within a tile every value is an array with one axis for each
dim of the kernel, of size 1 for dims the value does not depend on. The last tile along a dim is shorter where the tile
does not divide it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tessera.core.errors import OutOfBoundsError, TesseraError
from tessera.core.progress import track
from tessera.core.types import TensorType
from tessera.interp import host
from tessera.interp.tile import interpreter as tile_interpreter
from tessera.interp.tile.memory import take_elements
from tessera.ir.core import Module, Node, Value
from tessera.ir.numerics.conversion import convert
from tessera.ir.numerics.reference_kernels import compute_extreme, reduce_extreme
from tessera.ir.rules import Rules, round_results
from tessera.lower.indexing_maps import KernelDims, analyse_body
from tessera.lower.passes.type_conversion import bind_to_arrays
from tessera.lower.schedule_to_tile.lowering import LoopStage, split_into_stages
from tessera.ops.dialects import host as host_ops
from tessera.ops.dialects import schedule
from tessera.ops.dialects import schedule as ops
from tessera.ops.tensor import basic

EINSUM_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def accumulate_tile(nest: Any, node: Node, args: list[np.ndarray], total: Any) -> Any:
    """Combine one more tile into `total` (None before the first tile)."""
    with np.errstate(all="ignore"):
        part = _reduce_tile(nest, node, args)
        return part if total is None else _COMBINERS[_reduction_kind(node)](total, part)


def finish_reduction(node: Node, total: Any) -> np.ndarray:
    """Finish a reduction: round the result once, as the policy of its type says."""
    type = node.out.type
    if total is None:
        return np.zeros((), type.dtype.numpy)
    return total[1] if _reduction_kind(node).startswith("arg") else round_results(total, (type,))[0]


def _reduction_kind(node: Node) -> str:
    return "sum" if node.op is schedule.contract else node.attrs["kind"]


def _reduce_tile(nest: Any, node: Node, args: list[np.ndarray]) -> Any:
    type = node.args[0].type
    assert isinstance(type, TensorType)
    dim, wide = node.attrs["dim"], type.accumulate
    if node.op is schedule.contract:
        a, b = (convert(nest.level(x), wide) for x in args)
        return contract_tile(nest.spread(a, dim), b, dim)
    x = nest.spread(args[0], dim)
    kind = node.attrs["kind"]
    if kind.startswith("arg"):
        place = np.expand_dims(_ARG_REDUCTIONS[kind](x, axis=dim), dim)
        return np.take_along_axis(x, place, dim), place + nest.spans[dim][0]
    return _REDUCTIONS[kind](convert(x, wide) if kind == "sum" else x, axis=dim, keepdims=True)


def _make_extreme(ufunc: np.ufunc) -> Any:
    return lambda x, axis, keepdims: reduce_extreme(ufunc, x, (axis,), keepdims)


_ARG_REDUCTIONS: dict[str, Any] = {"argmax": np.argmax, "argmin": np.argmin}
_REDUCTIONS: dict[str, Any] = {"sum": np.sum, "max": _make_extreme(np.maximum), "min": _make_extreme(np.minimum)}


def contract_tile(a: np.ndarray, b: np.ndarray, dim: int) -> np.ndarray:
    """Contract a and b along a dim; axes of size 1 stand for absent dims. The sums begin at +0, as all do."""
    own = [[d for d, n in enumerate(x.shape) if n > 1 or (d == dim and x is a)] for x in (a, b)]
    kept = [d for d in range(a.ndim) if d != dim and (d in own[0] or d in own[1])]
    words = ["".join(EINSUM_LETTERS[d] for d in dims) for dims in (*own, kept)]
    left, right = (x.reshape([x.shape[d] for d in dims]) for x, dims in zip((a, b), own, strict=True))
    out = np.einsum(f"{words[0]},{words[1]}->{words[2]}", left, right, optimize=True) + 0  # of one product: -0
    return out.reshape([max(a.shape[d], b.shape[d]) if d in kept else 1 for d in range(a.ndim)])


def _make_arg_combiner(kind: str) -> Any:
    ahead = np.greater if kind == "argmax" else np.less

    def join(old: Any, new: Any) -> Any:
        (value, place), (other, there) = old, new
        take = ahead(other, value) | (np.not_equal(other, other) & np.equal(value, value))
        return np.where(take, other, value), np.where(take, there, place)

    return join


_COMBINERS: dict[str, Any] = {
    "sum": np.add,
    "max": partial(compute_extreme, np.maximum),
    "min": partial(compute_extreme, np.minimum),
    "argmax": _make_arg_combiner("argmax"),
    "argmin": _make_arg_combiner("argmin"),
}


NodeStep = tuple[Node, Callable[..., tuple[Any, ...]]]  # a node, and what computes it
tile_rules = Rules("schedule interpreter")
launch_rules = Rules("schedule launch")


def run(module: Module, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Run a Schedule module on arrays and return its outputs.

    Raises:
        OutOfBoundsError: a kernel reads or writes outside a buffer.
    """
    module = bind_to_arrays(module, arrays)
    return host.run(module.main, arrays, lambda node, args: launch_rules.of(node.op)(module, node, args))


@launch_rules(host_ops.launch)
def _(module, node, args):
    tile_interpreter.launch(module.function(node.attrs["kernel"]), node.attrs["grid"], args)


@dataclass
class LoopNest:
    """A kernel's loop nest at one tile: its range of each dim, and the values so far."""

    dims: KernelDims
    spans: list[tuple[int, int]]
    env: dict[Value, Any] = field(default_factory=dict)

    def along(self, dim: int) -> np.ndarray:
        """The indices of this tile along a dim."""
        shape = [1] * len(self.dims)
        low, high = self.spans[dim]
        shape[dim] = high - low
        return np.arange(low, high).reshape(shape)

    def spread(self, array: np.ndarray, dim: int) -> np.ndarray:
        """Broadcast an array along a dim."""
        low, high = self.spans[dim]
        shape = list(self.level(array).shape)
        shape[dim] = high - low
        return np.broadcast_to(self.level(array), shape)

    def level(self, array: np.ndarray) -> np.ndarray:
        """Expand an array to one axis for each dim (a constant has none)."""
        return array if array.ndim == len(self.dims) else np.reshape(array, (1,) * len(self.dims))

    def apply(self, steps: Sequence[NodeStep]) -> None:
        """Run the steps of nodes in order."""
        env = self.env
        for node, rule in steps:
            try:
                out = rule(self, node, [env[v] for v in node.args])
            except TesseraError as error:
                raise error.at(node.loc) from None
            env.update(zip(node.results, out, strict=True))


def _plan_steps(nodes: Iterable[Node]) -> list[NodeStep]:
    """Each node with its rule, found once for all tiles."""
    return [(node, tile_rules.get(node.op) or _bind_pure(node)) for node in nodes]


def _bind_pure(node: Node) -> Callable[..., tuple[Any, ...]]:
    types, results = tuple(v.type for v in node.args), tuple(v.type for v in node.results)
    return lambda nest, node, args: node.op.compute(types, results, node.attrs, args)


@launch_rules(ops.kernel)
def _(module, node, args):
    (block,) = node.regions
    dims, tile, loop = node.attrs["dims"], node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    if any(n == 0 for _, n, kind in dims if kind == "parallel"):
        return
    order = [_plan_stage(stage) for stage in split_into_stages(block, analyse_body(block, dims), loop)]
    # Constants are the same in every tile.
    fixed = {node.out: np.asarray(basic.full.ref(**node.attrs)) for node in block.nodes if node.op is basic.full}
    outer = [[(0, n)] if d in loop else split_extent(n, tile[d]) for d, (_, n, _) in enumerate(dims)]
    inner = [(d, split_extent(dims[d][1], tile[d])) for d in loop]
    for spans in track([*itertools.product(*outer)], f"interpreting the loops of line {node.loc.line}"):
        nest = LoopNest(dims, list(spans), dict(zip(block.params, args, strict=True)) | fixed)
        with np.errstate(all="ignore"):
            for stage in order:
                _run_stage(nest, stage, inner)


def split_extent(extent: int, tile: int) -> list[tuple[int, int]]:
    """Split an extent into tiles: the start and end of each."""
    return [(low, min(low + tile, extent)) for low in range(0, extent, max(tile, 1))]


@dataclass(frozen=True)
class PlannedStage:
    """The steps of a `LoopStage`."""

    straight: list[NodeStep]
    loop: list[NodeStep]
    ended: Sequence[Node]


def _plan_stage(stage: LoopStage) -> PlannedStage:
    straight, loop = ([n for n in nodes if n.op is not basic.full] for nodes in (stage.straight, stage.loop))
    return PlannedStage(_plan_steps(straight), _plan_steps(loop), stage.ended)


def _run_stage(nest: LoopNest, stage: PlannedStage, loop: list[tuple[int, list[tuple[int, int]]]]) -> None:
    nest.apply(stage.straight)
    if not loop or not (stage.loop or stage.ended):
        return
    ((dim, spans),) = loop
    sums: dict[Node, Any] = dict.fromkeys(stage.ended)
    for span in spans:
        nest.spans[dim] = span
        nest.apply(stage.loop)
        for node, total in sums.items():
            sums[node] = accumulate_tile(nest, node, [nest.env[v] for v in node.args], total)
    for node, total in sums.items():
        nest.env[node.out] = finish_reduction(node, total)


@tile_rules(ops.index)
def _(nest, node, args):
    return (nest.along(node.attrs["dim"]),)


@tile_rules(ops.load)
def _(nest, node, args):
    array, rest = args[0], args[1:]
    mask = rest[array.ndim] if len(rest) > array.ndim else None
    indices = _check_indices(node, array, rest[: array.ndim], mask)
    data = take_elements(array, indices) if array.ndim else array
    return (data if mask is None else np.where(mask, data, np.zeros((), data.dtype)),)


@tile_rules(ops.store)
def _(nest, node, args):
    array, value, indices = args[0], args[1], args[2:]
    # One element, whatever the loops of one step around it, may be stored at a constant index.
    array[tuple(_check_indices(node, array, indices, None))] = np.reshape(value, ()) if np.size(value) == 1 else value
    return ()


def _check_indices(node: Node, array: np.ndarray, indices: Sequence[Any], mask: Any) -> list[Any]:
    """Check indices against the array; masked ones become 0."""
    safe = []
    for axis, (index, size) in enumerate(zip(indices, array.shape, strict=True)):
        if index.size and (index.min() < 0 or index.max() >= size):
            bad = (index < 0) | (index >= size)
            wrong = bad if mask is None else bad & mask
            if wrong.any():
                raise _out_of_bounds_error(node, axis, int(np.broadcast_to(index, wrong.shape)[wrong][0]), size)
            index = np.where(bad, 0, index)
        safe.append(index)
    return safe


def _out_of_bounds_error(node: Node, axis: int, index: int, size: int) -> OutOfBoundsError:
    return OutOfBoundsError(
        f"index {index} is outside axis {axis} of {node.args[0].hint or 'a buffer'}, whose size is {size}",
        location=node.loc,
        expected=f"indices from 0 to {size - 1}",
        received=str(index),
    )


@tile_rules(ops.reduce, ops.contract)
def _(nest, node, args):
    return (finish_reduction(node, accumulate_tile(nest, node, args, None)),)
