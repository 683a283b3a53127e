"""The Graph interpreter in bound mode: reference values and how far any legal evaluation may lie from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.errors import ShapeError
from tessera.evaluate import evaluate, expand
from tessera.interp.flow import flow as host_flow
from tessera.interp.graph import _bound, _concrete, sizes_of
from tessera.ir.core import Function, Node
from tessera.numerics.bounded import Bounded, certain, distance, lift
from tessera.numerics.convert import convert
from tessera.numerics.formats import format_of
from tessera.numerics.site import Site, narrowed
from tessera.op import ACCUMULATE, STORAGE, Op, Rules, error
from tessera.ops import control
from tessera.ops import flow as whole
from tessera.types import TensorType, Type, as_dtype

flow = Rules("bound control flow")


def run(function: Function, arrays: Sequence[Any]) -> list[Bounded]:
    """The results of a Graph function on exact inputs, each with its bound; composites are expanded.

    Raises:
        ShapeError: an array does not have the shape its parameter says.
        ExecutionError: control flow rests on a comparison that rounding may change.
    """
    sizes = sizes_of(function, arrays)

    def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Bounded]:
        if node.op in flow:
            return flow.of(node.op)(node, args, run)
        types = tuple(_concrete(v.type, sizes) for v in node.args)
        results = tuple(_concrete(v.type, sizes) for v in node.results)
        return apply(node.op, types, results, _bound(node, sizes), args)

    return evaluate(expand(function, keep=lambda op: op in error).body, [lift(a) for a in arrays], meaning)


def apply(
    op: Op, types: Sequence[Type], results: Sequence[Type], attrs: Mapping[str, Any], operands: Sequence[Any]
) -> tuple[Bounded, ...]:
    """One primitive in bound mode, on Bounded or exact operands; sizes come from them, not from the types."""
    assert all(isinstance(t, TensorType) for t in (*types, *results)), "a ref is not a value"
    site = Site(op, tuple(types), tuple(results))  # type: ignore[arg-type]
    rule = error.of(op)
    with np.errstate(all="ignore"):
        seen = [_operand(op, t, lift(x)) for t, x in zip(site.types, operands, strict=True)]
        out = rule(site, *seen, **attrs)
        outs = out if isinstance(out, tuple) else (out,)
        return tuple(_result(t, b) for t, b in zip(site.results, outs, strict=True))


def _operand(op: Op, type: TensorType, x: Bounded) -> Bounded:
    """An operand as the op computes with it: integers widened, floats rounded where that narrows them."""
    if op.numerics == STORAGE:
        return x
    wide = type.accumulate if op.numerics == ACCUMULATE else type.compute
    return narrowed(x, type, format_of(wide)) if wide.is_float else Bounded(convert(x.value, wide), x.radius)


def _result(type: TensorType, x: Bounded) -> Bounded:
    """A result with integers in their own element type, as NumPy's arithmetic gives them elsewhere."""
    whole = not type.dtype.is_float and as_dtype(x.dtype) != type.dtype
    return Bounded(convert(x.value, type.dtype), x.radius) if whole else x


@flow(*whole.OPS)
def _(node, args, run):
    return host_flow.of(node.op)(node, args, run)


@flow(control.if_)
def _(node, args, run):
    return run(node.regions[0 if certain(args[0]) else 1])


@flow(control.for_)
def _(node, args, run):
    lower, upper, step = (int(certain(a)) for a in args[:3])
    carried = args[3:]
    for i in range(lower, upper, step):
        carried = run(node.regions[0], lift(np.int64(i)), *carried)
    return carried


@flow(control.while_)
def _(node, args, run):
    condition, body = node.regions
    while certain(run(condition, *args)[0]):
        args = run(body, *args)
    return args


@dataclass(frozen=True)
class Agreement:
    """How results compare with a bound: the worst |difference| / radius, and where it is."""

    ok: bool
    worst_share: float
    where: tuple[int, ...]
    ambiguous_share: float
    useless: bool

    def __str__(self) -> str:
        verdict = "agrees" if self.ok else "differs"
        notes = f", {self.ambiguous_share:.0%} ambiguous" if self.ambiguous_share else ""
        notes += ", a bound too wide to say anything" if self.useless else ""
        return f"{verdict}: uses {self.worst_share:.3g} of its bound at {list(self.where)}{notes}"


def compare(result: Any, bounded: Bounded) -> Agreement:
    """Whether each element lies within its bound.

    `useless` tells that for more than half of the elements the bound exceeds half of their size
    (of the mean size, for small ones): agreement then says nothing.
    """
    result = lift(result).value
    if result.shape != bounded.shape:
        raise ShapeError("the result has another shape", expected=str(bounded.shape), received=str(result.shape))
    apart, radius = distance(result, bounded.value), bounded.radius
    with np.errstate(all="ignore"):
        share = np.where((apart == 0) | np.isinf(radius), 0.0, apart / radius)
    worst = int(np.argmax(share)) if share.size else 0
    top = float(share.flat[worst]) if share.size else 0.0
    ambiguous = _ambiguous(result, bounded)
    return Agreement(
        top <= 1.0,
        top,
        tuple(int(i) for i in np.unravel_index(worst, share.shape)) if share.size else (),
        float(np.mean(ambiguous)) if share.size else 0.0,
        _useless(bounded, ambiguous),
    )


def _ambiguous(result: np.ndarray, bounded: Bounded) -> np.ndarray:
    """Where the bound leaves the outcome open; an overflow to the right infinity is not open."""
    if bounded.dtype.kind != "f":
        return bounded.radius > 0
    overflowed = np.isinf(result.astype(np.float64)) & (np.sign(result) == np.sign(bounded.value))
    return np.isinf(bounded.radius) & ~overflowed


def _useless(bounded: Bounded, ambiguous: np.ndarray) -> bool:
    if not bounded.size:
        return False
    size = np.abs(np.where(np.isfinite(bounded.value), bounded.value, 0).astype(np.float64))
    wide = bounded.radius > 0.5 * np.maximum(size, size.mean()) + np.finfo(np.float32).tiny
    return bool(np.mean(wide & (ambiguous | np.isfinite(bounded.radius))) > 0.5)
