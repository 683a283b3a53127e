"""Implicit conversions: a value to the memory it goes to, and two definitions of a variable to one type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tessera.core.errors import DTypeError, ShapeError
from tessera.core.shapes import broadcast, format_shape
from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, TensorType, bool_, f32, int64, scalar
from tessera.frontend.kernel.trace import is_number, is_traced
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import broadcast_to, cast, full, splat

# Values made to fit where they go: the type of a memory, a shape, a mask.


def convert_to_dtype(value: Any, dtype: DType, name: str) -> Tensor:
    """Convert a value to the element type of the memory `name`: numbers and integer widths convert, floats do not."""
    if is_number(value):
        _check_number(value, dtype, name)
        return full(shape=(), value=value, dtype=dtype)
    if not isinstance(value, Tensor):
        what = type(value).__name__
        raise DTypeError(
            f"cannot store a {what} into {name}", expected=str(dtype), received=repr(value),
            suggestion=_suggest_number(value),
        )  # fmt: skip
    if value.dtype == dtype:
        return value
    if dtype.is_integer and not value.dtype.is_float:
        return cast(value, dtype=dtype)
    raise DTypeError(
        f"cannot store {value.dtype} into {name}, which holds {dtype}",
        expected=str(dtype),
        received=str(value.type),
        suggestion=f"cast first: tile.cast(value, ts.{dtype})",
    )


def _suggest_number(value: Any) -> str:
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        number = None
    if number is None:
        return "a kernel stores numbers and blocks: pass anything else as an argument"
    return f"write the number: {value if math.isfinite(number) else f'float({value!r})'}"


def _check_number(value: Any, dtype: DType, name: str) -> None:
    if isinstance(value, float) and not dtype.is_float:
        raise DTypeError(f"cannot store the float {value} into {name}, which holds {dtype}", suggestion=f"int({value})")


def broadcast_to_shape(value: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Broadcast a block to the shape of the memory `name`."""
    if value.shape == shape:
        return value
    try:
        fits = broadcast(value.shape, shape) == shape
    except ShapeError:
        fits = False
    if not fits:
        whole = name.startswith("the ")  # a mask, or what replaces elements outside of it
        raise ShapeError(
            f"a block of shape {format_shape(value.shape)} does not fit into {name}",
            expected=f"shape {format_shape(shape)}",
            received=str(value.type),
            suggestion="give the mask and `other` the shape of the accessed block, or one that broadcasts to it"
            if whole
            else _suggest_part(value.shape, shape, name),
        )
    return broadcast_to(value, shape=shape)


def _suggest_part(block: Sequence[Size], memory: Sequence[Size], name: str) -> str:
    """What to name of a memory that is to hold a block."""
    if len(block) != len(memory):
        return f"give the block {len(memory)} axes: tile.reshape(block, {format_shape(memory)})"
    part = ", ".join(f"{i} : {i} + {n}" for i, n in zip("ijklmn", block, strict=False))
    return f"name as many elements as the block has: {name}[{part}]"


def convert_to_mask(mask: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Convert a mask to a bool block of the masked shape."""
    if mask is None or mask is True:
        return None
    tensor = full(shape=(), value=mask, dtype=bool_) if isinstance(mask, bool) else mask
    if not isinstance(tensor, Tensor) or tensor.dtype != bool_:
        received = str(tensor.type) if isinstance(tensor, Tensor) else repr(mask)
        raise DTypeError("the mask is not bool", expected=str(TensorType(shape, bool_)), received=received,
                         suggestion="compare: mask=offsets < N")  # fmt: skip
    return broadcast_to_shape(tensor, shape, "the mask")


def join_types(what: str, a: Any, b: Any) -> TensorType | None:
    """Join the types of two values; None where both are the same compile-time value.

    Raises:
        DTypeError: the element types have no common type.
        ShapeError: the shapes differ.
    """
    if is_same_value(a, b):
        return None if not is_traced(a) else a.type
    for value in (a, b):
        if not (is_number(value) or isinstance(value, Tensor)):
            raise _type_change_error(what, a, b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _join_tensor_types(what, a, b)
    if is_number(a) and is_number(b):
        return scalar(_join_number_types(a, b))
    tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
    if not _holds_number(tensor.dtype, number):
        raise _type_change_error(what, a, b)
    return tensor.type


def is_same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same value."""
    if a is b:
        return True
    plain = (bool, int, float, str, tuple, type(None))
    return type(a) is type(b) and isinstance(a, plain) and not _holds_tensor(a) and not _holds_tensor(b) and a == b


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, tuple) and any(isinstance(v, Tensor) or _holds_tensor(v) for v in value)


def _join_tensor_types(what: str, a: Tensor, b: Tensor) -> TensorType:
    if a.dtype != b.dtype:
        raise _type_change_error(what, a, b)
    if a.shape != b.shape:
        raise ShapeError(
            f"{what} changes its shape", expected=str(a.type), received=str(b.type),
            suggestion="create it with its final shape: tile.zeros(shape, dtype)",
        )  # fmt: skip
    return a.type


def _join_number_types(a: Any, b: Any) -> DType:
    if isinstance(a, bool) and isinstance(b, bool):
        return bool_
    return f32 if isinstance(a, float) or isinstance(b, float) else int64


def _holds_number(dtype: DType, number: Any) -> bool:
    if isinstance(number, bool):
        return dtype == bool_
    return dtype.is_float or (dtype.is_integer and isinstance(number, int))


def _type_change_error(what: str, a: Any, b: Any) -> DTypeError:
    return DTypeError(
        f"{what} changes its type",
        expected=describe_value(a),
        received=describe_value(b),
        suggestion="convert it: tile.cast(x, dtype), or use another name",
    )


def describe_value(value: Any) -> str:
    """Describe a value for an error."""
    if isinstance(value, Tensor):
        return str(value.type)
    return f"{type(value).__name__} {value!r}" if is_number(value) else f"a {type(value).__name__} ({value!r})"


def convert_to_type(value: Any, type: TensorType) -> Tensor:
    """Convert a number or tensor to the joined type."""
    if isinstance(value, Tensor):
        return value if value.dtype == type.dtype else cast(value, dtype=type.dtype)
    return splat(value, type)
