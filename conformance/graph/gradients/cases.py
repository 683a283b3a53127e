"""Derivatives as programs: the output of transforms runs on every engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.inputs import tensor
from tessera.frontend.jit.tracing import Jit


def network(w: Any, x: Any) -> Any:
    """Two layers and a mean."""
    return (ts.tanh(ts.relu(x @ w) @ w.T) ** 2).mean()


def attention(w: Any, x: Any) -> Any:
    """Self-attention."""
    return (ts.scaled_dot_product_attention(x @ w, x, x, causal=True) * x).sum()


def grouped_attention(w: Any, x: Any) -> Any:
    """Grouped queries with a window and capped scores: two heads of queries for one of keys."""
    q = ts.stack([x @ w, x * 0.5])
    return (ts.scaled_dot_product_attention(q, x[None], x[None], causal=True, window=5, softcap=2.0) * q).sum()


def norms(w: Any, x: Any) -> Any:
    """Both norms and an activation."""
    return (ts.layer_norm(x) * ts.gelu(ts.rms_norm(x))).sum() + w.sum()


def recurrent(w: Any, x: Any) -> Any:
    """Reverse mode through a loop."""
    return ts.scan(lambda s, y: (ts.tanh(s @ w + y), None), x[0], x)[0].sum()


def kept(w: Any, x: Any) -> Any:
    """A checkpoint: recomputation in the backward pass."""
    return ts.checkpoint(lambda a, b: ts.sin(a @ b))(x, w).sum()


def gathered(w: Any, x: Any) -> Any:
    """Rows that are read repeatedly: their cotangents are summed."""
    places = ts.Tensor([3, 0, 3, 5, 3, 1, 0, 2] * 8)
    return (ts.gather(w, places, axis=0) ** 2).sum() + x.sum()


def smooth(x: Any, y: Any) -> Any:
    """Functions that are smooth at zeros and ties, where their lowerings are not."""
    of_one = ts.sinh(x) + ts.cosh(x) + ts.asinh(x) + ts.softplus(x) + ts.elu(x) + ts.silu(x) + ts.gelu(x)
    of_two = ts.atan2(x, y) + ts.hypot(x, y) + ts.logaddexp(x, y)
    return (of_one + of_two).sum() + ts.huber_loss(x, y) + ts.binary_cross_entropy_with_logits(x, y)


ZEROS_AND_TIES = np.array([[0.0, 2.0], [1.0, 1.0], [-3.0, -3.0], [2.0, -2.0], [0.5, 3.0]], np.float32).T


PROGRAMS = (network, attention, grouped_attention, norms, recurrent, kept, gathered)


def cases() -> Iterator[Case]:
    """Gradients, a Jacobian-vector product, a batch of gradients and a Hessian."""
    for program in PROGRAMS:
        name = f"graph/gradients/{program.__name__}"
        w, x = tensor(f"{name} w", (8, 8), "f32", -0.5, 0.5), tensor(f"{name} x", (6, 8), "f32")
        yield Case(name, lambda p=program, w=w, x=x: (Jit(ts.grad(p, argnums=(0, 1))), (w, x)))  # type: ignore[misc]
    w, x = tensor("gradients w", (4, 4), "f32", -0.5, 0.5), tensor("gradients x", (3, 4), "f32")
    yield Case("graph/gradients/jvp", lambda: (Jit(lambda w, x: ts.jvp(network, (w, x), (w, x))[1]), (w, x)))
    yield Case("graph/gradients/vmap", lambda: (Jit(ts.per_example_grad(lambda w, x: network(w, x[None]))), (w, x)))
    yield Case("graph/gradients/hessian", lambda: (Jit(ts.hessian(lambda x: ts.exp(x @ x.T).sum())), (x,)))
    a, b = ZEROS_AND_TIES.copy()
    yield Case("graph/gradients/zeros-and-ties", lambda: (Jit(ts.grad(smooth, argnums=(0, 1))), (a, b)))
    slope = ts.grad(smooth)
    yield Case(
        "graph/gradients/curvature", lambda: (Jit(lambda x, y: ts.jvp(slope, (x, y), (x * 0 + 1, y))[1]), (a, b))
    )
