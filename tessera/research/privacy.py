"""Differential privacy: clipping of per-example gradients, Gaussian noise, and an accountant of what was spent.

Noise of one release is calibrated by the analytic Gaussian mechanism (Balle and Wang, ICML 2018); several releases,
also of sampled batches, are composed by Rényi differential privacy (Mironov, Talwar and Zhang 2019, section 3.3) and
converted by the bound of Canonne, Kamath and Steinke (2020, proposition 12).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ResourceError, ShapeError, user_location
from tessera.core.pytree import flatten, map_leaves
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor import reduce
from tessera.ops.tensor.elementwise import minimum, sqrt, where
from tessera.ops.tensor.random import Generator, randn
from tessera.ops.tensor.shape import reshape

ORDERS = (*(1 + x / 10 for x in range(1, 10)), *range(2, 64), 72, 80, 96, 128, 192, 256, 512)
WHOLE_ORDERS = tuple(a for a in ORDERS if float(a).is_integer())  # those of the formula for sampled batches


def check_budget(epsilon: float, delta: float) -> None:
    """Check a privacy budget.

    Raises:
        ArgumentError: epsilon is not positive and finite, or delta not in (0, 1).
    """
    if not (math.isfinite(epsilon) and epsilon > 0 and 0 < delta < 1):
        raise ArgumentError(
            "no privacy budget", location=user_location(), expected="epsilon > 0 and 0 < delta < 1",
            received=f"epsilon={epsilon}, delta={delta}",
        )  # fmt: skip


# One release.


def find_delta(sigma: float, epsilon: float) -> float:
    """The delta of one release with noise of `sigma` times the sensitivity: exact (Balle and Wang, theorem 8).

    >>> round(find_delta(3.730632, 1.0), 7)
    1e-05
    """
    a, b = 0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma
    return _normal_cdf(a) - math.exp(epsilon) * _normal_cdf(b)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def find_sigma(epsilon: float, delta: float, steps: int = 1, sample_rate: float = 1.0) -> float:
    """The least noise, as a multiple of the sensitivity, with which `steps` releases spend (epsilon, delta) in all.

    Raises:
        ArgumentError: the budget, the steps or the rate are none.

    >>> round(find_sigma(1.0, 1e-5), 3)
    3.731
    """
    check_budget(epsilon, delta)
    _check_steps(steps, sample_rate)

    def suffices(sigma: float) -> bool:
        if steps == 1 and sample_rate == 1.0:
            return find_delta(sigma, epsilon) <= delta
        return Accountant(delta).step(sigma, sample_rate, steps).epsilon <= epsilon

    high = 1.0
    while not suffices(high):
        high *= 2
    low = high / 2 if high > 1.0 else 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _check_steps(steps: int, sample_rate: float) -> None:
    if not isinstance(steps, int) or steps < 1 or not 0 < sample_rate <= 1:
        raise ArgumentError(
            "no number of releases", location=user_location(), expected="steps >= 1 and 0 < sample_rate <= 1",
            received=f"steps={steps!r}, sample_rate={sample_rate!r}",
        )  # fmt: skip


# Several releases.


def find_rdp(sigma: float, sample_rate: float, order: float) -> float:
    """The Rényi divergence of one release of a Poisson-sampled batch; of sampled ones for whole orders only.

    >>> find_rdp(2.0, 1.0, 4)
    0.5
    """
    if sample_rate == 1.0:
        return order / (2 * sigma**2)
    whole = int(order)
    terms = [
        math.lgamma(whole + 1) - math.lgamma(k + 1) - math.lgamma(whole - k + 1)
        + k * math.log(sample_rate) + (whole - k) * math.log1p(-sample_rate) + (k * k - k) / (2 * sigma**2)
        for k in range(whole + 1)
    ]  # fmt: skip
    return float(np.logaddexp.reduce(terms)) / (whole - 1)


class Accountant:
    """What releases have spent: Rényi divergences of several orders, which add.

    >>> round(Accountant(1e-5).step(1.0, sample_rate=0.01, steps=1000).epsilon, 2)
    2.11
    """

    def __init__(self, delta: float) -> None:
        check_budget(1.0, delta)
        self.delta = delta
        self.steps = 0
        self._rdp = dict.fromkeys(ORDERS, 0.0)

    def step(self, sigma: float, sample_rate: float = 1.0, steps: int = 1) -> Accountant:
        """Note releases with noise of `sigma` times the sensitivity."""
        _check_steps(steps, sample_rate)
        if not sigma > 0:
            raise ArgumentError("no noise", location=user_location(), expected="sigma > 0", received=repr(sigma))
        orders = ORDERS if sample_rate == 1.0 else WHOLE_ORDERS
        self._rdp = {a: r + steps * find_rdp(sigma, sample_rate, a) for a, r in self._rdp.items() if a in orders}
        self.steps += steps
        return self

    @property
    def epsilon(self) -> float:
        """The epsilon spent at this accountant's delta."""
        if not self.steps:
            return 0.0
        found = (r + math.log1p(-1 / a) - (math.log(self.delta) + math.log(a)) / (a - 1) for a, r in self._rdp.items())
        return max(min(found), 0.0)


