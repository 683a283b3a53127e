"""Learning-rate schedules: functions from the number of a step, which counts from 0, to a learning rate.

A schedule takes a Python number or a tensor of a traced program: an optimizer calls it with its step inside `ts.jit`.
The names and formulas are PyTorch's (`torch.optim.lr_scheduler`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import to_python_numbers
from tessera.ir.tensor import Tensor
from tessera.nn.module import check_keywords
from tessera.ops.tensor import elementwise as e
from tessera.optim.optimizer import check_number, count_in_floats


def _number(step: Any) -> Any:
    return count_in_floats(step) if isinstance(step, Tensor) else float(step)


def _choose(condition: Any, a: Any, b: Any) -> Any:
    return e.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def _min(a: Any, b: float) -> Any:
    return e.minimum(a, b) if isinstance(a, Tensor) else min(a, b)


def _max(a: Any, b: float) -> Any:
    return e.maximum(a, b) if isinstance(a, Tensor) else max(a, b)


def _floor(a: Any) -> Any:
    return e.floor(a) if isinstance(a, Tensor) else math.floor(a)


def _cos(a: Any) -> Any:
    return e.cos(a) if isinstance(a, Tensor) else math.cos(a)


def _power(base: float, exponent: Any) -> Any:
    if not isinstance(exponent, Tensor) or base == 0.0:
        return _choose(exponent < 1, 1.0, 0.0) if base == 0.0 else base**exponent
    return e.exp(exponent * math.log(base))


# What to write in place of options that only PyTorch's schedulers have.
SUGGESTIONS = {
    "optimizer": "pass the schedule to the optimizer: optim.AdamW(lr=schedule)",
    "last_epoch": "leave it out: the optimizer's state counts the steps",
    "cycle_momentum": "leave it out: the schedule changes the learning rate alone",
}


class RateSchedule:
    """A learning rate for each step, in f64 where the step is."""

    takes_floats = True

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuse what PyTorch's schedulers take and these do not: the optimizer, its epoch, its momentum."""
        check_keywords(cls, options, SUGGESTIONS)
        return super().__new__(cls)

    def __init__(self, lr: float) -> None:
        self.lr = check_number("lr", lr, 0.0)

    def __call__(self, step: Any) -> Any:
        """The learning rate of a step."""
        return self.at(_number(step))

    def at(self, t: Any) -> Any:
        """The learning rate of a step, a float."""
        return self.lr + 0.0 * t

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in vars(self).items())})"


class ConstantLR(RateSchedule):
    """`lr` times `factor` for the first `total_iters` steps.

    >>> [ConstantLR(1.0, 0.5, 1)(t) for t in range(2)]
    [0.5, 1.0]
    """

    def __init__(self, lr: float, factor: float = 1.0 / 3.0, total_iters: int = 5) -> None:
        super().__init__(lr)
        self.factor, self.total_iters = check_number("factor", factor, 0.0), total_iters

    def at(self, t: Any) -> Any:
        """The learning rate."""
        return _choose(t < self.total_iters, self.lr * self.factor, self.lr)


