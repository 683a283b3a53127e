"""Custom derivative rules: custom_jvp, custom_vjp, checkpoint, straight_through, and the decorator autodiff."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.pytree import TreeDef, call_and_warn, flatten
from tessera.frontend.jit.tracing import leaf_type
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.basic import splat
from tessera.transforms.autodiff import call_primitives
from tessera.transforms.autodiff.call_primitives import CheckpointPolicy, check_checkpoint_policy
from tessera.transforms.autodiff.gradients import check_tangent, function_name
from tessera.transforms.batching import vmap

Function = Callable[..., Any]


@dataclass(frozen=True)
class CustomJvpRule(call_primitives.DerivativeRule):
    """A user's JVP rule over lists of tensors."""

    name: str
    count: int
    push: Function

    def batched(self) -> CustomJvpRule:
        """The rule for a batch of examples."""
        return CustomJvpRule(self.name, self.count, vmap(self.push))


@dataclass(frozen=True)
class CustomVjpRule(call_primitives.DerivativeRule):
    """A VJP rule: forward(operands) returns results and residuals, backward(residuals, g) cotangents.

    It may have `push` for forward mode too, as a JVP rule. With `derives` a mode without a rule goes through the region
    of the call; else it is an error.
    """

    name: str
    count: int
    forward: Function
    backward: Function | None
    push: Function | None = None
    derives: bool = False

    def batched(self) -> CustomVjpRule:
        """The rule for a batch of examples."""
        backward, push = self.backward and vmap(self.backward), self.push and vmap(self.push)
        return CustomVjpRule(self.name, self.count, vmap(self.forward), backward, push, self.derives)


class _TensorArguments:
    """A call's arguments: the tensors among them, and their container."""

    def __init__(self, args: Sequence[Any]) -> None:
        leaves, self.tree = flatten(list(args))
        self.leaves = [x for _, x in leaves]
        self.tensors = [as_tensor(x) for x in self.leaves if leaf_type(x) is not None]

    def build(self, tensors: Sequence[Any]) -> list[Any]:
        """The arguments with these tensors."""
        found = iter(tensors)
        return self.tree.build(iter([x if leaf_type(x) is None else next(found) for x in self.leaves]))


