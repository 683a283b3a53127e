"""Kernel bodies: the scalar computation of a cluster, built from its root backwards through all inlined ops, with one
rule for each Graph op; then its adjacent dims that are walked as one are collapsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from tessera.core.symbolic_dim import Dim, Size, proves_at_most, proves_less
from tessera.core.types import DType, RefType, TensorType, int64
from tessera.ir.analysis import IntervalAnalysis
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import ACCUMULATE, Op, Rules
from tessera.lower.graph_to_schedule.fusion import FusionCluster
from tessera.lower.indexing_maps import (
    TOTAL,
    AccessPoint,
    BodyIndexing,
    IndexAtom,
    IndexDigit,
    IndexExpr,
    IndexGuard,
    KernelDims,
    OpaqueIndex,
    add_exprs,
    analyse_body,
    divide_expr,
    get_shape,
    make_atom,
    make_bounds_guard,
    make_constant,
    make_index,
    scale_expr,
)
from tessera.ops.dialects import schedule
from tessera.ops.tensor import basic, contractions, reduce, shape
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import cast as convert
from tessera.ops.tensor.basic import full, fusion_barrier, recompute

# Kernel bodies: the element of the root at an index, computed back through the inlined nodes.


# rule(body, node, point) gives the value of a node at a point.
point_rules = Rules("body")
MemorySlot = tuple[Value, tuple[Size, ...]]


class BodyBuilder:
    """A kernel body under construction: the values so far, and one parameter for each buffer that is read.

    `order` lists the cluster's dims as the kernel has them. `held` are the values that lie in memory;
    a slot is such a value and the shape it is seen as.
    """

    def __init__(self, cluster: FusionCluster, order: Sequence[int], uses: UseDef, held: Any) -> None:
        self.cluster = cluster
        self.place = {dim: i for i, dim in enumerate(order)}
        self.uses = uses
        self.held = held
        self.builder = Builder()
        self.slots: dict[MemorySlot, Value] = {}
        self._values: dict[tuple[Value, AccessPoint], Value] = {}
        self._indices: dict[IndexExpr | IndexDigit, Value] = {}

    @cached_property
    def ranges(self) -> IntervalAnalysis:
        """The intervals of the cluster's scalars."""
        return IntervalAnalysis(self.uses, None)

    def compute_element(self, value: Value, point: AccessPoint) -> Value:
        """A tensor's element at a point."""
        key = (value, point)
        if key not in self._values:
            self._values[key] = self._compute(value, point)
        return self._values[key]

    def _compute(self, value: Value, point: AccessPoint) -> Value:
        if self.is_leaf(value):
            return self.load(value, get_shape(value), point)
        node = self.uses[value]
        with self.builder.at(node.loc):
            return point_rules.of(node.op)(self, node, point)

    def is_leaf(self, value: Value) -> bool:
        """Whether a value is read from memory here."""
        return value not in self.cluster.inlined

    def operands(self, node: Node, point: AccessPoint) -> list[Value]:
        """The operands of a node at the points it reads them at."""
        return [self.compute_element(v, p) for v, p in zip(node.args, self.cluster.operands(node, point), strict=True)]

    def load(self, value: Value, shape: tuple[Size, ...], point: AccessPoint) -> Value:
        """The element of a buffer, viewed as `shape`, at a point."""
        ref = self.slot(value, shape)
        indices = [self.index(i) for i in point.indices]
        guards = [self.guard(point.guards)] if point.guards else []
        return self.add(schedule.load, [ref, *indices, *guards])

    def slot(self, value: Value, shape: tuple[Size, ...]) -> Value:
        """The parameter for the buffer of a value, viewed as `shape`."""
        if (value, shape) not in self.slots:
            type = value.type
            assert isinstance(type, TensorType)
            self.slots[value, shape] = Value(RefType(shape, type.dtype, policy=type.policy), self.held(value))
        return self.slots[value, shape]

    def index(self, expr: IndexExpr) -> Value:
        """An index as a value."""
        if expr not in self._indices:
            parts = [self._scale_index(a, c) for a, c in expr.terms]
            if expr.constant or not parts:
                parts.append(self.number(expr.constant))
            total = parts[0]
            for each in parts[1:]:
                total = self.add(e.add, [total, each])
            self._indices[expr] = total
        return self._indices[expr]

    def _scale_index(self, of: IndexDigit | OpaqueIndex, by: Size) -> Value:
        value = self._digit(of) if isinstance(of, IndexDigit) else self._opaque(of)
        return value if by == 1 else self.add(e.mul, [value, self.number(by)])

    def _digit(self, digit: IndexDigit) -> Value:
        if digit not in self._indices:
            value = self.add(schedule.index, [], dim=self.place[digit.dim])
            if digit.divisor != 1:
                value = self.add(e.floor_divide, [value, self.number(digit.divisor)])
            if digit.modulus:
                value = self.add(e.remainder, [value, self.number(digit.modulus)])
            self._indices[digit] = value
        return self._indices[digit]

    def _opaque(self, of: OpaqueIndex) -> Value:
        if of.key[0] in _DIVISION_OPS:
            sign, expr, by = of.key
            return self.add(_DIVISION_OPS[sign], [self.index(expr), self.number(by)])
        value, point, size, along = of.key
        with self.builder.at(of.loc):
            index = self.compute_element(value, point)
            signed = index.type.dtype.kind == "int"  # type: ignore[union-attr]
            low, high = self.ranges.of(value)
            if low >= 0 and proves_less(high, size):
                return self.cast(index, int64)
            return self.check_index(index, point, size=size, along=along, what="index", wrap=signed)

    def check_index(self, index: Value, point: AccessPoint, **attrs: Any) -> Value:
        """A checked index; where a guard fails, its place is never read, and 0 stands for it."""
        if point.guards:
            zero = self.add(full, [], shape=(), value=0, dtype=index.type.dtype)
            index = self.add(e.where, [self.guard(point.guards), index, zero])
        return self.add(shape.check_index, [index], **attrs)

    def guard(self, guards: Sequence[IndexGuard]) -> Value:
        """Whether all guards hold; there is at least one."""
        tests = [t for g in guards for t in self._tests(g)]
        total = tests[0]
        for each in tests[1:]:
            total = self.add(e.bitwise_and, [total, each])
        return total

    def _tests(self, guard: IndexGuard) -> list[Value]:
        found, index = guard.index.bounds(), self.index(guard.index)
        tests = []
        if found is None or not proves_at_most(guard.low, found[0]):
            tests.append(self.add(e.greater_equal, [index, self.number(guard.low)]))
        if found is None or not proves_less(found[1], guard.high):
            tests.append(self.add(e.less, [index, self.number(guard.high)]))
        return tests

    def number(self, value: Size) -> Value:
        """An int64 constant."""
        if isinstance(value, Dim):
            return self.add(basic.dim_value, [], size=value)
        return self.add(full, [], shape=(), value=value, dtype=int64)

    def cast(self, value: Value, dtype: DType) -> Value:
        """A value in another element type."""
        return value if value.type.dtype == dtype else self.add(convert, [value], dtype=dtype)

    def add(self, op: Op, args: Sequence[Value], **attrs: Any) -> Value:
        """One more node."""
        return self.builder.add(op, args, attrs).out

    def store(self, root: Value, place: Value, start: Sequence[Size] = ()) -> None:
        """Write the root's element, at the index of the kernel's dims, into memory: from `start` on, if given."""
        (point,) = self.cluster.points(root)
        value = self.compute_element(root, point)
        indices = [self._axis(d) for d in range(self.cluster.parallel)]
        for axis, low in enumerate(start):
            indices[axis] = self.add(e.add, [indices[axis], self.number(low)]) if low else indices[axis]
        self.builder.add(schedule.store, [place, value, *indices])

    def export(self, value: Value, point: AccessPoint, place: Value) -> None:
        """Write another value of the kernel, at the point at which it is computed, into memory."""
        element = self.compute_element(value, point)
        self.builder.add(schedule.store, [place, element, *(self.index(i) for i in point.indices)])

    def _axis(self, dim: int) -> Value:
        # An axis of one element has an index too, so that a store names every dim.
        return self._digit(IndexDigit(dim, self.cluster.extents[dim]))

    def block(self, *places: Value) -> Block:
        """The finished region; its last parameters are the buffers that are written."""
        return self.builder.block([*self.slots.values(), *places], ())


