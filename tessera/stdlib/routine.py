"""Kernel routine: a function on arrays that checks its arguments, launches a kernel and accepts a schedule."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import DTypeError, ShapeError, TraceError, library_caller_location
from tessera.core.schedule import Schedule
from tessera.core.types import DType, as_dtype, f32, f64
from tessera.frontend.kernel.kernel_function import Kernel
from tessera.frontend.kernel.signature import make_writable
from tessera.ir.tensor import Tensor


class Routine:
    """A function whose first parameter is its kernel: calls leave it out, and `with_schedule` changes it.

    It takes and returns arrays; if one of the arguments is a Tensor, it returns Tensors. A call runs at once on the
    default device (`ts.set_default_device`): `@ts.jit` does not trace it.
    """

    def __init__(self, function: Callable[..., Any], kernel: Kernel) -> None:
        functools.update_wrapper(self, function)
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        self.function = function
        self.kernel = kernel

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The result of the function.

        Raises:
            TraceError: an argument is a value of a program being traced.
        """
        tensors = [a for a in (*args, *named.values()) if isinstance(a, Tensor)]
        if any(t.is_traced for t in tensors):
            raise TraceError(
                f"stdlib.{self.function.__name__} was called with a value of a program being traced",
                location=library_caller_location(), expected="elements: it launches a kernel when it is called",
                suggestion="call it outside of @ts.jit, or use the ts. operation there: ts.softmax, ts.layer_norm, …",
            )  # fmt: skip
        found = self.function(self.kernel, *args, **named)
        return _as_tensors(found) if tensors else found

    @property
    def schedule(self) -> Schedule:
        """The schedule of this routine; an empty one means the kernel's own defaults."""
        return self.kernel.schedule

    def with_schedule(self, schedule: Schedule) -> Routine:
        """The same routine with other block sizes, warps and stages for its kernel (see tessera/core/schedule.py)."""
        return Routine(self.function, self.kernel.with_schedule(schedule))

    def __repr__(self) -> str:
        return f"<routine {self.function.__name__}>"


def _as_tensors(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(_as_tensors(f) for f in found)
    return Tensor(np.asarray(found)) if isinstance(found, (np.ndarray, np.generic)) else found


def routine(kernel: Kernel) -> Callable[[Callable[..., Any]], Routine]:
    """Make a Routine of a function whose first parameter will be `kernel`."""
    return lambda function: Routine(function, kernel)


def check_array(x: Any, name: str, kind: str = "fV") -> np.ndarray:
    """An argument as an array of rank 1 or more.

    Raises:
        DTypeError: its elements are not of a `kind` that the routine takes ("f" floats, "i" integers).
    """
    held = make_writable(x) if isinstance(x, Tensor) else np.asarray(x)
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


def check_same_dtype(**arrays: np.ndarray | None) -> None:
    """Refuse arrays of more than one element type.

    Raises:
        DTypeError: two differ; it names both.
    """
    held = {name: each.dtype for name, each in arrays.items() if each is not None}
    first = next(iter(held))
    for name, dtype in held.items():
        if dtype != held[first]:
            raise DTypeError(
                f"`{name}` and `{first}` hold different types", location=library_caller_location(),
                expected=str(as_dtype(held[first])), received=str(as_dtype(dtype)),
                suggestion=f"{name}.astype({first}.dtype)",
            )  # fmt: skip


def check_shape(x: np.ndarray | None, name: str, shape: Sequence[int]) -> None:
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


def flatten_rows(x: np.ndarray) -> np.ndarray:
    """An array as a matrix whose rows are its last axis."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim else x.reshape(1, 1)


def ceil_div(size: int, block: int) -> int:
    """The number of blocks that cover a size."""
    return -(-size // block)


def compute_dtype(dtype: DType) -> DType:
    """The type to compute in: f64 for f64, else f32."""
    return f64 if dtype == f64 else f32
