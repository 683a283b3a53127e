"""Kernel trace: the specialisation being traced, its grid and constants, and how tile functions record ops."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, UnsupportedSyntaxError, user_location
from tessera.core.symbolic_dim import Dim, Size
from tessera.core.types import DType, bool_, f32, int64
from tessera.ir.builder import Builder
from tessera.ir.core import Value
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast, dim_value, full
from tessera.ops.tensor.shape import reshape

Index = int | Dim | Tensor


class KernelBuilder(Builder):
    """A builder that takes no arrays from outside: a kernel sees only its arguments."""

    def capture(self, array: np.ndarray | DeviceArray, owner: Any = None) -> Value:
        """A truth known while compiling as a constant; any other array is refused."""
        if isinstance(array, np.ndarray) and array.dtype == bool and not array.ndim:
            return self.add(full, [], {"shape": (), "value": bool(array), "dtype": bool_}).out
        raise UnsupportedSyntaxError(
            "an array from outside is used in a kernel",
            received=f"an array of shape {array.shape}",
            suggestion="pass it as an argument",
        )


@dataclass
class TraceState:
    """One specialisation of a kernel under way.

    `axes` names the dim that each grid axis walks over; `uncommitted` says whether copies were begun
    that no commit has followed; `guards` are the outer names that were read, with what they held;
    `frame` is the call being read; `pauses` says whether the kernel stops in the debugger somewhere.
    """

    builder: Builder
    grid: tuple[Size, ...] = (1,)
    group: int = 1
    axes: tuple[str, ...] = ()
    tile_shape: tuple[int, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    uncommitted: bool = False
    guards: list[tuple[Any, str, Any]] = field(default_factory=list)
    depth: int = 0
    frame: Any = None
    pauses: bool = False
    learned: dict[Any, Any] = field(default_factory=dict)
    frozen_containers: dict[int, Any] = field(
        default_factory=dict
    )  # by identity: lists that may not change here (scope.py)
    memory_sums: dict[int, Any] = field(default_factory=dict)  # by identity of a sum's value: the tensor it begins with


CURRENT_TRACE: ContextVar[TraceState | None] = ContextVar("kernel trace", default=None)


def current_trace(what: str = "a tile function") -> TraceState:
    """The kernel being traced.

    Raises:
        UnsupportedSyntaxError: there is none.
    """
    trace = CURRENT_TRACE.get()
    if trace is None:
        raise UnsupportedSyntaxError(
            f"{what} has a meaning only inside a kernel", location=user_location(),
            suggestion="call it in a function under @ts.kernel",
        )  # fmt: skip
    return trace


def emit_op(op: Op, operands: list[Any], **attrs: Any) -> Any:
    """Record an op of the tile dialect; its result as a Tensor (a Value where it is a ref), or None."""
    values = [x if isinstance(x, Value) else x.data for x in operands]
    node = current_trace(op.__name__).builder.add(op, values, op.complete(attrs))
    results = [v if not hasattr(v.type, "compute") else Tensor(v) for v in node.results]
    return results[0] if results else None


def as_index(index: Index) -> Tensor:
    """An index as an int64 scalar; a symbolic size is its value at run time."""
    if isinstance(index, Dim):
        return dim_value(size=index)
    if not isinstance(index, Tensor):
        return full(shape=(), value=index, dtype=int64)
    return index if index.dtype == int64 else cast(index, dtype=int64)


def as_value(x: Any) -> Tensor:
    """A number or block as a Tensor: whole numbers as int64, others as f32.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Dim):
        return dim_value(size=x)
    if not is_number(x):
        raise ArgumentError("this is not a value of the kernel", expected="a number or block", received=repr(x))
    kinds: dict[type, DType] = {bool: bool_, int: int64, float: f32}
    return full(shape=(), value=x, dtype=kinds[type(x)])


def value_sizes(left: Any, right: Any, divides: bool) -> tuple[Any, Any]:
    """Operands whose result is no size, as `1.0 / x.shape[0]`: a symbolic size is then its value at run time."""
    if divides or isinstance(left, float) or isinstance(right, float):
        left, right = (as_value(x) if isinstance(x, Dim) else x for x in (left, right))
    return left, right


def add_indices(a: Index, b: Index) -> Index:
    """The sum of two indices; nothing is recorded where one is 0."""
    if isinstance(a, int) and a == 0:
        return b
    return a if isinstance(b, int) and b == 0 else a + b  # type: ignore[operator]


def reshape_to(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor reshaped, where it has another shape."""
    return tensor if tensor.shape == shape else reshape(tensor, shape=shape)


def is_number(value: Any) -> bool:
    """Whether this is a Python number (or bool)."""
    return isinstance(value, (bool, int, float))


def normalise_constant(value: Any) -> Any:
    """A value from outside the kernel; NumPy's scalars are numbers as Python's are."""
    number = value.item() if isinstance(value, np.generic) else None
    return number if is_number(number) else value


def is_traced(value: Any) -> bool:
    """Whether this stands for a value that exists only when the kernel runs."""
    return isinstance(value, Tensor) and value.is_traced
