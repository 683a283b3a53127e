"""Eager dispatch: caches, for each op and operand types, a plan of conversions, attributes and result types."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tessera.core.errors import TesseraError, user_location
from tessera.core.types import DType, TensorType, Type, check_integer_fits, f32, tf32
from tessera.ir.builder import CURRENT_BUILDER, CURRENT_NUMERICS
from tessera.ir.numerics.conversion import convert
from tessera.ir.rules import COMPUTE, EAGER_CALL_HOOK, STORAGE, Op, round_results
from tessera.ir.tensor import Tensor, wrap_array
from tessera.ops.tensor.basic import coerce_plain
from tessera.ops.tensor.coercion import (
    PYTHON_NUMBERS,
    coerce_arithmetic,
    coerce_floating,
    coerce_pointwise,
    coerce_power,
    coerce_rounding,
    coerce_select,
    find_common_type,
)
from tessera.ops.tensor.contractions import coerce_dot
from tessera.ops.tensor.reduce import coerce_argreduce, coerce_mean, coerce_sum

TO_FLOATS = (coerce_floating, coerce_rounding, coerce_power)
MAX_PLANS = 1024  # plans for each op; then the cache is cleared, which limits the memory of programs with many shapes
Convert = Callable[[Any], Any]
PlanKey = tuple[Any, ...]


class EagerPlan:
    """A call with operands of these types: how each is converted, the attributes, and the types of the results."""

    __slots__ = ("attrs", "conversions", "op", "numpy_result_type", "ref", "results", "type")

    def __init__(self, op: Op, converts: list[Convert | None], attrs: Mapping[str, Any], results: tuple[Type, ...]):
        self.op, self.ref, self.attrs, self.results = op, op.ref, dict(attrs), results
        self.conversions = converts if any(converts) else None
        self.type = results[0] if len(results) == 1 else None
        # Most ops have one result, which is stored as NumPy returns it.
        self.numpy_result_type = (
            None if self.type is None or self.type.policy or self.type.dtype is tf32 else self.type.dtype.numpy
        )

    def run(self, operands: tuple[Any, ...]) -> Any:
        """The results for operands of the plan's types."""
        arrays = [x.data if x.__class__ is Tensor else x for x in operands]
        if self.conversions is not None:
            arrays = [a if c is None else c(a) for c, a in zip(self.conversions, arrays, strict=True)]
        with np.errstate(all="ignore"):
            out = self.ref(*arrays, **self.attrs)
            if self.numpy_result_type is not None and out.dtype is self.numpy_result_type:
                return wrap_array(out, self.type)  # type: ignore[arg-type]
            stored = round_results(out, self.results)
        tensors = tuple(wrap_array(a, t) for a, t in zip(stored, self.results, strict=True))  # type: ignore[arg-type]
        return tensors[0] if self.type is not None else tensors


