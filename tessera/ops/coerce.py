"""What a user may pass where ops want tensors of one type and shape: numbers, mixed integers, broadcasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tessera.elements import number_type
from tessera.errors import DTypeError, TesseraError, here
from tessera.op import Op
from tessera.ops.basic import broadcast_to, cast, check_count, splat
from tessera.shapes import Dim, broadcast
from tessera.shapes.reading import number_of
from tessera.tensor import Tensor, as_tensor, bind
from tessera.types import DType, TensorType, as_dtype, f32

NUMBERS = (bool, int, float)
SIZES = (Dim, TypeVar)  # sizes that a trace knows are numbers in it


def pointwise(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Bind with all operands of one element type and one shape."""
    check_count(op, operands)
    try:
        return bind(op, same_shape(same_dtype(operands)), attrs)
    except TesseraError as error:
        raise error.at(here()) from None


def floating(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `pointwise`, with integers and bools made f32 first."""
    check_count(op, operands)
    try:
        tensors = same_dtype(operands)
        return bind(op, same_shape([t if t.dtype.is_float else cast(t, dtype=f32) for t in tensors]), attrs)
    except TesseraError as error:
        raise error.at(here()) from None


def rounding(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `floating`; integers are whole numbers already, and stay as they are."""
    check_count(op, operands)
    x = as_tensor(operands[0])
    return x if x.dtype.is_integer else floating(op, [x], attrs)


# The power of integers, which is made of ops that are coerced themselves: ops/powers.py puts it here.
WHOLE_POWER: list[Callable[[Any, Any], Tensor]] = []


def powering(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `floating`; an integer to the power of an integer stays an integer."""
    check_count(op, operands)
    base, exponent = (x if isinstance(x, NUMBERS) else as_tensor(x) for x in operands)
    if not (_is_integer(base) and _is_integer(exponent)):
        return floating(op, [base, exponent], attrs)
    try:
        return WHOLE_POWER[0](as_tensor(base) if isinstance(exponent, int) else base, exponent)
    except TesseraError as error:
        raise error.at(here()) from None


def _is_integer(x: Any) -> bool:
    return x.dtype.is_integer if isinstance(x, Tensor) else isinstance(x, int) and not isinstance(x, bool)


def selecting(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Bind a condition and two branches: the branches share a type, all three a shape."""
    check_count(op, operands)
    condition = as_tensor(operands[0])
    if condition.dtype.kind != "bool":
        raise DTypeError(
            "the condition is not bool", location=here(), expected="bool", received=str(condition.type),
            suggestion="compare first: where(x > 0, a, b)",
        )  # fmt: skip
    try:
        return bind(op, same_shape([condition, *same_dtype(operands[1:])]), attrs)
    except TesseraError as error:
        raise error.at(here()) from None


def common_type(operands: Sequence[Any]) -> TensorType:
    """The scalar type that tensors and Python numbers have in common; numbers take the tensors' type."""
    known = [t for t in operands if isinstance(t, Tensor)]
    numbers = [x for x in operands if not isinstance(x, Tensor)]
    dtype = promote([t.type for t in known]) if known else as_dtype(_widest(numbers))
    for number in numbers:
        dtype = number_type(number, dtype)
    policy = next((t.type.policy for t in known if t.type.policy), None)
    return TensorType((), dtype, policy if policy and policy.storage == dtype else None)


def same_dtype(operands: Sequence[Any]) -> list[Tensor]:
    """Operands as tensors of one element type; Python numbers take the tensors' type."""
    tensors = [x if isinstance(x, NUMBERS) else _number_or_tensor(x) for x in operands]
    element = common_type(tensors)
    dtype = element.dtype
    return [t if isinstance(t, Tensor) and t.dtype == dtype else _converted(t, element) for t in tensors]


def _number_or_tensor(x: Any) -> Any:
    return number_of(x) if isinstance(x, SIZES) else as_tensor(x)


def _widest(numbers: Sequence[Any]) -> type:
    """The Python type that holds all of these numbers: float, else int, else bool."""
    kinds = {type(n) for n in numbers}
    return next(t for t in (float, int, bool) if t in kinds)


def _converted(value: Any, element: TensorType) -> Tensor:
    if isinstance(value, Tensor):
        return cast(value, dtype=element.dtype)
    number = splat(value, element)
    return cast(number, dtype=element.policy) if element.policy else number


def promote(types: Sequence[TensorType]) -> DType:
    """The one element type of mixed operands; float formats never mix."""
    floats = {t.dtype for t in types if t.dtype.is_float}
    if len(floats) > 1:
        one, other = sorted(floats, key=lambda t: t.bits)[:2]
        raise DTypeError(
            f"cannot mix {one} and {other}",
            expected="operands of one float type",
            received=" and ".join(str(t) for t in types),
            suggestion=f"cast one of them: x.to(ts.{other})",
        )
    if floats:
        return floats.pop()
    distinct = {t.dtype for t in types}
    if len(distinct) == 1:
        return distinct.pop()
    joined = as_dtype(np.result_type(*(t.numpy for t in distinct)))
    if joined.is_float:  # what NumPy makes of uint64 beside a signed type
        raise DTypeError(
            "no integer type holds the values of both", received=" and ".join(sorted(map(str, distinct))),
            expected="both signed, both unsigned, or the unsigned one narrower than 64 bits",
            suggestion="cast one of them: x.to(ts.int64)",
        )  # fmt: skip
    return joined


def same_shape(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors broadcast to one shape, so that no rule sees a hidden broadcast."""
    shape = broadcast(*(t.shape for t in tensors))
    return [t if t.shape == shape else broadcast_to(t, shape=shape) for t in tensors]
