"""Activations as modules, with PyTorch's names and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.module import Module, Parameter
from tessera.ops.api.creation import full
from tessera.ops.tensor import activations, nn, scalar_functions
from tessera.ops.tensor.elementwise import less_equal, tanh, where

__all__ = [
    "CELU", "ELU", "GELU", "GLU", "Activation", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU",
    "LogSigmoid", "LogSoftmax", "Mish", "PReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax", "Softmin",
    "Softplus", "Softshrink", "Softsign", "SwiGLU", "Tanh", "Tanhshrink", "Threshold", "relu",
]  # fmt: skip


def relu(x: Any) -> Tensor:
    """`x` where it is positive, else 0; the derivative at 0 is 0, as in PyTorch (that of `ts.relu` is 1/2).

    >>> relu([-1.0, 2.0])
    Tensor([0., 2.], f32)
    """
    x = as_tensor(x)
    return where(less_equal(x, 0), 0, x)


class Activation(Module):
    """A function with its options as a module: `inplace` options of PyTorch are taken and have no effect."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.function, self.options = function, tuple(options.items())

    def forward(self, x: Any) -> Tensor:
        """The function of each element or axis."""
        return self.function(x, **dict(self.options))

    def extra_repr(self) -> str:
        """The options."""
        return ", ".join(f"{name}={value}" for name, value in self.options)


def _make(name: str, function: Callable[..., Any], **defaults: Any) -> type[Activation]:
    """A class of an activation whose arguments are these options."""

    def __init__(self: Activation, *args: Any, inplace: bool = False, **named: Any) -> None:
        given = dict(zip(defaults, args, strict=False)) | named
        if len(args) > len(defaults) or not named.keys() <= defaults.keys() or len(given) < len(args) + len(named):
            raise TypeError(f"{name} takes {', '.join(defaults) or 'no options'}")
        Activation.__init__(self, function, **{**defaults, **given})

    first = (function.__doc__ or "").strip().split("\n")[0]
    return type(name, (Activation,), {"__init__": __init__, "__doc__": first, "__module__": __name__})


ReLU = _make("ReLU", relu)
ReLU6 = _make("ReLU6", activations.relu6)
Sigmoid = _make("Sigmoid", scalar_functions.sigmoid)
Tanh = _make("Tanh", tanh)
SiLU = _make("SiLU", nn.silu)
Mish = _make("Mish", nn.mish)
GELU = _make("GELU", nn.gelu, approximate="none")
ELU = _make("ELU", nn.elu, alpha=1.0)
CELU = _make("CELU", activations.celu, alpha=1.0)
SELU = _make("SELU", activations.selu)
Hardtanh = _make("Hardtanh", activations.hardtanh, min_val=-1.0, max_val=1.0)
Hardsigmoid = _make("Hardsigmoid", activations.hardsigmoid)
Hardswish = _make("Hardswish", activations.hardswish)
Hardshrink = _make("Hardshrink", activations.hardshrink, lambd=0.5)
Softshrink = _make("Softshrink", activations.softshrink, lambd=0.5)
Softsign = _make("Softsign", activations.softsign)
Tanhshrink = _make("Tanhshrink", activations.tanhshrink)
LogSigmoid = _make("LogSigmoid", activations.logsigmoid)
Threshold = _make("Threshold", activations.threshold, threshold=0.0, value=0.0)


def _leaky_relu(x: Any, negative_slope: float) -> Tensor:
    """`x` where it is positive, else negative_slope · x."""
    return nn.leaky_relu(x, slope=negative_slope)


def _softplus(x: Any, beta: float, threshold: float) -> Tensor:
    """log(1 + exp(beta · x)) / beta; `x` where beta · x exceeds `threshold`."""
    return nn.softplus(x, beta=beta, threshold=threshold)


def _softmax(x: Any, dim: int) -> Tensor:
    """Positive numbers along axis `dim` whose sum is 1."""
    return nn.softmax(x, axis=dim)


def _log_softmax(x: Any, dim: int) -> Tensor:
    """The logarithm of the softmax along axis `dim`."""
    return nn.log_softmax(x, axis=dim)


def _softmin(x: Any, dim: int) -> Tensor:
    """The softmax of -x along axis `dim`."""
    return activations.softmin(x, axis=dim)


def _glu(x: Any, dim: int) -> Tensor:
    """The first half along axis `dim` times the sigmoid of the second."""
    return activations.glu(x, axis=dim)


LeakyReLU = _make("LeakyReLU", _leaky_relu, negative_slope=0.01)
Softplus = _make("Softplus", _softplus, beta=1.0, threshold=20.0)
Softmax = _make("Softmax", _softmax, dim=-1)
LogSoftmax = _make("LogSoftmax", _log_softmax, dim=-1)
Softmin = _make("Softmin", _softmin, dim=-1)
GLU = _make("GLU", _glu, dim=-1)


class PReLU(Module):
    """`x` where it is positive, else weight · x with a trained weight for all channels, or for each (axis 1).

    >>> PReLU()([-4.0, 2.0])
    Tensor([-1.,  2.], f32)
    """

    def __init__(self, num_parameters: int = 1, init: float = 0.25) -> None:
        self.weight = Parameter(full((num_parameters,), init))

    def forward(self, x: Any) -> Tensor:
        """The function of each element."""
        return activations.prelu(as_tensor(x), self.weight)


class SwiGLU(Module):
    """silu(gate) · up, for the results of two linear layers (Shazeer 2020).

    >>> SwiGLU()([0.0], [3.0])
    Tensor([0.], f32)
    """

    def forward(self, gate: Any, up: Any) -> Tensor:
        """The gated values."""
        return nn.silu(gate) * up