def dispatch_eager_call(op: Op, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    """The results of a call: by its cached plan, or by full dispatch, which caches a plan."""
    context = CURRENT_NUMERICS.get()
    if context is not None:
        return context.call(op, *op.split(args, attrs))
    if CURRENT_BUILDER.get() is not None or (key := _make_plan_key(args, attrs)) is None:
        return op.coerce(op, *op.split(args, attrs))
    plan = op.plans.get(key)
    if plan is None:
        return _call_and_plan(op, key, args, attrs)
    try:
        return plan.run(args)
    except TesseraError as error:
        raise error.at(user_location()) from None
    except (TypeError, AttributeError):
        _check_live_tensors(args)
        raise


def _make_plan_key(args: tuple[Any, ...], attrs: dict[str, Any]) -> PlanKey | None:
    """The key of a plan; None for calls without one: they need gradients, or an attribute is not hashable."""
    kinds: list[Any] = []
    for x in args:
        if x.__class__ is Tensor:
            if x.requires_grad or x.data.__class__ is not np.ndarray:
                return None  # also what lies on a device, or was donated
            kinds.append(x.type)
        else:
            kinds.append(x.__class__)
    for value in attrs.values():
        if value.__class__ is float and value == 0.0:
            kinds.append(math.copysign(1.0, value))  # 0.0 equals -0.0
    key = (*kinds, *attrs.items()) if attrs else tuple(kinds)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _check_live_tensors(args: tuple[Any, ...]) -> None:
    """Refuse an operand of a finished trace: it has no elements."""
    for x in args:
        if x.__class__ is Tensor:
            x.numpy()


def _call_and_plan(op: Op, key: PlanKey, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    operands, attributes = op.split(args, attrs)
    out = op.coerce(op, operands, attributes)
    planner = PLANNERS.get(op.coerce)
    plainly = all(_is_uncompensated(x) for x in args)
    if planner is not None and plainly and len(args) == len(op.operands) and not op.effects:
        results = tuple(t.type for t in out) if isinstance(out, tuple) else (out.type,)
        if len(op.plans) >= MAX_PLANS:
            op.plans.clear()
        if (plan := planner(op, operands, attributes, results)) is not None:
            op.plans[key] = plan
    return out


def _is_uncompensated(x: Any) -> bool:
    """Whether an operand is a tensor or number without a policy that replaces the op (compensated sums)."""
    return x.__class__ in PYTHON_NUMBERS or (
        x.__class__ is Tensor and not (x.type.policy and x.type.policy.compensated)
    )


def _make_plan(
    op: Op, types: list[TensorType], steps: list[list[Convert]], attrs: Any, results: tuple[Type, ...]
) -> EagerPlan:
    if op.numerics != STORAGE:
        for type, each in zip(types, steps, strict=True):
            wide = type.compute if op.numerics == COMPUTE else type.accumulate
            each += [] if wide.numpy == type.dtype.numpy else [_make_conversion(wide)]
    if op.canonical is not None:
        attrs = op.canonical(*types, **attrs)
    return EagerPlan(op, [_compose_conversions(each) for each in steps], attrs, results)


def _plan_unconverted(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    if not all(isinstance(x, Tensor) for x in operands):
        return None
    return _make_plan(op, [x.type for x in operands], [[] for _ in operands], attrs, results)


def _plan_matmul(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    vectors = any(not isinstance(x, Tensor) or x.ndim < 2 for x in operands)
    return None if vectors else _plan_unconverted(op, operands, attrs, results)


def _plan_pointwise(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    """Conversions of a pointwise call: NumPy broadcasts by the same rules, so only element types change."""
    element = find_common_type(operands)
    if op.coerce in TO_FLOATS and not element.dtype.is_float:
        element = TensorType((), f32)
    types = [x.type if isinstance(x, Tensor) else element for x in operands]
    steps: list[list[Convert]] = [
        [] if isinstance(x, Tensor) and x.dtype == element.dtype else [_make_conversion(element.dtype, x)]
        for x in operands
    ]
    types = [t if t.dtype == element.dtype else t.with_dtype(element.dtype) for t in types]
    return _make_plan(op, types, steps, attrs, results)


def _plan_arithmetic(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    """As `_plan_pointwise`; bools take the general path."""
    bools = find_common_type(operands).dtype.kind == "bool"
    return None if bools else _plan_pointwise(op, operands, attrs, results)


def _plan_float_pointwise(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    """As `_pointwise`; integers take the general path."""
    return _plan_pointwise(op, operands, attrs, results) if results[0].dtype.is_float else None


def _plan_mean(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    bools = isinstance(operands[0], Tensor) and operands[0].dtype.kind == "bool"
    return None if bools else _plan_unconverted(op, operands, attrs, results)


def _plan_search(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    return None if attrs["axis"] is None or not operands[0].ndim else _plan_unconverted(op, operands, attrs, results)


def _plan_select(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    branches = _plan_pointwise(op, operands[1:], attrs, results)
    if branches is not None and isinstance(operands[0], Tensor):
        branches.conversions = [None, *(branches.conversions or [None, None])]
        return branches
    return None


def _make_conversion(dtype: DType, operand: Any = None) -> Convert:
    if operand is not None and operand.__class__ in PYTHON_NUMBERS:
        return lambda number: convert(np.asarray(check_integer_fits(number, dtype)), dtype)
    return lambda array: convert(array, dtype)


def _compose_conversions(steps: list[Convert]) -> Convert | None:
    if len(steps) < 2:
        return steps[0] if steps else None
    first, second = steps
    return lambda array: second(first(array))


PLANNERS: dict[Any, Callable[..., EagerPlan | None]] = {
    coerce_plain: _plan_unconverted,
    coerce_arithmetic: _plan_arithmetic,
    coerce_pointwise: _plan_pointwise,
    coerce_floating: _plan_pointwise,
}
PLANNERS[coerce_select] = _plan_select
PLANNERS[coerce_rounding] = PLANNERS[coerce_power] = _plan_float_pointwise
PLANNERS[coerce_argreduce] = _plan_search
PLANNERS[coerce_sum] = _plan_unconverted
PLANNERS[coerce_mean] = _plan_mean
PLANNERS[coerce_dot] = _plan_matmul
EAGER_CALL_HOOK.append(dispatch_eager_call)
