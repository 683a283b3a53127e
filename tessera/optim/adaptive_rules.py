"""More adaptive update rules: Adadelta, Adamax, ASGD, NAdam, RAdam and Rprop, with PyTorch's formulas and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import f64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import full
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import abs, equal, exp, greater, less, maximum, sqrt, where
from tessera.ops.tensor.reduce import sum
from tessera.ops.tensor.scalar_functions import clip, expm1, log1p, sign
from tessera.ops.tensor.shape import expand_dims
from tessera.optim.optimizer import Optimizer, Rate, Slot, check_number
from tessera.optim.rules import Adam, check_betas, correct_bias


class Adadelta(Optimizer):
    """Adadelta (Zeiler 2012): gradients times the quotient of the mean squares of steps and gradients.

    >>> Adadelta().lr
    1.0

    Raises:
        ArgumentError: an option is out of range.
    """

    def __init__(
        self, lr: Rate = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0,
        master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, master_weights, maximize, rho=rho, eps=eps, weight_decay=weight_decay)
        self.rho = check_number("rho", rho, 0.0, math.nextafter(1.0, 2.0))
        self.eps = check_number("eps", eps, 0.0)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)

    def list_slots(self) -> tuple[Slot, ...]:
        """The mean squares of gradients and of steps."""
        return Slot("square"), Slot("delta")

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        square = slots[0] * self.rho + g * g * (1.0 - self.rho)
        move = sqrt(slots[1] + self.eps) / sqrt(square + self.eps) * g
        return p - move * lr, [square, slots[1] * self.rho + move * move * (1.0 - self.rho)]


class Adamax(Optimizer):
    """Adamax (Kingma and Ba 2015): Adam with the largest magnitude in place of the second moment.

    >>> Adamax().lr
    0.002

    Raises:
        ArgumentError: an option is out of range.
    """

    def __init__(
        self, lr: Rate = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, master_weights, maximize, betas=betas, eps=eps, weight_decay=weight_decay)  # type: ignore[arg-type]
        self.betas, self.eps = check_betas(betas), check_number("eps", eps, 0.0)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)

    def list_slots(self) -> tuple[Slot, ...]:
        """The mean of gradients, and their largest magnitude."""
        return Slot("m"), Slot("largest")

    def scalars(self, step: Tensor) -> dict[str, Tensor]:
        """The inverse of the bias correction of the mean."""
        return {"inverse": 1.0 / correct_bias(self.betas[0], step)}

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        m = slots[0] * self.betas[0] + g * (1.0 - self.betas[0])
        largest = maximum(slots[1] * self.betas[1], abs(g) + self.eps)
        return p - m / largest * (shared["inverse"] * lr), [m, largest]


class NAdam(Adam):
    """Adam with Nesterov's momentum, whose share grows with the steps (Dozat 2016).

    >>> NAdam().lr
    0.002
    """

    def __init__(
        self, lr: Rate = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False, master_weights: bool = False, *,
        maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            lr, betas, eps, weight_decay, False, master_weights, maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
        )  # fmt: skip
        self.momentum_decay = check_number("momentum_decay", momentum_decay, 0.0)

    def scalars(self, step: Tensor) -> dict[str, Tensor]:
        """The shares of the gradient and of the mean, and the root of the bias correction of the second moment.

        Momentum i is beta1 (1 - q^i / 2), for q = 0.96^momentum_decay. The logarithm of the product of the first t
        is t log(beta1) - the sum over k of (1/2)^k / k · (q^k + ... + q^(k t)).
        """
        t, beta = cast(step, dtype=f64), self.betas[0]
        rate = math.log(0.96) * self.momentum_decay
        now, later = (beta * (1.0 - 0.5 * exp(n * rate)) for n in (t, t + 1.0))
        k = np.arange(1.0, 60.0)
        if rate:
            powers = expm1(expand_dims(t, -1) * as_tensor(k * rate)) * as_tensor(np.exp(k * rate) / np.expm1(k * rate))
            logs = sum(powers * as_tensor(0.5**k / k), axis=-1)
        else:
            logs = t * math.log(2.0)
        product = exp(t * math.log(beta) - logs) if beta else t * 0.0
        root = sqrt(correct_bias(self.betas[1], step))
        return {"g": (1.0 - now) / (1.0 - product), "m": later / (1.0 - product * later), "root": root}

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        m, v = self.average(g, slots)
        spread = sqrt(v) / shared["root"] + self.eps
        return p - (g * (shared["g"] * lr) + m * (shared["m"] * lr)) / spread, [m, v]


class RAdam(Adam):
    """Rectified Adam: without the second moment until there are enough steps to know it (Liu et al. 2020).

    >>> RAdam().lr
    0.001
    """

    def __init__(
        self, lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False, master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            lr, betas, eps, weight_decay, False, master_weights, maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
        )  # fmt: skip

    def scalars(self, step: Tensor) -> dict[str, Tensor]:
        """The inverse of the bias correction of the mean, and the rectification times the root of the other (or 0)."""
        t, (beta1, beta2) = cast(step, dtype=f64), self.betas
        first, second = (-expm1(t * math.log(b)) if b else t * 0.0 + 1.0 for b in (beta1, beta2))
        most = 2.0 / (1.0 - beta2) - 1.0
        length = most - 2.0 * t * (1.0 - second) / second
        known = where(greater(length, 5.0), length, 6.0)
        scale = most / ((most - 4.0) * (most - 2.0)) if most > 5.0 else 0.0
        rectified = sqrt((known - 4.0) * (known - 2.0) / known * scale * second)
        return {"inverse": 1.0 / first, "rectified": where(greater(length, 5.0), rectified, 0.0)}

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        m, v = self.average(g, slots)
        scale = where(greater(shared["rectified"], 0.0), shared["rectified"] / (sqrt(v) + self.eps), 1.0)
        return p - m * (shared["inverse"] * lr) * scale, [m, v]


class Rprop(Optimizer):
    """Resilient backpropagation (Riedmiller and Braun 1993): steps of a size of each element's own.

    A size grows by the second of `etas` while the gradient keeps its sign, and shrinks by the first where it changes.

    >>> Rprop().lr
    0.01

    Raises:
        ArgumentError: an option is out of range, or the learning rate, the first size, is a schedule.
    """

    def __init__(
        self, lr: float = 1e-2, etas: tuple[float, float] = (0.5, 1.2), step_sizes: tuple[float, float] = (1e-6, 50.0),
        master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        if callable(lr):
            raise ArgumentError(
                "Rprop has no schedule", location=user_location(), expected="lr, the first size of steps"
            )
        for name, pair in (("etas", etas), ("step_sizes", step_sizes)):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ArgumentError(f"{name} is {pair!r}", location=user_location(), expected="two numbers")
        super().__init__(lr, master_weights, maximize, etas=etas, step_sizes=step_sizes)  # type: ignore[arg-type]
        self.etas = check_number("etas[0]", etas[0], 1e-30, 1.0), check_number("etas[1]", etas[1], 1.0)
        least = check_number("step_sizes[0]", step_sizes[0], 0.0)
        self.step_sizes = least, check_number("step_sizes[1]", step_sizes[1], least)
        self.first = lr

    def list_slots(self) -> tuple[Slot, ...]:
        """The gradient before, and the sizes of steps."""
        return Slot("before"), Slot("size", self.first)

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        same = g * slots[0]
        shrunk, grown = (full(same.shape, eta, dtype=p.dtype) for eta in self.etas)
        factor = where(equal(same, 0.0), 1.0, where(less(same, 0.0), shrunk, grown))
        size = clip(slots[1] * factor, *self.step_sizes)
        g = where(less(same, 0.0), 0.0, g)
        return p - sign(g) * size, [g, size]


class ASGD(Optimizer):
    """Averaged SGD (Polyak and Juditsky 1992): a decaying rate, and in the slot "average" the mean of the parameters.

    The mean begins after `t0` steps; before, it is the parameter. A schedule gives the rate of its own step.

    >>> ASGD().lr
    0.01

    Raises:
        ArgumentError: an option is out of range.
    """

    def __init__(
        self, lr: Rate = 1e-2, lambd: float = 1e-4, alpha: float = 0.75, t0: float = 1e6, weight_decay: float = 0.0,
        master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        options = {"lambd": lambd, "alpha": alpha, "t0": t0, "weight_decay": weight_decay}
        super().__init__(lr, master_weights, maximize, **options)
        self.lambd, self.alpha = check_number("lambd", lambd, 0.0), check_number("alpha", alpha, 0.0)
        self.t0, self.weight_decay = check_number("t0", t0, 0.0), check_number("weight_decay", weight_decay, 0.0)

    def list_slots(self) -> tuple[Slot, ...]:
        """The mean of the parameters."""
        return (Slot("average"),)

    def scalars(self, step: Tensor) -> dict[str, Tensor]:
        """The steps before this one, and the share of this one in the mean."""
        before = cast(step - 1, dtype=f64)
        return {"before": before, "share": 1.0 / maximum(before - self.t0, 1.0)}

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        rate = exp(log1p(shared["before"] * (lr * self.lambd)) * -self.alpha) * lr
        p = p * (1.0 - rate * self.lambd) - g * rate
        mean = slots[0] + (p - slots[0]) * shared["share"]
        return p, [where(equal(shared["share"], 1.0), p, mean)]


class SparseAdam(Optimizer):
    """PyTorch's Adam for sparse gradients, which do not exist here: a refusal that says so.

    Raises:
        ArgumentError: always.
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuse."""
        raise ArgumentError(
            "SparseAdam takes sparse gradients, and every gradient here is dense", location=user_location(),
            expected="an optimizer for dense gradients",
            suggestion="optim.Adam(...), which by their moments also moves rows that a step does not read",
        )  # fmt: skip
