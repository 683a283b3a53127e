"""Quantisation: integers with a scale, and quantisation-aware training with straight-through gradients (Jacob et al.
2018)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, user_location
from tessera.core.shapes import normalize_axes
from tessera.core.types import DType, as_dtype, f32, int8, int32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import reduce
from tessera.ops.tensor.basic import cast, stop_gradient
from tessera.ops.tensor.contractions import dot
from tessera.ops.tensor.elementwise import abs, equal, maximum, minimum, round, where
from tessera.transforms.policies.numeric_context import NumericContext, NumericSettings

SUPPORTED_BITS = range(2, 17)


def _compute_scale(x: Tensor, top: int, axis: Any) -> Tensor:
    """The scale of quantised integers; each index of the axes `axis` has its own."""
    over = None if axis is None else tuple(a for a in range(-x.ndim, 0) if a not in normalize_axes(axis, x.ndim))
    size = reduce.max(abs(x), axis=over, keepdims=True)
    return where(equal(size, 0.0), 1.0, size) * (1.0 / top)


def quantize(x: Any, dtype: DType = int8, axis: Any = None) -> tuple[Tensor, Tensor]:
    """Symmetric quantisation: `x` as integers and a scale, which maps the largest magnitude to the largest integer.

    Shapes: the scale has the axes of `x` with size 1, except for `axis`, each index of which has its own scale.

    >>> q, scale = quantize([1.0, -0.5])
    >>> q.tolist(), dequantize(q, scale).shape
    ([127, -64], (2,))

    Raises:
        DTypeError: `x` is not a float tensor, or `dtype` not a signed integer type.
    """
    x, element = as_tensor(x), as_dtype(dtype)
    if not x.dtype.is_float or element.kind != "int":
        raise DTypeError(
            "quantize takes floats to signed integers", location=user_location(), received=f"{x.type} to {element}",
            expected="a float tensor and ts.int8 or ts.int4",
        )  # fmt: skip
    top = 2 ** (element.bits - 1) - 1
    wide = cast(x, dtype=f32) if x.dtype.bits < 32 else x
    scale = _compute_scale(wide, top, axis)
    return cast(_round_to_levels(wide, scale, top), dtype=element), scale


def _round_to_levels(x: Tensor, scale: Tensor, top: int) -> Tensor:
    return minimum(maximum(round(x / scale), float(-top)), float(top))


def dequantize(q: Any, scale: Any) -> Tensor:
    """The floats represented by integers and their scale."""
    scale = as_tensor(scale)
    return cast(q, dtype=scale.dtype) * scale


def fake_quantize(x: Any, bits: int = 8, axis: Any = None) -> Tensor:
    """`x` rounded to integers of `bits` bits and a scale, with a straight-through gradient.

    >>> fake_quantize([1.0, 0.3], bits=2).tolist()
    [1.0, 0.0]

    Raises:
        ArgumentError: `bits` is not from 2 to 16.
    """
    x = as_tensor(x)
    if bits not in SUPPORTED_BITS:
        raise ArgumentError(f"fake_quantize to {bits} bits", location=user_location(), expected="2 to 16")
    if not x.dtype.is_float:
        raise DTypeError(
            "fake_quantize needs floats", location=user_location(), received=str(x.type), expected="a float tensor"
        )
    top = 2 ** (bits - 1) - 1
    wide = cast(x, dtype=f32) if x.dtype.bits < 32 else x
    scale = _compute_scale(wide, top, axis)
    near = cast(_round_to_levels(wide, scale, top) * scale, dtype=x.dtype)
    return x + stop_gradient(near - x)  # straight-through estimator: the rounding is a constant for derivatives


@dataclass(frozen=True)
class _QuantizedDot:
    """The integer types of the two operands of a product, and the type of its sums."""

    weights: DType
    activations: DType
    accumulate: DType
    training: bool

    def __call__(self, a: Any, b: Any, dtype: Any = None) -> Tensor:
        """A matrix product with its left side as activations and its right side as weights."""
        a, b = as_tensor(a), as_tensor(b)
        if not a.dtype.is_float:
            return dot(a, b, dtype=dtype)
        if self.training:
            left, right = fake_quantize(a, self.activations.bits), fake_quantize(b, self.weights.bits)
            return dot(left, right, dtype=dtype)
        (left, one), (right, other) = quantize(a, self.activations), quantize(b, self.weights)
        whole = dot(left, right, dtype=self.accumulate)
        out = cast(whole, dtype=one.dtype) * (one * other)
        return out if out.dtype == a.dtype else cast(out, dtype=a.dtype)


class QuantizedFunction:
    """A function whose matrix products are quantized: simulated while `training`, in integers otherwise."""

    def __init__(self, function: Callable[..., Any], weights: DType, activations: DType, accumulate: DType) -> None:
        self.function, self.training = function, True
        self._types = (weights, activations, accumulate)
        self.__name__, self.__doc__ = getattr(function, "__name__", "quantized"), function.__doc__
        self.__signature__ = inspect.signature(function)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """A method in a class: its object is the first argument."""
        return self if owner is None else MethodType(self, owner)

    def __call__(self, *args: Any, **named: Any) -> Any:
        scheme = _QuantizedDot(*self._types, self.training)
        with NumericContext(NumericSettings(substitutes={dot: scheme})):
            return self.function(*args, **named)

    def eval(self) -> QuantizedFunction:
        """This function for inference: products of integers."""
        made = QuantizedFunction(self.function, *self._types)
        made.training = False
        return made


def quantization_aware(
    function: Callable[..., Any] | None = None,
    *,
    weights: DType = int8,
    activations: DType = int8,
    accumulate: DType = int32,
) -> Any:
    """Train a function with its matrix products quantized; `.eval()` gives it with products of real integers.

    The left operand of a product is the activations, the right one the weights; each has one scale.

    >>> from tessera.ops.tensor.contractions import matmul
    >>> @quantization_aware(weights=int8, activations=int8)
    ... def layer(x, w):
    ...     return matmul(x, w)
    >>> x = Tensor([[1.0, 2.0]])
    >>> layer(x, x.T).tolist() == layer.eval()(x, x.T).tolist()
    True
    """
    types = tuple(as_dtype(t) for t in (weights, activations, accumulate))
    if any(t.kind != "int" for t in types):
        raise DTypeError("quantization needs signed integer types", location=user_location(), received=str(types))
    return (lambda f: QuantizedFunction(f, *types)) if function is None else QuantizedFunction(function, *types)


class QuantizationNamespace:
    """`ts.quantization`: `aware` is `ts.quantization_aware`; `quantize`, `dequantize` and `fake_quantize` beside it."""

    quantize = staticmethod(quantize)
    dequantize = staticmethod(dequantize)
    fake_quantize = staticmethod(fake_quantize)

    @staticmethod
    def aware(weights: DType = int8, activations: DType = int8, calibrate: bool = True) -> Any:
        """As `quantization_aware`; scales are always computed from the operands, so `calibrate` must be True."""
        if not calibrate:
            raise ArgumentError("stored scales are not supported", location=user_location(), expected="calibrate=True")
        return quantization_aware(weights=weights, activations=activations)


quantization = QuantizationNamespace()
