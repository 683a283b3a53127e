"""Routing of tokens to the experts of one program: `@ts.expert_parallel` and `all_to_all` between batch and experts.

The numbers of tokens are computed, so that the function runs op by op. `ts.dist.expert_parallel` with a capacity is the
form for experts on the ranks of a mesh, and for compiled functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, OutOfBoundsError, ShapeError, TraceError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.contractions import einsum
from tessera.ops.tensor.shape import concatenate, reshape
from tessera.ops.tensor.sorting import take

AXES = ("batch", "expert")


class _Routing:
    """The experts of a function, and where its tokens went."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.experts: np.ndarray | None = None  # [tokens, choices]


_ROUTING: ContextVar[_Routing | None] = ContextVar("routing", default=None)


def route_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator `ts.expert_parallel`: the experts are those of the first argument, `self.experts`.

    Raises:
        ArgumentError: it has no experts.
    """

    @functools.wraps(function)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        experts = getattr(self, "experts", None)
        if experts is None or not len(experts):
            raise ArgumentError(
                f"{type(self).__name__} has no experts", location=user_location(),
                expected="self.experts, a list of modules or functions",
            )  # fmt: skip
        token = _ROUTING.set(_Routing(len(experts)))
        try:
            return function(self, *args, **named)
        finally:
            _ROUTING.reset(token)

    return call


def exchange_tokens(x: Any, routing: Any, src_axis: str, dst_axis: str) -> Any:
    """Tokens to experts, from "batch" to "expert", or back.

    To experts: `x` [T, ...] and `routing` [T] or [T, choices], the experts of each token, give a list with the tokens
    of each expert. Back: the list of results and `routing`, weights of the shape of the experts, give the weighted sum
    of the results of each token.

    Raises:
        ArgumentError: the axes are no such pair, or there is no function that `ts.expert_parallel` decorates around.
        ShapeError: the routing does not fit the tokens.
        OutOfBoundsError: there is no such expert.
        TraceError: the experts of the tokens are traced.
    """
    found = _ROUTING.get()
    if found is None or (src_axis, dst_axis) not in (AXES, AXES[::-1]):
        raise ArgumentError(
            "tokens travel between batch and experts" if found else "this all_to_all has no experts",
            location=user_location(), received=f"src_axis={src_axis!r}, dst_axis={dst_axis!r}",
            expected='src_axis="batch", dst_axis="expert", or the reverse, in a function that @ts.expert_parallel '
            "decorates",
        )  # fmt: skip
    routing = as_tensor(routing)
    return _dispatch(found, as_tensor(x), routing) if src_axis == AXES[0] else _combine(found, x, routing)


def _dispatch(found: _Routing, x: Tensor, indices: Tensor) -> list[Tensor]:
    if indices.is_traced:
        raise TraceError(
            "the numbers of tokens of each expert are not known in a trace", location=user_location(),
            suggestion="ts.dist.expert_parallel(x, gates, experts, capacity)",
        )  # fmt: skip
    if not x.ndim or indices.ndim not in (1, 2) or indices.shape[0] != x.shape[0] or indices.dtype.is_float:
        raise ShapeError(
            "the experts do not fit the tokens", location=user_location(),
            expected=f"integers of shape [{x.shape[0] if x.ndim else 'T'}] or with a second axis of choices",
            received=str(indices.type),
        )  # fmt: skip
    experts = indices.numpy().reshape(len(indices.numpy()), -1).astype(np.int64)
    if experts.size and not 0 <= experts.min() <= experts.max() < found.count:
        raise OutOfBoundsError(
            "there is no such expert", location=user_location(), expected=f"0 to {found.count - 1}",
            received=f"{experts.min()} to {experts.max()}",
        )  # fmt: skip
    found.experts = experts
    return [take(x, Tensor(np.nonzero(experts == e)[0]), axis=0) for e in range(found.count)]


def _combine(found: _Routing, outputs: Sequence[Any], weights: Tensor) -> Tensor:
    experts = found.experts
    if experts is None or len(outputs) != found.count or weights.size != experts.size:
        raise ShapeError(
            "the results do not fit the tokens that went to experts", location=user_location(),
            expected="a result of each expert, and a weight for each choice of a token",
            received=f"{len(outputs)} results, weights {weights.type}",
        )  # fmt: skip
    results = [as_tensor(y) for y in outputs]
    counts = [int((experts == e).sum()) for e in range(found.count)]
    if any(not y.ndim or y.shape[0] != n for y, n in zip(results, counts, strict=True)):
        raise ShapeError(
            "an expert gave another number of results than it got tokens", location=user_location(),
            expected=str(counts), received=str([tuple(y.shape) for y in results]),
        )  # fmt: skip
    order = np.argsort(experts.ravel(), kind="stable")  # experts in order, tokens in order within each
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    rows = take(concatenate(results, axis=0), Tensor(place), axis=0)
    shape = tuple(int(n) for n in rows.shape[1:])
    parts = reshape(rows, shape=(*experts.shape, int(np.prod(shape))))
    total = einsum("tkd,tk->td", parts, reshape(weights, shape=experts.shape))
    return reshape(total, shape=(experts.shape[0], *shape))
