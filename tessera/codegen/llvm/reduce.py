"""Reductions: loops over the reduced axes that carry vector accumulators, combined in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tessera.codegen.blocks import block_type, sizes
from tessera.codegen.llvm.element import stored, value_at, widened
from tessera.codegen.llvm.fold import FOLDS, Fold, Names, across, fold_of, tree
from tessera.codegen.llvm.lane import ZERO, Body, Index, Kind, Lane
from tessera.codegen.llvm.memory import store
from tessera.codegen.llvm.nest import lanes_for, nest, ramped, stretches, walk
from tessera.codegen.llvm.plan import is_block
from tessera.codegen.llvm.scratch import Memory, fit
from tessera.codegen.llvm.text import Lines, Loop
from tessera.codegen.llvm.types import Vec, register
from tessera.codegen.llvm.visit import visit
from tessera.ir.core import Node

if TYPE_CHECKING:
    from tessera.codegen.llvm.kernel import Kernel

ACCUMULATORS = 4  # independent ones, so that an addition need not wait for the one before


class Reduction:
    """One reduction being emitted: which axes go, how states combine, where results are put."""

    def __init__(self, kernel: Kernel, node: Node) -> None:
        self.kernel, self.node, self.x = kernel, node, node.args[0]
        self.shape = sizes(self.x.type)
        axis = node.attrs["axis"]
        listed = axis if isinstance(axis, tuple) else (axis,)
        self.gone = sorted(a % self.x.type.rank for a in listed) if self.shape else []
        self.fold: Fold = fold_of(node.op, block_type(self.x))
        self.target: Memory | None = kernel.room(node.out) if is_block(node.out) else None
        self.width = lanes_for(kernel, *self.fold.dtypes[:1])

    def types(self, width: int) -> list[Vec]:
        """The registers of a state."""
        return [register(d, width) for d in self.fold.dtypes]

    def start(self, width: int) -> Names:
        """The state before any element."""
        return tuple(
            name if width == 1 else f"splat ({t.element} {name})"
            for t, name in zip(self.types(width), self.fold.identity, strict=True)
        )

    def elements(self, body: Body, index: Index) -> Names:
        """The state of the elements at an index alone."""
        t = self.types(body.width)
        value = widened(body, self.x.type.dtype, self.fold.dtypes[0], value_at(body, self.x, index))
        lanes = [value, *(index[a] for a in self.gone if len(t) > 1)]
        names = tuple(body.spread(lane, kind) for lane, kind in zip(lanes, t, strict=True))
        if body.mask is None:
            return names
        return tuple(
            body.text.let(f"select {kind.truth} {body.mask}, {kind} {x}, {kind} {none}")
            for kind, x, none in zip(t, names, self.start(body.width), strict=True)
        )

    def add(self, body: Body, index: Index, state: Names) -> Names:
        """A state with the elements at an index."""
        return self.fold.combine(self.kernel.text, body.width, state, self.elements(body, index))

    def finish(self, body: Body, index: Index, state: Names) -> None:
        """Put a result where it belongs."""
        wide = self.fold.dtypes[-1]
        lane = Lane(state[-1], Kind.FIXED if body.width == 1 else Kind.VARYING)
        lane = stored(body, block_type(self.node.out), wide, lane)
        if self.target is None:
            self.kernel.scalars[self.node.out] = lane.name
            return
        kept = self.node.attrs["keepdims"]
        place = [ZERO if a in self.gone else i for a, i in enumerate(index) if kept or a not in self.gone]
        store(body, self.target, tuple(place), lane)


@visit(*FOLDS)
def _(kernel, node):
    r = Reduction(kernel, node)
    long = [a for a, n in enumerate(r.shape) if n != 1]
    gone = [a for a in long if a in r.gone]
    kept = [a for a in long if a not in r.gone]
    if not gone or gone[-1] != long[-1]:
        _down(r, gone)
    else:
        walk(kernel, r.shape, kept, [ZERO] * len(r.shape), lambda index: _along(r, gone, index))
    if r.target is not None:
        kernel.buffers[node.out] = r.target


def _down(r: Reduction, gone: list[int]) -> None:
    """Reduce over outer axes: each element of a register is a result of its own."""

    def visit_kept(body: Body, index: Index) -> None:
        def inside(here: Sequence[Lane], state: Names) -> Names:
            # A body of its own: what is uniform here may differ from one round to the next.
            return r.add(Body(r.kernel, body.width, body.mask), tuple(here), state)

        state = _carried(r, r.shape, gone, list(index), r.start(body.width), body.width, inside)
        r.finish(Body(r.kernel, body.width, body.mask), index, state)

    nest(r.kernel, [1 if a in r.gone else n for a, n in enumerate(r.shape)], r.width, visit_kept)


def _along(r: Reduction, gone: list[int], index: list[Lane]) -> None:
    """Reduce over axes of which the last is the innermost: a register holds neighbours."""
    axis, text = gone[-1], r.kernel.text
    width = fit(r.width, r.shape[axis])

    def inside(here: Sequence[Lane], state: Names) -> Names:
        return _row(r, list(here), axis, width, state)

    state = _carried(r, r.shape, gone[:-1], index, r.start(width), width, inside)
    r.finish(Body(r.kernel), tuple(index), across(text, r.fold, width, state))


def _carried(
    r: Reduction,
    shape: Sequence[int],
    axes: Sequence[int],
    index: list[Lane],
    state: Names,
    width: int,
    inside: Callable[[Sequence[Lane], Names], Names],
) -> Names:
    """Loops over some axes that carry a state through `inside(index, state)`."""
    if not axes:
        return inside(index, state)
    first, *rest = axes
    types = [str(t) for t in r.types(width)]
    with Loop(r.kernel.text, "0", str(shape[first]), 1, list(zip(types, state, strict=True))) as loop:
        here = [*index]
        here[first] = Lane(loop.index)
        loop.values = list(_carried(r, shape, rest, here, tuple(loop.values), width, inside))
    return tuple(loop.values)


def _row(r: Reduction, index: list[Lane], axis: int, width: int, state: Names) -> Names:
    """The innermost axis: several accumulators over whole vectors, then what is left."""
    count, text = r.shape[axis], r.kernel.text
    before: Lines = text.section()
    outer: dict = {}
    many = ACCUMULATORS if count >= 2 * ACCUMULATORS * width else 1
    block = count // (many * width) * many * width
    states = [state, *(r.start(width) for _ in range(many - 1))]
    if many > 1:
        states = _rounds(r, index, axis, width, block, states, before, outer)
    for start, stop, step, mask in _from(block if many > 1 else 0, count, width):
        carried = list(zip([str(t) for t in r.types(width)], states[0], strict=True))
        with Loop(text, start, stop, step, carried) as loop:
            body = Body(r.kernel, width, mask, before, outer)
            loop.values = list(r.add(body, ramped(index, axis, loop.index, width), tuple(loop.values)))
        states[0] = tuple(loop.values)
    return tree(text, r.fold, width, states)


def _from(first: int, count: int, width: int) -> list[tuple[str, str, int, str | None]]:
    """The stretches of an axis from `first`, a multiple of the width, on."""
    parts = stretches(count - first, width)
    return [(str(int(a) + first), str(int(b) + first), step, mask) for a, b, step, mask in parts]


def _rounds(
    r: Reduction, index: list[Lane], axis: int, width: int, stop: int, states: list[Names], before: Lines, outer: dict
) -> list[Names]:
    """Whole rounds of several vectors, each into an accumulator of its own."""
    text, many, size = r.kernel.text, len(states), len(states[0])
    kinds = [str(t) for t in r.types(width)] * many
    with Loop(
        text, "0", str(stop), many * width, list(zip(kinds, [n for s in states for n in s], strict=True))
    ) as loop:
        names: list[str] = []
        for n in range(many):
            at = ramped(index, axis, text.add(loop.index, str(n * width)), width)
            body = Body(r.kernel, width, None, before, outer)
            names += r.add(body, at, tuple(loop.values[n * size : (n + 1) * size]))
        loop.values = names
    return [tuple(loop.values[n * size : (n + 1) * size]) for n in range(many)]
