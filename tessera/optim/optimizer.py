"""Optimizers as pure functions on pytrees: `update` returns the new parameters and the new state.

A rule is a function of one parameter, its gradient and its slots (moments). All parameters of a type are updated by
one launch in a compiled program (tessera/optim/fused_update.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import DType, f32, f64, int64, to_python_numbers
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.module import Module, check_keywords
from tessera.ops.api.creation import full, zeros
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import where
from tessera.optim.fused_update import update_together

State = dict[str, Any]
Rate = float | Callable[[Any], Any]


@dataclass(frozen=True)
class Slot:
    """A tensor that an optimizer keeps for each parameter, and its first value."""

    name: str
    start: float = 0.0


# What to write in place of options that only PyTorch's optimizers have.
_FUSED = "leave it out: a compiled program updates all parameters of a type by one launch"
SUGGESTIONS = {
    "params": "state = optimizer.init(model)", "foreach": _FUSED, "fused": _FUSED,
    "capturable": "leave it out: the step is part of the state",
    "differentiable": "leave it out: update is a pure function, which ts.grad differentiates",
}  # fmt: skip


class Optimizer:
    """An optimizer: its options, `init` for a state, and `update`, a pure function for `ts.jit`.

    The state is a dict of tensors: "step", the updates so far, for the learning rate; for each slot a dict by path; and
    where the rule counts steps "steps", those that each parameter has seen, in the order of their sorted paths. It is
    computed in f32 for parameters of 16 bits and less; with `master_weights` it also holds them in f32. Parameters
    without a gradient (None) stay as they are, and see no step. `maximize` goes up the gradient instead of down.
    """

    suggestions = SUGGESTIONS
    weight_decay = 0.0
    decoupled = False  # whether the weight decay shrinks the parameter, or is added to the gradient

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Refuse what PyTorch's optimizers take and these do not: the parameters, and how to compute."""
        check_keywords(cls, options, cls.suggestions)
        if args and isinstance(args[0], (Module, Mapping, list, tuple, Iterator)):
            raise ArgumentError(
                "an optimizer is made without parameters", location=user_location(),
                expected="lr, a number or a schedule", received=type(args[0]).__name__,
                suggestion=f"optimizer = optim.{cls.__name__}(lr=...); state = optimizer.init(model)",
            )  # fmt: skip
        return super().__new__(cls)

    def __init__(self, lr: Rate, master_weights: bool = False, maximize: bool = False, **options: float) -> None:
        self.lr = lr
        self.options = options | ({"maximize": True} if maximize else {})
        self.master_weights, self.maximize = master_weights, maximize
        if not callable(lr):
            check_number("lr", lr, 0.0)

    # What a subclass defines.

    def list_slots(self) -> tuple[Slot, ...]:
        """The slots of each parameter."""
        return ()

    def scalars(self, step: Tensor) -> dict[str, Tensor]:
        """The numbers of a parameter in one step, which counts from 1: for one step, or for each of a vector.

        The step is of integers, and of f64 where a parameter is: `count_in_floats` gives the type to compute in.
        """
        return {}

    def counts_steps(self) -> bool:
        """Whether the rule depends on the number of the step."""
        return type(self).scalars is not Optimizer.scalars

    def rule(self, p: Tensor, g: Tensor, slots: Sequence[Tensor], lr: Any, shared: Mapping[str, Any]) -> Any:
        """The new parameter and its new slots, element by element."""
        raise NotImplementedError

    # What a rule calls.

    def decay(self, p: Tensor, g: Tensor, lr: Any) -> tuple[Tensor, Tensor]:
        """The parameter and the gradient with the weight decay."""
        if self.weight_decay and self.decoupled:
            return p - p * (lr * self.weight_decay), g
        return p, g + p * self.weight_decay if self.weight_decay else g

    # What a user calls.

    def init(self, params: Any) -> State:
        """The state for parameters: a module, or a pytree of float tensors.

        Raises:
            DTypeError: a parameter is not of a float type.
            ArgumentError: there is no parameter.
        """
        trained = list_trained(params)
        if not trained:
            raise ArgumentError("there is nothing to train", location=user_location(), expected="float tensors")
        state: State = {"step": full((), 0, dtype=int64)}
        for slot in self.list_slots():
            state[slot.name] = {path: full(p.shape, slot.start, dtype=wide_type(p)) for path, p in trained}
        if self.master_weights:
            state["master"] = {path: cast(p, dtype=wide_type(p)) for path, p in trained if wide_type(p) != p.dtype}
        if self.counts_steps():
            state["steps"] = full((len(trained),), 0, dtype=int64)
        return state

    def update(self, params: Any, grads: Any, state: State, lr: Any = None, good: Any = None) -> tuple[Any, State]:
        """The parameters and the state after one step.

        `grads` has the structure of `params`, with None where there is no gradient. `lr` replaces the learning rate of
        this step; it may be a value of the trace. Where the bool scalar `good` is false, nothing changes: a step whose
        gradients overflowed is left out. A compiled program does not check a learning rate that it computes or takes
        as an argument (`good=ts.isfinite(lr)` leaves its step out; `ts.train.Loop` stops there).

        Raises:
            ArgumentError: the learning rate is known, and NaN or negative, or gradients or state belong to other
                parameters; it names the path.
            ShapeError, DTypeError: a gradient has another shape or type than its parameter.
        """
        leaves, tree = flatten(params, empty=True)
        given = match_gradients(leaves, tree.list_fixed(), grads)
        check_state(self, state, given)
        before = as_tensor(state["step"])
        counts = {"step": before + 1}
        if "steps" in state:
            counts["steps"] = count_steps(state, given)
        wide = any(p.dtype == f64 for path, p in leaves if path in given)
        shared = {"lr": self.choose_rate(before, lr, wide)}
        steps = as_tensor(state["steps"]) + 1 if "steps" in state else before + 1
        steps = cast(steps, dtype=f64) if wide else steps
        if good is not None:
            shared["good"] = cast(good, dtype=f32)
            counts = {name: where(good, n, as_tensor(state[name])) for name, n in counts.items()}
        params = [(path, p) for path, p in leaves if path in given]
        given = {path: -g for path, g in given.items()} if self.maximize else given
        new = self.update_all(params, given, state, steps, shared)
        made = {**state, **counts, **{name: {**state[name], **found} for name, found in new.items() if name}}
        return tree.build(iter([new[""].get(path, p) for path, p in leaves])), made

    def rate(self, step: Any) -> Any:
        """The learning rate of a step, which counts from 0."""
        return self.lr(step) if callable(self.lr) else self.lr

    def choose_rate(self, step: Tensor, lr: Any, wide: bool) -> Any:
        """The learning rate of a step, or `lr` if given; of a schedule in f64 if a parameter is `wide`.

        Raises:
            ArgumentError: it is known, and NaN or negative.
        """
        if lr is None:
            lr = self.rate(cast(step, dtype=f64) if wide and getattr(self.lr, "takes_floats", False) else step)
        known = isinstance(lr, Tensor) and isinstance(lr.data, np.ndarray) and lr.shape == ()
        if known or not isinstance(lr, Tensor):
            number = check_number("lr", lr.item() if known else lr, 0.0)
        return lr if isinstance(lr, Tensor) else number

    def update_all(
        self,
        params: list[tuple[str, Tensor]],
        grads: dict[str, Tensor],
        state: State,
        step: Tensor,
        shared: Mapping[str, Any],
    ) -> dict[str, dict[str, Tensor]]:
        """The new parameters, under the name "", and the new slots; `step` is one for all or a vector of theirs."""
        names = [s.name for s in self.list_slots()]
        master = state.get("master", {})
        tasks = []
        for path, p in params:
            held = master.get(path, p)
            tasks.append((held, grads[path], *(state[name][path] for name in names)))
        shared, order = {**shared, **self.scalars(step)}, list_counted(state) if step.ndim else []
        places = [order.index(path) if step.ndim else 0 for path, _ in params]
        results = update_together(self._apply_rule, tasks, shared, places)
        found: dict[str, dict[str, Tensor]] = {"": {}, **{name: {} for name in names}}
        if self.master_weights:
            found["master"] = {}
        for (path, p), (new, *slots) in zip(params, results, strict=True):
            found[""][path] = cast(new, dtype=p.dtype) if new.dtype != p.dtype else new
            if path in master:
                found["master"][path] = new
            for name, value in zip(names, slots, strict=True):
                found[name][path] = value
        return found

    def _apply_rule(self, operands: Sequence[Tensor], shared: Mapping[str, Any]) -> list[Tensor]:
        """The rule in the type of the state, with the parameter rounded to its own."""
        p, g, *slots = operands
        wide = wide_type(p)
        known = {name: _as_scalar(value, wide) for name, value in shared.items()}
        lr, good = known.pop("lr"), known.pop("good", None)
        new, made = self.rule(_widen(p, wide), _widen(g, wide), slots, lr, known)
        new = _widen(new, p.dtype)
        if good is None:
            return [new, *made]
        return [where(good > 0.5, a, b) for a, b in zip((new, *made), (p, *slots), strict=True)]

    def __repr__(self) -> str:
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        return f"{type(self).__name__}(lr={self.lr}{options})"


