"""The family of legal evaluations that an error bound must cover, stated once; members of it are drawn at random.

Orders: a sum, product, scan, contraction or scatter is formed one after the other or permuted, in any number of
lanes, in any blocking, as any tree, or by doubling. Roundings: a scalar function is off by the ulps of its definition,
to either side; a product may enter a sum unrounded (fused multiply-add), in a contraction as in pointwise ops; a result
between ops is rounded to its type, or kept as it was computed. Each interpreter's and target's own evaluation is a
member.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.types import DType, TensorType, f64, join_compute_types
from tessera.interp.graph import control_flow_rules
from tessera.ir.builder import evaluate_block
from tessera.ir.core import Function
from tessera.ir.numerics.conversion import convert, round_to_storage
from tessera.ir.numerics.error_model import find_rounding_model, find_ulp_bound
from tessera.ir.rules import ACCUMULATE, STORAGE, Op
from tessera.ops.tensor import contractions, elementwise, reduce, scatter

Join = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class OpUse:
    """A primitive with the types of its operands and results, and its attributes; `final` results are stored."""

    op: Op
    types: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    attrs: Any
    final: bool = False


def combine_in_some_order(rng: np.random.Generator, parts: Sequence[Any], join: Join) -> Any:
    """All parts joined as a target may: in order or not, in lanes, in blocks, or as any tree."""
    parts = [parts[i] for i in rng.permutation(len(parts))] if rng.random() < 0.5 else list(parts)
    count = int(rng.choice([1, 2, 4, 8]))
    kind = rng.integers(3)
    if kind == 0:
        parts = [functools.reduce(join, parts[i::count]) for i in range(min(count, len(parts)))]
    elif kind == 1:
        size = int(rng.integers(1, len(parts) + 1))
        parts = [functools.reduce(join, parts[i : i + size]) for i in range(0, len(parts), size)]
    while len(parts) > 1:
        i = int(rng.integers(len(parts) - 1))
        parts[i : i + 2] = [join(parts[i], parts[i + 1])]
    return parts[0]


def scan_in_some_order(rng: np.random.Generator, parts: Sequence[Any], join: Join) -> list[Any]:
    """Prefixes as a target may form them: one after the other, by doubling, in blocks, or each by a tree of its own."""
    kind, count = rng.integers(3), len(parts)
    if kind == 0:
        return [combine_in_some_order(rng, parts[: i + 1], join) for i in range(count)]
    if kind == 1:
        found, reach = list(parts), 1
        while reach < count:
            found = [join(found[i - reach], x) if i >= reach else x for i, x in enumerate(found)]
            reach *= 2
        return found
    size, found = int(rng.integers(1, count + 1)), []
    for first in range(0, count, size):
        block = list(itertools.accumulate(parts[first : first + size], join))
        found += [join(found[-1], x) for x in block] if found else block
    return found


def _round_to(wide: Any) -> Join:
    return lambda x, y: (x.astype(np.float64) + y.astype(np.float64)).astype(wide)


def reduce_in_some_order(rng: np.random.Generator, use: OpUse, x: Any) -> Any:
    """A sum or product along axes, in the accumulator's type."""
    out = use.results[0]
    wide, axes = use.types[0].accumulate.numpy, tuple(a % x.ndim for a in use.attrs["axis"])
    parts = np.moveaxis(x, axes, range(len(axes))).reshape(-1, *(n for a, n in enumerate(x.shape) if a not in axes))
    parts = [p.astype(wide) for p in parts]
    join = np.add if use.op is reduce.sum else np.multiply
    return np.asarray(combine_in_some_order(rng, parts, join)).reshape(out.shape)


def scan_along_axis(rng: np.random.Generator, use: OpUse, x: Any) -> Any:
    """A running sum or product, in the accumulator's type."""
    parts = [p.astype(use.types[0].accumulate.numpy) for p in np.moveaxis(x, use.attrs["axis"], 0)]
    join = np.add if use.op is reduce.cumsum else np.multiply
    return np.moveaxis(np.stack(scan_in_some_order(rng, parts, join)), 0, use.attrs["axis"])


def contract_in_some_order(rng: np.random.Generator, use: OpUse, x: Any, y: Any) -> Any:
    """A product of matrices: fused multiply-adds, or rounded products, which are then added up."""
    wide = use.types[0].accumulate.numpy
    a, b = (v.astype(np.float64) for v in (x, y))
    terms = [a[..., :, k, None] * b[..., None, k, :] for k in range(x.shape[-1])]
    if rng.random() < 0.5:  # exact products: those of two numbers of 24 bits fit 53
        total, rest = terms[0].astype(wide), [t if wide != np.float64 else t.astype(wide) for t in terms[1:]]
        for term in [rest[i] for i in rng.permutation(len(rest))]:
            total = (total.astype(np.float64) + term).astype(wide)
        return total
    return combine_in_some_order(rng, [t.astype(wide) for t in terms], _round_to(wide))


