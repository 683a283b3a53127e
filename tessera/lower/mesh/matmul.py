"""Distributed matrix products: local products with an all-reduce, SUMMA panels, or Cannon's algorithm.

van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.core.types import DType
from tessera.ir.core import Value
from tessera.ir.rules import Op
from tessera.lower.mesh.control_flow import emit_counted_loop
from tessera.lower.mesh.cost_model import count_value_bytes, estimate_broadcast_cycles, estimate_matmul_cycles
from tessera.lower.mesh.mesh_lowering import (
    CANNON,
    CONSTANT,
    OPEN,
    MeshLowering,
    ShardedTensor,
    Sharding,
    count_piece_elements,
    tensor_type_of,
)
from tessera.lower.mesh.op_rules import emit_all_reduce, mesh_op_rules
from tessera.ops.dialects import mesh
from tessera.ops.dialects.mesh import UNSPLIT
from tessera.ops.tensor import basic, contractions, shape
from tessera.ops.tensor import elementwise as e


@dataclass(frozen=True)
class MatmulSharding:
    """The sharding of the rows, the summed axis (on the left, on the right) and the columns of a product."""

    m: int
    left: int
    right: int
    n: int

    @property
    def legal(self) -> bool:
        """Whether each element can compute its piece of the result."""
        fixed = [c for c in (self.m, self.n) if c >= 0]
        summed = {self.left} if self.left == self.right else {}
        return len(set(fixed)) == len(fixed) and not any(c in summed for c in fixed)


@mesh_op_rules(contractions.dot)
def _(lowering, node, a, b):
    batch = _shard_batch(lowering, a, b)
    cuts = _shard_operands(lowering, a, b, {s for s in batch if s >= 0})
    splits = (*batch, cuts.m, cuts.left), (*batch, cuts.right, cuts.n)
    wide = node.args[0].type.accumulate
    left = lowering.fill_padding(a, splits[0], a.type.rank - 1, 0)
    right = lowering.fill_padding(b, splits[1], b.type.rank - 2, 0)
    if cuts.left == cuts.right:
        value = emit_all_reduce(lowering, emit_matmul(lowering, left, right, wide), [cuts.left], "sum")
    else:
        cannon = lowering.mesh.product == CANNON and lowering.mesh.rows == lowering.mesh.columns and not batch
        value = (_emit_cannon if cannon else _emit_summa)(lowering, left, right, cuts, wide)
    if value.type.dtype != node.attrs["dtype"]:
        value = lowering.add(basic.cast, value, dtype=node.out.type.policy or node.attrs["dtype"])
    return lowering.hold(node, (*batch, cuts.m, cuts.n), value)


def _shard_batch(lowering: MeshLowering, a: ShardedTensor, b: ShardedTensor) -> Sharding:
    """The sharding of batched products: that of the operands, where no mesh axis is used twice."""
    found: list[int] = []
    for size, pair in zip(a.type.shape[:-2], zip(a.split[:-2], b.split[:-2], strict=True), strict=True):
        cut = next((s for s in pair if s >= 0 and s not in found), UNSPLIT)
        found.append(cut if int(size) > 1 else CONSTANT)
    return lowering.mesh.plain(tuple(found))


def _shard_operands(lowering: MeshLowering, a: ShardedTensor, b: ShardedTensor, used: set[int]) -> MatmulSharding:
    """The sharding of a product; open axes of the operands are chosen to match. Mesh axes in `used` are taken."""
    (m, left), (right, n) = (tuple(UNSPLIT if s in used else s for s in x.split[-2:]) for x in (a, b))
    summed = UNSPLIT if int(a.type.shape[-1]) > 1 else CONSTANT
    if left >= 0 > right:
        right = left
    elif right >= 0 > left:
        left = right
    elif left < 0:
        left = right = summed
    across = left != right
    m = _resolve_open_axis(a, -2, m, right if across else 0, {left, n, *used})
    n = _resolve_open_axis(b, -1, n, left if across else 1, {right, m, *used})
    cuts = MatmulSharding(*lowering.mesh.plain((m, left, right, n)))
    if cuts.legal:
        return cuts
    # The shardings conflict: the summed axis is gathered, and one result axis where both have the same mesh axis.
    return replace(cuts, left=summed, right=summed, n=UNSPLIT if cuts.m == cuts.n >= 0 else cuts.n)


def _resolve_open_axis(x: ShardedTensor, axis: int, cut: int, wanted: int, taken: set[int]) -> int:
    if int(x.type.shape[axis]) == 1:
        return CONSTANT
    if cut in (OPEN, CONSTANT):
        return UNSPLIT if wanted in taken else wanted
    return cut


def emit_matmul(lowering: MeshLowering, left: Value, right: Value, dtype: DType) -> Value:
    """Emit the product of two pieces."""
    return _count_cycles(lowering, left, right, lowering.add(contractions.dot, left, right, dtype=dtype))


def _emit_multiply_add(lowering: MeshLowering, total: Value, left: Value, right: Value) -> Value:
    """Emit a sum with the product of two pieces."""
    return _count_cycles(lowering, left, right, lowering.add(mesh.multiply_add, total, left, right))


def _count_cycles(lowering: MeshLowering, left: Value, right: Value, found: Value) -> Value:
    rows, summed, columns = (int(n) for n in (*left.type.shape[-2:], right.type.shape[-1]))
    times = count_piece_elements(found) / (rows * columns) if rows * columns else 0
    lowering.cycles += times * min(estimate_matmul_cycles(rows, columns, summed).values())
    return found


def _emit_summa(lowering: MeshLowering, left: Value, right: Value, cuts: MatmulSharding, dtype: DType) -> Value:
    """SUMMA: sum over panels of the summed axis, each broadcast by its owner.

    Where there is room for two panels of each factor, the next ones come while the product of the present ones is made.
    """
    panels, grid = lowering.mesh.panels, lowering.mesh.grid
    factors = (
        SummaFactor(left, cuts.left, -1, panels // grid[cuts.left]),
        SummaFactor(right, cuts.right, -2, panels // grid[cuts.right]),
    )
    start = lowering.full(
        tensor_type_of(left).with_shape((*left.type.shape[:-1], right.type.shape[-1])).with_dtype(dtype), 0
    )
    if lowering.has_memory_for(sum(f.bytes for f in factors)):
        return _emit_pipelined_summa(lowering, factors, start, panels)

    def step(number: Value, total: Value) -> list[Value]:
        return [
            _emit_multiply_add(lowering, total, *(f.broadcast_panel(lowering, mesh.broadcast, number) for f in factors))
        ]

    return emit_counted_loop(lowering, panels, [start], step)[0]


def _emit_pipelined_summa(
    lowering: MeshLowering, factors: tuple[SummaFactor, SummaFactor], start: Value, panels: int
) -> Value:
    """An iteration takes the received panels, and starts to receive the next ones before it multiplies."""

    def begun(number: Value) -> list[Value]:
        return [f.broadcast_panel(lowering, mesh.begin_broadcast, number) for f in factors]

    def arrived(coming: Sequence[Value]) -> list[Value]:
        return [lowering.add(mesh.arrived, v) for v in coming]

    def step(number: Value, one: Value, other: Value, total: Value) -> list[Value]:
        here = arrived([one, other])
        following = begun(lowering.add(e.add, number, lowering.index(1)))
        return [*following, _emit_multiply_add(lowering, total, *here)]

    *coming, total = emit_counted_loop(lowering, panels - 1, [*begun(lowering.index(0)), start], step)
    return _emit_multiply_add(lowering, total, *arrived(coming))


def _emit_cannon(lowering: MeshLowering, left: Value, right: Value, cuts: MatmulSharding, dtype: DType) -> Value:
    """The sum over steps of products of pieces that rotate in rings: left pieces along one axis, right pieces along
    the other. An initial skew rotates each piece by its index on the other axis, which aligns the reduction indices.

    Cannon, "A cellular computer to implement the Kalman filter algorithm" (1969).
    """
    side = lowering.mesh.rows
    start = lowering.full(
        tensor_type_of(left).with_shape((*left.type.shape[:-1], right.type.shape[-1])).with_dtype(dtype), 0
    )
    left, right = _skew_piece(lowering, left, cuts.left, side), _skew_piece(lowering, right, cuts.right, side)
    if lowering.has_memory_for(sum(map(count_value_bytes, (left, right)))):
        return _emit_pipelined_cannon(lowering, (left, right), cuts, start, side)

    def step(number: Value, one: Value, other: Value, total: Value) -> list[Value]:
        added = _emit_multiply_add(lowering, total, one, other)
        return [_rotate_piece(lowering, one, cuts.left), _rotate_piece(lowering, other, cuts.right), added]

    return emit_counted_loop(lowering, side, [left, right, start], step)[-1]


def _emit_pipelined_cannon(
    lowering: MeshLowering, factors: tuple[Value, Value], cuts: MatmulSharding, start: Value, side: int
) -> Value:
    """An iteration takes the received pieces, and starts to rotate them before it multiplies."""

    def begun(pieces: Sequence[Value]) -> list[Value]:
        pairs = zip(pieces, (cuts.left, cuts.right), strict=True)
        return [lowering.add(mesh.begin_rotate, x, axis=cut, offset=-1) for x, cut in pairs]

    def arrived(coming: Sequence[Value]) -> list[Value]:
        return [lowering.add(mesh.arrived, v) for v in coming]

    def step(number: Value, one: Value, other: Value, total: Value) -> list[Value]:
        here = arrived([one, other])
        return [*begun(here), _emit_multiply_add(lowering, total, *here)]

    coming = begun(factors)
    *coming, total = emit_counted_loop(
        lowering, side - 2, [*coming, _emit_multiply_add(lowering, start, *factors)], step
    )
    return _emit_multiply_add(lowering, total, *arrived(coming))


def _skew_piece(lowering: MeshLowering, x: Value, cut: int, side: int) -> Value:
    """Skew a piece: rotate it along a mesh axis by this element's coordinate along the other."""
    other = lowering.place(1 - cut)

    def step(number: Value, held: Value) -> list[Value]:
        flag = lowering.add(e.greater, other, number)
        one = lowering.add(shape.reshape, flag, shape=(1,) * held.type.rank)
        chosen = lowering.broadcast_axes(one, tensor_type_of(one).with_shape(held.type.shape))
        return [lowering.add(e.where, chosen, _rotate_piece(lowering, held, cut), held)]

    return emit_counted_loop(lowering, side - 1, [x], step)[0]


