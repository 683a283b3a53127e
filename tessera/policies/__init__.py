"""Numeric policies as contexts and decorators: precision, quantization, loss scaling, stability."""

from tessera.policies.precision import (
    NumericalPolicy,
    PrecisionPolicy,
    adaptive_precision,
    numerics,
    precision,
    precision_policy,
)
from tessera.policies.quantization import dequantize, fake_quantize, quantization, quantization_aware, quantize
from tessera.policies.scaling import LossScaler, autocast, grad_scale, mixed_precision, unscale_grads
from tessera.policies.stability import kahan_sum, numerically_stable, rounding, summation

__all__ = [
    "LossScaler",
    "NumericalPolicy",
    "PrecisionPolicy",
    "adaptive_precision",
    "autocast",
    "dequantize",
    "fake_quantize",
    "grad_scale",
    "kahan_sum",
    "mixed_precision",
    "numerically_stable",
    "numerics",
    "precision",
    "precision_policy",
    "quantization",
    "quantization_aware",
    "quantize",
    "rounding",
    "summation",
    "unscale_grads",
]
