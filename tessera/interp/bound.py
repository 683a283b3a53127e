"""Bound mode of the Graph interpreter: running error analysis, reference values with rigorous rounding-error bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ShapeError
from tessera.core.hooks import run_graph_launch_with_bounds
from tessera.core.types import TensorType, Type, as_dtype
from tessera.interp.graph import control_flow_rules as host_flow
from tessera.interp.graph import specialise_to_arrays
from tessera.interp.observers import report_ops
from tessera.ir.builder import NodeSemantics, evaluate_block
from tessera.ir.core import Function, Node, Value
from tessera.ir.numerics.conversion import convert
from tessera.ir.numerics.error_model import ErrorSite, find_rounding_model, narrow_operand
from tessera.ir.numerics.interval_arithmetic import IntervalArray, absolute_distance, require_exact, to_interval
from tessera.ir.rewrite import expand_composites
from tessera.ir.rules import ACCUMULATE, STORAGE, Op, Rules, error
from tessera.ops.dialects import control_flow
from tessera.ops.dialects import control_flow as whole

bound_control_flow_rules = Rules("bound control flow")


# observe(node, operands, results) sees each op of a run with its bounds.
Observe = Callable[[Node, Sequence[Any], Sequence[IntervalArray]], None]


def run(
    function: Function, arrays: Sequence[Any], between: Callable[[], None] | None = None, observe: Observe | None = None
) -> list[IntervalArray]:
    """Run a Graph function on exact inputs: the results with their bounds; composites are expanded.

    `between` is called before each op; what it raises ends the run. `observe` sees the bounds of each op.

    Raises:
        ShapeError: an array does not have the shape of its parameter.
        ExecutionError: control flow depends on a comparison that rounding may change.
    """
    function = specialise_to_arrays(function, arrays)

    def meaning(node: Node, args: list[Any], run: Any) -> Sequence[IntervalArray]:
        if node.op in bound_control_flow_rules:
            return bound_control_flow_rules.of(node.op)(node, args, run)
        found = apply_with_bounds(node.op, node.types, node.result_types, node.attrs, args)
        if observe is not None:
            observe(node, args, found)
        if not outputs.isdisjoint(node.results):
            stored = apply_with_bounds(node.op, node.types, node.result_types, node.attrs, args, final=True)
            ends.update(zip(node.results, stored, strict=True))
        return found

    body = expand_composites(function, keep=lambda op: op in error).body
    outputs, ends = set(body.results), dict[Value, IntervalArray]()
    with report_ops(call_between(meaning, between), body, f"bounding {function.name}") as shown:
        results = evaluate_block(body, [to_interval(a) for a in arrays], shown)
    return [ends.get(v, r) for v, r in zip(body.results, results, strict=True)]


class TimeLimitReached(Exception):
    """A run with error bounds was ended by its limit on time."""


def make_time_limit(seconds: float) -> Callable[[], None]:
    """A function that raises TimeLimitReached once `seconds` have passed: the `between` of a run."""
    end = time.perf_counter() + seconds

    def check() -> None:
        if time.perf_counter() > end:
            raise TimeLimitReached

    return check


def call_between(meaning: NodeSemantics, between: Callable[[], None] | None) -> NodeSemantics:
    """The same semantics of nodes, with a call before each."""
    if between is None:
        return meaning

    def mean(node: Node, args: list[Any], walk: Any) -> Any:
        between()
        return meaning(node, args, walk)

    return mean


def apply_with_bounds(
    op: Op,
    types: Sequence[Type],
    results: Sequence[Type],
    attrs: Mapping[str, Any],
    operands: Sequence[Any],
    final: bool = False,
) -> tuple[IntervalArray, ...]:
    """Apply a primitive in bound mode to operands with bounds or exact ones, whose arrays give the sizes.

    Results that are `final` are those of the program: they are surely rounded to their types.
    """
    assert all(isinstance(t, TensorType) for t in (*types, *results)), "a ref is not a value"
    site = ErrorSite(op, tuple(types), tuple(results), final)  # type: ignore[arg-type]
    rule = error.of(op)

    def apply(*parts: IntervalArray) -> tuple[IntervalArray, ...]:
        seen = [_convert_operand(op, t, x) for t, x in zip(site.types, parts, strict=True)]
        out = rule(site, *seen, **attrs)
        outs = out if isinstance(out, tuple) else (out,)
        return tuple(_convert_result(t, b) for t, b in zip(site.results, outs, strict=True))

    with np.errstate(all="ignore"):
        given = [to_interval(x) for x in operands]
        return _apply_in_blocks(apply, given) if op.pointwise else apply(*given)


# Elements of a block of a pointwise op: the arrays of its error rule then stay in the cache.
BLOCK_ELEMENTS = 1 << 14


def _apply_in_blocks(
    apply: Callable[..., tuple[IntervalArray, ...]], operands: Sequence[IntervalArray]
) -> tuple[IntervalArray, ...]:
    """Apply a pointwise op to slices along the axis with the most elements before the others."""
    shape = np.broadcast_shapes(*(x.shape for x in operands))
    axis = next((a for a, n in enumerate(shape) if n > 1), None)
    size = math.prod(shape)
    if axis is None or size < 4 * BLOCK_ELEMENTS:
        return apply(*operands)
    step = max(1, BLOCK_ELEMENTS * shape[axis] // size)
    results: tuple[IntervalArray, ...] = ()
    for low in range(0, shape[axis], step):
        place = (slice(None),) * axis + (slice(low, low + step),)
        parts = apply(*(x[place] if x.ndim == len(shape) and x.shape[axis] > 1 else x for x in operands))
        results = results or tuple(
            IntervalArray(np.empty(shape, p.value.dtype), np.empty(shape, p.radius.dtype)) for p in parts
        )
        for result, part in zip(results, parts, strict=True):
            result.value[place], result.radius[place] = part.value, part.radius
    return results


def _convert_operand(op: Op, type: TensorType, x: IntervalArray) -> IntervalArray:
    """Convert an operand to the compute type: integers widen, floats round where that narrows them."""
    if op.numerics == STORAGE:
        return x
    wide = type.accumulate if op.numerics == ACCUMULATE else type.compute
    return (
        narrow_operand(x, type, find_rounding_model(wide))
        if wide.is_float
        else IntervalArray(convert(x.value, wide), x.radius)
    )


def _convert_result(type: TensorType, x: IntervalArray) -> IntervalArray:
    """Convert an integer result to its element type, which NumPy's arithmetic may have widened."""
    whole = not type.dtype.is_float and as_dtype(x.dtype) != type.dtype
    return IntervalArray(convert(x.value, type.dtype), x.radius) if whole else x


