"""Softmax over blocks that arrive one after the other (Milakov and Gimelshein 2018), for attention kernels."""

from __future__ import annotations

import math

from tessera.kernel.blocks import exp, max, maximum, sum, where
from tessera.kernel.products import product
from tessera.tensor import Tensor


def mask_causal(scores: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Scores [M, N] with minus infinity where the column lies after the row."""
    return where(cols[None, :] <= rows[:, None], scores, -math.inf)  # type: ignore[index]


def softmax_online(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - m), m and l, where m is the maximum of each row and l the sum of its exponentials.

    A row with nothing but minus infinity gives zeros.
    """
    m = max(scores, axis=-1)
    p = exp(scores - finite(m)[:, None])  # type: ignore[index]
    return p, m, sum(p, axis=-1)


def softmax_accumulate(
    acc: Tensor, m: Tensor, l: Tensor, p: Tensor, v: Tensor, m_block: Tensor, l_block: Tensor  # noqa: E741
) -> tuple[Tensor, Tensor, Tensor]:
    """The running sums acc [M, D], maxima m and weights l [M], with the block p [M, N] times v [N, D] added."""
    high = maximum(m, m_block)
    old, new = exp(m - finite(high)), exp(m_block - finite(high))
    added = product(p.to(v.dtype), v) * new[:, None]  # type: ignore[attr-defined,index]
    return acc * old[:, None] + added, high, l * old + l_block * new  # type: ignore[index,operator]


def finite(m: Tensor) -> Tensor:
    """A maximum safe to subtract: minus infinity (nothing seen yet) becomes 0."""
    return where(m == -math.inf, 0.0, m)
