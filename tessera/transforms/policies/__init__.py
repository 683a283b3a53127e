"""Numeric policies as contexts and decorators: precision, quantisation, loss scaling, numerical stability."""

from tessera.transforms.policies.numeric_context import kahan_sum, numerically_stable, rounding, summation
from tessera.transforms.policies.precision_contexts import (
    LossScaler,
    NumericalPolicy,
    PrecisionPolicy,
    adaptive_precision,
    autocast,
    grad_scale,
    mixed_precision,
    numerics,
    precision,
    precision_policy,
    unscale_grads,
)
from tessera.transforms.policies.quantisation import (
    dequantize,
    fake_quantize,
    quantization,
    quantization_aware,
    quantize,
)

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
