"""Rounding to a float format under a policy: three directions, saturation, flushed denormals, each exact."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tessera.numerics.rounds import LOW, philox
from tessera.types import DType, fp4, fp6, fp6_e2m3, tf32

FINITE_ONLY = (fp6, fp6_e2m3, fp4)  # neither infinity nor NaN: they always saturate


@dataclass(frozen=True)
class Grid:
    """The numbers of a format: `digits` after the leading bit, the least exponent, the largest number."""

    digits: int
    least: int
    top: float
    infinite: bool


@functools.cache
def grid_of(dtype: DType) -> Grid:
    """The grid of an element type.

    >>> from tessera.types import f16
    >>> grid_of(f16)
    Grid(digits=10, least=-14, top=65504.0, infinite=True)
    """
    if dtype is tf32:  # stored as f32 with ten digits
        return Grid(10, -126, (2.0 - 2.0**-10) * 2.0**127, True)
    info = ml_dtypes.finfo(dtype.numpy)
    least = int(np.frexp(np.float64(info.smallest_normal))[1]) - 1
    infinite = dtype not in FINITE_ONLY and bool(np.isinf(np.asarray(np.inf).astype(dtype.numpy).astype(np.float64)))
    return Grid(int(info.nmant), least, float(info.max), infinite)


def round_to(
    array: Any,
    to: DType,
    rounding: str = "nearest",
    saturate: bool = False,
    flush: bool = False,
    seed: int = 0,
    draw: Any = None,
) -> np.ndarray:
    """`array` on the grid of a float type, rounded once; the arithmetic is exact, in f64.

    `rounding` is "nearest" (ties to even), "toward_zero", or "stochastic": up with the probability of the distance
    from below, by random bits that depend on `seed` and the element's place alone (or by `draw`, 53 bits for each
    element). Numbers beyond the largest give infinity (NaN where there is none), and the largest itself under
    `saturate` or toward zero. `flush` makes results below the least normal number zero. Signs are kept, of zeros too.

    >>> from tessera.types import fp8_e4m3
    >>> round_to([1.06, 1000.0, -1000.0], fp8_e4m3, "toward_zero").astype(float)
    array([   1.,  448., -448.])
    """
    wide = np.asarray(array).astype(np.float64)
    if to.bits > 32:
        wide = np.where(np.isinf(wide), np.copysign(np.finfo(np.float64).max, wide), wide) if saturate else wide
        return wide if not flush else np.where(np.abs(wide) < np.finfo(np.float64).tiny, np.copysign(0.0, wide), wide)
    grid = grid_of(to)
    wide = np.where(np.isnan(wide), 0.0, wide) if to in FINITE_ONLY else wide
    with np.errstate(all="ignore"):
        size, known = np.abs(wide), np.isfinite(wide)
        exponent = np.maximum(np.frexp(size)[1] - 1, grid.least) - grid.digits
        steps = DIRECTIONS[rounding](np.ldexp(size, -exponent), seed, draw)
        near = np.where(known, np.ldexp(steps, exponent), size)
        near = _limited(near, known & (rounding == "toward_zero"), to, grid, saturate)
        near = np.where(near < 2.0**grid.least, 0.0, near) if flush else near
        return np.copysign(near, wide).astype(to.numpy)


def _limited(near: np.ndarray, stays: np.ndarray, to: DType, grid: Grid, saturate: bool) -> np.ndarray:
    """Numbers beyond the largest; `stays` says which of them become the largest whatever the policy."""
    beyond = near > grid.top
    outside = grid.top if saturate or to in FINITE_ONLY else np.inf if grid.infinite else np.nan
    return np.where(beyond, np.where(stays, grid.top, outside), near)


def _stochastic(steps: np.ndarray, seed: int, draw: Any) -> np.ndarray:
    below = np.floor(steps)
    bits = draws(np.arange(steps.size).reshape(steps.shape), seed) if draw is None else draw
    return below + (bits < (steps - below) * 2.0**53)


def draws(place: Any, seed: int) -> Any:
    """53 random bits for each place, by its number and the seed; arrays and tensors alike.

    >>> bool(np.all(draws(np.arange(1000), 7) < 2**53)), bool(draws(np.arange(2), 7)[1] == draws(np.arange(1, 2), 7)[0])
    (True, True)
    """
    high, low, _, _ = philox((place & LOW, place >> 32, 0, 1), (seed & LOW, (seed >> 32) & LOW))
    return ((high >> 5) << 26) + (low >> 6)


DIRECTIONS = {
    "nearest": lambda steps, seed, draw: np.rint(steps),
    "toward_zero": lambda steps, seed, draw: np.trunc(steps),
    "stochastic": _stochastic,
}
