"""Eager calls: what an op does to operands of known types is found once, and kept as a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tessera.elements import fitting
from tessera.errors import TesseraError, here
from tessera.ir.builder import CURRENT
from tessera.numerics.context import NUMERICS
from tessera.numerics.convert import convert
from tessera.op import COMPUTE, EAGER, STORAGE, Op, finished
from tessera.ops.basic import plain
from tessera.ops.coerce import NUMBERS, common_type, floating, pointwise, powering, rounding, selecting
from tessera.ops.linalg import products
from tessera.ops.reduce import searching, summing
from tessera.tensor import Tensor, like
from tessera.types import DType, TensorType, Type, f32, tf32

TO_FLOATS = (floating, rounding, powering)
MOST_PLANS = 1024  # for each op; then it begins anew, so that programs of many shapes do not fill the memory
Convert = Callable[[Any], Any]
Keys = tuple[Any, ...]


class Plan:
    """A call with operands of these types: how each is converted, the attributes, and the types of the results."""

    __slots__ = ("attrs", "converts", "op", "ready", "ref", "results", "type")

    def __init__(self, op: Op, converts: list[Convert | None], attrs: Mapping[str, Any], results: tuple[Type, ...]):
        self.op, self.ref, self.attrs, self.results = op, op.ref, dict(attrs), results
        self.converts = converts if any(converts) else None
        self.type = results[0] if len(results) == 1 else None
        # The one result of most ops is stored as NumPy gives it.
        self.ready = None if self.type is None or self.type.policy or self.type.dtype is tf32 else self.type.dtype.numpy

    def run(self, operands: tuple[Any, ...]) -> Any:
        """The results for operands of the plan's types."""
        arrays = [x.data if x.__class__ is Tensor else x for x in operands]
        if self.converts is not None:
            arrays = [a if c is None else c(a) for c, a in zip(self.converts, arrays, strict=True)]
        with np.errstate(all="ignore"):
            out = self.ref(*arrays, **self.attrs)
            if self.ready is not None and out.dtype is self.ready:
                return like(out, self.type)  # type: ignore[arg-type]
            stored = finished(out, self.results)
        tensors = tuple(like(a, t) for a, t in zip(stored, self.results, strict=True))  # type: ignore[arg-type]
        return tensors[0] if self.type is not None else tensors


def call(op: Op, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    """The results of a call: by its plan where one is known, else the whole way, which leaves a plan."""
    context = NUMERICS.get()
    if context is not None:
        return context.call(op, *op.split(args, attrs))
    if CURRENT.get() is not None or (key := _key(args, attrs)) is None:
        return op.coerce(op, *op.split(args, attrs))
    plan = op.plans.get(key)
    if plan is None:
        return _first(op, key, args, attrs)
    try:
        return plan.run(args)
    except TesseraError as error:
        raise error.at(here()) from None
    except (TypeError, AttributeError):
        _check_traces(args)
        raise


def _key(args: tuple[Any, ...], attrs: dict[str, Any]) -> Keys | None:
    """What a plan depends on; None for calls that have none: they ask for gradients, or an attribute has no hash."""
    kinds: list[Any] = []
    for x in args:
        if x.__class__ is Tensor:
            if x.requires_grad:
                return None
            kinds.append(x.type)
        else:
            kinds.append(x.__class__)
    key = (*kinds, *attrs.items()) if attrs else tuple(kinds)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _check_traces(args: tuple[Any, ...]) -> None:
    """Say so where an operand belongs to a trace that is over, and has no elements."""
    for x in args:
        if x.__class__ is Tensor:
            x.numpy()


def _first(op: Op, key: Keys, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    operands, attributes = op.split(args, attrs)
    out = op.coerce(op, operands, attributes)
    planner = PLANNERS.get(op.coerce)
    plainly = all(_is_plain(x) for x in args)
    if planner is not None and plainly and len(args) == len(op.operands) and not op.effects:
        results = tuple(t.type for t in out) if isinstance(out, tuple) else (out.type,)
        if len(op.plans) >= MOST_PLANS:
            op.plans.clear()
        if (plan := planner(op, operands, attributes, results)) is not None:
            op.plans[key] = plan
    return out


def _is_plain(x: Any) -> bool:
    """A tensor or number; a policy of compensated sums puts another op in place of the one called."""
    return x.__class__ in NUMBERS or (x.__class__ is Tensor and not (x.type.policy and x.type.policy.compensated))


def _plan(op: Op, types: list[TensorType], steps: list[list[Convert]], attrs: Any, results: tuple[Type, ...]) -> Plan:
    if op.numerics != STORAGE:
        for type, each in zip(types, steps, strict=True):
            wide = type.compute if op.numerics == COMPUTE else type.accumulate
            each += [] if wide.numpy == type.dtype.numpy else [_to(wide)]
    if op.canonical is not None:
        attrs = op.canonical(*types, **attrs)
    return Plan(op, [_chained(each) for each in steps], attrs, results)


def _plainly(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> Plan | None:
    if not all(isinstance(x, Tensor) for x in operands):
        return None
    return _plan(op, [x.type for x in operands], [[] for _ in operands], attrs, results)


def _matrices(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> Plan | None:
    vectors = any(not isinstance(x, Tensor) or x.ndim < 2 for x in operands)
    return None if vectors else _plainly(op, operands, attrs, results)


def _pointwise(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> Plan | None:
    """NumPy broadcasts as the language does, so that only element types need work."""
    element = common_type(operands)
    if op.coerce in TO_FLOATS and not element.dtype.is_float:
        element = TensorType((), f32)
    types = [x.type if isinstance(x, Tensor) else element for x in operands]
    steps: list[list[Convert]] = [
        [] if isinstance(x, Tensor) and x.dtype == element.dtype else [_to(element.dtype, x)] for x in operands
    ]
    types = [t if t.dtype == element.dtype else t.with_dtype(element.dtype) for t in types]
    return _plan(op, types, steps, attrs, results)


def _of_floats(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> Plan | None:
    """As `_pointwise`; integers go another way."""
    return _pointwise(op, operands, attrs, results) if results[0].dtype.is_float else None


def _searched(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> Plan | None:
    return None if attrs["axis"] is None else _plainly(op, operands, attrs, results)


def _selected(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> Plan | None:
    branches = _pointwise(op, operands[1:], attrs, results)
    if branches is not None and isinstance(operands[0], Tensor):
        branches.converts = [None, *(branches.converts or [None, None])]
        return branches
    return None


def _to(dtype: DType, operand: Any = None) -> Convert:
    if operand is not None and operand.__class__ in NUMBERS:
        return lambda number: convert(np.asarray(fitting(number, dtype)), dtype)
    return lambda array: convert(array, dtype)


def _chained(steps: list[Convert]) -> Convert | None:
    if len(steps) < 2:
        return steps[0] if steps else None
    first, second = steps
    return lambda array: second(first(array))


PLANNERS: dict[Any, Callable[..., Plan | None]] = {plain: _plainly, pointwise: _pointwise, floating: _pointwise}
PLANNERS[selecting] = _selected
PLANNERS[rounding] = PLANNERS[powering] = _of_floats
PLANNERS[searching] = _searched
PLANNERS[summing] = _plainly
PLANNERS[products] = _matrices
EAGER.append(call)
