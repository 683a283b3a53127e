"""Precision as policies and contexts: `ts.precision`, `ts.numerics`, named, custom and adaptive policies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from tessera.errors import ArgumentError, DTypeError, here
from tessera.policies.frame import Context, Frame
from tessera.pytree import flatten
from tessera.tensor import Tensor, as_tensor
from tessera.types import DType, Policy, as_dtype, f16, f32, policy_of

T = TypeVar("T", bound=type)
# The spellings of the documents, and what the clauses are called here.
SPELLINGS = {"round": "rounding", "denorm_mode": "denormals"}
CLAUSES = ("compute", "accumulate", "rounding", "saturate", "denormals", "loss_scale", "compensated")
NAMED: dict[str, Policy] = {"mixed": Policy(f32, compute=f16, accumulate=f32), "full": Policy(f32, f32, f32)}


def precision(name: str | None = None, *, compute: Any = None, accumulate: Any = None, store: Any = None) -> Context:
    """A context in which ops compute, accumulate and store in these types; by name, "mixed" or "full".

    "mixed" computes in f16 and accumulates in f32, whatever is stored; "full" uses f32. Without `store` each result
    keeps the type of its operands. Operands are cast in the program itself. Also a decorator.

    Raises:
        ArgumentError: there is no precision of that name.
        DTypeError: a type is none, or stores no floats.

    >>> from tessera.types import bf16
    >>> with precision(compute=bf16, accumulate=f32, store=bf16):
    ...     y = Tensor([1.0]) + Tensor([2.0**-9])
    >>> y
    Tensor([1], bf16 @ compute=bf16 @ accumulate=f32)
    """
    if name is not None:
        return Context(_frame(_named(name), stores=False))
    given = {"compute": compute, "accumulate": accumulate}
    element = as_dtype(store) if store is not None else None
    if element is not None and not element.is_float:
        raise DTypeError(f"precision stores floats, not {element}", location=here(), suggestion="ts.quantization_aware")
    return Context(Frame({k: as_dtype(v) for k, v in given.items() if v is not None}, element))


def _named(name: str) -> Policy:
    if name not in NAMED:
        raise ArgumentError(f"there is no policy {name!r}", location=here(), expected=", ".join(NAMED))
    return NAMED[name]


def _frame(policy: Policy, stores: bool = True) -> Frame:
    return Frame({k: v for k, v in policy.clauses().items() if k in CLAUSES}, policy.storage if stores else None)


class NumericalPolicy:
    """The base of policies written as classes: `storage`, `compute`, `accumulate`, `rounding`, ... as attributes.

    >>> from tessera.types import bf16
    >>> class Training(NumericalPolicy):
    ...     storage = bf16
    ...     accumulate = f32
    >>> Training.__policy__
    ts.bf16 @ accumulate=f32
    """

    __policy__: Policy

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__policy__ = _from_attributes(cls)


def _from_attributes(cls: type) -> Policy:
    found: dict[str, Any] = {}
    for name in ("storage", *CLAUSES, *SPELLINGS):
        if hasattr(cls, name):
            found[SPELLINGS.get(name, name)] = getattr(cls, name)
    if "storage" not in found:
        raise ArgumentError(f"the policy {cls.__name__} has no storage", location=here(), expected="storage = ts.bf16")
    return Policy(**found)


def precision_policy(cls: T) -> T:
    """Make a policy of a class: what it says of storage and arithmetic, and how it quantizes.

    The class may stand as the element type of an annotation. `quantize(x)` and `dequantize(*parts)` are its own
    methods; `QuantizedPolicy().quantize(x)` gives the parts that are stored, here elements and their scale.

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
    cls.__policy__ = _from_attributes(cls)  # type: ignore[attr-defined]
    return cls