class PrivateSession:
    """A budget that releases inside of `ts.privacy.differential` spend; `spent` is the epsilon so far."""

    def __init__(self, epsilon: float, delta: float, steps: int, sample_rate: float) -> None:
        self.epsilon, self.delta = epsilon, delta
        self.steps, self.sample_rate = steps, sample_rate
        self.sigma = find_sigma(epsilon, delta, steps, sample_rate)
        self.released = 0

    @property
    def spent(self) -> float:
        """The epsilon that the releases so far have spent."""
        if not self.released:
            return 0.0
        if self.steps == 1 and self.sample_rate == 1.0:
            return self.epsilon * self.released
        return Accountant(self.delta).step(self.sigma, self.sample_rate, self.released).epsilon

    def release(self) -> float:
        """Note a release, and give its noise multiplier.

        Raises:
            ResourceError: the budget is spent.
        """
        if self.released >= self.steps:
            raise ResourceError(
                f"the privacy budget of epsilon={self.epsilon}, delta={self.delta} is spent", location=user_location(),
                expected=f"{self.steps} release{'s' if self.steps > 1 else ''}",
                received=f"release {self.released + 1}",
                suggestion="say how many there are: @ts.privacy.differential(epsilon, delta, steps=N)",
            )  # fmt: skip
        self.released += 1
        return self.sigma


CURRENT_SESSION: ContextVar[PrivateSession | None] = ContextVar("privacy session", default=None)


