"""Row alignment: long rows of 16-bit elements that begin anywhere in lines of memory are accessed in whole vectors
(peeling for alignment, as compilers of vector code do).

A row of 50,257 elements begins at an odd address in every second program, so that no vector of its elements can be
loaded. Here the loops of a program begin at the first vector of its row instead. The block of what is left has the
elements behind their last block and then those before the first vector: columns modulo the size of the row.

The blocks have other elements than before. That is right for loops that the lowering made: a kernel of the user may
compute something of each block, as of one that scales blocks by their maxima, and something else of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tessera.codegen.ptx.context import VECTOR_BYTES
from tessera.codegen.ptx.ops import index_constant, set_facts
from tessera.core.types import RefType, TensorType, int32, int64
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.lower.indexing_maps import get_shape
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, elementwise, reduce, shape

ACCESSES = (tile.load, tile.store)
MOST_COLUMNS = 1 << 30  # of a row, which are numbered in 32 bits
LEAST_UNIT = 2  # elements of a vector, so few of which are loaded as fast one by one
REDUCTIONS = (reduce.sum, reduce.max, reduce.min)
SHAPED = (tile.load, basic.full, basic.broadcast_to, shape.reshape)  # ops whose attributes have the result's shape


def align_rows(function: Function) -> Function:
    """The function with whole vectors of its rows, where it walks misaligned ones in blocks."""
    rows = MisalignedRows.find(function)
    return function if rows is None else set_facts(rows.rewrite(), realigned=True)


@dataclass
class MisalignedRows:
    """A function that walks rows of `size` elements in blocks of `block`, and what is left of them in one of `rest`.

    `row` are the indices of the row in memories whose first axes have the sizes `lead`; vectors have `unit` elements.
    """

    function: Function
    size: int
    block: int
    rest: int
    row: tuple[Value, ...]
    lead: tuple[int, ...]
    unit: int
    builder: Builder = field(default_factory=Builder)
    shift: Value | None = None  # the elements of the row before its first vector

    @staticmethod
    def find(function: Function) -> MisalignedRows | None:
        """The rows of a function, or None where it does something else, or its rows are aligned."""
        accesses = [n for n in function.body.walk() if n.op in ACCESSES and _count_block(n) > 1]
        refs = [n.args[0] for n in accesses]
        known = all(r in function.params and _is_plain(r) for r in refs)
        if not function.attrs.get("peel") or not accesses or not known:
            return None
        sizes = {tuple(map(int, _get_ref(r).shape)) for r in refs}
        (*lead, size), unit = next(iter(sizes)), VECTOR_BYTES * 8 // min(_get_ref(r).dtype.bits for r in refs)
        blocks = sorted({_get_block(n)[-1] for n in accesses})
        if (
            len(sizes) > 1
            or unit <= LEAST_UNIT
            or size % unit == 0
            or not lead
            or len(blocks) != 2
            or size > MOST_COLUMNS
        ):
            return None
        rest, block = blocks
        found = MisalignedRows(function, size, block, rest, _get_starts(accesses[0])[:-1], tuple(lead), unit)
        return found if found._walks_rows(accesses) and found._is_elementwise() else None

    def _walks_rows(self, accesses: Sequence[Node]) -> bool:
        """Whether loops at the top walk all whole blocks of the row, and what is left comes after them."""
        uses, outer = UseDef(self.function), set(self.function.body.nodes)
        whole = self.size // self.block * self.block
        if self.rest != self.size - whole or self.rest < self.unit or self.block % self.unit:
            return False
        variables = {n.regions[0].params[0] for n in outer if n.op is control_flow.for_ and self._walks(uses, n, whole)}
        at_top = {v for n in outer for v in n.results}
        for node in accesses:
            *row, column = _get_starts(node)
            last = node in outer and _find_constant(uses, column) == whole
            if tuple(row) != self.row or node.attrs["edge"] != "error" or not (column in variables or last):
                return False
            if _has_mask(node) or not at_top.issuperset(row):
                return False
        return all(
            n.op is not control_flow.for_ or n.regions[0].params[0] in variables for n in self.function.body.walk()
        )

    def _walks(self, uses: UseDef, loop: Node, whole: int) -> bool:
        bounds = tuple(_find_constant(uses, v) for v in loop.args[:3])
        return bounds == (0, whole, self.block)

    def _is_elementwise(self) -> bool:
        """Whether elements of rows are loaded, stored, reduced to numbers, and else computed one by one."""
        for node in self.function.body.walk():
            wide = [v for v in (*node.args, *node.results) if self._is_wide(v)]
            if not wide:
                continue
            if any(math.prod(get_shape(v)[:-1]) != 1 for v in wide):  # type: ignore[arg-type]
                return False
            reduces = node.op in REDUCTIONS and node.attrs["axis"] == (-1,)
            if not (node.op.pointwise or node.op in (*ACCESSES, *SHAPED) or reduces) or node.regions:
                return False
        return True

    def rewrite(self) -> Function:
        """The function with aligned blocks."""
        env: dict[Value, Value] = {}
        body = self._copy_block(self.function.body.nodes, env)
        return Function(
            self.function.name, Block(self.function.body.params, body, ()), self.function.attrs, self.function.loc
        )

    def _copy_block(self, nodes: Sequence[Node], env: dict[Value, Value]) -> tuple[Node, ...]:
        with self.builder.region() as body:
            for node in nodes:
                with self.builder.at(node.loc):
                    self._copy(node, env)
        return tuple(body)

    def _copy(self, node: Node, env: dict[Value, Value]) -> None:
        args, access = [env.get(v, v) for v in node.args], node.op in ACCESSES and _count_block(node) > 1
        if self.shift is None and (access or node.op is control_flow.for_):
            self.shift = self._count_before([env.get(v, v) for v in self.row])
        if access:
            made = self._access(node, args)
        else:
            regions = tuple(Block(r.params, self._copy_block(r.nodes, env), r.results) for r in node.regions)
            regions = tuple(replace(r, results=tuple(env.get(v, v) for v in r.results)) for r in regions)
            types = tuple(v.type for v in node.results)
            made = self.builder.add(node.op, args, node.attrs, types=types, regions=regions)
        env.update(zip(node.results, made.results, strict=True))

    def _count_before(self, row: Sequence[Value]) -> Value:
        """The elements of the row that lie before its first vector."""
        number = index_constant(self.builder, 0)
        for index, count in zip(row, self.lead, strict=True):
            scaled = self.builder.add(elementwise.mul, [number, index_constant(self.builder, count)]).out
            number = self.builder.add(elementwise.add, [scaled, index]).out
        before = self.builder.add(elementwise.mul, [number, index_constant(self.builder, -self.size)]).out
        return self.builder.add(elementwise.bitwise_and, [before, index_constant(self.builder, self.unit - 1)]).out

    def _access(self, node: Node, args: list[Value]) -> Node:
        """A load or store of a block of a loop, which begins at a vector, or of what is left."""
        column = (1 if node.op is tile.load else 2) + len(self.row)
        start = self.builder.add(elementwise.add, [args[column], self.shift]).out  # type: ignore[list-item]
        sizes = _get_block(node)
        if sizes[-1] == self.block:
            args[column] = start
            return self.builder.add(node.op, args, Attrs({**node.attrs, "vector": self.unit}))
        args[column] = self._list_columns(start, sizes)
        return self.builder.add(tile.gather if node.op is tile.load else tile.scatter, args)

    def _list_columns(self, start: Value, sizes: Sequence[int]) -> Value:
        """The columns from `start` on, modulo the size of the row: 32-bit numbers, which threads keep between walks."""
        add = self.builder.add
        places = add(shape.iota, [], {"shape": sizes, "axis": len(sizes) - 1, "dtype": int32}).out
        first = add(basic.cast, [start], {"dtype": int32}).out
        column = add(elementwise.add, [places, self._spread(first, sizes)]).out
        size = add(basic.full, [], {"shape": sizes, "value": self.size, "dtype": int32}).out
        inside = add(elementwise.less, [column, size]).out
        column = add(elementwise.where, [inside, column, add(elementwise.sub, [column, size]).out]).out
        return add(basic.cast, [column], {"dtype": int64}).out

    def _spread(self, value: Value, sizes: Sequence[int]) -> Value:
        one = self.builder.add(shape.reshape, [value], {"shape": (1,) * len(sizes)}).out
        return self.builder.add(basic.broadcast_to, [one], {"shape": sizes}).out

    def _is_wide(self, value: Value) -> bool:
        sizes = get_shape(value) if isinstance(value.type, TensorType) else ()
        return bool(sizes) and sizes[-1] in (self.block, self.rest)


def _get_starts(node: Node) -> tuple[Value, ...]:
    first = 1 if node.op is tile.load else 2
    return node.args[first : first + len(_get_ref(node.args[0]).shape)]


def _has_mask(node: Node) -> bool:
    return len(node.args) > (1 if node.op is tile.load else 2) + len(_get_ref(node.args[0]).shape)


def _get_block(node: Node) -> tuple[int, ...]:
    """The sizes of the block of an access."""
    return tuple(node.attrs["shape"] if node.op is tile.load else get_shape(node.args[1]))  # type: ignore[arg-type]


def _count_block(node: Node) -> int:
    return math.prod(_get_block(node))


def _get_ref(ref: Value) -> RefType:
    assert isinstance(ref.type, RefType)
    return ref.type


def _is_plain(ref: Value) -> bool:
    """Whether a parameter is memory of known sizes, of numbers of whole bytes without a policy."""
    kind = _get_ref(ref)
    return all(isinstance(n, int) for n in kind.shape) and kind.policy is None and kind.dtype.bits >= 8


def _find_constant(uses: UseDef, value: Value) -> int | None:
    node = uses.find(value, basic.full)
    return int(node.attrs["value"]) if node is not None else None
