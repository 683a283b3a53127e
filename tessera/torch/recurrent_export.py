"""Export of recurrent layers as one op each: `torch.export` alone unrolls them over time (torch.nn.modules.rnn)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _VF

_TAIL = "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, "
_TAIL += "bool batch_first)"
SCHEMAS = {
    "lstm": f"(Tensor input, Tensor[] hx, {_TAIL} -> (Tensor, Tensor, Tensor)",
    "gru": f"(Tensor input, Tensor hx, {_TAIL} -> (Tensor, Tensor)",
    "rnn_tanh": f"(Tensor input, Tensor hx, {_TAIL} -> (Tensor, Tensor)",
    "rnn_relu": f"(Tensor input, Tensor hx, {_TAIL} -> (Tensor, Tensor)",
}
WHOLE_OPS = {f"tessera_export.{name}.default": f"aten.{name}.input" for name in SCHEMAS}
"""The ops that stand for recurrent layers in an export, and those of ATen whose rows they have."""
LIBRARIES: list[Any] = []  # an op ends with the object that defined it


@functools.cache
def _define_ops() -> dict[str, Callable[..., Any]]:
    """PyTorch's own functions; the ops that call them are defined once in a process."""
    library = torch.library.Library("tessera_export", "DEF")
    LIBRARIES.append(library)
    own = {name: getattr(_VF, name) for name in SCHEMAS}
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, own[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"tessera_export::{name}", _infer, lib=library)
    return own


def _infer(
    x: Any, hx: Any, params: Any, has_biases: bool, layers: int, dropout: float, train: bool, both: bool, first: bool
) -> Any:
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    size = states[0].shape[-1] * (2 if both else 1)
    return (x.new_empty((*x.shape[:-1], size)), *(torch.empty_like(s) for s in states))


@contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """A context in which recurrent layers are traced as one op each, if a row takes them."""
    own = _define_ops()
    for name, function in own.items():
        setattr(_VF, name, functools.partial(_call, name, function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(_VF, name, function)


def _call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    packed = not isinstance(args[2], (list, tuple)) or isinstance(args[1], torch.Tensor) == (name == "lstm")
    if packed:
        return function(*args)
    _, hx, params, has_biases, layers, dropout, train, both, _ = args
    plain = len(params) == (4 if has_biases else 2) * layers * (2 if both else 1)
    if not plain or (dropout and train and layers > 1):
        return function(*args)
    given = [list(a) if isinstance(a, tuple) else a for a in args]
    return getattr(torch.ops.tessera_export, name)(*given)
