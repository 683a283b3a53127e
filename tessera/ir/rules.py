"""Op definitions and rule tables: the Op class, the decorator that makes one, and the tables of lowering, error,
derivative, transpose and batching rules."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, UnsupportedOpError, user_location
from tessera.core.hooks import infer_by_lowering
from tessera.core.types import TensorType, Type, tf32
from tessera.ir.numerics.conversion import convert, round_to_storage

# The types that the NumPy semantics of an op computes in: the storage types, the compute type of the first operand, or
# its accumulation type. The result is rounded to its storage type.
STORAGE, COMPUTE, ACCUMULATE = "storage", "compute", "accumulate"
# The kinds of elements that a pointwise op is defined for: floats alone (integers become f32 first), floats and
# integers, integers alone, or integers and bools.
FLOATS, NUMBERS, INTEGERS, BITS = ("float",), ("float", "int"), ("int", "uint"), ("int", "uint", "bool")
TRANSCENDENTAL_COST = 10  # a float function that costs this many additions is a series of instructions


@dataclass(frozen=True, eq=False)
class Op:
    """An operation: its name, NumPy semantics, attributes, type rule and effects.

    Calling an op on tensors records it in the trace that is open, or runs it at once.
    """

    name: str
    ref: Callable[..., Any]
    infer: Callable[..., Any] | None
    numerics: str
    pointwise: bool
    coerce: Callable[..., Any]
    canonical: Callable[..., Mapping[str, Any]] | None
    effects: frozenset[str]
    operands: tuple[str, ...]
    attrs: Mapping[str, inspect.Parameter] = field(repr=False)
    # Columns of a pointwise op: the kinds of elements it is for, the interval of test inputs, the largest error of a
    # target in ulps (f32, and f64 where it differs), the cost in additions, and whether Tensor has it as a method.
    kinds: tuple[str, ...] = NUMBERS
    domain: tuple[float, float] = (-3.0, 3.0)
    ulps: float | None = None
    ulps_f64: float | None = None
    cost: int = 1
    method: bool = False
    # Cached dispatch plans of eager calls, by operand types (tessera/ops/api/methods.py).
    plans: dict[Any, Any] = field(repr=False, default_factory=dict)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return self.ref.__doc__ or ""

    @property
    def __name__(self) -> str:
        return self.name.partition(".")[2]

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature for `help` and tools: attributes may be positional, too."""
        parameters, later = list(inspect.signature(self.ref).parameters.values()), False
        several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        for i, p in enumerate(parameters):
            later = later or several or (p.default is p.empty and i > 0 and parameters[i - 1].default is not p.empty)
            if p.kind is p.KEYWORD_ONLY and not later:
                parameters[i] = p.replace(kind=p.POSITIONAL_OR_KEYWORD)
        return inspect.Signature(parameters)

    @property
    def is_transcendental(self) -> bool:
        """Whether this is a float function that a target computes by a series of instructions."""
        return self.kinds == FLOATS and self.cost >= TRANSCENDENTAL_COST

    @cached_property
    def _defaults(self) -> tuple[tuple[str, Any], ...]:
        return tuple((k, p.default) for k, p in self.attrs.items())

    @cached_property
    def _required(self) -> list[str]:
        return [k for k, default in self._defaults if default is inspect.Parameter.empty]

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # The rule tables know an op by its identity: a copy is the op itself, and it is pickled by its name.
    def __copy__(self) -> Op:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Op:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _find_op, (self.ref.__module__, self.name)

    def __call__(self, *args: Any, **attrs: Any) -> Any:
        return EAGER_CALL_HOOK[0](self, args, attrs)

    def split(self, args: tuple, keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Split the arguments of a call into operands and attributes; both may be passed by name."""
        if len(args) == len(self.operands) and all([k in self.attrs and k not in ATTRIBUTE_ALIASES for k in keywords]):
            return list(args), self.complete(keywords)  # as most calls are
        known = (*self.operands, *self.attrs)
        named = {ATTRIBUTE_ALIASES[k] if ATTRIBUTE_ALIASES.get(k) in known else k: v for k, v in keywords.items()}
        operands = list(args[: len(self.operands)])
        for name in self.operands[len(operands) :]:
            if name in named:
                operands.append(named.pop(name))
        extra = dict(zip(self.attrs, args[len(self.operands) :], strict=False))
        unknown = [k for k in named if k not in self.attrs or k in extra]
        if unknown or len(args) > len(self.operands) + len(self.attrs):
            raise ArgumentError(
                f"{self.__name__} does not take these arguments", location=user_location(),
                expected=f"{self.__name__}({', '.join([*self.operands, *self.attrs])})",
                received=", ".join(unknown) or f"{len(args)} arguments",
            )  # fmt: skip
        return operands, self.complete({**extra, **named})

    def complete(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes with defaults filled in."""
        if not self._defaults:
            return {}
        found = {k: attrs.get(k, default) for k, default in self._defaults}
        if self._required and (missing := [k for k in self._required if found[k] is inspect.Parameter.empty]):
            raise ArgumentError(
                f"{self.__name__} needs {', '.join(missing)}", location=user_location(),
                expected=f"{self.__name__}({', '.join([*self.operands, *self.attrs])})",
            )  # fmt: skip
        return found

    @cached_property
    def type_rule(self) -> Callable[..., Any]:
        """The function from the types of operands to those of results; a composite's is that of its lowering."""
        return self.infer or infer_by_lowering(self)  # type: ignore[no-any-return]

    def result_types(self, types: tuple[Type, ...], attrs: Mapping[str, Any]) -> tuple[Type, ...]:
        """The types of the results, by the op's type rule."""
        found = self.type_rule(*types, **attrs)
        return found if isinstance(found, tuple) else () if found is None else (found,)

    def execute(
        self, types: tuple[Type, ...], results: tuple[Type, ...], attrs: Mapping[str, Any], arrays: list[Any]
    ) -> tuple[Any, ...]:
        """Compute the results as arrays: widen, compute, round (design: compute = storage widened to f32)."""
        with np.errstate(all="ignore"):
            return self.compute(types, results, attrs, arrays)

    def compute(
        self, types: tuple[Type, ...], results: tuple[Type, ...], attrs: Mapping[str, Any], arrays: list[Any]
    ) -> tuple[Any, ...]:
        """As `execute`, for callers that have disabled NumPy's warnings."""
        if self.numerics != STORAGE:
            arrays = [self._widen(t, a) for t, a in zip(types, arrays, strict=True)]
        return round_results(self.ref(*arrays, **attrs), results)

    def _widen(self, type: Type, array: Any) -> Any:
        assert isinstance(type, TensorType)
        wide = type.compute if self.numerics == COMPUTE else type.accumulate
        return array if wide.numpy == array.dtype else convert(array, wide)


def round_results(out: Any, results: tuple[Type, ...]) -> tuple[Any, ...]:
    """Round the results of an op's semantics to the storage of their types."""
    if isinstance(out, tuple):
        return tuple(_round_to_storage(a, t) for a, t in zip(out, results, strict=True))
    return (_round_to_storage(out, results[0]),)


def _round_to_storage(array: Any, type: Type) -> Any:
    if type.dtype.numpy == array.dtype and type.policy is None and type.dtype is not tf32:
        return array
    return round_to_storage(array, type.dtype, type.policy, type.policy.seed if type.policy else 0)


# Keyword aliases: dim is axis, keepdim is keepdims, and PyTorch's names of the mask of attention.
ATTRIBUTE_ALIASES = {
    "dim": "axis", "keepdim": "keepdims", "dims": "axes", "attn_mask": "mask", "is_causal": "causal",
    "dropout_p": "dropout",
}  # fmt: skip

REGISTRY: dict[str, Op] = {}


def _find_op(module: str, name: str) -> Op:
    """The op of a pickle, by the module that defines it."""
    importlib.import_module(module)
    return REGISTRY[name]


def op(
    *,
    infer: Callable[..., Any] | None = None,
    coerce: Callable[..., Any],
    numerics: str = COMPUTE,
    pointwise: bool = False,
    canonical: Callable[..., Mapping[str, Any]] | None = None,
    effects: tuple[str, ...] = (),
    dialect: str = "ts",
    name: str | None = None,
    **columns: Any,
) -> Callable[[Callable[..., Any]], Op]:
    """Define an op by its NumPy semantics; the keyword-only parameters are the attributes.

    `infer(*types, **attrs)` gives the result types; a composite may leave it out, since its lowering gives them.
    `coerce(op, operands, attrs)` converts the arguments of a call to operands and binds the op.
    `columns` are those of a pointwise op: `kinds`, `domain`, `ulps`, `ulps_f64`, `cost`, `method` (see `Op`).
    """

    def define(ref: Callable[..., Any]) -> Op:
        parameters = inspect.signature(ref).parameters
        keyword = {k: p for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        full = f"{dialect}.{name or ref.__name__}"
        assert full not in REGISTRY, f"{full} is defined twice"
        assert not (pointwise and effects), f"{full}: a pointwise op has no effects, since kernels are fused around it"
        REGISTRY[full] = Op(
            full,
            ref,
            infer,
            numerics,
            pointwise,
            coerce,
            canonical,
            frozenset(effects),
            tuple(k for k in parameters if k not in keyword),
            keyword,
            **columns,
        )
        return REGISTRY[full]

    return define


@dataclass(frozen=True)
class AxisFactors:
    """The sharding rule of an op (Shardy): axes of operands and results with one name are cut alike.

    An axis whose name is None is whole. The results are partial along a factor in `reduced` that is cut, to be combined
    by its reduction ("sum", "max", "min", "prod").
    """

    operands: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[Any, ...], ...]
    reduced: Mapping[Any, str] = field(default_factory=dict)


class Rules:
    """A table from op to function, filled by decorator.

    >>> emit = Rules("emit")
    >>> # @emit(exp, log)
    >>> # def _(node, x): ...
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._table: dict[Op, Callable[..., Any]] = {}

    def __call__(self, *ops: Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for each in ops:
                assert each not in self._table, f"{self.name} has two rows for {each.name}"
                self._table[each] = function
            return function

        return add

    def __contains__(self, op: Op) -> bool:
        return op in self._table

    def __iter__(self) -> Iterator[Op]:
        return iter(self._table)

    def get(self, op: Op) -> Callable[..., Any] | None:
        """The row for an op, or None."""
        return self._table.get(op)

    def of(self, op: Op) -> Callable[..., Any]:
        """The row for an op; an error names the op and the table where there is none."""
        row = self._table.get(op)
        if row is None:
            raise UnsupportedOpError(f"{op.name} has no {self.name} rule")
        return row


lower = Rules("lowering")
error = Rules("error")
# jvp(out, primals, tangents, **attrs) gives the tangent of the result; a tangent of None is zero.
jvp = Rules("derivative")
# transpose(g, *operands, **attrs) gives a cotangent for each operand; an unknown operand is passed as its type.
transpose = Rules("transpose")
# batch(lanes, **attrs) gives the result with a new leading axis; pointwise ops need no row
# (tessera/transforms/batching.py).
batch = Rules("batching")
# sharding(types, results, **attrs) gives the AxisFactors of an op; pointwise ops need no row
# (tessera/dist/propagation.py).
sharding = Rules("sharding")
# The implementation of op calls; tessera/ops/api sets it on import.
EAGER_CALL_HOOK: list[Callable[[Op, tuple[Any, ...], dict[str, Any]], Any]] = []
