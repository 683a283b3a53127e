"""Operand coercion: type promotion and broadcasting of what users pass, before an op is bound; functions of several ops
that round once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tessera.core.errors import DTypeError, TesseraError, user_location
from tessera.core.shapes import as_size, broadcast, size_to_number
from tessera.core.symbolic_dim import ABSTRACT_TRACE, Dim, resolve_size
from tessera.core.types import DType, Policy, TensorType, as_dtype, f32, f64, find_number_dtype, int8, scalar
from tessera.ir.builder import CURRENT_BUILDER, CURRENT_NUMERICS
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor, WeakTensor, as_tensor, bind_op
from tessera.ops.tensor.argument_checks import F, check_arguments
from tessera.ops.tensor.basic import broadcast_to, cast, check_operand_count, round_number, splat

PYTHON_NUMBERS = (bool, int, float)
SIZE_TYPES = (Dim, TypeVar)  # symbolic sizes, which a trace converts to numbers


def coerce_pointwise(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Bind with all operands of one element type and one shape."""
    check_operand_count(op, operands)
    try:
        return _keep_weak(bind_op(op, broadcast_operands(unify_dtypes(operands)), attrs), operands)
    except TesseraError as error:
        raise error.at(user_location()) from None


def _keep_weak(out: Any, operands: Sequence[Any]) -> Any:
    """The result of an op, which is weak where operands are, and the others are numbers."""
    weak = any(x.__class__ is WeakTensor for x in operands) and out.__class__ is Tensor and out.dtype.kind != "bool"
    return WeakTensor(out.data) if weak and not any(_is_strong(x) for x in operands) else out


def _is_strong(x: Any) -> bool:
    return not isinstance(x, (WeakTensor, *PYTHON_NUMBERS))


# What arithmetic on bools means, as in NumPy; ops without an entry refuse bools. elementwise.py fills it.
BOOL_ARITHMETIC: dict[Op, Callable[..., Tensor]] = {}


