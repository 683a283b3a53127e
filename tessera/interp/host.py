"""The walk over a program's entry: buffers in a workspace, views of them, launches in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, DTypeError, ShapeError
from tessera.evaluate import evaluate
from tessera.ir.core import Function, Node, Value
from tessera.op import Rules
from tessera.ops import host
from tessera.types import RefType, Type

# launch(node, operands) runs one kernel: a host.launch, or a schedule.kernel.
Launch = Callable[[Node, list[Any]], None]

meaning_of = Rules("host")


class Workspace:
    """The memory that planned buffers share.

    With `lift` (bound mode) each buffer is lifted and lies apart: planned or not makes no difference to its values.
    """

    def __init__(self, size: int, lift: Callable[[np.ndarray], Any] | None) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.lift = lift

    def buffer(self, type: RefType, offset: int) -> Any:
        """The buffer at a byte offset; memory of its own where the plan gives none."""
        shape = tuple(int(s) for s in type.shape)
        if self.lift is not None:
            return self.lift(np.zeros(shape, type.dtype.numpy))
        if offset < 0:
            return np.zeros(shape, type.dtype.numpy)
        size = math.prod(shape) * type.dtype.numpy.itemsize
        return self.bytes[offset : offset + size].view(type.dtype.numpy).reshape(shape)


def run(
    function: Function, arrays: Sequence[Any], launch: Launch, lift: Callable[[np.ndarray], Any] | None = None
) -> list[Any]:
    """Run an entry function; its last `attrs["outputs"]` parameters are made here and handed back.

    `lift` makes of each array what the launches want instead (in bound mode, a Bounded).
    """
    outputs = int(function.attrs.get("outputs", 0))
    inputs = function.params[: len(function.params) - outputs]
    if lift is None:
        check(inputs, arrays)
    workspace = Workspace(int(function.attrs.get("workspace", 0)), lift)
    made = [workspace.buffer(_ref(p.type), -1) for p in function.params[len(inputs) :]]

    def meaning(node: Node, args: list[Any], run: Any) -> tuple[Any, ...]:
        rule = meaning_of.get(node.op)
        if rule is not None:
            return rule(node, args, workspace)
        launch(node, args)
        return ()

    evaluate(function.body, [*arrays, *made], meaning)
    return made


def _ref(type: Type) -> RefType:
    assert isinstance(type, RefType), "an output is a ref"
    return type


def check(params: Sequence[Value], arrays: Sequence[Any]) -> None:
    """Refuse arrays that are not what the parameters say."""
    if len(params) != len(arrays):
        raise ArgumentError(f"{len(params)} arguments are needed, {len(arrays)} came")
    for number, (param, array) in enumerate(zip(params, arrays, strict=True)):
        name = param.hint or str(number)
        if tuple(param.type.shape) != np.shape(array):
            raise ShapeError(f"argument {name} has another shape", expected=str(param.type), received=np.shape(array))
        if np.asarray(array).dtype != param.type.dtype.numpy:
            raise DTypeError(
                f"argument {name} has another element type", expected=str(param.type), received=np.asarray(array).dtype
            )


@meaning_of(host.alloc)
def _(node, args, workspace):
    return (workspace.buffer(node.out.type, node.attrs["offset"]),)


@meaning_of(host.view)
def _(node, args, workspace):
    return (args[0].reshape(node.attrs["shape"]),)
