"""How far each scalar function of a target may lie from the true value, in ulps of the compute format.

OpenCL C 3.0, table of ULP values for single and for double precision, full profile (design 5).
"""

from __future__ import annotations

from tessera.errors import UnsupportedOpError
from tessera.types import DType, f64

SINGLE = {
    "add": 0.5,
    "sub": 0.5,
    "mul": 0.5,
    "div": 2.5,
    "sqrt": 3.0,
    "rsqrt": 2.0,
    "exp": 3.0,
    "exp2": 3.0,
    "expm1": 3.0,
    "log": 3.0,
    "log2": 3.0,
    "log1p": 2.0,
    "atan": 5.0,
    "sin": 4.0,
    "cos": 4.0,
    "tanh": 5.0,
    "erf": 16.0,
    "pow": 16.0,
}
DOUBLE = {**SINGLE, "div": 0.5, "sqrt": 0.5}


def ulps(name: str, compute: DType) -> float:
    """The ulps that the function `name` may be off when it computes in `compute`.

    >>> from tessera.types import f32
    >>> ulps("div", f32), ulps("div", f64)
    (2.5, 0.5)

    Raises:
        UnsupportedOpError: the table has no such function.
    """
    table = DOUBLE if compute == f64 else SINGLE
    if name not in table:
        raise UnsupportedOpError(f"nothing says how far {name} may be off", expected="a row in tessera/numerics/ulp.py")
    return table[name]
