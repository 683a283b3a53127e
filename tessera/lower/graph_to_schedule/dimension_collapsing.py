"""Dimension collapsing: adjacent dims of a kernel that every access walks as one become one dim (MLIR linalg's
collapsing of loop dimensions).

Memory is in row-major order, so that an access to adjacent axes is an access to one axis of a view. Inner loops are
then long, and blocks need no reshapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tessera.core.symbolic_dim import Size
from tessera.core.types import RefType, int64
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Node, Value
from tessera.lower.indexing_maps import (
    BodyIndexing,
    IndexDigit,
    IndexExpr,
    KernelDims,
    add_exprs,
    analyse_body,
    make_index,
    scale_expr,
)
from tessera.ops.dialects import schedule
from tessera.ops.tensor import basic
from tessera.ops.tensor import elementwise as e

ACCESSES = (schedule.load, schedule.store)
DIM_OPS = (schedule.index, schedule.reduce, schedule.contract)


@dataclass
class MemoryAccess:
    """An access of a kernel: the shape that its memory is viewed as, and an index along each axis."""

    shape: list[Size]
    indices: list[IndexExpr]

    def merge(self, axis: int, index: IndexExpr) -> None:
        """Merge an axis and the next one."""
        self.shape[axis : axis + 2] = [self.shape[axis] * self.shape[axis + 1]]
        self.indices[axis : axis + 2] = [index]

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

    def find_pair(self, first: IndexExpr, second: IndexExpr, size: Size) -> int | None:
        """The axis whose index is `first`, if the next one is all of `second`."""
        for axis in range(len(self.shape) - 1):
            if self.indices[axis : axis + 2] == [first, second] and self.shape[axis + 1] == size:
                return axis
        return None


@dataclass
class CollapsedKernel:
    """A kernel: its dims and accesses; `pinned` are the dims whose index is used as a number, too."""

    dims: list[tuple[str, Size, str]]
    accesses: dict[Node, MemoryAccess]
    pinned: set[int]
    place: dict[int, int] = field(default_factory=dict)  # of each dim before

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
        for node, access in self.accesses.items():
            used = [i for i in access.indices if {dim, dim + 1} & i.dims]
            axis = access.find_pair(make_index(dim, high), make_index(dim + 1, low), low)
            if used and (axis is None or len(used) != 2):
                return False
            pairs |= {} if axis is None else {node: axis}
        self.dims[dim : dim + 2] = [(name, high * low, kind)]
        for node, access in self.accesses.items():
            if node in pairs:
                access.merge(pairs[node], make_index(dim, high * low))
            access.indices = [_renumber(i, dim) if i.dims != {dim} else i for i in access.indices]
        self.pinned = {d - (d > dim) for d in self.pinned}
        self.place = {d: p - (p > dim) for d, p in self.place.items()}
        return True


def _renumber(expr: IndexExpr, collapsed: int) -> IndexExpr:
    """An index after the dim that follows `collapsed` is gone."""

    def moved(atom: IndexDigit) -> IndexDigit:
        return replace(atom, dim=atom.dim - (atom.dim > collapsed))

    return IndexExpr(expr.constant, tuple((moved(a) if isinstance(a, IndexDigit) else a, c) for a, c in expr.terms))


def find_pinned_dims(block: Block, found: BodyIndexing) -> set[int]:
    """The dims whose index is more than a place in memory: a number, part of a mask, or that of a reduction."""
    pinned = {n.attrs["dim"] for n in block.nodes if n.op in (schedule.reduce, schedule.contract)}
    for node in block.nodes:
        last = 1 + (node.op is schedule.store)
        places = range(last, last + node.args[0].type.rank) if node.op in ACCESSES else ()
        if node.results and node.out in found.exprs and node.op not in ACCESSES:
            continue
        for position, value in enumerate(node.args):
            if position not in places and value in found.exprs:
                pinned |= found.exprs[value].dims
    return pinned


def collapse_dims(block: Block, dims: KernelDims) -> tuple[Block, KernelDims, list[tuple[int, tuple[Size, ...]]]]:
    """The body and dims after collapsing; for each of its parameters the number of the one before, and its shape."""
    found = analyse_body(block, dims)
    accesses = {
        n: MemoryAccess(list(n.args[0].type.shape), found.indices(n))
        for n in block.nodes
        if n.op in ACCESSES  # type: ignore[union-attr]
    }
    for access in accesses.values():
        access.merge_digits()
    kernel = CollapsedKernel(list(dims), accesses, find_pinned_dims(block, found), {d: d for d in range(len(dims))})
    kernel.collapse_all()
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
        self.views: list[tuple[int, tuple[Size, ...]]] = []

    def run(self) -> Block:
        """The new body; its last parameter is the memory that it writes."""
        written = len(self.block.params) - 1
        for node in self.block.nodes:
            if node.op in ACCESSES or not node.results or node.out not in self.found.exprs:
                self._copy(node)
        self.views = sorted(self.params, key=lambda key: key[0] == written)
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
        if value not in self.env:
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
