"""Window views: stacked slices of one tensor, and gathers at affine indices, as strided views; flat windows: those of
a product along the lines of a padded array.

An element of a stack of n tensors is a chain of n selections; one of a strided view is one load. Convolutions and
stencils stack a slice for each element of their windows. Reductions of stacks, as in pools, are none any more here:
canonicalisation combines their slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.core.symbolic_dim import Size
from tessera.ir.analysis import AffineAnalysis
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ir.rules import Op
from tessera.lower.indexing_maps import get_shape
from tessera.ops.tensor import basic, contractions, shape

patterns = RewritePatterns("window views", same_types=True)


def form_window_views(function: Function, of_products: bool = True) -> Function:
    """Rewrite a function of tensor ops; `of_products`, stacks of slices that products read, too."""
    return rewrite_function(_form_stack_views(function, of_products), patterns, remove_dead=True)


def _form_stack_views(function: Function, of_products: bool) -> Function:
    uses = UseDef(function)
    stacks = {n for n in (uses[v] for v in uses) if n.op is shape.concatenate}
    taken = {n for n in stacks if of_products or not _feeds_product(uses, n.out)}
    if not taken:
        return function
    rules = RewritePatterns("stacks as views", same_types=True)

    @rules(shape.concatenate)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        return _view_stack(rewriter, node, args, not _feeds_product(uses, node.out)) if node in taken else None

    return rewrite_function(function, rules, remove_dead=True)


def _feeds_product(uses: UseDef, value: Value) -> bool:
    """Whether a value is an operand of a product, perhaps in another shape, order or element type."""
    moved = (shape.reshape, shape.permute, basic.cast)
    users = uses.users(value)
    return any(n.op is contractions.dot or (n.op in moved and _feeds_product(uses, n.out)) for n in users)


# The node that makes a value, if it is of an op.
FindProducer = Callable[[Value, Op], "Node | None"]


def find_stacked_slices(find: FindProducer, parts: Sequence[Value], axis: int) -> list[Node] | None:
    """The slices of one tensor, with equal steps, that are the parts of a stack along a new axis; or None."""
    slices = [_find_slice(find, part, axis) for part in parts]
    first = slices[0]
    same = first is not None and all(
        s is not None and s.args == first.args and s.attrs["step"] == first.attrs["step"] for s in slices
    )
    return slices if same else None  # type: ignore[return-value]


def _find_slice(find: FindProducer, part: Value, axis: int) -> Node | None:
    """The slice that a part of a stack is, but for a new axis of one element."""
    inner = find(part, shape.reshape)
    node = find(part if inner is None else inner.args[0], shape.slice_)
    if node is None or part.type.shape[axis] != 1:  # type: ignore[union-attr]
        return None
    rest = _without(part.type.shape, axis)  # type: ignore[union-attr]
    return node if inner is not None and tuple(node.out.type.shape) == rest else None  # type: ignore[union-attr]


def _without(sizes: Sequence[Size], axis: int) -> tuple[Size, ...]:
    return (*sizes[:axis], *sizes[axis + 1 :])


Starts = Sequence[tuple[int, ...]]


def find_radices(starts: Starts) -> list[tuple[int, tuple[int, ...]]] | None:
    """Starts as a mixed-radix number: for each digit its size and what it adds; None where they are none."""
    digits: list[tuple[int, tuple[int, ...]]] = []
    block = 1  # the innermost starts that the digits so far describe
    while block < len(starts):
        step = _subtract(starts[block], starts[0])
        count = 1
        while (count + 1) * block <= len(starts) and _repeats(starts, block, count, step):
            count += 1
        if count == 1 or len(starts) % (count * block):
            return None
        digits.insert(0, (count, step))
        block *= count
    return digits


def _repeats(starts: Starts, block: int, count: int, step: tuple[int, ...]) -> bool:
    """Whether block `count` is the first one moved by so many steps."""
    moved = [tuple(a + count * s for a, s in zip(first, step, strict=True)) for first in starts[:block]]
    return list(starts[count * block : (count + 1) * block]) == moved


def _subtract(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _view_stack(rewriter: Rewriter, node: Node, args: list[Value], holds: bool) -> Value | None:
    """A stack of equally spaced slices of one tensor is a strided view; `holds`: of memory of its own order."""
    axis = node.attrs["axis"] % len(node.out.type.shape)  # type: ignore[union-attr]
    slices = find_stacked_slices(rewriter.find_producer, args, axis)
    if slices is None or len(slices) < 2:
        return None
    starts = [tuple(s.attrs["start"]) for s in slices]
    if not all(isinstance(n, int) for n in (*node.out.type.shape, *(n for s in starts for n in s))):  # type: ignore[union-attr]
        return None
    digits = find_radices(starts)
    if digits is None:
        return None
    source = slices[0].args[0]
    if holds and _lies_across(rewriter, source) and LEAST_READS * _count(source) <= _count(node.out):
        source = rewriter.add(basic.fusion_barrier, source)
    return _make_view(rewriter, node, slices[0], source, axis, digits)


LEAST_READS = 1.5  # of each element, from which on a copy in the order of the reads pays


def _lies_across(rewriter: Rewriter, value: Value) -> bool:
    """Whether the last axis of a value is not that along which its memory is contiguous."""
    node = rewriter.find_producer(value, shape.permute)
    return node is not None and node.attrs["axes"][-1] % len(node.attrs["axes"]) != len(node.attrs["axes"]) - 1


def _count(value: Value) -> int:
    return math.prod(get_shape(value))  # type: ignore[arg-type]


def _make_view(
    rewriter: Rewriter, node: Node, first: Node, source: Value, axis: int,
    digits: Sequence[tuple[int, tuple[int, ...]]],
) -> Value:  # fmt: skip
    sizes = tuple(first.out.type.shape)  # type: ignore[union-attr]
    shaped = (*sizes[:axis], *(count for count, _ in digits), *sizes[axis:])
    strides = []
    for a, step in enumerate(first.attrs["step"]):
        own = [step if b == a else 0 for b in range(len(sizes))]
        strides.append((*own[:axis], *(d[a] for _, d in digits), *own[axis:]))
    attrs = {"shape": shaped, "start": tuple(first.attrs["start"]), "strides": tuple(strides)}
    view = rewriter.add(shape.strided_view, source, **attrs)
    return rewriter.add(shape.reshape, view, shape=node.out.type.shape)  # type: ignore[union-attr]


@patterns(shape.gather)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """A gather at affine indices, as of a flip, is a strided view."""
    x, places = args
    form = AffineAnalysis(rewriter.builder.producers).find_form(places)
    sizes, kept = x.type.shape, places.type.shape  # type: ignore[union-attr]
    if form is None or form.scalars or not form.ramps or not all(isinstance(n, int) for n in (*sizes, *kept)):
        return None
    axis = len(sizes) + node.attrs["axis"]
    steps = [form.ramps.get(a - len(kept), 0) for a in range(len(kept))]
    spans = [s * (n - 1) for s, n in zip(steps, kept, strict=True)]
    if 0 in kept or form.constant + sum(min(r, 0) for r in spans) < 0:
        return None
    if form.constant + sum(max(r, 0) for r in spans) >= sizes[axis]:
        return None
    shaped = (*sizes[:axis], *kept, *sizes[axis + 1 :])
    place = {a: a if a < axis else a + len(kept) - 1 for a in range(len(sizes)) if a != axis}
    strides = [[int(place.get(a) == b) for b in range(len(shaped))] for a in range(len(sizes))]
    strides[axis][axis : axis + len(kept)] = steps
    start = tuple(form.constant if a == axis else 0 for a in range(len(sizes)))
    rows = tuple(tuple(row) for row in strides)
    return rewriter.add(shape.strided_view, x, shape=shaped, start=start, strides=rows)


# Flat windows: the windows of a product run along flat lines of a padded array, past the ends of its rows. The windows
# of a convolution of stride 1, as columns of a matrix, are pieces of rows. Read as one line, the array has the elements
# of all windows at one offset in a row of memory (Anderson et al. 2017, low-memory GEMM convolution). The columns at
# the ends of the rows, which are no windows, are computed and dropped.


MAX_WASTE = 1.3  # columns computed for each column kept
MIN_DEPTH = 48  # of shorter products, dropping columns costs more than contiguous reads gain

flat_patterns = RewritePatterns("flat windows", same_types=True)


def flatten_windows(function: Function) -> Function:
    """Rewrite the products of a function whose right operands are windows of stride 1."""
    return rewrite_function(function, flat_patterns, remove_dead=True)


@dataclass(frozen=True)
class FlatWindows:
    """A strided view whose last two axes are the last two of its source, at stride 1: `rows` by `columns` windows."""

    node: Node

    @property
    def source(self) -> tuple[int, ...]:
        """The shape of the array."""
        return get_shape(self.node.args[0])  # type: ignore[return-value]

    @property
    def lead(self) -> tuple[int, ...]:
        """The view's axes before those of the windows."""
        return tuple(self.node.attrs["shape"][:-2])

    @property
    def rows(self) -> int:
        """The windows along the second to last axis."""
        return int(self.node.attrs["shape"][-2])

    @property
    def columns(self) -> int:
        """The windows along the last axis."""
        return int(self.node.attrs["shape"][-1])

    def is_flat(self) -> bool:
        """Whether a line of the source has the windows of a row, and some more."""
        *others, across, along = self.node.attrs["strides"]
        steps = [row[-2:] for row in others]
        sizes = (*self.source, *self.node.attrs["shape"])
        return (
            all(isinstance(n, int) for n in sizes)
            and all(tuple(step) == (0, 0) for step in steps)
            and tuple(across[-2:]) == (1, 0)
            and tuple(along[-2:]) == (0, 1)
            and self.columns < self.source[-1] <= MAX_WASTE * self.columns
        )

    def find_last(self, axis: int) -> int:
        """The largest index along an axis of the source that the first window has."""
        row, first = self.node.attrs["strides"][axis], self.node.attrs["start"][axis]
        return int(first + sum(s * (n - 1) for s, n in zip(row, self.lead, strict=False)))

    def view_lines(self, rewriter: Rewriter) -> Value:
        """The view [lead, rows · width of the source] of the flat source."""
        source, strides, start = self.node.args[0], self.node.attrs["strides"], self.node.attrs["start"]
        *outer, height, width = self.source
        missing = self.find_last(-2) + self.rows + (self.find_last(-1) > 0) - height
        if missing > 0:
            source = _add_rows(rewriter, source, missing)
        flat = rewriter.add(shape.reshape, source, shape=(*outer, math.prod(get_shape(source)[-2:])))
        line = tuple(a * width + b for a, b in zip(strides[-2][:-2], strides[-1][:-2], strict=True))
        return rewriter.add(
            shape.strided_view,
            flat,
            shape=(*self.lead, self.rows * width),
            start=(*start[:-2], start[-2] * width + start[-1]),
            strides=(*((*row[:-2], 0) for row in strides[:-2]), (*line, 1)),
        )


