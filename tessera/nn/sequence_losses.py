"""Sequence losses: connectionist temporal classification (Graves, Fernández, Gomez and Schmidhuber 2006)."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.basic import broadcast_to, cast, full
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.elementwise import equal, greater, greater_equal, less, maximum, minimum, not_equal, where
from tessera.ops.tensor.losses import apply_reduction
from tessera.ops.tensor.rearrange import pad, take_along_axis
from tessera.ops.tensor.reduce import cumsum, logsumexp, max, mean
from tessera.ops.tensor.shape import concatenate, expand_dims, gather, iota, reshape, stack
from tessera.transforms.flow.control_flow import scan

IMPOSSIBLE = -1e30  # the logarithm of a probability of 0, finite so that derivatives stay defined


@composite
def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Minus the log probability of label sequences, summed over their alignments with frames (Graves et al. 2006).

    `log_probs` is [T, N, C] or [T, C]; `targets` [N, S], [S], or all sequences in one row, without `blank`; the
    lengths are one number for each sequence. "mean" divides each loss by the length of its target first. An
    impossible alignment is infinite, and 0 with `zero_infinity`.

    >>> ctc_loss([[[-0.5, -1.0]], [[-0.5, -1.0]]], [[1]], [2], [1], reduction="sum")
    Tensor(0.54197985, f32)

    Raises:
        ShapeError: the operands do not fit.
    """
    logs, labels = as_tensor(log_probs), as_tensor(targets)
    given = [reshape(as_tensor(n), shape=(-1,)) for n in (input_lengths, target_lengths)]
    single = logs.ndim == 2
    logs = expand_dims(logs, 1) if single else logs
    fits = logs.ndim == 3 and labels.ndim in (1, 2) and _have_shape(given, (logs.shape[1],))
    if not fits or (labels.ndim == 2 and labels.shape[0] != logs.shape[1]):
        raise ShapeError(
            "the operands of ctc_loss do not fit", location=user_location(),
            expected="log_probs [T, N, C], targets [N, S], lengths [N]",
            received=", ".join(str(x.type) for x in (logs, labels, *given)),
        )  # fmt: skip
    rows = labels if labels.ndim == 2 else _split_rows(labels, given[1])
    total = _sum_alignments(logs, _insert_blanks(rows, blank), given[0], given[1], blank)
    reachable = greater(total, IMPOSSIBLE / 2)
    losses = where(reachable, -total, 0.0 if zero_infinity else math.inf)
    if reduction == "mean":
        return mean(losses / cast(maximum(given[1], 1), dtype=losses.dtype))
    return apply_reduction(reshape(losses, shape=()) if single else losses, reduction)


def _have_shape(tensors: list[Tensor], shape: tuple[Any, ...]) -> bool:
    """Whether all tensors have this shape."""
    return {t.shape for t in tensors} == {shape}


def _split_rows(labels: Tensor, lengths: Tensor) -> Tensor:
    """Sequences in one row as [N, S]; elements beyond the end of a sequence are of no account."""
    longest = labels.shape[0] if lengths.is_traced else int(lengths.numpy().max(initial=0))
    start = cumsum(lengths, axis=0) - lengths
    place = expand_dims(start, -1) + iota(shape=(longest,))
    return gather(labels, minimum(place, labels.shape[0] - 1), axis=0)


def _insert_blanks(rows: Tensor, blank: int) -> Tensor:
    """[N, S] as [N, 2S + 1] with a blank before, between and after the labels."""
    gaps = full(shape=rows.shape, value=blank, dtype=rows.dtype)
    pairs = reshape(stack([gaps, rows], axis=-1), shape=(rows.shape[0], 2 * rows.shape[1]))
    return concatenate([pairs, full(shape=(rows.shape[0], 1), value=blank, dtype=rows.dtype)], axis=1)


def _sum_alignments(logs: Tensor, path: Tensor, frames: Tensor, sizes: Tensor, blank: int) -> Tensor:
    """The forward algorithm: the log probability of each sequence, by one step for each frame."""
    length, states = logs.shape[0], path.shape[1]
    scores = take_along_axis(logs, broadcast_to(path, shape=(length, *path.shape)), axis=-1)
    before = pad(path, ((0, 0), (2, 0)), blank)[:, :states]
    skips = not_equal(path, blank) & not_equal(path, before)
    first = where(less(iota(shape=(states,)), 2), scores[0], IMPOSSIBLE)
    alpha = maximum(first, IMPOSSIBLE)

    def take_frame(alpha: Tensor, frame: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        number, score = frame
        one, two = (pad(alpha, ((0, 0), (n, 0)), IMPOSSIBLE)[:, :states] for n in (1, 2))
        ways = stack([alpha, one, where(skips, two, IMPOSSIBLE)], axis=0)
        moved = maximum(logsumexp(ways, axis=0) + score, IMPOSSIBLE)
        # No rounding error of the large number remains: what nothing reaches stays exactly impossible.
        moved = where(greater(max(ways, axis=0), IMPOSSIBLE / 2), moved, IMPOSSIBLE)
        return where(expand_dims(less(number, frames), -1), moved, alpha), None

    alpha, _ = scan(take_frame, alpha, (iota(shape=(length,))[1:], scores[1:]))
    last = expand_dims(sizes * 2, -1)
    place = iota(shape=(states,), dtype=last.dtype)
    ends = equal(place, last) | (equal(place, last - 1) & greater_equal(last, 1))
    return logsumexp(where(ends, alpha, IMPOSSIBLE), axis=-1)