class custom_jvp:  # a decorator, as the spec spells it  # noqa: N801
    """A function with a custom JVP: `rule(primals, tangents)` returns (result, its tangent).

    >>> @custom_jvp
    ... def double(x):
    ...     return x * 2.0
    >>> double.defjvp(lambda primals, tangents: (double(*primals), tangents[0] * 2.0))
    >>> from tessera.transforms.autodiff.gradients import grad
    >>> grad(double)(3.0)
    Tensor(2., f32)
    """

    def __init__(self, function: Function) -> None:
        check_function(function, "custom_jvp")
        functools.update_wrapper(self, function)
        self.function = function
        self.rule: Function | None = None

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """A method in a class: its object is the first argument."""
        return self if owner is None else MethodType(self, owner)

    def defjvp(self, rule: Function) -> None:
        """Set the rule."""
        self.rule = rule

    def __call__(self, *args: Any) -> Any:
        taken = _TensorArguments(args)
        if not call_primitives.must_record_call(taken.tensors):
            return self.function(*args)
        rule = _require_rule(self.rule, function_name(self), "defjvp")

        def push(primals: list[Tensor], tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            out, moved = rule(tuple(taken.build(primals)), tuple(taken.build(tangents)))
            return _flatten_tensors(out), _flatten_tensors(moved)

        kept = CustomJvpRule(function_name(self), len(taken.tensors), push)
        return call_primitives.record_call(
            call_primitives.custom_jvp, lambda xs: self.function(*taken.build(xs)), taken.tensors, rule=kept
        )


class custom_vjp:  # noqa: N801
    """A function with a custom VJP, set by `defvjp(forward, backward)`.

    `forward(*args)` returns (result, residuals); `backward(residuals, g)` returns the cotangent of the
    argument, or a tuple with one for each (None is zero).

    >>> @custom_vjp
    ... def log1p(x):
    ...     return (1.0 + x).log()
    >>> log1p.defvjp(lambda x: (log1p(x), x), lambda x, g: g / (1.0 + x))
    >>> from tessera.transforms.autodiff.gradients import grad
    >>> grad(log1p)(3.0)
    Tensor(0.25, f32)
    """

    def __init__(self, function: Function) -> None:
        check_function(function, "custom_vjp")
        functools.update_wrapper(self, function)
        self.function = function
        self.rules: tuple[Function, Function] | None = None

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """A method in a class: its object is the first argument."""
        return self if owner is None else MethodType(self, owner)

    def defvjp(self, forward: Function, backward: Function) -> None:
        """Set the rules."""
        self.rules = forward, backward

    def __call__(self, *args: Any) -> Any:
        taken = _TensorArguments(args)
        if not call_primitives.must_record_call(taken.tensors):
            return self.function(*args)
        rules = _require_rule(self.rules, function_name(self), "defvjp")
        results: list[TreeDef] = []

        def body(tensors: list[Tensor]) -> Any:
            out = self.function(*taken.build(tensors))
            results.append(flatten(out)[1])
            return out

        kept = _make_vjp_rule(function_name(self), rules, taken, results, len(args))
        return call_primitives.record_call(call_primitives.custom_vjp, body, taken.tensors, rule=kept)


def _make_vjp_rule(
    name: str, rules: tuple[Function, Function], taken: _TensorArguments, results: list[TreeDef], count: int
) -> CustomVjpRule:
    saved: list[Any] = []

    def forward(tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        out, residuals = rules[0](*taken.build(tensors))
        found = _TensorArguments([residuals])
        saved[:] = [found]
        return _flatten_tensors(out), found.tensors

    def backward(residuals: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        (kept,) = saved[0].build(residuals)
        found = rules[1](kept, results[0].build(iter(g)))
        parts = [found] if count == 1 else found
        if not isinstance(parts, (tuple, list)) or len(parts) != count:
            raise ArgumentError(
                f"the backward rule of {name} does not return one cotangent for each argument",
                location=user_location(), expected=f"a tuple of {count}", received=type(found).__name__,
            )  # fmt: skip
        return _flatten_cotangents(parts, taken)

    return CustomVjpRule(name, len(taken.tensors), forward, backward)


def _flatten_cotangents(parts: Sequence[Any], taken: _TensorArguments) -> list[Tensor]:
    """A rule's cotangents as tensors of the arguments' types; None is zero."""
    if len(parts) == 1 and isinstance(parts[0], (tuple, list)) and taken.tree.children[0].kind is None:
        parts = parts[0]
    found: list[Tensor] = []
    for part, arg in zip(parts, taken.build(taken.tensors), strict=True):
        like = [as_tensor(x) for _, x in flatten(arg)[0] if leaf_type(x) is not None]
        leaves = [None] * len(like) if part is None else [x for _, x in flatten(part)[0]]
        found += [check_cotangent(x, t) for x, t in zip(leaves, like, strict=True)]
    return found


def check_cotangent(value: Any, like: Tensor) -> Tensor:
    """A rule's cotangent or tangent as a tensor of a type; None, and that of a tensor of integers, is zero."""
    if value is None or not like.dtype.is_float:
        return splat(0, like.type)
    return check_tangent("a cotangent", as_tensor(value, like.type), like)


def _flatten_tensors(value: Any) -> list[Tensor]:
    return [as_tensor(x) for _, x in flatten(value)[0]]


def _require_rule(rule: Any, name: str, how: str) -> Any:
    if rule is None:
        raise ArgumentError(
            f"{name} has no rule yet", location=user_location(), suggestion=f"call {name}.{how}(...) first"
        )
    return rule


class _Checkpoint:
    """The decorator `checkpoint`, with or without a policy."""

    def __call__(self, function: Function | None = None, *, policy: CheckpointPolicy = None) -> Function:
        """Rematerialisation: reverse mode saves only the arguments of the function, and recomputes its values.

        `policy` selects values that are saved too: "full" (none), "selective" (those of `checkpoint_here`), "dots"
        (matrix products), "everything", or a function from an op's name to a bool. `checkpoint.policy("dots")`
        is the same decorator.

        >>> from tessera.transforms.autodiff.gradients import grad
        >>> grad(checkpoint(lambda x: x * x))(3.0)
        Tensor(6., f32)

        Raises:
            ArgumentError: the policy is unknown.
        """
        check_checkpoint_policy(policy)
        if function is None:
            return functools.partial(self.__call__, policy=policy)
        check_function(function, "checkpoint")

        @functools.wraps(function)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            taken = _TensorArguments(args)
            if not call_primitives.must_record_call(taken.tensors):
                return function(*args, **keywords)
            return call_primitives.record_call(
                call_primitives.checkpoint,
                lambda xs: call_and_warn(function, *taken.build(xs), **keywords),
                taken.tensors,
                policy=policy,
            )

        return wrapper

    def policy(self, policy: CheckpointPolicy) -> Function:
        """The decorator with a policy."""
        return self(policy=policy)


checkpoint = _Checkpoint()


def straight_through(function: Function) -> Function:
    """A function of one tensor whose derivative is that of the identity (Bengio, Leonard and Courville 2013).

    >>> from tessera.transforms.autodiff.gradients import grad
    >>> from tessera.ops.tensor.elementwise import round
    >>> grad(straight_through(round))(2.7)
    Tensor(1., f32)
    """
    check_function(function, "straight_through")
    made = custom_jvp(function)
    made.defjvp(lambda primals, tangents: (function(*primals), tangents[0]))
    return made


# Names of inputs and targets, by convention: these are not trained.
_DATA_ARGUMENT = re.compile(r"(x|y|inputs?|targets?|labels?|batch)(_\w*)?$")


def autodiff(function: Function | None = None, *, argnums: int | Sequence[int] | None = None) -> Function:
    """Mark a function as differentiable: `argnums` is the default of `grad` for it.

    Without `argnums` these are all arguments but inputs and targets, recognised by name: x, y, input, target,
    label or batch, alone or before an underscore (`y_true`). If no others are left, it is the first argument.

    >>> from tessera.transforms.autodiff.gradients import grad
    >>> @autodiff
    ... def loss(x, w, b, y_true):
    ...     return (x * w + b - y_true) ** 2
    >>> grad(loss)(2.0, 3.0, 1.0, 6.0)
    (Tensor(4., f32), Tensor(2., f32))
    """
    if function is None:
        return functools.partial(autodiff, argnums=argnums)
    check_function(function, "autodiff")
    function.differentiated = _find_trainable_arguments(function) if argnums is None else argnums  # type: ignore[attr-defined]
    return function


def _find_trainable_arguments(function: Function) -> int | tuple[int, ...]:
    """The positions of the arguments that are neither inputs nor targets."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [n for n, p in inspect.signature(function).parameters.items() if p.kind in positional]
    found = tuple(i for i, n in enumerate(named) if not _DATA_ARGUMENT.match(n))
    return found if len(found) > 1 else found[0] if found else 0
