"""Slice updates: what is written to a slice and read from it again is a value, and a slice of a slice is one.

What remains of updates in place (`ts.update_slice`) is then one slice of an argument, which a kernel writes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tessera.core.symbolic_dim import Size
from tessera.ir.core import Function, Node, Value, find_size_names
from tessera.ir.rewrite import RewritePatterns, Rewriter, UseDef, rewrite_function
from tessera.ir.rules import lower
from tessera.ir.tensor import Tensor
from tessera.lower.graph_to_schedule.lowering import is_result_slice
from tessera.ops.tensor import shape
from tessera.ops.tensor.scatter import update_slice

slice_updates = RewritePatterns("slice updates")


def merge_slice_updates(function: Function, donated: Collection[int]) -> Function:
    """Replace reads of updated slices by what was written there, and updates of slices of slices by one update.

    Updates that are no results in the memory of the parameters `donated` become selections between elements.
    """
    if not find_size_names(function):
        function = rewrite_function(function, slice_updates, remove_dead=True)
    kept = set(find_argument_updates(function, donated))
    patterns = RewritePatterns("updates elsewhere")

    @patterns(update_slice)
    def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
        made = None if node in kept else lower.of(update_slice)(*map(Tensor, args), **node.attrs)
        return None if made is None else made.data  # type: ignore[no-any-return]

    return rewrite_function(function, patterns)


def find_argument_updates(function: Function, donated: Collection[int]) -> list[Node]:
    """The updates of slices that are results in the memory of the parameters `donated`."""
    given, uses = {function.params[i] for i in donated}, UseDef(function)
    found = [n for n in function.body.nodes if n.op is update_slice and n.args[0] in given]
    return [] if find_size_names(function) else [n for n in found if is_result_slice(n, function, uses)]


@slice_updates(shape.slice_)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    update = rewriter.find_producer(args[0], update_slice)
    if update is None or any(by != 1 for by in node.attrs["step"]):
        return None
    (x, new), first = update.args, update.attrs["start"]
    low, high, last = node.attrs["start"], node.attrs["stop"], _add(first, new.type.shape)
    if any(b <= c or d <= a for a, b, c, d in zip(low, high, first, last, strict=True)):
        return rewriter.add(shape.slice_, x, **node.attrs)
    if (low, high) == (first, last):
        return new
    if all(c <= a and b <= d for a, b, c, d in zip(low, high, first, last, strict=True)):
        return rewriter.add(shape.slice_, new, start=_sub(low, first), stop=_sub(high, first), step=node.attrs["step"])
    if all(a <= c and d <= b for a, b, c, d in zip(low, high, first, last, strict=True)):
        return rewriter.add(update_slice, rewriter.add(shape.slice_, x, **node.attrs), new, start=_sub(first, low))
    return None


@slice_updates(update_slice)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    x, new = args
    inner = rewriter.find_producer(_strip_reshapes(rewriter, new), update_slice)
    if inner is None:
        return None
    old = rewriter.find_producer(_strip_reshapes(rewriter, inner.args[0]), shape.slice_)
    if old is None or old.args[0] is not x or any(by != 1 for by in old.attrs["step"]):
        return None
    if (old.attrs["start"], old.out.type.shape) != (node.attrs["start"], new.type.shape):
        return None
    places = _match_axes(new.type.shape, inner.args[0].type.shape)
    part, first = inner.args[1], inner.attrs["start"]
    if places is None or 0 in part.type.shape:
        return None
    sizes = tuple(1 if a is None else part.type.shape[a] for a in places)
    start = tuple(low + (0 if a is None else first[a]) for low, a in zip(node.attrs["start"], places, strict=True))
    return rewriter.add(update_slice, x, rewriter.add(shape.reshape, part, shape=sizes), start=start)


def _add(x: Sequence[Size], y: Sequence[Size]) -> tuple[Size, ...]:
    return tuple(a + b for a, b in zip(x, y, strict=True))


def _sub(x: Sequence[Size], y: Sequence[Size]) -> tuple[Size, ...]:
    return tuple(a - b for a, b in zip(x, y, strict=True))


def _strip_reshapes(rewriter: Rewriter, value: Value) -> Value:
    while (node := rewriter.find_producer(value, shape.reshape)) is not None:
        value = node.args[0]
    return value


def _match_axes(shape: Sequence[Size], other: Sequence[Size]) -> list[int | None] | None:
    """For each axis of a shape the same one of another, None for axes of one element; None where others differ."""
    long = [a for a, n in enumerate(other) if n != 1]
    if [other[a] for a in long] != [n for n in shape if n != 1]:
        return None
    rest = iter(long)
    return [None if n == 1 else next(rest) for n in shape]
