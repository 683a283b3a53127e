"""Sums that carry their rounding errors along, on arrays and tensors alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# part(x, begin, end): the elements from `begin` to before `end` along the axis that is summed.
Part = Callable[[Any, int, int], Any]


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b rounded, and exactly what the rounding lost (Knuth, TAOCP 2, 4.2.2, theorem B).

    >>> import numpy as np
    >>> [float(n) for n in two_sum(np.float32(1e8), np.float32(1.0))]
    [100000000.0, 1.0]
    """
    total = a + b
    back = total - a
    return total, (a - (total - back)) + (b - back)


def compensated(x: Any, size: int, part: Part) -> tuple[Any, Any]:
    """The sum of `size` elements along an axis, a power of two, and the sum of what its roundings lost (None: nothing).

    A tree of halves: each of log2(size) steps adds whole rows, and the lost parts are added the same way. Sum plus
    lost errs by about 2u times the sum of magnitudes, whatever its length (Ogita, Rump and Oishi, "Accurate sum and
    dot product", 2005, for sums on a line).
    """
    lost = None
    while size > 1:
        half = size // 2
        x, error = two_sum(part(x, 0, half), part(x, half, size))
        lost = error if lost is None else error + (part(lost, 0, half) + part(lost, half, size))
        size = half
    return x, lost
