"""Basic ops: constants, casts, broadcasts, gradient and checkpoint marks, with their derivatives; and helpers for
derivative rules."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, TesseraError, user_location
from tessera.core.shapes import as_size, broadcast, format_shape
from tessera.core.symbolic_dim import Dim, Size, find_size_bounds, find_size_divisor, resolve_size
from tessera.core.types import DType, Policy, TensorType, as_dtype, check_integer_fits, f32, f64, find_policy, int64
from tessera.ir.analysis import (
    MAX_DIVISOR,
    UNBOUNDED,
    AffineForm,
    affine_rules,
    divisor_rules,
    find_divisor,
    interval_rules,
)
from tessera.ir.array_interchange import shorten_repr
from tessera.ir.core import Node
from tessera.ir.numerics import error_rules
from tessera.ir.numerics.conversion import convert, round_to_storage
from tessera.ir.rules import STORAGE, AxisFactors, Op, batch, error, jvp, lower, op, sharding, transpose
from tessera.ir.tensor import Tensor, as_tensor, bind_op
from tessera.ops.tensor.argument_checks import PYTHON_ERRORS


def coerce_plain(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Bind with the operands converted to tensors, without type promotion or broadcasting."""
    check_operand_count(op, operands)
    return bind_op(op, [as_tensor(x) for x in operands], attrs)


def check_operand_count(op: Op, operands: Sequence[Any]) -> None:
    """Refuse a call with operands missing."""
    if len(operands) != len(op.operands):
        raise ArgumentError(
            f"{op.__name__} takes {len(op.operands)} operands, not {len(operands)}", location=user_location(),
            expected=", ".join(op.operands) or "none",
        )  # fmt: skip


SIZE_NAME_TYPES = (str, Dim, TypeVar)  # types that name a size; the last is that of `def f[B]`


def parse_shape(value: Any, sizes: Callable[[Any], Any], least: int = 0) -> tuple[Any, ...]:
    """A shape from a size, a name or a sequence of them; `sizes` converts each, and none is below `least`.

    Raises:
        ArgumentError: not a shape.
    """
    element = getattr(value, "dtype", None)
    if getattr(element, "is_float", False) or getattr(element, "kind", "") == "f":
        raise ArgumentError(
            "not a shape", location=user_location(), expected="sizes, as in (2, 3)", received=shorten_repr(value)
        )
    single = isinstance(value, (int, np.integer, *SIZE_NAME_TYPES)) and not isinstance(value, bool)
    listed: Sequence[Any] = (value,) if single else value
    try:
        found = tuple(resolve_size(sizes(s if isinstance(s, SIZE_NAME_TYPES) else operator.index(s))) for s in listed)
    except TesseraError:
        raise
    except PYTHON_ERRORS:
        raise ArgumentError("not a shape", expected="sizes, as in (2, 3)", received=shorten_repr(value)) from None
    wrong = [n for n in found if isinstance(n, int) and n < least]
    if wrong:
        raise ArgumentError(f"a size of {wrong[0]}", expected="sizes from 0 on", received=shorten_repr(value))
    return found


def _infer_full(*, shape: tuple[Size, ...], value: Any, dtype: DType) -> TensorType:
    return TensorType(tuple(shape), dtype)


def _canonicalise_full(*, shape: Any, value: Any, dtype: Any) -> dict[str, Any]:
    element = as_dtype(dtype)
    value = check_integer_fits(value, element)
    try:
        number: Any = float(value) if element.is_float else np.asarray(value)
        if not element.is_float:  # a float saturates, as in a cast
            held = convert(number, element) if number.dtype.kind == "f" else number.astype(element.numpy)
            number = held.item()
    except (TypeError, ValueError):
        raise ArgumentError("the fill value is not a number", expected="one number", received=repr(value)) from None
    return {"shape": parse_shape(shape, as_size), "value": number, "dtype": element}


@op(infer=_infer_full, coerce=coerce_plain, canonical=_canonicalise_full, numerics=STORAGE)
def full(*, shape: tuple, value: Any, dtype: DType = f32) -> Any:
    """A tensor of `shape` with every element `value`."""
    if dtype in (f32, f64, int64):  # NumPy converts to them as `convert` does
        with np.errstate(over="ignore"):
            return np.broadcast_to(np.asarray(value).astype(dtype.numpy), shape)
    return np.broadcast_to(convert(np.asarray(value), dtype), shape)


