"""Host interpreter: evaluates a program's entry: planned buffers in one workspace, views, and launches in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, AsyncCopyError, DTypeError, ShapeError, UnsupportedOpError
from tessera.core.types import RefType, TensorType, Type
from tessera.ir.builder import evaluate_block
from tessera.ir.core import Function, Node, Value
from tessera.ir.numerics.interval_arithmetic import require_exact
from tessera.ir.rules import REGISTRY, Rules
from tessera.ops.dialects import host

POISON = 0xFF
# The largest size to which glibc raises its mmap threshold (DEFAULT_MMAP_THRESHOLD_MAX), less its header.
HEAP_BLOCK_BYTES = (1 << 25) - (1 << 16)


@lru_cache(maxsize=1)
def keep_heap_pages() -> None:
    """Free one large block once: later blocks up to its size then come from the heap and stay there.

    glibc maps blocks beyond a threshold on each allocation, and every page then faults: three to four
    times the cost of the arithmetic. The threshold follows the largest block freed so far. The block is never
    touched, so it takes no memory; other allocators do nothing of the kind and lose nothing.
    """
    np.empty(HEAP_BLOCK_BYTES, np.uint8)


# launch(node, operands) runs one kernel: a host.launch, or a schedule.kernel.
LaunchFunction = Callable[[Node, list[Any]], None]

host_rules = Rules("host")
# rule(node, operands, walk) runs the regions of a node.
host_control_flow_rules = Rules("host control flow")


@dataclass(eq=False)
class StartedCall:
    """A collective between its start and its wait: copies of its operands, and the results that nobody may see yet."""

    arrays: Sequence[np.ndarray]
    operands: list[np.ndarray]
    results: list[np.ndarray]


class BufferWorkspace:
    """The memory that planned buffers share.

    With `lift` (bound mode) each buffer is lifted and lies apart: planned or not makes no difference to its values.
    """

    def __init__(self, size: int, lift: Callable[[np.ndarray], Any] | None, wrote: Callable[[Any], None]) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.lift = lift
        self.wrote = wrote
        self.started: list[StartedCall] = []

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
    function: Function, arrays: Sequence[Any], launch: LaunchFunction, lift: Callable[[np.ndarray], Any] | None = None,
    wrote: Callable[[Any], None] = lambda array: None,
) -> list[Any]:  # fmt: skip
    """Run an entry function; allocate and return its last `attrs["outputs"]` parameters.

    `lift` makes of each array what the launches want instead (in bound mode, a Bounded); `wrote` hears of arrays
    that the host itself has written.
    """
    outputs = int(function.attrs.get("outputs", 0))
    inputs = function.params[: len(function.params) - outputs]
    if lift is None:
        check_arguments(inputs, arrays)
    workspace = BufferWorkspace(int(function.attrs.get("workspace", 0)), lift, wrote)
    made = [workspace.buffer(_ref_type(p.type), -1) for p in function.params[len(inputs) :]]

    def meaning(node: Node, args: list[Any], run: Any) -> tuple[Any, ...]:
        if node.op in host_control_flow_rules:
            host_control_flow_rules.of(node.op)(node, args, run)
            return ()
        rule = host_rules.get(node.op)
        if rule is not None:
            return rule(node, args, workspace)
        launch(node, args)
        return ()

    evaluate_block(function.body, [*arrays, *made], meaning)
    return made


def _ref_type(type: Type) -> RefType:
    assert isinstance(type, RefType), "an output is a ref"
    return type


def check_arguments(params: Sequence[Value], arrays: Sequence[Any]) -> None:
    """Check arrays against the types of the parameters."""
    if len(params) != len(arrays):
        raise ArgumentError(f"{len(params)} arguments are expected, {len(arrays)} received")
    for number, (param, array) in enumerate(zip(params, arrays, strict=True)):
        name = param.hint or str(number)
        if tuple(param.type.shape) != np.shape(array):
            raise ShapeError(f"argument {name} has another shape", expected=str(param.type), received=np.shape(array))
        if np.asarray(array).dtype != param.type.dtype.numpy:
            raise DTypeError(
                f"argument {name} has another element type", expected=str(param.type), received=np.asarray(array).dtype
            )


@host_rules(host.alloc)
def _(node, args, workspace):
    return (workspace.buffer(node.out.type, node.attrs["offset"]),)


@host_rules(host.view)
def _(node, args, workspace):
    return (args[0].reshape(node.attrs["shape"]),)


@host_rules(host.call)
def _(node, args, workspace):
    if workspace.lift is not None:
        raise UnsupportedOpError(f"{node.attrs['op']} runs on the host: its error is not bounded", location=node.loc)
    call_op(node.attrs["op"], node.attrs["operands"], node.attrs["attrs"], [v.type for v in node.args], args)
    for array in args[node.attrs["operands"] :]:
        workspace.wrote(array)
    return ()


@host_rules(host.start)
def _(node, args, workspace):
    """The result is known at once, but lies apart until the wait: what reads it too early finds poison."""
    if workspace.lift is not None:
        raise UnsupportedOpError(f"{node.attrs['op']} runs on the host: its error is not bounded", location=node.loc)
    count = node.attrs["operands"]
    results = [np.empty_like(a) for a in args[count:]]
    call_op(node.attrs["op"], count, node.attrs["attrs"], [v.type for v in node.args], [*args[:count], *results])
    workspace.started.append(StartedCall(args, [np.array(a) for a in args[:count]], results))
    for array in args[count:]:
        _poison(array)
    return ()


@host_rules(host.wait)
def _(node, args, workspace):
    call = next(c for c in workspace.started if _find_addresses(c.arrays) == _find_addresses(args))
    workspace.started.remove(call)
    count = len(call.operands)
    if any(a.tobytes() != before.tobytes() for a, before in zip(args, call.operands, strict=False)):
        raise AsyncCopyError(
            "the operand of a collective is overwritten before its wait", location=node.loc,
            expected="a write after the wait",
        )  # fmt: skip
    for array, result in zip(args[count:], call.results, strict=True):
        array[...] = result
        workspace.wrote(array)
    return ()


def _find_addresses(arrays: Sequence[np.ndarray]) -> list[int]:
    return [a.ctypes.data for a in arrays]


def _poison(array: np.ndarray) -> None:
    """Fill memory with what is a NaN in every float format."""
    array.reshape(-1).view(np.uint8)[...] = POISON


def call_op(op: str, operands: int, attrs: Mapping[str, Any], types: Sequence[Type], arrays: Sequence[Any]) -> None:
    """Run a tensor op: it reads the first memories and writes the rest."""
    tensors = tuple(TensorType(t.shape, t.dtype, t.policy) for t in types)  # type: ignore[union-attr]
    found = REGISTRY[op].execute(tensors[:operands], tensors[operands:], attrs, list(arrays[:operands]))
    for target, result in zip(arrays[operands:], found, strict=True):
        target[...] = result


@host_rules(host.at)
def _(node, args, workspace):
    index = int(require_exact(args[1]))
    # A slice of length 1, then a reshape: indexing a scalar would copy.
    return (args[0][index : index + 1].reshape(node.out.type.shape),)


@host_control_flow_rules(host.loop)
def _(node, args, walk):
    index, step = node.attrs["first"], node.attrs["step"]
    for i in range(node.attrs["count"]):
        walk(node.regions[0], np.int64(index + i * step))


@host_control_flow_rules(host.while_)
def _(node, args, walk):
    walk(node.regions[0])
    while require_exact(args[0]):
        walk(node.regions[1])
        walk(node.regions[0])


@host_control_flow_rules(host.if_)
def _(node, args, walk):
    walk(node.regions[0 if require_exact(args[0]) else 1])
