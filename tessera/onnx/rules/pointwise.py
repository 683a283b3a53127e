"""Pointwise operators of ONNX: arithmetic, comparison, logic, bits and activations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.types import f32, f64
from tessera.ir.tensor import Tensor
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor import activations, nn
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.shape import reshape

UNARY: dict[str, Callable[[Any], Any]] = {
    "Abs": e.abs, "Neg": e.neg, "Ceil": e.ceil, "Floor": e.floor, "Round": e.round, "Sqrt": e.sqrt, "Exp": e.exp,
    "Log": e.log, "Sin": e.sin, "Cos": e.cos, "Tan": f.tan, "Asin": f.asin, "Acos": f.acos, "Atan": f.atan,
    "Sinh": f.sinh, "Cosh": f.cosh, "Tanh": e.tanh, "Asinh": f.asinh, "Acosh": f.acosh, "Atanh": f.atanh,
    "Erf": e.erf, "Sign": f.sign, "Reciprocal": f.reciprocal, "Sigmoid": f.sigmoid, "Relu": nn.relu,
    "Softplus": nn.softplus, "Softsign": activations.softsign, "Not": e.bitwise_not, "BitwiseNot": e.bitwise_not,
    "IsNaN": f.isnan, "HardSwish": activations.hardswish, "Mish": nn.mish,
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": e.add, "Sub": e.sub, "Mul": e.mul, "Greater": e.greater, "GreaterOrEqual": e.greater_equal, "Less": e.less,
    "LessOrEqual": e.less_equal, "And": e.bitwise_and, "Or": e.bitwise_or, "Xor": e.bitwise_xor,
    "BitwiseAnd": e.bitwise_and, "BitwiseOr": e.bitwise_or, "BitwiseXor": e.bitwise_xor,
}  # fmt: skip
VARIADIC: dict[str, Callable[[Any, Any], Any]] = {"Max": e.maximum, "Min": e.minimum, "Sum": e.add}


@rule(*UNARY)
def _(call: NodeCall, x: Tensor) -> Tensor:
    return UNARY[call.operator](x)


@rule(*BINARY)
def _(call: NodeCall, x: Tensor, y: Tensor) -> Tensor:
    return BINARY[call.operator](x, _align(call, x, y))


def _align(call: NodeCall, x: Tensor, y: Tensor) -> Tensor:
    """The second operand where its first axis is to meet an axis of the first (opset below 7)."""
    axis = call.attr("axis", None) if call.attr("broadcast", 0) else None
    return y if axis is None else reshape(y, shape=(*y.shape, *(1,) * (x.ndim - axis % x.ndim - y.ndim)))


@rule(*VARIADIC)
def _(call: NodeCall, *xs: Tensor) -> Tensor:
    return functools.reduce(VARIADIC[call.operator], xs)


@rule("Mean")
def _(call: NodeCall, *xs: Tensor) -> Tensor:
    return composite(lambda *xs: functools.reduce(e.add, xs) * (1.0 / len(xs)))(*xs)


@rule("Equal")
def _(call: NodeCall, x: Any, y: Any) -> Tensor:
    if isinstance(x, np.ndarray):
        return Tensor(np.asarray(x == y, bool))
    return e.equal(x, y)


@rule("Div")
def _(call: NodeCall, x: Tensor, y: Tensor) -> Tensor:
    return e.div(x, _align(call, x, y)) if x.dtype.is_float else divide_toward_zero(x, y)


def divide_toward_zero(x: Tensor, y: Tensor) -> Tensor:
    """The quotient of integers rounded toward zero, as in C."""
    if x.dtype.kind == "uint":
        return e.floor_divide(x, y)
    size = e.floor_divide(e.abs(x), e.abs(y))
    return e.where(e.not_equal(e.less(x, 0), e.less(y, 0)), e.neg(size), size)


@rule("Mod")
def _(call: NodeCall, x: Tensor, y: Tensor) -> Tensor:
    if not call.attr("fmod"):
        return e.remainder(x, y)
    return f.fmod(x, y) if x.dtype.is_float else x - divide_toward_zero(x, y) * y


@rule("Pow")
def _(call: NodeCall, x: Tensor, y: Tensor) -> Tensor:
    y = _align(call, x, y)
    if x.dtype.is_float:
        return e.pow(x, y if y.dtype == x.dtype else cast(y, dtype=x.dtype))
    if y.dtype.is_integer:
        return cast(e.pow(x, cast(y, dtype=x.dtype)), dtype=x.dtype)
    wide = f64 if x.dtype.bits > 16 else f32
    return cast(e.pow(cast(x, dtype=wide), cast(y, dtype=wide)), dtype=x.dtype)


@rule("BitShift")
def _(call: NodeCall, x: Tensor, y: Tensor) -> Tensor:
    shift = {"LEFT": e.shift_left, "RIGHT": e.shift_right}.get(call.attr("direction"))
    if shift is None:
        raise call.fail("no such direction", expected="LEFT or RIGHT", received=call.attr("direction"))
    inside = e.less(y, x.dtype.bits)
    signed = x.dtype.kind == "int" and shift is e.shift_right
    beyond: Any = cast(e.where(e.less(x, 0), -1, 0), dtype=x.dtype) if signed else 0
    return e.where(inside, shift(x, e.where(inside, y, 0)), beyond)


@rule("IsInf")
def _(call: NodeCall, x: Tensor) -> Tensor:
    none = e.not_equal(x, x) & e.equal(x, x)
    above = e.equal(x, math.inf) if call.attr("detect_positive") else none
    return above | (e.equal(x, -math.inf) if call.attr("detect_negative") else none)


@rule("Where")
def _(call: NodeCall, condition: Tensor, x: Any, y: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.where(condition.numpy(), x, y)
    return e.where(condition, x, y)


@rule("Clip")
def _(call: NodeCall, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if call.since < 11:
        found = e.maximum(x, call.attr("min", -math.inf))
        return e.minimum(found, call.attr("max", math.inf))
    x = x if low is None else e.maximum(x, low)
    return x if high is None else e.minimum(x, high)


# Activations with attributes: each is a function of several ops, which rounds once.

Activation = Callable[..., Tensor]
ACTIVATIONS: dict[str, tuple[tuple[str, ...], Activation]] = {
    "LeakyRelu": (("alpha",), lambda x, alpha: e.where(e.less(x, 0), x * alpha, x)),
    "Elu": (("alpha",), lambda x, alpha: nn.elu(x, alpha=alpha)),
    "Celu": (("alpha",), lambda x, alpha: activations.celu(x, alpha)),
    "Selu": (("alpha", "gamma"), lambda x, alpha, gamma: nn.elu(x, alpha=alpha) * gamma),
    "ThresholdedRelu": (("alpha",), lambda x, alpha: e.where(e.greater(x, alpha), x, 0.0)),
    "HardSigmoid": (("alpha", "beta"), lambda x, alpha, beta: f.clip(x * alpha + beta, 0.0, 1.0)),
    "Gelu": (("approximate",), lambda x, approximate: nn.gelu(x, approximate=approximate)),
    "Swish": (("alpha",), lambda x, alpha: x * f.sigmoid(x * alpha)),
}


@rule(*ACTIVATIONS)
def _(call: NodeCall, x: Tensor) -> Tensor:
    names, function = ACTIVATIONS[call.operator]
    return composite(function)(x, **{name: call.attr(name) for name in names})


@rule("PRelu")
def _(call: NodeCall, x: Tensor, slope: Tensor) -> Tensor:
    if call.since < 7 and slope.ndim == 1:  # one for each channel
        slope = reshape(slope, shape=(-1, *(1,) * (x.ndim - 2)))
    return e.where(e.less(x, 0), x * slope, x)


@rule("Shrink")
def _(call: NodeCall, x: Tensor) -> Tensor:
    bias, limit = call.attr("bias"), call.attr("lambd")
    if x.dtype.is_integer:
        wide = cast(x, dtype=f64)
        return cast(_shrink(wide, bias, limit), dtype=x.dtype)
    return composite(_shrink)(x, bias, limit)


def _shrink(x: Tensor, bias: float, limit: float) -> Tensor:
    return e.where(e.less(x, -limit), x + bias, e.where(e.greater(x, limit), x - bias, 0.0))
