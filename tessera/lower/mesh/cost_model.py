"""Cost model: the cycles of products and collectives on a processing element, and the peak memory of its values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tessera.core.types import REGISTER, RefType, TensorType
from tessera.ir.core import Block, Node, Value
from tessera.ops.dialects import control_flow, mesh
from tessera.ops.tensor import basic, shape

# Cycles of a product on one element; emission and layout search choose by them.


# Fitted to products of 7 shapes on both machines in the CSL simulator, by each algorithm, within 27%.
# A row of the result, and a multiply-add on it from registers, with the loop around it; the same of a column.
ROW_SETUP, ROW_OVERHEAD = 36, 15
COLUMN_SETUP, COLUMN_OVERHEAD = 22, 31
# A product and a sum of vectors with the loop around them: of a whole matrix (its setup on WSE-2 and on WSE-3), and of
# one element.
OUTER_SETUP, OUTER_OVERHEAD, INNER_OVERHEAD = (120, 150), 39, 57
# A transfer along an axis, before its first word.
TRANSFER_OVERHEAD = 78
# Elements a cycle, of a WSE-2 and of a WSE-3: a product, a sum.
MULTIPLY_RATE, ADD_RATE = (1, 4), (2, 4)
# Cycles of an element of a multiply-add with a scalar, by the length of the vector modulo 4: the banks of a row and of
# another row conflict if their distance is a multiple of 4 elements.
MULTIPLY_ADD_CYCLES = (2, 1.25, 1.5, 1.25)
# "lines": a multiply-add on a row or column of the result for each element of the other operand. "outer": for each
# summed index, the outer product of a column and a row, then a sum. "inner": for each element of the result, the
# products of a row and a column, then their sum.
ROW_PRODUCTS, OUTER_PRODUCTS, INNER_PRODUCTS = "lines", "outer", "inner"


def estimate_matmul_cycles(rows: int, columns: int, summed: int, wide: bool = False) -> dict[str, float]:
    """The cycles of a product (rows x depth) · (depth x columns) by each algorithm; `wide` on a WSE-3."""
    rate = 1 / MULTIPLY_RATE[wide] + 1 / ADD_RATE[wide]
    # A product of a column and a row is a tensor: on WSE-3 four elements of one operand a cycle, and one for each row.
    product = rows * (-(-3 * columns // 4) + 1 if wide else columns)
    return {
        ROW_PRODUCTS: min(estimate_row_cycles(rows, columns, summed)),
        OUTER_PRODUCTS: OUTER_SETUP[wide] + summed * (OUTER_OVERHEAD + product + rows * columns / ADD_RATE[wide]),
        INNER_PRODUCTS: rows * columns * (INNER_OVERHEAD + summed * rate),
    }


def estimate_row_cycles(rows: int, columns: int, summed: int) -> tuple[float, float]:
    """The cycles of a product by rows, and by columns."""
    row, column = (length * MULTIPLY_ADD_CYCLES[length % 4] for length in (columns, rows))
    return (
        rows * (ROW_SETUP + summed * (ROW_OVERHEAD + row)),
        columns * (COLUMN_SETUP + summed * (COLUMN_OVERHEAD + column)),
    )


def choose_cheapest(found: dict[str, float]) -> str:
    """The algorithm with the fewest cycles."""
    return min(found, key=lambda way: found[way])


def estimate_broadcast_cycles(words: int, places: int) -> float:
    """The cycles of a broadcast along an axis: to the last element, and back."""
    return words + 2 * places + TRANSFER_OVERHEAD


def estimate_all_gather_cycles(words: int, places: int) -> float:
    """The cycles of an all-gather of `words` from each element, with a few cycles of overhead for each."""
    return words + 6 * places + TRANSFER_OVERHEAD


# Ops whose result aliases the first operand: a view of it, or its buffer where it is dead afterwards.
VIEW_OPS = (
    shape.permute,
    shape.reshape,
    basic.broadcast_to,
    mesh.section,
    mesh.arrived,
    basic.recompute,
    basic.fusion_barrier,
)
IN_PLACE_OPS = (mesh.all_reduce, mesh.multiply_add, mesh.put)
FREE_OPS = (basic.full,)
# A received piece has a second buffer for the next one, which suffices for a loop that forwards while it receives.
ASYNC_OPS = (mesh.begin_broadcast, mesh.begin_rotate)
WHOLE_PROGRAM = math.inf


def count_value_bytes(value: Value) -> int:
    """The bytes of a value, or of an element's own memory."""
    type = value.type
    holds = isinstance(type, TensorType) or (isinstance(type, RefType) and type.space == REGISTER)
    return math.prod(map(int, type.shape)) * type.dtype.numpy.itemsize if holds else 0


