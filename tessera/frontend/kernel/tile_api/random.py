"""Random numbers in a kernel: counter-based Philox4x32-10 (Salmon et al. 2011), the same on every target.

A stream is what `tessera.ops.random.Generator(seed)` draws: its word i is word i mod 4 of block i div 4.
A kernel names the positions it wants, so that neither grid nor group changes what it gets.
"""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError
from tessera.core.types import f32, int64
from tessera.frontend.kernel.memref import load_if_memref
from tessera.frontend.kernel.tile_api.assertions import assert_
from tessera.frontend.kernel.tile_api.ids import linear_id
from tessera.frontend.kernel.trace import as_value, current_trace, is_traced
from tessera.ir.numerics.conversion import LOW_32_BITS, philox_4x32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import cos, equal, greater_equal, log, sqrt, where
from tessera.ops.tensor.shape import iota, reshape

UNIT_SPACING = 2.0**-24


def random_bits(seed: Any, offsets: Any) -> Tensor:
    """The words at places `offsets` (a block of integers from 0 on) of the stream of `seed`: 0 to 2^32 - 1, as int64.

    Raises:
        DTypeError: the seed or the offsets are no integers.
    """
    current_trace("tile.random")
    key, place = _as_int64(seed, "seed"), _as_int64(offsets, "offsets")
    block = place >> 2
    words = philox_4x32(
        (block & LOW_32_BITS, (block >> 32) & LOW_32_BITS, 0, 0), (key & LOW_32_BITS, (key >> 32) & LOW_32_BITS)
    )
    chosen, last = place & 3, words[3]
    for number in range(3):
        last = where(equal(chosen, number), words[number], last)
    return last


def random(seed: Any, offsets: Any) -> Tensor:
    """Numbers evenly spread over [0, 1), multiples of 2^-24, as f32: those `ts.rand` draws from this seed."""
    return cast(random_bits(seed, offsets) >> 8, dtype=f32) * UNIT_SPACING


def randint(seed: Any, offsets: Any, low: int, high: int) -> Tensor:
    """Integers (int64) from `low` to `high` - 1, each as likely to within (high - low) / 2^32.

    Raises:
        ArgumentError: the range is empty or wider than 2^31.
    """
    if not 0 < high - low <= 2**31:
        raise ArgumentError(f"randint from {low} to {high}", expected="a range of 1 to 2^31 numbers")
    return ((random_bits(seed, offsets) * (high - low)) >> 32) + low


def randn(seed: Any, offsets: Any) -> Tensor:
    """Normally distributed f32 of mean 0 and variance 1: Box and Muller (1958), from the numbers at 2i and 2i + 1.

    Those are the same bits everywhere; their logarithm and cosine are as exact as the target's are.
    """
    place = _as_int64(offsets, "offsets") * 2
    radius = sqrt(log(1.0 - random(seed, place)) * -2.0)
    return radius * cos(random(seed, place + 1) * (2 * math.pi))


def dropout(x: Any, p: Any, seed: Any, offsets: Any = None) -> Tensor:
    """`x` with each element set to 0 with probability `p`, and the others scaled by 1 / (1 - p).

    `p` is a constant, or a float scalar of the launch, which an assertion checks. The element at offset i is dropped if
    `random(seed, i) < p`. Without `offsets` each tile of each program takes a stretch of its own, as long as the block.

    Raises:
        ArgumentError: a constant `p` is not from 0 to before 1. ExecutionError: at a launch, the same of a scalar `p`.
        DTypeError: the block or `p` is not of floats.
    """
    block, p = as_value(load_if_memref(x)), load_if_memref(p)
    if not is_traced(p) and not 0 <= p < 1:
        raise ArgumentError(f"dropout with probability {p}", expected="0 to before 1")
    if not block.dtype.is_float:
        raise DTypeError("dropout of integers", received=str(block.type), suggestion="tile.cast(x, ts.f32)")
    p, scale = _dropout_scale(block, p)
    kept = greater_equal(random(seed, _element_numbers(block) if offsets is None else offsets), p)
    return where(kept, block * scale, 0.0)


def _dropout_scale(block: Tensor, p: Any) -> tuple[Any, Any]:
    """The probability as random numbers are compared with it, and 1 / (1 - p) as the block is multiplied by it."""
    if not is_traced(p):
        return p, 1.0 / (1.0 - p)
    if not p.dtype.is_float or p.shape:
        raise DTypeError("the probability of dropout is no float scalar", expected="f32", received=str(p.type))
    assert_((p >= 0.0) & (p < 1.0), "dropout takes a probability from 0 to before 1", p)
    p = cast(p, dtype=f32)
    return p, cast(1.0 / (1.0 - p), dtype=block.dtype)


def _element_numbers(block: Tensor) -> Any:
    """The number of each element of this tile's block, counted through all tiles."""
    count = math.prod(int(n) for n in block.shape)
    first = linear_id() * count
    return first + reshape(iota(shape=(count,)), shape=block.shape) if block.shape else first


def _as_int64(x: Any, name: str) -> Any:
    """A number as it is, a block as int64."""
    if isinstance(x, int):
        return x
    found = as_value(x)
    if not found.dtype.is_integer:
        raise DTypeError(f"the {name} of a random number is no integer", expected="int64", received=str(found.type))
    return found if found.dtype == int64 else cast(found, dtype=int64)
