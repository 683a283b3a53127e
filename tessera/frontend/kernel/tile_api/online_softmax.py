"""Online softmax: softmax over a sequence of blocks (Milakov and Gimelshein 2018), for attention kernels."""

from __future__ import annotations

import math
from typing import Any

from tessera.frontend.kernel.tile_api.blocks import max
from tessera.frontend.kernel.tile_api.matrix import matrix_product
from tessera.ops.tensor.elementwise import exp, maximum, where
from tessera.ops.tensor.reduce import sum


def mask_causal(scores: Any, rows: Any, cols: Any) -> Any:
    """Scores [M, N] with minus infinity where the column lies after the row."""
    return where(cols[None, :] <= rows[:, None], scores, -math.inf)


def softmax_online(scores: Any) -> tuple[Any, Any, Any]:
    """exp(scores - m), m and l, where m is the maximum of each row and l the sum of its exponentials.

    A row with nothing but minus infinity gives zeros.
    """
    m = max(scores, axis=-1)
    p = exp(scores - finite_maximum(m)[:, None])
    return p, m, sum(p, axis=-1)


def softmax_accumulate(acc: Any, m: Any, l: Any, p: Any, v: Any, m_block: Any, l_block: Any) -> tuple[Any, Any, Any]:
    """The running sums acc [M, D], maxima m and weights l [M], with the block p [M, N] times v [N, D] added."""
    high = maximum(m, m_block)
    old, new = exp(m - finite_maximum(high)), exp(m_block - finite_maximum(high))
    added = matrix_product(p.to(v.dtype), v) * new[:, None]
    return acc * old[:, None] + added, high, l * old + l_block * new


def finite_maximum(m: Any) -> Any:
    """A maximum safe to subtract: minus infinity (nothing seen yet) becomes 0."""
    return where(m == -math.inf, 0.0, m)
