"""Value checks: index arithmetic that overflows (rule M1), and the first op that makes NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.core.errors import user_location
from tessera.core.types import TensorType
from tessera.interp.sanitizer.monitor import Monitor
from tessera.interp.sanitizer.report import Checks, Finding
from tessera.interp.tile.affine import AffineScalar
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import expand_block_axes
from tessera.ir.builder import NodeSemantics
from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, elementwise, shape


def check_non_finite(
    monitor: Monitor, machine: TileMachine, node: Node, args: list[Any], results: Sequence[Any]
) -> None:
    """Report results that are not finite where all operands are; a constant is intended."""
    for lane, held in _find_non_finite(machine, node, args, results):
        assert monitor.chunk is not None
        who = int(monitor.chunk.view(monitor.chunk.who, machine)[lane[: machine.rank]])
        message = (
            f"{node.op.name} makes {held} of finite operands: "
            f"{monitor.name(who)}, element {lane[machine.rank :]} of its result"
        )
        monitor.report_finding(Finding("non-finite", message, node.loc, instance=monitor.instance(who)))


def check_graph_values(meaning: NodeSemantics, checks: Checks) -> NodeSemantics:
    """Wrap the semantics of a Graph function's nodes: results that are not finite of finite operands are reported."""
    machine = TileMachine((), 1, (), ())

    def mean(node: Node, args: list[Any], walk: Any) -> Sequence[Any]:
        results = meaning(node, args, walk)
        for lane, held in _find_non_finite(machine, node, [np.asarray(a) for a in args], results):
            message = f"{node.op.name} makes {held} of finite operands: element {lane} of its result"
            checks.report_finding(Finding("non-finite", message, node.loc))
        return results

    return mean


def check_eager_values(op: Op, operands: Sequence[Tensor], results: Sequence[Tensor], checks: Checks) -> None:
    """Report results of an op that are not finite where its operands are: by element for a pointwise op."""
    for result in results if op is not basic.full else ():
        wrong = ~_is_finite(result.numpy()) if result.dtype.is_float else np.False_
        for each in operands if wrong.any() else ():
            good = _is_finite(each.numpy()) if each.dtype.is_float else np.True_
            wrong = wrong & (good if op.pointwise else good.all())
        if wrong.any():
            lane = tuple(int(i) for i in np.argwhere(wrong)[0])
            message = f"{op.name} makes {float(result.numpy()[lane])} of finite operands: element {lane} of its result"
            checks.report_finding(Finding("non-finite", message, user_location()))


def _find_non_finite(
    machine: TileMachine, node: Node, args: Sequence[Any], results: Sequence[Any]
) -> Iterator[tuple[tuple[int, ...], float]]:
    """For each result with elements that are not finite where all operands are: the first one's index, and itself."""
    if node.regions or node.op is basic.full:
        return
    for value, array in zip(node.results, results, strict=True):
        if isinstance(value.type, TensorType) and value.type.dtype.is_float:
            bad = ~_is_finite(array)
            wrong = bad & _find_finite_operands(machine, node, args, bad) if bad.any() else bad
            if wrong.any():
                lane = tuple(int(i) for i in np.argwhere(wrong)[0])
                yield lane, float(np.broadcast_to(array, wrong.shape)[lane])


def _is_finite(array: np.ndarray) -> np.ndarray:
    return np.isfinite(array.astype(np.float32) if array.dtype.kind == "V" else array)


def _find_finite_operands(machine: TileMachine, node: Node, args: Sequence[Any], bad: np.ndarray) -> Any:
    """Where all float operands are finite: by element for a pointwise op, else by instance."""
    found: Any = True
    floats = [
        a for a, v in zip(args, node.args, strict=True) if isinstance(v.type, TensorType) and v.type.dtype.is_float
    ]
    for array in floats:
        good: Any = _is_finite(array)
        if not node.op.pointwise:
            good = expand_block_axes(good.all(axis=tuple(range(machine.rank, good.ndim))), bad.ndim - machine.rank)
        found = found & good
    return found if machine.active is None else found & expand_block_axes(machine.active, bad.ndim - machine.rank)


_MIN_INT64, _MAX_INT64 = -(1 << 63), (1 << 63) - 1
# For each memory op: the operands before its indices, and whether it has the indices of two memories.
_FIRST_INDEX_OPERAND = {
    tile.load: 1,
    tile.store: 2,
    tile.gather: 1,
    tile.scatter: 2,
    tile.atomic: 2,
    tile.compare_exchange: 3,
}
# What an index is computed of and by.
_SIGNS: dict[Any, str] = {
    elementwise.add: "+",
    elementwise.sub: "-",
    elementwise.mul: "*",
    elementwise.neg: "-",
    elementwise.shift_left: "<<",
    basic.cast: "",
}
_INDEX_OPS = {*_SIGNS, shape.reshape, shape.permute, basic.broadcast_to, elementwise.where, elementwise.minimum,
            elementwise.maximum, elementwise.floor_divide}  # fmt: skip


