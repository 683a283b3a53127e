"""Index arithmetic that does not fit its integer type (rule M1): found where it happens, not where it lands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.interp.affine import Affine
from tessera.interp.checked.monitor import Monitor
from tessera.interp.checked.report import Finding
from tessera.interp.machine import Machine
from tessera.interp.memory import expand
from tessera.ir.core import Block, Node, Value
from tessera.ops import basic, control, elementwise, shape, tile
from tessera.types import TensorType

_LOW, _HIGH = -(1 << 63), (1 << 63) - 1
# Operands before the indices of an op that touches memory, and whether the indices are those of two memories.
_INDEXED = {tile.load: 1, tile.store: 2, tile.gather: 1, tile.scatter: 2, tile.atomic: 2, tile.compare_exchange: 3}
# What an index is computed of and by.
_SIGNS: dict[Any, str] = {
    elementwise.add: "+",
    elementwise.sub: "-",
    elementwise.mul: "*",
    elementwise.neg: "-",
    elementwise.shift_left: "<<",
    basic.cast: "",
}
_THROUGH = {*_SIGNS, shape.reshape, shape.permute, basic.broadcast_to, elementwise.where, elementwise.minimum,
            elementwise.maximum, elementwise.floor_divide}  # fmt: skip


@lru_cache(maxsize=256)
def index_nodes(body: Block) -> frozenset[Node]:
    """The nodes of a body that compute indices: integer arithmetic from which a place in memory follows."""
    producers: dict[Value, list[tuple[Value, ...]]] = {}
    wanted: list[Value] = []
    makers: dict[Value, Node] = {}
    for node in body.walk():
        wanted += _indices(node)
        for result, sources in _flows(node):
            producers.setdefault(result, []).append(sources)
            makers[result] = node
    seen: set[Value] = set()
    while wanted:
        value = wanted.pop()
        if value not in seen:
            seen.add(value)
            wanted += [s for sources in producers.get(value, []) for s in sources]
    return frozenset(makers[v] for v in seen if v in makers and makers[v].op in _SIGNS and _whole(v))


def _indices(node: Node) -> Sequence[Value]:
    if node.op is tile.async_copy:
        return node.args[2:]
    skip = _INDEXED.get(node.op)
    return () if skip is None else node.args[skip : skip + node.args[0].type.rank]  # type: ignore[union-attr]


def _flows(node: Node) -> list[tuple[Value, tuple[Value, ...]]]:
    """From which values each value follows: a node's results, and what loops and branches hand on."""
    if node.op in _THROUGH:
        return [(node.out, node.args)]
    if node.op is control.if_:
        then, other = (r.results for r in node.regions)
        return [(out, (a, b)) for out, a, b in zip(node.results, then, other, strict=True)]
    if node.op is control.for_:
        region = node.regions[0]
        loops = [(region.params[0], node.args[:3])]
        carried = zip(node.results, node.args[3:], region.params[1:], region.results, strict=True)
        return loops + [
            pair for out, first, param, last in carried for pair in ((out, (last, first)), (param, (first, last)))
        ]
    if node.op is control.while_:
        body = node.regions[1]
        carried = zip(node.results, node.args, body.params, body.results, strict=True)
        return [pair for out, first, param, last in carried for pair in ((out, (last, first)), (param, (first, last)))]
    return []


def _whole(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype.is_integer


def check(monitor: Monitor, machine: Machine, node: Node, args: Sequence[Any], results: Sequence[Any]) -> None:
    """Report an index that has wrapped."""
    result = results[0]
    if isinstance(result, Affine):
        low, high = result.ends(machine.count)
        if low < _LOW or high > _HIGH:
            _report(monitor, machine, node, None, (low if low < _LOW else high,))
        return
    operands = [np.asarray(a) for a in machine.arrays(list(args))]
    if any(a.dtype.kind not in "iub" for a in operands):
        return
    wrong = _wrapped(node, operands, np.asarray(result))
    if wrong is None:
        return
    if machine.active is not None:
        wrong = wrong & expand(machine.active, wrong.ndim - machine.rank)
    if wrong.any():
        _report(monitor, machine, node, wrong, operands)


def _wrapped(node: Node, operands: list[np.ndarray], result: np.ndarray) -> np.ndarray | None:
    """Where a result is not what the operation gives without limits; None if nowhere, seen at a glance."""
    exact = _EXACT[node.op]
    ends = [(float(a.min(initial=0)), float(a.max(initial=0))) for a in operands]
    limits = np.iinfo(result.dtype) if result.dtype.kind in "iu" else None
    if limits is None:
        return None
    corners = exact(*(np.array(pair) for pair in _corners(ends)))
    if corners.min() > 0.99 * float(limits.min) - 1 and corners.max() < 0.99 * float(limits.max):
        return None
    # Near the limits Python's own integers decide.
    found = exact(*(a.astype(object) for a in operands))
    return np.asarray(np.broadcast_to(np.asarray(found != result, bool), result.shape))


def _corners(ends: list[tuple[float, float]]) -> list[list[float]]:
    if len(ends) == 1:
        return [list(ends[0])]
    (a, b), (c, d) = ends
    return [[a, a, b, b], [c, d, c, d]]


_EXACT: dict[Any, Callable[..., Any]] = {
    elementwise.add: lambda x, y: x + y,
    elementwise.sub: lambda x, y: x - y,
    elementwise.mul: lambda x, y: x * y,
    elementwise.neg: lambda x: -x,
    elementwise.shift_left: lambda x, y: x * 2**y,
    basic.cast: lambda x: x,
}


def _report(monitor: Monitor, machine: Machine, node: Node, wrong: np.ndarray | None, operands: Sequence[Any]) -> None:
    """Report the first element whose index has wrapped."""
    lane = tuple(int(i) for i in np.argwhere(wrong)[0]) if wrong is not None else (0,) * machine.rank
    if wrong is None:
        held = str(operands[0])
    else:
        full = [int(np.broadcast_to(a, wrong.shape)[lane]) for a in operands]
        sign = _SIGNS[node.op]
        held = f" {sign} ".join(map(str, full)) if len(full) > 1 else f"{sign}{full[0]}"
    who = monitor.who(machine, lane[: machine.rank])
    element = f", element {lane[machine.rank :]}" if len(lane) > machine.rank else ""
    message = f"an index does not fit {node.out.type}: {held} in {monitor.name(who)}{element}"  # type: ignore[str-bytes-safe]
    suggestion = "compute indices in int64: tile.cast(n, ts.int64) before the product"
    monitor.found(Finding("overflow", message, node.loc, suggestion=suggestion))
