"""Split keys: attention of few queries to long keys, by several programs a head (Flash-Decoding, Dao et al. 2023).

One program for each head of a few queries leaves most of a GPU idle. So the keys are cut into parts: each program has
the maximum, the sum and the weighted values of its part, and a second launch combines those of a query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.symbolic_dim import Size, ceil_divide, round_up, symbol_names
from tessera.core.types import DType, TensorType, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor import shape
from tessera.stdlib.attention import LOG2_E, hide_keys, online_softmax_weights, scale_and_mask
from tessera.stdlib.split_products import BUSY_PROGRAMS

# mypy: disable-error-code="operator, attr-defined, index"

MOST_QUERIES = 16  # of a head
LEAST_KEYS = 64  # of a part
LEAST_PARTS = 4
MOST_PARTS = 64
BLOCK_KEYS = 64  # keys of a round, as products
VECTOR_ELEMENTS, VECTOR_QUERIES = 1 << 13, 4  # products of queries and keys of a round without tensor cores


@kernel
def attend_part(q, k, v, mask, sums, maxima, totals, *, scale, softcap, keys, narrow, vectors, BM, BN):
    """The attention of q [B, H, S, D] to a part of `keys` keys of k [B, H, T, D], v [B, H, T, E], on the grid
    (parts, H, B): maxima and totals [parts, B, H, S] of the weights relative to them, and sums [parts, B, H, S, E] of
    the values by these weights. `vectors`: products are sums of products, as of f32."""
    part, head, batch = tile.program_id(0), tile.program_id(1), tile.program_id(2)
    T, E = k.shape[2], v.shape[3]
    scaled = mask is not None or scale <= 0 or softcap > 0
    factor = 0.0 if scaled else scale * LOG2_E
    queries = tile.load(q[batch, head, 0:BM, :], edge="clip")
    m, l = tile.full((BM,), -math.inf), tile.zeros((BM,))
    acc = tile.zeros((BM, BN, E)) if vectors else tile.zeros((BM, E))
    first = part * keys
    for start in tile.range(first, tile.minimum(first + keys, T), BN):
        cols = start + tile.arange(0, BN)
        block = tile.load(k[batch, head, start : start + BN, :], edge="clip")
        values = tile.load(v[batch, head, start : start + BN, :], edge="clip")
        if vectors:
            scores = tile.sum(queries[:, None, :] * block[None, :, :], axis=-1)
        else:
            scores = queries @ block.T
        scores = scale_and_mask(scores, scale if scaled else None, softcap, mask, (batch, head, 0, start))
        scores = hide_keys(scores, cols, cols, T, T % BN != 0, False, 0)
        m, p, old = online_softmax_weights(scores, m, factor, narrow)
        l = l * old + tile.sum(p, axis=-1)
        if vectors:
            acc = acc * old[:, None, None] + p[:, :, None] * values[None, :, :]
        else:
            values = values if narrow else tile.cast(values, f32)
            acc = acc * old[:, None] + tile.cast(p, values.dtype) @ values
    total = tile.sum(acc, axis=1) if vectors else acc
    tile.store(sums[part, batch, head, 0:BM, :], total, edge="clip")
    tile.store(maxima[part, batch, head, 0:BM], m, edge="clip")
    tile.store(totals[part, batch, head, 0:BM], l, edge="clip")


@kernel
def combine_parts(sums, maxima, totals, out, *, factor, parts):
    """out [R, E] = the values of sums [P, R, E] by maxima and totals [P, R], on the grid (R,); `parts` is a power of
    two not below P."""
    row = tile.program_id(0)
    there = tile.arange(0, parts) < sums.shape[0]
    m = tile.reshape(tile.load(maxima[0:parts, row : row + 1], edge="clip"), (parts,))
    m = tile.where(there, m, -math.inf)
    high = tile.max(m, axis=0)
    base = tile.where(high == -math.inf, 0.0, high)  # a query without an unmasked key
    weights = tile.exp2((m - base) * (LOG2_E if factor == 0 else factor))
    total = tile.sum(weights * tile.reshape(tile.load(totals[0:parts, row : row + 1], edge="clip"), (parts,)), axis=0)
    block = tile.load(sums[0:parts, row, :], edge="clip")
    found = tile.sum(weights[:, None] * block, axis=0)
    tile.store(out[row, :], tile.cast(found / tile.where(total == 0.0, 1.0, total), out.dtype))


@dataclass(frozen=True)
class SplitAttention:
    """Attention of q [B, H, S, D] whose T keys are cut into parts of `keys`."""

    queries: tuple[int, int, int, int]
    values: int  # features
    keys: int
    parts: int
    vectors: bool

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attrs: dict[str, Any]) -> Tensor:
        """The results [B, H, S, E]."""
        batch, heads, length, features = self.queries
        lead, narrow = (self.parts, batch, heads, length), attrs["weights"] != f32
        rows = 1 << (length - 1).bit_length() if self.vectors else MOST_QUERIES
        columns = VECTOR_ELEMENTS // (rows * max(round_to_power(features), round_to_power(self.values)))
        named = {"scale": attrs["scale"], "softcap": attrs["softcap"], "keys": self.keys, "narrow": narrow}
        named |= {"vectors": self.vectors, "BM": rows, "BN": min(columns, BLOCK_KEYS) if self.vectors else BLOCK_KEYS}
        memories = [OutputMemory(TensorType(s, f32)) for s in ((*lead, self.values), lead, lead)]
        found = launch(attend_part, (self.parts, heads, batch), q, k, v, mask, *memories, **named)
        scaled = mask is not None or attrs["scale"] <= 0 or attrs["softcap"] > 0
        factor = 0.0 if scaled else attrs["scale"] * LOG2_E
        return combine(found, TensorType((batch, heads, length, self.values), q.dtype), factor)


def combine(found: Sequence[Tensor], kind: TensorType, factor: float) -> Tensor:
    """The attention of a type, of shape [..., E]: from sums [P, ..., E], maxima and totals [P, ...] of P parts."""
    parts, count, width = int(found[0].shape[0]), math.prod(kind.shape[:-1]), kind.shape[-1]
    sums, maxima, totals = (
        shape.reshape(x, shape=(parts, count, *more)) for x, more in zip(found, ((width,), (), ()), strict=True)
    )
    out = OutputMemory(TensorType((count, width), kind.dtype))
    done = launch(combine_parts, (count,), sums, maxima, totals, out, factor=factor, parts=round_to_power(parts))
    return shape.reshape(done, shape=kind.shape)


def round_to_power(n: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (n - 1).bit_length()


def match_split_attention(
    q: tuple[Size, ...], k: tuple[Size, ...], v: tuple[Size, ...], dtype: DType
) -> SplitAttention | None:
    """Attention of shapes of rank 4, with as many heads of keys as of queries, in parts; None where it does not pay."""
    if symbol_names((*q, *k, *v)) or 0 in (*q, *k, *v) or int(q[2]) > MOST_QUERIES:
        return None
    batch, heads, length, _ = (int(n) for n in q)
    keys = int(k[2])
    parts = min(2 * BUSY_PROGRAMS // (batch * heads), keys // LEAST_KEYS, MOST_PARTS)
    if parts < LEAST_PARTS:
        return None
    each = round_up(ceil_divide(keys, parts), BLOCK_KEYS)
    vectors = dtype == f32 and length <= VECTOR_QUERIES
    return SplitAttention((batch, heads, length, int(q[3])), int(v[3]), each, ceil_divide(keys, each), vectors)