def _rotate_piece(lowering: MeshLowering, x: Value, cut: int) -> Value:
    lowering.cycles += 2 * count_piece_elements(x) + 2 * lowering.mesh.grid[cut]
    return lowering.add(mesh.rotate, x, axis=cut, offset=-1)


@dataclass(frozen=True)
class SummaFactor:
    """A factor whose panels along an axis are broadcast along a mesh axis; each element holds `each` of them."""

    piece: Value
    cut: int
    axis: int
    each: int

    @property
    def bytes(self) -> int:
        """The bytes of a panel."""
        return count_piece_elements(self.piece) // self.each * self.piece.type.dtype.numpy.itemsize

    def broadcast_panel(self, lowering: MeshLowering, op: Op, number: Value) -> Value:
        """Broadcast a panel; `op` tells whether the program waits for it."""
        x = self.piece
        if self.each > 1:
            place = lowering.add(e.remainder, number, lowering.index(self.each))
            x = lowering.add(mesh.panel, x, place, axis=self.axis, count=self.each)
        words = (
            count_piece_elements(x) if op is mesh.broadcast else 0
        )  # what comes beside a product takes no time of its own
        lowering.cycles += estimate_broadcast_cycles(words, lowering.mesh.grid[self.cut])
        return lowering.add(op, x, number, axis=self.cut, each=self.each)
