"""Attention: FlashAttention with online softmax (Dao et al. 2022; Dao 2023), and rotary position embedding (Su et al.
2021)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, library_caller_location
from tessera.core.size_guards import assume_at_most
from tessera.core.symbolic_dim import Dim, Size, ceil_divide
from tessera.core.types import DType, Type, as_dtype, f32, f64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Module
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.elementwise import cos as cos_
from tessera.ops.tensor.elementwise import sin as sin_
from tessera.ops.tensor.shape import iota
from tessera.stdlib.routine import (
    check_array,
    check_same_dtype,
    check_shape,
    compute,
    compute_dtype,
    is_recorded,
    routine,
)

# Scaled dot-product attention: one pass over the keys with online softmax (Dao et al. 2022; Dao 2023).


# mypy: disable-error-code="operator, attr-defined, index"
# Tensor gets its operators when the ops are loaded, which mypy does not see.


BLOCK_ROWS, BLOCK_COLS = 32, 64
UNPACKED: tuple[tuple[int, ...], ...] = ((), (), (), ())
LOG2_E = math.log2(math.e)


@kernel
def attend(
    q, k, v, mask, lengths, out, seed=None, sums=None, *, causal: bool, scale: float, BM: int = BLOCK_ROWS,
    BN: int = BLOCK_COLS, narrow: bool = False, p_drop: float = 0.0, turned: bool = False,
    window: int = 0, softcap: float = 0.0, packed: tuple = UNPACKED, features: int = 0,
):  # fmt: skip
    """out = softmax(q kᵀ · scale + mask) v, on the grid (B, H, ceil(S / BM)).

    q is [B, H, S, D], k [B, G, T, D], v [B, G, T, E], out [B, H, S, E], all of one float type; each of the G
    heads of keys is shared by H / G heads of queries. `mask` is None or [B or 1, H or 1, S or 1, T]. `lengths` is None
    or [B]: later keys are masked, and the queries are the last S positions before them. All computation
    is in f32; `narrow` rounds the weights to the type of v before their product, and flushes subnormal ones to 0, as
    fast kernels on GPUs do. `p_drop` drops weights: weight [b, h, i, j] where the random number at its row-major
    index of the stream of `seed`, an int64 [1], is below it. `turned`: the axis of heads follows that of positions
    in q, k, v and out. `window` hides key j from query i where j <= i - window, and `softcap` replaces scores by
    softcap · tanh(scores / softcap) before the mask; 0 turns each off. `sums` is None or [B, H, S], and gets the
    logarithm to base 2 of the sum of the exponentials of each row's scores (0 without an unmasked key).
    Where `packed` is ((H, G), (D, i), (D, j), (E, l)), q, k, v and out are [B, S or T, columns]: the columns of a
    position hold heads side by side, those of q, k and v from the i-th, j-th and l-th on, so that one array may be all.
    `features` are at least D and E: blocks have so many columns, those beyond D or E with zeros; 0: as many as there
    are.
    """
    (H, S), (G, T) = heads_and_length(q, turned, packed[0][:1]), heads_and_length(v, turned, packed[0][1:])
    E = features or features_of(v, packed[3])
    batch, head, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BM
    shared = head if H == G else head // (H // G)
    T = T if lengths is None else lengths[batch]
    past = 0 if lengths is None else T - S
    rows = first + past + tile.arange(0, BM)
    queries = load_head_rows(q, batch, head, first, BM, turned, None, packed[1], features)
    acc, m, l = tile.zeros((BM, E)), tile.full((BM,), -math.inf), tile.zeros((BM,))
    # Weights are powers of two. A scale that keeps the order of scores is part of the factor of the exponent.
    scaled = mask is not None or scale <= 0 or softcap > 0
    factor = 0.0 if scaled else scale * LOG2_E
    # A causal row attends to no key after its block.
    last = min(first + past + BM, T) if causal else T
    # Nor does the first row of a block to one before its window.
    begin = 0 if window == 0 else max(first + past - window + 1, 0) // BN * BN
    for start in tile.range(begin, last, BN):
        cols = start + tile.arange(0, BN)
        held = None if lengths is None else (cols < T)[:, None]  # 0 · NaN after a cache's end is NaN
        keys = load_head_rows(k, batch, shared, start, BN, turned, held, packed[2], features)
        values = load_head_rows(v, batch, shared, start, BN, turned, held, packed[3], features)
        place = (batch, head, first, start)
        scores = scale_and_mask(queries @ keys.T, scale if scaled else None, softcap, mask, place)
        scores = hide_keys(scores, rows, cols, T, lengths is not None or T % BN != 0, causal, window)
        m, p, old = online_softmax_weights(scores, m, factor, narrow)
        l = l * old + tile.sum(p, axis=-1)
        values = values if narrow else tile.cast(values, f32)
        if p_drop > 0:
            row = (batch * H + head) * S + first + tile.arange(0, BM)
            p = tile.dropout(
                p, p_drop, seed[0], row[:, None] * heads_and_length(k, turned, packed[0][1:])[1] + cols[None, :]
            )
        acc = acc * old[:, None] + tile.cast(p, values.dtype) @ values
    if mask is not None or window > 0:
        l = tile.where(l == 0.0, 1.0, l)  # a row without an unmasked key gives 0
    store_head_rows(out, batch, head, first, tile.cast(acc / l[:, None], out.dtype), turned, packed[0])
    if sums is not None:
        base = tile.where(m == -math.inf, 0.0, m) * (LOG2_E if scaled else factor)
        tile.store(sums[batch, head, first : first + BM], base + tile.log2(l), edge="clip")


def heads_and_length(x, turned, packed=()):
    """The sizes of the head and position axes of a tensor; the heads of a packed one are given."""
    if packed:
        sizes = packed[0], x.shape[1]
    else:
        sizes = (x.shape[2], x.shape[1]) if turned else (x.shape[1], x.shape[2])
    return sizes


def features_of(v, packed):
    """The features of a head."""
    return packed[0] if packed else v.shape[3]


def load_head_rows(x, batch, head, first, count, turned, held, packed=(), features=0):
    """The block of a head's rows from `first` on; 0 where `held` is false. `packed`: features, and the first head;
    `features`: the columns of a block, if they are more than there are."""
    width = features or x.shape[-1]
    if packed:
        column = (head + packed[1]) * packed[0]
        block = tile.load(x[batch, first : first + count, column : column + packed[0]], mask=held, edge="clip")
    elif turned:
        block = tile.load(x[batch, first : first + count, head, 0:width], mask=held, edge="clip")
    else:
        block = tile.load(x[batch, head, first : first + count, 0:width], mask=held, edge="clip")
    return block


def store_head_rows(out, batch, head, first, block, turned, packed=()):
    """Store the block of a head's rows from `first` on; rows past the end are dropped."""
    count, features = block.shape[0], block.shape[1]
    if packed:
        tile.store(out[batch, first : first + count, head * features : head * features + features], block, edge="clip")
    elif turned:
        tile.store(out[batch, first : first + count, head, 0:features], block, edge="clip")
    else:
        tile.store(out[batch, head, first : first + count, 0:features], block, edge="clip")


