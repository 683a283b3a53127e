"""Creation functions: constants, ranges, the identity, and tensors from data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.device import check_device
from tessera.core.errors import ArgumentError, user_location
from tessera.core.symbolic_dim import Dim, Size, ceil_divide
from tessera.core.types import DType, as_dtype, f32, f64, find_policy, int64
from tessera.ir.array_interchange import import_dlpack, is_on_device
from tessera.ir.tensor import Tensor, as_tensor, move
from tessera.ops.tensor import basic
from tessera.ops.tensor.argument_checks import check_arguments, collect_sizes
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import equal, where
from tessera.ops.tensor.shape import iota

ShapeLike = Any


@check_arguments
@collect_sizes
def zeros(shape: ShapeLike, dtype: DType | None = f32, device: str | None = None) -> Tensor:
    """A tensor of `shape` filled with zeros.

    The sizes may also be arguments of their own: `zeros(2, 3)`.

    >>> zeros((2, 3)).shape, zeros(2, 3, dtype="f16").shape
    ((2, 3), (2, 3))
    """
    return _fill_shape(shape, 0, dtype, device)


@check_arguments
@collect_sizes
def ones(shape: ShapeLike, dtype: DType | None = f32, device: str | None = None) -> Tensor:
    """A tensor of `shape` filled with ones.

    >>> ones(2, 2)
    Tensor([[1., 1.],
            [1., 1.]], f32)
    """
    return _fill_shape(shape, 1, dtype, device)


@check_arguments
@collect_sizes
def empty(shape: ShapeLike, dtype: DType | None = f32, device: str | None = None) -> Tensor:
    """A tensor of `shape` with unspecified elements; they are zeros, so that programs are reproducible."""
    return _fill_shape(shape, 0, dtype, device)


def _fill_shape(shape: ShapeLike, value: Any, dtype: DType | None, device: str | None) -> Tensor:
    if device is not None:
        check_device(device)
    policy = find_policy(dtype)
    if policy is None or not policy.clauses():
        return move(basic.full(shape=shape, value=value, dtype=f32 if dtype is None else as_dtype(dtype)), device)
    return move(basic.fill_by_policy(shape, value, policy), device)


@check_arguments
@collect_sizes
def full(
    shape: ShapeLike, fill_value: Any = None, dtype: DType | None = f32, device: str | None = None, *, value: Any = None
) -> Tensor:
    """A tensor of `shape` with every element `fill_value` (also accepted as `value`, the attribute of the op).

    Of more than two numbers the last one is the value, unless it is passed by name.

    >>> full((2,), 7.0), full(1, 2, 7.0)
    (Tensor([7., 7.], f32), Tensor([[7., 7.]], f32))
    """
    if (fill_value is None) == (value is None):
        raise ArgumentError("full takes one value", location=user_location(), expected="full(shape, fill_value)")
    return _fill_shape(shape, value if fill_value is None else fill_value, dtype, device)


@check_arguments
def zeros_like(x: Any, dtype: DType | None = None, device: str | None = None) -> Tensor:
    """Zeros with the shape of `x`, and its element type and policy unless `dtype` is given."""
    return full_like(x, 0, dtype, device)


@check_arguments
def ones_like(x: Any, dtype: DType | None = None, device: str | None = None) -> Tensor:
    """Ones with the shape of `x`, and its element type and policy unless `dtype` is given."""
    return full_like(x, 1, dtype, device)


@check_arguments
def empty_like(x: Any, dtype: DType | None = None, device: str | None = None) -> Tensor:
    """As `zeros_like`, with unspecified elements."""
    return full_like(x, 0, dtype, device)


@check_arguments
def full_like(x: Any, fill_value: Any, dtype: DType | None = None, device: str | None = None) -> Tensor:
    """`fill_value` everywhere with the shape of `x`, and its element type and policy unless `dtype` is given.

    >>> full_like(Tensor([1, 2]), 7)
    Tensor([7, 7], int64)
    """
    x = as_tensor(x)
    return _fill_shape(x.shape, fill_value, (x.type.policy or x.dtype) if dtype is None else dtype, device)


@check_arguments
def arange(
    start: float, end: float | None = None, step: float = 1, dtype: DType | None = None, device: str | None = None
) -> Tensor:
    """`start`, `start + step`, … before `end`; with one argument, from 0.

    The elements are int64 where all three are ints, else f32, unless `dtype` says otherwise; each is computed in
    f64 from its index and rounded once.

    >>> arange(3), arange(1, 2, 0.25)
    (Tensor([0, 1, 2], int64), Tensor([1.  , 1.25, 1.5 , 1.75], f32))

    Raises:
        ArgumentError: `step` is 0.
    """
    if device is not None:
        check_device(device)
    low, high = (0, start) if end is None else (start, end)
    if step == 0:
        raise ArgumentError("arange with step 0", location=user_location(), expected="a step above or below 0")
    whole = all(isinstance(v, (int, Dim)) for v in (low, high, step))
    element = as_dtype(dtype) if dtype is not None else int64 if whole else f32
    if isinstance(step, int) and (isinstance(low, Dim) or isinstance(high, Dim)):
        length: Size = ceil_divide(high - low, step) if step > 0 else ceil_divide(low - high, -step)
        length = length if length >= 0 else 0
    else:
        length = max(0, int(-(-(high - low) // step) if whole else math.ceil((high - low) / step)))
    return move(_make_ramp(length, low, step, element, int64 if whole else f64), device)


def _make_ramp(length: Size, low: float, step: float, element: DType, through: DType) -> Tensor:
    if (low, step) == (0, 1):
        return iota(shape=(length,), dtype=element)
    return cast(iota(shape=(length,), dtype=through) * step + low, dtype=element)


@check_arguments
def linspace(
    start: float, end: float, steps: int, dtype: DType | None = f32, device: str | None = None, endpoint: bool = True
) -> Tensor:
    """`steps` values at equal distances from `start` to `end`, which is the last one unless `endpoint` is False.

    >>> linspace(0, 1, 5)
    Tensor([0.  , 0.25, 0.5 , 0.75, 1.  ], f32)
    """
    if device is not None:
        check_device(device)
    if steps < 0:
        raise ArgumentError(f"linspace of {steps} values", location=user_location(), expected="a count ≥ 0")
    gaps = max(steps - 1 if endpoint else steps, 1)
    index = iota(shape=(steps,))
    line = cast(index, dtype=f64) * ((end - start) / gaps) + float(start)
    if endpoint and steps > 1:
        line = where(equal(index, steps - 1), float(end), line)  # `end` exactly, without rounding errors
    return move(cast(line, dtype=f32 if dtype is None else as_dtype(dtype)), device)


@check_arguments
def eye(
    rows: Size, columns: Size | None = None, k: int = 0, dtype: DType | None = f32, device: str | None = None
) -> Tensor:
    """Ones on diagonal `k` of a matrix (0 is the main one, 1 the one above), zeros elsewhere.

    >>> eye(2, 3, k=1)
    Tensor([[0., 1., 0.],
            [0., 0., 1.]], f32)
    """
    if device is not None:
        check_device(device)
    shape = (rows, rows if columns is None else columns)
    if isinstance(shape[0], int) and isinstance(shape[1], int):
        k = max(-shape[0], min(k, shape[1]))  # no diagonal exists beyond the matrix
    element = f32 if dtype is None else as_dtype(dtype)
    return move(cast(equal(iota(shape=shape, axis=-2) + k, iota(shape=shape, axis=-1)), dtype=element), device)


@check_arguments
def asarray(data: Any, dtype: DType | None = None, copy: bool | None = None, device: str | None = None) -> Tensor:
    """A number, nested lists or an array as a tensor, without a copy of an array unless `copy` is True.

    >>> asarray([1, 2], dtype="f16")
    Tensor([1., 2.], f16)

    Raises:
        ArgumentError: `copy` is False and one is needed.
    """
    if device is not None:
        check_device(device)
    data = list(data) if data.__class__ is tuple else data
    held = isinstance(data, (Tensor, np.ndarray)) or hasattr(data, "__dlpack__")
    tensor = as_tensor(data) if held or dtype is None else Tensor(data, dtype)  # each number is rounded once
    out = tensor if dtype is None or tensor.dtype == as_dtype(dtype) else cast(tensor, dtype=as_dtype(dtype))
    kept = out is data or (not out.is_traced and out.data is data)
    if copy is False and not kept:
        raise ArgumentError("a copy is needed", location=user_location(), received=type(data).__name__)
    return move(out.clone() if copy and kept else out, device)


@check_arguments
def tensor(data: Any, dtype: DType | None = None, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A new tensor: `data` (a number, nested lists, an array or a tensor) is copied, unlike in `Tensor(data)`.

    >>> import numpy as np
    >>> array = np.zeros(2)
    >>> x = tensor(array)
    >>> array[0] = 1.0
    >>> x
    Tensor([0., 0.], f64)

    Raises:
        DTypeError: `data` is not numeric, or integers are to have gradients.
        DeviceUnavailable: `device` is not available.
    """
    if isinstance(data, Tensor) and data.is_traced:
        return data.clone() if dtype is None else cast(data, dtype=as_dtype(dtype))
    data = list(data) if data.__class__ is tuple else data
    made = Tensor(data, dtype, device, requires_grad)
    if made.data.__class__ is not np.ndarray:
        return made if made.data is not getattr(data, "data", made.data) else made.clone()
    if made.data is (data.data if isinstance(data, Tensor) else data):
        made.data = made.data.copy()
    return made


@check_arguments
def from_dlpack(source: Any, device: str | None = None, copy: bool | None = None) -> Tensor:
    """A tensor of another library's array, in host memory or on a device, without a copy unless `copy` is True.

    >>> import numpy as np
    >>> array = np.arange(3)
    >>> np.shares_memory(from_dlpack(array).numpy(), array)
    True
    """
    if device is not None:
        check_device(device)
    made = Tensor(source) if is_on_device(source) else Tensor(import_dlpack(source))
    return move(made.clone() if copy else made, device)
