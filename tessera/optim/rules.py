"""Update rules: SGD, Adam, AdamW, RMSprop, Adagrad and Lion, with PyTorch's formulas and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.elementwise import equal, maximum, sqrt, where
from tessera.ops.tensor.scalar_functions import expm1, sign
from tessera.optim.optimizer import Optimizer, Rate, Slot, check_number, count_in_floats


def correct_bias(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step in the type of `count_in_floats`, without the loss of digits of the difference."""
    t = count_in_floats(step)
    return -expm1(t * math.log(beta)) if beta else t * 0.0 + 1.0


class SGD(Optimizer):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013) and L2 decay.

    >>> optimizer = SGD(lr=0.5)
    >>> optimizer.update([Tensor([1.0])], [Tensor([1.0])], optimizer.init([Tensor([1.0])]))[0]
    [Tensor([0.5], f32)]

    Raises:
        ArgumentError: an option is out of range, or `nesterov` is set without momentum.
    """

    def __init__(
        self, lr: Rate = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        options = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(lr, master_weights, maximize, **options)
        self.momentum = check_number("momentum", momentum, 0.0)
        self.dampening = check_number("dampening", dampening, -math.inf)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)
        self.nesterov = nesterov
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ArgumentError("nesterov needs momentum and no dampening", location=user_location())

    def list_slots(self) -> tuple[Slot, ...]:
        """The velocity, with momentum."""
        return (Slot("momentum"),) if self.momentum else ()

    def scalars(self, step: Tensor) -> dict[str, Tensor]:
        """The share of the gradient that enters the velocity: all of it in the first step."""
        if not self.counts_steps():
            return {}
        whole = count_in_floats(step) * 0.0 + 1.0
        return {"share": where(equal(step, 1), whole, 1.0 - self.dampening)}

    def counts_steps(self) -> bool:
        """With dampening, which the first step leaves out."""
        return bool(self.momentum and self.dampening)

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        if not self.momentum:
            return p - g * lr, []
        velocity = slots[0] * self.momentum + (g * shared["share"] if shared else g)
        return p - (g + velocity * self.momentum if self.nesterov else velocity) * lr, [velocity]


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), with L2 decay and AMSGrad (Reddi, Kale and Kumar 2018).

    >>> optimizer = Adam(lr=0.5)
    >>> optimizer.update([Tensor([1.0])], [Tensor([8.0])], optimizer.init([Tensor([1.0])]))[0][0].item().__round__(4)
    0.5

    Raises:
        ArgumentError: an option is out of range.
    """

    def __init__(
        self, lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        amsgrad: bool = False, master_weights: bool = False, *, maximize: bool = False,
        decoupled_weight_decay: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, master_weights, maximize, betas=betas, eps=eps, weight_decay=weight_decay)  # type: ignore[arg-type]
        self.decoupled = self.decoupled or decoupled_weight_decay
        self.betas = check_betas(betas)
        self.eps = check_number("eps", eps, 0.0)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)
        self.amsgrad = amsgrad

    def list_slots(self) -> tuple[Slot, ...]:
        """The first and second moments, and the largest second moment."""
        return (Slot("m"), Slot("v"), *((Slot("largest"),) if self.amsgrad else ()))

    def scalars(self, step: Tensor) -> dict[str, Tensor]:
        """The root of the bias correction of the second moment, and its quotient by that of the first."""
        first, second = (correct_bias(b, step) for b in self.betas)
        return {"root": sqrt(second), "ratio": sqrt(second) / first}

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        m, v = self.average(g, slots)
        largest = [maximum(slots[2], v)] if self.amsgrad else []
        # lr (m / first) / (sqrt(v) / root + eps), with one division
        spread = sqrt((largest or [v])[0]) + shared["root"] * self.eps
        return p - m * (shared["ratio"] * lr) / spread, [m, v, *largest]

    def average(self, g: Tensor, slots: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The new moments."""
        beta1, beta2 = self.betas
        return slots[0] * beta1 + g * (1.0 - beta1), slots[1] * beta2 + g * g * (1.0 - beta2)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    >>> AdamW().weight_decay
    0.01
    """

    decoupled = True

    def __init__(
        self, lr: Rate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, betas, eps, weight_decay, amsgrad, master_weights, maximize=maximize)


def check_betas(betas: Any) -> tuple[float, float]:
    """The decay rates of two moments.

    Raises:
        ArgumentError: they are not two numbers from 0 to below 1.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ArgumentError(f"betas is {betas!r}", location=user_location(), expected="two numbers")
    return tuple(check_number(f"betas[{i}]", b, 0.0, 1.0) for i, b in enumerate(betas))  # type: ignore[return-value]


class RMSprop(Optimizer):
    """RMSprop (Hinton 2012): the gradient divided by the root of its mean square, with momentum; centred on request.

    >>> RMSprop().lr
    0.01

    Raises:
        ArgumentError: an option is out of range.
    """

    def __init__(
        self, lr: Rate = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(lr, master_weights, maximize, **options)
        self.alpha = check_number("alpha", alpha, 0.0)
        self.eps = check_number("eps", eps, 0.0)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)
        self.momentum = check_number("momentum", momentum, 0.0)
        self.centered = centered

    def list_slots(self) -> tuple[Slot, ...]:
        """The mean square, the mean if centred, and the velocity with momentum."""
        return (
            Slot("square"), *((Slot("mean"),) if self.centered else ()), *((Slot("momentum"),) if self.momentum else ())
        )  # fmt: skip

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        square = slots[0] * self.alpha + g * g * (1.0 - self.alpha)
        made, spread = [square], square
        if self.centered:
            made.append(slots[1] * self.alpha + g * (1.0 - self.alpha))
            spread = maximum(square - made[1] * made[1], 0.0)  # rounding may leave a negative number
        step = g / (sqrt(spread) + self.eps)
        if not self.momentum:
            return p - step * lr, made
        velocity = slots[-1] * self.momentum + step
        return p - velocity * lr, [*made, velocity]


class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan and Singer 2011): the gradient divided by the root of the sum of its squares.

    >>> Adagrad().lr
    0.01

    Raises:
        ArgumentError: an option is out of range.
    """

    def __init__(
        self, lr: Rate = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, master_weights: bool = False, *,
        maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, master_weights, maximize, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
        self.lr_decay = check_number("lr_decay", lr_decay, 0.0)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)
        self.start = check_number("initial_accumulator_value", initial_accumulator_value, 0.0)
        self.eps = check_number("eps", eps, 0.0)

    def list_slots(self) -> tuple[Slot, ...]:
        """The sum of squares."""
        return (Slot("sum", self.start),)

    def counts_steps(self) -> bool:
        """With a decay of the learning rate."""
        return bool(self.lr_decay)

    def scalars(self, step: Tensor) -> dict[str, Tensor]:
        """The decay of the learning rate."""
        return {"decay": 1.0 / (count_in_floats(step - 1) * self.lr_decay + 1.0)} if self.lr_decay else {}

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        p, g = self.decay(p, g, lr)
        total = slots[0] + g * g
        rate = shared["decay"] * lr if shared else lr
        return p - g / (sqrt(total) + self.eps) * rate, [total]


class Lion(Optimizer):
    """Lion (Chen et al. 2023): steps of the sign of a mean of gradients, with decoupled weight decay.

    >>> Lion().lr
    0.0001

    Raises:
        ArgumentError: an option is out of range.
    """

    decoupled = True

    def __init__(
        self, lr: Rate = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
        master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, master_weights, maximize, betas=betas, weight_decay=weight_decay)  # type: ignore[arg-type]
        self.betas = check_betas(betas)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)

    def list_slots(self) -> tuple[Slot, ...]:
        """The mean of gradients."""
        return (Slot("m"),)

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The step."""
        beta1, beta2 = self.betas
        direction = sign(slots[0] * beta1 + g * (1.0 - beta1))
        p, g = self.decay(p, g, lr)
        return p - direction * lr, [slots[0] * beta2 + g * (1.0 - beta2)]
