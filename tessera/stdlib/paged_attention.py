"""Paged attention (Kwon et al. 2023): keys and values of requests lie in pages that a table names, read where they lie.

Pages are [pages, G, size, D]: `size` positions of all G heads. `table` [B, T] has the numbers of each request's pages
in order; position p of request b lies in page table[b, p // size], row p % size.
"""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, library_caller_location
from tessera.core.types import TensorType, bf16, f16, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.shape import permute, reshape
from tessera.stdlib.attention import LOG2_E, online_softmax_weights
from tessera.stdlib.routine import is_for_gpu
from tessera.stdlib.split_keys import combine, round_to_power
from tessera.stdlib.split_products import BUSY_PROGRAMS

# mypy: disable-error-code="operator, attr-defined, index"

QUERIES = 16  # of one program of a long prompt
TENSOR_ROWS, MORE_TENSOR_ROWS = 16, 64  # of a block of products on tensor cores: rows of queries and their heads
MOST_PARTS = 32


@kernel
def write_pages(k, v, table, past, count, keys, values, *, ring: bool = False):
    """Write k and v [B, S, G, D] at the positions from past[b] on, the first count[b] of each request; grid (B, S).

    `ring`: positions past the end of the table wrap around, so that the newest overwrite the oldest.
    """
    b, s = tile.program_id(0), tile.program_id(1)
    if s < count[b]:
        place = past[b] + s
        page = place // keys.shape[2]
        page = page % table.shape[1] if ring else page
        tile.assert_(page < table.shape[1], "a cache is written past its end: make it longer, or a ring", place)
        number = table[b, page]
        tile.assert_(number >= 0, "a cache is written where it has no page", place)
        row = place % keys.shape[2]
        keys[number, 0 : keys.shape[1], row, 0 : keys.shape[3]] = k[b, s, 0 : k.shape[2], 0 : k.shape[3]]
        values[number, 0 : values.shape[1], row, 0 : values.shape[3]] = v[b, s, 0 : v.shape[2], 0 : v.shape[3]]


