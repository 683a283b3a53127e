"""Function combinators: composition, partial application, optional values, overloads by element type, pure jitted
functions."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from tessera.core.device import INTERP, default_device, find_generator_name
from tessera.core.effects import pure
from tessera.core.errors import ArgumentError, DeviceUnavailable, user_location
from tessera.core.pytree import flatten
from tessera.core.schedule import Schedule, use_schedule
from tessera.core.shapes import bind_shapes
from tessera.core.types import DType, TensorType
from tessera.frontend.jit.tracing import Jit, jit
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.transforms.memoisation import memoize, persistent_cache
from tessera.transforms.policies import numerics as numeric_context
from tessera.transforms.recording import arrays_to_tensors

# Composition: compose, pipe, curry. Transforms and effect checks see the functions inside.


Function = Callable[..., Any]


def _check_callables(functions: tuple[Any, ...], owner: str) -> None:
    for each in functions:
        if not callable(each):
            raise ArgumentError(
                f"{owner} takes functions", location=user_location(), expected="functions", received=type(each).__name__
            )


def pipe(*functions: Function) -> Function:
    """Left-to-right composition: the first function takes any arguments.

    >>> pipe(abs, float)(-3)
    3.0

    Raises:
        ArgumentError: an argument is not a function.
    """
    _check_callables(functions, "pipe")
    parts = tuple(functions)

    def piped(*args: Any, **keywords: Any) -> Any:
        if not parts:
            return args[0]
        found = parts[0](*args, **keywords)
        for each in parts[1:]:
            found = each(found)
        return found

    piped.__name__ = "_".join(getattr(f, "__name__", "part") for f in parts).replace("<lambda>", "part") or "same"
    return piped


def compose(*functions: Function) -> Function:
    """Mathematical composition, right to left: compose(f, g)(x) = f(g(x)).

    >>> compose(float, abs)(-3)
    3.0

    Raises:
        ArgumentError: an argument is not a function.
    """
    _check_callables(functions, "compose")
    return pipe(*reversed(functions))


def curry(function: Function, *args: Any, **keywords: Any) -> Function:
    """Partial application: `function` with some arguments fixed.

    >>> curry(round, ndigits=1)(2.345)
    2.3

    Raises:
        ArgumentError: it does not take these arguments.
    """
    _check_callables((function,), "curry")
    try:
        inspect.signature(function).bind_partial(*args, **keywords)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise ArgumentError(f"{name}: {error}", location=user_location(), received=", ".join(keywords)) from None
    except ValueError:  # a function without a signature
        pass
    return functools.update_wrapper(functools.partial(function, *args, **keywords), function)


# Tessera functions: traced, checked and pure unless declared otherwise; and functions for certain devices.


def function(body: Function | None = None, **options: Any) -> Any:
    """A function of tensors, checked against its annotations when traced, compiled, and without effects.

    It is `jit` of a pure function: one that draws random numbers or prints says so with `@effects`
    below this decorator. Options are those of `jit`. Transforms and other decorators stack on it.

    >>> import tessera as ts
    >>> @function
    ... def double(x: ts.Tensor["N"]) -> ts.Tensor["N"]:
    ...     return x * 2.0
    >>> double(ts.Tensor([1.0, 2.0]))
    Tensor([2., 4.], f32)

    Raises:
        EffectError: the function has an undeclared effect.
        ShapeError, DTypeError: an argument does not fit its annotation, when called.
    """
    if body is None:
        return functools.partial(function, **options)
    if isinstance(body, Jit):
        return body
    declared = getattr(body, "__effects__", None) is not None
    return jit(body if declared else pure(body), **options)


def custom(
    body: Function | None = None, *, schedule: Schedule | None = None, numerics: Mapping[str, Any] | None = None
) -> Any:
    """A function that runs as its author wrote it: op by op and kernel by kernel, with their schedules and numerics.

    Arrays become tensors. `schedule` holds for the kernels that a call launches (`ts.schedule`), `numerics` for its ops
    (the arguments of `ts.numerics`); the body may open such blocks itself. A function under `ts.jit` may call it.

    >>> import tessera as ts
    >>> @custom(numerics={"round": "toward_zero"})
    ... def expert(x):
    ...     with ts.schedule(tile_size=128, warps=8):
    ...         return x * 2.0
    >>> expert(ts.Tensor([1.0, 2.0]))
    Tensor([2., 4.], f32 @ rounding=toward_zero)
    """
    if body is None:
        return functools.partial(custom, schedule=schedule, numerics=numerics)
    check_function(body, "custom")

    @functools.wraps(body)
    def run(*args: Any, **named: Any) -> Any:
        with ExitStack() as blocks:
            if schedule is not None:
                blocks.enter_context(use_schedule(schedule))
            if numerics is not None:
                blocks.enter_context(numeric_context(**numerics))
            return body(*arrays_to_tensors(args), **arrays_to_tensors(named))

    return run


_SPECIALISED_DEVICE: ContextVar[str | None] = ContextVar("specialised device", default=None)


def current_device() -> str:
    """The default device of calls, set by `set_default_device`: "interp", "cpu" and so on.

    In a function of `specialize_for` it is the device that the function is specialised for.

    >>> current_device()
    'interp'
    """
    return _SPECIALISED_DEVICE.get() or default_device()


def specialize_for(*devices: str) -> Callable[[Function], Function]:
    """A function for these devices only; a call on another one is refused. `current_device()` is the device.

    The interpreter executes programs of every device: where it is not listed, it takes the function as the first
    device does.

    >>> @specialize_for("interp", "llvm")
    ... def attention(x):
    ...     return x if current_device() == "interp" else -x
    >>> attention(1), attention.devices
    (1, ('interp', 'llvm'))

    Raises:
        ArgumentError: no device is given.
        DeviceUnavailable: the current device is not one of them.
    """
    if not devices:
        raise ArgumentError("specialize_for names no device", location=user_location(), expected='"A100", "H100"')

    def decorate(body: Function) -> Function:
        @functools.wraps(body)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            device = default_device()
            if find_generator_name(device) == INTERP and device not in devices:
                device = devices[0]
            if device not in devices:
                raise DeviceUnavailable(
                    f"{getattr(body, '__name__', 'the function')} is not written for {device}",
                    location=user_location(), expected=", ".join(devices), received=device,
                    suggestion="call another version here, or choose a device with ts.set_default_device",
                )  # fmt: skip
            token = _SPECIALISED_DEVICE.set(device)
            try:
                return body(*args, **keywords)
            finally:
                _SPECIALISED_DEVICE.reset(token)

        wrapper.devices = devices  # type: ignore[attr-defined]
        return wrapper

    return decorate


# Optional values: Just or Nothing.


T = TypeVar("T")


class Maybe(Generic[T]):
    """`Just(value)` or `Nothing()`.

    >>> Just(2).map(lambda x: x + 1).unwrap_or(0), Nothing().map(lambda x: x + 1).unwrap_or(0)
    (3, 0)
    """

    def map(self, function: Callable[[T], Any]) -> Maybe[Any]:
        """Apply `function` to the value, if there is one."""
        raise NotImplementedError

    def bind(self, function: Callable[[T], Maybe[Any]]) -> Maybe[Any]:
        """Apply `function`, which returns a Maybe, to the value."""
        raise NotImplementedError

    def unwrap(self) -> T:
        """The value.

        Raises:
            ArgumentError: there is no value.
        """
        raise NotImplementedError

    def unwrap_or(self, default: Any) -> Any:
        """The value, or `default`."""
        raise NotImplementedError

    @property
    def is_just(self) -> bool:
        """Whether there is a value."""
        return isinstance(self, Just)

    def __bool__(self) -> bool:
        return self.is_just


class Just(Maybe[T]):
    """A present value."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def map(self, function: Callable[[T], Any]) -> Maybe[Any]:
        """Apply `function` to the value."""
        return Just(function(self.value))

    def bind(self, function: Callable[[T], Maybe[Any]]) -> Maybe[Any]:
        """Apply `function`, which returns a Maybe, to the value."""
        return _check_maybe(function(self.value), "the function given to bind")

    def unwrap(self) -> T:
        """The value."""
        return self.value

    def unwrap_or(self, default: Any) -> Any:
        """The value."""
        return self.value

    def __repr__(self) -> str:
        return f"Just({self.value!r})"