def _as_scalar(value: Any, dtype: DType) -> Any:
    return _widen(value, dtype) if isinstance(value, Tensor) else value


def _widen(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype == dtype else cast(x, dtype=dtype)


def wide_type(p: Tensor) -> DType:
    """The type of the state of a parameter."""
    return f64 if p.dtype == f64 else f32


def count_in_floats(step: Tensor) -> Tensor:
    """The number of a step, or a vector of them, as f32; one of f64 stays."""
    return step if step.dtype == f64 else cast(step, dtype=f32)


def check_number(name: str, value: Any, least: float, below: float = math.inf) -> float:
    """An option of an optimizer.

    Raises:
        ArgumentError: it is no number, NaN, or out of its range.
    """
    value = to_python_numbers(value)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (least <= value < below or (value == least and below == least)):
        limit = "" if below == math.inf else f" and below {below}"
        raise ArgumentError(
            f"{name} is {value!r}", location=user_location(), expected=f"a number from {least} on{limit}",
            suggestion="make a state with optimizer.init(model)" if hasattr(value, "__iter__") else None,
        )  # fmt: skip
    return float(value)


def list_trained(params: Any) -> list[tuple[str, Tensor]]:
    """The trained leaves of a pytree with their paths: all but buffers and frozen parameters.

    Raises:
        DTypeError: one is not of a float type.
    """
    leaves, tree = flatten(params, empty=True)
    found = []
    for (path, leaf), fixed in zip(leaves, tree.list_fixed(), strict=True):
        if fixed:
            continue
        tensor = as_tensor(leaf)
        if not tensor.dtype.is_float:
            raise DTypeError(
                f"{path or 'the parameter'} has no float elements", location=user_location(),
                expected="floats", received=str(tensor.type),
            )  # fmt: skip
        found.append((path, tensor))
    return found


def match_gradients(leaves: list[tuple[str, Any]], fixed: list[bool], grads: Any) -> dict[str, Tensor]:
    """The gradients by path, checked against the parameters; those of buffers and frozen parameters do not count.

    Raises:
        ArgumentError: a gradient belongs to no parameter.
        ShapeError, DTypeError: one has another shape or type than its parameter.
    """
    known = dict(leaves)
    kept = {path for (path, _), keep in zip(leaves, fixed, strict=True) if keep}
    found: dict[str, Tensor] = {}
    for path, leaf in flatten(grads, empty=True)[0]:
        if path not in known:
            raise ArgumentError(
                f"there is no parameter {path!r} for a gradient", location=user_location(),
                expected=", ".join(list(known)[:8]),
            )  # fmt: skip
        if path in kept:
            continue
        g, p = as_tensor(leaf), known[path]
        if g.shape != p.shape:
            raise ShapeError(
                f"the gradient of {path or 'the parameter'} has another shape", location=user_location(),
                expected=str(p.shape), received=str(g.shape),
            )  # fmt: skip
        if not g.dtype.is_float:
            raise DTypeError(
                f"the gradient of {path or 'the parameter'} has no float elements", location=user_location(),
                received=str(g.type),
            )  # fmt: skip
        found[path] = g
    return found


def list_counted(state: Mapping[str, Any]) -> list[str]:
    """The paths of the parameters of a state, in the order of their numbers of steps."""
    return sorted({path for held in state.values() if isinstance(held, Mapping) for path in held})


def count_steps(state: Mapping[str, Any], given: Mapping[str, Any]) -> Tensor:
    """The numbers of steps that the parameters have seen after this one, in which these have gradients.

    Raises:
        ShapeError: the state has not one number for each parameter.
    """
    counts, paths = as_tensor(state["steps"]), list_counted(state)
    if counts.shape != (len(paths),):
        raise ShapeError(
            "the numbers of steps do not fit the parameters", location=user_location(), received=str(counts.shape),
            expected=f"({len(paths)},)", suggestion="state = optimizer.init(model)",
        )  # fmt: skip
    if all(path in given for path in paths):
        return counts + 1
    return counts + as_tensor(np.array([path in given for path in paths], np.int64))


def check_state(optimizer: Optimizer, state: Any, given: Mapping[str, Tensor]) -> None:
    """Check that a state is one of these parameters.

    Raises:
        ArgumentError: it lacks something; it names the path.
        ShapeError: a slot has another shape than its gradient.
    """
    name = type(optimizer).__name__
    if not isinstance(state, Mapping) or "step" not in state:
        raise ArgumentError(
            f"this is no state of {name}", location=user_location(), expected="what init returned",
            received=type(state).__name__, suggestion="state = optimizer.init(model)",
        )  # fmt: skip
    for slot in optimizer.list_slots():
        held = state.get(slot.name, {})
        for path, g in given.items():
            if path not in held:
                raise ArgumentError(
                    f"the state of {name} has no {slot.name} for {path!r}", location=user_location(),
                    expected="the state of these parameters", suggestion="state = optimizer.init(model)",
                )  # fmt: skip
            if held[path].shape != g.shape:
                raise ShapeError(
                    f"{slot.name}.{path} does not fit its parameter", location=user_location(),
                    expected=str(g.shape), received=str(held[path].shape),
                )  # fmt: skip


__all__ = ["Optimizer", "Rate", "Slot", "State", "check_number", "list_trained", "wide_type", "zeros"]