error(full)(error_rules.bound_full)


@op(
    infer=lambda *, size: TensorType((), int64),
    coerce=coerce_plain,
    canonical=lambda *, size: {"size": as_size(size)},
    numerics=STORAGE,
)
def dim_value(*, size: Any) -> Any:
    """The value of a symbolic size as an int64 scalar (`jax.export`'s `dim_as_value`).

    >>> import tessera as ts
    >>> ts.dim_value(size=3)
    Tensor(3, int64)
    """
    return np.asarray(size, np.int64)


error(dim_value)(error_rules.bound_constant)


def _infer_cast(x: TensorType, *, dtype: DType | Policy) -> TensorType:
    return TensorType(x.shape, dtype.storage, dtype) if isinstance(dtype, Policy) else TensorType(x.shape, dtype)


def _canonicalise_cast(x: TensorType, *, dtype: Any) -> dict[str, Any]:
    policy = find_policy(dtype)
    return {"dtype": policy if policy is not None and policy.clauses() else as_dtype(dtype)}


@op(
    infer=_infer_cast,
    coerce=coerce_plain,
    canonical=_canonicalise_cast,
    numerics=STORAGE,
    pointwise=True,
)
def cast(x: Any, *, dtype: DType | Policy) -> Any:
    """`x` with elements converted to `dtype`: nearest-even; float to integer goes toward zero and saturates.

    A policy (`ts.bf16 @ ts.accum(ts.f32)`) becomes part of the result's type, and its rounding is that of the cast; an
    element type alone removes the policy of `x`.
    """
    return x if isinstance(dtype, Policy) else convert(x, dtype)


error(cast)(error_rules.bound_cast)


def _infer_broadcast(x: TensorType, *, shape: tuple[Size, ...]) -> TensorType:
    if broadcast(x.shape, shape) != tuple(shape):
        raise ShapeError(f"{format_shape(x.shape)} does not broadcast to {format_shape(shape)}")
    return x.with_shape(tuple(shape))


@op(
    infer=_infer_broadcast,
    coerce=coerce_plain,
    canonical=lambda x, *, shape: {"shape": parse_shape(shape, as_size)},
    numerics=STORAGE,
    name="broadcast",
)
def broadcast_to(x: Any, *, shape: tuple) -> Any:
    """`x` repeated along new leading axes and axes of size 1 until it has `shape`."""
    return np.broadcast_to(x, shape)


error(broadcast_to)(error_rules.bound_structural)


def round_number(value: Any, type: TensorType) -> float:
    """A number as an element of a float type: rounded once, by the type's policy (one by chance rounds elsewhere).

    >>> from tessera.core.types import f16, saturate
    >>> round_number(1e6, TensorType((), f16, f16 @ saturate))
    65504.0
    """
    if type.policy is None or type.policy.rounding == "stochastic":
        return float(value)
    return float(round_to_storage(np.float64(value), type.dtype, type.policy))


def fill_by_policy(shape: Any, value: Any, policy: Policy) -> Tensor:
    """A tensor with every element `value`, rounded once by a policy, which is part of its type.

    >>> from tessera.core.types import f16, saturate
    >>> fill_by_policy((2,), 1e6, f16 @ saturate).numpy().tolist()
    [65504.0, 65504.0]
    """
    element = TensorType((), policy.storage, policy)
    source = f64 if policy.rounding == "stochastic" else policy.storage  # each place draws for itself
    number = round_number(value, element) if policy.storage.is_float else value
    return cast(full(shape=shape, value=number, dtype=source), dtype=policy)


def splat(value: Any, type: TensorType) -> Tensor:
    """A Python number or a symbolic size as a tensor of this type: recorded as an op, never as a captured array."""
    if isinstance(value, Dim):
        return broadcast_to(cast(dim_value(size=value), dtype=type.dtype), shape=type.shape)
    return full(shape=type.shape, value=value, dtype=type.dtype)


@op(infer=lambda x: x, coerce=coerce_plain, numerics=STORAGE)
def stop_gradient(x):
    """`x` as a constant for derivatives."""
    return x


