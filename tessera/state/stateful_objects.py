"""Stateful objects: their tensors are the state, which a compiled call takes as arguments and gives back as results.

A method under `@stateful` may assign to attributes of its object. Run at once, it changes them. `ts.jit(obj.method)`
compiles it as a function of the state: the state is donated, so that results take its memory, and stored back after
the call. In `ts.scan` a stateful object is a carry.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.effects import perform_effects
from tessera.core.errors import ArgumentError, TraceError, user_location
from tessera.core.pytree import Parts, StaticFields, flatten, in_scope, register_class
from tessera.frontend.jit.tracing import Jit
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor
from tessera.state.offloading import Prefetch, offload, prefetch

STATE_EFFECT = frozenset(("state",))


class Stateful:
    """An object whose attributes that hold tensors are state; the others are constants.

    A subclass is a container of its tensors for `ts.jit`, `ts.scan`, `ts.grad` and `ts.save`.

    >>> from tessera.ops.api.creation import zeros
    >>> class Counter(Stateful):
    ...     def __init__(self):
    ...         self.count = zeros(())
    ...     @stateful
    ...     def step(self, x):
    ...         self.count = self.count + 1.0
    ...         return x * self.count
    >>> counter = Counter()
    >>> counter.step(2.0), counter.step(2.0)
    (Tensor(2., f32), Tensor(4., f32))
    """

    is_state = True

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        register_class(cls, _take_apart, _build)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            TraceError: a traced value would outlive its trace, in an object that is not the trace's.
        """
        if _holds_traced(value) and self.__dict__.get("_trace") is not CURRENT_BUILDER.get():
            raise TraceError(
                f"{type(self).__name__}.{name} changes in a traced function that does not know of it",
                location=user_location(), expected="an object that is an argument, or a carry, of the traced function",
                suggestion="compile its method, ts.jit(obj.method), or pass the object and return it",
            )  # fmt: skip
        object.__setattr__(self, name, value)

    def __parts__(self) -> list[tuple[str, Any]]:
        """What errors may name by its path: the attributes."""
        return list(vars(self).items())

    def to(self, device: str) -> Any:
        """The object itself, with its tensors on a device: after compiled calls on a GPU they lie there."""
        leaves, tree = flatten(self)
        _adopt(self, tree.build(iter([x.to(device) if isinstance(x, Tensor) else x for _, x in leaves])))
        return self

    def offload(self, folder: Any = None) -> Any:
        """The object itself, with its tensors in host memory or in files of a `folder` (`ts.state.offload`)."""
        _adopt(self, offload(self, folder))
        return self

    def prefetch(self, device: str | None = None) -> Prefetch:
        """Begin to bring the tensors back from files, beside the program; `wait()` puts them into the object.

        With a `device` they lie there after `wait()`. A tensor that changes meanwhile stays as it is then.
        """
        before = {path: leaf for path, leaf in flatten(self)[0]}
        begun = prefetch(self, device)

        def finish(made: Any) -> Any:
            leaves, tree = flatten(self)
            new = dict(flatten(made)[0])
            _adopt(self, tree.build(iter([new[p] if before.get(p) is x else x for p, x in leaves])))
            return self

        return Prefetch(begun, finish)

    def state_dict(self) -> dict[str, Any]:
        """The tensors of the state by path."""
        return {path: leaf for path, leaf in flatten(self)[0] if leaf is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the tensors of the state by those of the same paths.

        Raises:
            ArgumentError: a path is missing or unknown, or a tensor has another shape or element type; it is named.
        """
        leaves, tree = flatten(self)
        known = {path for path, leaf in leaves if leaf is not None}
        if wrong := sorted(known ^ set(state)):
            raise ArgumentError(
                f"the state of {type(self).__name__} has no {wrong[0]}" if wrong[0] in state
                else f"the state lacks {wrong[0]}", location=user_location(), expected=", ".join(sorted(known)),
                received=", ".join(sorted(state)),
            )  # fmt: skip
        new: list[Any] = []
        for path, leaf in leaves:
            value: Any = leaf if leaf is None else state[path]
            value = value if leaf is None or isinstance(value, Tensor) else Tensor(np.asarray(value))
            if leaf is not None and (value.shape != leaf.shape or value.dtype != leaf.dtype):
                raise ArgumentError(f"state {path} has another type", location=user_location(),
                                    expected=str(leaf.type), received=str(value.type))  # fmt: skip
            new.append(value)
        _adopt(self, tree.build(iter(new)))


def _is_state(value: Any) -> bool:
    """Whether an attribute holds tensors."""
    if isinstance(value, (Tensor, Stateful)):
        return True
    if isinstance(value, (str, bytes, int, float, bool, type(None))):
        return False
    return any(isinstance(leaf, Tensor) for _, leaf in flatten(value)[0])


def _holds_traced(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_traced
    if isinstance(value, (str, bytes, int, float, bool, type(None), Stateful)):
        return False
    return any(isinstance(leaf, Tensor) and leaf.is_traced for _, leaf in flatten(value)[0])


def _take_apart(value: Stateful) -> Parts:
    fields = {n: v for n, v in value.__dict__.items() if n != "_trace"}
    moving = tuple(n for n, v in fields.items() if _is_state(v))
    return Parts(
        moving, [fields[n] for n in moving], StaticFields({n: v for n, v in fields.items() if n not in moving})
    )


def _build(cls: type, aux: Any, keys: tuple[str, ...], children: list[Any]) -> Any:
    made: Any = object.__new__(cls)
    made.__dict__.update(aux.values)
    made.__dict__.update(zip(keys, children, strict=True))
    made.__dict__["_trace"] = CURRENT_BUILDER.get()
    return made


def _adopt(target: Any, source: Any) -> None:
    """Give an object the tensors of another of its kind, objects within it included."""
    for name, value in source.__dict__.items():
        old = target.__dict__.get(name)
        if isinstance(old, Stateful) and isinstance(value, Stateful):
            _adopt(old, value)
        elif name != "_trace":
            target.__dict__[name] = value


class stateful:  # noqa: N801 - a decorator
    """A decorator of a method that changes the tensors of its object: it has the effect "state".

    `ts.jit(obj.method, ...)` compiles it with the object's state as arguments and results, updated in place.
    """

    __effects__ = STATE_EFFECT

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ArgumentError("stateful decorates a method", location=user_location(),
                                received=type(function).__name__)  # fmt: skip
        functools.update_wrapper(self, function)
        self.function = function

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else StatefulCall(owner, self.function)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The function on its object, given first."""
        return StatefulCall(args[0], self.function)(*args[1:], **named)


class StatefulCall:
    """A stateful method of an object, ready to be called or compiled."""

    __effects__ = STATE_EFFECT

    def __init__(self, owner: Any, function: Callable[..., Any]) -> None:
        if not isinstance(owner, Stateful):
            raise ArgumentError(
                f"{function.__name__} is stateful, its object is not", location=user_location(),
                expected="a subclass of ts.Stateful", received=type(owner).__name__,
            )  # fmt: skip
        functools.update_wrapper(self, function)
        self.owner, self.function = owner, function

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The method, which changes the state."""
        perform_effects(sorted(STATE_EFFECT))
        with in_scope(self.owner):
            return self.function(self.owner, *args, **named)

    def __jit__(self, options: Mapping[str, Any]) -> CompiledMethod:
        """What `ts.jit` makes of it."""
        return CompiledMethod(self.owner, self.function, options)


class CompiledMethod:
    """A compiled stateful method: the state is an argument, donated, and a result, stored back after each call."""

    __effects__ = STATE_EFFECT

    def __init__(self, owner: Stateful, method: Callable[..., Any], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, method)
        self.owner = owner

        def run(state: Any, args: Any, named: Any) -> Any:
            with in_scope(state, outermost=True):
                return method(state, *args, **named), state

        run.__name__ = run.__qualname__ = getattr(method, "__name__", "method")
        donate = options.get("donate", ())
        donate = (donate,) if isinstance(donate, str) else tuple(donate)
        self.compiled = Jit(run, **{**options, "donate": ("state", *donate)})

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The result; the object has its new state."""
        perform_effects(sorted(STATE_EFFECT))
        _check_distinct(self.owner)
        result, state = self.compiled(self.owner, args, named)
        _adopt(self.owner, state)
        return result

    def trace(self, *args: Any, **named: Any) -> Any:
        """The Graph function, whose first parameters and last results are the state."""
        return self.compiled.trace(self.owner, args, named)


def _check_distinct(owner: Stateful) -> None:
    seen: dict[int, str] = {}
    for path, leaf in flatten(owner)[0]:
        other = seen.setdefault(id(leaf), path)
        if other != path and isinstance(leaf, Tensor):
            raise ArgumentError(
                f"{type(owner).__name__} holds one tensor as {other} and as {path}", location=user_location(),
                expected="a tensor for each part of the state", suggestion="make one of them a copy: x.clone()",
            )  # fmt: skip


def with_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function with explicit state: it takes states and returns new ones, or changes stateful arguments.

    It has the effect "state". Arguments that are stateful objects are as after the call, also under `ts.jit` of the
    result, which takes their state as arguments and results.

    >>> from tessera.ops.api.creation import zeros
    >>> @with_state
    ... def total(xs, state):
    ...     return xs + state, state + xs
    >>> total(1.0, zeros(()))
    (Tensor(1., f32), Tensor(1., f32))
    """
    return _FunctionOfState(function)


class _FunctionOfState:
    """A function whose stateful arguments change."""

    __effects__ = STATE_EFFECT

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise ArgumentError("with_state decorates a function", location=user_location(),
                                received=type(function).__name__)  # fmt: skip
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        perform_effects(sorted(STATE_EFFECT))
        return self.function(*args, **named)

    def __jit__(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        function, signature = self.function, inspect.signature(self.function)

        def run(states: Sequence[Any], args: Any, named: Any) -> Any:
            args, named = _put(states, args, named)
            with in_scope({**dict(zip(signature.parameters, args, strict=False)), **named}, outermost=True):
                return function(*args, **named), states

        run.__name__ = run.__qualname__ = getattr(function, "__name__", "function")
        compiled = Jit(run, **{**options, "donate": ("states",)})

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            perform_effects(sorted(STATE_EFFECT))
            states = [x for x in (*args, *named.values()) if isinstance(x, Stateful)]
            for each in states:
                _check_distinct(each)
            places = [_Place(i) for i in range(len(states))]
            result, new = compiled(states, *_take(places, args, named))
            for old, each in zip(states, new, strict=True):
                _adopt(old, each)
            return result

        return call


class _Place(str):
    """The place of a stateful argument among all of them; a static value."""

    def __new__(cls, number: int) -> _Place:
        return super().__new__(cls, f"\0state {number}")


def _take(places: list[_Place], args: Any, named: Any) -> tuple[Any, Any]:
    rest = iter(places)
    swap = lambda x: str(next(rest)) if isinstance(x, Stateful) else x  # noqa: E731
    return tuple(swap(x) for x in args), {n: swap(x) for n, x in named.items()}


def _put(states: Sequence[Any], args: Any, named: Any) -> tuple[Any, Any]:
    known = {str(_Place(i)): s for i, s in enumerate(states)}
    swap = lambda x: known.get(x, x) if isinstance(x, str) else x  # noqa: E731
    return tuple(swap(x) for x in args), {n: swap(x) for n, x in named.items()}