@lru_cache(maxsize=256)
def find_index_nodes(body: Block) -> frozenset[Node]:
    """The nodes of a body that compute indices: integer arithmetic that a memory access uses."""
    producers: dict[Value, list[tuple[Value, ...]]] = {}
    wanted: list[Value] = []
    makers: dict[Value, Node] = {}
    for node in body.walk():
        wanted += _index_operands(node)
        for result, sources in _def_use_edges(node):
            producers.setdefault(result, []).append(sources)
            makers[result] = node
    seen: set[Value] = set()
    while wanted:
        value = wanted.pop()
        if value not in seen:
            seen.add(value)
            wanted += [s for sources in producers.get(value, []) for s in sources]
    return frozenset(makers[v] for v in seen if v in makers and makers[v].op in _SIGNS and _is_integer(v))


def _index_operands(node: Node) -> Sequence[Value]:
    if node.op is tile.async_copy:
        return node.args[2:]
    skip = _FIRST_INDEX_OPERAND.get(node.op)
    return () if skip is None else node.args[skip : skip + node.args[0].type.rank]  # type: ignore[union-attr]


def _def_use_edges(node: Node) -> list[tuple[Value, tuple[Value, ...]]]:
    """Yield def-use edges: from a node's operands to its results, and through loops and branches."""
    if node.op in _INDEX_OPS:
        return [(node.out, node.args)]
    if node.op is control_flow.if_:
        then, other = (r.results for r in node.regions)
        return [(out, (a, b)) for out, a, b in zip(node.results, then, other, strict=True)]
    if node.op is control_flow.for_:
        region = node.regions[0]
        loops = [(region.params[0], node.args[:3])]
        carried = zip(node.results, node.args[3:], region.params[1:], region.results, strict=True)
        return loops + [
            pair for out, first, param, last in carried for pair in ((out, (last, first)), (param, (first, last)))
        ]
    if node.op is control_flow.while_:
        body = node.regions[1]
        carried = zip(node.results, node.args, body.params, body.results, strict=True)
        return [pair for out, first, param, last in carried for pair in ((out, (last, first)), (param, (first, last)))]
    return []


def _is_integer(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype.is_integer


def check_index_overflow(
    monitor: Monitor, machine: TileMachine, node: Node, args: Sequence[Any], results: Sequence[Any]
) -> None:
    """Report an index that overflowed."""
    result = results[0]
    if isinstance(result, AffineScalar):
        low, high = result.ends(machine.count)
        if low < _MIN_INT64 or high > _MAX_INT64:
            _report_overflow(monitor, machine, node, None, (low if low < _MIN_INT64 else high,))
        return
    operands = [np.asarray(a) for a in machine.arrays(list(args))]
    if any(a.dtype.kind not in "iub" for a in operands):
        return
    wrong = _find_wrapped(node, operands, np.asarray(result))
    if wrong is None:
        return
    if machine.active is not None:
        wrong = wrong & expand_block_axes(machine.active, wrong.ndim - machine.rank)
    if wrong.any():
        _report_overflow(monitor, machine, node, wrong, operands)


def _find_wrapped(node: Node, operands: list[np.ndarray], result: np.ndarray) -> np.ndarray | None:
    """Where a result overflowed its integer type; None where the ranges rule that out."""
    exact = _EXACT[node.op]
    ends = [(float(a.min(initial=0)), float(a.max(initial=0))) for a in operands]
    limits = np.iinfo(result.dtype) if result.dtype.kind in "iu" else None
    if limits is None:
        return None
    corners = exact(*(np.array(pair) for pair in _interval_corners(ends)))
    if corners.min() > 0.99 * float(limits.min) - 1 and corners.max() < 0.99 * float(limits.max):
        return None
    # Near the limits Python's own integers decide.
    found = exact(*(a.astype(object) for a in operands))
    return np.asarray(np.broadcast_to(np.asarray(found != result, bool), result.shape))


def _interval_corners(ends: list[tuple[float, float]]) -> list[list[float]]:
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


def _report_overflow(
    monitor: Monitor, machine: TileMachine, node: Node, wrong: np.ndarray | None, operands: Sequence[Any]
) -> None:
    """Report the first element whose index overflowed."""
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
    monitor.report_finding(Finding("overflow", message, node.loc, None, suggestion, monitor.instance(who)))
