"""Cross entropy of logits with its gradient: two passes over the logits, without a softmax in memory."""

# mypy: disable-error-code="operator, attr-defined, index"

import math
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, library_caller_location
from tessera.core.symbolic_dim import ceil_divide
from tessera.core.types import TensorType, as_dtype, int64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.frontend.kernel.tile_api.online_softmax import finite_maximum
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.elementwise import maximum
from tessera.stdlib.deterministic_reductions import tree_sum
from tessera.stdlib.normalisation import load_block
from tessera.stdlib.routine import check_array, check_shape, compute_dtype, is_recorded, routine

REDUCTIONS = ("mean", "sum", "none")


@kernel
def entropy_rows(logits, targets, scale, losses, grad, *, ignore: int, BM: int = 8, BN: int = 1024):
    """losses = logsumexp(logits) - logits[target] for each row, on the grid (ceil(N / BM),).

    logits is [N, V], targets [N] of integers, losses [N] of f32 (f64 for f64), scale [1] like losses. Unless
    grad [N, V] is None, it is set to (softmax - one-hot) · scale. Rows with the target `ignore` give zeros.
    """
    V = logits.shape[1]
    first, dtype = tile.program_id(0) * BM, compute_dtype(logits.dtype)
    target = tile.load(targets[first : first + BM], edge="clip")
    used = target != ignore
    m, l = tile.full((BM,), -math.inf, dtype), tile.zeros((BM,), dtype)
    picked = tile.zeros((BM,), dtype)
    for start in tile.range(0, V, BN):
        cols = start + tile.arange(0, BN)
        values = tile.where((cols < V)[None, :], load_block(logits, first, start, BM, BN, dtype), -math.inf)
        high = tile.maximum(m, tile.max(values, axis=1))
        l = l * tile.exp(m - finite_maximum(high)) + tile.sum(tile.exp(values - finite_maximum(high)[:, None]), axis=1)
        m = high
        picked += tile.sum(tile.where(cols[None, :] == target[:, None], values, 0.0), axis=1)
    total = m + tile.log(l)
    tile.store(losses[first : first + BM], tile.where(used, total - picked, 0.0), edge="clip")
    if grad is not None:
        for start in tile.range(0, V, BN):
            cols = start + tile.arange(0, BN)
            p = tile.exp(load_block(logits, first, start, BM, BN, dtype) - total[:, None])
            hot = tile.where(cols[None, :] == target[:, None], 1.0, 0.0)
            d = tile.where(used[:, None], (p - tile.cast(hot, dtype)) * scale[0], 0.0)
            tile.store(grad[first : first + BM, start : start + BN], tile.cast(d, grad.dtype), edge="clip")


@routine(entropy_rows)
def cross_entropy(
    kernel: Any, logits: Any, targets: Any, *, reduction: str = "mean", ignore_index: int = -100, gradient: bool = False
) -> Any:
    """-log softmax(logits)[target] for logits [N, V] of a float type and integer targets [N].

    `reduction` is "mean" (over rows not ignored; 0 where all are), "sum" or "none" (the losses [N]); losses are f32
    (f64 for f64), summed by `tree_sum`. Rows with the target `ignore_index` are ignored. With `gradient` the
    result is (loss, gradient): the derivative of the loss (of their sum, for "none") by the logits, of their type.

    Raises:
        ArgumentError: the reduction is unknown, or a target is out of range.
        DTypeError, ShapeError: the arrays do not fit.

    >>> loss, grad = cross_entropy(np.zeros((1, 2), np.float32), np.array([0]), gradient=True)
    >>> print(round(float(loss), 4), grad)
    0.6931 [[-0.5  0.5]]
    """
    logits, targets = check_array(logits, "logits"), check_array(targets, "targets", "i")
    _check_labels(logits, targets, reduction, ignore_index)
    state, rows = compute_dtype(as_dtype(logits.dtype)), logits.shape[0]
    labels = targets.to(int64) if isinstance(targets, Tensor) else targets.astype(np.int64, copy=False)
    used = as_tensor(labels != ignore_index)
    counted = maximum(used.to(state).sum(), 1.0) if reduction == "mean" else as_tensor(1.0).to(state)
    losses, *grads = _launch_entropy(kernel, logits, labels, (1.0 / counted).reshape((1,)), gradient, ignore_index)
    if reduction != "none":
        losses = as_tensor(tree_sum(losses)) / counted if rows else zeros((), dtype=state)
    return (losses, *grads) if gradient else losses


def _launch_entropy(kernel: Any, logits: Any, labels: Any, scale: Any, gradient: bool, ignore: int) -> Any:
    """The losses and, if asked for, the gradient; zeros where there are no logits."""
    rows, state = logits.shape[0], scale.dtype
    if 0 in logits.shape:
        return (zeros((rows,), dtype=state), *([zeros(logits.shape, dtype=as_dtype(logits.dtype))] if gradient else []))
    grid = lambda constants: (ceil_divide(rows, constants["BM"]),)  # noqa: E731
    losses = OutputMemory(TensorType((rows,), state))
    grad = OutputMemory(TensorType(logits.shape, as_dtype(logits.dtype))) if gradient else None
    found = launch(kernel, grid, logits, labels, scale, losses, grad, ignore=int(ignore))
    return found if gradient else (found,)


def _check_labels(logits: Any, targets: Any, reduction: str, ignore: int) -> None:
    if reduction not in REDUCTIONS:
        raise ArgumentError(
            f'"{reduction}" is not a reduction', location=library_caller_location(), expected=", ".join(REDUCTIONS)
        )
    check_shape(logits, "logits", (targets.shape[0], *logits.shape[1:2]))
    check_shape(targets, "targets", logits.shape[:1])
    if is_recorded(targets):  # the values are not known yet
        return
    wrong = (targets != ignore) & ((targets < 0) | (targets >= logits.shape[1]))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ArgumentError(
            f"the target of row {row} is no class", location=library_caller_location(),
            expected=f"0 to {logits.shape[1] - 1}, or {ignore} to ignore the row", received=int(targets[row]),
        )  # fmt: skip
