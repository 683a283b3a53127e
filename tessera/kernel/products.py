"""Matrix products of blocks: accumulated wide, and handed back wide."""

from __future__ import annotations

from typing import Any

from tessera.errors import ArgumentError
from tessera.kernel.place import value
from tessera.ops.linalg import dot as dot_op
from tessera.tensor import Tensor


def product(a: Any, b: Any) -> Tensor:
    """The matrix product of two blocks, in the accumulation type (f32 for 16-bit floats, int32 for int8)."""
    a, b = value(a), value(b)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise ArgumentError("a matrix product needs two blocks", received=f"{a!r} and {b!r}")
    return dot_op(a, b, dtype=a.type.accumulate)


def mma(*blocks: Any) -> Tensor:
    """mma(a, b), mma(a, b, acc) or mma(out, a, b, acc): a times b, plus acc.

    The last form is that of tensor cores; as a statement it gives the variable `out` the result.
    """
    if not 2 <= len(blocks) <= 4:
        raise ArgumentError(f"mma takes 2 to 4 blocks, not {len(blocks)}", expected="mma(a, b[, acc])")
    a, b, *acc = blocks if len(blocks) < 4 else blocks[1:]
    found = product(a, b)
    return value(acc[0]) + found if acc else found
