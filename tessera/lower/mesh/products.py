"""Products of matrices in pieces: in place and then summed, panel by panel as SUMMA has it, or in rings as Cannon.

van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.ir.core import Value
from tessera.lower.mesh.costs import told, ways
from tessera.lower.mesh.loops import loop
from tessera.lower.mesh.lowering import Lowering, count
from tessera.lower.mesh.memory import taken
from tessera.lower.mesh.pieces import CANNON, CONSTANT, OPEN, Held, Split, tensor
from tessera.lower.mesh.rules import joined, rules
from tessera.op import Op
from tessera.ops import basic, linalg, mesh, shape
from tessera.ops import elementwise as e
from tessera.ops.mesh import WHOLE
from tessera.types import DType


@dataclass(frozen=True)
class Cuts:
    """How the rows, what is summed (on the left, on the right) and the columns of a product are cut."""

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


@rules(linalg.dot)
def _(lowering, node, a, b):
    batch = _batch(lowering, a, b)
    cuts = _cuts(lowering, a, b, {s for s in batch if s >= 0})
    splits = (*batch, cuts.m, cuts.left), (*batch, cuts.right, cuts.n)
    wide = node.args[0].type.accumulate
    left = lowering.filled(a, splits[0], a.type.rank - 1, 0)
    right = lowering.filled(b, splits[1], b.type.rank - 2, 0)
    if cuts.left == cuts.right:
        value = joined(lowering, product(lowering, left, right, wide), [cuts.left], "sum")
    else:
        cannon = lowering.mesh.product == CANNON and lowering.mesh.rows == lowering.mesh.columns and not batch
        value = (_cannon if cannon else _panels)(lowering, left, right, cuts, wide)
    if value.type.dtype != node.attrs["dtype"]:
        value = lowering.add(basic.cast, value, dtype=node.attrs["dtype"])
    return lowering.hold(node, (*batch, cuts.m, cuts.n), value)


def _batch(lowering: Lowering, a: Held, b: Held) -> Split:
    """How products of many are cut: as the operands are, where no two axes then ask for one mesh axis."""
    found: list[int] = []
    for size, pair in zip(a.type.shape[:-2], zip(a.split[:-2], b.split[:-2], strict=True), strict=True):
        cut = next((s for s in pair if s >= 0 and s not in found), WHOLE)
        found.append(cut if int(size) > 1 else CONSTANT)
    return lowering.mesh.plain(tuple(found))


def _cuts(lowering: Lowering, a: Held, b: Held, used: set[int]) -> Cuts:
    """The cuts of the operands, what they leave open chosen so that they meet; mesh axes in `used` are not free."""
    (m, left), (right, n) = (tuple(WHOLE if s in used else s for s in x.split[-2:]) for x in (a, b))
    summed = WHOLE if int(a.type.shape[-1]) > 1 else CONSTANT
    if left >= 0 > right:
        right = left
    elif right >= 0 > left:
        left = right
    elif left < 0:
        left = right = summed
    across = left != right
    m = _opened(a, -2, m, right if across else 0, {left, n, *used})
    n = _opened(b, -1, n, left if across else 1, {right, m, *used})
    cuts = Cuts(*lowering.mesh.plain((m, left, right, n)))
    if cuts.legal:
        return cuts
    # They do not meet: what is summed is put together, and where both results' axes are cut alike one of them too.
    return replace(cuts, left=summed, right=summed, n=WHOLE if cuts.m == cuts.n >= 0 else cuts.n)


def _opened(x: Held, axis: int, cut: int, wanted: int, taken: set[int]) -> int:
    if int(x.type.shape[axis]) == 1:
        return CONSTANT
    if cut in (OPEN, CONSTANT):
        return WHOLE if wanted in taken else wanted
    return cut


def product(lowering: Lowering, left: Value, right: Value, dtype: DType) -> Value:
    """The product of two pieces."""
    return _counted(lowering, left, right, lowering.add(linalg.dot, left, right, dtype=dtype))


def _added(lowering: Lowering, total: Value, left: Value, right: Value) -> Value:
    """A sum with the product of two pieces."""
    return _counted(lowering, left, right, lowering.add(mesh.multiply_add, total, left, right))


def _counted(lowering: Lowering, left: Value, right: Value, found: Value) -> Value:
    rows, summed, columns = (int(n) for n in (*left.type.shape[-2:], right.type.shape[-1]))
    times = count(found) / (rows * columns) if rows * columns else 0
    lowering.cycles += times * min(ways(rows, columns, summed).values())
    return found


def _panels(lowering: Lowering, left: Value, right: Value, cuts: Cuts, dtype: DType) -> Value:
    """The sum over panels of what is summed, each told by who holds it to those who need it.

    Where there is room for two panels of each factor, the next ones come while the product of the present ones is made.
    """
    panels, grid = lowering.mesh.panels, lowering.mesh.grid
    factors = (
        Turns(left, cuts.left, -1, panels // grid[cuts.left]),
        Turns(right, cuts.right, -2, panels // grid[cuts.right]),
    )
    start = lowering.full(tensor(left).with_shape((*left.type.shape[:-1], right.type.shape[-1])).with_dtype(dtype), 0)
    if lowering.roomy(sum(f.bytes for f in factors)):
        return _ahead(lowering, factors, start, panels)

    def step(number: Value, total: Value) -> list[Value]:
        return [_added(lowering, total, *(f.told(lowering, mesh.broadcast, number) for f in factors))]

    return loop(lowering, panels, [start], step)[0]


def _ahead(lowering: Lowering, factors: tuple[Turns, Turns], start: Value, panels: int) -> Value:
    """A pass takes the panels that have come, and begins to receive the next ones before it multiplies."""

    def begun(number: Value) -> list[Value]:
        return [f.told(lowering, mesh.begin_broadcast, number) for f in factors]

    def arrived(coming: Sequence[Value]) -> list[Value]:
        return [lowering.add(mesh.arrived, v) for v in coming]

    def step(number: Value, one: Value, other: Value, total: Value) -> list[Value]:
        here = arrived([one, other])
        following = begun(lowering.add(e.add, number, lowering.index(1)))
        return [*following, _added(lowering, total, *here)]

    *coming, total = loop(lowering, panels - 1, [*begun(lowering.index(0)), start], step)
    return _added(lowering, total, *arrived(coming))


def _cannon(lowering: Lowering, left: Value, right: Value, cuts: Cuts, dtype: DType) -> Value:
    """The sum over steps of pieces that go round in rings, those of the left along one axis, those of the right along
    the other; before, each is turned by as many places as its other place says, so that the right ones meet.

    Cannon, "A cellular computer to implement the Kalman filter algorithm" (1969).
    """
    side = lowering.mesh.rows
    start = lowering.full(tensor(left).with_shape((*left.type.shape[:-1], right.type.shape[-1])).with_dtype(dtype), 0)
    left, right = _skewed(lowering, left, cuts.left, side), _skewed(lowering, right, cuts.right, side)
    if lowering.roomy(sum(map(taken, (left, right)))):
        return _turning(lowering, (left, right), cuts, start, side)

    def step(number: Value, one: Value, other: Value, total: Value) -> list[Value]:
        added = _added(lowering, total, one, other)
        return [_turned(lowering, one, cuts.left), _turned(lowering, other, cuts.right), added]

    return loop(lowering, side, [left, right, start], step)[-1]


def _turning(lowering: Lowering, factors: tuple[Value, Value], cuts: Cuts, start: Value, side: int) -> Value:
    """A pass takes the pieces that have come, and begins to turn them on before it multiplies."""

    def begun(pieces: Sequence[Value]) -> list[Value]:
        pairs = zip(pieces, (cuts.left, cuts.right), strict=True)
        return [lowering.add(mesh.begin_rotate, x, axis=cut, offset=-1) for x, cut in pairs]

    def arrived(coming: Sequence[Value]) -> list[Value]:
        return [lowering.add(mesh.arrived, v) for v in coming]

    def step(number: Value, one: Value, other: Value, total: Value) -> list[Value]:
        here = arrived([one, other])
        return [*begun(here), _added(lowering, total, *here)]

    coming = begun(factors)
    *coming, total = loop(lowering, side - 2, [*coming, _added(lowering, start, *factors)], step)
    return _added(lowering, total, *arrived(coming))


def _skewed(lowering: Lowering, x: Value, cut: int, side: int) -> Value:
    """A piece turned along a mesh axis by as many places as this element has along the other."""
    other = lowering.place(1 - cut)

    def step(number: Value, held: Value) -> list[Value]:
        flag = lowering.add(e.greater, other, number)
        one = lowering.add(shape.reshape, flag, shape=(1,) * held.type.rank)
        chosen = lowering.repeated(one, tensor(one).with_shape(held.type.shape))
        return [lowering.add(e.where, chosen, _turned(lowering, held, cut), held)]

    return loop(lowering, side - 1, [x], step)[0]


def _turned(lowering: Lowering, x: Value, cut: int) -> Value:
    lowering.cycles += 2 * count(x) + 2 * lowering.mesh.grid[cut]
    return lowering.add(mesh.rotate, x, axis=cut, offset=-1)


@dataclass(frozen=True)
class Turns:
    """A factor whose panels along an axis are told along a mesh axis: each element there holds `each` of them."""

    piece: Value
    cut: int
    axis: int
    each: int

    @property
    def bytes(self) -> int:
        """What a panel takes."""
        return count(self.piece) // self.each * self.piece.type.dtype.numpy.itemsize

    def told(self, lowering: Lowering, op: Op, number: Value) -> Value:
        """A panel, for those who need it; `op` says whether it is waited for."""
        x = self.piece
        if self.each > 1:
            place = lowering.add(e.remainder, number, lowering.index(self.each))
            x = lowering.add(mesh.panel, x, place, axis=self.axis, count=self.each)
        words = count(x) if op is mesh.broadcast else 0  # what comes beside a product takes no time of its own
        lowering.cycles += told(words, lowering.mesh.grid[self.cut])
        return lowering.add(op, x, number, axis=self.cut, each=self.each)