@lower(stop_gradient)
def _(x):
    return x


# Helpers of derivative rules: sums of partial derivatives, and ops that are linear in an operand.


Tangents = Sequence["Tensor | None"]
# partial(t, out, *primals, **attrs): the tangent of the result for a tangent t of one operand.
PartialDerivative = Callable[..., Any]


def sum_of_partials(*partials: PartialDerivative | None) -> Callable[..., Tensor | None]:
    """The JVP of a function as the sum of one partial derivative for each operand with a tangent, rounded once."""
    return round_once(sum_of_exact_partials(*partials))


def sum_of_exact_partials(*partials: PartialDerivative | None) -> Callable[..., Tensor | None]:
    """As `sum_of_partials`, in the storage type: for partial derivatives of one operation each."""

    def rule(out: Any, primals: Sequence[Any], tangents: Tangents, **attrs: Any) -> Tensor | None:
        moved = [(p, t) for p, t in zip(partials, tangents, strict=True) if p is not None and t is not None]
        return sum_tangents([p(t, out, *primals, **attrs) for p, t in moved])

    return rule


def round_once(rule: Callable[..., Tensor | None], result: Op | None = None) -> Callable[..., Tensor | None]:
    """A JVP rule that computes in the compute type of the result and rounds the tangent once, as the op does.

    A rule that reads the result gets it rounded, as memory holds it; with `result`, its op, it gets it before that.
    """

    def rounded(out: Any, primals: Sequence[Any], tangents: Tangents, **attrs: Any) -> Tensor | None:
        wide = out.type.compute
        if out.dtype == wide:
            return rule(out, primals, tangents, **attrs)

        def widen(x: Tensor) -> Tensor:  # operands may have other policies than the result
            return cast(x, dtype=wide) if x.dtype.is_float and x.dtype != wide else x

        wide_primals = [widen(x) for x in primals]
        whole = widen(out) if result is None else result(*wide_primals, **attrs)
        moved = rule(whole, wide_primals, [t if t is None else widen(t) for t in tangents], **attrs)
        return None if moved is None else cast(moved, dtype=out.type.policy or out.dtype)

    return rounded


def linear_jvp(op: Op, **fixed: Any) -> Callable[..., Tensor]:
    """The JVP of an op that is linear in all its operands together; `fixed` overrides attributes for the tangent."""

    def rule(out: Any, primals: Sequence[Tensor], tangents: Tangents, **attrs: Any) -> Tensor:
        return bind_op(
            op, [instantiate_zero(t, x.type) for t, x in zip(tangents, primals, strict=True)], {**attrs, **fixed}
        )

    return rule


def zero_jvp(out: Any, primals: Any, tangents: Any, **attrs: Any) -> None:
    """The JVP of an op that is piecewise constant or gives no floats: the tangent is zero."""


