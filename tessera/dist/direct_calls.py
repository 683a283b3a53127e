"""Direct calls: a collective like one before, on a tensor of the GPU, goes to NCCL at once.

The first call passes through the op, which checks it and finds the group. The next ones with the same types and
arguments differ in addresses alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from tessera.core.device_array import DeviceArray
from tessera.core.effects import perform_effects
from tessera.core.errors import TesseraError, user_location
from tessera.core.types import TensorType
from tessera.dist.mesh import MeshAxis, current_mesh
from tessera.dist.ranks import CURRENT_RANK
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import Tensor, wrap_array

MAX_KNOWN = 1024
EFFECTS = ("collective",)


class _Known(NamedTuple):
    """What a call does: the collective, its group and attributes, and the types of operand and result."""

    kind: str
    members: tuple[int, ...]
    attrs: Any
    operand: TensorType
    result: TensorType


_KNOWN: dict[Any, _Known] = {}


def _describe(value: Any) -> Any:
    """A key of an argument; True is not 1 here."""
    return (value.mesh, value.names) if value.__class__ is MeshAxis else (value.__class__, value)


def _make_key(name: str, context: Any, data: DeviceArray, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    around = current_mesh()
    key = (
        name, context.world, context.mesh, data.shape, data.dtype, None if around is None else _describe(around),
        *map(_describe, args), *((k, _describe(v)) for k, v in named.items()),
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:
        return None
    return key


def direct(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make the calls of a collective after the first of their kind direct."""
    name = function.__name__

    @functools.wraps(function)
    def call(x: Any, *args: Any, **named: Any) -> Tensor:
        context = CURRENT_RANK.get()
        if (
            context is None or not context.world.on_device or x.__class__ is not Tensor
            or x.data.__class__ is not DeviceArray or x.requires_grad or CURRENT_BUILDER.get() is not None
            or (key := _make_key(name, context, x.data, args, named)) is None
        ):  # fmt: skip
            return function(x, *args, **named)
        world: Any = context.world
        known = _KNOWN.get(key)
        if known is None or known.operand != x.type:
            return _call_and_keep(function, key, world, x, args, named)
        data, memory = x.data, world.memory
        try:
            perform_effects(EFFECTS)
            stream = memory.find_stream()
            if data.stream != stream:
                memory.order(data, stream)
            return wrap_array(world.run(known.kind, data, None, known.members, known.attrs, stream), known.result)
        except TesseraError as error:
            raise error.at(user_location()) from None

    return call


def _call_and_keep(
    function: Callable[..., Tensor], key: Any, world: Any, x: Tensor, args: tuple[Any, ...], named: dict[str, Any]
) -> Tensor:
    world.last = None
    result = function(x, *args, **named)
    last = world.last
    # A function that does more than one collective is not kept.
    if last is not None and last.operand is x.data and last.result is result.data:
        if len(_KNOWN) >= MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _Known(last.kind, last.members, last.attrs, x.type, result.type)
    world.last = None
    return result
