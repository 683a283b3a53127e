"""Static analyses of index arithmetic over use-def chains: affine forms, intervals and divisors, index inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tessera.core.symbolic_dim import Size, find_size_bounds
from tessera.core.types import RefType, TensorType, int64
from tessera.ir.core import Block, Module, Node, Value
from tessera.ir.rules import Rules

# Affine analysis: an index as a constant plus multiples of scalars and of positions along axes (Karr 1976).
#
# The kernel front end recognises blocks of memory by it, the PTX generator proves and narrows masks by it. Each op that
# computes indices has its rule beside its definition.
#
# Three forms of index stay separate, since they answer other questions. `tessera.lower.indexing_maps` has mixed-radix
# digits of iteration dims, in which a division that comes out even stays exact. `tessera.interp.tile.affine` has the
# numbers of a run, one step for each instance axis, in the hot path of the interpreter.
# `tessera.ir.numerics.interval_arithmetic` has error bounds of floats.


# rule(analysis, node) gives the affine form of the result, or None where it is not affine.
affine_rules = Rules("affine form")


@dataclass(frozen=True)
class AffineForm:
    """A constant, plus multiples of scalars, plus multiples of the position along axes of a block (`ramps`).

    Axes count from the end (-1 is the last), so that broadcasting does not move them; an axis of size 1 has no ramp.
    """

    constant: int = 0
    scalars: Mapping[Value, int] = field(default_factory=dict)
    ramps: Mapping[int, int] = field(default_factory=dict)

    def plus(self, other: AffineForm, sign: int = 1) -> AffineForm:
        """The sum with another form, or with `sign` -1 the difference."""
        return AffineForm(
            self.constant + sign * other.constant,
            add_terms(self.scalars, other.scalars, sign),
            add_terms(self.ramps, other.ramps, sign),
        )

    def times(self, factor: int) -> AffineForm:
        """A multiple of this form."""
        return AffineForm().plus(self, factor)

    @property
    def is_constant(self) -> bool:
        """Whether there are neither scalars nor ramps."""
        return not self.scalars and not self.ramps

    def upper_bound_of_block(self, shape: Sequence[int]) -> int:
        """The constant, plus the most that the ramps add in a block of this shape."""
        return self.constant + sum(max(c * (shape[a] - 1), 0) for a, c in self.ramps.items())


def add_terms(x: Mapping[Any, int], y: Mapping[Any, int], sign: int = 1) -> dict[Any, int]:
    """The sum of two linear combinations; terms with the coefficient 0 are left out."""
    total = {k: x.get(k, 0) + sign * y.get(k, 0) for k in (*x, *y)}
    return {k: c for k, c in total.items() if c}


class AffineAnalysis:
    """The affine forms of values, by their defining nodes.

    A scalar that is not affine is a term of its own. `follows` tells the nodes to look through. Integers narrower than
    int64 may wrap: they have forms only where `narrow` is set.
    """

    def __init__(
        self,
        producers: Mapping[Value, Node],
        follows: Callable[[Node], bool] = lambda node: True,
        narrow: bool = False,
    ) -> None:
        self.producers = producers
        self.follows = follows
        self.narrow = narrow

    def find_form(self, value: Value) -> AffineForm | None:
        """The affine form of an index or a block of indices, or None."""
        if not isinstance(value.type, TensorType) or not (self.narrow or value.type.dtype == int64):
            return None
        node = self.producers.get(value)
        rule = affine_rules.get(node.op) if node is not None and self.follows(node) else None
        found = rule(self, node) if rule is not None else None
        return AffineForm(0, {value: 1}) if found is None and not value.type.rank else found


def add_forms(analysis: AffineAnalysis, node: Node, sign: int = 1) -> AffineForm | None:
    """The form of a sum, or with `sign` -1 of a difference."""
    x, y = (analysis.find_form(v) for v in node.args)
    return None if x is None or y is None else x.plus(y, sign)


def multiply_forms(analysis: AffineAnalysis, node: Node) -> AffineForm | None:
    """The form of a product, one side of which is a constant."""
    x, y = (analysis.find_form(v) for v in node.args)
    if x is None or y is None or not (x.is_constant or y.is_constant):
        return None
    return x.times(y.constant) if y.is_constant else y.times(x.constant)


def move_ramps(form: AffineForm | None, before: Value, after: Value) -> AffineForm | None:
    """The form after a reshape that only adds or drops axes of size 1; any reshape, where there are no ramps."""
    if form is None or not form.ramps:
        return form
    old, new = (_find_long_axes(v) for v in (before, after))
    if list(old.values()) != list(new.values()):
        return None
    names = dict(zip(old, new, strict=True))
    return AffineForm(form.constant, form.scalars, {names[a]: c for a, c in form.ramps.items()})


def _find_long_axes(value: Value) -> dict[int, Any]:
    """The axes that are not of size 1, counted from the end, with their sizes."""
    shape = value.type.shape
    return {a - len(shape): n for a, n in enumerate(shape) if n != 1}


# Divisibility analysis: a number that an index scalar is a multiple of, which proves alignment (Granger 1989).


MAX_DIVISOR = 1 << 20  # a divisor of 0: as good as any that is asked for
# rule(producers, node) gives a divisor of the result; for a loop, of its index.
divisor_rules = Rules("divisor")


def find_divisor(producers: Mapping[Value, Node], value: Value) -> int:
    """A number that a scalar is a multiple of; `producers` may map the index of a loop to the loop."""
    node = producers.get(value)
    if node is None or (node.regions and value in node.results):
        return 1
    rule = divisor_rules.get(node.op)
    return rule(producers, node) if rule is not None else 1


def find_common_divisor(producers: Mapping[Value, Node], node: Node) -> int:
    """A divisor of every operand, and so of their sums, differences, maxima and minima."""
    return math.gcd(*(find_divisor(producers, v) for v in node.args))


def multiply_divisors(producers: Mapping[Value, Node], node: Node) -> int:
    """A divisor of a product."""
    return min(MAX_DIVISOR, math.prod(find_divisor(producers, v) for v in node.args))


# Interval analysis: the least and the greatest number that an integer may be, from the ranges of its operands.


Interval = tuple[float, float]
UNBOUNDED: Interval = (-math.inf, math.inf)

# Ops whose float results are bounded, by more than f32 rounds a result, and by what is flushed to 0.
ROUNDED_OPS = frozenset(
    f"ts.{name}" for name in "add sub mul maximum minimum cast reshape permute slice broadcast".split()
)
DEEP_INTERVALS = 50  # values under way, from which on operands come first
ROUNDING, FLUSHED, MAX_ROUNDED = 2.0**-22, 2.0**-126, 2.0**100

# rule(analysis, node) gives the interval of the result.
interval_rules = Rules("interval")


def find_type_bounds(v: Value) -> Interval:
    """The numbers that a type of fewer than 64 bits holds; other values are taken for unbounded."""
    dtype = v.type.dtype
    if not dtype.is_integer or dtype.bits >= int64.bits:
        return UNBOUNDED
    signed = dtype.kind == "int"
    return -(1 << dtype.bits - 1) if signed else 0, (1 << dtype.bits - signed) - 1


class IntervalAnalysis:
    """Intervals of the scalars of one kernel; `grid` is the largest it is launched with, if known."""

    def __init__(self, producers: Mapping[Value, Node], grid: Sequence[float] | None) -> None:
        self.producers, self.grid = producers, grid
        self.known: dict[Value, Interval] = {}
        self._depth = 0  # of the values under way

    def of(self, v: Value) -> Interval:
        """The interval of a value: the least and the greatest number that it may be."""
        if v not in self.known:
            node = self.producers.get(v)
            if self._depth == DEEP_INTERVALS:
                for each in reversed(self._list_operands(v)):
                    self.of(each)
            self._depth += 1
            self.known[v] = self._find(v, node) if node is not None else find_type_bounds(v)
            self._depth -= 1
        return self.known[v]

    def _list_operands(self, v: Value) -> list[Value]:
        """What the interval of a value depends on and is not known, roughly what is computed of others first: a long
        chain of them would take more calls in one another than Python has."""
        found, work = dict[Value, None](), [v]
        while work:
            node = self.producers.get(work.pop())
            for operand in node.args if node is not None and node.op in interval_rules else ():
                if operand not in self.known and operand not in found and operand in self.producers:
                    found[operand] = None
                    work.append(operand)
        return list(found)

    def _find(self, v: Value, node: Node) -> Interval:
        rule, limits = interval_rules.get(node.op), find_type_bounds(v)
        if rule is None:
            return limits
        if node.args and not v.type.dtype.is_integer:
            return self._find_rounded(v, node, rule)
        low, high = rule(self, node)  # ends that are symbolic sizes become what is proven of them
        low, high = find_size_bounds(low)[0], find_size_bounds(high)[1]
        return (low, high) if limits[0] <= low and high <= limits[1] else limits  # what leaves its type wraps

    def _find_rounded(self, v: Value, node: Node, rule: Callable[..., Interval]) -> Interval:
        """The interval of a float of finite operands, which make no NaN: rounding adds a share of each end."""
        plain = v.type.dtype.name in ("f32", "f64") and v.type.policy is None
        ends = [end for a in node.args for end in self.of(a)]
        if not plain or node.op.name not in ROUNDED_OPS or not all(map(math.isfinite, ends)):
            return UNBOUNDED
        low, high = rule(self, node)
        if not -MAX_ROUNDED < low <= high < MAX_ROUNDED:
            return UNBOUNDED
        return low - abs(low) * ROUNDING - FLUSHED, high + abs(high) * ROUNDING + FLUSHED

    @contextmanager
    def assume(self, intervals: Mapping[Value, Interval]) -> Iterator[None]:
        """Within the `with` block these values lie in these intervals, as a branch has found."""
        before = self.known
        self.known = {v: found for v, found in before.items() if v not in self.producers} | {**intervals}
        try:
            yield
        finally:
            self.known = before

    def loop(self, node: Node) -> None:
        """Note the interval of the index of a `for`: the last iteration is a whole number of steps after the first."""
        (low, first), (_, end), step = (self.of(v) for v in node.args[:3])
        if step[0] <= 0:
            return
        high = end - 1
        if low == first and step[0] == step[1] and math.isfinite(high):
            high = low + (high - low) // step[0] * step[0]
        self.known[node.regions[0].params[0]] = (low, high)

    def find_unproven_axes(
        self, starts: Sequence[Value], block: Sequence[int], sizes: Sequence[Size]
    ) -> tuple[int, ...]:
        """The axes along which a block is not proven to be in bounds."""
        bounds = [self.of(s) for s in starts]
        parts = enumerate(zip(bounds, block, sizes, strict=True))
        return tuple(a for a, ((low, high), n, size) in parts if low < 0 or high + n > find_size_bounds(size)[0])


def combine_endpoints(f: Callable[[float, float], float]) -> Callable[[IntervalAnalysis, Node], Interval]:
    """The rule of an op of two operands that is monotonic in each: its endpoints are those of the operands."""

    def rule(analysis: IntervalAnalysis, node: Node) -> Interval:
        x, y = (analysis.of(v) for v in node.args)
        found = [f(a, b) for a in x for b in y]
        return UNBOUNDED if any(math.isnan(n) for n in found) else _discard_wrapping(min(found), max(found))

    return rule


def _discard_wrapping(low: float, high: float) -> Interval:
    """Nothing is known of results that may wrap."""
    return (low, high) if all(math.isinf(n) or abs(n) < 2**62 for n in (low, high)) else UNBOUNDED


def multiply_endpoints(x: float, y: float) -> float:
    """A product, in which 0 times infinity is 0."""
    return 0 if x == 0 or y == 0 else x * y


def _divide_endpoints(x: float, y: float) -> float:
    if y == 0 or math.isinf(y):
        return math.nan
    return x * (1 if y > 0 else -1) if math.isinf(x) else x // y


def divide_intervals(analysis: IntervalAnalysis, node: Node) -> Interval:
    """The interval of a floor division, where the divisor cannot be 0."""
    low, high = analysis.of(node.args[1])
    return combine_endpoints(_divide_endpoints)(analysis, node) if low > 0 or high < 0 else UNBOUNDED


def bound_remainder(analysis: IntervalAnalysis, node: Node) -> Interval:
    """The interval of a floor remainder, where the divisor is positive."""
    low, high = analysis.of(node.args[1])
    return (0, high - 1) if low > 0 else UNBOUNDED


# Index inputs: the parameters of a Tile module whose elements select elements of memory (forward data flow).
#
# An index that depends on a parameter's elements, or a loop whose extent does, makes it an index input. What a kernel
# reads through such an input is checked by no compiled kernel, so that nobody may choose its elements at random.


# The operands before the indices, for each op that takes indices into its first operand.
OPERANDS_BEFORE_INDICES = {
    "tile.load": 1, "tile.gather": 1, "tile.store": 2, "tile.scatter": 2, "tile.atomic": 2, "tile.compare_exchange": 3,
    "tile.async_copy": 2, "host.at": 1,
}  # fmt: skip


def find_index_inputs(module: Module) -> set[int]:
    """The numbers of the entry's parameters that hold indices, or numbers from which a program computes them."""
    flow = _Flow(module)
    main = module.main
    for number, param in enumerate(main.params):
        flow.sources[param] = {number}
    changed = True
    while changed:
        before = flow.size()
        flow.visit(main.body)
        changed = flow.size() != before
    return flow.found


