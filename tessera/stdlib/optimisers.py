"""Fused optimisers: Adam and AdamW in one pass over the parameters (Kingma and Ba 2015; Loshchilov and Hutter 2019)."""

# mypy: disable-error-code="operator, attr-defined, index"

from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, TraceError, library_caller_location
from tessera.core.symbolic_dim import ceil_divide
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile
from tessera.stdlib.routine import check_array, check_same_dtype, check_shape, is_recorded, routine


@kernel
def adam_step(param, grad, m, v, rates, *, eps: float, decoupled: bool, BLOCK: int = 4096):
    """One step on flat arrays, on the grid (ceil(N / BLOCK),); param, m and v are written.

    `rates` is [lr, beta1, beta2, decay, 1 - beta1^t, 1 - beta2^t], f32 or f64 like the computation.
    """
    i, dtype = tile.program_id(0) * BLOCK, m.dtype
    lr, beta1, beta2, decay, correction1, correction2 = (rates[n] for n in range(6))
    p = tile.cast(tile.load(param[i : i + BLOCK], edge="clip"), dtype)
    g = tile.cast(tile.load(grad[i : i + BLOCK], edge="clip"), dtype)
    if not decoupled:
        g = g + decay * p
    first = beta1 * tile.load(m[i : i + BLOCK], edge="clip") + (1.0 - beta1) * g
    second = beta2 * tile.load(v[i : i + BLOCK], edge="clip") + (1.0 - beta2) * g * g
    step = (first / correction1) / (tile.sqrt(second / correction2) + eps)
    if decoupled:
        p = p - lr * decay * p
    tile.store(param[i : i + BLOCK], tile.cast(p - lr * step, param.dtype), edge="clip")
    tile.store(m[i : i + BLOCK], first, edge="clip")
    tile.store(v[i : i + BLOCK], second, edge="clip")


@routine(adam_step)
def fused_adam(
    kernel: Any, param: Any, grad: Any, m: Any, v: Any, *, step: int, lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, decoupled: bool = True,
) -> None:  # fmt: skip
    """One step of Adam: writes `param`, and the moments `m` and `v`, in place.

    All are arrays of one shape; `grad` has the float type of `param`, `m` and `v` are f32 (f64 where
    `param` is). `step` counts from 1. With mt = beta1 m + (1 - beta1) g and vt = beta2 v + (1 - beta2) g²,
    param -= lr · (mt / (1 - beta1^step)) / (sqrt(vt / (1 - beta2^step)) + eps). Weight decay shrinks `param`
    by lr · weight_decay first (AdamW) or, not `decoupled`, is added to the gradient.

    Raises:
        ArgumentError: `step` is less than 1, or an array is not contiguous or cannot be written.
        DTypeError, ShapeError: the arrays do not fit together.
        TraceError: an argument is a value of a program being traced.

    >>> p, m, v = np.array([1.0, 2.0], np.float32), np.zeros(2, np.float32), np.zeros(2, np.float32)
    >>> fused_adam(p, np.array([0.5, -4.0], np.float32), m, v, step=1, lr=0.125)
    >>> print(p.round(3))
    [0.875 2.125]
    """
    if step < 1:
        raise ArgumentError(
            f"step={step} is no step", location=library_caller_location(), expected="1 for the first step"
        )
    if any(is_recorded(a) for a in (param, grad, m, v)):
        raise TraceError(
            "fused_adam writes its arguments, which a traced function cannot do", location=library_caller_location(),
            expected="arrays", suggestion="ts.launch(tessera.stdlib.fused_adam.kernel, ...) returns the new memory",
        )  # fmt: skip
    param, grad, m, v = (check_array(a, n) for a, n in ((param, "param"), (grad, "grad"), (m, "m"), (v, "v")))
    check_same_dtype(param=param, grad=grad)
    state = np.dtype(np.float64) if param.dtype == np.float64 else np.dtype(np.float32)
    check_same_dtype(**{"the state": np.empty(0, state), "m": m, "v": v})
    for name, each in (("grad", grad), ("m", m), ("v", v)):
        check_shape(each, name, param.shape)
    if not param.size:
        return
    rates = np.array([lr, *betas, weight_decay, *(1.0 - b**step for b in betas)], state)
    flat = [_flatten_writable(a, n) for a, n in ((param, "param"), (grad, "grad"), (m, "m"), (v, "v"))]
    grid = lambda constants: (ceil_divide(param.size, constants["BLOCK"]),)  # noqa: E731
    kernel[grid](*flat, rates, eps=float(eps), decoupled=bool(decoupled))


def _flatten_writable(x: np.ndarray, name: str) -> np.ndarray:
    """A writable flat view of an array."""
    if name == "grad":
        return x.reshape(-1)
    if not (x.flags.c_contiguous and x.flags.writeable):
        raise ArgumentError(
            f"`{name}` is written in place, but its memory is not contiguous or read-only",
            location=library_caller_location(),
            suggestion="np.ascontiguousarray makes a copy that can be written",
        )
    return x.reshape(-1)