class Numerics:
    """`ts.numerics`: a context of a policy, or of single clauses; `ts.numerics.policy` names one.

    >>> from tessera.types import bf16
    >>> with numerics(accumulate=f32, round="toward_zero"):
    ...     (Tensor([1.0], bf16) + Tensor([2.0**-7 + 2.0**-8], bf16)).item()
    1.0078125
    """

    def __call__(self, policy: Any = None, **clauses: Any) -> Context:
        """A context in which results have this policy (a Policy, a class or a name), or these clauses."""
        named = {SPELLINGS.get(k, k): v for k, v in clauses.items()}
        store = named.pop("store", named.pop("storage", None))
        unknown = [k for k in named if k not in CLAUSES]
        if unknown:
            raise ArgumentError(f"numerics has no clause {unknown[0]}", location=here(), expected=", ".join(CLAUSES))
        frame = Frame()
        if policy is not None:
            found = _named(policy) if isinstance(policy, str) else policy_of(policy)
            if found is None:
                raise ArgumentError(
                    f"{policy!r} is no policy", location=here(), expected="a Policy, its name or its class"
                )
            frame = _frame(found, stores=not isinstance(policy, str) or policy not in ("mixed", "full"))
        checked = Policy(f32, **named).clauses()
        return Context(Frame({**frame.clauses, **checked}, as_dtype(store) if store is not None else frame.store))

    def policy(self, name: str) -> Callable[[T], T]:
        """Name the policy that a class is, for `ts.numerics(name)` and `ts.precision(name)`."""

        def register(cls: T) -> T:
            made = cls if policy_of(cls) is not None else precision_policy(cls)
            found = policy_of(made)
            assert found is not None
            NAMED[name] = found
            return made

        return register


numerics = Numerics()


class PrecisionPolicy:
    """The base of policies that choose a type for each tensor, by the magnitude of gradients seen last."""

    def select_precision(self, tensor: Tensor, grad_scale: float) -> DType:
        """The type to store this operand in."""
        raise NotImplementedError


class Adaptive:
    """A function whose float operands are stored as a policy chooses; `observe(gradients)` tells it their magnitude."""

    def __init__(self, function: Callable[..., Any], policy: PrecisionPolicy) -> None:
        functools.update_wrapper(self, function)
        self.function, self.policy, self.grad_scale = function, policy, 1.0

    def __call__(self, *args: Any, **named: Any) -> Any:
        scale, select = self.grad_scale, self.policy.select_precision
        with Context(Frame(store=_Chooser(select, scale))):
            return self.function(*args, **named)

    def observe(self, gradients: Any) -> float:
        """Take the largest magnitude of these gradients (a tensor or a container of them) as the new scale."""
        leaves = [np.abs(as_tensor(leaf).numpy().astype(np.float64)) for _, leaf in flatten(gradients)[0]]
        self.grad_scale = float(max((a.max(initial=0.0) for a in leaves), default=0.0))
        return self.grad_scale


class _Chooser:
    """A policy's choice at a scale; equal ones make equal traces."""

    def __init__(self, select: Callable[[Tensor, float], DType], scale: float) -> None:
        self.select, self.scale = select, scale

    def __call__(self, tensor: Tensor) -> DType:
        return as_dtype(self.select(tensor, self.scale))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Chooser) and (self.select, self.scale) == (other.select, other.scale)

    def __hash__(self) -> int:
        return hash((self.select, self.scale))


def adaptive_precision(policy: PrecisionPolicy) -> Callable[[Callable[..., Any]], Adaptive]:
    """Run a function with operands stored as `policy.select_precision(tensor, grad_scale)` says.

    The scale is 1 at first; `function.observe(gradients)` sets it to their largest magnitude.

    >>> from tessera.types import bf16
    >>> class Careful(PrecisionPolicy):
    ...     def select_precision(self, tensor, grad_scale):
    ...         return f32 if grad_scale > 1e3 else bf16
    >>> @adaptive_precision(Careful())
    ... def double(x):
    ...     return x + x
    >>> double(Tensor([1.0])).dtype, double.observe(Tensor([-2e3])), double(Tensor([1.0])).dtype
    (ts.bf16, 2000.0, ts.f32)
    """
    return lambda function: Adaptive(function, policy)
