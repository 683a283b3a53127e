"""Trip counts: a bound, in symbolic sizes, of the trips that a loop of a kernel makes in any of its programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tessera.core.symbolic_dim import Dim, Size, ceil_divide, proves_at_most
from tessera.core.types import int64, scalar
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import tile
from tessera.ops.tensor import basic, elementwise, shape

_SCALAR_MOVES = (basic.cast, basic.broadcast_to, shape.reshape)
# A sum of values with factors, and a constant under None.
SizeForm = Mapping[Value | None, Size]
MAX_FORMS = 16  # of one bound: minima of minima


def bound_trips(body: Block, node: Node, grid: Sequence[Size]) -> Size | None:
    """The most trips of a loop in any program of the grid; None where the sizes of the launch do not bound them."""
    forms = _SizeForms({v: n for n in body.walk() for v in n.results}, grid)
    lower, upper, step = node.args[:3]
    (stride, *others) = forms.bound(step, above=True)
    if others or set(stride) - {None} or not isinstance(by := stride.get(None, 0), int) or by < 1:
        return None
    found = [_subtract(a, b) for a in forms.bound(upper, above=True) for b in forms.bound(lower, above=False)]
    gaps = [gap for form in found if (gap := forms.resolve(form)) is not None]
    trips = next((ceil_divide(gap, by) for gap in gaps), None)
    return trips if trips is not None and proves_at_most(1, trips) else None


def _subtract(a: SizeForm, b: SizeForm) -> SizeForm:
    return _combine(a, {key: -factor for key, factor in b.items()})


def _combine(a: SizeForm, b: SizeForm) -> SizeForm:
    summed = {key: a.get(key, 0) + b.get(key, 0) for key in (*a, *b)}
    return {key: factor for key, factor in summed.items() if isinstance(factor, Dim) or factor}


def _is_index(value: Value) -> bool:
    return value.type == scalar(int64)


@dataclass(frozen=True)
class _SizeForms:
    """The sums that bound the indices of a kernel."""

    producers: Mapping[Value, Node]
    grid: Sequence[Size]

    def bound(self, value: Value, above: bool) -> list[SizeForm]:
        """Sums each of which is at least (`above`) or at most an index; the index itself where nothing is known."""
        node = self.producers.get(value)
        found = list(self._list_bounds(node, above))[:MAX_FORMS] if node is not None else []
        return found or [{value: 1}]

    def _list_bounds(self, node: Node, above: bool) -> Iterator[SizeForm]:
        op, args = node.op, node.args
        if op is basic.full:
            yield {None: int(node.attrs["value"])}
        elif op is basic.dim_value:
            yield {None: node.attrs["size"]}
        elif op is tile.program_id:  # one value for all that ask for the same place
            same = (n for n in self.producers.values() if n.op is op and n.attrs["axis"] == node.attrs["axis"])
            yield {next(same).out: 1}
        elif op in _SCALAR_MOVES and _is_index(args[0]) and _is_index(node.out):
            yield from self.bound(args[0], above)
        elif op in (elementwise.add, elementwise.sub):
            combine, flips = (_combine, False) if op is elementwise.add else (_subtract, True)
            for a in self.bound(args[0], above):
                yield from (combine(a, b) for b in self.bound(args[1], above != flips))
        elif op is elementwise.mul:
            yield from self._scale(args, above)
        elif op is (elementwise.minimum if above else elementwise.maximum):
            for arg in args:
                yield from self.bound(arg, above)

    def _scale(self, args: Sequence[Value], above: bool) -> Iterator[SizeForm]:
        """The sums of a product with a constant that is not negative."""
        for factor, other in (args, args[::-1]):
            (form, *rest), least = self.bound(factor, above=True), self.bound(factor, above=False)
            if not rest and least == [form] and not set(form) - {None} and proves_at_most(0, form.get(None, 0)):
                by = form.get(None, 0)
                yield from ({key: by * n for key, n in each.items()} for each in self.bound(other, above))
                return

    def resolve(self, form: SizeForm) -> Size | None:
        """The greatest value of a sum over the programs of the grid; None where it has other values."""
        total = form.get(None, 0)
        for value, factor in form.items():
            if value is None:
                continue
            node = self.producers.get(value)
            if node is None or node.op is not tile.program_id:
                return None
            if proves_at_most(0, factor):
                axis = node.attrs["axis"]
                total = total + factor * ((self.grid[axis] if axis < len(self.grid) else 1) - 1)
            elif not proves_at_most(factor, 0):
                return None
        return total
