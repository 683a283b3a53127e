"""Sequences and optionals: lists of tensors, which exist while a model is evaluated."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.onnx.rules.shape import reshape_value, take_range
from tessera.ops.tensor.shape import concatenate, stack


@rule("SequenceConstruct")
def _(call: NodeCall, *xs: Any) -> list[Any]:
    return list(xs)


@rule("SequenceEmpty")
def _(call: NodeCall) -> list[Any]:
    return []


def _place(call: NodeCall, items: list[Any], position: Any, most: int) -> int:
    index = call.ints(position, "the position")[0]
    if not -len(items) <= index <= most:
        raise call.fail(f"no place {index} in a sequence of {len(items)}")
    return index + len(items) if index < 0 else index


@rule("SequenceAt", static=(1,))
def _(call: NodeCall, items: list[Any], position: Tensor) -> Any:
    return items[_place(call, items, position, len(items) - 1)]


@rule("SequenceInsert", static=(2,))
def _(call: NodeCall, items: list[Any], x: Any, position: Tensor | None = None) -> list[Any]:
    at = len(items) if position is None else _place(call, items, position, len(items))
    return [*items[:at], x, *items[at:]]


@rule("SequenceErase", static=(1,))
def _(call: NodeCall, items: list[Any], position: Tensor | None = None) -> list[Any]:
    at = len(items) - 1 if position is None else _place(call, items, position, len(items) - 1)
    return [*items[:at], *items[at + 1 :]]


@rule("SequenceLength")
def _(call: NodeCall, items: list[Any]) -> Tensor:
    return Tensor(np.asarray(len(items), np.int64))


@rule("ConcatFromSequence")
def _(call: NodeCall, items: list[Any]) -> Any:
    axis = call.attr("axis")
    if items and isinstance(items[0], np.ndarray):
        return np.stack(items, axis) if call.attr("new_axis") else np.concatenate(items, axis)
    return stack(items, axis=axis) if call.attr("new_axis") else concatenate(list(items), axis=axis)


@rule("SplitToSequence", static=(1,))
def _(call: NodeCall, x: Any, split: Tensor | None = None) -> list[Any]:
    axis = call.attr("axis") % len(x.shape)
    size = x.shape[axis]
    keep = split is not None or bool(call.attr("keepdims"))
    if split is None:
        sizes = [1] * size
    elif split.ndim == 0:
        each = call.ints(split, "the size")[0]
        sizes = [min(each, size - i) for i in range(0, size, each)]
    else:
        sizes = call.ints(split, "the sizes")
    ends = np.cumsum(sizes)
    parts = [take_range(x, axis, int(b - n), int(b), 1) for n, b in zip(sizes, ends, strict=True)]
    return parts if keep else [reshape_value(p, (*p.shape[:axis], *p.shape[axis + 1 :])) for p in parts]


@rule("Optional", carried=True)
def _(call: NodeCall, x: Any = None) -> Any:
    return x


@rule("OptionalGetElement", carried=True)
def _(call: NodeCall, x: Any) -> Any:
    if x is None:
        raise call.fail("the optional is empty")
    return x


@rule("OptionalHasElement", carried=True)
def _(call: NodeCall, x: Any = None) -> Tensor:
    return Tensor(np.asarray(x is not None))
