"""Window sums: what adds up values between zeros, as gradients of windows do, as sums over the windows of an element.

The gradient of a slice with steps has zeros between its elements, and that of a pool is a sum of such arrays, one for
each place in a window. Most of what an element adds up there is zero. Here each element instead finds the windows that
hold it, ⌈kernel / step⌉ of them along each axis, and reads their values alone. What the terms compute from the
elements of the windows, such as whether one is the largest, is computed at the element itself.

Where no threads read elements by themselves, those at the same place between two windows are a phase (Shi et al. 2016):
a row of elements whose windows follow each other. Each phase has a sum of its own, and their elements are interleaved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.types import DType
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape
from tessera.ops.tensor import basic, elementwise, reduce, shape
from tessera.ops.tensor.rearrange import interleave_phases
from tessera.ops.tensor.shape import reshape

MAX_TERMS = 32  # windows that hold an element
MAX_NODES = 64  # ops that the terms have in common
MAX_STEP = 8  # between windows, whose phases are interleaved
MAX_LIGHT = 4  # cheap ops that each element computes again for each of its windows


@dataclass(frozen=True)
class Spread:
    """Values with zeros around and between them: element i of the `values` is at start + step · i of the whole."""

    values: Value
    counts: tuple[int, ...]
    start: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True)
class WindowValue:
    """A value of each window, the same in all terms."""

    value: Value


@dataclass(frozen=True)
class ElementValue:
    """A value of each element, of which every term has the slice of its own elements."""

    value: Value


@dataclass(frozen=True)
class PlaceValue:
    """A value of each place in a window, the same in all windows, as weights are: what is broadcast to the spreads."""

    values: tuple[Value, ...]


@dataclass(frozen=True)
class Computed:
    """A pointwise op on such values."""

    node: Node
    args: tuple[Any, ...]


@dataclass(frozen=True)
class WindowAxis:
    """An axis of `size` elements with `count` windows, the first at `start`; `places` are the offsets in a window."""

    size: int
    count: int
    start: int
    step: int
    places: tuple[int, ...]

    def is_whole(self) -> bool:
        """Whether each element is a window."""
        return self.size == self.count and (self.start, self.step, self.places) == (0, 1, (0,))

    def list_turns(self) -> list[int]:
        """How far before the last window that an element may lie in, along a step, its windows are."""
        return list(self.places) if self.step == 1 else list(range(-(-len(self.places) // self.step)))

    def find_window(self, turn: int) -> Tensor:
        """The window of each element."""
        return (_count(self.size) - self.start) // self.step - turn

    def find_inside(self, turn: int) -> Tensor:
        """Whether each element has this window."""
        offset, kernel = _count(self.size) - (self.start + self.step * turn), len(self.places)
        inside = (offset >= 0) & (offset < self.step * self.count)
        if self.step > 1 and (turn + 1) * self.step > kernel:
            place = (_count(self.size) - self.start) % self.step
            inside = inside & (place < kernel - self.step * turn)
        return inside


def _count(size: int) -> Tensor:
    return shape.iota(shape=(size,))


def gather_window_sums(function: Function, overlapping: bool = True) -> Function:
    """Rewrite the sums of a function that add values between zeros, and those of windows that are concatenated.

    Not `overlapping`: an element reads its windows itself only where it has one at most; other sums are by phases.
    """
    function = _gather_spread_sums(function, overlapping)
    return _gather_concatenated_sums(function) if overlapping else function


def _gather_spread_sums(function: Function, overlapping: bool) -> Function:
    uses = UseDef(function)
    found: dict[Node, WindowSum | PhaseSum] = {}
    for node in _find_sums(uses):
        made = WindowSum.of(uses, node)
        if made is not None and not _depends_on_place(made.term) and (overlapping or made.is_apart()):
            found[node] = made
        elif made is not None:
            part = _find_part(uses, node)
            axes = tuple(itertools.starmap(PhaseAxis, zip(made.axes, *_find_range(part or node), strict=True)))
            if 1 < max(a.step for a in axes) <= MAX_STEP:
                found[part or node] = PhaseSum(made, axes, overlapping)
    if not found:
        return function
    patterns = RewritePatterns("window sums", same_types=True)

    @patterns(elementwise.add, shape.slice_)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        made = found.get(node)
        return made.compute(rewriter) if made is not None else None

    return rewrite_function(function, patterns, remove_dead=True)


def _find_part(uses: UseDef, node: Node) -> Node | None:
    """The slice without steps that is all that is read of a sum, as the gradient of padding is."""
    users = uses.users(node.out) if uses.count_uses(node.out) == 1 else ()
    return next((n for n in users if n.op is shape.slice_ and set(n.attrs["step"]) == {1}), None)


def _find_range(node: Node) -> tuple[Sequence[Any], Sequence[Any]]:
    """The first element along each axis of a sum that a node has, and how many there are."""
    sizes = get_shape(node.out)
    return (node.attrs["start"] if node.op is shape.slice_ else (0,) * len(sizes)), sizes


def _find_sums(uses: UseDef) -> list[Node]:
    """The additions that no other one continues."""
    sums = [n for n in (uses[v] for v in uses) if n.op is elementwise.add]
    return [
        n for n in sums if uses.count_uses(n.out) > 1 or all(u.op is not elementwise.add for u in uses.users(n.out))
    ]


def _list_terms(uses: UseDef, root: Node) -> list[Value]:
    """What a chain or tree of additions adds up, from left to right."""
    found: list[Value] = []
    work = list(reversed(root.args))
    while work:
        value = work.pop()
        node = uses.find(value, elementwise.add)
        if node is None or uses.count_uses(value) > 1:
            found.append(value)
        else:
            work += reversed(node.args)
    return found


def find_spread(uses: UseDef, value: Value) -> Spread | None:
    """A value as others with zeros around and between them; None where there are no zeros between them."""
    sizes, start = get_shape(value), (0,) * len(get_shape(value))
    if not all(isinstance(n, int) for n in sizes):
        return None
    padded = uses.find(value, shape.pad)
    if padded is not None and padded.attrs["value"] == 0:
        value, start = padded.args[0], padded.attrs["low"]
    cut = uses.find(value, shape.slice_)
    if cut is not None and not any(cut.attrs["start"]) and set(cut.attrs["step"]) == {1}:
        value, sizes = cut.args[0], tuple(a + n for a, n in zip(start, cut.attrs["stop"], strict=True))
    counts, step = list(get_shape(value)), [1] * len(sizes)
    while (made := _find_zeros_between(uses, value, counts)) is not None:
        value, axis, by = made
        counts[axis] //= by
        step[axis] *= by
    ends = [a + s * (n - 1) for a, s, n in zip(start, step, counts, strict=True)]
    if 0 in counts or any(end >= size for end, size in zip(ends, sizes, strict=True)):
        return None
    return Spread(value, tuple(counts), tuple(start), tuple(step))  # type: ignore[arg-type]


def _find_zeros_between(uses: UseDef, value: Value, sizes: Sequence[Any]) -> tuple[Value, int, int] | None:
    """What a value has zeros between, the axis, and how many elements of the value each one becomes."""
    flat = uses.find(value, shape.reshape)
    padded = uses.find(flat.args[0], shape.pad) if flat is not None else None
    if padded is None or padded.attrs["value"] != 0 or any(padded.attrs["low"]):
        return None
    wide, grown = get_shape(padded.out), [a for a, n in enumerate(padded.attrs["high"]) if n]
    if len(grown) != 1 or grown[0] == 0 or get_shape(padded.args[0])[grown[0]] != 1:
        return None
    at = grown[0]
    merged = (*wide[: at - 1], wide[at - 1] * wide[at], *wide[at + 1 :])
    return (padded.args[0], at - 1, int(wide[at])) if merged == tuple(sizes) else None


@dataclass(frozen=True)
class WindowSum:
    """A sum of spreads whose values are computed alike."""

    uses: UseDef
    axes: tuple[WindowAxis, ...]
    starts: tuple[tuple[int, ...], ...]  # of the spreads
    term: Any  # WindowValue, ElementValue, PlaceValue or Computed
    dtype: DType

    @staticmethod
    def of(uses: UseDef, node: Node) -> WindowSum | None:
        """The sum that an addition completes, or None where it is none that gains."""
        spreads = [find_spread(uses, v) for v in _list_terms(uses, node)]
        axes = _find_axes(spreads, get_shape(node.out)) if None not in spreads else None  # type: ignore[arg-type]
        if axes is None or math.prod(len(a.list_turns()) for a in axes) > MAX_TERMS:
            return None
        match = TermMatch(uses, spreads, get_shape(node.out))  # type: ignore[arg-type]
        term = match.unify([s.values for s in spreads])  # type: ignore[union-attr]
        gains = match.has_elements or any(a.step > 1 for a in axes)
        starts = tuple(s.start for s in spreads)  # type: ignore[union-attr]
        return WindowSum(uses, axes, starts, term, node.out.type.dtype) if term is not None and gains else None

    def is_apart(self) -> bool:
        """Whether each element lies in one window at most."""
        return all(len(a.list_turns()) == 1 for a in self.axes)

    def compute(self, rewriter: Rewriter) -> Value:
        """The sum, element by element."""
        total: Tensor | None = None
        for turns in itertools.product(*(a.list_turns() for a in self.axes)):
            value = self._compute_term(rewriter, self.term, turns)
            for axis, (each, turn) in enumerate(zip(self.axes, turns, strict=True)):
                if not each.is_whole():
                    inside = self.place(each.find_inside(turn), axis)
                    value = elementwise.where(inside, value, basic.splat(0, value.type))
            total = value if total is None else total + value
        assert total is not None
        return total.data

    def place(self, vector: Tensor, axis: int) -> Tensor:
        """A vector along one axis of the sum."""
        return reshape(vector, shape=(1,) * axis + vector.shape + (1,) * (len(self.axes) - 1 - axis))

    def _compute_term(self, rewriter: Rewriter, term: Any, turns: Sequence[int]) -> Tensor:
        if isinstance(term, Computed):
            args = [self._compute_term(rewriter, each, turns) for each in term.args]
            return Tensor(rewriter.add(term.node.op, *(x.data for x in args), **term.node.attrs))
        if isinstance(term, ElementValue):
            return Tensor(rewriter.new(term.value))
        base = _strip_views(self.uses, term.value)
        value = rewriter.new(base)
        if not _is_light(self.uses, base):
            value = rewriter.add(basic.fusion_barrier, value)
        found = reshape(Tensor(value), shape=tuple(a.count for a in self.axes))
        for axis, (each, turn) in enumerate(zip(self.axes, turns, strict=True)):
            if not each.is_whole():
                window = elementwise.minimum(elementwise.maximum(each.find_window(turn), 0), each.count - 1)
                found = shape.gather(found, window, axis=axis)
        return found


@dataclass(frozen=True)
class PhaseAxis:
    """An axis of a part of a sum, `size` elements from `start` on: element i of a phase is start + phase + step · i."""

    windows: WindowAxis
    start: int
    size: int

    @property
    def step(self) -> int:
        """How many phases there are."""
        return self.windows.step

    @property
    def count(self) -> int:
        """The elements of a phase; of all but the first the last one may lie behind the part."""
        return -(-self.size // self.step)

    def list_windows(self, phase: int) -> list[int]:
        """The windows that hold the first element of a phase, also those before the first and behind the last one."""
        window, place = divmod(self.start + phase - self.windows.start, self.step)
        kernel = len(self.windows.places)
        return [window - n for n in self.windows.list_turns() if self.step == 1 or place + n * self.step < kernel]

    def find_margins(self) -> tuple[int, int]:
        """How many windows before the first and behind the last one elements of the phases would have."""
        found = [n for phase in range(self.step) for n in self.list_windows(phase)]
        return max(0, -min(found)), max(0, max(found) + self.count - self.windows.count)

    def has_all(self, window: int) -> bool:
        """Whether the windows from this one on are enough for the elements of a phase."""
        return 0 <= window <= self.windows.count - self.count

    def find_inside(self, window: int) -> Tensor:
        """Whether each element of a phase has a window, from this one on."""
        place = _count(self.count) + window
        return (place >= 0) & (place < self.windows.count)


@dataclass(frozen=True)
class PhaseSum:
    """A part of a sum of windows by phases; with `guards`, elements test whether there are windows, else zeros are."""

    whole: WindowSum
    axes: tuple[PhaseAxis, ...]
    guards: bool = False

    def compute(self, rewriter: Rewriter) -> Value:
        """The sum, phase by phase."""
        numbers = itertools.product(*(range(a.step) for a in self.axes))
        found = interleave_phases({phase: self._add_up(rewriter, phase) for phase in numbers}, 0)
        return _slice_block(found, (0,) * found.ndim, tuple(a.size for a in self.axes)).data

    def _add_up(self, rewriter: Rewriter, phase: tuple[int, ...]) -> Tensor:
        listed = [a.list_windows(n) for a, n in zip(self.axes, phase, strict=True)]
        total: Tensor | None = None
        for windows in itertools.product(*listed):
            value = self._compute_term(rewriter, self.whole.term, phase, windows)
            for axis, (each, window) in enumerate(zip(self.axes, windows, strict=True)):
                if not each.has_all(window):
                    inside = self.whole.place(each.find_inside(window), axis)
                    value = elementwise.where(inside, value, basic.splat(0, value.type))
            total = value if total is None else total + value
        if total is None:  # between windows
            return basic.full(shape=tuple(a.count for a in self.axes), value=0, dtype=self.whole.dtype)
        return total

    def _compute_term(self, rewriter: Rewriter, term: Any, phase: Sequence[int], windows: Sequence[int]) -> Tensor:
        if isinstance(term, Computed):
            args = [self._compute_term(rewriter, each, phase, windows) for each in term.args]
            return Tensor(rewriter.add(term.node.op, *(x.data for x in args), **term.node.attrs))
        if isinstance(term, ElementValue):
            return self._read_elements(rewriter, term.value, phase)
        if isinstance(term, PlaceValue):
            axes = zip(self.axes, phase, windows, strict=True)
            number = self.whole.starts.index(tuple(a.start + n - window * a.step for a, n, window in axes))
            value = Tensor(rewriter.new(term.values[number]))
            return basic.broadcast_to(value, shape=tuple(a.count for a in self.axes))
        found = self._read_windows(rewriter, term.value)
        start = tuple(n + a.find_margins()[0] for a, n in zip(self.axes, windows, strict=True))
        return _slice_block(found, start, tuple(a.count for a in self.axes))

    def _read_windows(self, rewriter: Rewriter, value: Value) -> Tensor:
        """A value of windows, and zeros for those before the first and behind the last: in memory unless `guards`."""
        low, high = zip(*(a.find_margins() for a in self.axes), strict=True)
        base = _strip_views(self.whole.uses, value)
        found = reshape(Tensor(rewriter.new(base)), shape=tuple(a.windows.count for a in self.axes))
        if not _is_light(self.whole.uses, base):
            found = basic.fusion_barrier(found)
        if not any((*low, *high)):
            return found
        padded = shape.pad(found, low=low, high=high, value=0)
        return padded if self.guards else basic.fusion_barrier(padded)

    def _read_elements(self, rewriter: Rewriter, value: Value, phase: Sequence[int]) -> Tensor:
        """The elements of a phase; behind the part there may be any. Padding that the part leaves out is not read."""
        start = [a.start for a in self.axes]
        padded = self.whole.uses.find(value, shape.pad)
        if padded is not None:
            inner = [n - low for n, low in zip(start, padded.attrs["low"], strict=True)]
            sizes = get_shape(padded.args[0])
            if all(0 <= n <= size - a.size for n, size, a in zip(inner, sizes, self.axes, strict=True)):
                value, start = padded.args[0], inner
        x = Tensor(rewriter.new(value))
        start = [n + p for n, p in zip(start, phase, strict=True)]
        ends = [n + a.step * (a.count - 1) + 1 for n, a in zip(start, self.axes, strict=True)]
        high = tuple(max(0, end - size) for end, size in zip(ends, x.shape, strict=True))
        if any(high):
            x = shape.pad(x, low=(0,) * x.ndim, high=high, value=0)
        return shape.slice_(x, start=tuple(start), stop=tuple(ends), step=tuple(a.step for a in self.axes))


def _slice_block(x: Tensor, start: Sequence[int], sizes: Sequence[int]) -> Tensor:
    if x.shape == sizes:
        return x
    stop = tuple(n + size for n, size in zip(start, sizes, strict=True))
    return shape.slice_(x, start=tuple(start), stop=stop, step=(1,) * x.ndim)


def _find_axes(spreads: Sequence[Spread], sizes: Sequence[Any]) -> tuple[WindowAxis, ...] | None:
    """The axes of windows of which each spread has one place; None where the spreads are no such places."""
    first, axes = spreads[0], []
    if any((s.step, s.counts) != (first.step, first.counts) for s in spreads):
        return None
    for axis, size in enumerate(sizes):
        starts = sorted({s.start[axis] for s in spreads})
        places = tuple(n - starts[0] for n in starts)
        if first.step[axis] > 1 and places != tuple(range(len(places))):
            return None
        axes.append(WindowAxis(size, first.counts[axis], starts[0], first.step[axis], places))
    wanted = set(itertools.product(*([a.start + n for n in a.places] for a in axes)))
    return tuple(axes) if len(spreads) == len(wanted) and {s.start for s in spreads} == wanted else None


@dataclass
class TermMatch:
    """Finds what spreads compute alike."""

    uses: UseDef
    spreads: Sequence[Spread]
    sizes: Sequence[Any]
    nodes: int = 0
    has_elements: bool = False

    def unify(self, values: Sequence[Value]) -> WindowValue | ElementValue | PlaceValue | Computed | None:
        """One value of each spread as one term; None where they are not computed alike."""
        counts = self.spreads[0].counts
        if _drop_ones(get_shape(values[0])) != _drop_ones(counts):
            return None
        if len(set(values)) == 1:
            return WindowValue(values[0])
        nodes = [self.uses.get(v) for v in values]
        first = nodes[0]
        if first is None or any(n is None or n.op is not first.op for n in nodes):
            return None
        if first.op is shape.slice_:
            return self._find_elements(nodes)  # type: ignore[arg-type]
        if first.op in (shape.reshape, basic.broadcast_to):
            found = self.unify([n.args[0] for n in nodes])  # type: ignore[union-attr]
            return self._find_places(nodes) if found is None and first.op is basic.broadcast_to else found  # type: ignore[arg-type]
        self.nodes += 1
        alike = all(n.attrs == first.attrs for n in nodes)  # type: ignore[union-attr]
        if not first.op.pointwise or not alike or self.nodes > MAX_NODES:
            return None
        parts = [self.unify([n.args[i] for n in nodes]) for i in range(len(first.args))]  # type: ignore[union-attr]
        return None if None in parts else Computed(first, tuple(parts))

    def _find_elements(self, slices: Sequence[Node]) -> ElementValue | None:
        """The value of which each slice has the elements of its spread."""
        source = slices[0].args[0]
        same = get_shape(source) == tuple(self.sizes) and all(
            n.args[0] is source and (tuple(n.attrs["start"]), tuple(n.attrs["step"])) == (s.start, s.step)
            for n, s in zip(slices, self.spreads, strict=True)
        )
        self.has_elements |= same
        return ElementValue(source) if same else None

    def _find_places(self, nodes: Sequence[Node]) -> PlaceValue | None:
        """What is broadcast to each spread along the axes of its windows."""
        sources = [get_shape(n.args[0]) for n in nodes]
        missing = len(self.sizes) - len(sources[0])
        first = self.spreads[0]
        along = [i for i, s in enumerate(first.step) if s > 1 or len({each.start[i] for each in self.spreads}) > 1]
        same = len(set(sources)) == 1 and get_shape(nodes[0].out) == tuple(first.counts)
        fits = same and all(i < missing or sources[0][i - missing] == 1 for i in along)
        return PlaceValue(tuple(n.args[0] for n in nodes)) if fits else None


def _depends_on_place(term: Any) -> bool:
    return isinstance(term, PlaceValue) or (isinstance(term, Computed) and any(map(_depends_on_place, term.args)))


def _drop_ones(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(n for n in sizes if n != 1)


def _strip_views(uses: UseDef, value: Value) -> Value:
    """The value below reshapes and broadcasts that keep its elements."""
    node = uses.find(value, shape.reshape, basic.broadcast_to)
    if node is None or _drop_ones(get_shape(node.args[0])) != _drop_ones(get_shape(value)):
        return value
    return _strip_views(uses, node.args[0])


def _is_light(uses: UseDef, value: Value) -> bool:
    """Whether a value takes a few cheap ops to compute from the function's parameters."""
    seen: set[Node] = set()
    work, light = [value], [basic.full, basic.broadcast_to, shape.reshape, shape.slice_, shape.permute]
    while work:
        node = uses.get(work.pop())
        if node is None or node in seen:
            continue
        if node.op not in light and (not node.op.pointwise or node.op.is_transcendental):
            return False
        seen.add(node)
        work += node.args
    return sum(n.op not in light for n in seen) <= MAX_LIGHT