@bound_control_flow_rules(*whole.FUNCTIONAL_FLOW_OPS)
def _(node, args, run):
    return host_flow.of(node.op)(node, args, run)


@bound_control_flow_rules(control_flow.launch)
def _(node, args, run):
    return run_graph_launch_with_bounds(node, args)


@bound_control_flow_rules(control_flow.if_)
def _(node, args, run):
    return run(node.regions[0 if require_exact(args[0]) else 1])


@bound_control_flow_rules(control_flow.for_)
def _(node, args, run):
    lower, upper, step = (int(require_exact(a)) for a in args[:3])
    carried = args[3:]
    for i in range(lower, upper, step):
        carried = run(node.regions[0], to_interval(np.int64(i)), *carried)
    return carried


@bound_control_flow_rules(control_flow.while_)
def _(node, args, run):
    condition, body = node.regions
    while require_exact(run(condition, *args)[0]):
        args = run(body, *args)
    return args


@dataclass(frozen=True)
class BoundSample:
    """Results with their bounds where `programs` of all `total` programs ran; other elements have the radius −0.0."""

    bounds: list[IntervalArray]
    programs: int
    total: int

    def select(self, results: Sequence[Any]) -> list[tuple[np.ndarray, IntervalArray]]:
        """Each result with its bound, where the sample covers it."""
        if self.programs == self.total:
            return list(zip(results, self.bounds, strict=True))
        covered = [~np.signbit(b.radius) for b in self.bounds]
        return [(np.asarray(r)[c], b[c]) for r, b, c in zip(results, self.bounds, covered, strict=True)]


@dataclass(frozen=True)
class BoundAgreement:
    """How results compare with a bound: the worst |difference| / radius, its index, and the two there.

    `nans` and `infinities` count the elements that are not finite. `unbounded` counts those that were not compared,
    since their bound is not finite. `unlike` is the index of the first element that is NaN or infinite where the
    reference is not, or the other way round; None if there is none.
    """

    ok: bool
    worst_share: float
    where: tuple[int, ...]
    ambiguous_share: float
    useless: bool
    difference: float = 0.0
    radius: float = 0.0
    size: int = 0
    nans: int = 0
    infinities: int = 0
    unbounded: int = 0
    unlike: tuple[int, ...] | None = None

    @property
    def within(self) -> bool:
        """Whether every element is within a finite bound, or is the NaN or infinity of the reference."""
        return self.ok and not self.unbounded

    @property
    def compared(self) -> bool:
        """Whether the comparison says anything: some element is a number or an infinity, and has a finite bound."""
        return not self.size or self.size > max(self.nans, self.unbounded)

    def __str__(self) -> str:
        notes = f", {self.ambiguous_share:.0%} ambiguous" if self.ambiguous_share else ""
        notes += ", a bound too wide to say anything" if self.useless else ""
        notes += f", {held}" if (held := self.describe_non_finite()) else ""
        if self.ok:
            return f"agrees: uses {self.worst_share:.3g} of its bound at {list(self.where)}{notes}"
        return f"at {list(self.where)}: {self._describe_error()}{notes}"

    def describe_non_finite(self) -> str:
        """The numbers of NaNs and infinities, and whether the reference has them in the same places; "" without any."""
        counts = count_non_finite(self.nans, self.infinities, self.size)
        if self.unlike is not None:
            return f"{counts}, unlike the reference at {list(self.unlike)}"
        return f"{counts}, where the reference has or allows them" if self.nans or self.infinities else ""

    def _describe_error(self) -> str:
        """The error that exceeds its bound; a bound of 0, inf or NaN gives no number of times."""
        if 0 < self.radius < np.inf and self.difference < np.inf:
            return f"the error is {self.worst_share:.3g} times its bound"
        return f"the error is {self.difference:.3g}, and its bound is {self.radius:.3g}"


