"""Effect system: the effects of functions are declared, inferred and suspended; a pure function that has one is
refused.

An effect has a name: "random" (draws from a generator that others see), "io", "memory", "state" and "collective".
`@pure` and `@effects([...])` declare what a function may do. The functions that it refers to are inspected when it is
decorated; what it does is checked when it is called or traced, which with `jit` is before anything runs.
"""

from __future__ import annotations

import builtins
import dis
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tessera.core.errors import ArgumentError, EffectError, user_location

AnyFunction = Callable[..., Any]
_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
EFFECT_NAMES = ("random", "io", "memory", "state", "collective")
ALL_EFFECTS = frozenset(EFFECT_NAMES)
BUILTIN_EFFECTS: dict[Any, frozenset[str]] = {
    f: frozenset(("io",)) for f in (builtins.print, builtins.open, builtins.input)
}


@dataclass(eq=False)
class EffectScope:
    """A call in progress: the effects it may have, who restricts them, and the effects it has had."""

    allowed: frozenset[str]
    owner: str
    reason: str
    advice: str = ""
    found: set[str] = field(default_factory=set)


_effect_scopes: ContextVar[tuple[EffectScope, ...]] = ContextVar("effects", default=())


def current_effect_scope() -> EffectScope | None:
    """The innermost call that restricts its effects."""
    frames = _effect_scopes.get()
    return frames[-1] if frames else None


def perform_effects(names: Iterable[str]) -> None:
    """Record that an op with these effects runs.

    Raises:
        EffectError: a function under way may not.
    """
    for frame in reversed(_effect_scopes.get()):
        for name in names:
            if name not in frame.allowed:
                raise EffectError(
                    f"{frame.owner} has the effect {name!r}",
                    location=user_location(),
                    expected=frame.reason,
                    received=name,
                    suggestion=frame.advice or f'declare it: @ts.effects(["{name}"]), or do it outside',
                )
            frame.found.add(name)


@contextmanager
def watch_effects(allowed: frozenset[str], owner: str, reason: str, advice: str = "") -> Iterator[EffectScope]:
    """A context in which only some effects are allowed; the frame records those that occur."""
    frame = EffectScope(allowed, owner, reason, advice)
    token = _effect_scopes.set((*_effect_scopes.get(), frame))
    try:
        yield frame
    finally:
        _effect_scopes.reset(token)


def _parse_effect_names(given: Any) -> frozenset[str]:
    listed = [given] if isinstance(given, str) else list(given)
    unknown = [n for n in listed if n not in EFFECT_NAMES and n != "all"]
    if unknown:
        raise ArgumentError(
            f"there is no effect {unknown[0]!r}", location=user_location(), expected=", ".join([*EFFECT_NAMES, "all"])
        )
    return ALL_EFFECTS if "all" in listed else frozenset(listed)


def _declared_effects(function: Any) -> frozenset[str] | None:
    return getattr(function, "__effects__", None)


def _guard_function(function: AnyFunction, allowed: frozenset[str], reason: str) -> AnyFunction:
    """Wrap a function that may have only these effects: it is analysed now and checked when called."""
    name = getattr(function, "__name__", "the function")
    if extra := effects_of(function) - allowed:
        raise EffectError(
            f"{name} has the effect {min(extra)!r}", location=user_location(), expected=reason,
            received=", ".join(sorted(extra)),
            suggestion=f'declare it: @ts.effects(["{min(extra)}"]), or do it outside',
        )  # fmt: skip

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        if allowed:
            perform_effects(sorted(allowed))
        with watch_effects(allowed, name, reason):
            return function(*args, **keywords)

    wrapper.__effects__ = allowed  # type: ignore[attr-defined]
    return wrapper


def pure(function: AnyFunction) -> AnyFunction:
    """A function without effects: its result depends on its arguments alone.

    >>> @pure
    ... def add(x, y):
    ...     return x + y
    >>> add(1, 2)
    3

    Raises:
        EffectError: it refers to, or when called or traced does, something with an effect.
    """
    return _guard_function(function, frozenset(), "a pure function")