# Sums of windows of different lengths, as of adaptive pools, concatenated along the axis that they sum over: each
# result then adds up the elements of its own window, in one kernel for all windows.


def _gather_concatenated_sums(function: Function) -> Function:
    uses = UseDef(function)
    concatenated = [n for n in (uses[v] for v in uses) if n.op is shape.concatenate]
    found = {n: made for n in concatenated if (made := WindowRanges.of(uses, n)) is not None}
    if not found:
        return function
    patterns = RewritePatterns("concatenated sums", same_types=True)

    @patterns(shape.concatenate)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        made = found.get(node)
        return made.add_up(Tensor(rewriter.new(made.source))).data if made is not None else None

    return rewrite_function(function, patterns, remove_dead=True)


@dataclass(frozen=True)
class WindowRanges:
    """Windows along an axis of a source, each with its first element and the one after its last."""

    source: Value
    axis: int
    ranges: tuple[tuple[int, int], ...]

    @staticmethod
    def of(uses: UseDef, node: Node) -> WindowRanges | None:
        """The windows whose sums a node concatenates, if it does."""
        axis = node.attrs["axis"]
        cuts = [_find_window(uses, v, axis) for v in node.args]
        if len(cuts) < 2 or None in cuts or len({source for source, _, _ in cuts}) != 1:  # type: ignore[misc]
            return None
        ranges = tuple((start, stop) for _, start, stop in cuts)  # type: ignore[misc]
        longest = max(stop - start for start, stop in ranges)
        return WindowRanges(cuts[0][0], axis, ranges) if longest <= MAX_TERMS else None  # type: ignore[index]

    def add_up(self, x: Tensor) -> Tensor:
        """The sums of the windows."""
        axis, extent = self.axis % x.ndim, int(x.shape[self.axis])
        start = self._list_numbers([a for a, _ in self.ranges], extent)
        lengths = [stop - a for a, stop in self.ranges]
        length = self._list_numbers(lengths, extent)
        total: Tensor | None = None
        for place in range(max(lengths)):
            value = shape.gather(x, elementwise.minimum(start + place, extent - 1), axis=axis)
            if place >= min(lengths):
                inside = reshape(length > place, shape=(1,) * axis + length.shape + (1,) * (x.ndim - 1 - axis))
                value = elementwise.where(inside, value, basic.splat(0, value.type))
            total = value if total is None else total + value
        assert total is not None
        return total

    def _list_numbers(self, numbers: Sequence[int], extent: int) -> Tensor:
        """Numbers as a vector that is computed: evenly spread ones by a division, others by comparisons."""
        count = len(numbers)
        index = _count(count)
        if list(numbers) == [i * extent // count for i in range(count)]:
            return index * extent // count
        found = index * 0 + numbers[0]
        for place, (before, after) in enumerate(itertools.pairwise(numbers), 1):
            if before != after:
                found = elementwise.where(index < place, found, basic.splat(after, found.type))
        return found


def _find_window(uses: UseDef, value: Value, axis: int) -> tuple[Value, int, int] | None:
    """The source, the first element, and the one after the last of the window whose sum a value is."""
    total = uses.find(value, reduce.sum)
    cut = uses.find(total.args[0], shape.slice_) if total is not None else None
    if total is None or cut is None or uses.count_uses(value) > 1 or not total.attrs["keepdims"]:
        return None
    sizes, at = get_shape(cut.args[0]), axis % len(get_shape(value))
    if tuple(a % len(sizes) for a in total.attrs["axis"]) != (at,) or set(cut.attrs["step"]) != {1}:
        return None
    bounds = list(zip(cut.attrs["start"], cut.attrs["stop"], strict=True))
    if any(not isinstance(n, int) for n in (sizes[at], *bounds[at])):
        return None
    whole = all(pair == (0, n) for a, (pair, n) in enumerate(zip(bounds, sizes, strict=True)) if a != at)
    return (cut.args[0], *bounds[at]) if whole else None
