"""The body of a kernel: its root pulled, index by index, through everything that is inlined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.ir.builder import Builder
from tessera.ir.core import Block, Node, Value
from tessera.lower.affine import Digit, Expr, Opaque
from tessera.lower.cluster import Cluster
from tessera.lower.points import Guard, Point, shape_of
from tessera.op import Op, Rules
from tessera.ops import elementwise as e
from tessera.ops import schedule
from tessera.ops.basic import cast as convert
from tessera.ops.basic import full
from tessera.types import DType, RefType, TensorType, int64

# rule(pull, node, point) gives the value of a node at a point.
compute = Rules("body")
Slot = tuple[Value, tuple[int, ...]]


class Pull:
    """A body under construction: the values so far, and one parameter for each memory that is read.

    `order` lists the cluster's dims as the kernel has them. `held` are the values that lie in memory;
    a slot is such a value and the shape it is seen as.
    """

    def __init__(self, cluster: Cluster, order: Sequence[int], producers: Mapping[Value, Node], held: Any) -> None:
        self.cluster = cluster
        self.place = {dim: i for i, dim in enumerate(order)}
        self.producers = producers
        self.held = held
        self.builder = Builder()
        self.slots: dict[Slot, Value] = {}
        self._values: dict[tuple[Value, Point], Value] = {}
        self._indices: dict[Expr | Digit, Value] = {}

    def at(self, value: Value, point: Point) -> Value:
        """A tensor's element at a point."""
        key = (value, point)
        if key not in self._values:
            self._values[key] = self._made(value, point)
        return self._values[key]

    def _made(self, value: Value, point: Point) -> Value:
        if self.is_leaf(value):
            return self.load(value, shape_of(value), point)
        node = self.producers[value]
        with self.builder.at(node.loc):
            return compute.of(node.op)(self, node, point)

    def is_leaf(self, value: Value) -> bool:
        """Whether a value is read from memory here."""
        return value not in self.cluster.inlined

    def operands(self, node: Node, point: Point) -> list[Value]:
        """The operands of a node at the points it reads them at."""
        return [self.at(v, p) for v, p in zip(node.args, self.cluster.operands(node, point), strict=True)]

    def load(self, value: Value, shape: tuple[int, ...], point: Point) -> Value:
        """The element of memory, seen as `shape`, at a point."""
        ref = self.slot(value, shape)
        indices = [self.index(i) for i in point.indices]
        guards = [self.guard(point.guards)] if point.guards else []
        return self.add(schedule.load, [ref, *indices, *guards])

    def slot(self, value: Value, shape: tuple[int, ...]) -> Value:
        """The parameter for a value in memory, seen as `shape`."""
        if (value, shape) not in self.slots:
            type = value.type
            assert isinstance(type, TensorType)
            self.slots[value, shape] = Value(RefType(shape, type.dtype, policy=type.policy), self.held(value))
        return self.slots[value, shape]

    def index(self, expr: Expr) -> Value:
        """An index as a value."""
        if expr not in self._indices:
            parts = [self._scaled(a, c) for a, c in expr.terms]
            if expr.constant or not parts:
                parts.append(self.number(expr.constant))
            total = parts[0]
            for each in parts[1:]:
                total = self.add(e.add, [total, each])
            self._indices[expr] = total
        return self._indices[expr]

    def _scaled(self, of: Digit | Opaque, by: int) -> Value:
        value = self._digit(of) if isinstance(of, Digit) else self._opaque(of)
        return value if by == 1 else self.add(e.mul, [value, self.number(by)])

    def _digit(self, digit: Digit) -> Value:
        if digit not in self._indices:
            value = self.add(schedule.index, [], dim=self.place[digit.dim])
            if digit.divisor > 1:
                value = self.add(e.floor_divide, [value, self.number(digit.divisor)])
            if digit.modulus:
                value = self.add(e.remainder, [value, self.number(digit.modulus)])
            self._indices[digit] = value
        return self._indices[digit]

    def _opaque(self, of: Opaque) -> Value:
        if of.key[0] in _DIVISIONS:
            sign, expr, by = of.key
            return self.add(_DIVISIONS[sign], [self.index(expr), self.number(by)])
        value, point = of.key
        return self.cast(self.at(value, point), int64)

    def guard(self, guards: Sequence[Guard]) -> Value:
        """Whether all guards hold; there is at least one."""
        tests = [t for g in guards for t in self._tests(g)]
        total = tests[0]
        for each in tests[1:]:
            total = self.add(e.bitwise_and, [total, each])
        return total

    def _tests(self, guard: Guard) -> list[Value]:
        found, index = guard.index.bounds(), self.index(guard.index)
        tests = []
        if found is None or found[0] < guard.low:
            tests.append(self.add(e.greater_equal, [index, self.number(guard.low)]))
        if found is None or found[1] >= guard.high:
            tests.append(self.add(e.less, [index, self.number(guard.high)]))
        return tests

    def number(self, value: int) -> Value:
        """An int64 constant."""
        return self.add(full, [], shape=(), value=value, dtype=int64)

    def cast(self, value: Value, dtype: DType) -> Value:
        """A value in another element type."""
        return value if value.type.dtype == dtype else self.add(convert, [value], dtype=dtype)

    def add(self, op: Op, args: Sequence[Value], **attrs: Any) -> Value:
        """One more node."""
        return self.builder.add(op, args, attrs).out

    def store(self, root: Value, place: Value) -> None:
        """Write the root's element, at the index of the kernel's dims, into memory."""
        (point,) = self.cluster.points(root)
        value = self.at(root, point)
        indices = [self._axis(d) for d in range(self.cluster.parallel)]
        self.builder.add(schedule.store, [place, value, *indices])

    def _axis(self, dim: int) -> Value:
        # An axis of one element has an index like any other, so that a store always names its dims.
        return self._digit(Digit(dim, self.cluster.extents[dim]))

    def block(self, place: Value) -> Block:
        """The finished region; the memory that is written comes last."""
        return self.builder.block([*self.slots.values(), place], ())


_DIVISIONS = {"//": e.floor_divide, "%": e.remainder}