class Nothing(Maybe[Any]):
    """No value."""

    __slots__ = ()

    def map(self, function: Callable[[Any], Any]) -> Maybe[Any]:
        """Nothing."""
        return self

    def bind(self, function: Callable[[Any], Maybe[Any]]) -> Maybe[Any]:
        """Nothing."""
        return self

    def unwrap(self) -> Any:
        """An error.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError("unwrap() of Nothing", location=user_location(), suggestion="use unwrap_or(default)")

    def unwrap_or(self, default: Any) -> Any:
        """The default."""
        return default

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nothing)

    def __hash__(self) -> int:
        return hash(Nothing)

    def __repr__(self) -> str:
        return "Nothing()"


def _check_maybe(value: Any, owner: str) -> Maybe[Any]:
    if not isinstance(value, Maybe):
        raise ArgumentError(
            f"{owner} does not return a Maybe", location=user_location(), expected="Just(value) or Nothing()",
            received=type(value).__name__,
        )  # fmt: skip
    return value


def maybe(function: Callable[..., Any]) -> Callable[..., Maybe[Any]]:
    """A function that returns Just(value) or Nothing(); a Nothing among its arguments gives Nothing.

    A Just among the arguments is unwrapped. Whether there is a value is decided by the
    call: where that depends on elements of tensors, it runs eagerly, not under jit.

    >>> @maybe
    ... def half(x):
    ...     return Just(x // 2) if x % 2 == 0 else Nothing()
    >>> half(half(12)), half(half(6))
    (Just(3), Nothing())

    Raises:
        ArgumentError: it returns another value.
    """

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Maybe[Any]:
        if any(isinstance(x, Nothing) for x in (*args, *keywords.values())):
            return Nothing()
        bare = [x.value if isinstance(x, Just) else x for x in args]
        named = {k: x.value if isinstance(x, Just) else x for k, x in keywords.items()}
        return _check_maybe(function(*bare, **named), getattr(function, "__name__", "the function"))

    return wrapper


# Specialisation: versions of a function for some types of tensors.


class PolymorphicFunction:
    """A function of any tensors, with versions for some types of tensors; the last one that matches is called."""

    def __init__(self, function: Function) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.versions: list[tuple[TensorType, Function]] = []

    def specialize(self, type: TensorType | DType) -> Callable[[Function], Function]:
        """Register a version for calls whose tensors are all of this type.

        `Tensor[ts.f32]` (or `ts.f32`) is any tensor of f32, `Tensor["N", 4, ts.f32]` one of that shape.

        Raises:
            ArgumentError: the value is not a type.
        """
        if not isinstance(type, (TensorType, DType)):
            raise ArgumentError(
                "a version is for a type of tensors",
                location=user_location(),
                expected="Tensor[ts.f32]",
                received=repr(type),
            )
        wanted = TensorType((), type) if isinstance(type, DType) else type

        def register(function: Function) -> Function:
            self.versions.append((wanted, function))
            return function

        return register

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        types = [x.type for _, x in flatten([list(args), keywords])[0] if isinstance(x, Tensor)]
        fitting = [f for wanted, f in reversed(self.versions) if types and all(_is_of_type(wanted, t) for t in types)]
        return (fitting[0] if fitting else self.function)(*args, **keywords)


def _is_of_type(wanted: TensorType, type: TensorType) -> bool:
    if wanted.dtype != type.dtype:
        return False
    return not wanted.shape or not bind_shapes([(wanted.shape, type.shape)], {})


def polymorphic(function: Function) -> PolymorphicFunction:
    """A function that gets versions for some types of tensors by `specialize`; other calls use the function itself.

    The choice depends on types alone, so that it works in traces and under every transform.

    >>> import tessera as ts
    >>> @polymorphic
    ... def add(x, y):
    ...     return x + y
    >>> @add.specialize(ts.Tensor[ts.int8])
    ... def add_i8(x, y):
    ...     return ts.clip(x.to(ts.int16) + y.to(ts.int16), -128, 127).to(ts.int8)
    >>> add(ts.Tensor([100], dtype=ts.int8), ts.Tensor([100], dtype=ts.int8)), add(1, 2)
    (Tensor([127], int8), 3)
    """
    return PolymorphicFunction(function)


# The public names of this module.


__all__ = [
    "Just",
    "Maybe",
    "Nothing",
    "compose",
    "current_device",
    "curry",
    "function",
    "maybe",
    "memoize",
    "persistent_cache",
    "pipe",
    "polymorphic",
    "specialize_for",
]
