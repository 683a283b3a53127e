"""Row alignment: long rows of 16-bit elements that begin anywhere in lines of memory are accessed in whole vectors
(peeling for alignment, as compilers of vector code do).

A row of 50,257 elements begins at an odd address in every second program, so that no vector of its elements can be
loaded. Here a program begins at the last vector before its row instead. Its first and its last block have a few
elements of other rows: they are neither stored nor part of a reduction. All blocks between are whole.

The blocks have other elements than before. That is right for loops that the lowering made: a kernel of the user may
compute something of each block, as of one that scales blocks by their maxima, and something else of what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tessera.codegen.ptx.context import VECTOR_BYTES
from tessera.codegen.ptx.ops import index_constant
from tessera.core.symbolic_dim import round_up
from tessera.core.types import RefType, TensorType, int64
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, elementwise, reduce, shape
from tessera.ops.tensor.reduce import find_neutral_element

ACCESSES = (tile.load, tile.store)
LEAST_UNIT = 4  # elements of a vector, so few of which are loaded as fast one by one
NEUTRAL = {reduce.sum: "sum", reduce.max: "max", reduce.min: "min"}
SHAPED = (tile.load, basic.full, basic.broadcast_to, shape.reshape)  # ops whose attributes have the result's shape


def align_rows(function: Function) -> Function:
    """The function with whole vectors of its rows, where it walks misaligned ones in blocks."""
    rows = MisalignedRows.find(function)
    return function if rows is None else rows.rewrite()


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
    shift: Value | None = None  # the elements between the beginning of the first vector and that of the row

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
        if len(sizes) > 1 or unit <= LEAST_UNIT or size % unit == 0 or not lead or len(blocks) != 2:
            return None
        rest, block = blocks
        found = MisalignedRows(function, size, block, rest, _get_starts(accesses[0])[:-1], tuple(lead), unit)
        return found if found._walks_rows(accesses) and found._is_elementwise() else None

    def _walks_rows(self, accesses: Sequence[Node]) -> bool:
        """Whether loops at the top walk all whole blocks of the row, and what is left comes after them."""
        uses, outer = UseDef(self.function), set(self.function.body.nodes)
        whole = self.size // self.block * self.block
        if self.rest != self.size - whole or self.block % self.unit:
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
            reduces = node.op in NEUTRAL and node.attrs["axis"] == (-1,)
            if not (node.op.pointwise or node.op in (*ACCESSES, *SHAPED) or reduces) or node.regions:
                return False
        return True

    def rewrite(self) -> Function:
        """The function with aligned blocks."""
        env: dict[Value, Value] = {}
        for node in self.function.body.nodes:
            with self.builder.at(node.loc):
                self._copy_at_top(node, env)
        body = Block(self.function.body.params, self.builder.block((), ()).nodes, ())
        return Function(self.function.name, body, self.function.attrs, self.function.loc)

    def _copy_at_top(self, node: Node, env: dict[Value, Value]) -> None:
        wide = node.op is control_flow.for_ or (node.op in ACCESSES and _count_block(node) > 1)
        if wide and self.shift is None:
            self.shift = self._compute_shift([env.get(v, v) for v in self.row])
        if node.op is not control_flow.for_:
            self._copy(node, env, self.size // self.block * self.block)
            return
        (region,), carried = node.regions, [env.get(v, v) for v in node.args[3:]]
        inner = {**env, **dict(zip(region.params, (index_constant(self.builder, 0), *carried), strict=True))}
        for each in region.nodes:
            self._copy(each, inner, 0)
        found = [inner.get(v, v) for v in region.results]
        if self.size >= 2 * self.block:
            found = self._copy_loop(node, env, found)
        env.update(zip(node.results, found, strict=True))

    def _copy_loop(self, node: Node, env: Mapping[Value, Value], carried: list[Value]) -> list[Value]:
        """The rounds of a loop after the first one, whose blocks are within the row."""
        (region,) = node.regions
        bounds = [
            index_constant(self.builder, n) for n in (self.block, self.size // self.block * self.block, self.block)
        ]
        params = tuple(Value(v.type, v.hint) for v in region.params)
        with self.builder.region() as body:
            inner = {**env, **dict(zip(region.params, params, strict=True))}
            for each in region.nodes:
                self._copy(each, inner, None)
        made = Block(params, tuple(body), tuple(inner.get(v, v) for v in region.results))
        types = tuple(v.type for v in node.results)
        return list(self.builder.add(node.op, [*bounds, *carried], node.attrs, types=types, regions=(made,)).results)

    def _compute_shift(self, row: Sequence[Value]) -> Value:
        number = index_constant(self.builder, 0)
        for index, count in zip(row, self.lead, strict=True):
            scaled = self.builder.add(elementwise.mul, [number, index_constant(self.builder, count)]).out
            number = self.builder.add(elementwise.add, [scaled, index]).out
        first = self.builder.add(elementwise.mul, [number, index_constant(self.builder, self.size)]).out
        return self.builder.add(elementwise.bitwise_and, [first, index_constant(self.builder, self.unit - 1)]).out

    def _copy(self, node: Node, env: dict[Value, Value], edge: int | None) -> None:
        """A node on blocks that begin at the vector: `edge` is the column of the first or last block of a row."""
        args, attrs = [env.get(v, v) for v in node.args], dict(node.attrs)
        if node.op in SHAPED:
            attrs["shape"] = self._widen(attrs["shape"])
        if node.op in ACCESSES and _count_block(node) > 1:
            column = (1 if node.op is tile.load else 2) + len(self.row)
            args[column] = self.builder.add(elementwise.sub, [args[column], self.shift]).out  # type: ignore[list-item]
            attrs |= {"vector": self.unit, "edge": "error" if edge is None else "clip"}
        if node.op in NEUTRAL and edge is not None and self._is_wide(node.args[0]):
            neutral = find_neutral_element(NEUTRAL[node.op], get_tensor_type(args[0]).dtype)
            args[0] = self._mask(args[0], neutral, edge)
        made = self.builder.add(node.op, args, Attrs(attrs), loc=node.loc)
        env.update(zip(node.results, made.results, strict=True))

    def _widen(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of a block: the last one of a row is longer by what comes before the row, in whole vectors."""
        if not sizes or sizes[-1] != self.rest:
            return tuple(sizes)
        return (*sizes[:-1], round_up(self.rest + self.unit - 1, self.unit))

    def _is_wide(self, value: Value) -> bool:
        sizes = get_shape(value) if isinstance(value.type, TensorType) else ()
        return bool(sizes) and sizes[-1] in (self.block, self.rest)

    def _mask(self, value: Value, number: float, edge: int) -> Value:
        """A block with a number in place of the elements of other rows."""
        add, sizes, dtype = self.builder.add, get_shape(value), get_tensor_type(value).dtype
        offset = add(elementwise.sub, [index_constant(self.builder, edge), self.shift]).out  # type: ignore[list-item]
        places = add(shape.iota, [], {"shape": sizes, "axis": len(sizes) - 1, "dtype": int64}).out
        spread = add(
            basic.broadcast_to, [add(shape.reshape, [offset], {"shape": (1,) * len(sizes)}).out], {"shape": sizes}
        ).out
        places = add(elementwise.add, [places, spread]).out
        limit = add(basic.full, [], {"shape": sizes, "value": 0 if edge == 0 else self.size, "dtype": int64}).out
        inside = add(elementwise.greater_equal if edge == 0 else elementwise.less, [places, limit]).out
        kind = {"shape": sizes, "value": number, "dtype": dtype}
        return add(elementwise.where, [inside, value, add(basic.full, [], kind).out]).out


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
