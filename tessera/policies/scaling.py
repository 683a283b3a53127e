"""Loss scaling: gradients of small numbers kept above what a narrow type can hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from tessera.errors import ArgumentError, here
from tessera.ops.basic import cast
from tessera.ops.functions import isfinite
from tessera.ops.statistics import all
from tessera.policies.frame import Context, Frame
from tessera.policies.precision import precision
from tessera.pytree import flatten, map_leaves
from tessera.tensor import Tensor, as_tensor
from tessera.types import DType, bf16, f32

# The mixed precision that is open: its context and its scale.
MIXED: ContextVar[tuple[Context, float] | None] = ContextVar("mixed", default=None)


def mixed_precision(
    function: Callable[..., Any] | None = None,
    *,
    compute: DType = bf16,
    accumulate: DType = f32,
    grad_scale: float = 1.0,
) -> Any:
    """Run a function in which `ts.autocast()` opens this precision and `ts.grad_scale()` is this scale.

    >>> @mixed_precision(compute=bf16, grad_scale=1024.0)
    ... def step(x):
    ...     with autocast():
    ...         y = x + x
    ...     return y * grad_scale()
    >>> step(as_tensor([1.0])).tolist()
    [2048.0]

    Raises:
        ArgumentError: the scale is not above 0.
    """
    if not grad_scale > 0:
        raise ArgumentError(f"a gradient scale of {grad_scale}", location=here(), expected="a number above 0")
    if function is None:
        return functools.partial(mixed_precision, compute=compute, accumulate=accumulate, grad_scale=grad_scale)
    context = precision(compute=compute, accumulate=accumulate)

    @functools.wraps(function)
    def scaled(*args: Any, **named: Any) -> Any:
        token = MIXED.set((context, float(grad_scale)))
        try:
            return function(*args, **named)
        finally:
            MIXED.reset(token)

    return scaled


def autocast() -> Context:
    """The context of the `mixed_precision` function that is running; outside of one, nothing changes in it."""
    found = MIXED.get()
    return Context(found[0].frame if found else Frame())


def _scale_now() -> float:
    found = MIXED.get()
    return found[1] if found else 1.0


def grad_scale() -> float:
    """The gradient scale of the `mixed_precision` function that is running; 1.0 outside of one."""
    return _scale_now()


def unscale_grads(gradients: Any, scale: float | None = None) -> Any:
    """Gradients (a tensor or a container of them) divided by `scale`, by default `ts.grad_scale()`, in f32 or wider.

    >>> unscale_grads({"w": as_tensor([8.0])}, 4.0)["w"].tolist()
    [2.0]
    """
    by = _scale_now() if scale is None else scale
    return map_leaves(lambda g: _wide(g) * (1.0 / by), gradients)


def _wide(x: Any) -> Tensor:
    """A tensor as f32 unless it is wider: neither a scale nor a small gradient fits into f16."""
    x = as_tensor(x)
    return cast(x, dtype=f32) if x.dtype.is_float and x.dtype.bits < 32 else x


class LossScaler:
    """A loss scale that grows while gradients stay finite and shrinks when they do not.

    After Micikevicius et al., "Mixed precision training" (2018), section 3.2: double after `interval` good steps,
    halve after a bad one, whose step is left out.

    >>> scaler = LossScaler(scale=4.0, interval=1)
    >>> gradients, good = scaler.unscale(as_tensor([8.0]))
    >>> gradients.tolist(), good, scaler.update(good)
    ([2.0], True, 8.0)
    """

    def __init__(self, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        self.factor, self.growth, self.backoff, self.interval = float(scale), growth, backoff, interval
        self._good = 0

    def scale(self, loss: Any) -> Any:
        """The loss times the scale, in f32 or wider."""
        return _wide(loss) * self.factor

    def unscale(self, gradients: Any) -> tuple[Any, bool]:
        """The gradients divided by the scale, and whether all of them are finite."""
        leaves = [as_tensor(leaf) for _, leaf in flatten(gradients)[0]]
        finite = [bool(all(isfinite(leaf))) for leaf in leaves]
        return unscale_grads(gradients, self.factor), False not in finite

    def update(self, good: bool) -> float:
        """The scale for the next step, after a step whose gradients were finite or not."""
        self._good = self._good + 1 if good else 0
        if not good:
            self.factor *= self.backoff
        elif self._good == self.interval:
            self.factor, self._good = self.factor * self.growth, 0
        return self.factor
