"""L-BFGS (Nocedal 1980; Liu and Nocedal 1989): steps by an inverse Hessian estimated from earlier gradients."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import f32, f64, int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.linear import check_count
from tessera.ops.api.creation import full, zeros
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import abs, bitwise_and, equal, greater, minimum, where
from tessera.ops.tensor.reduce import max, sum
from tessera.ops.tensor.shape import concatenate, expand_dims, reshape
from tessera.optim.optimizer import (
    SUGGESTIONS,
    Optimizer,
    Rate,
    State,
    check_number,
    check_state,
    list_trained,
    match_gradients,
)
from tessera.transforms.flow.control_flow import scan

LEAST_CURVATURE = 1e-10  # PyTorch's: a pair of steps and gradients with less is not kept
_ONE = "call update once for each iteration: PyTorch's step(closure) with max_iter=1"
_OTHERS = {
    "max_iter": _ONE, "max_eval": _ONE,
    "line_search_fn": "leave it out: each update is a step of length lr; choose lr, or a schedule",
}  # fmt: skip


class LBFGS(Optimizer):
    """L-BFGS: one iteration for each `update`, as PyTorch's with `max_iter=1` and without a line search.

    The state holds the last `history_size` steps and differences of gradients of all parameters as one vector.

    >>> optimizer, x = LBFGS(lr=1.0), [Tensor([4.0])]
    >>> state = optimizer.init(x)
    >>> for _ in range(4):
    ...     x, state = optimizer.update(x, [2.0 * x[0]], state)
    >>> bool(abs(x[0].item()) < 1e-6)
    True

    Raises:
        ArgumentError: an option is out of range, or one of a line search.
    """

    suggestions = {**SUGGESTIONS, **_OTHERS}

    def __init__(
        self, lr: Rate = 1.0, tolerance_grad: float = 1e-7, tolerance_change: float = 1e-9, history_size: int = 100, *,
        maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, False, maximize, history_size=history_size)
        self.tolerance_grad = check_number("tolerance_grad", tolerance_grad, 0.0)
        self.tolerance_change = check_number("tolerance_change", tolerance_change, 0.0)
        self.history_size = check_count("history_size", history_size)

    def init(self, params: Any) -> State:
        """The state for parameters: a module, or a pytree of float tensors."""
        trained = list_trained(params)
        state = super().init(params)
        dtype = f64 if any(p.dtype == f64 for _, p in trained) else f32
        size = _count(trained)
        rows = (self.history_size, size)
        return {
            **state, "iterations": full((), 0, dtype=int64), "gradient": zeros((size,), dtype=dtype),
            "move": zeros((size,), dtype=dtype), "scale": full((), 1.0, dtype=dtype),
            "moves": zeros(rows, dtype=dtype), "changes": zeros(rows, dtype=dtype),
            "inverses": zeros(rows[:1], dtype=dtype),
        }  # fmt: skip

    def update(self, params: Any, grads: Any, state: State, lr: Any = None, good: Any = None) -> tuple[Any, State]:
        """The parameters and the state after one iteration; as `Optimizer.update`. A gradient of None counts as 0.

        Nothing changes where no element of the gradient is above `tolerance_grad`, and the parameters stay where the
        step would not go down by `tolerance_change`.
        """
        leaves, tree = flatten(params, empty=True)
        given = match_gradients(leaves, tree.list_fixed(), grads)
        check_state(self, state, given)
        if "moves" not in state:
            raise ArgumentError("this is no state of LBFGS", location=user_location(), expected="what init returned",
                                suggestion="state = optimizer.init(model)")  # fmt: skip
        trained = list_trained(params)
        g = _join(trained, given, state)
        g = -g if self.maximize else g
        rate = self.choose_rate(as_tensor(state["step"]), lr, g.dtype == f64)
        made = self._find_move(g, state)
        first = equal(state["iterations"], 0)
        size = where(first, minimum(1.0 / sum(abs(g)), 1.0), 1.0) * rate
        goes = greater(-self.tolerance_change - sum(g * made["move"]), 0.0)
        move = where(goes, made["move"] * cast(size, dtype=g.dtype), 0.0)
        works = greater(max(abs(g)), self.tolerance_grad)
        works = works if good is None else bitwise_and(works, good)
        made |= {"gradient": g, "move": move, "iterations": state["iterations"] + 1}
        kept = {name: where(works, x, as_tensor(state[name])) for name, x in made.items()}
        step = state["step"] + 1 if good is None else where(good, state["step"] + 1, state["step"])
        new = _split(trained, where(works, move, 0.0))
        return tree.build(iter([new.get(path, p) for path, p in leaves])), {**state, **kept, "step": step}

    def _find_move(self, g: Tensor, state: State) -> dict[str, Tensor]:
        """The direction of a step, and the pairs of the history with the newest; `state["move"]` is the last step."""
        change, scale = g - state["gradient"], state["scale"]
        curvature = sum(change * state["move"])
        use = bitwise_and(greater(curvature, LEAST_CURVATURE), greater(state["iterations"], 0))
        safe = where(use, curvature, 1.0)
        added = {"moves": state["move"], "changes": change, "inverses": 1.0 / safe}
        kept = {n: where(use, _push(state[n], x), state[n]) for n, x in added.items()}
        scale = where(use, curvature / where(use, sum(change * change), 1.0), scale)
        pairs = kept["moves"], kept["changes"], kept["inverses"]

        def descend(q: Tensor, pair: Any) -> tuple[Tensor, Tensor]:
            move, change, inverse = pair  # rows that are not in use are zeros
            share = sum(move * q) * inverse
            return q - change * share, share

        def ascend(r: Tensor, pair: Any) -> tuple[Tensor, Tensor]:
            move, change, inverse, share = pair
            back = sum(change * r) * inverse
            return r + move * (share - back), back

        q, shares = scan(descend, -g, pairs, reverse=True)
        r, _ = scan(ascend, q * scale, (*pairs, shares))
        return {**kept, "scale": scale, "move": r}


def _count(trained: list[tuple[str, Tensor]]) -> int:
    """The number of elements of parameters."""
    total = 0
    for _, p in trained:
        total += math.prod(p.shape)
    return total


def _push(rows: Tensor, new: Tensor) -> Tensor:
    """A history with its oldest row left out and a new one at the end."""
    return concatenate([rows[1:], expand_dims(new, 0)], axis=0)


def _join(trained: list[tuple[str, Tensor]], given: dict[str, Tensor], state: State) -> Tensor:
    """All gradients as one vector, with zeros where there is none.

    Raises:
        ShapeError: the state is one of other parameters.
    """
    dtype = as_tensor(state["gradient"]).dtype
    held = [given.get(path, zeros(p.shape, dtype=dtype)) for path, p in trained]
    parts = [reshape(cast(g, dtype=dtype), shape=(-1,)) for g in held]
    joined = concatenate(parts, axis=0)
    if joined.shape != state["gradient"].shape:
        raise ShapeError(
            "the state of LBFGS is one of other parameters", location=user_location(),
            expected=f"{joined.shape[0]} elements", received=str(state["gradient"].shape),
            suggestion="state = optimizer.init(model)",
        )  # fmt: skip
    return joined


def _split(trained: list[tuple[str, Tensor]], move: Tensor) -> dict[str, Tensor]:
    """The parameters after a step, each in its type."""
    found, at = {}, 0
    for path, p in trained:
        size = math.prod(p.shape)
        part = reshape(move[at : at + size], shape=p.shape)
        found[path] = cast(cast(p, dtype=move.dtype) + part, dtype=p.dtype)
        at += size
    return found