class Effects:
    """The decorator `effects`, and queries of effects.

    >>> @effects(["random"])
    ... def noise(x):
    ...     return x
    >>> def twice(x):
    ...     return noise(noise(x))
    >>> sorted(effects.of(twice))
    ['random']
    """

    def __call__(self, names: Any) -> Callable[[AnyFunction], AnyFunction]:
        """Declare the effects of a function: "random", "io", "memory", "state", "collective", or "all".

        Raises:
            ArgumentError: there is no such effect.
            EffectError: the function does something that it does not declare.
        """
        allowed = _parse_effect_names(names)
        reason = f"no effects but {', '.join(sorted(allowed))}" if allowed else "a pure function"
        return lambda function: _guard_function(function, allowed, reason)

    def suspend(self, *names: str) -> Any:
        """A context in which these effects are errors.

        >>> with effects.suspend("io"):
        ...     perform_effects(["random"])
        """
        reason = f"no {' or '.join(names)} while suspended"
        return watch_effects(ALL_EFFECTS - _parse_effect_names(names), "a block in which effects are suspended", reason)

    def of(self, function: AnyFunction) -> frozenset[str]:
        """The effects that a function may have, as it and the functions it refers to declare; nothing runs."""
        return effects_of(function)

    def inferred(self, function: AnyFunction, *args: Any, **keywords: Any) -> frozenset[str]:
        """The effects of a function on these arguments, found by running or tracing it."""
        with watch_effects(ALL_EFFECTS, "inference", "anything") as frame:
            function(*args, **keywords)
        return frozenset(frame.found)


effects = Effects()


def effects_of(function: Any) -> frozenset[str]:
    """The effects of the functions that a function refers to."""
    return _effects_of(function, set())


def _effects_of(item: Any, seen: set[int]) -> frozenset[str]:
    known = _declared_effects(item)
    if known is not None:
        return known
    try:
        if item in BUILTIN_EFFECTS:
            return BUILTIN_EFFECTS[item]
    except TypeError:  # it has no hash, so that it is no builtin
        pass
    if not isinstance(item, MethodType):  # made anew at each access: its function is remembered
        if id(item) in seen:
            return frozenset()
        seen.add(id(item))
    if isinstance(item, functools.partial):
        return frozenset().union(*(_effects_of(x, seen) for x in (item.func, *item.args, *item.keywords.values())))
    inner = getattr(item, "function", None)  # jit, custom rules
    if inner is not None and not isinstance(item, ModuleType):
        return _effects_of(inner, seen)
    if isinstance(item, (tuple, list)):
        return frozenset().union(*(_effects_of(x, seen) for x in item)) if item else frozenset()
    return frozenset().union(*(_effects_of(x, seen) for x in _find_parts(item)))


def _find_parts(item: Any) -> Iterator[Any]:
    """What may run when this is called: what a function refers to, what a method of an object uses."""
    if isinstance(item, FunctionType):
        yield from _find_references(item)
    elif isinstance(item, MethodType) and isinstance(item.__func__, FunctionType):
        yield item.__func__
        held = getattr(item.__self__, "__dict__", {})
        yield from (held[name] for name in item.__func__.__code__.co_names if callable(held.get(name)))
    elif not isinstance(item, (type, ModuleType)) and _is_user_class(type(item)):
        yield item.__call__


def _is_user_class(kind: type) -> bool:
    called = getattr(kind, "__call__", None)  # noqa: B004 - as above
    return isinstance(called, FunctionType) and not called.__code__.co_filename.startswith(_PACKAGE_FOLDER)


def _find_references(function: FunctionType) -> Iterator[Any]:
    """The objects that the code of a function names, as far as they are found without running it.

    Of this package's functions only what they close over, such as the parts of `compose`: the others say
    what they do with `@effects`, or when they run.
    """
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = {name: cell.cell_contents for name, cell in cells if _is_cell_filled(cell)}
    yield from closed.values()
    yield from (value for value in function.__defaults__ or () if callable(value))
    if not function.__code__.co_filename.startswith(_PACKAGE_FOLDER):
        yield from _find_loaded_names(function.__code__, {**vars(builtins), **function.__globals__, **closed})


def _is_cell_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _bind_method(owner: Any, name: str) -> Any:
    """A method of a user's object; properties and the library's own are not looked into."""
    method = vars(type(owner))[name]
    user = isinstance(method, FunctionType) and not method.__code__.co_filename.startswith(_PACKAGE_FOLDER)
    return MethodType(method, owner) if user else None


_NAME_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD")


def _find_loaded_names(code: CodeType, known: dict[str, Any]) -> Iterator[Any]:
    """The names, and attributes of modules, that code loads, code of inner functions included."""
    last: Any = None
    for each in dis.get_instructions(code):
        if each.opname in _NAME_LOADS:
            last = known.get(each.argval)
        elif each.opname in _ATTRIBUTE_LOADS and isinstance(last, ModuleType):
            last = getattr(last, each.argval, None)
        elif each.opname in _ATTRIBUTE_LOADS and each.argval in getattr(type(last), "__dict__", ()):
            last = _bind_method(last, each.argval)
        else:
            continue
        if callable(last) or isinstance(last, (tuple, list)):
            yield last
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _find_loaded_names(constant, known)