def scale_and_mask(scores, scale, softcap, mask, place):
    """Scores times the scale (None: applied later), capped if `softcap`, plus their block of the mask."""
    batch, head, first, start = place
    if scale is not None:
        scores = scores * scale
    if softcap > 0:
        scores = tile.tanh(scores * (1.0 / softcap)) * softcap
    if mask is not None:
        scores = scores + load_mask_block(mask, batch, head, first, start, scores.shape[0], scores.shape[1])
    return scores


def hide_keys(scores, rows, cols, T, clipped, causal, window):
    """Scores with minus infinity where the key does not exist or is masked for the row."""
    if clipped:
        scores = tile.where(cols[None, :] < T, scores, -math.inf)
    if causal:
        scores = tile.mask_causal(scores, rows, cols)
    if window > 0:
        scores = tile.where(cols[None, :] > rows[:, None] - window, scores, -math.inf)
    return scores


def online_softmax_weights(scores, m, factor, narrow):
    """The new row maxima, the weights relative to them, and the factor that rescales sums relative to the maxima `m`.

    `factor` converts scores to exponents of two; 0 means that scores are exponents of e of any magnitude.
    """
    high = tile.maximum(m, tile.max(scores, axis=-1))
    base = tile.where(high == -math.inf, 0.0, high)  # a row without an unmasked key so far
    if factor == 0:
        below, lower = (scores - base[:, None]) * LOG2_E, (m - base) * LOG2_E
    else:
        base = base * factor
        below, lower = scores * factor - base[:, None], m * factor - base
    p = tile.exp2(below)
    if narrow:
        p = tile.where(below < -126.0, 0.0, p)  # no subnormal numbers, which are slow on GPUs
    return high, p, tile.exp2(lower)


