"""Kernel routine: a function on arrays that checks its arguments, launches a kernel and accepts a schedule."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.core.device import find_generator_name
from tessera.core.errors import DTypeError, ShapeError, library_caller_location
from tessera.core.schedule import Schedule
from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, TensorType, as_dtype, f32, f64
from tessera.frontend.jit.tracing import TRACE_DEVICE
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.kernel_function import Kernel
from tessera.frontend.kernel.signature import make_writable
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor
from tessera.ops.api.creation import zeros


class Routine:
    """A function whose first parameter is its kernel: calls leave it out, and `with_schedule` changes it.

    It takes and returns arrays; if one of the arguments is a Tensor, it returns Tensors. In a traced function
    (`ts.jit`, `ts.grad`, `ts.vmap`) its launches are part of the program, with derivatives from the kernel.
    """

    def __init__(self, function: Callable[..., Any], kernel: Kernel) -> None:
        functools.update_wrapper(self, function)
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.function = function
        self.kernel = kernel

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The result of the function."""
        with_tensors = CURRENT_BUILDER.get() is not None or any(isinstance(a, Tensor) for a in (*args, *named.values()))
        found = self.function(self.kernel, *args, **named)
        return _map_results(_as_tensor if with_tensors else _as_array, found)

    @property
    def schedule(self) -> Schedule:
        """The schedule of this routine; an empty one means the kernel's own defaults."""
        return self.kernel.schedule

    def with_schedule(self, schedule: Schedule) -> Routine:
        """The same routine with other block sizes, warps and stages for its kernel (see tessera/core/schedule.py)."""
        return Routine(self.function, self.kernel.with_schedule(schedule))

    def __repr__(self) -> str:
        return f"<routine {self.function.__name__}>"


def _map_results(change: Callable[[Any], Any], found: Any) -> Any:
    return tuple(_map_results(change, f) for f in found) if isinstance(found, tuple) else change(found)


def _as_tensor(found: Any) -> Any:
    return Tensor(np.asarray(found)) if isinstance(found, (np.ndarray, np.generic)) else found


def _as_array(found: Any) -> Any:
    return found.numpy() if isinstance(found, Tensor) else found


def routine(kernel: Kernel) -> Callable[[Callable[..., Any]], Routine]:
    """Make a Routine of a function whose first parameter will be `kernel`."""
    return lambda function: Routine(function, kernel)


def compute(kernel: Kernel, grid: Any, shape: Sequence[Size], dtype: Any, *args: Any, **constants: Any) -> Any:
    """The memory of this shape and type that a launch writes as its parameter `out`; zeros where it has no elements."""
    if 0 in shape:
        return zeros(tuple(shape), dtype=as_dtype(dtype))
    return launch(kernel, grid, *args, out=OutputMemory(TensorType(tuple(shape), as_dtype(dtype))), **constants)


def is_for_gpu() -> bool:
    """Whether the function that is traced now will run on a GPU of NVIDIA: kernels of another shape pay there."""
    device = TRACE_DEVICE.get()
    return device is not None and find_generator_name(device) == "ptx"


def is_recorded(x: Any) -> bool:
    """Whether an argument is a value of a program being traced, or one that a tape records."""
    return isinstance(x, Tensor) and (x.is_traced or x.requires_grad)


def check_array(x: Any, name: str, kind: str = "fV") -> Any:
    """An argument as an array of rank 1 or more; a value of a program being traced stays a Tensor.

    Raises:
        DTypeError: its elements are not of a `kind` that the routine takes ("f" floats, "i" integers).
    """
    held = x if is_recorded(x) else make_writable(x) if isinstance(x, Tensor) else np.asarray(x)
    element = as_dtype(held.dtype)
    if (element.is_float and "f" not in kind) or (not element.is_float and "i" not in kind):
        expected = " or ".join(w for k, w in (("f", "a float type"), ("i", "an integer type")) if k in kind)
        raise DTypeError(
            f"argument `{name}` holds {element}",
            location=library_caller_location(),
            expected=expected,
            received=element,
        )
    return held


def check_same_dtype(**arrays: Any) -> None:
    """Refuse arrays of more than one element type.

    Raises:
        DTypeError: two differ; it names both.
    """
    held = {name: as_dtype(each.dtype) for name, each in arrays.items() if each is not None}
    first = next(iter(held))
    for name, dtype in held.items():
        if dtype != held[first]:
            raise DTypeError(
                f"`{name}` and `{first}` hold different types", location=library_caller_location(),
                expected=str(held[first]), received=str(dtype),
                suggestion=f"{name}.astype({first}.dtype)",
            )  # fmt: skip


def check_shape(x: Any, name: str, shape: Sequence[int]) -> None:
    """Refuse an array of another shape.

    Raises:
        ShapeError: it is not `shape`.
    """
    if x is not None and x.shape != tuple(shape):
        raise ShapeError(
            f"argument `{name}` does not fit",
            location=library_caller_location(),
            expected=tuple(shape),
            received=x.shape,
        )


def flatten_rows(x: Any) -> Any:
    """An array as a matrix whose rows are its last axis."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim else x.reshape(1, 1)


def compute_dtype(dtype: DType) -> DType:
    """The type to compute in: f64 for f64, else f32."""
    return f64 if dtype == f64 else f32