def bound_peak_memory(block: Block) -> int:
    """At least what `estimate_peak_memory` gives, in less time: as if no buffer was used again."""
    values = [v for node in block.walk() for v in (node.args[1:2] if node.op is mesh.write else node.results)]
    return 2 * sum(map(count_value_bytes, values))  # of asynchronous ops two buffers


def estimate_peak_memory(block: Block) -> int:
    """The peak memory of the values of a block, in bytes, without its parameters and values from outside.

    What the host copies in stays, and what it copies out lies apart from that.
    """
    places = _BufferLiveness(block)
    live = most = 0
    for number, node in enumerate(block.nodes):
        live += places.count_new_bytes(number, node)
        most = max(most, live + max(map(estimate_peak_memory, node.regions), default=0))
        live -= places.count_dead_bytes(number, node)
    return most


class _BufferLiveness:
    """Buffers of values: for each value a representative of its buffer; for that the last use and the bytes."""

    def __init__(self, block: Block) -> None:
        self.place: dict[Value, Value] = {}
        self.last: dict[Value, float] = {}
        self.bytes: dict[Value, int] = dict.fromkeys(block.params, 0)
        self.kept: set[Value] = set()  # what the host copies
        self.handed_on = set(block.results)
        for number, node in enumerate(block.nodes):
            for value in node.results:
                first = node.args[0] if node.op in VIEW_OPS and node.args else value
                self.place[value] = self.place.get(first, first)
            for value in (*node.args, *node.results, *(v for r in node.regions for v in r.free)):
                self._needs(value, WHOLE_PROGRAM if node.op in (mesh.read, mesh.write) else number)
        for value in block.results:
            self._needs(value, WHOLE_PROGRAM)

    def _needs(self, value: Value, number: float) -> None:
        at = self.place.get(value, value)
        self.last[at] = max(self.last.get(at, 0), number)

    def count_new_bytes(self, number: int, node: Node) -> int:
        """The bytes of new buffers for a node's results."""
        if (
            node.op is mesh.write
        ):  # a value that was read, or written before, is copied; else it is passed without a copy
            at = self.place.get(node.args[1], node.args[1])
            copied = at in self.kept or not self.bytes.get(at)
            self.kept.add(at)
            return count_value_bytes(node.args[1]) if copied else 0
        self.kept |= set(node.results) if node.op is mesh.read else set()
        pairs = zip(node.results, _find_in_place_operands(node), strict=False)
        return sum(self._result(number, node, value, old) for value, old in pairs)

    def _result(self, number: int, node: Node, value: Value, old: Value | None) -> int:
        if self.place[value] is not value or node.op in FREE_OPS or (node.op in ASYNC_OPS and value in self.handed_on):
            return 0
        at = None if old is None else self.place.get(old, old)
        if at is not None and self.last.get(at) == number and at in self.bytes:
            self.last[at] = self.last[value]
            self._merge(value, at)
            return 0
        self.bytes[value] = count_value_bytes(value) * (2 if node.op in ASYNC_OPS else 1)
        return self.bytes[value]

    def _merge(self, value: Value, at: Value) -> None:
        for each, place in self.place.items():
            if place is value:
                self.place[each] = at

    def count_dead_bytes(self, number: int, node: Node) -> int:
        """The bytes of buffers that are dead after a node."""
        used = {*node.args, *node.results, *(v for r in node.regions for v in r.free)}
        gone = {at for v in used if self.last.get(at := self.place.get(v, v)) == number}
        return sum(self.bytes.pop(at, 0) for at in gone)


def _find_in_place_operands(node: Node) -> Sequence[Value | None]:
    """For each result the operand whose buffer it may reuse."""
    if node.op in (control_flow.for_, control_flow.while_):
        return node.args[len(node.args) - len(node.results) :]
    return [node.args[0] if node.op in IN_PLACE_OPS else None] * len(node.results)