def count_non_finite(nans: int, infinities: int, size: int) -> str:
    """The numbers of NaNs and infinities in words.

    >>> count_non_finite(2, 1, 8)
    '2 NaN and 1 infinity of 8 elements'
    """
    named = ((nans, "NaN"), (infinities, "infinity" if infinities == 1 else "infinities"))
    listed = [f"{count} {name}" for count, name in named if count]
    return f"{' and '.join(listed) or 'no NaN or infinity'} of {size} elements"


def compare_with_bound(result: Any, bounded: IntervalArray) -> BoundAgreement:
    """Check that each element lies within its bound.

    `useless` is set where for more than half of the elements the bound exceeds half of their size
    (of the mean size, for small ones): agreement then says nothing.
    """
    result = to_interval(result).value
    if result.shape != bounded.shape:
        raise ShapeError("the result has another shape", expected=str(bounded.shape), received=str(result.shape))
    apart, radius = absolute_distance(result, bounded.value), bounded.radius
    with np.errstate(all="ignore"):
        share = np.where((apart == 0) | np.isinf(radius), 0.0, apart / radius)
    worst = int(np.argmax(share)) if share.size else 0
    top = float(share.flat[worst]) if share.size else 0.0
    ambiguous = _find_ambiguous(result, bounded)
    kinds = _find_kinds(result)
    unlike = np.argwhere((kinds != _find_kinds(bounded.value)) & ((share > 1) | ambiguous))
    return BoundAgreement(
        top <= 1.0,
        top,
        tuple(int(i) for i in np.unravel_index(worst, share.shape)) if share.size else (),
        float(np.mean(ambiguous)) if share.size else 0.0,
        _is_useless(bounded, ambiguous),
        float(np.broadcast_to(apart, share.shape).flat[worst]) if share.size else 0.0,
        float(np.broadcast_to(radius, share.shape).flat[worst]) if share.size else 0.0,
        share.size,
        int(np.count_nonzero(kinds == NAN)),
        int(np.count_nonzero(np.abs(kinds) == INFINITE)),
        int(np.count_nonzero(np.isinf(radius))),
        tuple(int(i) for i in unlike[0]) if len(unlike) else None,
    )


def describe_non_finite(values: Any) -> str:
    """The numbers of NaNs and infinities in an array, in words; "" without any."""
    kinds = np.abs(_find_kinds(np.asarray(values)))
    nans, infinities = (int(np.count_nonzero(kinds == kind)) for kind in (NAN, INFINITE))
    return count_non_finite(nans, infinities, kinds.size) if nans or infinities else ""


INFINITE, NAN = 1, 2  # the kinds of elements; that of -inf is -INFINITE, that of numbers is 0


def _find_kinds(values: np.ndarray) -> np.ndarray:
    """The kind of each element: a number, an infinity of either sign, or NaN."""
    if values.dtype.kind in "biu":
        return np.zeros(values.shape, np.int8)
    wide = values.astype(np.float64)
    return np.where(np.isnan(wide), NAN, np.where(np.isinf(wide), np.copysign(INFINITE, wide), 0)).astype(np.int8)


def _find_ambiguous(result: np.ndarray, bounded: IntervalArray) -> np.ndarray:
    """Where a comparison is undecided within the bounds; an overflow to the right infinity is decided."""
    if bounded.dtype.kind != "f":
        return bounded.radius > 0
    overflowed = np.isinf(result.astype(np.float64)) & (np.sign(result) == np.sign(bounded.value))
    return np.isinf(bounded.radius) & ~overflowed


def _is_useless(bounded: IntervalArray, ambiguous: np.ndarray) -> bool:
    if not bounded.size:
        return False
    size = np.abs(np.where(np.isfinite(bounded.value), bounded.value, 0).astype(np.float64))
    with np.errstate(over="ignore"):  # the mean of the largest numbers
        wide = bounded.radius > 0.5 * np.maximum(size, size.mean()) + np.finfo(np.float32).tiny
    return bool(np.mean(wide & (ambiguous | np.isfinite(bounded.radius))) > 0.5)
