"""Functions with a version of their own for some types of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tessera.errors import ArgumentError, here
from tessera.pytree import flatten
from tessera.shapes import bind_all
from tessera.tensor import Tensor
from tessera.types import DType, TensorType

Function = Callable[..., Any]


class Polymorphic:
    """A function of any tensors, and versions of it for tensors of some types; the last that fits is taken."""

    def __init__(self, function: Function) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.versions: list[tuple[TensorType, Function]] = []

    def specialize(self, type: TensorType | DType) -> Callable[[Function], Function]:
        """Register a version for calls whose tensors are all of this type.

        `Tensor[ts.f32]` (or `ts.f32`) is any tensor of f32, `Tensor["N", 4, ts.f32]` one of that shape.

        Raises:
            ArgumentError: this is no type.
        """
        if not isinstance(type, (TensorType, DType)):
            raise ArgumentError(
                "a version is for a type of tensors", location=here(), expected="Tensor[ts.f32]", received=repr(type)
            )
        wanted = TensorType((), type) if isinstance(type, DType) else type

        def register(function: Function) -> Function:
            self.versions.append((wanted, function))
            return function

        return register

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        types = [x.type for _, x in flatten([list(args), keywords])[0] if isinstance(x, Tensor)]
        fitting = [f for wanted, f in reversed(self.versions) if types and all(_fits(wanted, t) for t in types)]
        return (fitting[0] if fitting else self.function)(*args, **keywords)


def _fits(wanted: TensorType, type: TensorType) -> bool:
    if wanted.dtype != type.dtype:
        return False
    return not wanted.shape or not bind_all([(wanted.shape, type.shape)], {})


def polymorphic(function: Function) -> Polymorphic:
    """A function that `specialize` gives versions for some types of tensors; others take the function itself.

    Which version is taken depends on types alone, so that it works in traces, and under every transform.

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
    return Polymorphic(function)