class StepLR(RateSchedule):
    """`lr` times `gamma` after each `step_size` steps.

    >>> [StepLR(1.0, 2, 0.5)(t) for t in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    def __init__(self, lr: float, step_size: int, gamma: float = 0.1) -> None:
        super().__init__(lr)
        self.step_size, self.gamma = check_steps("step_size", step_size), check_number("gamma", gamma, 0.0)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        return self.lr * _power(self.gamma, _floor((t + (0.5 if isinstance(t, Tensor) else 0.0)) / self.step_size))


class MultiStepLR(RateSchedule):
    """`lr` times `gamma` at each of the milestones.

    >>> [MultiStepLR(1.0, [1, 3], 0.5)(t) for t in range(4)]
    [1.0, 0.5, 0.5, 0.25]
    """

    def __init__(self, lr: float, milestones: Sequence[int], gamma: float = 0.1) -> None:
        super().__init__(lr)
        self.milestones, self.gamma = tuple(milestones), check_number("gamma", gamma, 0.0)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        found: Any = self.lr
        for milestone in self.milestones:
            found = found * _choose(t >= milestone, self.gamma, 1.0)
        return found + 0.0 * t


class ExponentialLR(RateSchedule):
    """`lr` times `gamma` in each step.

    >>> ExponentialLR(1.0, 0.5)(3)
    0.125
    """

    def __init__(self, lr: float, gamma: float) -> None:
        super().__init__(lr)
        self.gamma = check_number("gamma", gamma, 0.0)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        return self.lr * _power(self.gamma, t)


class CosineAnnealingLR(RateSchedule):
    """From `lr` to `eta_min` along half a cosine of `T_max` steps, and back (Loshchilov and Hutter 2017).

    >>> CosineAnnealingLR(1.0, 10)(10)
    0.0
    """

    def __init__(self, lr: float, T_max: int, eta_min: float = 0.0) -> None:  # noqa: N803 - PyTorch's name
        super().__init__(lr)
        self.T_max, self.eta_min = check_steps("T_max", T_max), check_number("eta_min", eta_min, 0.0)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        return self.eta_min + (self.lr - self.eta_min) * (1.0 + _cos(t * (math.pi / self.T_max))) / 2.0


class LinearLR(RateSchedule):
    """`lr` times a factor that goes from `start_factor` to `end_factor` in `total_iters` steps.

    >>> LinearLR(1.0, 0.5, 1.0, 2)(1)
    0.75
    """

    def __init__(
        self, lr: float, start_factor: float = 1.0 / 3.0, end_factor: float = 1.0, total_iters: int = 5
    ) -> None:
        super().__init__(lr)
        self.start_factor = check_number("start_factor", start_factor, 0.0)
        self.end_factor = check_number("end_factor", end_factor, 0.0)
        self.total_iters = check_steps("total_iters", total_iters)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        share = _min(t, float(self.total_iters)) / self.total_iters
        return self.lr * (self.start_factor + (self.end_factor - self.start_factor) * share)


class PolynomialLR(RateSchedule):
    """From `lr` to `end_lr` in `total_iters` steps, as the power `power` of what is left.

    >>> PolynomialLR(1.0, 4, 2.0)(2)
    0.25
    """

    def __init__(self, lr: float, total_iters: int = 5, power: float = 1.0, end_lr: float = 0.0) -> None:
        super().__init__(lr)
        self.total_iters, self.power = check_steps("total_iters", total_iters), check_number("power", power, 0.0)
        self.end_lr = check_number("end_lr", end_lr, 0.0)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        left = _max(1.0 - t / self.total_iters, 0.0)
        return self.end_lr + (self.lr - self.end_lr) * left**self.power


class OneCycleLR(RateSchedule):
    """The 1cycle policy: up from max_lr / div_factor to `max_lr`, then down to that / final_div_factor (Smith 2018).

    `anneal_strategy` is "cos" or "linear"; with `three_phase` the rate first goes down to the first one, in as many
    steps as it went up. `total_steps` may be given as `epochs` and `steps_per_epoch`. After it the rate stays.

    >>> OneCycleLR(1.0, 10, div_factor=4.0)(0)
    0.25

    Raises:
        ArgumentError: an option is out of range.
    """

    def __init__(
        self, max_lr: float, total_steps: int | None = None, pct_start: float = 0.3, anneal_strategy: str = "cos",
        div_factor: float = 25.0, final_div_factor: float = 1e4, three_phase: bool = False, epochs: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(max_lr)
        if anneal_strategy not in ("cos", "linear"):
            raise ArgumentError(
                f"anneal_strategy is {anneal_strategy!r}", location=user_location(), expected="'cos' or 'linear'"
            )
        if not 0.0 <= pct_start <= 1.0:
            raise ArgumentError(f"pct_start is {pct_start}", location=user_location(), expected="0 to 1")
        if total_steps is None:
            total_steps = check_steps("epochs", epochs) * check_steps("steps_per_epoch", steps_per_epoch)
        self.total_steps, self.pct_start = check_steps("total_steps", total_steps), pct_start
        self.anneal_strategy, self.three_phase = anneal_strategy, three_phase
        self.first = max_lr / check_number("div_factor", div_factor, 1e-30)
        self.last = self.first / check_number("final_div_factor", final_div_factor, 1e-30)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        peak, end = self.pct_start * self.total_steps - 1.0, self.total_steps - 1.0
        ends, rates = [peak, end], [self.first, self.lr, self.last]
        if self.three_phase:
            ends, rates = [peak, 2.0 * peak, end], [self.first, self.lr, self.first, self.last]
        found: Any = rates[-1]
        for i in reversed(range(len(ends))):
            start, stop = ends[i - 1] if i else 0.0, ends[i]
            share = _min((t - start) / (stop - start), 1.0) if stop != start else t * 0.0 + 1.0
            part = self._anneal(rates[i], rates[i + 1], share)
            found = part if i == len(ends) - 1 else _choose(t <= stop, part, found)
        return found

    def _anneal(self, start: float, end: float, share: Any) -> Any:
        if self.anneal_strategy == "linear":
            return start + (end - start) * share
        return end + (start - end) / 2.0 * (1.0 + _cos(share * math.pi))


class WarmupCosine(RateSchedule):
    """Up to `lr` in `warmup_steps` equal steps, then down to `min_lr` along half a cosine until `total_steps`.

    >>> [WarmupCosine(1.0, 2, 6)(t) for t in (0, 1, 2, 4, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(self, lr: float, warmup_steps: int, total_steps: int, min_lr: float = 0.0) -> None:
        super().__init__(lr)
        if not 0 <= warmup_steps < total_steps:
            raise ArgumentError(
                f"warmup_steps is {warmup_steps} of {total_steps}", location=user_location(),
                expected="0 to total_steps - 1",
            )  # fmt: skip
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        self.min_lr = check_number("min_lr", min_lr, 0.0)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        share = _max(_min((t - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0), 0.0)
        down = self.min_lr + (self.lr - self.min_lr) * (1.0 + _cos(share * math.pi)) / 2.0
        if not self.warmup_steps:
            return down
        return _choose(t < self.warmup_steps, self.lr * (t + 1.0) / self.warmup_steps, down)


class ReduceLROnPlateau:
    """Multiplies a learning rate by `factor` after `patience` measurements of a metric without improvement.

    `step(metric)` takes a measurement and returns the rate. `mode` is "min" or "max"; an improvement exceeds
    `threshold` ("rel": times the best; "abs": itself).

    >>> plateau = ReduceLROnPlateau(1.0, factor=0.5, patience=0)
    >>> [plateau.step(loss) for loss in (3.0, 2.0, 2.0, 2.0)]
    [1.0, 1.0, 0.5, 0.25]

    Raises:
        ArgumentError: an option is out of range, or a metric is no number.
    """

    def __init__(
        self, lr: float, mode: str = "min", factor: float = 0.1, patience: int = 10, threshold: float = 1e-4,
        threshold_mode: str = "rel", cooldown: int = 0, min_lr: float = 0.0, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        for name, value, known in (("mode", mode, ("min", "max")), ("threshold_mode", threshold_mode, ("rel", "abs"))):
            if value not in known:
                raise ArgumentError(f"{name} is {value!r}", location=user_location(), expected=" or ".join(known))
        self.lr, self.factor = check_number("lr", lr, 0.0), check_number("factor", factor, 0.0, 1.0)
        self.mode, self.patience, self.threshold, self.threshold_mode = mode, patience, threshold, threshold_mode
        self.cooldown, self.min_lr, self.eps = cooldown, check_number("min_lr", min_lr, 0.0), eps
        self.best = math.inf if mode == "min" else -math.inf
        self.bad, self.resting = 0, 0

    def __call__(self, step: Any) -> float:
        """The learning rate now."""
        return self.lr

    def step(self, metric: Any) -> float:
        """Take a measurement; the learning rate after it."""
        value = float(metric)
        if self._is_better(value):
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        if self.resting:
            self.resting, self.bad = self.resting - 1, 0
        if self.bad > self.patience:
            new = max(self.lr * self.factor, self.min_lr)
            self.lr = new if self.lr - new > self.eps else self.lr
            self.resting, self.bad = self.cooldown, 0
        return self.lr

    def _is_better(self, value: float) -> bool:
        sign = -1.0 if self.mode == "min" else 1.0
        if self.threshold_mode == "rel":
            return value * sign > self.best * sign * (1.0 + sign * self.threshold)
        return value * sign > self.best * sign + self.threshold


def check_steps(name: str, value: Any) -> int:
    """A number of steps.

    Raises:
        ArgumentError: it is no positive integer.
    """
    value = to_python_numbers(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} is {value!r}", location=user_location(), expected="a positive integer")
    return value  # type: ignore[no-any-return]


class CosineAnnealingWarmRestarts(RateSchedule):
    """From `lr` to `eta_min` along half a cosine of `T_0` steps, then anew with cycles `T_mult` times as long.

    >>> [CosineAnnealingWarmRestarts(1.0, 2)(t) for t in range(4)]
    [1.0, 0.5, 1.0, 0.5]
    """

    def __init__(self, lr: float, T_0: int, T_mult: int = 1, eta_min: float = 0.0) -> None:  # noqa: N803
        super().__init__(lr)
        self.T_0, self.T_mult = check_steps("T_0", T_0), check_steps("T_mult", T_mult)
        self.eta_min = check_number("eta_min", eta_min, 0.0)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        start, length = _floor(t / self.T_0) * float(self.T_0), self.T_0 * 1.0
        if self.T_mult > 1:
            start, length = t * 0.0, t * 0.0 + self.T_0
            cycles = 64 if isinstance(t, Tensor) else math.ceil(math.log(t + 2.0, self.T_mult)) + 1
            ends = [self.T_0 * (self.T_mult**n - 1) / (self.T_mult - 1) for n in range(1, cycles)]
            for n, end in enumerate(e for e in ends if e < 2.0**31):
                start = _choose(t >= end, end, start)
                length = _choose(t >= end, float(self.T_0 * self.T_mult ** (n + 1)), length)
        return self.eta_min + (self.lr - self.eta_min) * (1.0 + _cos((t - start) / length * math.pi)) / 2.0


class CyclicLR(RateSchedule):
    """Up from `base_lr` to `max_lr` in `step_size_up` steps and down in `step_size_down`, again and again (Smith 2017).

    `mode` is "triangular", "triangular2" (each cycle reaches half as high) or "exp_range" (times gamma^step).

    >>> [CyclicLR(1.0, 3.0, 2)(t) for t in range(5)]
    [1.0, 2.0, 3.0, 2.0, 1.0]

    Raises:
        ArgumentError: an option is out of range.
    """

    def __init__(
        self, base_lr: float, max_lr: float, step_size_up: int = 2000, step_size_down: int | None = None,
        mode: str = "triangular", gamma: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(base_lr)
        if mode not in ("triangular", "triangular2", "exp_range"):
            raise ArgumentError(
                f"mode is {mode!r}", location=user_location(), expected="triangular, triangular2 or exp_range"
            )
        self.max_lr, self.mode = check_number("max_lr", max_lr, 0.0), mode
        self.up = check_steps("step_size_up", step_size_up)
        self.down = self.up if step_size_down is None else check_steps("step_size_down", step_size_down)
        self.gamma = check_number("gamma", gamma, 0.0)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        whole = self.up + self.down
        cycle = _floor((t + (0.5 if isinstance(t, Tensor) else 0.0)) / whole)
        place = t - cycle * whole
        height = _choose(place <= self.up, place / self.up, (whole - place) / self.down)
        if self.mode == "triangular2":
            height = height * _power(0.5, cycle)
        elif self.mode == "exp_range":
            height = height * _power(self.gamma, t)
        return self.lr + (self.max_lr - self.lr) * height


class LambdaLR(RateSchedule):
    """`lr` times a function of the step.

    >>> LambdaLR(0.5, lambda t: 1.0 / (t + 1.0))(1)
    0.25
    """

    def __init__(self, lr: float, lr_lambda: Callable[[Any], Any]) -> None:
        super().__init__(lr)
        if not callable(lr_lambda):
            raise ArgumentError("lr_lambda is no function", location=user_location(), received=repr(lr_lambda)[:80])
        self.lr_lambda = lr_lambda

    def at(self, t: Any) -> Any:
        """The learning rate."""
        return self.lr * self.lr_lambda(t)


class SequentialLR(RateSchedule):
    """One schedule after the other: each begins at its milestone, with a step of 0.

    >>> schedule = SequentialLR([LinearLR(1.0, 0.5, 1.0, 2), ExponentialLR(1.0, 0.5)], [2])
    >>> [schedule(t) for t in range(5)]
    [0.5, 0.75, 1.0, 0.5, 0.25]

    Raises:
        ArgumentError: there is not one milestone less than there are schedules, or they do not ascend.
    """

    def __init__(self, schedulers: Sequence[RateSchedule], milestones: Sequence[int]) -> None:
        for name, given in (("schedulers", schedulers), ("milestones", milestones)):
            if not isinstance(given, (tuple, list)):
                raise ArgumentError(f"{name} is {given!r}", location=user_location(), expected="a list")
        self.schedulers = tuple(schedulers)
        self.milestones = tuple(check_steps("a milestone", m) for m in milestones)
        if len(self.milestones) != len(self.schedulers) - 1 or list(self.milestones) != sorted(set(self.milestones)):
            raise ArgumentError(
                f"milestones are {list(milestones)} for {len(self.schedulers)} schedules", location=user_location(),
                expected="ascending steps, one less than schedules",
            )  # fmt: skip
        if not all(isinstance(s, RateSchedule) for s in self.schedulers):
            raise ArgumentError(
                "SequentialLR takes schedules", location=user_location(), received=repr(schedulers)[:80]
            )
        super().__init__(self.schedulers[0].lr)

    def at(self, t: Any) -> Any:
        """The learning rate."""
        found = self.schedulers[0].at(t)
        for start, schedule in zip(self.milestones, self.schedulers[1:], strict=True):
            found = _choose(t >= start, schedule.at(_max(t - start, 0.0)), found)
        return found


ScheduleFunction = Callable[[Any], Any]
