"""Adafactor (Shazeer and Stern 2018): second moments of a matrix as the product of those of its rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tessera.core.types import f32, f64
from tessera.ir.tensor import Tensor
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import exp, log, maximum, minimum, rsqrt, sqrt, where
from tessera.ops.tensor.reduce import mean
from tessera.optim.optimizer import Optimizer, Rate, Slot, State, check_number, list_counted, list_trained, wide_type

EPSILON = {f32: 2.0**-23, f64: 2.0**-52}


class Adafactor(Optimizer):
    """Adafactor with the formulas and defaults of `torch.optim.Adafactor`.

    Parameters of two axes and more keep the mean squares of rows and columns of their gradients, others those of all
    elements. Steps are relative to the root mean square of the parameter.

    >>> Adafactor().lr
    0.01

    Raises:
        ArgumentError: an option is out of range.
    """

    decoupled = True

    def __init__(
        self, lr: Rate = 1e-2, beta2_decay: float = -0.8, eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0, weight_decay: float = 0.0, master_weights: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, master_weights, maximize, beta2_decay=beta2_decay, d=d, weight_decay=weight_decay)
        self.beta2_decay = check_number("beta2_decay", beta2_decay, -math.inf, 1e-30)
        self.eps = (
            None if eps[0] is None else check_number("eps[0]", eps[0], 0.0),
            check_number("eps[1]", eps[1], 0.0),
        )
        self.d = check_number("d", d, 1.0)
        self.weight_decay = check_number("weight_decay", weight_decay, 0.0)

    def init(self, params: Any) -> State:
        """The state for parameters."""
        state = super().init(params)
        trained = list_trained(params)
        wide = {path: wide_type(p) for path, p in trained}
        rows = {path: zeros((*p.shape[:-1], 1), dtype=wide[path]) for path, p in trained if p.ndim > 1}
        columns = {path: zeros((*p.shape[:-2], 1, p.shape[-1]), dtype=wide[path]) for path, p in trained if p.ndim > 1}
        whole = {path: zeros(p.shape, dtype=wide[path]) for path, p in trained if p.ndim < 2}
        return {**state, "row": rows, "column": columns, "square": whole}

    def counts_steps(self) -> bool:
        """It does."""
        return True

    def list_slots(self) -> tuple[Slot, ...]:
        """None: they have other shapes than the parameters."""
        return ()

    def update_all(
        self, params: list[tuple[str, Tensor]], grads: dict[str, Tensor], state: State, step: Tensor,
        shared: Mapping[str, Any],
    ) -> dict[str, dict[str, Tensor]]:  # fmt: skip
        """The new parameters, and the new mean squares."""
        found: dict[str, dict[str, Tensor]] = {"": {}, "row": {}, "column": {}, "square": {}}
        master, order = state.get("master", {}), list_counted(state)
        if self.master_weights:
            found["master"] = {}
        for path, p in params:
            held, wide = master.get(path, p), wide_type(p)
            old = {name: state[name][path] for name in ("row", "column", "square") if path in state[name]}
            before = cast(held, dtype=wide)
            count = step[order.index(path)] if step.ndim else step
            new, made = self._step(before, cast(grads[path], dtype=wide), old, count, shared["lr"])
            if (good := shared.get("good")) is not None:
                new = where(good > 0.5, new, before)
                made = {name: where(good > 0.5, x, old[name]) for name, x in made.items()}
            found[""][path] = cast(new, dtype=p.dtype)
            for name, x in made.items():
                found[name][path] = x
            if path in master:
                found["master"][path] = new
        return found

    def _step(
        self, p: Tensor, g: Tensor, old: dict[str, Tensor], step: Tensor, lr: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        least = EPSILON[p.dtype] if self.eps[0] is None else self.eps[0]
        t = cast(step, dtype=p.dtype)
        share = exp(log(t) * self.beta2_decay)
        rate = minimum(cast(lr, dtype=p.dtype) if isinstance(lr, Tensor) else lr, rsqrt(t))
        alpha = maximum(sqrt(mean(p * p)), self.eps[1]) * rate
        p, g = self.decay(p, g, lr)
        squares = g * g
        if p.ndim > 1:
            row = old["row"] + (mean(squares, axis=-1, keepdims=True) - old["row"]) * share
            column = old["column"] + (mean(squares, axis=-2, keepdims=True) - old["column"]) * share
            spread = row * column / maximum(mean(row, axis=-2, keepdims=True), least)
            made = {"row": row, "column": column}
        else:
            spread = old["square"] + (squares - old["square"]) * share
            made = {"square": spread}
        move = g * rsqrt(maximum(spread, least * least))
        size = maximum(sqrt(mean(move * move)) / self.d, 1.0)
        return p - move * (alpha / size), made
