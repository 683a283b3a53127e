"""Correct rounding of rational numbers in any direction: the best of the neighbours of an estimate."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}


def value(bits, dtype):
    return float(np.array([bits], f"u{np.dtype(dtype).itemsize}").view(dtype)[0])


def rounded(exact, dtype, mode="rn"):
    """The float of a format that a direction gives for a Fraction; overflow as the direction has it."""
    size = np.dtype(dtype).itemsize
    top = int(np.array([np.inf]).astype(dtype).view(f"u{size}")[0])
    low, high = 0, top  # magnitudes in order of their bits: the largest not above the exact one
    magnitude = abs(exact)
    while high - low > 1:
        middle = (low + high) // 2
        if Fraction(value(middle, dtype)) <= magnitude:
            low = middle
        else:
            high = middle
    chosen = low if Fraction(value(low, dtype)) == magnitude else pick(magnitude, low, dtype, mode, exact < 0, top)
    return math.copysign(value(chosen, dtype), exact)


def pick(magnitude, low, dtype, mode, negative, top):
    """The lower or the upper neighbour in magnitude."""
    if mode in ("rz", "rm", "rp"):
        return low + (mode == ("rm" if negative else "rp"))
    below = Fraction(value(low, dtype))
    # Beyond the largest number the next one would be as far again.
    above = Fraction(value(low + 1, dtype)) if low + 1 < top else 2 * below - Fraction(value(low - 1, dtype))
    if magnitude - below == above - magnitude:
        return low + 1 if mode == "rna" else low + (low & 1)
    return low + (above - magnitude < magnitude - below)
