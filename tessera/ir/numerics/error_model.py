"""Error model: the cost of one rounding to each format, the ulp bounds of scalar functions, and the site where an
error rule applies.

Ulp bounds: OpenCL C 3.0, tables of ULP values for single and double precision, full profile (design 5).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, Policy, TensorType, f64, fp4, fp6, fp6_e2m3, join_compute_types, tf32
from tessera.ir.numerics.conversion import FINITE_ONLY, convert, round_to_storage
from tessera.ir.numerics.interval_arithmetic import (
    IntervalArray,
    absolute_distance,
    interval_ends,
    make_interval,
)

if TYPE_CHECKING:
    from tessera.ir.rules import Op


# The error of one rounding to an element type.


@dataclass(frozen=True)
class RoundingModel:
    """The error of rounding x to an element type: at most `unit`·|x| + `tiny`, while |x| ≤ `top`.

    `saturates` tells whether larger values become `top`; otherwise they overflow: to infinity
    where the format has one (`infinite`), else to NaN.
    """

    dtype: DType
    unit: float
    tiny: float
    top: float
    saturates: bool = False
    infinite: bool = True

    def rounding(self, magnitude: np.ndarray) -> np.ndarray:
        """A bound on the error of rounding values up to `magnitude`."""
        return self.unit * magnitude + self.tiny


# Integers and bools are exact.
def _exact_model(dtype: DType) -> RoundingModel:
    return RoundingModel(dtype, 0.0, 0.0, math.inf)


@functools.cache
def find_rounding_model(dtype: DType, policy: Policy | None = None) -> RoundingModel:
    """The cost of rounding to `dtype` under a policy.

    >>> from tessera.core.types import f32
    >>> find_rounding_model(f32).unit == 2.0**-24
    True
    """
    if not dtype.is_float:
        return _exact_model(dtype)
    info = ml_dtypes.finfo(dtype.numpy)
    # tf32 is stored as f32 and keeps 13 bits less of the mantissa.
    wider = 2.0**13 if dtype is tf32 else 1.0
    step = 0.5 if policy is None or policy.rounding == "nearest" else 1.0
    tiny = max(float(info.smallest_subnormal) * wider * step, float(np.finfo(np.float64).smallest_subnormal))
    if policy is not None and policy.denormals == "flush":
        tiny = float(info.smallest_normal)
    saturates = dtype in (fp6, fp6_e2m3, fp4) or bool(policy and policy.saturate)
    infinite = bool(np.isinf(np.asarray(np.inf).astype(dtype.numpy).astype(np.float64)))
    top = float(info.max) if dtype is not tf32 else 2.0**128 - 2.0**117
    return RoundingModel(dtype, float(info.eps) * wider * step, tiny, top, saturates, infinite)


def gamma(count: int, unit: float) -> float:
    """γ(n) = n·u / (1 − n·u): the relative error of n roundings in a row (Higham 2002, lemma 3.1)."""
    total = count * unit
    return total / (1 - total) if total < 1 else math.inf


# The largest error of each scalar function on any target, in ulps of the compute format: the columns `ulps` and
# `ulps_f64` of its op. The values are from OpenCL C 3.0, tables of ULP values, full profile (design 5).


def find_ulp_bound(op: Op, compute: DType) -> float:
    """The largest error of `op` in ulps where it computes in `compute`.

    >>> from tessera.core.types import f32
    >>> from tessera.ops.tensor.elementwise import div
    >>> find_ulp_bound(div, f32), find_ulp_bound(div, f64)
    (2.5, 0.5)

    Raises:
        UnsupportedOpError: the op has no bound in ulps.
    """
    found = op.ulps if compute != f64 or op.ulps_f64 is None else op.ulps_f64
    if found is None:
        raise UnsupportedOpError(
            f"{op.name} has no error bound in ulps", expected="the column ulps in the definition of the op"
        )
    return found


# Error sites.


# The error of the f64 reference: half an ulp in arithmetic, a few ulps in NumPy's functions.
F64_HALF_ULP = 2.0**-53
F64_FUNCTION_ERROR = 8 * F64_HALF_ULP
# Radii are computed in f64: this factor covers their own roundings.
OUTWARD_FACTOR = 1 + 2.0**-40


@dataclass(frozen=True)
class ErrorSite:
    """One use of an op: its operand and result types, and the formats it computes in and stores to.

    An error rule is `rule(site, *operands, **attrs)`: from IntervalArray operands it gives an IntervalArray (or a
    tuple of them), the reference widened to f64, the radius covering every legal evaluation: any order
    of sums, fused multiply-adds or not, intermediates rounded to storage or kept as computed.
    """

    op: Op
    types: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    final: bool = False  # the results are those of the program, which are stored

    @property
    def compute(self) -> RoundingModel:
        """The error of one rounding in the compute format; ops on storage take no compute type from a policy."""
        first, numerics = self.types[0], self.op.numerics
        if numerics == "compute":
            wide = join_compute_types([t.compute for t in self.types])
        else:
            wide = first.accumulate if numerics == "accumulate" else TensorType((), first.dtype).compute
        policy = first.policy  # results are flushed, but no numbers on the way to them
        kept = replace(policy, denormals="preserve") if policy is not None and policy.denormals == "flush" else policy
        return find_rounding_model(wide, kept)

    @property
    def storage(self) -> RoundingModel:
        """The error of one rounding to the storage type of the result."""
        return find_rounding_model(self.results[0].dtype, self.results[0].policy)

    def reference(self, *operands: IntervalArray, **attrs: Any) -> Any:
        """The op's own semantics on the reference values."""
        return self.op.ref(*(b.value for b in operands), **attrs)

    def computed(
        self, value: Any, radius: Any, allowed: float | None = None, exact: np.ndarray | bool = False
    ) -> IntervalArray:
        """A value computed within some ulps (default: the table's for this op), then stored.

        `exact` tells where the operation makes no rounding error on exact operands.
        """
        value = np.asarray(value)
        if value.dtype.kind != "f":
            return make_interval(value, radius)
        off = find_ulp_bound(self.op, self.compute.dtype) if allowed is None else allowed
        size = finite_magnitude(value) + radius
        reach = radius + (F64_HALF_ULP if off <= 0.5 else F64_FUNCTION_ERROR) * size
        wide = reach + 2 * off * self.compute.rounding(size)
        if off <= 0.5 and self.compute.dtype is f64:
            reach = radius  # the reference is correctly rounded, so it has overflowed if any result does
        if off <= 0.5:  # in f64 the reference has rounded already: what it has need not be exact
            exact = exact if self.compute.dtype is f64 else exact | self._on_grid(value)
            wide = np.where((radius == 0) & exact, 0.0, wide)
            return self.stored(value, wide, reach)
        return self.stored(value, wide)

    def stored(self, value: Any, radius: Any, reach: Any = None) -> IntervalArray:
        """A computed value, rounded to storage or kept as it is; what overflows is inf or not known.

        Rounding is monotone: what an interval is rounded to lies between the roundings of its ends. `reach` is how far
        the value may lie off before it is correctly rounded to the compute format; only then does it overflow.
        """
        unknown = np.isinf(radius)  # NaN, too
        value, radius = _apply_overflow(np.asarray(value), np.asarray(radius), self.compute, reach)
        surely = self.final or self._rounds_by_policy()
        if self.storage.dtype == self.compute.dtype and not surely and not self.storage.saturates:
            return make_interval(value, radius * OUTWARD_FACTOR)
        radius = np.broadcast_to(radius * OUTWARD_FACTOR, value.shape)
        low, high = self._round_ends(value, radius)
        if self.storage.saturates:
            value = np.clip(value, -self.storage.top, self.storage.top)
            radius = np.where(unknown, np.inf, np.minimum(radius, 2 * self.storage.top)) if surely else radius
        apart = np.maximum(absolute_distance(low, value), absolute_distance(high, value)) * OUTWARD_FACTOR
        if self.storage.dtype == self.compute.dtype and not self._rounds_by_policy():  # it is rounded already
            apart = np.minimum(apart, radius)
        same = (low == high) | (np.isnan(low) & np.isnan(high) & ~(np.abs(value) < radius))
        unknown = np.isinf(radius) | (np.isnan(value) & ~same)
        if surely:
            rounded = np.where(
                low == 0, np.copysign(low, value), low
            )  # the ends of an interval around 0 differ in sign
            value = np.where(same & ~unknown, rounded, value)
            return make_interval(value, np.where(unknown, np.inf, np.where(same, 0.0, apart)))
        if self.storage.dtype in FINITE_ONLY:  # stored a NaN is 0, kept as computed it is NaN
            unknown |= np.isnan(value)
            value = np.where(np.isnan(value), 0.0, value)
        elif self.storage.saturates:  # what exceeds the largest number is that number
            radius = np.where(same, 0.0, radius)
        return make_interval(value, np.where(unknown, np.inf, np.maximum(radius, apart)))

    def _round_ends(self, value: np.ndarray, radius: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The least and the greatest number that values of an interval may be rounded to, as f64."""
        ends = interval_ends(IntervalArray(value, radius))
        policy = self.results[0].policy
        if policy is not None and policy.rounding == "stochastic":  # to either neighbour
            step = self.storage.rounding(finite_magnitude(value) + radius)
            low, high = (np.where(self._on_grid(e), e, e + side * step) for e, side in ((ends[0], -1), (ends[-1], 1)))
            return np.minimum(low, value), np.maximum(high, value)
        with np.errstate(all="ignore"):
            rounded = [round_to_storage(e, self.storage.dtype, policy).astype(np.float64) for e in ends]
        return rounded[0], rounded[-1]

    def _rounds_by_policy(self) -> bool:
        """Whether the policy rounds each result by itself, so that none is kept as computed."""
        policy = self.results[0].policy
        return policy is not None and (policy.denormals == "flush" or policy.rounding == "toward_zero")

    def _on_grid(self, value: np.ndarray) -> np.ndarray:
        """Where a correctly rounded result is the value itself, since the storage has it."""
        policy = self.results[0].policy
        if policy is not None and policy.rounding == "toward_zero":  # a directed rounding sees what f64 lost
            return np.zeros(value.shape, bool)
        coarsest = max(self.storage, self.compute, key=lambda f: f.unit).dtype
        with np.errstate(all="ignore"):
            exact = convert(value, coarsest).astype(np.float64) == value
        flushes = policy is not None and policy.denormals == "flush"
        return exact & ((value == 0) | (finite_magnitude(value) >= self.storage.tiny)) if flushes else exact


def finite_magnitude(value: np.ndarray) -> np.ndarray:
    """|x|, and 0 for infinities and NaNs, which have no rounding error."""
    size = np.abs(value)
    return size if np.isfinite(size).all() else np.where(np.isfinite(size), size, 0.0)


def _apply_overflow(
    value: np.ndarray, radius: np.ndarray, format: RoundingModel, reach: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """Surely beyond the compute format: the infinity. Perhaps: not known."""
    finite = np.isfinite(value)
    sure = finite & (np.abs(value) - radius > format.top * (1 + 2 * format.unit))
    # Below half a step beyond the largest number a correct rounding gives that number.
    far, limit = (radius, format.top) if reach is None else (reach, format.top * (1 + format.unit / 4))
    perhaps = finite & (np.abs(value) + far > limit)
    if not perhaps.any():
        return value, radius
    value = np.where(sure, np.copysign(np.inf, value), value)
    return value, np.where(sure, 0.0, np.where(perhaps, np.inf, radius))


def narrow_operand(x: IntervalArray, type: TensorType, wide: RoundingModel) -> IntervalArray:
    """An operand as the op sees it, where its compute type is narrower than its storage."""
    held = find_rounding_model(type.dtype)
    if x.dtype.kind != "f" or (wide.unit <= held.unit and wide.tiny <= held.tiny and wide.top >= held.top):
        return x
    rounded = x.radius + wide.rounding(finite_magnitude(x.value) + x.radius)
    return make_interval(*_apply_overflow(x.value, rounded, wide, x.radius))
