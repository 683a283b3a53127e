"""Paged attention (Kwon et al. 2023): keys and values of requests lie in pages that a table names, read where they lie.

Pages are [pages, G, size, D]: `size` positions of all G heads. `table` [B, T] has the numbers of each request's pages
in order; position p of request b lies in page table[b, p // size], row p % size.
"""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, library_caller_location
from tessera.core.types import f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor, as_tensor
from tessera.stdlib.attention import online_softmax_weights

# mypy: disable-error-code="operator, attr-defined, index"

ROWS = 16  # queries of one program of a long prompt


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
        tile.assert_(page < table.shape[1], "a cache is written past its end: position {}", place)
        number = table[b, page]
        tile.assert_(number >= 0, "a cache is written where it has no page: position {}", place)
        row = place % keys.shape[2]
        keys[number, 0 : keys.shape[1], row, 0 : keys.shape[3]] = k[b, s, 0 : k.shape[2], 0 : k.shape[3]]
        values[number, 0 : values.shape[1], row, 0 : values.shape[3]] = v[b, s, 0 : v.shape[2], 0 : v.shape[3]]


@kernel
def attend_pages(q, keys, values, table, past, count, out, *, scale: float, window: int, ring: bool, BS: int):
    """out = softmax(q kᵀ · scale) v over the pages of each request, on the grid (B, G, ceil(S / BS)).

    q and out are [B, S, H, D], query s at position past[b] + s; it sees the positions up to its own, of which the
    request has past[b] + count[b], and with a `window` only so many. Heads of queries share keys in groups.
    """
    b, g, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BS
    group, size, D = q.shape[2] // keys.shape[1], keys.shape[2], q.shape[3]
    rows = BS * group
    heads = tile.load(q[b, first : first + BS, g * group : (g + 1) * group, 0:D], edge="clip")
    queries = tile.reshape(tile.cast(heads, f32), (rows, D))
    place = past[b] + first + tile.reshape(tile.broadcast(tile.arange(0, BS)[:, None], (BS, group)), (rows,))
    total = past[b] + count[b]
    end = min(past[b] + first + BS, total)
    acc, m, l = tile.zeros((rows, D)), tile.full((rows,), -math.inf), tile.zeros((rows,))
    begin = 0
    if window > 0:
        begin = max(past[b] + first - window + 1, 0) // size
    for page in tile.range(begin, (end + size - 1) // size):
        number = table[b, page % table.shape[1]] if ring else table[b, page]
        cols = page * size + tile.arange(0, size)
        held = (cols < total)[:, None]  # 0 · NaN after a cache's end is NaN
        k = tile.cast(tile.load(keys[number, g, 0:size, 0:D], mask=held), f32)
        v = tile.cast(tile.load(values[number, g, 0:size, 0:D], mask=held), f32)
        if rows < 8:
            scores = tile.sum(queries[:, None, :] * k[None, :, :], axis=2) * scale
        else:
            scores = tile.dot(queries, tile.transpose(k)) * scale
        seen = (cols[None, :] <= place[:, None]) & (cols < total)[None, :]
        if window > 0:
            seen = seen & (cols[None, :] > place[:, None] - window)
        m, p, old = online_softmax_weights(tile.where(seen, scores, -math.inf), m, 0.0, False)
        l = l * old + tile.sum(p, axis=-1)
        if rows < 8:
            acc = acc * old[:, None] + tile.sum(p[:, :, None] * v[None, :, :], axis=1)
        else:
            acc = acc * old[:, None] + tile.dot(p, v)
    y = tile.reshape(acc / tile.where(l == 0.0, 1.0, l)[:, None], (BS, group, D))
    tile.store(out[b, first : first + BS, g * group : (g + 1) * group, 0:D], tile.cast(y, out.dtype), edge="clip")


def append_pages(
    keys: Any, values: Any, k: Any, v: Any, table: Any, past: Any, count: Any, *, ring: bool = False
) -> tuple[Tensor, Tensor]:
    """The pages of keys and values with k and v [B, S, G, D] written at the positions from past[b] on.

    Of each request the first count[b] of S positions are written. In a compiled function whose pages are donated this
    writes in place. `ring`: positions after the table's last wrap around.

    Raises:
        ShapeError, DTypeError: the operands do not fit.
        KernelAssertionError: a position lies past the table's end, or has no page.
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
    window: int = 0, ring: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(q kᵀ · scale) v for q [B, S, H, D] over the pages of each request: [B, S, H, D] of the type of q.

    Query s of request b is at position past[b] + s, and sees the positions up to its own; rows from count[b] on are
    unspecified. H is a multiple of the heads of keys (grouped queries). `window`: only so many positions are seen.

    Raises:
        ShapeError: the operands do not fit.
        ArgumentError: the window is negative.
    """
    q, keys, values = (as_tensor(x) for x in (q, keys, values))
    _check_pages(keys, values, q, "q")
    if window < 0:
        raise ArgumentError("the window of attention is negative", location=library_caller_location(), received=window)
    batch, length, heads, width = q.shape
    block = 1 if length == 1 else ROWS
    attrs = {"scale": width**-0.5 if scale is None else scale, "window": window, "ring": ring, "BS": block}
    grid = (batch, keys.shape[1], tile.cdiv(length, block))
    return launch(attend_pages, grid, q, keys, values, table, past, count, out=OutputMemory(q.type), **attrs)


def _check_pages(keys: Tensor, values: Tensor, x: Tensor, name: str) -> None:
    fits = keys.ndim == 4 and keys.shape == values.shape and x.ndim == 4 and x.shape[3] == keys.shape[3]
    heads = fits and (x.shape[2] == keys.shape[1] if name == "k" else x.shape[2] % keys.shape[1] == 0)
    if not heads:
        raise ShapeError(
            f"`{name}` does not fit the pages of a cache", location=library_caller_location(),
            expected=f"{name} [B, S, heads, D] for pages [pages, G, size, D]",
            received=f"{x.type} and pages {keys.type}, {values.type}",
        )  # fmt: skip
