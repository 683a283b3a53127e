"""One type for a variable that gets its value in two ways: around a loop, or from two branches."""

from __future__ import annotations

from typing import Any

from tessera.errors import DTypeError, ShapeError
from tessera.kernel.trace import is_number, is_traced
from tessera.ops.basic import cast, splat
from tessera.tensor import Tensor
from tessera.types import DType, TensorType, bool_, f32, int64, scalar


def join_types(what: str, a: Any, b: Any) -> TensorType | None:
    """The type that both values can take; None where they are the same value known while compiling.

    Raises:
        DTypeError: there is none, for want of a common element type.
        ShapeError: there is none, for want of a common shape.
    """
    if same(a, b):
        return None if not is_traced(a) else a.type
    for value in (a, b):
        if not (is_number(value) or isinstance(value, Tensor)):
            raise _changes(what, a, b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensors(what, a, b)
    if is_number(a) and is_number(b):
        return scalar(_number_type(a, b))
    tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
    if not _takes(tensor.dtype, number):
        raise _changes(what, a, b)
    return tensor.type


def same(a: Any, b: Any) -> bool:
    """Whether two values are one and the same, known while compiling or not."""
    if a is b:
        return True
    plain = (bool, int, float, str, tuple, type(None))
    return type(a) is type(b) and isinstance(a, plain) and not _holds_tensor(a) and not _holds_tensor(b) and a == b


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(v, Tensor) or _holds_tensor(v) for v in value)


def _tensors(what: str, a: Tensor, b: Tensor) -> TensorType:
    if a.dtype != b.dtype:
        raise _changes(what, a, b)
    if a.shape != b.shape:
        raise ShapeError(
            f"{what} changes its shape", expected=str(a.type), received=str(b.type),
            suggestion="give it its final shape at the start: tile.zeros(shape, dtype)",
        )  # fmt: skip
    return a.type


def _number_type(a: Any, b: Any) -> DType:
    if isinstance(a, bool) and isinstance(b, bool):
        return bool_
    return f32 if isinstance(a, float) or isinstance(b, float) else int64


def _takes(dtype: DType, number: Any) -> bool:
    if isinstance(number, bool):
        return dtype == bool_
    return dtype.is_float or (dtype.is_integer and isinstance(number, int))


def _changes(what: str, a: Any, b: Any) -> DTypeError:
    return DTypeError(
        f"{what} changes its type",
        expected=describe(a),
        received=describe(b),
        suggestion="convert it: tile.cast(x, dtype), or use another name",
    )


def describe(value: Any) -> str:
    """What a value is, as an error shows it."""
    if isinstance(value, Tensor):
        return str(value.type)
    return f"{type(value).__name__} {value!r}" if is_number(value) else f"a {type(value).__name__} ({value!r})"


def as_type(value: Any, type: TensorType) -> Tensor:
    """A number or tensor as a tensor of the joint type."""
    if isinstance(value, Tensor):
        return value if value.dtype == type.dtype else cast(value, dtype=type.dtype)
    return splat(value, type)