def sum_tangents(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum of tangents; None if all are zero."""
    return functools.reduce(operator.add, parts) if parts else None


def instantiate_zero(tangent: Tensor | None, type: TensorType) -> Tensor:
    """A tangent, with None replaced by zeros."""
    return splat(0, type) if tangent is None else tangent


def is_undefined_primal(operand: Any) -> bool:
    """Whether an operand of a linear op is the one that a transpose rule differentiates by."""
    return isinstance(operand, TensorType)


# Derivatives and batching of the basic ops. (They use methods of Tensor for ops that are defined in later modules.)


jvp(full)(zero_jvp)
jvp(dim_value)(zero_jvp)
jvp(broadcast_to)(linear_jvp(broadcast_to))


@jvp(cast)
def _(out, primals, tangents, *, dtype):
    return cast(tangents[0], dtype=dtype) if as_dtype(dtype).is_float else None


@jvp(stop_gradient)
def _(out, primals, tangents):
    return None


@transpose(cast)
def _(g, x, *, dtype):
    return (cast(g, dtype=x.policy or x.dtype),)


@transpose(broadcast_to)
def _(g, x, *, shape):
    new = g.ndim - x.rank
    spread = [i for i in range(g.ndim) if i < new or x.shape[i - new] != g.shape[i]]
    return (g.sum(axis=tuple(spread)).reshape(x.shape) if spread else g,)


@batch(stop_gradient)
def _(lanes):
    return stop_gradient(*lanes.tensors)


@batch(broadcast_to)
def _(lanes, *, shape):
    (x,) = lanes.tensors
    inner = (1,) * (len(shape) - x.ndim + 1) + x.shape[1:]
    return broadcast_to(x.reshape((lanes.size, *inner)), shape=(lanes.size, *shape))


# Checkpoint marks: values that are kept, and the start of recomputation.


@op(infer=lambda x: x, coerce=coerce_plain, numerics=STORAGE)
def recompute(x):
    """`x`; results computed from it are recomputed and never merged with equal ones (no CSE)."""
    return x


error(recompute)(error_rules.bound_structural)
jvp(recompute)(linear_jvp(recompute))


@op(infer=lambda x: x, coerce=coerce_plain, numerics=STORAGE)
def fusion_barrier(x):
    """`x`, computed by a kernel of its own and held in memory: no kernel contains both its producer and its users."""
    return x


error(fusion_barrier)(error_rules.bound_structural)
jvp(fusion_barrier)(linear_jvp(fusion_barrier))


@op(infer=lambda x: x, coerce=coerce_plain, numerics=STORAGE)
def kept(x):
    """`x`, which an enclosing checkpoint keeps for the backward pass."""
    return x


@lower(kept)
def _(x):
    return x


jvp(kept)(linear_jvp(kept))


@transpose(recompute, kept, fusion_barrier)
def _(g, x):
    return (g,)


@batch(recompute, kept, fusion_barrier)
def _(lanes):
    return bind_op(lanes.op, lanes.tensors, {})


# Index analysis: affine forms, intervals and divisors of constants, casts and broadcasts.


@affine_rules(full)
def _(analysis, node):
    return AffineForm(int(node.attrs["value"]))


@affine_rules(cast)
def _(analysis, node):
    return analysis.find_form(node.args[0]) if _is_widening(node) else None


@affine_rules(broadcast_to)
def _(analysis, node):
    return analysis.find_form(node.args[0])


@interval_rules(dim_value)
def _(analysis, node):
    return find_size_bounds(node.attrs["size"])


@divisor_rules(dim_value)
def _(producers, node):
    return find_size_divisor(node.attrs["size"], MAX_DIVISOR)


@interval_rules(full)
def _(analysis, node):
    return node.attrs["value"], node.attrs["value"]


@interval_rules(cast)
def _(analysis, node):
    """That of the operand; what leaves a type of fewer than 64 bits is taken care of for all ops."""
    low, high = analysis.of(node.args[0])
    if not node.args[0].type.dtype.is_integer:
        if not (math.isfinite(low) and math.isfinite(high)):
            return UNBOUNDED
        return (math.trunc(low), math.trunc(high)) if node.out.type.dtype.is_integer else (low, high)
    fits = low >= 0 if node.out.type.dtype.kind == "uint" else node.args[0].type.dtype.bits < 64 or high < 1 << 63
    return (low, high) if fits or node.out.type.dtype.bits < 64 else UNBOUNDED


@divisor_rules(full)
def _(producers, node):
    return math.gcd(int(node.attrs["value"]), MAX_DIVISOR) or MAX_DIVISOR


@divisor_rules(cast)
def _(producers, node):
    return find_divisor(producers, node.args[0]) if node.args[0].type.dtype.is_integer else 1


def _is_widening(node: Node) -> bool:
    """Whether a cast is from an integer to an integer of as many bits, or more."""
    source, target = node.args[0].type.dtype, node.out.type.dtype
    return source.is_integer and target.is_integer and target.bits >= source.bits


# Sharding: an axis that is repeated is cut without its operand.


@sharding(broadcast_to)
def _(types, results, *, shape):
    (x,), (out,) = types, results
    lead = out.rank - x.rank
    operand = tuple(lead + i if n == out.shape[lead + i] else None for i, n in enumerate(x.shape))
    return AxisFactors((operand,), (tuple(range(out.rank)),))


@sharding(full)
def _(types, results, *, shape, value, dtype):
    return AxisFactors((), (tuple(range(results[0].rank)),))


@sharding(recompute, kept, fusion_barrier)
def _(types, results):
    return AxisFactors((tuple(range(types[0].rank)),), (tuple(range(types[0].rank)),))