def load_mask_block(mask, batch, head, first, start, BM, BN):
    """The block of the mask for a block of scores, as f32; axes of size 1 are broadcast."""
    b = 0 if mask.shape[0] == 1 else batch
    h = 0 if mask.shape[1] == 1 else head
    if mask.shape[2] == 1:
        block = tile.load(mask[b, h, 0, start : start + BN], edge="clip")
    else:
        block = tile.load(mask[b, h, first : first + BM, start : start + BN], edge="clip")
    return tile.cast(block, f32)


def specialise_attention(types: Mapping[str, Type], *, causal: bool, scale: float, **blocks: Any) -> Module:
    """The Tile module for refs q, k, v, out and, if there is one, mask; `blocks` may give BM, BN, narrow and turned."""
    names = [n for n in ("q", "k", "v", "mask", "out") if n in types]
    size = blocks.get("BM", BLOCK_ROWS)
    batch, *middle, _ = types["q"].shape
    heads, length = middle[::-1] if blocks.get("turned") else middle
    constants: dict[str, Any] = {n: None for n in ("mask", "lengths", "seed", "sums") if n not in types}
    constants |= {"causal": causal, "scale": scale, "BM": size, "BN": BLOCK_COLS, "narrow": False}
    constants |= {
        "p_drop": 0.0,
        "turned": False,
        "window": 0,
        "softcap": 0.0,
        "packed": UNPACKED,
        "features": 0,
        **blocks,
    }
    return attend.specialize({n: types[n] for n in names}, constants, (batch, heads, ceil_divide(length, size)))