def differential(
    epsilon: float, delta: float = 1e-5, steps: int = 1, sample_rate: float = 1.0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function whose releases (`add_gaussian_noise`) spend at most (epsilon, delta) in each call.

    The noise is calibrated for `steps` releases of batches that hold each example with probability `sample_rate`; one
    release more is an error. After a call, `function.session.spent` is the epsilon that it has spent.

    Raises:
        ArgumentError: the budget, the steps or the rate are none.
    """
    find_sigma(epsilon, delta, steps, sample_rate)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def private(*args: Any, **named: Any) -> Any:
            session = private.session = PrivateSession(epsilon, delta, steps, sample_rate)  # type: ignore[attr-defined]
            token = CURRENT_SESSION.set(session)
            try:
                return function(*args, **named)
            finally:
                CURRENT_SESSION.reset(token)

        return private

    return decorate


def add_gaussian_noise(
    value: Any, sensitivity: float, epsilon: float, delta: float = 1e-5, generator: Generator | None = None
) -> Any:
    """Tensors, or containers of them, with Gaussian noise: a release of (epsilon, delta) for this L2 sensitivity.

    Inside of `differential` the noise is that of its budget, and `epsilon` may not be larger.

    Raises:
        ArgumentError: the budget or the sensitivity are none.
        ResourceError: the budget of the enclosing `differential` is spent.

    >>> noisy = add_gaussian_noise(Tensor([0.0]), sensitivity=0.0, epsilon=1.0)
    >>> noisy
    Tensor([0.], f32)
    """
    check_budget(epsilon, delta)
    if not (math.isfinite(sensitivity) and sensitivity >= 0):
        raise ArgumentError(
            "no sensitivity", location=user_location(), expected="a norm, 0 or more", received=repr(sensitivity)
        )
    session = CURRENT_SESSION.get()
    if session is not None and epsilon > session.epsilon:
        raise ArgumentError(
            "a release asks for more than the budget of its function", location=user_location(),
            expected=f"epsilon <= {session.epsilon}", received=str(epsilon),
        )  # fmt: skip
    sigma = find_sigma(epsilon, delta) if session is None else session.release()

    def add(x: Any) -> Tensor:
        tensor = as_tensor(x)
        return tensor + randn(tensor.shape, dtype=tensor.dtype, generator=generator) * (sigma * sensitivity)

    return map_leaves(add, value)


# Clipping.


def clip_grad_norm(grads: Any, max_norm: float) -> Any:
    """The sum of per-example gradients, each scaled down to a norm of at most `max_norm`: its L2 sensitivity.

    `grads` is a tensor or container of tensors [N, ...], as `ts.per_example_grad` gives them; the norm of an example is
    that of all its tensors together. The result has no axis of examples. Examples with a gradient that is not finite
    count as zero.

    Raises:
        ShapeError: the tensors have different numbers of examples, or none.
        ArgumentError: the norm is not positive.

    >>> clip_grad_norm(Tensor([[3.0, 4.0], [0.0, 0.5]]), 2.5)
    Tensor([1.5, 2.5], f32)
    """
    if not (isinstance(max_norm, (int, float, np.number)) and math.isfinite(max_norm) and max_norm > 0):
        raise ArgumentError("no norm", location=user_location(), expected="max_norm > 0", received=repr(max_norm))
    leaves = [as_tensor(x) for _, x in flatten(grads, "")[0]]
    counts = {t.shape[0] if t.shape else None for t in leaves}
    if len(counts) != 1 or None in counts:
        raise ShapeError(
            "per-example gradients have a first axis of examples, the same in all", location=user_location(),
            received=", ".join(str(t.type) for t in leaves) or "nothing",
        )  # fmt: skip
    squares = [reduce.sum(reshape(t * t, (t.shape[0], -1)), axis=1) for t in leaves]
    norm = sqrt(functools.reduce(lambda a, b: a + b, squares))
    finite = norm < math.inf  # false for NaN, too
    scale = minimum(max_norm / (norm + (norm == 0.0).to(norm.dtype)), 1.0)

    def clip(x: Any) -> Tensor:
        tensor = as_tensor(x)
        shape = (tensor.shape[0],) + (1,) * (len(tensor.shape) - 1)
        kept = where(reshape(finite, shape), tensor * reshape(scale.to(tensor.dtype), shape), 0.0)
        return reduce.sum(kept, axis=0)

    return map_leaves(clip, grads)


def compute_clip_norm(epsilon: float, delta: float, dataset_size: int, noise: float = 0.01) -> float:
    """The largest clipping norm with which the noise in the mean of a dataset's gradients has this standard deviation.

    Privacy does not depend on the norm; it is a choice between bias (gradients cut off) and noise.

    Raises:
        ArgumentError: the budget, the size or the noise are none.

    >>> round(compute_clip_norm(1.0, 1e-5, 1000), 2)
    2.68
    """
    if not (isinstance(dataset_size, int) and dataset_size > 0 and noise > 0):
        raise ArgumentError(
            "no dataset", location=user_location(), expected="dataset_size >= 1 and noise > 0",
            received=f"dataset_size={dataset_size!r}, noise={noise!r}",
        )  # fmt: skip
    return noise * dataset_size / find_sigma(epsilon, delta)
