"""Reductions, cumulative sums, arg-extrema and the softmax family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.shapes import normalize_axis
from tessera.core.types import f64
from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import nn
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.rearrange import flip, narrow
from tessera.ops.tensor.shape import concatenate, iota, reshape

Reduction = Callable[..., Tensor]


@composite
def _sum_of_squares(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return r.sum(x * x, axis=axis, keepdims=keepdims)


@composite
def _norm(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return e.sqrt(r.sum(x * x, axis=axis, keepdims=keepdims))


@composite
def _log_of_sum(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return e.log(r.sum(x, axis=axis, keepdims=keepdims))


REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": r.sum,
    "ReduceProd": r.prod,
    "ReduceMean": r.mean,
    "ReduceL1": lambda x, axis, keepdims: r.sum(e.abs(x), axis=axis, keepdims=keepdims),
    "ReduceL2": _norm,
    "ReduceSumSquare": _sum_of_squares,
    "ReduceLogSum": _log_of_sum,
    "ReduceLogSumExp": r.logsumexp,
}
FLOAT_ONLY = ("ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
# What the operators give where there is nothing to reduce.
EMPTY = {
    "ReduceSum": 0.0, "ReduceL1": 0.0, "ReduceL2": 0.0, "ReduceSumSquare": 0.0, "ReduceProd": 1.0,
    "ReduceLogSum": -math.inf, "ReduceLogSumExp": -math.inf, "ReduceMean": math.nan,
}  # fmt: skip


def _find_axes(call: NodeCall, x: Tensor, axes: Tensor | None) -> tuple[int, ...] | None:
    """The axes to reduce; None where nothing is to be reduced."""
    listed = call.attr("axes", None) if axes is None else call.ints(axes, "axes")
    if not listed:
        return None if call.attr("noop_with_empty_axes", 0) else tuple(range(-x.ndim, 0))
    return tuple(normalize_axis(a, x.ndim) for a in listed)


@rule(*REDUCTIONS, static=(1,))
def _(call: NodeCall, x: Tensor, axes: Tensor | None = None) -> Tensor:
    found, name = _find_axes(call, x, axes), call.operator
    keepdims = bool(call.attr("keepdims"))
    if found is None:  # only the function of single elements applies
        found, keepdims = (), True
    if 0 in x.shape:
        return _fill(x, found, keepdims, EMPTY[name])
    if name == "ReduceLogSumExp" and not found:
        return x
    wide = cast(x, dtype=f64) if x.dtype.is_integer and name in FLOAT_ONLY else x
    out = REDUCTIONS[name](wide, axis=found, keepdims=keepdims) if found else _apply_to_elements(name, wide)
    return out if out.dtype == x.dtype else cast(out, dtype=x.dtype)


def _apply_to_elements(name: str, x: Tensor) -> Tensor:
    functions: dict[str, Callable[[Any], Tensor]] = {
        "ReduceL1": e.abs, "ReduceL2": e.abs, "ReduceSumSquare": lambda x: x * x, "ReduceLogSum": e.log,
    }  # fmt: skip
    return functions.get(name, lambda x: x)(x)


def _fill(x: Tensor, axes: tuple[int, ...], keepdims: bool, value: Any) -> Tensor:
    gone = [a % x.ndim for a in axes]
    shape = [1 if i in gone else n for i, n in enumerate(x.shape) if keepdims or i not in gone]
    held = np.asarray(value).astype(x.dtype.numpy)
    return broadcast_to(Tensor(held), shape=tuple(shape))


@rule("ReduceMax", "ReduceMin", static=(1,))
def _(call: NodeCall, x: Tensor, axes: Tensor | None = None) -> Tensor:
    found, keepdims = _find_axes(call, x, axes), bool(call.attr("keepdims"))
    if found is None:
        return x
    largest = call.operator == "ReduceMax"
    if 0 in x.shape:
        return _fill(x, found, keepdims, _find_identity(x, largest))
    if x.dtype.kind == "bool":
        return (r.any if largest else r.all)(x, axis=found, keepdims=keepdims)
    return (r.max if largest else r.min)(x, axis=found, keepdims=keepdims) if found else x


def _find_identity(x: Tensor, largest: bool) -> Any:
    """The identity of a maximum (or minimum): the lowest (or highest) value of the element type."""
    if x.dtype.kind == "bool":
        return not largest
    if x.dtype.is_float:
        return -math.inf if largest else math.inf
    limits = np.iinfo(x.dtype.numpy)
    return limits.min if largest else limits.max


@rule("ArgMax", "ArgMin")
def _(call: NodeCall, x: Tensor) -> Tensor:
    find = r.argmax if call.operator == "ArgMax" else r.argmin
    axis, keepdims = normalize_axis(call.attr("axis"), x.ndim), bool(call.attr("keepdims"))
    if not call.attr("select_last_index", 0):
        return find(x, axis=axis, keepdims=keepdims)
    return x.shape[axis] - 1 - find(flip(x, axis), axis=axis, keepdims=keepdims)


@rule("CumSum", "CumProd", static=(1,))
def _(call: NodeCall, x: Tensor, axis: Tensor) -> Tensor:
    along = normalize_axis(call.ints(axis, "the axis")[0], x.ndim)
    product = call.operator == "CumProd"
    x, before = (flip(x, along), x) if call.attr("reverse") else (x, x)
    out = (r.cumprod if product else r.cumsum)(x, axis=along)
    out = out if out.dtype == before.dtype else cast(out, dtype=before.dtype)
    if call.attr("exclusive"):
        first = _fill(narrow(out, along, 0, 1), (), True, 1 if product else 0)
        out = concatenate([first, narrow(out, along, 0, out.shape[along] - 1)], axis=along)
    return flip(out, along) if call.attr("reverse") else out


@rule("Softmax", "LogSoftmax", "Hardmax")
def _(call: NodeCall, x: Tensor) -> Tensor:
    functions: dict[str, Callable[..., Tensor]] = {
        "Softmax": nn.softmax,
        "LogSoftmax": nn.log_softmax,
        "Hardmax": _hardmax,
    }
    function, axis = functions[call.operator], call.attr("axis")
    if call.since >= 13:
        return function(x, axis=axis)
    at = axis + x.ndim if axis < 0 else axis
    rows = reshape(x, shape=(math.prod(x.shape[:at]), math.prod(x.shape[at:])))
    return reshape(function(rows, axis=-1), shape=x.shape)


def _hardmax(x: Tensor, axis: int) -> Tensor:
    first = r.argmax(x, axis=axis, keepdims=True)
    return cast(e.equal(iota(shape=x.shape, axis=axis), first), dtype=x.dtype)
