"""Paged decoding: one new position of each request is rotated, written to its page, and attends to the pages (the
append and attention kernels of FlashInfer, Ye et al. 2025), in one launch for each layer, or two where keys are cut."""

from __future__ import annotations

from typing import Any

from tessera.core.types import TensorType, bf16, f16, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.shape import reshape
from tessera.stdlib.attention import LOG2_E
from tessera.stdlib.paged_attention import TENSOR_ROWS, choose_pages, choose_parts, store_part, sum_pages
from tessera.stdlib.routine import is_for_gpu
from tessera.stdlib.split_keys import combine, round_to_power

# mypy: disable-error-code="operator, attr-defined, index"


@kernel
def append_and_attend(
    heads, cos, sin, keys, values, table, past, count, out, *, group: int, scale: float, window: int, narrow: bool,
    BM: int,
):  # fmt: skip
    """The attention of `attend_pages` for one position of each request, which is written first; grid (1, G, B).

    heads [B, H + 2G, D] are the queries, keys and values of the new positions, out is [B, G, H / G, D]. `cos` and `sin`
    [B, D / 2] rotate pairs of features at a distance of D / 2; None: queries and keys stay as they are.
    """
    g, b = tile.program_id(1), tile.program_id(2)
    size, total = keys.shape[2], past[b] + count[b]
    begin = 0 if window == 0 else tile.maximum(past[b] - window + 1, 0) // size
    place_of_pages = (b, g, begin, (total + size - 1) // size)
    left, right = append_position(heads, cos, sin, keys, values, table, past, count, place_of_pages, group, BM)
    place = past[b] + tile.zeros((BM,), past.dtype)
    acc, m, l = sum_pages(left, right, keys, values, table, place_of_pages, place, total, scale, window, False, narrow)
    y = acc / tile.where(l == 0.0, 1.0, l)[:, None]
    tile.store(out[b, g, 0:BM, :], tile.cast(y, out.dtype), edge="clip")


@kernel
def append_and_attend_part(
    heads, cos, sin, keys, values, table, past, count, sums, maxima, totals, *, group: int, scale: float, window: int,
    narrow: bool, BM: int,
):  # fmt: skip
    """As `append_and_attend` for a part of the pages of each request, on the grid (parts, G, B): maxima and totals
    [parts, B, G, H / G] of the weights relative to them, and sums [parts, B, G, H / G, D]. The program whose part has
    the page of the new position writes it."""
    part, g, b = tile.program_id(0), tile.program_id(1), tile.program_id(2)
    size, total = keys.shape[2], past[b] + count[b]
    begin = 0 if window == 0 else tile.maximum(past[b] - window + 1, 0) // size
    first, last = choose_pages(part, sums.shape[0], begin, (total + size - 1) // size)
    place_of_pages = (b, g, first, last)
    left, right = append_position(heads, cos, sin, keys, values, table, past, count, place_of_pages, group, BM)
    place = past[b] + tile.zeros((BM,), past.dtype)
    acc, m, l = sum_pages(left, right, keys, values, table, place_of_pages, place, total, scale, window, False, narrow)
    store_part((sums, maxima, totals), (part, b, g), (acc, m, l))


def append_position(heads, cos, sin, keys, values, table, past, count, place_of_pages, group, BM):
    """Write the new position if its page is among those given; the rotated queries, of both halves of the features.

    Rows of queries from H / G on are of other heads: their results are not stored.
    """
    b, g, begin, end = place_of_pages
    shared, size, D = keys.shape[1], keys.shape[2], keys.shape[3]
    of_key, of_value, first = group * shared + g, (group + 1) * shared + g, g * group
    page, row = past[b] // size, past[b] % size
    if cos is None:
        left, right = tile.cast(tile.load(heads[b, first : first + BM, :], edge="clip"), keys.dtype), None
    else:
        x = tile.load(heads[b, first : first + BM, 0 : D // 2], edge="clip")
        y = tile.load(heads[b, first : first + BM, D // 2 : D], edge="clip")
        c, s = cos[b, :][None, :], sin[b, :][None, :]
        left, right = tile.cast(x * c - y * s, keys.dtype), tile.cast(y * c + x * s, keys.dtype)
    if count[b] > 0 and page >= begin and page < end:
        tile.assert_(page < table.shape[1], "a cache is written past its end: make it longer, or a ring", past[b])
        number = table[b, page]
        tile.assert_(number >= 0, "a cache is written where it has no page", past[b])
        v = tile.cast(heads[b, of_value, :], values.dtype)
        if cos is None:
            keys[number, g, row, :] = tile.cast(heads[b, of_key, :], keys.dtype)
        else:
            x, y = heads[b, of_key, 0 : D // 2], heads[b, of_key, D // 2 : D]
            c, s = cos[b, :], sin[b, :]
            keys[number, g, row, 0 : D // 2] = tile.cast(x * c - y * s, keys.dtype)
            keys[number, g, row, D // 2 : D] = tile.cast(y * c + x * s, keys.dtype)
        values[number, g, row, :] = v
    return left, right


def decode_position(
    heads: Tensor, angles: tuple[Tensor, Tensor] | None, pages: tuple[Any, Any], table: Any, past: Any, count: Any, *,
    window: int = 0, parts: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attention of the next position of each request, [B, 1, H, D] of the type of the pages, and the pages with it.

    heads [B, 1, H + 2G, D] of f32 are the queries, keys and values of the next position. `angles` are the cosines and
    sines [B, 1, D / 2] of rotary positions, by which features i and i + D / 2 turn. Of requests whose count is 0
    nothing is written. Queries and keys are rounded to the type of the pages, as by `append_pages` and
    `paged_attention`, whose results these are; `parts` is as there.
    """
    keys, values = pages
    batch, _, total, width = heads.shape
    shared = keys.shape[1]
    group = (total - 2 * shared) // shared
    rows = reshape(heads, shape=(batch, total, width))
    turns = [None, None] if angles is None else [reshape(a, shape=(batch, width // 2)) for a in angles]
    if parts is None:
        parts = choose_parts(int(batch), shared, group, table.shape[1]) if is_for_gpu() else 1
    narrow = is_for_gpu() and keys.dtype in (bf16, f16)
    attrs = {"group": group, "scale": width**-0.5, "window": window, "narrow": narrow}
    attrs["BM"] = max(TENSOR_ROWS, round_to_power(group)) if narrow else round_to_power(group)
    given, lead = (rows, *turns, keys, values, table, past, count), (batch, shared, group)
    kind = TensorType((*lead, width), keys.dtype)
    if parts > 1:
        memories = [OutputMemory(TensorType((parts, *s), f32)) for s in ((*lead, width), lead, lead)]
        keys, values, *found = launch(append_and_attend_part, (parts, shared, batch), *given, *memories, **attrs)
        out = combine(found, kind, attrs["scale"] * LOG2_E)
    else:
        keys, values, out = launch(append_and_attend, (1, shared, batch), *given, OutputMemory(kind), **attrs)
    return reshape(out, shape=(batch, 1, group * shared, width)), keys, values
