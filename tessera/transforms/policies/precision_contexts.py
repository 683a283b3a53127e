"""Mixed precision: precision contexts, named, custom and adaptive policies, and loss scaling (Micikevicius et al.
2018)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, user_location
from tessera.core.pytree import flatten, map_leaves
from tessera.core.types import DType, Policy, as_dtype, bf16, f16, f32, find_policy
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.reduce import all
from tessera.ops.tensor.scalar_functions import isfinite
from tessera.transforms.policies.numeric_context import NumericContext, NumericSettings

# Precision as policies and contexts: `ts.precision`, `ts.numerics`, named, custom and adaptive policies.


T = TypeVar("T", bound=type)
# The documented spellings, and the names of the clauses.
CLAUSE_ALIASES = {"round": "rounding", "denorm_mode": "denormals"}
CLAUSES = ("compute", "accumulate", "rounding", "saturate", "denormals", "loss_scale", "compensated")
NAMED_POLICIES: dict[str, Policy] = {"mixed": Policy(f32, compute=f16, accumulate=f32), "full": Policy(f32, f32, f32)}


def precision(
    name: str | None = None, *, compute: Any = None, accumulate: Any = None, store: Any = None
) -> NumericContext:
    """A context in which ops compute, accumulate and store in these types; by name, "mixed" or "full".

    "mixed" computes in f16 and accumulates in f32, for any storage type; "full" uses f32. Without `store` each result
    keeps the type of its operands. Operands are cast in the program itself. Also a decorator.

    Raises:
        ArgumentError: the name of the precision is unknown.
        DTypeError: a type is not a float type.

    >>> from tessera.core.types import bf16
    >>> with precision(compute=bf16, accumulate=f32, store=bf16):
    ...     y = Tensor([1.0]) + Tensor([2.0**-9])
    >>> y
    Tensor([1], bf16 @ compute=bf16 @ accumulate=f32)
    """
    if name is not None:
        return NumericContext(_settings_of_policy(_find_policy(name), stores=False))
    given = {"compute": compute, "accumulate": accumulate}
    element = as_dtype(store) if store is not None else None
    if element is not None and not element.is_float:
        raise DTypeError(
            f"precision stores floats, not {element}", location=user_location(), suggestion="ts.quantization_aware"
        )
    return NumericContext(NumericSettings({k: as_dtype(v) for k, v in given.items() if v is not None}, element))


def _find_policy(name: str) -> Policy:
    if name not in NAMED_POLICIES:
        raise ArgumentError(f"unknown policy {name!r}", location=user_location(), expected=", ".join(NAMED_POLICIES))
    return NAMED_POLICIES[name]


def _settings_of_policy(policy: Policy, stores: bool = True) -> NumericSettings:
    return NumericSettings(
        {k: v for k, v in policy.clauses().items() if k in CLAUSES}, policy.storage if stores else None
    )


class NumericalPolicy:
    """The base of policies written as classes: `storage`, `compute`, `accumulate`, `rounding`, ... as attributes.

    >>> from tessera.core.types import bf16
    >>> class Training(NumericalPolicy):
    ...     storage = bf16
    ...     accumulate = f32
    >>> Training.__policy__
    ts.bf16 @ accumulate=f32
    """

    __policy__: Policy

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__policy__ = _read_policy_attributes(cls)


def _read_policy_attributes(cls: type) -> Policy:
    found: dict[str, Any] = {}
    for name in ("storage", *CLAUSES, *CLAUSE_ALIASES):
        if hasattr(cls, name):
            found[CLAUSE_ALIASES.get(name, name)] = getattr(cls, name)
    if "storage" not in found:
        raise ArgumentError(
            f"the policy {cls.__name__} has no storage", location=user_location(), expected="storage = ts.bf16"
        )
    return Policy(**found)


def precision_policy(cls: T) -> T:
    """Make a policy of a class: its clauses for storage and arithmetic, and its quantisation.

    The class may be the element type of an annotation. `quantize(x)` and `dequantize(*parts)` are methods of the
    class; `QuantizedPolicy().quantize(x)` returns the stored parts, here elements and their scale.

    >>> from tessera.ops import elementwise as e, reduce as r
    >>> @precision_policy
    ... class Quantized:
    ...     storage = "int8"
    ...     compute = f32
    ...     def quantize(self, x):
    ...         scale = r.max(e.abs(x)) / 127.0
    ...         return e.round(x / scale).astype("int8"), scale
    ...     def dequantize(self, x, scale):
    ...         return x.astype(f32) * scale
    >>> Quantized().dequantize(*Quantized().quantize(Tensor([1.0, -2.0]))).tolist()[1]
    -2.0
    """
    cls.__policy__ = _read_policy_attributes(cls)  # type: ignore[attr-defined]
    return cls


class NumericsNamespace:
    """`ts.numerics`: a context of a policy, or of single clauses; `ts.numerics.policy` names one.

    >>> from tessera.core.types import bf16
    >>> with numerics(accumulate=f32, round="toward_zero"):
    ...     (Tensor([1.0], bf16) + Tensor([2.0**-7 + 2.0**-8], bf16)).item()
    1.0078125
    """

    def __call__(self, policy: Any = None, **clauses: Any) -> NumericContext:
        """A context in which results have this policy (a Policy, a class or a name), or these clauses."""
        named = {CLAUSE_ALIASES.get(k, k): v for k, v in clauses.items()}
        store = named.pop("store", named.pop("storage", None))
        unknown = [k for k in named if k not in CLAUSES]
        if unknown:
            raise ArgumentError(
                f"numerics has no clause {unknown[0]}", location=user_location(), expected=", ".join(CLAUSES)
            )
        frame = NumericSettings()
        if policy is not None:
            found = _find_policy(policy) if isinstance(policy, str) else find_policy(policy)
            if found is None:
                raise ArgumentError(
                    f"{policy!r} is not a policy", location=user_location(), expected="a Policy, its name or its class"
                )
            frame = _settings_of_policy(found, stores=not isinstance(policy, str) or policy not in ("mixed", "full"))
        checked = Policy(f32, **named).clauses()
        return NumericContext(
            NumericSettings({**frame.clauses, **checked}, as_dtype(store) if store is not None else frame.store)
        )

    def policy(self, name: str) -> Callable[[T], T]:
        """Register the policy of a class under a name, for `ts.numerics(name)` and `ts.precision(name)`."""

        def register(cls: T) -> T:
            made = cls if find_policy(cls) is not None else precision_policy(cls)
            found = find_policy(made)
            assert found is not None
            NAMED_POLICIES[name] = found
            return made

        return register


numerics = NumericsNamespace()


class PrecisionPolicy:
    """The base of policies that choose a type for each tensor, by the magnitude of the latest gradients."""

    def select_precision(self, tensor: Tensor, grad_scale: float) -> DType:
        """The storage type of this operand."""
        raise NotImplementedError


class AdaptivePrecision:
    """A function whose float operands are stored in types by a policy; `observe(gradients)` sets its scale."""

    def __init__(self, function: Callable[..., Any], policy: PrecisionPolicy) -> None:
        functools.update_wrapper(self, function)
        self.function, self.policy, self.grad_scale = function, policy, 1.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        scale, select = self.grad_scale, self.policy.select_precision
        with NumericContext(NumericSettings(store=_ScaledDTypeSelector(select, scale))):
            return self.function(*args, **named)

    def observe(self, gradients: Any) -> float:
        """Take the largest magnitude of these gradients (a tensor or a container of them) as the new scale."""
        leaves = [np.abs(as_tensor(leaf).numpy().astype(np.float64)) for _, leaf in flatten(gradients)[0]]
        self.grad_scale = float(max((a.max(initial=0.0) for a in leaves), default=0.0))
        return self.grad_scale


class _ScaledDTypeSelector:
    """The selection of a policy at a scale; hashable, as a key of traces."""

    def __init__(self, select: Callable[[Tensor, float], DType], scale: float) -> None:
        self.select, self.scale = select, scale

    def __call__(self, tensor: Tensor) -> DType:
        return as_dtype(self.select(tensor, self.scale))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ScaledDTypeSelector) and (self.select, self.scale) == (other.select, other.scale)

    def __hash__(self) -> int:
        return hash((self.select, self.scale))


def adaptive_precision(policy: PrecisionPolicy) -> Callable[[Callable[..., Any]], AdaptivePrecision]:
    """Run a function with operands stored in the type `policy.select_precision(tensor, grad_scale)`.

    The scale is 1 at first; `function.observe(gradients)` sets it to their largest magnitude.

    >>> from tessera.core.types import bf16
    >>> class Careful(PrecisionPolicy):
    ...     def select_precision(self, tensor, grad_scale):
    ...         return f32 if grad_scale > 1e3 else bf16
    >>> @adaptive_precision(Careful())
    ... def double(x):
    ...     return x + x
    >>> double(Tensor([1.0])).dtype, double.observe(Tensor([-2e3])), double(Tensor([1.0])).dtype
    (ts.bf16, 2000.0, ts.f32)
    """
    return lambda function: AdaptivePrecision(function, policy)


# Loss scaling: keeps small gradients in the range of a narrow type.


# The active mixed precision: its context and its scale.
ACTIVE_MIXED_PRECISION: ContextVar[tuple[NumericContext, float] | None] = ContextVar("mixed", default=None)


def mixed_precision(
    function: Callable[..., Any] | None = None,
    *,
    compute: DType = bf16,
    accumulate: DType = f32,
    grad_scale: float = 1.0,
) -> Any:
    """Run a function in which `ts.autocast()` opens this precision and `ts.grad_scale()` is this scale.

    >>> @mixed_precision(compute=bf16, grad_scale=1024.0)
    ... def step(x):
    ...     with autocast():
    ...         y = x + x
    ...     return y * grad_scale()
    >>> step(as_tensor([1.0])).tolist()
    [2048.0]

    Raises:
        ArgumentError: the scale is not above 0.
    """
    if not grad_scale > 0:
        raise ArgumentError(f"a gradient scale of {grad_scale}", location=user_location(), expected="a number above 0")
    if function is None:
        return functools.partial(mixed_precision, compute=compute, accumulate=accumulate, grad_scale=grad_scale)
    context = precision(compute=compute, accumulate=accumulate)

    @functools.wraps(function)
    def scaled(*args: Any, **named: Any) -> Any:
        token = ACTIVE_MIXED_PRECISION.set((context, float(grad_scale)))
        try:
            return function(*args, **named)
        finally:
            ACTIVE_MIXED_PRECISION.reset(token)

    return scaled


def autocast() -> NumericContext:
    """The context of the active `mixed_precision` function; outside of one, a context without effect."""
    found = ACTIVE_MIXED_PRECISION.get()
    return NumericContext(found[0].frame if found else NumericSettings())


def _current_grad_scale() -> float:
    found = ACTIVE_MIXED_PRECISION.get()
    return found[1] if found else 1.0


def grad_scale() -> float:
    """The gradient scale of the active `mixed_precision` function; 1.0 outside of one."""
    return _current_grad_scale()


def unscale_grads(gradients: Any, scale: float | None = None) -> Any:
    """Gradients (a tensor or a container of them) divided by `scale`, by default `ts.grad_scale()`, in f32 or wider.

    >>> unscale_grads({"w": as_tensor([8.0])}, 4.0)["w"].tolist()
    [2.0]
    """
    by = _current_grad_scale() if scale is None else scale
    return map_leaves(lambda g: _widen_to_f32(g) * (1.0 / by), gradients)


def _widen_to_f32(x: Any) -> Tensor:
    """A tensor as f32 unless it is wider: a scale or a small gradient may not be representable in f16."""
    x = as_tensor(x)
    return cast(x, dtype=f32) if x.dtype.is_float and x.dtype.bits < 32 else x


class LossScaler:
    """A loss scale that grows while gradients stay finite and shrinks when they do not.

    After Micikevicius et al., "Mixed precision training" (2018), section 3.2: double after `interval` steps with
    finite gradients, halve after any other step, which is skipped.

    >>> scaler = LossScaler(scale=4.0, interval=1)
    >>> gradients, good = scaler.unscale(as_tensor([8.0]))
    >>> gradients.tolist(), good, scaler.update(good)
    ([2.0], True, 8.0)
    """

    def __init__(self, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        self.factor, self.growth, self.backoff, self.interval = float(scale), growth, backoff, interval
        self._good_steps = 0

    def scale(self, loss: Any) -> Any:
        """The loss times the scale, in f32 or wider."""
        return _widen_to_f32(loss) * self.factor

    def unscale(self, gradients: Any) -> tuple[Any, bool]:
        """The gradients divided by the scale, and whether all of them are finite."""
        leaves = [as_tensor(leaf) for _, leaf in flatten(gradients)[0]]
        finite = [bool(all(isfinite(leaf))) for leaf in leaves]
        return unscale_grads(gradients, self.factor), False not in finite

    def update(self, good: bool) -> float:
        """The scale for the next step, after a step whose gradients were finite or not."""
        self._good_steps = self._good_steps + 1 if good else 0
        if not good:
            self.factor *= self.backoff
        elif self._good_steps == self.interval:
            self.factor, self._good_steps = self.factor * self.growth, 0
        return self.factor