@routine(attend)
def flash_attention(
    kernel: Any, q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False, scale: float | None = None,
    lengths: Sequence[int] | None = None, dropout: float = 0.0, seed: int = 0, window: int = 0, softcap: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """softmax(q kᵀ · scale + mask) v without storing the scores: [B, H, S, E] of the type of `q`.

    q is [B, H, S, D], k [B, G, T, D], v [B, G, T, E] of one float type, where G divides H (grouped queries: each
    head of keys is shared by H / G adjacent heads of queries). `mask` is added: [B or 1, H or 1, S or 1, T].
    `scale` is 1/sqrt(D) unless given. `causal` hides key j from query i where j > i.

    With `lengths`, k and v are caches: batch b holds lengths[b] keys, the rest is not read, and the queries are the
    last S positions of it, so that `causal` hides key j from query i where j > lengths[b] - S + i.

    `dropout` sets weights to 0 with this probability and scales the others by 1 / (1 - dropout), before the product
    with `v`: weight [b, h, i, j] where `ts.rand` of shape [B, H, S, T] from `seed` is below it.

    `window` hides key j from query i where j <= i - window, both counted as for `causal` (a sliding window), and
    `softcap` replaces scores, before the mask, by softcap · tanh(scores / softcap); 0 turns each off.

    Raises:
        ArgumentError: a length is outside the cache, or less than S with `causal`; `dropout` is not in [0, 1); `window`
            is no whole number or negative; `softcap` is negative or not finite.
        DTypeError: the types differ, or are not floats.
        ShapeError: the shapes do not fit.

    >>> q, k = np.zeros((1, 1, 2, 4), np.float32), np.zeros((1, 1, 2, 4), np.float32)
    >>> v = np.array([2.0, 4.0], np.float32).reshape(1, 1, 2, 1)
    >>> flash_attention(q, k, v, causal=True).ravel()
    array([2., 3.], dtype=float32)
    """
    q, k, v = check_array(q, "q"), check_array(k, "k"), check_array(v, "v")
    mask = None if mask is None else check_array(mask, "mask")
    check_same_dtype(q=q, k=k, v=v, mask=mask)
    _check_operands(q, k, v, mask)
    held = None if lengths is None else _check_lengths(lengths, q, k, causal)
    if not 0 <= dropout < 1:
        raise ArgumentError(
            f"dropout with probability {dropout}", location=library_caller_location(), expected="0 to before 1"
        )
    if not isinstance(window, int) or window < 0 or not 0 <= softcap < math.inf:
        raise ArgumentError(
            "window or softcap of attention out of range", location=library_caller_location(),
            expected="a window of at least one key, a finite softcap > 0",
            received=f"window={window}, softcap={softcap}",
        )  # fmt: skip
    batch, heads, length, features = q.shape
    grid = lambda constants: (batch, heads, ceil_divide(length, constants["BM"]))  # noqa: E731
    weight = 1 / math.sqrt(features) if scale is None else float(scale)
    drop = {"seed": np.array([seed], np.int64), "p_drop": float(dropout)} if dropout else {}
    more = ({"window": window} if window else {}) | ({"softcap": float(softcap)} if softcap else {})
    shape, named = (batch, heads, length, v.shape[3]), {"causal": bool(causal), "scale": weight, **drop, **more}
    return compute(kernel, grid, shape, q.dtype, q, k, v, mask, held, **named)


flash_attention_2 = flash_attention


def _check_operands(q: Any, k: Any, v: Any, mask: Any) -> None:
    rank = q.ndim == k.ndim == v.ndim == 4
    if not rank or q.shape[::3] != k.shape[::3] or k.shape[:3] != v.shape[:3] or q.shape[1] % max(k.shape[1], 1):
        raise ShapeError(
            "queries, keys and values do not fit", location=library_caller_location(),
            expected="q [B, H, S, D], k [B, G, T, D], v [B, G, T, E], where G divides H",
            received=f"{q.shape}, {k.shape}, {v.shape}",
        )  # fmt: skip
    if mask is not None:
        whole = (*q.shape[:3], k.shape[2])
        same = mask.ndim == 4 and mask.shape[3] == whole[3]
        check_shape(
            mask,
            "mask",
            [m if same and m == 1 and i < 3 else w for i, (m, w) in enumerate(zip(mask.shape, whole, strict=False))],
        )


def _check_lengths(lengths: Any, q: Any, k: Any, causal: bool) -> Any:
    held = lengths if is_recorded(lengths) else np.asarray(lengths, np.int64)
    check_shape(held, "lengths", q.shape[:1])
    if is_recorded(lengths):  # the values are not known yet; no key after the cache is read in any case
        return held
    least = q.shape[2] if causal else 1
    if held.size and not (least <= held.min() and held.max() <= k.shape[2]):
        raise ArgumentError(
            "a length does not fit the cache",
            location=library_caller_location(),
            expected=f"{least} to {k.shape[2]}",
            received=held.tolist(),
        )
    return held


# Rotary position embedding (Su et al. 2021): pairs of features rotated by an angle proportional to the position.


@kernel
def rotate(x, cos, sin, out, *, interleaved: bool, BM: int = 64):
    """out[b, s] = x[b, s] rotated by the angles of cos[s] and sin[s], on the grid (ceil(S / BM), B).

    x and out are [B, S, D], cos and sin [S, D / 2] of f32 (f64 for f64). The pairs are features i and i + D/2 or,
    `interleaved`, 2i and 2i + 1.
    """
    first, b = tile.program_id(0) * BM, tile.program_id(1)
    S, half = x.shape[1], x.shape[2] // 2
    rows = (first + tile.arange(0, BM))[:, None]
    i = tile.arange(0, half)[None, :]
    left, right = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
    there = tile.broadcast(rows < S, (BM, half))
    c = tile.load(cos[first : first + BM, :], edge="clip")
    s = tile.load(sin[first : first + BM, :], edge="clip")
    p = tile.cast(tile.load(x[b, rows, left], mask=there), compute_dtype(x.dtype))
    q = tile.cast(tile.load(x[b, rows, right], mask=there), compute_dtype(x.dtype))
    tile.store(out[b, rows, left], tile.cast(p * c - q * s, out.dtype), mask=there)
    tile.store(out[b, rows, right], tile.cast(q * c + p * s, out.dtype), mask=there)


@routine(rotate)
def rotary_embedding(
    kernel: Any, x: Any, cos: Any = None, sin: Any = None, *, offset: int = 0, base: float = 10000.0,
    interleaved: bool = False,
) -> np.ndarray:  # fmt: skip
    """Rotary position embedding of `x` [..., S, D], whose rows have the positions offset, offset + 1, …

    `cos` and `sin` are tables [P, D / 2] with a row for each position (P at least offset + S); without them
    the angle of pair i at position p is p · base^(-2i / D). Pairs are (i, i + D/2) or, `interleaved`, (2i, 2i + 1).
    The result has the type and shape of `x`; it is computed in f32 (f64 for f64).

    Raises:
        ArgumentError: only one table is passed, or `offset` is negative.
        DTypeError: an argument does not have a float type.
        ShapeError: D is odd, or a table does not fit.

    >>> quarter = np.array([[0.0]], np.float32), np.array([[1.0]], np.float32)
    >>> rotary_embedding(np.array([[3.0, 4.0]], np.float32), *quarter)
    array([[-4.,  3.]], dtype=float32)
    """
    x = check_array(x, "x")
    if x.ndim < 2 or int(x.shape[-1]) % 2:
        raise ShapeError(
            "rotary_embedding rotates pairs of features",
            location=library_caller_location(),
            expected="[..., S, even D]",
            received=x.shape,
        )
    (length, features), dtype = x.shape[-2:], compute_dtype(as_dtype(x.dtype))
    if offset < 0 or (cos is None) != (sin is None):
        raise ArgumentError(
            "rotary_embedding takes offset >= 0, and both of cos and sin or none", location=library_caller_location()
        )
    tables = (
        _angle_tables(offset + length, features, base)
        if cos is None
        else (check_array(cos, "cos"), check_array(sin, "sin"))
    )
    for name, table in zip(("cos", "sin"), tables, strict=True):
        rows = table.shape[0] if table.ndim and assume_at_most(offset + length, table.shape[0]) else offset + length
        check_shape(table, name, (rows, features // 2))
    parts = [_select_rows(t, offset, length, dtype) for t in tables]
    flat = x.reshape(math.prod(x.shape[:-2]), length, features)
    grid = lambda constants: (ceil_divide(length, constants["BM"]), flat.shape[0])  # noqa: E731
    return compute(kernel, grid, flat.shape, x.dtype, flat, *parts, interleaved=interleaved).reshape(x.shape)


def _select_rows(table: Any, offset: int, length: Size, dtype: DType) -> Any:
    """The rows of the positions from `offset` on, in the compute type."""
    table = Tensor(table) if isinstance(length, Dim) and not isinstance(table, Tensor) else table
    rows = table[offset : offset + length]
    return rows.to(dtype) if isinstance(table, Tensor) else np.ascontiguousarray(rows.astype(dtype.numpy))


def _angle_tables(length: Size, features: int, base: float) -> tuple[Any, Any]:
    """Cosines and sines of the angles, computed in f64: in f32 large positions would be off by whole degrees."""
    rates = base ** (-np.arange(0, features, 2, dtype=np.float64) / features)
    if isinstance(length, Dim):  # the program computes them for the size of each call
        places = iota(shape=(length, features // 2), axis=0, dtype=f64) * Tensor(rates)
        return cos_(places), sin_(places)
    angles = np.arange(length, dtype=np.float64)[:, None] * rates
    return np.cos(angles), np.sin(angles)
