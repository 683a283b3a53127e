"""Optimizers and learning-rate schedulers with PyTorch's interface, over those of `tessera.optim`.

An optimizer here holds the parameters and the state; one step is one compiled program of `tessera.optim`.

>>> import tessera.pyflame as pf
>>> w = pf.nn.Parameter(pf.tensor([1.0]))
>>> optimizer = SGD([w], lr=0.5)
>>> pf.autograd.backward((w * w).sum()); optimizer.step(); w.numpy().tolist()
[0.0]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera import optim as core
from tessera.core.errors import ArgumentError, DTypeError, StateDictError, user_location
from tessera.frontend.jit.tracing import Jit
from tessera.ir.tensor import Tensor as CoreTensor
from tessera.optim.optimizer import check_number
from tessera.optim.schedules import check_steps
from tessera.pyflame.nn.modules import set_elements
from tessera.pyflame.tensor import Tensor, elements_of


def _check_params(params: Any) -> list[Tensor]:
    if not isinstance(params, (Tensor, Iterable)):
        raise ArgumentError("an optimizer of something that is not tensors", location=user_location(),
                            received=type(params).__name__, expected="a list of tensors",
                            suggestion="pass model.parameters()")  # fmt: skip
    found = [params] if isinstance(params, Tensor) else list(params)
    if not found:
        raise ArgumentError(
            "an optimizer without parameters", location=user_location(), expected="a list of tensors",
            suggestion="pass model.parameters()",
        )  # fmt: skip
    for x in found:
        if not isinstance(x, Tensor) or x._expression.record is not None:
            raise ArgumentError(
                "this is not a parameter", location=user_location(), received=f"{type(x).__name__} {x!r}"[:80],
                expected="a tensor that is not computed from others",
            )  # fmt: skip
        if not x.dtype.is_float:
            raise DTypeError(
                "a parameter has no float elements", location=user_location(), received=repr(x.dtype), expected="floats"
            )
    return list({id(x): x for x in found}.values())


class OptimizerBase:
    """An optimizer: parameters, options, and state.

    `step` updates the parameters that have a gradient, and counts the steps of each. Graphs that were recorded before
    keep the old elements.
    """

    def __init__(self, params: Any, rule: core.Optimizer) -> None:
        self.params = _check_params(params)
        self.rule = rule
        self._lr = float(rule.lr)  # type: ignore[arg-type]
        self._steps = {_name(i): 0 for i in range(len(self.params))}
        self._slots: dict[str, Any] | None = None
        self._program = Jit(_update_parameters, static_argnames=("rule",), dynamic=False)

    def step(self) -> None:
        """Update the parameters by their gradients: those that have seen as many steps together."""
        groups: dict[int, dict[str, Tensor]] = {}
        for i, p in enumerate(self.params):
            if p.grad is not None:
                groups.setdefault(self._steps[_name(i)], {})[_name(i)] = p
        for count, chosen in groups.items():
            self._update(chosen, count)

    def _update(self, chosen: Mapping[str, Tensor], count: int) -> None:
        slots = self._get_slots()
        grads = {name: elements_of(p.grad) for name, p in chosen.items()}  # type: ignore[arg-type]
        params = {name: elements_of(p) for name, p in chosen.items()}
        state = {slot: {name: held[name] for name in chosen} for slot, held in slots.items()}
        state["step"] = np.int64(count)  # type: ignore[assignment]
        new, made = self._program(params, grads, state, np.float32(self._lr), rule=self.rule)
        for slot, held in slots.items():
            held.update(made[slot])
        for name, p in chosen.items():
            self._steps[name] = count + 1
            set_elements(p, new[name])

    def _get_slots(self) -> dict[str, Any]:
        if self._slots is None:
            state = self.rule.init({_name(i): elements_of(p) for i, p in enumerate(self.params)})
            self._slots = {slot: held for slot, held in state.items() if isinstance(held, dict)}
        return self._slots

    def _flatten_state(self) -> dict[str, Any]:
        """The state by path: the steps that each parameter has seen, and its slots."""
        steps = {name: CoreTensor(np.int64(n)) for name, n in self._steps.items()}
        slots = {"step": steps, **self._get_slots()}
        return {f"{slot}.{name}": x for slot, held in slots.items() for name, x in held.items()}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for p in self.params:
            p.grad = None

    def get_lr(self) -> float:
        """The learning rate."""
        return self._lr

    def set_lr(self, new_lr: float) -> None:
        """Set the learning rate.

        Raises:
            ArgumentError: it is not a number from 0 on, or NaN.
        """
        self._lr = check_number("lr", new_lr, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The learning rate and the state as arrays by name, as they are now."""
        arrays = {path: np.array(x.numpy()) for path, x in self._flatten_state().items()}
        return {"lr": self._lr, "state": arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
            StateDictError: it is not a state of this optimizer and these parameters; it names what differs.
        """
        known = self._flatten_state()
        given = state.get("state") if isinstance(state, Mapping) else None
        if not isinstance(given, Mapping) or "lr" not in state:
            raise StateDictError(
                "this is not the state of an optimizer", location=user_location(), expected='a dict of "lr" and "state"'
            )
        wrong = [f"{k} is missing" for k in known if k not in given] + [
            f"{k} is extra" for k in given if k not in known
        ]
        for path in known.keys() & given.keys():
            array = np.asarray(given[path])
            if array.shape != known[path].shape or array.dtype != known[path].dtype.numpy:
                wrong.append(f"{path} is {array.dtype}{list(array.shape)}, expected {known[path].type}")
        if wrong:
            raise StateDictError(
                f"the state does not fit this {type(self).__name__}: {'; '.join(sorted(wrong)[:8])}",
                location=user_location(), suggestion="load it into an optimizer of the same kind and parameters",
            )  # fmt: skip
        self.set_lr(state["lr"])
        for path in known:
            slot, _, name = path.partition(".")
            if slot == "step":
                self._steps[name] = int(np.asarray(given[path]))
            else:
                self._get_slots()[slot][name] = CoreTensor(np.array(given[path]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.params)} parameters, lr={self._lr})"


def _name(place: int) -> str:
    return f"{place:06d}"  # dicts are flattened in the order of their keys


def _update_parameters(params: Any, grads: Any, state: Any, lr: Any, rule: core.Optimizer) -> Any:
    return rule.update(params, grads, state, lr)


class SGD(OptimizerBase):
    """Stochastic gradient descent with momentum.

    Raises:
        ArgumentError: an option is out of range, or the learning rate is NaN.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, core.SGD(_rate(lr), momentum, dampening, weight_decay, nesterov))