def scatter_in_some_order(rng: np.random.Generator, use: OpUse, x: Any, indices: Any, updates: Any) -> Any:
    """An element and its updates, added up in any order."""
    wide, axis = use.types[0].accumulate.numpy, use.attrs["axis"] + x.ndim
    count = indices.ndim
    changes = np.moveaxis(updates, range(axis, axis + count), range(count)).reshape(-1, *np.delete(x.shape, axis))
    found = np.moveaxis(x, axis, 0).astype(wide)
    for place in range(len(found)):
        parts = [found[place], *(changes[n].astype(wide) for n in np.flatnonzero(np.ravel(indices) == place))]
        found[place] = combine_in_some_order(rng, parts, np.add)
    return np.moveaxis(found, 0, axis)


ORDERS: dict[Any, Callable[..., Any]] = {
    reduce.sum: reduce_in_some_order, reduce.prod: reduce_in_some_order, reduce.cumsum: scan_along_axis,
    reduce.cumprod: scan_along_axis, contractions.dot: contract_in_some_order,
    scatter.scatter_add: scatter_in_some_order,
}  # fmt: skip


def find_spacing(size: np.ndarray, dtype: DType) -> np.ndarray:
    """An ulp of numbers of a size, in a float type."""
    info = ml_dtypes.finfo(dtype.numpy)
    step = float(info.eps) * np.exp2(np.floor(np.log2(np.maximum(size, float(info.smallest_normal)))))
    return np.where(np.isfinite(step), step, 0.0)


def compute_scalars(rng: np.random.Generator, use: OpUse, args: Sequence[Any]) -> Any:
    """A pointwise op: its result in the compute type, off by at most the ulps of its definition."""
    wide = join_compute_types([t.compute for t in use.types])
    exact = use.op.ref(*(a.astype(np.float64) for a in args), **use.attrs)
    off = find_ulp_bound(use.op, wide)
    if off <= 0.5:
        if wide is f64:
            return exact
        fused = use.op is elementwise.mul and rng.random() < 0.3
        return exact if fused else convert(exact, wide)
    away = rng.choice([-1.0, 1.0]) if rng.random() < 0.3 else rng.uniform(-1, 1, np.shape(exact))
    return convert(exact + away * (off - 0.5) * find_spacing(np.abs(exact), wide), wide)


def evaluate_use(rng: np.random.Generator, use: OpUse, args: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a primitive, evaluated in a legal way that is drawn; operands are stored, or kept as computed."""
    out = use.results[0]
    if not out.dtype.is_float or not use.types or not use.types[0].dtype.is_float:
        return use.op.execute(use.types, use.results, use.attrs, list(args))
    if use.op.numerics != STORAGE:
        total = use.types[0].accumulate if use.op.numerics == ACCUMULATE else None
        args = [convert(a, total or t.compute) if t.dtype.is_float else a for t, a in zip(use.types, args, strict=True)]
    plain = out.policy is None and use.types[0].policy is None and 0 not in np.shape(args[0])
    if use.op in ORDERS and plain:
        found = ORDERS[use.op](rng, use, *args)
    elif use.op.pointwise and use.op.ulps is not None and plain:
        found = compute_scalars(rng, use, args)
    else:
        found = use.op.ref(*args, **use.attrs)
    found = found if isinstance(found, tuple) else (found,)
    kept = plain and not use.final and rng.random() < 0.4
    return tuple((_keep if kept else _store)(rng, f, t) for f, t in zip(found, use.results, strict=True))


def _keep(rng: np.random.Generator, found: Any, type: TensorType) -> Any:
    """A result that is not rounded; a type that saturates limits it."""
    model = find_rounding_model(type.dtype)
    return np.where(np.isnan(found), found, np.clip(found, -model.top, model.top)) if model.saturates else found


def _store(rng: np.random.Generator, found: Any, type: TensorType) -> Any:
    return round_to_storage(np.asarray(found), type.dtype, type.policy, int(rng.integers(1 << 30)))


def evaluate_in_some_way(
    function: Function, arrays: Sequence[Any], rng: np.random.Generator
) -> list[np.ndarray]:  # fmt: skip
    """The results of a Graph function of primitives, each evaluated in a legal way that is drawn."""
    results = set(function.body.results)

    def meaning(node: Any, args: list[Any], run: Any) -> Any:
        if node.op in control_flow_rules:
            return control_flow_rules.of(node.op)(node, args, run)
        final = not results.isdisjoint(node.results)
        return evaluate_use(rng, OpUse(node.op, node.types, node.result_types, node.attrs, final), args)

    with np.errstate(all="ignore"):
        return [np.asarray(a) for a in evaluate_block(function.body, arrays, meaning)]
