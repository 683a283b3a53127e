"""Reductions of the Schedule level, tile after tile: begun, carried on, and rounded once at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.ir.core import Node
from tessera.numerics.convert import convert
from tessera.ops import schedule
from tessera.types import TensorType

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def more(nest: Any, node: Node, args: list[np.ndarray], total: Any) -> Any:
    """`total` (None before the first tile) with one more tile combined into it."""
    with np.errstate(all="ignore"):
        part = _part(nest, node, args)
        return part if total is None else _JOIN[_kind(node)](total, part)


def end(node: Node, total: Any) -> np.ndarray:
    """The result, rounded once."""
    dtype = node.out.type.dtype
    if total is None:
        return np.zeros((), dtype.numpy)
    return total[1] if _kind(node).startswith("arg") else convert(total, dtype)


def _kind(node: Node) -> str:
    return "sum" if node.op is schedule.contract else node.attrs["kind"]


def _part(nest: Any, node: Node, args: list[np.ndarray]) -> Any:
    type = node.args[0].type
    assert isinstance(type, TensorType)
    dim, wide = node.attrs["dim"], type.accumulate
    if node.op is schedule.contract:
        a, b = (convert(nest.level(x), wide) for x in args)
        return product(nest.spread(a, dim), b, dim)
    x = nest.spread(args[0], dim)
    kind = node.attrs["kind"]
    if kind.startswith("arg"):
        place = np.expand_dims(_ARG[kind](x, axis=dim), dim)
        return np.take_along_axis(x, place, dim), place + nest.spans[dim][0]
    return _WHOLE[kind](convert(x, wide) if kind == "sum" else x, axis=dim, keepdims=True)


_ARG: dict[str, Any] = {"argmax": np.argmax, "argmin": np.argmin}
_WHOLE: dict[str, Any] = {"sum": np.sum, "max": np.max, "min": np.min}


def product(a: np.ndarray, b: np.ndarray, dim: int) -> np.ndarray:
    """The sum of a times b along a dim; axes of size 1 stand for dims that are not there."""
    own = [[d for d, n in enumerate(x.shape) if n > 1 or (d == dim and x is a)] for x in (a, b)]
    kept = [d for d in range(a.ndim) if d != dim and (d in own[0] or d in own[1])]
    words = ["".join(LETTERS[d] for d in dims) for dims in (*own, kept)]
    left, right = (x.reshape([x.shape[d] for d in dims]) for x, dims in zip((a, b), own, strict=True))
    out = np.einsum(f"{words[0]},{words[1]}->{words[2]}", left, right, optimize=True)
    return out.reshape([max(a.shape[d], b.shape[d]) if d in kept else 1 for d in range(a.ndim)])


def _better(kind: str) -> Any:
    ahead = np.greater if kind == "argmax" else np.less

    def join(old: Any, new: Any) -> Any:
        (value, place), (other, there) = old, new
        take = ahead(other, value) | (np.not_equal(other, other) & np.equal(value, value))
        return np.where(take, other, value), np.where(take, there, place)

    return join


_JOIN: dict[str, Any] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "argmax": _better("argmax"),
    "argmin": _better("argmin"),
}
