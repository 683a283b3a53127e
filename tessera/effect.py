"""Effects of functions: declared, inferred, suspended; a pure function that has one is refused.

What a function does besides giving its result has a name: "random" (it draws from a generator that
others see), "io", "memory", "state" and "collective". `@pure` and `@effects([...])` say what a function
may do. What it refers to is looked through when it is decorated; what it does is watched when it is
called or traced, which with `jit` is before anything runs.
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
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tessera.errors import ArgumentError, EffectError, here

Function = Callable[..., Any]
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
NAMES = ("random", "io", "memory", "state", "collective")
ALL = frozenset(NAMES)
BUILTIN: dict[Any, frozenset[str]] = {f: frozenset(("io",)) for f in (builtins.print, builtins.open, builtins.input)}


@dataclass(eq=False)
class Frame:
    """A call under way: what it may do, who says so, what else to do, and what it has done."""

    allowed: frozenset[str]
    owner: str
    reason: str
    advice: str = ""
    found: set[str] = field(default_factory=set)


_frames: ContextVar[tuple[Frame, ...]] = ContextVar("effects", default=())


def current() -> Frame | None:
    """The innermost call that says what it may do."""
    frames = _frames.get()
    return frames[-1] if frames else None


def perform(names: Iterable[str]) -> None:
    """Do something that has these effects.

    Raises:
        EffectError: a function under way may not.
    """
    for frame in reversed(_frames.get()):
        for name in names:
            if name not in frame.allowed:
                raise EffectError(
                    f"{frame.owner} has the effect {name!r}", location=here(), expected=frame.reason, received=name,
                    suggestion=frame.advice or f'declare it: @ts.effects(["{name}"]), or do it outside',
                )  # fmt: skip
            frame.found.add(name)


@contextmanager
def watched(allowed: frozenset[str], owner: str, reason: str, advice: str = "") -> Iterator[Frame]:
    """A stretch in which only some effects are allowed; the frame tells which were met."""
    frame = Frame(allowed, owner, reason, advice)
    token = _frames.set((*_frames.get(), frame))
    try:
        yield frame
    finally:
        _frames.reset(token)


def _names(given: Any) -> frozenset[str]:
    listed = [given] if isinstance(given, str) else list(given)
    unknown = [n for n in listed if n not in NAMES and n != "all"]
    if unknown:
        raise ArgumentError(f"there is no effect {unknown[0]!r}", location=here(), expected=", ".join([*NAMES, "all"]))
    return ALL if "all" in listed else frozenset(listed)


def _declared(function: Any) -> frozenset[str] | None:
    return getattr(function, "__effects__", None)


def _marked(function: Function, allowed: frozenset[str], reason: str) -> Function:
    """A function that does no more than it says, looked through now and watched when called."""
    name = getattr(function, "__name__", "the function")
    if extra := of(function) - allowed:
        raise EffectError(
            f"{name} has the effect {min(extra)!r}", location=here(), expected=reason,
            received=", ".join(sorted(extra)),
            suggestion=f'declare it: @ts.effects(["{min(extra)}"]), or do it outside',
        )  # fmt: skip

    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        if allowed:
            perform(sorted(allowed))
        with watched(allowed, name, reason):
            return function(*args, **keywords)

    wrapper.__effects__ = allowed  # type: ignore[attr-defined]
    return wrapper


def pure(function: Function) -> Function:
    """A function without effects: its result depends on its arguments alone.

    >>> @pure
    ... def add(x, y):
    ...     return x + y
    >>> add(1, 2)
    3

    Raises:
        EffectError: it refers to, or when called or traced does, something with an effect.
    """
    return _marked(function, frozenset(), "a pure function")


class Effects:
    """The decorator `effects`, and what is known of effects.

    >>> @effects(["random"])
    ... def noise(x):
    ...     return x
    >>> def twice(x):
    ...     return noise(noise(x))
    >>> sorted(effects.of(twice))
    ['random']
    """

    def __call__(self, names: Any) -> Callable[[Function], Function]:
        """Declare what a function does: "random", "io", "memory", "state", "collective", or "all".

        Raises:
            ArgumentError: there is no such effect.
            EffectError: the function does something that it does not declare.
        """
        allowed = _names(names)
        reason = f"no effects but {', '.join(sorted(allowed))}" if allowed else "a pure function"
        return lambda function: _marked(function, allowed, reason)

    def suspend(self, *names: str) -> Any:
        """A context in which these effects are errors.

        >>> with effects.suspend("io"):
        ...     perform(["random"])
        """
        reason = f"no {' or '.join(names)} while suspended"
        return watched(ALL - _names(names), "a block in which effects are suspended", reason)

    def of(self, function: Function) -> frozenset[str]:
        """What a function may do, by what it and the functions it refers to declare; nothing is run."""
        return of(function)

    def inferred(self, function: Function, *args: Any, **keywords: Any) -> frozenset[str]:
        """What a function does on these arguments, found by running or tracing it."""
        with watched(ALL, "inference", "anything") as frame:
            function(*args, **keywords)
        return frozenset(frame.found)


effects = Effects()


def of(function: Any) -> frozenset[str]:
    """The effects of what a function refers to."""
    return _of(function, set())


def _of(item: Any, seen: set[int]) -> frozenset[str]:
    known = _declared(item)
    if known is not None:
        return known
    try:
        if item in BUILTIN:
            return BUILTIN[item]
    except TypeError:  # it has no hash, so that it is no builtin
        pass
    if id(item) in seen:
        return frozenset()
    seen.add(id(item))
    if isinstance(item, functools.partial):
        return frozenset().union(*(_of(x, seen) for x in (item.func, *item.args, *item.keywords.values())))
    inner = getattr(item, "function", None)  # jit, custom rules
    if inner is not None and not isinstance(item, ModuleType):
        return _of(inner, seen)
    if isinstance(item, (tuple, list)):
        return frozenset().union(*(_of(x, seen) for x in item)) if item else frozenset()
    if not isinstance(item, FunctionType):
        return frozenset()
    return frozenset().union(*(_of(x, seen) for x in _referred(item)))


def _referred(function: FunctionType) -> Iterator[Any]:
    """What a function's code names and can be found without running it.

    Of this package's functions only what they close over, such as the parts of `compose`: the others say
    what they do with `@effects`, or when they run.
    """
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closed = {name: cell.cell_contents for name, cell in cells if _filled(cell)}
    yield from closed.values()
    if not function.__code__.co_filename.startswith(_PACKAGE):
        yield from _named(function.__code__, {**vars(builtins), **function.__globals__, **closed})


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF")
_PARTS = ("LOAD_ATTR", "LOAD_METHOD")


def _named(code: CodeType, known: dict[str, Any]) -> Iterator[Any]:
    """Names, and attributes of modules, that code loads; that of inner functions too."""
    last: Any = None
    for each in dis.get_instructions(code):
        if each.opname in _READS:
            last = known.get(each.argval)
        elif each.opname in _PARTS and isinstance(last, ModuleType):
            last = getattr(last, each.argval, None)
        else:
            continue
        if callable(last):
            yield last
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _named(constant, known)