def coerce_arithmetic(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_pointwise`; an op on bools alone is what `BOOL_ARITHMETIC` says."""
    check_operand_count(op, operands)
    if op in BOOL_ARITHMETIC and all(_is_bool(_convert_number(x)) for x in operands):
        return BOOL_ARITHMETIC[op](*(as_tensor(x) for x in operands))
    return coerce_pointwise(op, operands, attrs)


def _convert_number(x: Any) -> Any:
    return x if isinstance(x, PYTHON_NUMBERS) else _convert_size_or_array(x)


def coerce_floating(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_pointwise`; integers and bools become f32 first."""
    check_operand_count(op, operands)
    try:
        tensors = unify_dtypes(operands)
        floats = [t if t.dtype.is_float else cast(t, dtype=f32) for t in tensors]
        return _keep_weak(bind_op(op, broadcast_operands(floats), attrs), operands)
    except TesseraError as error:
        raise error.at(user_location()) from None


def coerce_rounding(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_floating`; integers are returned unchanged."""
    check_operand_count(op, operands)
    x = as_tensor(operands[0])
    return x if x.dtype.is_integer else coerce_floating(op, [x], attrs)


# The power of integers (tessera/ops/tensor/elementwise.py), which is composed of ops that this module coerces.
INTEGER_POWER_HOOK: list[Callable[[Any, Any], Tensor]] = []


def coerce_power(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """As `coerce_floating`; an integer to the power of an integer stays an integer."""
    check_operand_count(op, operands)
    base, exponent = (x if isinstance(x, PYTHON_NUMBERS) else as_tensor(x) for x in operands)
    if _is_bool(base) and _is_bool(exponent):
        base, exponent = (cast(as_tensor(x), dtype=int8) for x in (base, exponent))
    if not (_is_integer(base) and _is_integer(exponent)):
        return coerce_floating(op, [base, exponent], attrs)
    try:
        return INTEGER_POWER_HOOK[0](as_tensor(base) if isinstance(exponent, int) else base, exponent)
    except TesseraError as error:
        raise error.at(user_location()) from None


def _is_bool(x: Any) -> bool:
    return x.dtype.kind == "bool" if isinstance(x, Tensor) else isinstance(x, bool)


def _is_integer(x: Any) -> bool:
    return x.dtype.is_integer if isinstance(x, Tensor) else isinstance(x, int) and not isinstance(x, bool)


def coerce_select(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Bind a condition and two branches: the branches get one type, all three one shape."""
    check_operand_count(op, operands)
    condition = as_tensor(operands[0])
    if condition.dtype.kind != "bool":
        raise DTypeError(
            "the condition is not bool", location=user_location(), expected="bool", received=str(condition.type),
            suggestion="compare first: where(x > 0, a, b)",
        )  # fmt: skip
    try:
        out = bind_op(op, broadcast_operands([condition, *unify_parts(operands[1:])]), attrs)
        return out if _is_strong(condition) else _keep_weak(out, operands[1:])
    except TesseraError as error:
        raise error.at(user_location()) from None


def find_common_type(operands: Sequence[Any]) -> TensorType:
    """The common scalar type of tensors and Python numbers; numbers take the tensors' type."""
    if operands and operands[0].__class__ is Tensor:
        dtype = operands[0].type.dtype
        if all([x.__class__ is Tensor and x.type.dtype is dtype and x.type.policy is None for x in operands]):
            return scalar(dtype)  # most operands are alike
    known = [t for t in operands if isinstance(t, Tensor)]
    numbers = [x for x in operands if not isinstance(x, Tensor)]
    strong = [t for t in known if t.__class__ is not WeakTensor]
    if strong and all(t.dtype != f64 for t in strong):  # a number that was rounded to f32 is none of f64
        numbers += [1 if t.dtype.is_integer else 1.0 for t in known if t.__class__ is WeakTensor]
        known = strong
    dtype = promote_types([t.type for t in known]) if known else as_dtype(_widest_python_type(numbers))
    for number in numbers:
        dtype = find_number_dtype(number, dtype)
    policy = next((t.type.policy for t in known if t.type.policy), None)
    return TensorType((), dtype, policy if policy and policy.storage == dtype else None)


def unify_dtypes(operands: Sequence[Any]) -> list[Tensor]:
    """Operands as tensors of one element type; Python numbers take the tensors' type."""
    tensors = [_convert_number(x) for x in operands]
    element = find_common_type(tensors)
    dtype = element.dtype
    return [t if isinstance(t, Tensor) and t.dtype == dtype else _convert_operand(t, element) for t in tensors]


def unify_parts(operands: Sequence[Any]) -> list[Tensor]:
    """Operands whose elements the result takes as they are: of one element type, and of the first policy among them."""
    tensors = unify_dtypes(operands)
    policy = find_common_type(tensors).policy
    return [t if policy is None or t.type.policy == policy else cast(t, dtype=policy) for t in tensors]


def _convert_size_or_array(x: Any) -> Any:
    if not isinstance(x, SIZE_TYPES):
        return _make_constant(x) if isinstance(x, np.generic) and CURRENT_BUILDER.get() else as_tensor(x)
    size = resolve_size(as_size(x))
    return size_to_number(size) if isinstance(size, int) or ABSTRACT_TRACE.get() else size


def _make_constant(x: np.generic) -> Tensor:
    """A number of NumPy's as part of a traced program: not an array that the program reads."""
    return splat(x.item(), TensorType((), as_dtype(x.dtype)))


def _widest_python_type(numbers: Sequence[Any]) -> type:
    """The Python type that holds all of these numbers: float, else int, else bool."""
    kinds = {int if isinstance(n, Dim) else next(t for t in PYTHON_NUMBERS if isinstance(n, t)) for n in numbers}
    return next(t for t in (float, int, bool) if t in kinds)


def _convert_operand(value: Any, element: TensorType) -> Tensor:
    if isinstance(value, Tensor):
        return cast(value, dtype=element.dtype)
    if element.policy is None:
        return splat(value, element)
    if element.dtype.is_float and not isinstance(value, Dim):
        value = round_number(value, element)
    return cast(splat(value, element), dtype=element.policy)


def promote_types(types: Sequence[TensorType]) -> DType:
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
    if joined.is_float:  # NumPy's result for uint64 with a signed type
        raise DTypeError(
            "no integer type holds the values of both", received=" and ".join(sorted(map(str, distinct))),
            expected="both signed, both unsigned, or the unsigned one narrower than 64 bits",
            suggestion="cast one of them: x.to(ts.int64)",
        )  # fmt: skip
    return joined


def broadcast_operands(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors broadcast to one shape, so that no rule sees a hidden broadcast."""
    shape = broadcast(*(t.shape for t in tensors))
    return [t if t.shape == shape else broadcast_to(t, shape=shape) for t in tensors]


# Composite functions: functions of several ops that count as one op.


def composite(function: F) -> F:
    """Decorate a function of several ops: it computes in the compute type of its operands and rounds once.

    Float operands of a narrower type are widened, and each float result is rounded to that type and its policy. In a
    numeric context the ops have its types instead. Arguments are checked as by `check_arguments`.
    """

    @functools.wraps(function)
    def rounded_once(*args: Any, **named: Any) -> Any:
        if args and args[0].__class__ is Tensor and args[0].type.dtype is f32 and args[0].type.policy is None:
            return function(*args, **named)  # as most calls: the first float operand decides
        given = [_convert_array(x) for x in (*args, *named.values())]
        type = find_narrow_type(given) if CURRENT_NUMERICS.get() is None else None
        if type is None:
            return function(*args, **named)
        wide = [widen_operand(x) for x in given]
        out = function(*wide[: len(args)], **dict(zip(named, wide[len(args) :], strict=True)))
        return tuple(round_result(x, type) for x in out) if isinstance(out, tuple) else round_result(out, type)

    rounded_once.counts_as_one_op = True  # type: ignore[attr-defined]
    return check_arguments(rounded_once)  # type: ignore[return-value]


def _convert_array(x: Any) -> Any:
    """An array as a tensor, and a list of numbers with a decimal point; everything else as it is."""
    return as_tensor(x) if isinstance(x, np.ndarray) or (x.__class__ is list and _holds_float(x)) else x


def _holds_float(x: Any) -> bool:
    return any(_holds_float(each) for each in x) if x.__class__ is list else x.__class__ is float


def is_narrow(type: TensorType) -> bool:
    """Whether ops on such floats compute in a wider type."""
    return type.dtype.is_float and type.dtype != type.compute and type.dtype.bits <= type.compute.bits


def find_narrow_type(operands: Iterable[Any]) -> TensorType | None:
    """The scalar type of float operands that are narrower than their compute type; None for others and mixtures."""
    types = [x.type for x in operands if x.__class__ is Tensor and x.type.dtype.is_float]
    if not types or not is_narrow(types[0]) or any(t.dtype != types[0].dtype for t in types):
        return None
    return next((t for t in types if t.policy), types[0]).with_shape(())


def widen_operand(x: Any) -> Any:
    """A float tensor in its compute type; of its policy, the types and the compensation of sums stay."""
    if x.__class__ is not Tensor or not is_narrow(x.type):
        return x
    wide, policy = x.type.compute, x.type.policy
    if policy is None:
        return cast(x, dtype=wide)
    accumulate = None if policy.accumulate == wide else policy.accumulate
    return cast(x, dtype=Policy(wide, accumulate=accumulate, compensated=policy.compensated))


def round_result(x: Any, type: TensorType) -> Any:
    """A result in the compute type rounded to the storage of the operands' type."""
    return cast(x, dtype=type.policy or type.dtype) if x.__class__ is Tensor and x.dtype == type.compute else x