class _Flow:
    """For each value the parameters that it depends on; a view shares the set of its memory."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.sources: dict[Value, set[int]] = {}
        self.found: set[int] = set()

    def size(self) -> int:
        """A number that grows whenever a dependence is added."""
        return len(self.found) + sum(map(len, self.sources.values()))

    def visit(self, block: Block) -> None:
        """Add the dependences of each node of a block."""
        for node in block.nodes:
            if node.op.name == "host.launch":
                self._visit_launch(node)
            else:
                self._visit_node(node)

    def _get(self, value: Value) -> set[int]:
        return self.sources.setdefault(value, set())

    def _visit_launch(self, node: Node) -> None:
        kernel = self.module.function(node.attrs["kernel"])
        for param, argument in zip(kernel.params, node.args, strict=False):
            sources = self._get(argument)
            self.sources[param] = sources if isinstance(argument.type, RefType) else self._get(param) | sources
        self.visit(kernel.body)

    def _visit_node(self, node: Node) -> None:
        first = node.args[0] if node.args else None
        is_view = len(node.results) == 1 and isinstance(node.results[0].type, RefType) and first is not None
        if is_view:
            self.sources[node.results[0]] = self._get(first)  # type: ignore[arg-type]
        sources = set().union(*map(self._get, node.args))
        for region in node.regions:
            for param in region.params:
                self._get(param).update(sources)
            self.visit(region)
            sources = sources.union(*map(self._get, region.results))
        for value in self._find_written(node):
            self._get(value).update(sources)
        before = OPERANDS_BEFORE_INDICES.get(node.op.name)
        if before is not None:
            rank = len(node.args) if node.op.name == "tile.async_copy" else first.type.rank  # type: ignore[union-attr]
            self.found.update(*map(self._get, node.args[before : before + rank]))

    def _find_written(self, node: Node) -> list[Value]:
        """The values that take on what a node reads: its results, and memories that it may write."""
        results = [value for value in node.results if not isinstance(value.type, RefType)]
        if node.op.name.startswith("host."):
            return results + [value for value in node.args if isinstance(value.type, RefType)]
        return results + list(node.args[:1] if "write" in node.op.effects else ())
