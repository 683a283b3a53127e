"""Activations as modules, with PyTorch's names and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32, to_python_numbers
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.module import Module, Parameter
from tessera.ops.api.creation import full
from tessera.ops.tensor import activations, nn, scalar_functions
from tessera.ops.tensor.elementwise import less_equal, tanh, where

__all__ = [
    "Activation", "CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU",
    "LogSigmoid", "LogSoftmax", "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid", "Softmax",
    "Softmax2d", "Softmin", "Softplus", "Softshrink", "Softsign", "SwiGLU", "Tanh", "Tanhshrink", "Threshold", "relu",
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


def _make(name: str, function: Callable[..., Any], inplace: bool = False, **defaults: Any) -> type[Activation]:
    """A class of an activation whose arguments are these options, then `inplace` where PyTorch's class has it."""
    known = {**defaults, "inplace": False} if inplace else defaults

    def __init__(self: Activation, *args: Any, **named: Any) -> None:
        given = dict(zip(known, args, strict=False)) | named
        if len(args) > len(known) or not named.keys() <= known.keys() or len(given) < len(args) + len(named):
            raise ArgumentError(
                f"{name} does not take these options", location=user_location(),
                expected=", ".join(known) or "no options", received=", ".join([*map(repr, args), *named]),
            )  # fmt: skip
        check_options(name, given, known)
        given.pop("inplace", None)
        Activation.__init__(self, function, **{**defaults, **given})

    first = (function.__doc__ or "").strip().split("\n")[0]
    return type(name, (Activation,), {"__init__": __init__, "__doc__": first, "__module__": __name__})


def check_options(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Check that the options of an activation are of the kinds of its defaults: numbers, bools or strings.

    Raises:
        ArgumentError: one is not.
    """
    for option, value in given.items():
        default, value = defaults[option], to_python_numbers(value)
        kinds: tuple[type, ...] = (int, float) if isinstance(default, (int, float)) else (type(default),)
        if isinstance(default, bool):
            kinds = (bool,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise ArgumentError(
                f"{option} of {name} is {value!r}", location=user_location(), expected=f"as {default!r}"
            )


ReLU = _make("ReLU", relu, inplace=True)
ReLU6 = _make("ReLU6", activations.relu6, inplace=True)
Sigmoid = _make("Sigmoid", scalar_functions.sigmoid)
Tanh = _make("Tanh", tanh)
SiLU = _make("SiLU", nn.silu, inplace=True)
Mish = _make("Mish", nn.mish, inplace=True)
GELU = _make("GELU", nn.gelu, approximate="none")
ELU = _make("ELU", nn.elu, inplace=True, alpha=1.0)
CELU = _make("CELU", activations.celu, inplace=True, alpha=1.0)
SELU = _make("SELU", activations.selu, inplace=True)
Hardtanh = _make("Hardtanh", activations.hardtanh, inplace=True, min_val=-1.0, max_val=1.0)
Hardsigmoid = _make("Hardsigmoid", activations.hardsigmoid, inplace=True)
Hardswish = _make("Hardswish", activations.hardswish, inplace=True)
Hardshrink = _make("Hardshrink", activations.hardshrink, lambd=0.5)
Softshrink = _make("Softshrink", activations.softshrink, lambd=0.5)
Softsign = _make("Softsign", activations.softsign)
Tanhshrink = _make("Tanhshrink", activations.tanhshrink)
LogSigmoid = _make("LogSigmoid", activations.logsigmoid)


class Threshold(Activation):
    """`x` where it exceeds `threshold`, else `value`.

    >>> Threshold(0.5, 9.0)([0.0, 1.0])
    Tensor([9., 1.], f32)
    """

    def __init__(self, threshold: float, value: float, inplace: bool = False) -> None:
        super().__init__(activations.threshold, threshold=threshold, value=value)


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


LeakyReLU = _make("LeakyReLU", _leaky_relu, inplace=True, negative_slope=0.01)
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

    def __init__(self, num_parameters: int = 1, init: float = 0.25, dtype: Any = f32) -> None:
        self.weight = Parameter(full((num_parameters,), init, dtype=dtype))

    def forward(self, x: Any) -> Tensor:
        """The function of each element."""
        return activations.prelu(as_tensor(x), self.weight)


class RReLU(Module):
    """`x` where it is positive, else x times a number between `lower` and `upper`, drawn anew in training mode.

    In evaluation mode it is their mean.

    >>> RReLU(0.25, 0.75).eval()([-2.0, 2.0])
    Tensor([-1.,  2.], f32)
    """

    def __init__(self, lower: float = 1.0 / 8.0, upper: float = 1.0 / 3.0, inplace: bool = False) -> None:
        self.lower, self.upper = lower, upper

    def forward(self, x: Any) -> Tensor:
        """The function of each element."""
        return activations.rrelu(as_tensor(x), self.lower, self.upper, training=self.training)

    def extra_repr(self) -> str:
        """The bounds."""
        return f"lower={self.lower}, upper={self.upper}"


class Softmax2d(Module):
    """The softmax over the channels of [N, C, H, W] or [C, H, W].

    >>> Softmax2d()([[[0.0]], [[0.0]]])
    Tensor([[[0.5]],
            [[0.5]]], f32)
    """

    def forward(self, x: Any) -> Tensor:
        """The shares of the channels."""
        x = as_tensor(x)
        if x.ndim not in (3, 4):
            raise ShapeError(
                "Softmax2d does not take this input", location=user_location(), expected="[N, C, H, W] or [C, H, W]",
                received=str(x.type),
            )  # fmt: skip
        return nn.softmax(x, axis=-3)


class SwiGLU(Module):
    """silu(gate) · up, for the results of two linear layers (Shazeer 2020).

    >>> SwiGLU()([0.0], [3.0])
    Tensor([0.], f32)
    """

    def forward(self, gate: Any, up: Any) -> Tensor:
        """The gated values."""
        return nn.silu(gate) * up
