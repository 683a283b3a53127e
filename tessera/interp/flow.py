"""Control flow of whole tensors in the Graph interpreter: loops and branches in Python, on arrays or bounded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.ir.core import Node, Value
from tessera.numerics.bounded import certain
from tessera.op import Rules
from tessera.ops import checks
from tessera.ops import flow as ops

flow = Rules("graph control flow")


@flow(checks.line, checks.pause)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    return ()  # a place for a debugger to stop at


@flow(ops.scan)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    count, inputs = node.attrs["carry"], node.attrs["xs"]
    carry, xs, consts = list(args[:count]), args[count : count + inputs], args[count + inputs :]
    length = len(xs[0]) if xs else int(node.attrs["length"])
    order = range(length)
    slices: list[Any] = [None] * length
    for i in reversed(order) if node.attrs["reverse"] else order:
        outs = run(node.regions[0], *carry, *(x[i] for x in xs), *consts)
        carry, slices[i] = outs[:count], outs[count:]
    stacks = zip(*slices, strict=True) if length else [() for _ in node.results[count:]]
    return [*carry, *(_stack(s, v) for s, v in zip(stacks, node.results[count:], strict=True))]


def _stack(slices: Sequence[Any], value: Value) -> Any:
    if not slices:
        return np.zeros((0, *value.type.shape[1:]), value.type.dtype.numpy)  # type: ignore[arg-type]
    return np.stack(slices)


@flow(ops.cond)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    return run(node.regions[0 if certain(args[0]) else 1], *args[1:])


@flow(ops.while_loop)
def _(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
    count, end = node.attrs["carry"], node.attrs["carry"] + node.attrs["test"]
    test, body = node.regions
    carry, asked, consts = list(args[:count]), args[count:end], args[end:]
    while certain(run(test, *carry, *asked)[0]):
        carry = run(body, *carry, *consts)
    return carry
