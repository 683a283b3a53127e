"""Scaled dot-product attention: one pass over the keys with online softmax (Dao et al. 2022; Dao 2023)."""

# mypy: disable-error-code="operator, attr-defined, index"
# Tensor gets its operators when the ops are loaded; mypy does not see them.

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.errors import ArgumentError, ShapeError, outside
from tessera.ir.core import Module
from tessera.kernel import kernel, tile
from tessera.stdlib.routine import array, blocks, routine, same_dtype, shaped
from tessera.types import Type, f32

BLOCK_ROWS, BLOCK_COLS = 32, 64
LOG2_E = math.log2(math.e)


@kernel
def attend(
    q, k, v, mask, lengths, out, seed=None, *, causal: bool, scale: float, BM: int = BLOCK_ROWS,
    BN: int = BLOCK_COLS, narrow: bool = False, p_drop: float = 0.0, turned: bool = False,
):  # fmt: skip
    """out = softmax(q kᵀ · scale + mask) v, on the grid (B, H, ceil(S / BM)).

    q is [B, H, S, D], k [B, G, T, D], v [B, G, T, E], out [B, H, S, E], all of one float type; each of the G
    heads of keys serves H / G heads of queries. `mask` is None or [B or 1, H or 1, S or 1, T]. `lengths` is None
    or [B]: keys from there on are unseen, and the queries are the last S positions before it. Everything between
    the loads and the store is f32; `narrow` rounds the weights to the type of v before their product, and takes
    subnormal ones as 0, as fast kernels on GPUs do. `p_drop` drops weights: weight [b, h, i, j] where the number at
    its place (row-major) of the stream of `seed`, an int64 [1], is below it. `turned` says that heads stand after
    positions in q, k, v and out.
    """
    (H, S), (G, T), E = sizes(q, turned), sizes(v, turned), v.shape[3]
    batch, head, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BM
    shared = head if H == G else head // (H // G)
    T = T if lengths is None else lengths[batch]
    past = 0 if lengths is None else T - S
    rows = first + past + tile.arange(0, BM)
    queries = rows_of(q, batch, head, first, BM, turned, None)
    acc, m, l = tile.zeros((BM, E)), tile.full((BM,), -math.inf), tile.zeros((BM,))
    # Weights are powers of two. Where maxima are the same without the scale, it is part of the factor of the exponent.
    scaled = mask is not None or scale <= 0
    factor = 0.0 if scaled else scale * LOG2_E
    # A causal row sees no key behind its block.
    last = min(first + past + BM, T) if causal else T
    for start in tile.range(0, last, BN):
        cols = start + tile.arange(0, BN)
        held = None if lengths is None else (cols < T)[:, None]  # weights of 0 do not undo a NaN behind a cache's end
        keys = rows_of(k, batch, shared, start, BN, turned, held)
        values = rows_of(v, batch, shared, start, BN, turned, held)
        scores = added(queries @ keys.T, scale if scaled else None, mask, (batch, head, first, start))
        scores = visible(scores, rows, cols, T, lengths is not None or T % BN != 0, causal)
        m, p, old = weights(scores, m, factor, narrow)
        l = l * old + tile.sum(p, axis=-1)
        values = values if narrow else tile.cast(values, f32)
        if p_drop > 0:
            row = (batch * H + head) * S + first + tile.arange(0, BM)
            p = tile.dropout(p, p_drop, seed[0], row[:, None] * sizes(k, turned)[1] + cols[None, :])
        acc = acc * old[:, None] + tile.cast(p, values.dtype) @ values
    put_rows(out, batch, head, first, tile.cast(acc / l[:, None], out.dtype), turned)


def sizes(x, turned):
    """The heads and the positions that a tensor of theirs has."""
    return (x.shape[2], x.shape[1]) if turned else (x.shape[1], x.shape[2])


def rows_of(x, batch, head, first, count, turned, held):
    """The block of a head's rows from `first` on; 0 where they are not `held`."""
    if turned:
        block = tile.load(x[batch, first : first + count, head, :], mask=held, edge="clip")
    else:
        block = tile.load(x[batch, head, first : first + count, :], mask=held, edge="clip")
    return block


def put_rows(out, batch, head, first, block, turned):
    """Write the block of a head's rows from `first` on, as far as there are such rows."""
    if turned:
        tile.store(out[batch, first : first + block.shape[0], head, :], block, edge="clip")
    else:
        tile.store(out[batch, head, first : first + block.shape[0], :], block, edge="clip")


def added(scores, scale, mask, place):
    """Scores times the scale (None: that comes later), and their part of the mask."""
    batch, head, first, start = place
    if scale is not None:
        scores = scores * scale
    if mask is not None:
        scores = scores + mask_block(mask, batch, head, first, start, scores.shape[0], scores.shape[1])
    return scores


def visible(scores, rows, cols, T, clipped, causal):
    """Scores that are minus infinity where there is no such key, or the row may not see it."""
    if clipped:
        scores = tile.where(cols[None, :] < T, scores, -math.inf)
    if causal:
        scores = tile.mask_causal(scores, rows, cols)
    return scores


