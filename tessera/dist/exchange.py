"""Collective semantics: what each rank of a group receives, by NumPy on the tensors of all its ranks in order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.types import as_dtype
from tessera.ir.numerics.conversion import convert

Arrays = list[np.ndarray]
# The NumPy function of a reduction of two arrays.
REDUCERS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def widen(x: np.ndarray) -> np.ndarray:
    """An array in the element type that its reduction computes in: f32 for narrower floats."""
    dtype = as_dtype(x.dtype)
    return x.astype(np.float32) if dtype.is_float and x.dtype.itemsize < 4 else x


def narrow(total: np.ndarray, kind: str, count: int, dtype: np.dtype) -> np.ndarray:
    """A reduction rounded to the element type of its operands; a mean is divided by their number first."""
    if kind == "mean":
        total = total / total.dtype.type(count)
    return total if total.dtype == dtype else convert(total, as_dtype(dtype))


def reduce_arrays(kind: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The reduction of arrays from the first to the last, in f32 or wider."""
    with np.errstate(all="ignore"):
        total = functools.reduce(REDUCERS[kind], [widen(a) for a in arrays])
        return narrow(np.asarray(total), kind, len(arrays), arrays[0].dtype)


# rule(arrays, members, attrs) gives the result of each member; `arrays` are in the order of `members`.
_RULES: dict[str, Callable[[Arrays, Sequence[int], Mapping[str, Any]], Arrays]] = {}


def combine(kind: str, arrays: Arrays, members: Sequence[int], attrs: Mapping[str, Any]) -> Arrays:
    """The result of a collective for each member of a group."""
    return [np.array(a, copy=True, order="C") for a in _RULES[kind](arrays, members, attrs)]


def _rule(name: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        _RULES[name] = function
        return function

    return add


@_rule("all_reduce")
def _(arrays, members, attrs):
    return [reduce_arrays(attrs["kind"], arrays)] * len(arrays)


@_rule("reduce_scatter")
def _(arrays, members, attrs):
    return np.split(reduce_arrays(attrs["kind"], arrays), len(arrays), attrs["axis"])


@_rule("reduce_to")
def _(arrays, members, attrs):
    total = reduce_arrays("sum", arrays)
    return [total if i == attrs["root"] else np.zeros_like(total) for i in range(len(arrays))]


@_rule("broadcast_from")
def _(arrays, members, attrs):
    return [arrays[attrs["root"]]] * len(arrays)


@_rule("all_gather")
def _(arrays, members, attrs):
    return [np.concatenate(arrays, attrs["axis"])] * len(arrays)


@_rule("scatter_from")
def _(arrays, members, attrs):
    return np.split(arrays[attrs["root"]], len(arrays), attrs["axis"])


@_rule("gather_to")
def _(arrays, members, attrs):
    whole = np.concatenate(arrays, attrs["axis"])
    return [whole if i == attrs["root"] else np.zeros_like(whole) for i in range(len(arrays))]


@_rule("all_to_all")
def _(arrays, members, attrs):
    parts = [np.split(a, len(arrays), attrs["split"]) for a in arrays]
    return [np.concatenate([p[i] for p in parts], attrs["join"]) for i in range(len(arrays))]


@_rule("collective_permute")
def _(arrays, members, attrs):
    sources = {there: here for here, there in attrs["pairs"]}
    by_rank = dict(zip(members, arrays, strict=True))
    return [by_rank[sources[m]] if m in sources else np.zeros_like(by_rank[m]) for m in members]