_DIVISION_OPS = {"//": e.floor_divide, "%": e.remainder}


def _get_scalar_type(value) -> TensorType:
    """The type of one element."""
    return value.type.with_shape(())


def _strip_policy(body: BodyBuilder, value: Value) -> Value:
    """The constant of a cast that only adds a policy to it (canonicalisation makes such casts); else the value."""
    made = body.builder.producers.get(value)
    source = body.builder.producers.get(made.args[0]) if made is not None and made.op is basic.cast else None
    if made is None or source is None or source.op is not basic.full or source.out.type.dtype != value.type.dtype:
        return value
    if source.out.type.compute != value.type.compute:  # type: ignore[union-attr]  # each operand is converted to its own
        return value
    number = basic.full.ref(**source.attrs)
    (rounded,) = basic.cast.execute((source.out.type,), (value.type,), made.attrs, [number])
    return source.out if np.array_equal(number, rounded) else value


@point_rules(*TOTAL)
def _(body, node, point):
    args = body.operands(node, point)
    if sum(v.type.policy is not None for v in args) > 1:  # one operand with the policy is enough
        plain = [_strip_policy(body, v) for v in args]
        args = plain if any(v.type.policy is not None for v in plain) else args
    return body.builder.add(node.op, args, node.attrs, types=(_get_scalar_type(node.out),)).out


