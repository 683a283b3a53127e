"""Error model: the cost of one rounding to each format, the ulp bounds of scalar functions, and the site where an
error rule applies.

Ulp bounds: OpenCL C 3.0, tables of ULP values for single and double precision, full profile (design 5).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DType, Policy, TensorType, f64, fp4, fp6, fp6_e2m3, tf32
from tessera.ir.numerics.conversion import FINITE_ONLY, convert
from tessera.ir.numerics.interval_arithmetic import IntervalArray, make_interval

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
    return RoundingModel(dtype, float(info.eps) * wider * step, tiny, float(info.max), saturates, infinite)


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

    @property
    def compute(self) -> RoundingModel:
        """The error of one rounding in the compute format."""
        first = self.types[0]
        wide = first.accumulate if self.op.numerics == "accumulate" else first.compute
        return find_rounding_model(wide, first.policy)

    @property
    def storage(self) -> RoundingModel:
        """The error of one rounding to the storage type of the result."""
        return find_rounding_model(self.results[0].dtype, self.results[0].policy)

    def reference(self, *operands: IntervalArray, **attrs: Any) -> Any:
        """The op's own semantics on the reference values."""
        return self.op.ref(*(b.value for b in operands), **attrs)

    def computed(self, value: Any, radius: Any, allowed: float | None = None) -> IntervalArray:
        """A value computed within some ulps (default: the table's for this op), then stored."""
        value = np.asarray(value)
        if value.dtype.kind != "f":
            return make_interval(value, radius)
        off = find_ulp_bound(self.op, self.compute.dtype) if allowed is None else allowed
        size = finite_magnitude(value) + radius
        reference = F64_HALF_ULP if off <= 0.5 else F64_FUNCTION_ERROR
        wide = radius + 2 * off * self.compute.rounding(size) + reference * size
        if off <= 0.5 and self.compute.dtype is not f64:  # in f64 the reference has rounded already
            wide = np.where((radius == 0) & self._on_grid(value), 0.0, wide)
        return self.stored(value, wide)

    def stored(self, value: Any, radius: Any) -> IntervalArray:
        """A computed value, rounded to storage or kept as it is; what overflows is inf or not known."""
        value, radius = _apply_overflow(np.asarray(value), np.asarray(radius), self.compute)
        if self.storage.dtype == self.compute.dtype and not self._flushes():
            return make_interval(value, radius * OUTWARD_FACTOR)
        if self.storage.saturates:
            value = np.clip(value, -self.storage.top, self.storage.top)
        if self.storage.dtype in FINITE_ONLY:  # stored a NaN is 0, kept as computed it is NaN
            radius = np.where(np.isnan(value), np.inf, radius)
            value = np.where(np.isnan(value), 0.0, value)
        size = finite_magnitude(value) + radius
        wide = radius + self.storage.rounding(size)
        wide = np.where((radius == 0) & self._on_grid(value), 0.0, wide)
        if not self.storage.saturates:
            lost = size > self.storage.top
            lost |= np.isinf(value) & (not self.storage.infinite)
            wide = np.where(lost, np.inf, wide)
        return make_interval(value, wide * OUTWARD_FACTOR)

    def _flushes(self) -> bool:
        """Whether results below the least normal number become 0."""
        policy = self.results[0].policy
        return policy is not None and policy.denormals == "flush"

    def _on_grid(self, value: np.ndarray) -> np.ndarray:
        """Where a correctly rounded result is the value itself, since the storage has it."""
        policy = self.results[0].policy
        if policy is not None and policy.rounding != "nearest":  # a directed rounding sees what f64 lost
            return np.zeros(value.shape, bool)
        coarsest = max(self.storage, self.compute, key=lambda f: f.unit).dtype
        with np.errstate(all="ignore"):
            exact = convert(value, coarsest).astype(np.float64) == value
        return exact & ((value == 0) | (finite_magnitude(value) >= self.storage.tiny)) if self._flushes() else exact


def finite_magnitude(value: np.ndarray) -> np.ndarray:
    """|x|, and 0 for infinities and NaNs, which have no rounding error."""
    size = np.abs(value)
    return size if np.isfinite(size).all() else np.where(np.isfinite(size), size, 0.0)


def _apply_overflow(value: np.ndarray, radius: np.ndarray, format: RoundingModel) -> tuple[np.ndarray, np.ndarray]:
    """Surely beyond the compute format: the infinity. Perhaps: not known."""
    finite = np.isfinite(value)
    sure = finite & (np.abs(value) - radius > format.top * (1 + 2 * format.unit))
    perhaps = finite & (np.abs(value) + radius > format.top)
    if not perhaps.any():
        return value, radius
    value = np.where(sure, np.copysign(np.inf, value), value)
    return value, np.where(sure, 0.0, np.where(perhaps, np.inf, radius))


def narrow_operand(x: IntervalArray, type: TensorType, wide: RoundingModel) -> IntervalArray:
    """An operand as the op sees it, where its compute type is narrower than its storage."""
    if x.dtype.kind != "f" or wide.unit <= find_rounding_model(type.dtype).unit:
        return x
    return make_interval(x.value, x.radius + wide.rounding(np.abs(x.value) + x.radius))
