"""Tessera functions: traced and checked, pure unless they say otherwise; and functions for some devices only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.device import default_device
from tessera.effect import pure
from tessera.errors import DeviceUnavailable, here
from tessera.tracing import Jit, jit

Function = Callable[..., Any]


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
        EffectError: it has an effect that it does not declare.
        ShapeError, DTypeError: an argument does not fit its annotation, when called.
    """
    if body is None:
        return functools.partial(function, **options)
    if isinstance(body, Jit):
        return body
    declared = getattr(body, "__effects__", None) is not None
    return jit(body if declared else pure(body), **options)


def current_device() -> str:
    """The device that calls run on: "interp", "cpu" and so on, as `set_default_device` was told.

    >>> current_device()
    'interp'
    """
    return default_device()


def specialize_for(*devices: str) -> Callable[[Function], Function]:
    """A function written for these devices; on another one it is refused. `current_device()` tells which it is.

    >>> @specialize_for("interp", "llvm")
    ... def attention(x):
    ...     return x if current_device() == "interp" else -x
    >>> attention(1), attention.devices
    (1, ('interp', 'llvm'))

    Raises:
        DeviceUnavailable: it is called where the current device is none of them.
    """

    def decorate(body: Function) -> Function:
        @functools.wraps(body)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            if current_device() not in devices:
                raise DeviceUnavailable(
                    f"{getattr(body, '__name__', 'the function')} is not written for {current_device()}",
                    location=here(), expected=", ".join(devices), received=current_device(),
                    suggestion="call another version here, or choose a device with ts.set_default_device",
                )  # fmt: skip
            return body(*args, **keywords)

        wrapper.devices = devices  # type: ignore[attr-defined]
        return wrapper

    return decorate