@point_rules(shape.check_index)
def _(body, node, point):
    (index,) = body.operands(node, point)
    return body.check_index(index, point, **node.attrs)


@point_rules(basic.full)
def _(body, node, point):
    return body.add(basic.full, [], shape=(), value=node.attrs["value"], dtype=node.attrs["dtype"])


@point_rules(basic.dim_value)
def _(body, node, point):
    return body.add(basic.dim_value, [], size=node.attrs["size"])


@point_rules(shape.iota)
def _(body, node, point):
    return body.cast(body.index(point.indices[node.attrs["axis"]]), node.attrs["dtype"])


@point_rules(shape.permute, shape.slice_, shape.strided_view, basic.broadcast_to, recompute, fusion_barrier)
def _(body, node, point):
    return body.operands(node, point)[0]


@point_rules(shape.reshape)
def _(body, node, point):
    # Memory in row-major order has any shape with as many elements.
    if body.is_leaf(node.args[0]):
        return body.load(node.args[0], get_shape(node.out), point)
    return body.operands(node, point)[0]


@point_rules(shape.pad)
def _(body, node, point):
    (x,) = body.operands(node, point)
    (at,) = body.cluster.operands(node, point)
    guards = [g for i, n in zip(at.indices, get_shape(node.args[0]), strict=True) for g in make_bounds_guard(i, n)]
    if not guards:
        return x
    value = body.add(basic.full, [], shape=(), value=node.attrs["value"], dtype=x.type.dtype)
    return body.add(e.where, [body.guard(guards), x, value])


@point_rules(shape.concatenate)
def _(body, node, point):
    axis, start = node.attrs["axis"], 0
    parts = body.operands(node, point)
    total = None
    for part, operand in zip(parts, node.args, strict=True):
        size = get_shape(operand)[axis]
        guards = make_bounds_guard(add_exprs(point.indices[axis], make_constant(-start)), size)
        start += size
        if not size:
            continue
        total = part if total is None or not guards else body.add(e.where, [body.guard(guards), part, total])
    return total


@point_rules(shape.gather)
def _(body, node, point):
    x, _ = body.operands(node, point)
    return x


@point_rules(reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)
def _(body, node, point):
    (x,) = body.operands(node, point)
    dims = body.cluster.reduced[node.out]
    result = node.out.type.dtype
    if node.op is reduce.sum and not result.is_float:
        x = body.cast(x, result)
    elif node.op.numerics == ACCUMULATE and len(dims) > 1:
        x = body.cast(x, x.type.accumulate)
    for dim in dims:
        x = body.add(schedule.reduce, [x], kind=node.op.__name__, dim=body.place[dim])
    return body.cast(x, result)


@point_rules(contractions.dot)
def _(body, node, point):
    (dim,) = body.cluster.reduced[node.out]
    args = body.operands(node, point)
    return body.add(schedule.contract, args, dim=body.place[dim], dtype=node.attrs["dtype"])


# Dimension collapsing: adjacent dims of a kernel that every access walks as one become one dim (MLIR linalg's
# collapsing of loop dimensions). Memory is in row-major order, so that an access to adjacent axes is an access to one
# axis of a view. Inner loops are then long, and blocks need no reshapes.


