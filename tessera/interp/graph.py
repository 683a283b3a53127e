"""The Graph interpreter: op by op on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.errors import ShapeError
from tessera.evaluate import evaluate
from tessera.interp.checked.observe import is_watched, watched
from tessera.interp.flow import flow
from tessera.interp.heap import keep_pages
from tessera.ir.core import Function, Node
from tessera.shapes import bind_all, symbols
from tessera.types import TensorType, Type


def run(function: Function, arrays: Sequence[Any]) -> list[np.ndarray]:
    """The results of a Graph function on arrays; symbolic sizes are bound by the arrays' shapes.

    Raises:
        ShapeError: an array does not have the shape its parameter says.
    """
    keep_pages()
    sizes = sizes_of(function, arrays)

    def meaning(node: Node, args: list[Any], run: Any) -> tuple[Any, ...]:
        if node.op in flow:
            return flow.of(node.op)(node, args, run)
        types = tuple(_concrete(t, sizes) for t in node.types)
        results = tuple(_concrete(t, sizes) for t in node.result_types)
        return node.op.execute(types, results, _bound(node, sizes), args)

    if not is_watched(function.body):
        return [np.asarray(a) for a in evaluate(function.body, arrays, meaning)]
    with watched(meaning, function, arrays) as seen:
        return [np.asarray(a) for a in evaluate(function.body, arrays, seen)]


def sizes_of(function: Function, arrays: Sequence[Any]) -> dict[str, int]:
    """The sizes of the names in a function's parameters, as the arrays have them."""
    sizes: dict[str, Any] = {}
    pairs = [(p.type.shape, np.shape(a)) for p, a in zip(function.params, arrays, strict=True)]
    if misfit := bind_all(pairs, sizes):
        name = function.params[misfit.number].hint or misfit.number
        raise ShapeError(f"argument {name}: {misfit.problem}", location=function.loc)
    return sizes


def _concrete(type: Type, sizes: dict[str, int]) -> Type:
    return type.evaluate(sizes) if sizes else type


def _bound(node: Node, sizes: dict[str, int]) -> Any:
    """The attributes with symbolic sizes replaced."""
    if not sizes or not any(isinstance(v, tuple) and symbols(v) for v in node.attrs.values()):
        return node.attrs
    scratch = {k: TensorType(v, node.results[0].type.dtype) for k, v in node.attrs.items() if isinstance(v, tuple)}
    return {**node.attrs, **{k: t.evaluate(sizes).shape for k, t in scratch.items()}}