@kernel
def attend_pages(
    q, keys, values, table, past, count, out, *, group: int, scale: float, window: int, ring: bool, narrow: bool,
    BM: int,
):  # fmt: skip
    """out = softmax(q kᵀ · scale) v over the pages of each request, on the grid (ceil(R / BM), G, B).

    q and out are [B, G, R, D]. Row r is of query r // group, at position past[b] + r // group; it sees the positions up
    to its own, of which the request has past[b] + count[b], and with a `window` only so many. `narrow` multiplies in
    the type of the pages, by weights that are rounded to it; otherwise all is computed in f32.
    """
    b, g, first = tile.program_id(2), tile.program_id(1), tile.program_id(0) * BM
    size, total = keys.shape[2], past[b] + count[b]
    place = past[b] + (first + tile.arange(0, BM)) // group
    queries = tile.load(q[b, g, first : first + BM, :], edge="clip")
    begin = 0 if window == 0 else tile.maximum(past[b] + first // group - window + 1, 0) // size
    end = tile.minimum(past[b] + (first + BM - 1) // group + 1, total)
    place_of_pages = (b, g, begin, (end + size - 1) // size)
    acc, m, l = sum_pages(queries, None, keys, values, table, place_of_pages, place, total, scale, window, ring, narrow)
    y = acc / tile.where(l == 0.0, 1.0, l)[:, None]
    tile.store(out[b, g, first : first + BM, :], tile.cast(y, out.dtype), edge="clip")


@kernel
def attend_pages_part(
    q, keys, values, table, past, count, sums, maxima, totals, *, group: int, scale: float, window: int, ring: bool,
    narrow: bool, BM: int,
):  # fmt: skip
    """The attention of `attend_pages` for R of at most BM rows, to a part of the pages of each request, on the grid
    (parts, G, B): maxima and totals [parts, B, G, R] of the weights relative to them, and sums [parts, B, G, R, D]."""
    part, g, b = tile.program_id(0), tile.program_id(1), tile.program_id(2)
    size, total = keys.shape[2], past[b] + count[b]
    place = past[b] + tile.arange(0, BM) // group
    queries = tile.load(q[b, g, 0:BM, :], edge="clip")
    begin = 0 if window == 0 else tile.maximum(past[b] - window + 1, 0) // size
    first, last = choose_pages(part, sums.shape[0], begin, (total + size - 1) // size)
    place_of_pages = (b, g, first, last)
    acc, m, l = sum_pages(queries, None, keys, values, table, place_of_pages, place, total, scale, window, ring, narrow)
    store_part((sums, maxima, totals), (part, b, g), (acc, m, l))


def choose_pages(part, parts, begin, end):
    """The first page of a part of the pages from `begin` to `end`, and the one after its last."""
    each = (end - begin + parts - 1) // parts
    first = begin + part * each
    return first, tile.minimum(first + each, end)


def store_part(memories, place, found):
    """Store what a program found of its part (sums of values, maxima, sums of weights), no rows past the end."""
    (sums, maxima, totals), (part, b, g), (acc, m, l) = memories, place, found
    rows = acc.shape[0]
    tile.store(sums[part, b, g, 0:rows, :], acc, edge="clip")
    tile.store(maxima[part, b, g, 0:rows], m, edge="clip")
    tile.store(totals[part, b, g, 0:rows], l, edge="clip")


def sum_pages(queries, right, keys, values, table, place_of_pages, place, total, scale, window, ring, narrow):
    """For each row: the values by weights relative to its maximum so far, that maximum, and the sum of weights.

    `queries` are of all features or, with those of the `right` half, of the left half.
    """
    b, g, begin, end = place_of_pages
    rows, size = queries.shape[0], keys.shape[2]
    acc, m, l = tile.zeros((rows, keys.shape[3])), tile.full((rows,), -math.inf), tile.zeros((rows,))
    for page in tile.range(begin, end):
        number = table[b, page % table.shape[1]] if ring else table[b, page]
        cols = page * size + tile.arange(0, size)
        held = (cols < total)[:, None]  # 0 · NaN after a cache's end is NaN
        half = queries.shape[1]
        k = tile.load(keys[number, g, :, 0:half])
        other = None if right is None else tile.load(keys[number, g, :, half : 2 * half])
        v = tile.load(values[number, g, :, :], mask=held)  # arrives while scores are computed
        scores = multiply_rows(queries, k, narrow)
        if right is not None:
            scores = scores + multiply_rows(right, other, narrow)
        seen = (cols[None, :] <= place[:, None]) & (cols < total)[None, :]
        if window > 0:
            seen = seen & (cols[None, :] > place[:, None] - window)
        scores = tile.where(seen, scores, -math.inf)
        m, p, old = online_softmax_weights(scores, m, scale * LOG2_E, narrow)
        l = l * old + tile.sum(p, axis=-1)
        v = v if narrow else tile.cast(v, f32)
        if rows < 8 and not narrow:
            acc = acc * old[:, None] + tile.sum(p[:, :, None] * v[None, :, :], axis=1)
        else:
            acc = acc * old[:, None] + tile.dot(tile.cast(p, v.dtype), v)
    return acc, m, l


def multiply_rows(queries, k, narrow):
    """The products of rows of queries and the keys of a page, over some features."""
    if narrow:
        scores = tile.dot(queries, tile.transpose(k))
    elif queries.shape[0] < 8:
        scores = tile.sum(tile.cast(queries, f32)[:, None, :] * tile.cast(k, f32)[None, :, :], axis=2)
    else:
        scores = tile.dot(tile.cast(queries, f32), tile.transpose(tile.cast(k, f32)))
    return scores


def append_pages(
    keys: Any, values: Any, k: Any, v: Any, table: Any, past: Any, count: Any, *, ring: bool = False
) -> tuple[Tensor, Tensor]:
    """The pages of keys and values with k and v [B, S, G, D] written at the positions from past[b] on.

    Of each request the first count[b] of S positions are written. In a compiled function whose pages are donated this
    writes in place. `ring`: positions after the table's last wrap around.

    Raises:
        ShapeError, DTypeError: the operands do not fit.
        ExecutionError: a position lies past the table's end, or has no page.
    """
    keys, values, k, v = (as_tensor(x) for x in (keys, values, k, v))
    _check_pages(keys, values, k, "k")
    if k.shape != v.shape or k.dtype != keys.dtype or v.dtype != values.dtype:
        raise (ShapeError if k.shape != v.shape else DTypeError)(
            "new keys and values do not fit the pages", location=library_caller_location(),
            expected=f"{keys.dtype} of one shape", received=f"{k.type} and {v.type}",
        )  # fmt: skip
    batch, length = k.shape[:2]
    if 0 in k.shape:
        return keys, values
    made = launch(write_pages, (batch, length), k, v, table, past, count, keys, values, ring=ring)
    return made[0], made[1]


def paged_attention(
    q: Any, keys: Any, values: Any, table: Any, past: Any, count: Any, *, scale: float | None = None,
    window: int = 0, ring: bool = False, parts: int | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ · scale) v for q [B, S, H, D] over the pages of each request: [B, S, H, D] of the type of q.

    Query s of request b is at position past[b] + s, and sees the positions up to its own; rows from count[b] on are
    unspecified. H is a multiple of the heads of keys (grouped queries). `window`: only so many positions are seen.
    `parts`: so many programs share the pages of a head where queries are few; by default the target decides. On GPUs
    queries and pages of one 16-bit type are multiplied on tensor cores, by weights that are rounded to that type.

    Raises:
        ShapeError: the operands do not fit.
        ArgumentError: the window is negative.
    """
    q, keys, values = (as_tensor(x) for x in (q, keys, values))
    _check_pages(keys, values, q, "q")
    if window < 0:
        raise ArgumentError("the window of attention is negative", location=library_caller_location(), received=window)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if scale <= 0:
        q, scale = q * scale, 1.0  # weights are powers of two of scores times a positive factor
    rows = _fold_heads(q, keys.shape[1])
    gpu = is_for_gpu()
    narrow = gpu and q.dtype == keys.dtype and q.dtype in (bf16, f16)
    attrs = {"group": q.shape[2] // keys.shape[1], "scale": scale, "window": window, "ring": ring, "narrow": narrow}
    if parts is None:
        batch, shared, count_of_rows = (int(n) for n in rows.shape[:3])
        parts = choose_parts(batch, shared, count_of_rows, table.shape[1]) if gpu else 1
    if parts > 1:
        found = _attend_parts(rows, keys, values, (table, past, count), parts, attrs)
    else:
        attrs["BM"] = _choose_rows(q, attrs["group"], narrow)
        grid = (tile.cdiv(rows.shape[2], attrs["BM"]), *rows.shape[1::-1])
        found = launch(attend_pages, grid, rows, keys, values, table, past, count, out=OutputMemory(rows.type), **attrs)
    return _unfold_heads(found, q.shape)


def _fold_heads(q: Tensor, shared: int) -> Tensor:
    """Queries [B, S, H, D] as [B, G, S · H / G, D]: the queries that share keys are adjacent rows."""
    batch, length, heads, width = q.shape
    if length > 1 and shared > 0:
        q = permute(reshape(q, shape=(batch, length, shared, heads // shared, width)), axes=(0, 2, 1, 3, 4))
    return reshape(q, shape=(batch, shared, length * (heads // shared), width))


def _unfold_heads(x: Tensor, wanted: tuple[Any, ...]) -> Tensor:
    """The inverse of `_fold_heads`."""
    batch, length, heads, width = wanted
    if length > 1:
        shared = x.shape[1]
        x = permute(reshape(x, shape=(batch, shared, length, heads // shared, width)), axes=(0, 2, 1, 3, 4))
    return reshape(x, shape=wanted)


def _choose_rows(q: Tensor, group: int, narrow: bool) -> int:
    """The rows of a block."""
    length = q.shape[1]
    if narrow:
        return TENSOR_ROWS if length * group <= TENSOR_ROWS else MORE_TENSOR_ROWS
    return group if length == 1 else QUERIES * group


def choose_parts(batch: int, heads: int, rows: int, pages: int) -> int:
    """The number of programs that share the pages of a head of a request: 1 where there are many heads, or queries."""
    return min(2 * BUSY_PROGRAMS // max(batch * heads, 1), pages, MOST_PARTS) if 0 < rows <= TENSOR_ROWS else 1


def _attend_parts(
    rows: Tensor, keys: Tensor, values: Tensor, requests: tuple[Any, Any, Any], parts: int, attrs: dict[str, Any]
) -> Tensor:
    """The attention of rows [B, G, R, D], by `parts` programs for each head, and a launch that combines theirs."""
    lead, width = (parts, *rows.shape[:3]), rows.shape[3]
    memories = [OutputMemory(TensorType(s, f32)) for s in ((*lead, width), lead, lead)]
    size = max(TENSOR_ROWS if attrs["narrow"] else 1, round_to_power(int(rows.shape[2])))
    found = launch(attend_pages_part, (parts, *rows.shape[1::-1]), rows, keys, values, *requests, *memories, **attrs,
                   BM=size)  # fmt: skip
    return combine(found, rows.type, attrs["scale"] * LOG2_E)


def _check_pages(keys: Tensor, values: Tensor, x: Tensor, name: str) -> None:
    fits = keys.ndim == 4 and keys.shape == values.shape and x.ndim == 4 and x.shape[3] == keys.shape[3]
    heads = fits and (x.shape[2] == keys.shape[1] if name == "k" else x.shape[2] % keys.shape[1] == 0)
    if not heads:
        raise ShapeError(
            f"`{name}` does not fit the pages of a cache", location=library_caller_location(),
            expected=f"{name} [B, S, heads, D] for pages [pages, G, size, D]",
            received=f"{x.type} and pages {keys.type}, {values.type}",
        )  # fmt: skip