class Adam(OptimizerBase):
    """Adam, with L2 decay and AMSGrad.

    Raises:
        ArgumentError: an option is out of range, or the learning rate is NaN.
    """

    def __init__(
        self, params: Any, lr: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, core.Adam(_rate(lr), (beta1, beta2), eps, weight_decay, amsgrad))


class AdamW(OptimizerBase):
    """Adam with decoupled weight decay.

    Raises:
        ArgumentError: an option is out of range, or the learning rate is NaN.
    """

    def __init__(
        self, params: Any, lr: float = 0.001, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8,
        weight_decay: float = 0.01, amsgrad: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, core.AdamW(_rate(lr), (beta1, beta2), eps, weight_decay, amsgrad))


class RMSprop(OptimizerBase):
    """RMSprop with momentum; centred on request.

    Raises:
        ArgumentError: an option is out of range, or the learning rate is NaN.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, core.RMSprop(_rate(lr), alpha, eps, weight_decay, momentum, centered))


def _rate(lr: Any) -> float:
    return check_number("lr", lr, 0.0)


# Schedulers.


class Scheduler:
    """A learning-rate scheduler: `step()` after each epoch sets the optimizer's learning rate.

    `last_epoch` is the number of the epoch that was finished last; -1 starts anew.
    """

    def __init__(self, optimizer: OptimizerBase, schedule: core.RateSchedule, last_epoch: int = -1) -> None:
        if isinstance(last_epoch, bool) or not isinstance(last_epoch, int) or last_epoch < -1:
            raise ArgumentError(
                f"last_epoch is {last_epoch!r}", location=user_location(), expected="an integer from -1 on"
            )
        self.optimizer, self.schedule = optimizer, schedule
        self.last_epoch = last_epoch + 1
        self._apply()

    def _apply(self) -> None:
        self.optimizer.set_lr(float(self.schedule(self.last_epoch)))

    def step(self) -> None:
        """Set the learning rate of the next epoch."""
        self.last_epoch += 1
        self._apply()

    def get_last_lr(self) -> float:
        """The learning rate that was set last."""
        return self.optimizer.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """The epoch."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at an epoch.

        Raises:
            StateDictError: it is not a state of a scheduler.
        """
        epoch = state.get("last_epoch") if isinstance(state, Mapping) else None
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise StateDictError(
                "this is not the state of a scheduler", location=user_location(), expected='a dict of "last_epoch"',
                received=repr(state)[:80],
            )  # fmt: skip
        self.last_epoch = epoch
        self._apply()


def _check_optimizer(optimizer: Any) -> float:
    if not isinstance(optimizer, OptimizerBase):
        raise ArgumentError(
            "a scheduler takes an optimizer", location=user_location(), received=type(optimizer).__name__,
            expected="an optimizer of pf.optim",
        )  # fmt: skip
    return optimizer.get_lr()


class StepLR(Scheduler):
    """The learning rate times `gamma` after each `step_size` epochs."""

    def __init__(self, optimizer: OptimizerBase, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        super().__init__(optimizer, core.StepLR(_check_optimizer(optimizer), step_size, gamma), last_epoch)


class MultiStepLR(Scheduler):
    """The learning rate times `gamma` at each of the milestones."""

    def __init__(
        self, optimizer: OptimizerBase, milestones: Sequence[int], gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        epochs = [check_steps("a milestone", m) for m in milestones]
        super().__init__(optimizer, core.MultiStepLR(_check_optimizer(optimizer), epochs, gamma), last_epoch)


class ExponentialLR(Scheduler):
    """The learning rate times `gamma` after each epoch."""

    def __init__(self, optimizer: OptimizerBase, gamma: float, last_epoch: int = -1) -> None:
        super().__init__(optimizer, core.ExponentialLR(_check_optimizer(optimizer), gamma), last_epoch)


class CosineAnnealingLR(Scheduler):
    """From the learning rate to `eta_min` along half a cosine of `T_max` epochs, and back."""

    def __init__(
        self,
        optimizer: OptimizerBase,
        T_max: int,  # noqa: N803 - PyTorch's name
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, core.CosineAnnealingLR(_check_optimizer(optimizer), T_max, eta_min), last_epoch)


class LinearLR(Scheduler):
    """The learning rate times a factor that goes from `start_factor` to `end_factor` in `total_iters` epochs."""

    def __init__(
        self, optimizer: OptimizerBase, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:  # fmt: skip
        rate = _check_optimizer(optimizer)
        super().__init__(optimizer, core.LinearLR(rate, start_factor, end_factor, total_iters), last_epoch)


class PolynomialLR(Scheduler):
    """From the learning rate to `end_lr` in `total_iters` epochs, as the power `power` of what is left."""

    def __init__(
        self, optimizer: OptimizerBase, total_iters: int, power: float = 1.0, end_lr: float = 0.0, last_epoch: int = -1
    ) -> None:
        rate = _check_optimizer(optimizer)
        super().__init__(optimizer, core.PolynomialLR(rate, total_iters, power, end_lr), last_epoch)


class OneCycleLR(Scheduler):
    """The 1cycle policy: up to `max_lr`, then down; one `step()` after each batch.

    Raises:
        ArgumentError: an option is out of range, or `step` is called more than `total_steps` times.
    """

    def __init__(
        self, optimizer: OptimizerBase, max_lr: float, total_steps: int, pct_start: float = 0.3,
        anneal_strategy: str = "cos", div_factor: float = 25.0, final_div_factor: float = 1e4, last_epoch: int = -1,
    ) -> None:  # fmt: skip
        _check_optimizer(optimizer)
        cycle = core.OneCycleLR(max_lr, total_steps, pct_start, anneal_strategy, div_factor, final_div_factor)
        self.total_steps = total_steps
        super().__init__(optimizer, cycle, last_epoch)

    def step(self) -> None:
        """Set the learning rate of the next batch."""
        if self.last_epoch >= self.total_steps:
            raise ArgumentError(
                "the cycle of the learning rate has ended", location=user_location(),
                expected=f"up to {self.total_steps} steps", received=f"step {self.last_epoch + 1}",
                suggestion="make the scheduler with the number of all batches",
            )  # fmt: skip
        super().step()


class ReduceLROnPlateau:
    """The learning rate times `factor` after `patience` epochs without improvement of a metric.

    `mode` is "min" or "max". `step(metric)` takes the metric of an epoch: a number, or a tensor of one element.

    Raises:
        ArgumentError: an option is out of range, or a metric is NaN.
    """

    def __init__(
        self, optimizer: OptimizerBase, mode: str = "min", factor: float = 0.1, patience: int = 10,
        threshold: float = 1e-4, cooldown: int = 0, min_lr: float = 0.0,
    ) -> None:  # fmt: skip
        self.optimizer = optimizer
        self.schedule = core.ReduceLROnPlateau(
            _check_optimizer(optimizer), mode, factor, patience, threshold, cooldown=cooldown, min_lr=min_lr
        )

    def step(self, metric: Any) -> None:
        """Take the metric of an epoch, and set the learning rate of the next."""
        value = float(metric)
        if math.isnan(value):
            raise ArgumentError(
                "the metric is NaN", location=user_location(), expected="a number", suggestion="check the loss"
            )
        self.schedule.lr = self.optimizer.get_lr()
        self.optimizer.set_lr(self.schedule.step(value))

    def get_last_lr(self) -> float:
        """The learning rate that was set last."""
        return self.optimizer.get_lr()


__all__ = [
    "Adam", "AdamW", "CosineAnnealingLR", "ExponentialLR", "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR",
    "RMSprop", "ReduceLROnPlateau", "SGD", "StepLR",
]  # fmt: skip
