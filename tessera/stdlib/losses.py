"""Cross entropy of logits with its gradient: two passes over the logits, without a softmax in memory."""

# mypy: disable-error-code="operator, attr-defined, index"

import math
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, library_caller_location
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile
from tessera.frontend.kernel.tile_api.online_softmax import finite_maximum
from tessera.stdlib.deterministic_reductions import tree_sum
from tessera.stdlib.normalisation import load_block
from tessera.stdlib.routine import ceil_div, check_array, check_shape, compute_dtype, routine

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
    logits, targets = check_array(logits, "logits"), check_array(targets, "targets", "i").astype(np.int64, copy=False)
    _check_labels(logits, targets, reduction, ignore_index)
    state = np.float64 if logits.dtype == np.float64 else np.float32
    counted = max(int((targets != ignore_index).sum()), 1) if reduction == "mean" else 1
    losses, grad = np.zeros(len(logits), state), np.zeros_like(logits) if gradient else None
    if logits.size:
        grid = lambda constants: (ceil_div(len(logits), constants["BM"]),)  # noqa: E731
        kernel[grid](logits, targets, np.array([1 / counted], state), losses, grad, ignore=int(ignore_index))
    loss = losses if reduction == "none" else state(tree_sum(losses) / counted)
    return (loss, grad) if gradient else loss


def _check_labels(logits: np.ndarray, targets: np.ndarray, reduction: str, ignore: int) -> None:
    if reduction not in REDUCTIONS:
        raise ArgumentError(
            f'"{reduction}" is not a reduction', location=library_caller_location(), expected=", ".join(REDUCTIONS)
        )
    check_shape(logits, "logits", (len(targets), *logits.shape[1:2]))
    check_shape(targets, "targets", logits.shape[:1])
    wrong = (targets != ignore) & ((targets < 0) | (targets >= logits.shape[1]))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ArgumentError(
            f"the target of row {row} is no class", location=library_caller_location(),
            expected=f"0 to {logits.shape[1] - 1}, or {ignore} to ignore the row", received=int(targets[row]),
        )  # fmt: skip
