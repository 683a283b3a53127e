"""Site: where an error rule is applied — the op, its types, and what its roundings may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.numerics.bounded import Bounded, settled
from tessera.numerics.convert import convert
from tessera.numerics.formats import Format, format_of
from tessera.numerics.ulp import ulps
from tessera.types import TensorType, f64

if TYPE_CHECKING:
    from tessera.op import Op

# The reference is f64 and errs too: half an ulp in arithmetic, a few in NumPy's functions.
HALF_ULP = 2.0**-53
FUNCTION = 8 * HALF_ULP
# Radii are computed in f64 as well: this much more makes up for their roundings.
OUTWARD = 1 + 2.0**-40


@dataclass(frozen=True)
class Site:
    """One use of an op: its operand and result types, and the formats it computes in and stores to.

    An error rule is `rule(site, *operands, **attrs)`: from Bounded operands it gives a Bounded (or a
    tuple of them), the reference widened to f64, the radius covering every legal evaluation: any order
    of sums, fused multiply-adds or not, intermediates rounded to storage or kept as computed.
    """

    op: Op
    types: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    @property
    def compute(self) -> Format:
        """What one rounding of the computation costs."""
        first = self.types[0]
        wide = first.accumulate if self.op.numerics == "accumulate" else first.compute
        return format_of(wide, first.policy)

    @property
    def storage(self) -> Format:
        """What one rounding to the result's storage costs."""
        return format_of(self.results[0].dtype, self.results[0].policy)

    def reference(self, *operands: Bounded, **attrs: Any) -> Any:
        """The op's own semantics on the reference values."""
        return self.op.ref(*(b.value for b in operands), **attrs)

    def computed(self, value: Any, radius: Any, allowed: float | None = None) -> Bounded:
        """A value computed within some ulps (default: the table's for this op), then stored."""
        value = np.asarray(value)
        if value.dtype.kind != "f":
            return settled(value, radius)
        off = ulps(self.op.__name__, self.compute.dtype) if allowed is None else allowed
        size = magnitude(value) + radius
        reference = HALF_ULP if off <= 0.5 else FUNCTION
        wide = radius + 2 * off * self.compute.rounding(size) + reference * size
        if off <= 0.5 and self.compute.dtype is not f64:  # in f64 the reference has rounded already
            wide = np.where((radius == 0) & self._on_grid(value), 0.0, wide)
        return self.stored(value, wide)

    def stored(self, value: Any, radius: Any) -> Bounded:
        """A computed value, rounded to storage or kept as it is; what overflows is inf or not known."""
        value, radius = _overflowed(np.asarray(value), np.asarray(radius), self.compute)
        if self.storage.dtype == self.compute.dtype and not self._flushes():
            return settled(value, radius * OUTWARD)
        if self.storage.saturates:
            value = np.clip(value, -self.storage.top, self.storage.top)
        size = magnitude(value) + radius
        wide = radius + self.storage.rounding(size)
        wide = np.where((radius == 0) & self._on_grid(value), 0.0, wide)
        if not self.storage.saturates:
            lost = size > self.storage.top
            lost |= np.isinf(value) & (not self.storage.infinite)
            wide = np.where(lost, np.inf, wide)
        return settled(value, wide * OUTWARD)

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
        return exact & ((value == 0) | (magnitude(value) >= self.storage.tiny)) if self._flushes() else exact


def magnitude(value: np.ndarray) -> np.ndarray:
    """|x|, and 0 for what is not finite: an infinity carries no rounding."""
    return np.where(np.isfinite(value), np.abs(value), 0.0)


def _overflowed(value: np.ndarray, radius: np.ndarray, format: Format) -> tuple[np.ndarray, np.ndarray]:
    """Surely beyond the compute format: the infinity. Perhaps: not known."""
    finite = np.isfinite(value)
    sure = finite & (np.abs(value) - radius > format.top * (1 + 2 * format.unit))
    perhaps = finite & (np.abs(value) + radius > format.top)
    if not perhaps.any():
        return value, radius
    value = np.where(sure, np.copysign(np.inf, value), value)
    return value, np.where(sure, 0.0, np.where(perhaps, np.inf, radius))


def narrowed(x: Bounded, type: TensorType, wide: Format) -> Bounded:
    """An operand as the op sees it, where its compute type is narrower than its storage."""
    if x.dtype.kind != "f" or wide.unit <= format_of(type.dtype).unit:
        return x
    return settled(x.value, x.radius + wide.rounding(np.abs(x.value) + x.radius))
