"""Masked-load lint: taint tracking of elements that a masked load left out (they read as 0) and that are then used.

The taint follows them through pointwise ops and changes of shape. It ends where a mask or a choice leaves them out
again, and where zeros do no harm: in sums and products of blocks. Taint does not pass through loops and branches.

Wide masks: where a load is clipped, by `other=` or `edge="clip"`, a mask that compares an index with a bound beyond the
axis has no effect that anyone sees. They are found in the IR, by affine forms (`tessera.ir.analysis`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.types import RefType
from tessera.interp.sanitizer.report import Finding
from tessera.interp.tile.machine import TileMachine
from tessera.interp.tile.memory import expand_block_axes
from tessera.ir.analysis import AffineAnalysis, AffineForm, IntervalAnalysis
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import Rules
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape

if TYPE_CHECKING:
    from tessera.interp.sanitizer.monitor import Monitor

masked_value_rules = Rules("masked elements")
# Ops that map zero to zero.
_ZERO_PRESERVING = {elementwise.neg, elementwise.abs, elementwise.sqrt, elementwise.mul, basic.cast, elementwise.floor,
              elementwise.ceil, elementwise.sin, elementwise.tanh}  # fmt: skip
_ZERO_NEUTRAL = (reduce.sum, contractions.dot)


@dataclass
class MaskedElements:
    """The elements that a mask excluded, whether they are still 0, the load, and the box of instances."""

    out: np.ndarray
    zero: bool
    load: Node
    box: tuple[Any, ...]


class MaskTracker:
    """The taint marks of a launch, by value."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.marks: dict[Value, MaskedElements] = {}

    def follow(self, machine: TileMachine, node: Node, args: Sequence[Any], again: Callable[[list[Any]], Any]) -> None:
        """Propagate the marks of a node's operands; `again(args)` runs the node on other operands."""
        if node.op is tile.load or node.op is tile.gather:
            self._load(machine, node, args)
            return
        box = (machine.first, machine.count)
        found = {i: m for i, v in enumerate(node.args) if (m := self.marks.get(v)) is not None and m.box == box}
        for value in node.results:
            self.marks.pop(value, None)
        if found and not node.regions:
            rule = masked_value_rules.get(node.op)
            if rule is not None:
                rule(self, machine, node, args, found, again)
            elif node.op.pointwise:
                self._pointwise(node, found)

    def _load(self, machine: TileMachine, node: Node, args: Sequence[Any]) -> None:
        self.marks.pop(node.out, None)
        mask = 1 + node.args[0].type.rank  # type: ignore[union-attr]
        if len(args) != mask + 1:  # no mask, or a mask with `other`
            return
        out = ~np.asarray(machine.arrays([args[mask]])[0])
        if out.any():
            self.marks[node.out] = MaskedElements(out, True, node, (machine.first, machine.count))

    def _pointwise(self, node: Node, found: dict[int, MaskedElements]) -> None:
        marks = list(found.values())
        out = marks[0].out
        for each in marks[1:]:
            out = out | each.out
        self.marks[node.out] = MaskedElements(
            out, node.op in _ZERO_PRESERVING and all(m.zero for m in marks), marks[0].load, marks[0].box
        )

    def use(self, machine: TileMachine, node: Node, marks: MaskedElements, used: np.ndarray, what: str) -> None:
        """Report uses of elements that a mask excluded."""
        if machine.active is not None:
            used = used & expand_block_axes(machine.active, used.ndim - machine.rank)
        if used.any():
            lane = tuple(int(i) for i in np.argwhere(used)[0])
            who = self.monitor.name(self.monitor.who(machine, tuple(
                i if n > 1 else 0 for i, n in zip(lane, machine.count, strict=False)
            )))  # fmt: skip
            message = f"{what} element {lane[machine.rank :]} that the mask of a load left out: {who}"
            suggestion = "give the load `other=`, the value that does no harm here, or mask this too"
            self.monitor.report_finding(Finding("outside mask", message, node.loc, marks.load.loc, suggestion))


@masked_value_rules(shape.reshape, shape.permute, basic.broadcast_to)
def _(masks, machine, node, args, found, again):
    marks = found[0]
    if marks.out.ndim != np.ndim(args[0]):
        return
    out = np.broadcast_to(marks.out, np.broadcast_shapes(marks.out.shape, np.shape(args[0])))
    masks.marks[node.out] = MaskedElements(again([out])[0], marks.zero, marks.load, marks.box)


@masked_value_rules(elementwise.where)
def _(masks, machine, node, args, found, again):
    condition = np.asarray(machine.arrays([args[0]])[0])
    parts = [(m.out & (condition if i == 1 else ~condition), m) for i, m in found.items() if i > 0]
    kept = [(out, m) for out, m in parts if out.any()]
    if kept:
        out = kept[0][0] if len(kept) == 1 else kept[0][0] | kept[1][0]
        masks.marks[node.out] = MaskedElements(out, False, kept[0][1].load, kept[0][1].box)