ACCESSES = (schedule.load, schedule.store)
REDUCTIONS = (schedule.reduce, schedule.contract)
DIM_OPS = (schedule.index, *REDUCTIONS)
LEAST_SHARED = 16  # ops on the number of a run of elements, for which the run is a dim of its own
MOST_RUN = 8  # elements of a run


@dataclass
class MemoryAccess:
    """An access of a kernel: the shape that its memory is viewed as, and an index along each axis."""

    shape: list[Size]
    indices: list[IndexExpr]

    def merge(self, axis: int, index: IndexExpr) -> None:
        """Merge an axis and the next one."""
        self.shape[axis : axis + 2] = [self.shape[axis] * self.shape[axis + 1]]
        self.indices[axis : axis + 2] = [index]

    def split_axes(self, whole: IndexExpr, split: Mapping[IndexExpr, IndexExpr], size: int) -> None:
        """Change each index to what it is after a split; axes of this size that `whole` walks become two."""
        axes = list(zip(self.shape, self.indices, strict=True))
        self.shape, self.indices = [], []
        for n, index in axes:
            terms = split[index].terms if index == whole and n == size else ()  # of the runs, of the elements
            if terms:
                self.shape += [a.size for a, _ in terms]
                self.indices += [make_atom(a) for a, _ in terms]
            else:
                self.shape.append(n)
                self.indices.append(split[index])

    def merge_digits(self) -> None:
        """Merge the axes whose indices are digits of one number."""
        axis = 0
        while axis < len(self.shape) - 1:
            high, low = self.indices[axis : axis + 2]
            whole = add_exprs(scale_expr(high, self.shape[axis + 1]), low)
            fewer = whole.is_clean and len(whole.terms) < len(high.terms) + len(low.terms)
            if fewer and high.terms and low.terms and isinstance(self.shape[axis + 1], int):
                self.merge(axis, whole)
            else:
                axis += 1

    def split_strides(self) -> None:
        """Split axes that two dims walk: the rows of a folded axis, or a part of each row."""
        axis = 0
        while axis < len(self.shape):
            found = _split_at_stride(self.indices[axis], self.shape[axis])
            if found is not None:
                stride, *parts = found
                self.shape[axis : axis + 1] = [self.shape[axis] // stride, stride]
                self.indices[axis : axis + 1] = parts
            axis += 1

    def find_pair(self, first: IndexExpr, second: IndexExpr, size: Size) -> int | None:
        """The axis whose index is `first`, if the next one is all of `second`."""
        for axis in range(len(self.shape) - 1):
            if self.indices[axis : axis + 2] == [first, second] and self.shape[axis + 1] == size:
                return axis
        return None


def _split_at_stride(index: IndexExpr, size: Size) -> tuple[int, IndexExpr, IndexExpr] | None:
    """The greatest stride of an index where the rest of it is less than the stride; and both parts."""
    if not isinstance(size, int) or not isinstance(index.constant, int) or len(index.terms) < 2 or not index.is_clean:
        return None
    if not all(isinstance(c, int) and c > 0 and isinstance(a.size, int) for a, c in index.terms):
        return None
    stride = max(int(c) for _, c in index.terms)
    high, low = (tuple((a, c) for a, c in index.terms if (c == stride) == outer) for outer in (True, False))
    reach = 1 + sum(int(c) * (int(a.size) - 1) for a, c in low)
    constant, rest = divmod(int(index.constant), stride)
    if size % stride or rest + reach > stride or min(c for _, c in low or high) != 1:
        return None
    return stride, IndexExpr(constant, tuple((a, 1) for a, _ in high)), IndexExpr(rest, low)


@dataclass
class CollapsedKernel:
    """A kernel: its dims and accesses, and the indices that are used as `numbers`, too; `pinned` dims stay."""

    dims: list[tuple[str, Size, str]]
    accesses: dict[Node, MemoryAccess]
    numbers: dict[Value, IndexExpr]
    pinned: set[int]
    place: dict[int, int] = field(default_factory=dict)  # of each dim before

    def __post_init__(self) -> None:
        self.before = dict(self.numbers)

    def is_moved(self, value: Value) -> bool:
        """Whether a number has another expression than by the dims before, at their new places."""
        moved = tuple((_move_atom(a, self.place.__getitem__), c) for a, c in self.before[value].terms)
        return self.numbers[value] != IndexExpr(self.before[value].constant, moved)

    def split_runs(self, dim: int, run: int) -> bool:
        """Split a dim into its runs of so many elements and the elements of a run, if every index allows it."""
        name, extent, kind = self.dims[dim]
        assert isinstance(extent, int)
        split = {i: _split_digits(i, dim, extent, run) for i in self.numbers.values()}
        for access in self.accesses.values():
            split |= {i: _split_digits(i, dim, extent, run) for i in access.indices}
        if None in split.values():
            return False
        self.dims[dim : dim + 1] = [(name, extent // run, kind), (f"{name}_run", run, kind)]
        for access in self.accesses.values():
            access.split_axes(make_index(dim, extent), split, extent)  # type: ignore[arg-type]
        self.numbers = {v: split[i] for v, i in self.numbers.items()}  # type: ignore[misc]
        self.pinned = {d + (d > dim) for d in self.pinned}
        self.place = {d: p + (p > dim) for d, p in self.place.items()}
        return True

    def collapse_all(self) -> None:
        """Collapse adjacent dims while there are any."""
        dim = 0
        while dim < len(self.dims) - 1:
            dim += not self._collapse(dim)

    def _collapse(self, dim: int) -> bool:
        (name, high, kind), (_, low, other) = self.dims[dim : dim + 2]
        if (kind, other) != ("parallel", "parallel") or self.pinned & {dim, dim + 1}:
            return False
        if not isinstance(high, int) or not isinstance(low, int) or 1 in (high, low):
            return False
        pairs: dict[Node, int] = {}
        joined: dict[IndexExpr, IndexExpr] = {}  # the indices along one axis that walk both dims as one
        for node, access in self.accesses.items():
            used = [i for i in access.indices if {dim, dim + 1} & i.dims]
            axis = access.find_pair(make_index(dim, high), make_index(dim + 1, low), low)
            if axis is None:
                found = {i: _join_dims(i, dim, high, low) for i in used}
                if None in found.values():
                    return False
                joined |= found  # type: ignore[arg-type]
            elif len(used) != 2:
                return False
            pairs |= {} if axis is None else {node: axis}
        found = {i: _join_dims(i, dim, high, low) for i in self.numbers.values() if {dim, dim + 1} & i.dims}
        if None in found.values():
            return False
        joined |= found  # type: ignore[arg-type]
        self.dims[dim : dim + 2] = [(name, high * low, kind)]
        for node, access in self.accesses.items():
            if node in pairs:
                access.merge(pairs[node], make_index(dim, high * low))
            else:
                access.indices = [joined.get(i, i) for i in access.indices]
            access.indices = [_renumber(i, dim) for i in access.indices]
        self.numbers = {v: _renumber(joined.get(i, i), dim) for v, i in self.numbers.items()}
        self.pinned = {d - (d > dim) for d in self.pinned}
        self.place = {d: p - (p > dim) for d, p in self.place.items()}
        return True


def _join_dims(expr: IndexExpr, dim: int, high: int, low: int) -> IndexExpr | None:
    """An index that has two adjacent dims only as one, over that one; None for others."""
    used = {a: c for a, c in expr.terms if {dim, dim + 1} & a.dims}
    inner = used.get(IndexDigit(dim + 1, low))
    if inner is None or used != {IndexDigit(dim, high): inner * low, IndexDigit(dim + 1, low): inner}:
        return None
    rest = IndexExpr(expr.constant, tuple((a, c) for a, c in expr.terms if a not in used))
    return add_exprs(rest, scale_expr(make_index(dim, high * low), inner))


def _split_digits(expr: IndexExpr, dim: int, extent: int, run: int) -> IndexExpr | None:
    """An index over a dim as one over its runs and the elements of a run, the next dim; None if it is no such index."""
    high, low = make_index(dim, extent // run), make_index(dim + 1, run)
    parts = [IndexExpr(expr.constant)]
    for atom, by in expr.terms:
        if dim not in atom.dims:
            part: IndexExpr | None = make_atom(_move_atom(atom, lambda d: d + (d > dim)))
        else:
            part = _split_digit(atom, high, low, run) if isinstance(atom, IndexDigit) else None
        if part is None:
            return None
        parts.append(scale_expr(part, by))
    return add_exprs(*parts)


def _split_digit(digit: IndexDigit, high: IndexExpr, low: IndexExpr, run: int) -> IndexExpr | None:
    if (digit.divisor, digit.modulus) == (1, 0):
        return add_exprs(scale_expr(high, run), low)
    if (digit.divisor, digit.modulus) == (1, run):
        return low
    if isinstance(digit.divisor, int) and digit.divisor % run == 0:
        return divide_expr(high, digit.divisor // run)[0] if digit.modulus == 0 else None
    return None


def _move_atom(atom: IndexAtom, move: Callable[[int], int]) -> IndexAtom:
    """An atom after its dims have moved."""
    if isinstance(atom, IndexDigit):
        return replace(atom, dim=move(atom.dim))
    return replace(atom, dims=frozenset(map(move, atom.dims)))


def _renumber(expr: IndexExpr, collapsed: int) -> IndexExpr:
    """An index after the dim that follows `collapsed` is gone."""
    return IndexExpr(expr.constant, tuple((_move_atom(a, lambda d: d - (d > collapsed)), c) for a, c in expr.terms))


def find_number_uses(block: Block, found: BodyIndexing) -> dict[Value, IndexExpr]:
    """The indices that are more than a place in memory: a number, or part of a mask."""
    numbers: dict[Value, IndexExpr] = {}
    opaque = {v for v, i in found.exprs.items() if any(a.dims and isinstance(a, OpaqueIndex) for a, _ in i.terms)}
    for node in block.nodes:
        last = 1 + (node.op is schedule.store)
        places = range(last, last + node.args[0].type.rank) if node.op in ACCESSES else ()
        if node.results and node.out in found.exprs and node.out not in opaque and node.op not in ACCESSES:
            continue
        for position, value in enumerate(node.args):
            if position not in places and value in found.exprs and value not in opaque:
                numbers[value] = found.exprs[value]
    return numbers


def find_runs(block: Block, found: BodyIndexing) -> tuple[int, int] | None:
    """A dim and the length of its runs, if much is computed from the numbers of runs alone: random words (Philox gives
    four at once). The elements of a run then share it.
    """
    if any(n.op in REDUCTIONS for n in block.nodes):
        return None
    numbers = find_number_uses(block, found)
    digits = {a for i in numbers.values() for a, _ in i.terms if isinstance(a, IndexDigit)}
    for dim, run in sorted({(a.dim, a.divisor) for a in digits if isinstance(a.divisor, int) and a.divisor > 1}):
        extent = found.dims[dim][1]
        if run > MOST_RUN or not isinstance(extent, int) or extent % run or extent <= run:
            continue
        runs = {a for a in digits if a.dim == dim and a.divisor % run == 0}
        shared = {v for v, i in numbers.items() if {a for a, _ in i.terms if dim in a.dims} <= runs}
        before = len(shared)
        for node in block.nodes:
            over = [v for v in node.args if dim in found.depends[v]]
            if node.op.pointwise and over and shared.issuperset(over):
                shared.add(node.out)
        if len(shared) - before >= LEAST_SHARED:
            return dim, run
    return None


Views = list[tuple[int, tuple[Size, ...]]]


def collapse_dims(block: Block, dims: KernelDims, splits: bool = False) -> tuple[Block, KernelDims, Views]:
    """The body and dims after collapsing; for each of its parameters the number of the one before, and its shape.

    `splits`: what two dims of a reduction read of an axis are blocks of memory viewed as rows. A dim is split where
    runs of its elements share much.
    """
    block, dims, views = _change_dims(block, dims, None, splits)
    if len(block.nodes) >= LEAST_SHARED and any(n.op is e.floor_divide for n in block.nodes):
        runs = find_runs(block, analyse_body(block, dims))
        if runs is not None:
            block, dims, parts = _change_dims(block, dims, runs, splits)
            views = [(views[number][0], shape) for number, shape in parts]
    return block, dims, views


def _change_dims(
    block: Block, dims: KernelDims, runs: tuple[int, int] | None, splits: bool
) -> tuple[Block, KernelDims, Views]:
    """A body with other dims: split into runs, if given, then collapsed."""
    found = analyse_body(block, dims)
    accesses = {
        n: MemoryAccess(list(n.args[0].type.shape), found.indices(n))
        for n in block.nodes
        if n.op in ACCESSES  # type: ignore[union-attr]
    }
    for access in accesses.values():
        access.merge_digits()
    pinned = {n.attrs["dim"] for n in block.nodes if n.op in REDUCTIONS}
    place = {d: d for d in range(len(dims))}
    kernel = CollapsedKernel(list(dims), accesses, find_number_uses(block, found), pinned, place)
    if runs is not None:
        kernel.split_runs(*runs)
    kernel.collapse_all()
    if splits and not any(n.op is schedule.contract for n in block.nodes):
        for node, access in accesses.items():
            if node.op is schedule.load and len(node.args) == 1 + node.args[0].type.rank:  # type: ignore[union-attr]
                access.split_strides()
    rebuilt = _BodyCopy(block, found, kernel)
    return rebuilt.run(), tuple(kernel.dims), rebuilt.views


class _BodyCopy:
    """The body of a collapsed kernel under construction."""

    def __init__(self, block: Block, found: BodyIndexing, kernel: CollapsedKernel) -> None:
        self.block, self.found, self.kernel = block, found, kernel
        self.builder = Builder()
        self.env: dict[Value, Value] = {}
        self.made = {n.out: n for n in block.nodes if n.results}
        self.params: dict[tuple[int, tuple[Size, ...]], Value] = {}
        self.indices: dict[IndexExpr, Value] = {}
        self.views: Views = []

    def run(self) -> Block:
        """The new body; its last parameters are the memory that it writes."""
        written = {self.block.params.index(n.args[0]) for n in self.block.nodes if n.op is schedule.store}
        for node in self.block.nodes:
            if node.op in ACCESSES or not node.results or node.out not in self.found.exprs:
                self._copy(node)
        self.views = sorted(self.params, key=lambda key: (key[0] in written, key[0] if key[0] in written else 0))
        return self.builder.block([self.params[key] for key in self.views], ())

    def _copy(self, node: Node) -> None:
        with self.builder.at(node.loc):
            if node.op in ACCESSES:
                args = self._access(node)
            else:
                args = [self._value(v) for v in node.args]
            attrs = dict(node.attrs)
            if node.op in DIM_OPS:
                attrs["dim"] = self.kernel.place[attrs["dim"]]
            types = tuple(v.type for v in node.results)
            made = self.builder.add(node.op, args, Attrs(attrs), types=types)
        if node.results:
            self.env[node.out] = made.out

    def _access(self, node: Node) -> list[Value]:
        access, first = self.kernel.accesses[node], 1 + (node.op is schedule.store)
        rest = node.args[first + node.args[0].type.rank :]
        value = [self._value(node.args[1])] if node.op is schedule.store else []
        places = [self._index(i) for i in access.indices]
        return [self._param(node.args[0], tuple(access.shape)), *value, *places, *(self._value(v) for v in rest)]

    def _param(self, ref: Value, shape: tuple[Size, ...]) -> Value:
        key = (self.block.params.index(ref), shape)
        if key not in self.params:
            type = ref.type
            assert isinstance(type, RefType)
            self.params[key] = Value(RefType(shape, type.dtype, policy=type.policy), ref.hint)
        return self.params[key]

    def _value(self, value: Value) -> Value:
        if value not in self.env and value in self.kernel.numbers and self.kernel.is_moved(value):
            self.env[value] = self._index(self.kernel.numbers[value])
        elif value not in self.env:
            self._copy(self.made[value])
        return self.env[value]

    def _index(self, expr: IndexExpr) -> Value:
        if expr not in self.indices:
            terms = [self._term(a, c) for a, c in expr.terms]
            terms += [self._number(expr.constant)] if expr.constant or not terms else []
            total = terms[0]
            for each in terms[1:]:
                total = self.builder.add(e.add, [total, each]).out
            self.indices[expr] = total
        return self.indices[expr]

    def _term(self, atom: object, by: Size) -> Value:
        value = self._digit(atom) if isinstance(atom, IndexDigit) else self._value(atom.key)  # type: ignore[attr-defined]
        return value if by == 1 else self.builder.add(e.mul, [value, self._number(by)]).out

    def _digit(self, digit: IndexDigit) -> Value:
        value = self.builder.add(schedule.index, [], {"dim": digit.dim}).out
        if digit.divisor != 1:
            value = self.builder.add(e.floor_divide, [value, self._number(digit.divisor)]).out
        return self.builder.add(e.remainder, [value, self._number(digit.modulus)]).out if digit.modulus else value

    def _number(self, value: Size) -> Value:
        if isinstance(value, int):
            return self.builder.add(basic.full, [], {"shape": (), "value": value, "dtype": int64}).out
        return self.builder.add(basic.dim_value, [], {"size": value}).out
