"""Products of matrices in pieces: in place and then summed, panel by panel as SUMMA has it, or in rings as Cannon.

van de Geijn and Watts, "SUMMA: scalable universal matrix multiplication algorithm" (1997).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.ir.core import Block, Value
from tessera.lower.mesh.lowering import Lowering, count
from tessera.lower.mesh.pieces import CANNON, CONSTANT, OPEN, Held, tensor
from tessera.lower.mesh.rules import joined, rules
from tessera.ops import basic, control, linalg, mesh, shape
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
    batch = tuple(WHOLE if int(n) > 1 else CONSTANT for n in a.type.shape[:-2])
    if any(s >= 0 for x in (a, b) for s in x.split[:-2]):
        raise lowering.refusal("a batch of products is cut over the mesh")
    cuts = _cuts(lowering, a, b)
    if not cuts.legal:
        raise lowering.refusal(f"a product of matrices cut as {a.split} and {b.split}")
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


def _cuts(lowering: Lowering, a: Held, b: Held) -> Cuts:
    """The cuts of the operands, what they leave open chosen so that they meet."""
    (m, left), (right, n) = a.split[-2:], b.split[-2:]
    if left >= 0 > right:
        right = left
    elif right >= 0 > left:
        left = right
    elif left < 0:
        left = right = WHOLE if int(a.type.shape[-1]) > 1 else CONSTANT
    across = left != right
    m = _opened(a, -2, m, right if across else 0, {left, n})
    n = _opened(b, -1, n, left if across else 1, {right, m})
    return Cuts(*lowering.mesh.plain((m, left, right, n)))


def _opened(x: Held, axis: int, cut: int, wanted: int, taken: set[int]) -> int:
    if int(x.type.shape[axis]) == 1:
        return CONSTANT
    if cut in (OPEN, CONSTANT):
        return WHOLE if wanted in taken else wanted
    return cut


def product(lowering: Lowering, left: Value, right: Value, dtype: DType) -> Value:
    """The product of two pieces."""
    found = lowering.add(linalg.dot, left, right, dtype=dtype)
    rows, columns = int(left.type.shape[-2]), int(right.type.shape[-1])
    # One operation on a row, or on a column where that is longer, for each of the others and of what is summed.
    lowering.cycles += count(left) / rows * min(rows, columns) * (24 + max(rows, columns) / 2)
    return found


def _panels(lowering: Lowering, left: Value, right: Value, cuts: Cuts, dtype: DType) -> Value:
    """The sum over panels of what is summed, each told by who holds it to those who need it."""
    panels, grid = lowering.mesh.panels, lowering.mesh.grid
    start = lowering.full(tensor(left).with_shape((*left.type.shape[:-1], right.type.shape[-1])).with_dtype(dtype), 0)

    def step(number: Value, total: Value) -> list[Value]:
        one = _told(lowering, left, number, cuts.left, -1, panels // grid[cuts.left])
        other = _told(lowering, right, number, cuts.right, -2, panels // grid[cuts.right])
        return [lowering.add(e.add, total, product(lowering, one, other, dtype))]

    return _loop(lowering, panels, [start], step)[0]


def _cannon(lowering: Lowering, left: Value, right: Value, cuts: Cuts, dtype: DType) -> Value:
    """The sum over steps of pieces that go round in rings, those of the left along one axis, those of the right along
    the other; before, each is turned by as many places as its other place says, so that the right ones meet.

    Cannon, "A cellular computer to implement the Kalman filter algorithm" (1969).
    """
    side = lowering.mesh.rows
    start = lowering.full(tensor(left).with_shape((*left.type.shape[:-1], right.type.shape[-1])).with_dtype(dtype), 0)
    left, right = _skewed(lowering, left, cuts.left, side), _skewed(lowering, right, cuts.right, side)

    def step(number: Value, one: Value, other: Value, total: Value) -> list[Value]:
        sum_ = lowering.add(e.add, total, product(lowering, one, other, dtype))
        return [_turned(lowering, one, cuts.left), _turned(lowering, other, cuts.right), sum_]

    return _loop(lowering, side, [left, right, start], step)[-1]


def _skewed(lowering: Lowering, x: Value, cut: int, side: int) -> Value:
    """A piece turned along a mesh axis by as many places as this element has along the other."""
    other = lowering.place(1 - cut)

    def step(number: Value, held: Value) -> list[Value]:
        flag = lowering.add(e.greater, other, number)
        one = lowering.add(shape.reshape, flag, shape=(1,) * held.type.rank)
        chosen = lowering.repeated(one, tensor(one).with_shape(held.type.shape))
        return [lowering.add(e.where, chosen, _turned(lowering, held, cut), held)]

    return _loop(lowering, side - 1, [x], step)[0]


def _turned(lowering: Lowering, x: Value, cut: int) -> Value:
    lowering.cycles += 2 * count(x) + 2 * lowering.mesh.grid[cut]
    return lowering.add(mesh.rotate, x, axis=cut, offset=-1)


def _loop(
    lowering: Lowering, passes: int, carried: Sequence[Value], step: Callable[..., list[Value]]
) -> tuple[Value, ...]:
    """`step(number, *carried)` again and again."""
    params = tuple(Value(v.type) for v in (lowering.index(0), *carried))
    before = lowering.cycles
    with lowering.builder.region() as nodes:
        after = step(*params)
    lowering.cycles += (passes - 1) * (lowering.cycles - before)
    bounds = [lowering.index(n) for n in (0, passes, 1)]
    region = Block(params, tuple(nodes), tuple(after))
    types = tuple(v.type for v in carried)
    return lowering.builder.add(control.for_, [*bounds, *carried], types=types, regions=(region,)).results


def _told(lowering: Lowering, x: Value, number: Value, cut: int, axis: int, each: int) -> Value:
    """A panel, told along the mesh axis over which what is summed is cut; each element there holds `each` panels."""
    root = number
    if each > 1:
        x = lowering.add(mesh.panel, x, lowering.add(e.remainder, number, lowering.index(each)), axis=axis, count=each)
        root = lowering.add(e.floor_divide, number, lowering.index(each))
    lowering.cycles += 3 * count(x) + 4 * lowering.mesh.grid[cut]
    return lowering.add(mesh.broadcast, x, root, axis=cut)
