"""Gradients before the update: clipping by norm and by value; and averages of parameters after it."""

from __future__ import annotations

from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import f32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import minimum, sqrt
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.scalar_functions import clip
from tessera.optim.optimizer import check_number, wide_type


def global_norm(tree: Any) -> Tensor:
    """The Euclidean norm of all elements of a tree, in f32 (f64 for f64).

    >>> global_norm({"a": Tensor([3.0]), "b": Tensor([4.0])})
    Tensor(5., f32)

    Raises:
        ArgumentError: the tree has no leaf.
    """
    leaves = [as_tensor(x) for _, x in flatten(tree, empty=True)[0]]
    if not leaves:
        raise ArgumentError("the norm of no tensors", location=user_location(), expected="one or more")
    wide = max((wide_type(x) for x in leaves), key=lambda dtype: dtype.bits)
    total: Any = 0.0
    for x in leaves:
        held = cast(x, dtype=wide) if x.dtype != wide else x
        total = total + sum(held * held)
    return sqrt(total)


def clip_by_norm(grads: Any, max_norm: float) -> tuple[Any, Tensor]:
    """Gradients scaled so that their global norm is at most `max_norm` (Pascanu et al. 2013), and the norm before.

    As PyTorch, it divides by the norm + 1e-6.

    >>> clip_by_norm([Tensor([30.0]), Tensor([40.0])], 50.0)[1]
    Tensor(50., f32)

    Raises:
        ArgumentError: `max_norm` is negative or NaN.
    """
    check_number("max_norm", max_norm, 0.0)
    norm = global_norm(grads)
    scale = minimum(max_norm / (norm + 1e-6), 1.0)
    return _map(grads, lambda g: g * cast(scale, dtype=g.dtype) if g.dtype != scale.dtype else g * scale), norm


def clip_by_value(grads: Any, limit: float) -> Any:
    """Gradients with each element limited to -limit to limit.

    >>> clip_by_value([Tensor([-3.0, 0.5])], 1.0)
    [Tensor([-1. ,  0.5], f32)]

    Raises:
        ArgumentError: `limit` is negative or NaN.
    """
    check_number("limit", limit, 0.0)
    return _map(grads, lambda g: clip(g, -limit, limit))


def _map(tree: Any, function: Any) -> Any:
    leaves, structure = flatten(tree, empty=True)
    return structure.build(iter([function(as_tensor(x)) for _, x in leaves]))


class EMA:
    """An exponential moving average of parameters (Polyak and Juditsky 1992): `average = ema.update(average, model)`.

    Float leaves are averaged, buffers too; other leaves are those of the newest.

    >>> EMA(0.75).update([Tensor([0.0])], [Tensor([4.0])])
    [Tensor([1.], f32)]

    Raises:
        ArgumentError: the decay is not from 0 to below 1, or the trees differ.
    """

    def __init__(self, decay: float = 0.999) -> None:
        self.decay = check_number("decay", decay, 0.0, 1.0)

    def __repr__(self) -> str:
        return f"EMA(decay={self.decay})"

    def init(self, params: Any) -> Any:
        """The first average: the parameters."""
        return _map(params, lambda p: p)

    def update(self, average: Any, params: Any) -> Any:
        """The average after one step."""
        (old, structure), (new, _) = flatten(average, empty=True), flatten(params, empty=True)
        if [n for n, _ in old] != [n for n, _ in new]:
            raise ArgumentError(
                "the average and the parameters have different paths", location=user_location(),
                expected=", ".join(n for n, _ in old[:8]), received=", ".join(n for n, _ in new[:8]),
            )  # fmt: skip
        found = [self._mix(as_tensor(a), as_tensor(p)) for (_, a), (_, p) in zip(old, new, strict=True)]
        return structure.build(iter(found))

    def _mix(self, average: Tensor, p: Tensor) -> Tensor:
        if not p.dtype.is_float:
            return p
        wide = f32 if p.dtype.bits < 32 else p.dtype
        mixed = cast(average, dtype=wide) * self.decay + cast(p, dtype=wide) * (1.0 - self.decay)
        return cast(mixed, dtype=average.dtype)
