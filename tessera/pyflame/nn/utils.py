"""Gradient clipping with PyTorch's interface: the gradients of parameters are limited in place, before a step.

>>> import tessera.pyflame as pf
>>> w = pf.nn.Parameter(pf.tensor([30.0, 40.0]))
>>> pf.autograd.backward((w * w).sum() * 0.5)
>>> clip_grad_norm_([w], 5.0).item(), w.grad.numpy().round(3).tolist()
(50.0, [3.0, 4.0])
"""

from __future__ import annotations

from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.frontend.jit.tracing import Jit
from tessera.ir.tensor import Tensor as CoreTensor
from tessera.optim.gradients import clip_by_norm, clip_by_value
from tessera.pyflame.lazy_graph import Expression
from tessera.pyflame.tensor import Tensor, elements_of

__all__ = ["clip_grad_norm_", "clip_grad_value_"]


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients so that the Euclidean norm of all together is at most `max_norm`; the norm before.

    Parameters without a gradient do not count.

    Raises:
        ArgumentError: `max_norm` is negative or NaN, `norm_type` is not 2, or `parameters` are no tensors.
    """
    if norm_type != 2:
        raise ArgumentError("clipping by another norm", location=user_location(), expected="norm_type=2",
                            received=repr(norm_type), suggestion="clip_grad_value_ limits each element")  # fmt: skip
    chosen = _list_with_gradients(parameters)
    if not chosen:
        return _make_constant(CoreTensor(0.0), None)
    grads, norm = _CLIP_NORM([elements_of(p.grad) for p in chosen], max_norm=float(max_norm))
    _set_gradients(chosen, grads)
    return _make_constant(norm, None)


def clip_grad_value_(parameters: Any, clip_value: float) -> None:
    """Limit each element of the gradients to -clip_value to clip_value.

    Raises:
        ArgumentError: `clip_value` is negative or NaN, or `parameters` are no tensors.
    """
    chosen = _list_with_gradients(parameters)
    if chosen:
        grads = _CLIP_VALUE([elements_of(p.grad) for p in chosen], limit=float(clip_value))
        _set_gradients(chosen, grads)


_CLIP_NORM = Jit(clip_by_norm, static_argnames=("max_norm",), dynamic=False)
_CLIP_VALUE = Jit(clip_by_value, static_argnames=("limit",), dynamic=False)


def _list_with_gradients(parameters: Any) -> list[Any]:
    found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for x in found:
        if not isinstance(x, Tensor):
            raise ArgumentError("this is not a parameter", location=user_location(), received=type(x).__name__,
                                expected="tensors", suggestion="pass model.parameters()")  # fmt: skip
    return [p for p in {id(x): x for x in found}.values() if p.grad is not None]


def _set_gradients(parameters: list[Any], grads: list[CoreTensor]) -> None:
    for p, g in zip(parameters, grads, strict=True):
        p.grad = _make_constant(g, p.layout)


def _make_constant(x: CoreTensor, layout: Any) -> Tensor:
    return Tensor(Expression(x.type, "gradient", elements=x, layout=layout, constant=True))
