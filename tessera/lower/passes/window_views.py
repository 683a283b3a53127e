"""Window views: stacked slices of one tensor, and gathers at affine indices, as strided views.

An element of a stack of n tensors is a chain of n selections; one of a strided view is one load. Convolutions and
stencils stack a slice for each element of their windows. Reductions of stacks, as in pools, are none any more here:
canonicalisation combines their slices.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.core.symbolic_dim import Size
from tessera.ir.analysis.affine import AffineAnalysis
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, rewrite_function
from tessera.ops.tensor import shape

patterns = RewritePatterns("window views", same_types=True)
stacks = RewritePatterns("stacks as views", same_types=True)


def form_window_views(function: Function, with_stacks: bool = True) -> Function:
    """Rewrite a function of tensor ops; `with_stacks`, stacks of slices too, which products read in place."""
    for rules in (stacks, patterns) if with_stacks else (patterns,):
        function = rewrite_function(function, rules, remove_dead=True)
    return function


def _find_slice(rewriter: Rewriter, part: Value, axis: int) -> Node | None:
    """The slice that a part of a stack is, but for a new axis of one element."""
    inner = rewriter.find_producer(part, shape.reshape)
    node = rewriter.find_producer(part if inner is None else inner.args[0], shape.slice_)
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


@stacks(shape.concatenate)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """A stack of equally spaced slices of one tensor is a strided view."""
    axis = node.attrs["axis"] % len(node.out.type.shape)  # type: ignore[union-attr]
    slices = [_find_slice(rewriter, a, axis) for a in args]
    first = slices[0]
    if len(slices) < 2 or first is None or not all(s is not None and s.args == first.args for s in slices):
        return None
    starts = [tuple(s.attrs["start"]) for s in slices if s is not None]
    if {s.attrs["step"] for s in slices if s is not None} != {first.attrs["step"]}:
        return None
    if not all(isinstance(n, int) for n in (*node.out.type.shape, *(n for s in starts for n in s))):  # type: ignore[union-attr]
        return None
    digits = find_radices(starts)
    return None if digits is None else _make_view(rewriter, node, first, axis, digits)


def _make_view(
    rewriter: Rewriter, node: Node, first: Node, axis: int, digits: Sequence[tuple[int, tuple[int, ...]]]
) -> Value:
    sizes = tuple(first.out.type.shape)  # type: ignore[union-attr]
    shaped = (*sizes[:axis], *(count for count, _ in digits), *sizes[axis:])
    strides = []
    for a, step in enumerate(first.attrs["step"]):
        own = [step if b == a else 0 for b in range(len(sizes))]
        strides.append((*own[:axis], *(d[a] for _, d in digits), *own[axis:]))
    attrs = {"shape": shaped, "start": tuple(first.attrs["start"]), "strides": tuple(strides)}
    view = rewriter.add(shape.strided_view, first.args[0], **attrs)
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
