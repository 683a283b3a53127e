"""Numeric context: settings that cast the operands of ops and substitute ops; decorators for stable forms, compensated
summation (Kahan 1965) and rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass, field
from typing import Any

from tessera import stable
from tessera.core.types import DType, Policy, f32
from tessera.ir.builder import CURRENT_NUMERICS, override_numerics
from tessera.ir.rules import STORAGE, Op
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import nn, reduce
from tessera.ops.tensor.attention import scaled_dot_product_attention
from tessera.ops.tensor.basic import cast, stop_gradient
from tessera.ops.tensor.contractions import dot, find_product_dtype

# A numeric context: casts of the float operands of ops, and substitutions of ops.


DTypeSelector = Callable[[Tensor], DType]
Substitute = Callable[..., Any]
PRODUCTS = (dot, scaled_dot_product_attention)  # the ops of matrix products; convolutions and einsum are made of `dot`


@dataclass(frozen=True)
class NumericSettings:
    """The settings of a context: policy clauses, the storage type of results, and substitutes of ops.

    A cast in the program adds the clauses to the types of float operands, so that every level and target sees them.
    """

    clauses: Mapping[str, Any] = field(default_factory=dict)
    store: DType | DTypeSelector | None = None
    substitutes: Mapping[Op, Substitute] = field(default_factory=dict)
    seed_counter: Iterator[int] = field(default_factory=itertools.count, compare=False)

    def key(self) -> tuple[Any, ...]:
        """The key of traces made in this context."""
        return tuple(sorted(self.clauses.items(), key=str)), self.store, tuple(self.substitutes.items())

    def within(self, outer: NumericSettings | None) -> NumericSettings:
        """This frame inside another one, whose settings apply where this one has none."""
        if outer is None:
            return self
        return NumericSettings(
            {**outer.clauses, **self.clauses},
            self.store or outer.store,
            {**outer.substitutes, **self.substitutes},
            self.seed_counter,
        )

    def call(self, op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        """The results of an op on a user's operands, under this frame's policies."""
        if op in self.substitutes:
            with override_numerics(NumericSettings(self.clauses, self.store, seed_counter=self.seed_counter)):
                return self.substitutes[op](*operands, **attrs)
        if op not in (cast, stop_gradient):
            operands = self.cast_operands(op, operands)
        with override_numerics(None):
            return self._multiply(op, operands, attrs) if op in PRODUCTS else op(*operands, **attrs)

    def _multiply(self, op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> Tensor:
        """An op of matrix products on operands rounded to the compute type, if it is no wider than theirs: matrix units
        multiply that type. The result has the type that it has without the context."""
        compute = self.clauses.get("compute")
        floats = [x for x in operands if _is_float(x)]
        if compute is None or not floats or any(compute.bits > x.dtype.bits for x in floats):
            return op(*operands, **attrs)
        policy = floats[0].type.policy or Policy(floats[0].dtype)
        accumulate = None if policy.accumulate == f32 else policy.accumulate
        narrow = dataclasses.replace(policy, storage=compute, compute=None, accumulate=accumulate)
        if op is dot and attrs.get("dtype") is None:  # not rounded twice
            attrs = {**attrs, "dtype": find_product_dtype(*(x.type for x in floats))}
        out = op(*(cast(x, dtype=narrow) if _is_float(x) else x for x in operands), **attrs)
        stored = attrs.get("dtype") or policy.storage
        return cast(out, dtype=dataclasses.replace(policy, storage=stored))

    def cast_state(self, x: Any) -> Any:
        """The initial state of a loop under this frame's policies, which each step gives its results."""
        with override_numerics(None):
            return self._cast_operand(x, {})

    def cast_operands(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        """The float operands under this frame's policies; an op that only moves one tensor takes it unchanged."""
        floats = [x for x in _iterate_operands(operands) if _is_float(x)]
        if not floats or (op.numerics == STORAGE and len(floats) == 1):
            return list(operands)
        draw = {"seed": next(self.seed_counter)} if self.clauses.get("rounding") == "stochastic" else {}
        with override_numerics(None):
            return [self._cast_operand(x, draw) for x in operands]

    def _cast_operand(self, x: Any, draw: dict[str, int]) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._cast_operand(each, draw) for each in x]
        if not _is_float(x):
            return x
        store = self.store if isinstance(self.store, DType) else x.dtype if self.store is None else self.store(x)
        base = x.type.policy if x.type.policy and store == x.dtype else Policy(store)
        wanted = dataclasses.replace(base, **{**self.clauses, **draw})
        return x if wanted == (x.type.policy or Policy(x.dtype)) else cast(x, dtype=wanted)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_float