def _add_rows(rewriter: Rewriter, source: Value, count: int) -> Value:
    """The array with more rows of zeros at the end; an array that is padded anyway is padded once."""
    rank = len(get_shape(source))
    high, low, value = [0] * rank, (0,) * rank, 0.0 if source.type.dtype.is_float else 0  # type: ignore[union-attr]
    padded = rewriter.find_producer(source, shape.pad)
    if padded is not None:
        source, high, low = padded.args[0], list(padded.attrs["high"]), padded.attrs["low"]
        value = padded.attrs["value"]
    high[-2] += count
    return rewriter.add(shape.pad, source, low=low, high=tuple(high), value=value)


@flat_patterns(contractions.dot)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """A product with windows."""
    below = args[1]
    while (reshaped := rewriter.find_producer(below, shape.reshape)) is not None:
        below = reshaped.args[0]
    view = rewriter.find_producer(below, shape.strided_view)
    if view is None or len(view.attrs["shape"]) < 4 or len(get_shape(view.args[0])) < 2:
        return None
    windows = FlatWindows(view)
    *batch, depth, count = get_shape(args[1])
    if not isinstance(depth, int) or not isinstance(count, int) or depth < MIN_DEPTH or not windows.is_flat():
        return None
    outer = _find_outer(windows, count)
    if outer is None:
        return None
    width = windows.source[-1]
    columns = math.prod(outer) * windows.rows * width
    right = rewriter.add(shape.reshape, windows.view_lines(rewriter), shape=(*batch, depth, columns))
    product = rewriter.add(contractions.dot, args[0], right, **node.attrs)
    *lead, rows, _ = get_shape(product)
    split = (*lead, rows, *outer, windows.rows, width)
    kept = (*split[:-1], windows.columns)
    whole = rewriter.add(shape.reshape, product, shape=split)
    cut = rewriter.add(shape.slice_, whole, start=(0,) * len(split), stop=kept, step=(1,) * len(split))
    return rewriter.add(shape.reshape, cut, shape=get_shape(node.out))


def _find_outer(windows: FlatWindows, count: int) -> Sequence[int] | None:
    """The view's axes that are columns of the product besides the last two; None where columns are no whole axes."""
    sizes = windows.node.attrs["shape"]
    for first in range(len(sizes) - 2, -1, -1):
        if math.prod(sizes[first:]) == count:
            return tuple(sizes[first:-2])
    return None
