"""Indexing maps: which elements of its operands each Graph op reads, as affine expressions (MLIR linalg's maps).

An index is a sum of mixed-radix digits of iteration dims, so that reshapes fold away. A digit is
(i // divisor) % modulus for the index i of one dim. Splitting an axis makes digits and merging axes adds them up again,
scaled; `divide_expr` finds where one undoes the other. `analyse_body` recovers the expressions from a kernel body, with
the dims on which each value depends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.core.errors import UNKNOWN, Location
from tessera.core.symbolic_dim import Size, ceil_divide, order_of_size, proves_at_most, proves_less
from tessera.core.types import TensorType, int64
from tessera.ir.core import Block, Node, Value
from tessera.ir.rules import REGISTRY, Rules
from tessera.ops.dialects import schedule
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import fusion_barrier, recompute

# Affine index expressions.


@dataclass(frozen=True)
class IndexDigit:
    """(i // divisor) % modulus, where i runs over `extent` values; modulus 0 means without one."""

    dim: int
    extent: Size
    divisor: Size = 1
    modulus: Size = 0

    @property
    def size(self) -> Size:
        """The number of its values, from 0 up."""
        return self.modulus or ceil_divide(self.extent, self.divisor)

    @property
    def dims(self) -> frozenset[int]:
        """The dims it depends on."""
        return frozenset((self.dim,))


@dataclass(frozen=True)
class OpaqueIndex:
    """An index that is not a sum of digits: read from memory, or a division with a remainder.

    `key` identifies it; `size` is 0 where its range is unknown. `loc` is where the index of a gather is checked.
    """

    key: Any
    dims: frozenset[int]
    size: Size = 0
    loc: Location = field(default=UNKNOWN, compare=False)


IndexAtom = IndexDigit | OpaqueIndex


@dataclass(frozen=True)
class IndexExpr:
    """A constant plus atoms times coefficients."""

    constant: Size = 0
    terms: tuple[tuple[IndexAtom, Size], ...] = ()

    @property
    def dims(self) -> frozenset[int]:
        """The dims it depends on."""
        return frozenset().union(*(a.dims for a, _ in self.terms))

    @property
    def is_clean(self) -> bool:
        """Whether it is made of digits only."""
        return all(isinstance(a, IndexDigit) for a, _ in self.terms)

    def bounds(self) -> tuple[Size, Size] | None:
        """The least and greatest value, where the range of every atom is known."""
        if any(a.size == 0 for a, _ in self.terms):
            return None
        low = high = self.constant
        for a, c in self.terms:
            reach = c * (a.size - 1)
            if proves_at_most(0, reach):
                high = high + reach
            elif proves_at_most(reach, 0):
                low = low + reach
            else:
                return None
        return low, high

    def within(self, low: Size, high: Size) -> bool:
        """Whether it is proven to be from `low` to below `high`."""
        found = self.bounds()
        return found is not None and proves_at_most(low, found[0]) and proves_less(found[1], high)


ZERO = IndexExpr()


def make_constant(value: Size) -> IndexExpr:
    """A number."""
    return IndexExpr(value)


def make_atom(of: IndexAtom) -> IndexExpr:
    """An expression of one atom; an atom that can only be 0 is 0."""
    return ZERO if of.size == 1 else IndexExpr(0, ((of, 1),))


def make_index(dim: int, extent: Size) -> IndexExpr:
    """The index of a dim."""
    return make_atom(IndexDigit(dim, extent))


def add_exprs(*exprs: IndexExpr) -> IndexExpr:
    """The sum."""
    terms: dict[IndexAtom, Size] = {}
    for each in exprs:
        for a, c in each.terms:
            terms[a] = terms.get(a, 0) + c
    kept = _merge_digits({a: c for a, c in terms.items() if c})
    return IndexExpr(sum(e.constant for e in exprs), tuple(sorted(kept.items(), key=_find_term_order)))


def scale_expr(expr: IndexExpr, by: Size) -> IndexExpr:
    """`expr` times a number."""
    return IndexExpr(expr.constant * by, tuple((a, c * by) for a, c in expr.terms)) if by else ZERO


def _find_term_order(term: tuple[IndexAtom, Size]) -> tuple[Any, ...]:
    a = term[0]
    return (0, a.dim, order_of_size(-a.divisor)) if isinstance(a, IndexDigit) else (1, 0, order_of_size(0))


def _merge_digits(terms: dict[IndexAtom, Size]) -> dict[IndexAtom, Size]:
    """Merge adjacent digits of one dim: (i // 4) * 4 + i % 4 = i."""
    digits = [(a, c) for a, c in terms.items() if isinstance(a, IndexDigit)]
    for low, c in digits:
        for high, k in digits:
            if low.modulus and high.dim == low.dim and _are_adjacent_digits(high, low) and k == c * low.modulus:
                rest = {a: n for a, n in terms.items() if a not in (low, high)}
                whole = IndexDigit(low.dim, low.extent, low.divisor, low.modulus * high.modulus)
                return _merge_digits({**rest, whole: rest.get(whole, 0) + c})
    return terms


def _are_adjacent_digits(high: IndexDigit, low: IndexDigit) -> bool:
    return high.divisor == low.divisor * low.modulus


def divide_expr(expr: IndexExpr, by: Size) -> tuple[IndexExpr, IndexExpr]:
    """The floor quotient and the remainder by a positive number."""
    if by == 1:
        return expr, ZERO
    even = [(a, c // by) for a, c in expr.terms if c % by == 0]
    rest = IndexExpr(expr.constant % by, tuple((a, c) for a, c in expr.terms if c % by != 0))
    quotient, remainder = _divide_opaque(rest, by)
    return add_exprs(IndexExpr(expr.constant // by, tuple(even)), quotient), remainder


def _divide_opaque(rest: IndexExpr, by: Size) -> tuple[IndexExpr, IndexExpr]:
    """Quotient and remainder of terms that do not divide one by one."""
    if rest.within(0, by):
        return ZERO, rest
    units = {c for _, c in rest.terms if proves_less(0, c) and by % c == 0}
    for unit in sorted(units, key=order_of_size, reverse=True):
        small = IndexExpr(rest.constant % unit, tuple((a, c) for a, c in rest.terms if c % unit != 0))
        if unit != 1 and small.within(0, unit):
            big = IndexExpr(rest.constant // unit, tuple((a, c // unit) for a, c in rest.terms if c % unit == 0))
            quotient, remainder = divide_expr(big, by // unit)
            return quotient, add_exprs(scale_expr(remainder, unit), small)
    digit = _find_single_atom(rest)
    if digit is not None and digit.modulus % by == 0:
        return _make_digit(digit, digit.divisor * by, digit.modulus // by), _make_digit(digit, digit.divisor, by)
    return make_atom(OpaqueIndex(("//", rest, by), rest.dims)), make_atom(OpaqueIndex(("%", rest, by), rest.dims, by))


def _find_single_atom(expr: IndexExpr) -> IndexDigit | None:
    if expr.constant == 0 and len(expr.terms) == 1 and expr.terms[0][1] == 1:
        only = expr.terms[0][0]
        return only if isinstance(only, IndexDigit) else None
    return None


def _make_digit(of: IndexDigit, divisor: Size, modulus: Size) -> IndexExpr:
    if proves_at_most(of.extent, divisor):
        return ZERO
    whole = proves_at_most(of.extent, divisor * modulus)
    return make_atom(IndexDigit(of.dim, of.extent, divisor, 0 if whole else modulus))


def linearise(indices: Iterable[IndexExpr], shape: Iterable[Size]) -> IndexExpr:
    """The row-major offset of an index in a shape."""
    place = ZERO
    for i, n in zip(indices, shape, strict=True):
        place = add_exprs(scale_expr(place, n), i)
    return place


def delinearise(place: IndexExpr, shape: tuple[Size, ...]) -> tuple[IndexExpr, ...]:
    """The index in a shape of a row-major offset."""
    found: list[IndexExpr] = []
    for n in reversed(shape[1:]):
        place, i = divide_expr(place, n) if n else (place, ZERO)
        found.append(i)
    return (place, *reversed(found)) if shape else ()


KernelDims = tuple[tuple[str, Size, str], ...]


@dataclass(frozen=True)
class BodyIndexing:
    """For each value of a body: the dims it depends on, and its index expression where it is an index."""

    dims: KernelDims
    depends: Mapping[Value, frozenset[int]]
    exprs: Mapping[Value, IndexExpr]

    def expr(self, value: Value) -> IndexExpr:
        """The expression of an index; an index without one is opaque."""
        found = self.exprs.get(value)
        return make_atom(OpaqueIndex(value, self.depends[value])) if found is None else found

    def indices(self, node: Node) -> list[IndexExpr]:
        """The indices of a load or store."""
        skip = 1 if node.op is schedule.load else 2
        return [self.expr(v) for v in node.args[skip : skip + node.args[0].type.rank]]


_index_rules = Rules("index form")


def analyse_body(block: Block, dims: Sequence[tuple[str, Size, str]]) -> BodyIndexing:
    """Analyse a kernel body."""
    depends: dict[Value, frozenset[int]] = dict.fromkeys(block.params, frozenset())
    exprs: dict[Value, IndexExpr] = {}
    found = BodyIndexing(tuple(dims), depends, exprs)
    for node in block.nodes:
        if not node.results:
            continue
        below = frozenset().union(*(depends[v] for v in node.args))
        taken = {node.attrs["dim"]} if node.op in (schedule.reduce, schedule.contract) else set()
        depends[node.out] = below - taken
        if node.op is schedule.index:
            depends[node.out] = frozenset((node.attrs["dim"],))
        rule = _index_rules.get(node.op)
        expr = rule(found, node) if rule and node.out.type.dtype == int64 else None
        if expr is not None:
            exprs[node.out] = expr
    return found


@_index_rules(schedule.index)
def _(found, node):
    dim = node.attrs["dim"]
    return make_index(dim, found.dims[dim][1])


@_index_rules(basic.full)
def _(found, node):
    return make_constant(node.attrs["value"])


@_index_rules(basic.dim_value)
def _(found, node):
    return make_constant(node.attrs["size"])


@_index_rules(e.add)
def _(found, node):
    return add_exprs(*(found.expr(v) for v in node.args))


@_index_rules(e.sub)
def _(found, node):
    x, y = (found.expr(v) for v in node.args)
    return add_exprs(x, scale_expr(y, -1))


@_index_rules(e.mul)
def _(found, node):
    x, y = (found.expr(v) for v in node.args)
    x, y = (y, x) if not x.terms else (x, y)
    return None if y.terms else scale_expr(x, y.constant)


def _divide_values(found: BodyIndexing, node: Node, part: int) -> IndexExpr | None:
    x, y = (found.expr(v) for v in node.args)
    if y.terms or not proves_less(0, y.constant):
        return None
    out = divide_expr(x, y.constant)[part]
    # A division with a remainder is opaque, keyed by its own value.
    return out if all(isinstance(a, IndexDigit) or isinstance(a.key, Value) for a, _ in out.terms) else None


@_index_rules(e.floor_divide)
def _(found, node):
    return _divide_values(found, node, 0)


@_index_rules(e.remainder)
def _(found, node):
    return _divide_values(found, node, 1)


# Indexing maps: which elements of its operands each Graph op reads (MLIR linalg's indexing maps).
#
# An access point is an index into a tensor and the guards under which it is read: outside them the element does not
# exist, and the value is not used.


POINTWISE = tuple(o for o in REGISTRY.values() if o.pointwise)
# The pointwise ops that have a meaning for any operands, also for those that a guard or a partial tile leaves out.
TOTAL = tuple(o for o in POINTWISE if o is not shape.check_index)
REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)


@dataclass(frozen=True)
class IndexGuard:
    """A bounds check: an index is from `low` to below `high`."""

    index: IndexExpr
    low: Size
    high: Size


@dataclass(frozen=True)
class AccessPoint:
    """An access to a tensor: its indices, and the guards under which it is read."""

    indices: tuple[IndexExpr, ...]
    guards: tuple[IndexGuard, ...] = ()

    @property
    def dims(self) -> frozenset[int]:
        """The dims that the index depends on."""
        return frozenset().union(*(e.dims for e in self.indices))

    def axes_along(self, dim: int) -> tuple[int, ...]:
        """The axes whose index depends on a dim."""
        return tuple(a for a, e in enumerate(self.indices) if dim in e.dims)

    @property
    def is_clean(self) -> bool:
        """Whether the indices consist of digits only."""
        return all(e.is_clean for e in self.indices)

    def covers(self, sizes: Sequence[Size]) -> bool:
        """Whether it is each element of a tensor of these sizes, in order: its indices are those of dims, or 0."""
        dims = iter(sorted(self.dims))
        return list(self.indices) == [ZERO if n == 1 else make_index(next(dims, -1), n) for n in sizes]

    def is_torn(self, sizes: Sequence[Size]) -> bool:
        """Whether an axis of one element has digits of a dim that another axis walks, too.

        They are 0 under a guard alone. Without them, the elements of a block lie apart.
        """
        single, others = (
            frozenset().union(*(i.dims for i, n in zip(self.indices, sizes, strict=True) if (n == 1) == alone))
            for alone in (True, False)
        )
        return bool(single & others)

    def moved(self, indices: Sequence[IndexExpr], *guards: IndexGuard) -> AccessPoint:
        """The access at other indices, under these guards and more."""
        return AccessPoint(tuple(indices), self.guards + tuple(g for g in guards if g not in self.guards))


# rule(node, point, reduced): a point for each operand; `reduced` are the indices of the reduced axes.
indexing_rules = Rules("index")


def find_operand_points(node: Node, point: AccessPoint, reduced: Sequence[IndexExpr] = ()) -> list[AccessPoint]:
    """The point at which each operand is read."""
    return indexing_rules.of(node.op)(node, point, reduced)


def get_tensor_type(value: Value) -> TensorType:
    """The type of a tensor or block."""
    assert isinstance(value.type, TensorType)
    return value.type


def get_shape(value: Value) -> tuple[Size, ...]:
    """The shape of a tensor."""
    return tuple(get_tensor_type(value).shape)


@indexing_rules(*POINTWISE, recompute, fusion_barrier)
def _(node, point, reduced):
    return [point] * len(node.args)


@indexing_rules(basic.full, basic.dim_value, shape.iota)
def _(node, point, reduced):
    return []


@indexing_rules(basic.broadcast_to)
def _(node, point, reduced):
    sizes = get_shape(node.args[0])
    tail = point.indices[len(point.indices) - len(sizes) :]
    return [point.moved([ZERO if n == 1 else i for i, n in zip(tail, sizes, strict=True)])]


def keeps_long_axes(node: Node) -> bool:
    """Whether a reshape adds and removes axes of one element alone."""
    before, after = ([n for n in get_shape(v) if n != 1] for v in (node.args[0], node.out))
    return before == after


@indexing_rules(shape.reshape)
def _(node, point, reduced):
    before, after = get_shape(node.args[0]), get_shape(node.out)
    # Only the axes between those that both shapes begin and end with are folded.
    first = _count_common(before, after)
    last = _count_common(before[first:][::-1], after[first:][::-1])
    inner = slice(first, len(before) - last)
    middle = linearise(point.indices[first : len(after) - last], after[first : len(after) - last])
    tail = point.indices[len(after) - last :]
    return [point.moved([*point.indices[:first], *delinearise(middle, before[inner]), *tail])]


def _count_common(one: Sequence[Size], other: Sequence[Size]) -> int:
    """How many sizes two shapes begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (n, m) in pairs if n != m), min(len(one), len(other)))


@indexing_rules(shape.permute)
def _(node, point, reduced):
    axes = node.attrs["axes"]
    return [point.moved([point.indices[axes.index(a)] for a in range(len(axes))])]


@indexing_rules(shape.slice_)
def _(node, point, reduced):
    steps = zip(point.indices, node.attrs["start"], node.attrs["step"], strict=True)
    return [point.moved([add_exprs(scale_expr(i, by), make_constant(low)) for i, low, by in steps])]


@indexing_rules(shape.strided_view)
def _(node, point, reduced):
    rows = zip(node.attrs["start"], node.attrs["strides"], strict=True)
    return [point.moved([_combine(low, row, point.indices) for low, row in rows])]


def _combine(start: int, strides: Sequence[int], indices: Sequence[IndexExpr]) -> IndexExpr:
    scaled = [scale_expr(i, s) for i, s in zip(indices, strides, strict=True) if s]
    return add_exprs(make_constant(start), *scaled)


def make_bounds_guard(index: IndexExpr, size: Size) -> tuple[IndexGuard, ...]:
    """The bounds check of an index; none where it is proven."""
    return () if index.within(0, size) else (IndexGuard(index, 0, size),)


@indexing_rules(shape.pad)
def _(node, point, reduced):
    moved = [add_exprs(i, make_constant(-low)) for i, low in zip(point.indices, node.attrs["low"], strict=True)]
    guards = [g for i, n in zip(moved, get_shape(node.args[0]), strict=True) for g in make_bounds_guard(i, n)]
    return [point.moved(moved, *guards)]


@indexing_rules(shape.concatenate)
def _(node, point, reduced):
    axis, start, found = node.attrs["axis"], 0, []
    for each in node.args:
        size = get_shape(each)[axis]
        moved = list(point.indices)
        moved[axis] = add_exprs(moved[axis], make_constant(-start))
        found.append(point.moved(moved, *make_bounds_guard(moved[axis], size)))
        start += size
    return found


@indexing_rules(shape.gather)
def _(node, point, reduced):
    x, places = node.args
    first = len(get_shape(x)) + node.attrs["axis"]
    last = first + len(get_shape(places))
    at = point.moved(point.indices[first:last])
    size = get_shape(x)[first]
    # Of an axis of one element the index is 0, but it is checked.
    place = make_atom(OpaqueIndex((places, at, size, first), at.dims, size if size != 1 else 0, node.loc))
    return [point.moved([*point.indices[:first], place, *point.indices[last:]]), at]


@indexing_rules(*REDUCTIONS)
def _(node, point, reduced):
    axes = find_reduced_axes(node)
    kept = iter(point.indices)
    along = iter(reduced)
    indices = []
    for axis in range(len(get_shape(node.args[0]))):
        if axis in axes and node.attrs["keepdims"]:
            next(kept)
        indices.append(next(along) if axis in axes else next(kept))
    return [point.moved(indices)]


@indexing_rules(contractions.dot)
def _(node, point, reduced):
    (*batch, m, n), (k,) = point.indices, reduced
    return [point.moved([*batch, m, k]), point.moved([*batch, k, n])]


def find_reduced_axes(node: Node) -> tuple[int, ...]:
    """The axes (from 0) of its first operand that a node reduces."""
    rank = len(get_shape(node.args[0]))
    if node.op is contractions.dot:
        return (rank - 1,)
    axis = node.attrs["axis"]
    listed = axis if isinstance(axis, tuple) else (axis,)
    return tuple(a + rank for a in listed)