def weights(scores, m, factor, narrow):
    """The rows' maxima so far, the weights below them, and what sums below the maxima `m` are worth below these.

    `factor` is of the scores' exponents of two; 0 says that scores are those of e, and may be as large as can be.
    """
    high = tile.maximum(m, tile.max(scores, axis=-1))
    base = tile.where(high == -math.inf, 0.0, high)  # a row that has seen nothing yet
    if factor == 0:
        below, lower = (scores - base[:, None]) * LOG2_E, (m - base) * LOG2_E
    else:
        base = base * factor
        below, lower = scores * factor - base[:, None], m * factor - base
    p = tile.exp2(below)
    if narrow:
        p = tile.where(below < -126.0, 0.0, p)  # no subnormal numbers, which GPUs are slow at
    return high, p, tile.exp2(lower)


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
    """The Tile module for refs q, k, v, out and, if there is one, mask; `blocks` may give BM, BN, narrow and turned."""
    names = [n for n in ("q", "k", "v", "mask", "out") if n in types]
    size = blocks.get("BM", BLOCK_ROWS)
    batch, *middle, _ = (int(n) for n in types["q"].shape)  # type: ignore[arg-type]
    heads, length = middle[::-1] if blocks.get("turned") else middle
    constants: dict[str, Any] = {n: None for n in ("mask", "lengths", "seed") if n not in types}
    constants |= {"causal": causal, "scale": scale, "BM": size, "BN": BLOCK_COLS, "narrow": False}
    constants |= {"p_drop": 0.0, "turned": False, **blocks}
    return attend.specialize({n: types[n] for n in names}, constants, (batch, heads, -(-length // size)))


@routine(attend)
def flash_attention(
    kernel: Any, q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False, scale: float | None = None,
    lengths: Sequence[int] | None = None, dropout: float = 0.0, seed: int = 0,
) -> np.ndarray:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v without forming the scores: [B, H, S, E] of the type of `q`.

    q is [B, H, S, D], k [B, G, T, D], v [B, G, T, E] of one float type, where G divides H (grouped queries: each
    head of keys serves H / G neighbouring heads of queries). `mask` is added: [B or 1, H or 1, S or 1, T].
    `scale` is 1/sqrt(D) unless given. `causal` hides key j from query i where j > i.

    With `lengths`, k and v are caches: batch b holds lengths[b] keys, the rest is not read, and the queries are the
    last S positions of it, so that `causal` hides key j from query i where j > lengths[b] - S + i.

    `dropout` sets weights to 0 with this probability and scales the others by 1 / (1 - dropout), before the product
    with `v`: weight [b, h, i, j] where `ts.rand` of shape [B, H, S, T] from `seed` is below it.

    Raises:
        ArgumentError: a length lies outside the cache, or is less than S under `causal`; a `dropout` not in [0, 1).
        DTypeError: the types differ, or are no floats.
        ShapeError: the shapes do not fit.

    >>> q, k = np.zeros((1, 1, 2, 4), np.float32), np.zeros((1, 1, 2, 4), np.float32)
    >>> v = np.array([2.0, 4.0], np.float32).reshape(1, 1, 2, 1)
    >>> flash_attention(q, k, v, causal=True).ravel()
    array([2., 3.], dtype=float32)
    """
    q, k, v = array(q, "q"), array(k, "k"), array(v, "v")
    mask = None if mask is None else array(mask, "mask")
    same_dtype(q=q, k=k, v=v, mask=mask)
    _check(q, k, v, mask)
    held = None if lengths is None else _lengths(lengths, q, k, causal)
    if not 0 <= dropout < 1:
        raise ArgumentError(f"dropout with probability {dropout}", location=outside(), expected="0 to before 1")
    batch, heads, length, features = q.shape
    out = np.zeros((batch, heads, length, v.shape[3]), q.dtype)
    if out.size:
        grid = lambda constants: (batch, heads, blocks(length, constants["BM"]))  # noqa: E731
        weight = 1 / math.sqrt(features) if scale is None else float(scale)
        drop = {"seed": np.array([seed], np.int64), "p_drop": float(dropout)} if dropout else {}
        kernel[grid](q, k, v, mask, held, out, causal=bool(causal), scale=weight, **drop)
    return out


flash_attention_2 = flash_attention


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None) -> None:
    rank = q.ndim == k.ndim == v.ndim == 4
    if not rank or q.shape[::3] != k.shape[::3] or k.shape[:3] != v.shape[:3] or q.shape[1] % max(k.shape[1], 1):
        raise ShapeError(
            "queries, keys and values do not fit", location=outside(),
            expected="q [B, H, S, D], k [B, G, T, D], v [B, G, T, E], where G divides H",
            received=f"{q.shape}, {k.shape}, {v.shape}",
        )  # fmt: skip
    if mask is not None:
        whole = (*q.shape[:3], k.shape[2])
        same = mask.ndim == 4 and mask.shape[3] == whole[3]
        shaped(
            mask,
            "mask",
            [m if same and m == 1 and i < 3 else w for i, (m, w) in enumerate(zip(mask.shape, whole, strict=False))],
        )


def _lengths(lengths: Sequence[int], q: np.ndarray, k: np.ndarray, causal: bool) -> np.ndarray:
    held = np.asarray(lengths, np.int64)
    shaped(held, "lengths", q.shape[:1])
    least = q.shape[2] if causal else 1
    if held.size and not (least <= held.min() and held.max() <= k.shape[2]):
        raise ArgumentError("a length does not fit the cache", location=outside(), expected=f"{least} to {k.shape[2]}",
                            received=held.tolist())  # fmt: skip
    return held
