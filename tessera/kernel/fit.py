"""Values made to fit where they go: the type of a memory, a shape, a mask."""

from __future__ import annotations

from typing import Any

from tessera.errors import DTypeError, ShapeError
from tessera.kernel.trace import is_number
from tessera.ops.basic import broadcast_to, cast, full
from tessera.shapes import broadcast
from tessera.shapes.rules import show
from tessera.tensor import Tensor
from tessera.types import DType, TensorType, bool_


def to_dtype(value: Any, dtype: DType, name: str) -> Tensor:
    """A value of the element type of the memory `name`: numbers and integer widths convert, floats do not."""
    if is_number(value):
        _check_number(value, dtype, name)
        return full(shape=(), value=value, dtype=dtype)
    if not isinstance(value, Tensor):
        what = type(value).__name__
        raise DTypeError(
            f"cannot store a {what} into {name}", expected=str(dtype), received=repr(value),
            suggestion="a kernel stores numbers and blocks: pass anything else as an argument",
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


def _check_number(value: Any, dtype: DType, name: str) -> None:
    if isinstance(value, float) and not dtype.is_float:
        raise DTypeError(f"cannot store the float {value} into {name}, which holds {dtype}", suggestion=f"int({value})")


def to_shape(value: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """A block broadcast to the shape of the place `name`."""
    if value.shape == shape:
        return value
    try:
        fits = broadcast(value.shape, shape) == shape
    except ShapeError:
        fits = False
    if not fits:
        raise ShapeError(
            f"a block of shape {show(value.shape)} does not fit into {name}",
            expected=f"shape {show(shape)}",
            received=str(value.type),
            suggestion="name the part you mean: A[i : i + BM, j : j + BN]",
        )
    return broadcast_to(value, shape=shape)


def to_mask(mask: Any, shape: tuple[int, ...]) -> Tensor | None:
    """A mask as a bool block of the shape it masks."""
    if mask is None or mask is True:
        return None
    tensor = full(shape=(), value=mask, dtype=bool_) if isinstance(mask, bool) else mask
    if not isinstance(tensor, Tensor) or tensor.dtype != bool_:
        received = str(tensor.type) if isinstance(tensor, Tensor) else repr(mask)
        raise DTypeError("the mask is not bool", expected=str(TensorType(shape, bool_)), received=received,
                         suggestion="compare: mask=offsets < N")  # fmt: skip
    return to_shape(tensor, shape, "the mask")
