"""Activations that a product applies before it stores, chosen while the kernel is compiled."""

# mypy: disable-error-code="operator, attr-defined, index"

import math
from collections.abc import Callable, Mapping
from typing import Any

from tessera.errors import ArgumentError, outside
from tessera.kernel import tile


def relu(x):
    """`x` where it is positive, else 0."""
    return tile.maximum(x, 0.0)


def silu(x):
    """`x` times its logistic function."""
    return x / (1.0 + tile.exp(-x))


def gelu(x):
    """`x` times the normal distribution function at `x` (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1.0 + tile.erf(x * math.sqrt(0.5)))


def sigmoid(x):
    """The logistic function."""
    return 1.0 / (1.0 + tile.exp(-x))


ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "relu": relu, "silu": silu, "gelu": gelu, "sigmoid": sigmoid, "tanh": tile.tanh,
}  # fmt: skip


def activation_of(activation: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The function that a name means; a function of a block is taken as it is.

    Raises:
        ArgumentError: there is no activation of this name.
    """
    if activation is None or callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ArgumentError(
            f'"{activation}" is not an activation', location=outside(), expected=", ".join(ACTIVATIONS),
            suggestion="or a function of a block, written as in a kernel",
        )  # fmt: skip
    return ACTIVATIONS[activation]