def _iterate_operands(operands: Sequence[Any]) -> Iterator[Any]:
    for x in operands:
        yield from x if isinstance(x, (list, tuple)) else (x,)


class NumericContext:
    """A context of a frame: `with context:`, or the decorator of a function that runs inside it.

    >>> from tessera.core.types import f16
    >>> with NumericContext(NumericSettings({"compute": f16})):
    ...     Tensor([2048.0]) + 1.0
    Tensor([2048.], f32 @ compute=f16)
    """

    def __init__(self, frame: NumericSettings) -> None:
        self.frame = frame
        self._tokens: list[Token[Any]] = []

    def __enter__(self) -> NumericContext:
        outer = CURRENT_NUMERICS.get()
        self._tokens.append(
            CURRENT_NUMERICS.set(self.frame.within(outer if isinstance(outer, NumericSettings) else None))
        )
        return self

    def __exit__(self, *_: object) -> None:
        CURRENT_NUMERICS.reset(self._tokens.pop())

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **named: Any) -> Any:
            with self:
                return function(*args, **named)

        return inside


# Decorators for more accurate arithmetic: stable forms, compensated sums, stochastic rounding.


def _stable_variance(x: Any, axis: Any = None, keepdims: bool = False, correction: float = 0.0) -> Tensor:
    return stable.variance(x, axis=axis, keepdims=keepdims, correction=correction)


def _stable_std(x: Any, axis: Any = None, keepdims: bool = False, correction: float = 0.0) -> Tensor:
    return _stable_variance(x, axis, keepdims, correction).sqrt()


def _stable_normalise(x: Any, axis: Any = -1, eps: float = 1e-5, center: bool = True) -> Tensor:
    return stable.layer_norm(x, axis=axis, eps=eps) if center else stable.rms_norm(x, eps=eps)


# Substitutes of ops whose usual form overflows or cancels.
STABLE_FORMS: dict[Any, Callable[..., Any]] = {
    reduce.mean: lambda x, axis=None, keepdims=False: stable.mean(x, axis=axis, keepdims=keepdims),
    reduce.var: _stable_variance,
    reduce.std: _stable_std,
    reduce.logsumexp: lambda x, axis=None, keepdims=False: stable.logsumexp(x, axis=axis, keepdims=keepdims),
    nn.softmax: stable.softmax,
    nn.log_softmax: stable.log_softmax,
    nn.normalize: _stable_normalise,
}


def numerically_stable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with means, variances, norms and softmax in their stable forms (`tessera.stable`).

    >>> @numerically_stable
    ... def spread(x):
    ...     return x.var()
    >>> spread(Tensor([60000.0, 60002.0], "f16")).item()
    0.0
    """
    return NumericContext(NumericSettings(substitutes=STABLE_FORMS))(function)


KAHAN_CONTEXT = NumericContext(NumericSettings({"compensated": True}))


def kahan_sum(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function with `sum` and `mean` compensated: the error no longer grows with the number of elements.

    >>> @kahan_sum
    ... def total(x):
    ...     return x.sum()
    >>> total(Tensor([1e8, 1.0, -1e8, 1.0])).item()
    2.0
    """
    return KAHAN_CONTEXT(function)


class SummationNamespace:
    """`ts.summation`: how sums are computed; `@ts.summation.kahan` compensates them."""

    kahan = staticmethod(kahan_sum)


class RoundingNamespace:
    """`ts.rounding`: how results are rounded; each is a decorator."""

    @staticmethod
    def stochastic(function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a function with every result rounded up or down at random, in proportion to its distance."""
        return NumericContext(NumericSettings({"rounding": "stochastic"}))(function)

    @staticmethod
    def toward_zero(function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a function with every result rounded toward zero."""
        return NumericContext(NumericSettings({"rounding": "toward_zero"}))(function)


summation, rounding = SummationNamespace(), RoundingNamespace()