@masked_value_rules(
    basic.cast,
    reduce.sum,
    reduce.max,
    reduce.min,
    reduce.argmax,
    reduce.argmin,
    reduce.mean,
    reduce.var,
    contractions.dot,
)
def _(masks, machine, node, args, found, again):
    for marks in found.values():
        if not (marks.zero and node.op in _ZERO_NEUTRAL):
            masks.use(machine, node, marks, marks.out, f"{node.op.name} takes")


@masked_value_rules(tile.store, tile.scatter)
def _(masks, machine, node, args, found, again):
    if 1 not in found:
        return
    rank = node.args[0].type.rank
    used = found[1].out
    if len(args) > 2 + rank:
        used = used & np.asarray(machine.arrays([args[2 + rank]])[0])
    masks.use(machine, node, found[1], used, "a store writes")


# Wide masks.


# A comparison x op y is x - y < limit: the operands that are x and y, and the limit.
_COMPARISONS = {
    elementwise.less: (0, 1, 0), elementwise.less_equal: (0, 1, 1),
    elementwise.greater: (1, 0, 0), elementwise.greater_equal: (1, 0, 1),
}  # fmt: skip
# The position of the ref's first index among the operands, and that of the mask after the last.
_MASKED_OPS = {tile.load: 1, tile.gather: 1, tile.store: 2, tile.scatter: 2}


def find_wide_masks(function: Function, grid: Sequence[int] | None = None) -> Iterator[Finding]:
    """The masks that admit indices beyond an axis where the access is clipped; `grid` limits what indices there are."""
    uses = UseDef(function)
    analysis, ranges = AffineAnalysis(uses), IntervalAnalysis(uses, grid)
    for node in function.body.walk():
        if node.op in _MASKED_OPS:
            yield from _find_wide_axes(node, analysis, ranges)


def _find_wide_axes(node: Node, analysis: AffineAnalysis, ranges: IntervalAnalysis) -> Iterator[Finding]:
    ref, first = node.args[0].type, _MASKED_OPS[node.op]
    assert isinstance(ref, RefType)
    last = first + len(ref.shape)
    gathers = node.op in (tile.gather, tile.scatter)
    if len(node.args) <= last or not (gathers or node.attrs["edge"] == "clip"):
        return
    tests = list(_list_comparisons(node.args[last], analysis))
    block = () if gathers else node.attrs["shape"] if node.op is tile.load else node.args[1].type.shape  # type: ignore[union-attr]
    for axis, (index, size) in enumerate(zip(node.args[first:last], map(int, ref.shape), strict=True)):
        ramp = {} if gathers or block[axis] == 1 else {axis: 1}
        form = _find_form(analysis, index).plus(AffineForm(0, {}, ramp))
        greatest = ranges.of(index)[1] + (0 if gathers else block[axis] - 1)
        bounds = [limit for test in tests if (limit := _bound_index(form, test)) is not None]
        if gathers and size in bounds:
            bounds.remove(size)  # the test that `edge="clip"` adds
        if bounds and size < min(bounds) <= greatest + 1:
            yield _describe_wide_mask(node, axis, size, min(bounds))


def _find_form(analysis: AffineAnalysis, index: Value) -> AffineForm:
    """The form of an index; one that is not affine is a term of its own, whatever block it is broadcast to."""
    form = analysis.find_form(index)
    if form is not None:
        return form
    node = analysis.producers.get(index)
    if node is not None and node.op in (basic.broadcast_to, shape.reshape, basic.cast):
        return _find_form(analysis, node.args[0])
    return AffineForm(0, {index: 1})


def _list_comparisons(mask: Value, analysis: AffineAnalysis) -> Iterator[tuple[AffineForm, int]]:
    """The comparisons whose conjunction a mask is, as a form and a limit that it is below."""
    node = analysis.producers.get(mask)
    if node is None:
        return
    if node.op in (elementwise.bitwise_and, basic.broadcast_to, shape.reshape):
        for part in node.args:
            yield from _list_comparisons(part, analysis)
    elif node.op in _COMPARISONS:
        left, right, limit = _COMPARISONS[node.op]
        x, y = (_find_form(analysis, node.args[i]) for i in (left, right))
        yield x.plus(y, -1), limit


def _bound_index(index: AffineForm, test: tuple[AffineForm, int]) -> int | None:
    """The bound that an index is below where a test holds; None where the test is not of this index."""
    form, limit = test
    same = index.scalars == form.scalars and sorted(index.ramps.values()) == sorted(form.ramps.values())
    return limit - form.constant + index.constant if same and not index.is_constant else None


def _describe_wide_mask(node: Node, axis: int, size: int, bound: int) -> Finding:
    name, extra = node.args[0].hint or "the memory", bound - size
    places = f"index {size}" if extra == 1 else f"{extra} indices from {size} on"
    message = f"the mask admits {places} outside axis {axis} of {name} (size {size}); clipping the access hides it"
    return Finding("wide mask", message, node.loc, None, f"compare with the size: index < {name}.shape[{axis}]")
