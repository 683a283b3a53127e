"""Math functions: emission rows by decomposition, and the decompositions that use instructions of this target.

Those of f32 are built on the hardware's power of two. Each result lies within the bounds of the OpenCL full profile;
`tests/codegen/ptx/test_ptx_functions.py` measures them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.codegen.ptx.ops import exp2_ftz
from tessera.codegen.ptx.table.scalars.decomposition_emission import emit_decomposition
from tessera.codegen.ptx.table.scalars.scalar_context import ScalarContext, emit
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import f32, f64
from tessera.ir.rules import Op
from tessera.ir.tensor import Tensor, bind_op
from tessera.lower.scalar_functions import double_precision
from tessera.lower.scalar_functions.decomposition import SHARED, evaluate_polynomial
from tessera.lower.scalar_functions.single_precision import erf_near_zero, tanh_near_zero
from tessera.ops.dialects.arith import copysign, define_primitive, fma
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.elementwise import infer_same, where

assert double_precision  # fills the table of decompositions

POWERS_OF_TWO = (e.exp, e.exp2, e.tanh, e.erf)  # of f32 by the hardware's power of two
DECOMPOSITIONS = SHARED.without(lambda op, dtype: dtype == f32 and op in POWERS_OF_TWO)


@define_primitive(infer_same, dialect="ptx")
def rcp_ftz(x):
    """1 divided by `x` to about 23 bits, where subnormal numbers count as 0."""
    return np.reciprocal(x)


def exp2_ftz_of(x: Tensor) -> Tensor:
    """2^x to about 22 bits, where subnormal numbers count as 0."""
    return bind_op(exp2_ftz, [x], {})


@emit(rcp_ftz)
def _(s, x):
    return s.do("rcp.approx.ftz.f32", x)


@DECOMPOSITIONS(e.exp, f32)
def exp_f32(x: Tensor) -> Tensor:
    """exp(x) = 2^y * (1 + c), y = x * log2(e) rounded, c for its rounding error; 2^y is as good for large y."""
    x = e.maximum(e.minimum(x, 89.0), -110.0)
    y = x * 1.44269504
    rest = fma(x, 1.44269504, -y)
    rest = fma(x, 1.92596303e-8, rest)
    correction = fma(rest, 0.693147181, 1.0)
    return e.exp2(y) * correction


@DECOMPOSITIONS(e.tanh, f32)
def tanh_f32(x: Tensor) -> Tensor:
    """1 - 2 / (exp(2 |x|) + 1) from 0.625 on, where the errors of the approximate instructions count for little."""
    size = e.abs(x)
    power = exp2_ftz_of(size * 2.88539008)
    far = copysign(fma(rcp_ftz(power + 1.0), -2.0, 1.0), x)
    near = tanh_near_zero(x)
    return where(size < 0.625, near, far)


@DECOMPOSITIONS(e.erf, f32)
def erf_f32(x: Tensor) -> Tensor:
    """The fit of N. Juffa, its exponent in powers of two."""
    size = e.abs(x)
    t = e.minimum(size, 4.0)
    square = t * t
    high = fma(-2.49374844e-05, t, 0.000552836593)
    low = fma(-0.00560337615, t, 0.0349920227)
    p = evaluate_polynomial(t, fma(high, square, low), -0.154047914, -0.915890167, -1.62839516)
    power = exp2_ftz_of(p * t)
    far = copysign(1.0 - power, x)
    return where(size > 0.927734375, far, erf_near_zero(x, square))


# Emission rows.


def _make_row(op: Op) -> Callable[..., str]:
    def row(s: ScalarContext, *operands: str) -> str:
        function = DECOMPOSITIONS.find(op, f64 if s.word == "f64" else f32)
        if function is None:
            raise UnsupportedOpError(f"the target ptx has no {op.__name__} of {s.word}", suggestion="cast to ts.f32")
        return emit_decomposition(s.text, function, *operands)

    return row


MATH_FUNCTIONS = DECOMPOSITIONS.ops() | {e.exp2}
for _op in MATH_FUNCTIONS - {e.exp2, e.floor_divide, e.remainder}:
    emit(_op)(_make_row(_op))
_exp2_by_decomposition = _make_row(e.exp2)


@emit(e.exp2)
def _(s, x):
    return s.do("ex2.approx.f32", x) if s.word == "f32" else _exp2_by_decomposition(s, x)


floor_divide_floats, remainder_of_floats = _make_row(e.floor_divide), _make_row(e.remainder)
