"""The kernel of scaled dot-product attention: one pass over the keys with online softmax (Dao et al. 2022)."""

# mypy: disable-error-code="operator, attr-defined, index"
# Tensor gets its operators when the ops are loaded; mypy does not see them.

import math
from collections.abc import Mapping
from typing import Any

from tessera.ir.core import Module
from tessera.kernel import kernel, tile
from tessera.types import Type, f32

BLOCK_ROWS, BLOCK_COLS = 32, 64


@kernel
def flash_attention(
    q, k, v, mask, out, *, causal: bool, scale: float, BM: int = BLOCK_ROWS, BN: int = BLOCK_COLS, narrow: bool = False
):
    """out = softmax(q kᵀ · scale + mask) v, on the grid (B, H, ceil(S / BM)).

    q is [B, H, S, D], k [B, H, T, D], v [B, H, T, E], out [B, H, S, E], all of one float type; `mask` is
    None or [B or 1, H or 1, S or 1, T]. Everything between the loads and the store is f32; `narrow`
    rounds the weights to the type of v before their product, as fast kernels on GPUs do.
    """
    T, E = v.shape[2:]
    batch, head, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BM
    rows = first + tile.arange(0, BM)
    queries = tile.load(q[batch, head, first : first + BM, :], edge="clip")
    acc, m, l = tile.zeros((BM, E)), tile.full((BM,), -math.inf), tile.zeros((BM,))

    # A causal row sees no key behind its block.
    last = min(first + BM, T) if causal else T
    for start in tile.range(0, last, BN):
        keys = tile.load(k[batch, head, start : start + BN, :], edge="clip")
        values = tile.load(v[batch, head, start : start + BN, :], edge="clip")
        cols = start + tile.arange(0, BN)
        scores = queries @ keys.T * scale
        if mask is not None:
            scores = scores + mask_block(mask, batch, head, first, start, BM, BN)
        scores = tile.where(cols[None, :] < T, scores, -math.inf)
        if causal:
            scores = tile.mask_causal(scores, rows, cols)
        p, m_block, l_block = tile.softmax_online(scores)
        values = values if narrow else tile.cast(values, f32)
        acc, m, l = tile.softmax_accumulate(acc, m, l, p, values, m_block, l_block)

    tile.store(out[batch, head, first : first + BM, :], tile.cast(acc / l[:, None], out.dtype), edge="clip")


def mask_block(mask, batch, head, first, start, BM, BN):
    """The part of the mask that belongs to a block of scores, as f32; axes of size 1 are for all."""
    b = batch if mask.shape[0] > 1 else 0
    h = head if mask.shape[1] > 1 else 0
    if mask.shape[2] > 1:
        block = tile.load(mask[b, h, first : first + BM, start : start + BN], edge="clip")
    else:
        block = tile.load(mask[b, h, 0, start : start + BN], edge="clip")
    return tile.cast(block, f32)


def specialized(types: Mapping[str, Type], *, causal: bool, scale: float, **blocks: Any) -> Module:
    """The Tile module for refs q, k, v, out and, if there is one, mask; `blocks` may give BM, BN and narrow."""
    names = [n for n in ("q", "k", "v", "mask", "out") if n in types]
    size = blocks.get("BM", BLOCK_ROWS)
    batch, heads, length, _ = (int(n) for n in types["q"].shape)  # type: ignore[arg-type]
    constants: dict[str, Any] = {"mask": None} if "mask" not in types else {}
    constants |= {"causal": causal, "scale": scale, "BM": size, "BN": BLOCK_COLS, "narrow": False, **blocks}
    return flash_attention.specialize({n: types[n] for n in names}, constants, (batch, heads, -(-length // size)))
