"""Gradients of attention without stored scores, as FlashAttention-2 (Dao 2023) computes them.

The weights of a block are computed again from queries, keys and the logarithms of each row's sum. One launch has a
program for each block of keys and goes over the queries, another one a program for each block of queries and goes over
the keys: nothing is added up in memory, so that the results have the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.symbolic_dim import Size, ceil_divide, symbol_names
from tessera.core.types import DType, TensorType, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import reduce, shape
from tessera.ops.tensor.attention import HEADS_SECOND_ORDER
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.stdlib.attention import (
    LOG2_E,
    UNPACKED,
    attend,
    features_of,
    heads_and_length,
    load_head_rows,
    load_mask_block,
    store_head_rows,
)

LEAST_LENGTH = 64  # of queries and of keys; the weights of fewer are stored
MOST_PADDED = 1.8  # columns of a block for each feature of a head
MOST_FEATURES = 128
PACKED_FEATURES = (64, 128)  # of heads whose columns tensor maps load side by side
OWN_ROWS, ROUND_ROWS = 128, 64  # of a program's own block, and of one of its rounds

# mypy: disable-error-code="operator, attr-defined, index"


@kernel
def differentiate_keys(
    q, k, v, g, sums, deltas, mask, dk, dv, *, causal: bool, scale: float, window: int, BM: int, BN: int,
    packed: tuple = UNPACKED, features: int = 0,
):  # fmt: skip
    """The gradients dk [B, H, T, D] and dv [B, H, T, E] by each head of queries, on the grid (B, H, ceil(T / BN)).

    g [B, H, S, E] is the gradient of the output, `sums` are those of `attend`, and `deltas` [B, H, S] the sums of the
    products of g and the output. `mask` is None or [B or 1, H or 1, S or 1, T]. `packed` and `features` are as in
    `attend`; g, dk and dv are packed, too, their heads from the first.
    """
    (H, S), (G, _) = heads_and_length(q, False, packed[0][:1]), heads_and_length(k, False, packed[0][1:])
    D, E = features or features_of(q, packed[1]), features or features_of(v, packed[3])
    batch, head, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BN
    shared = head // (H // G)
    keys = load_head_rows(k, batch, shared, first, BN, False, None, packed[2], features)
    values = load_head_rows(v, batch, shared, first, BN, False, None, packed[3], features)
    total_k, total_v = tile.zeros((BN, D)), tile.zeros((BN, E))
    cols = first + tile.arange(0, BN)
    begin = first // BM * BM if causal else 0
    last = S if window == 0 else min(first + BN + window - 1, S)
    for start in tile.range(begin, last, BM):
        rows = start + tile.arange(0, BM)
        queries = load_head_rows(q, batch, head, start, BM, False, None, packed[1], features)
        slopes = load_head_rows(g, batch, head, start, BM, False, None, without_offset(packed[3]), features)
        high = tile.load(sums[batch, head, start : start + BM], edge="clip")
        delta = tile.load(deltas[batch, head, start : start + BM], edge="clip")
        exponents = (keys @ queries.T) * (scale * LOG2_E)
        if mask is not None:
            exponents = exponents + turn_mask_block(load_mask_block(mask, batch, head, start, first, BM, BN)) * LOG2_E
        weights = find_weights(exponents - high[None, :])
        weights = hide_weights(weights, rows[None, :], cols[:, None], causal, window)
        if mask is not None and S % BM != 0:  # a mask may be large where there is no query
            weights = tile.where(rows[None, :] < S, weights, 0.0)
        change = weights * (values @ slopes.T - delta[None, :])
        total_v = total_v + tile.cast(weights, slopes.dtype) @ slopes
        total_k = total_k + tile.cast(change, queries.dtype) @ queries
    store_head_rows(dk, batch, head, first, tile.cast(total_k * scale, dk.dtype), False, packed[0])
    store_head_rows(dv, batch, head, first, tile.cast(total_v, dv.dtype), False, packed[0])


@kernel
def differentiate_queries(
    q, k, v, g, sums, deltas, mask, dq, *, causal: bool, scale: float, window: int, BM: int, BN: int,
    packed: tuple = UNPACKED, features: int = 0,
):  # fmt: skip
    """The gradient dq [B, H, S, D], on the grid (B, H, ceil(S / BM)), from the operands of `differentiate_keys`."""
    (H, _), (G, T) = heads_and_length(q, False, packed[0][:1]), heads_and_length(k, False, packed[0][1:])
    batch, head, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BM
    shared = head // (H // G)
    queries = load_head_rows(q, batch, head, first, BM, False, None, packed[1], features)
    slopes = load_head_rows(g, batch, head, first, BM, False, None, without_offset(packed[3]), features)
    high = tile.load(sums[batch, head, first : first + BM], edge="clip")
    delta = tile.load(deltas[batch, head, first : first + BM], edge="clip")
    total = tile.zeros((BM, features or features_of(q, packed[1])))
    rows = first + tile.arange(0, BM)
    last = min(first + BM, T) if causal else T
    begin = 0 if window == 0 else max(first - window + 1, 0) // BN * BN
    for start in tile.range(begin, last, BN):
        cols = start + tile.arange(0, BN)
        keys = load_head_rows(k, batch, shared, start, BN, False, None, packed[2], features)
        values = load_head_rows(v, batch, shared, start, BN, False, None, packed[3], features)
        exponents = (queries @ keys.T) * (scale * LOG2_E)
        if mask is not None:
            exponents = exponents + load_mask_block(mask, batch, head, first, start, BM, BN) * LOG2_E
        weights = find_weights(exponents - high[:, None])
        weights = hide_weights(weights, rows[:, None], cols[None, :], causal, window)
        if T % BN != 0:
            weights = tile.where(cols[None, :] < T, weights, 0.0)
        change = weights * (slopes @ values.T - delta[:, None])
        total = total + tile.cast(change, keys.dtype) @ keys
    store_head_rows(dq, batch, head, first, tile.cast(total * scale, dq.dtype), False, packed[0])


def without_offset(place):
    """The place of heads in columns of their own."""
    return (place[0], 0) if place else ()


def turn_mask_block(block):
    """The block of a mask for scores of keys by queries; one row for all queries becomes a column."""
    return block[:, None] if len(block.shape) == 1 else block.T


def find_weights(exponents):
    """Powers of two, without subnormal numbers, which are slow on GPUs."""
    return tile.where(exponents < -126.0, 0.0, tile.exp2(exponents))


def hide_weights(weights, rows, cols, causal, window):
    """Weights with 0 where the key lies after the query, or before its window."""
    if causal:
        weights = tile.where(cols <= rows, weights, 0.0)
    if window > 0:
        weights = tile.where(cols > rows - window, weights, 0.0)
    return weights


@dataclass(frozen=True)
class PackedHeads:
    """Heads [B, H, S, D] that are columns of an array [B, S, C], from the `first` head on."""

    source: Value
    first: int


@dataclass(frozen=True)
class DifferentiableAttention:
    """Attention of q [B, H, S, D] with keys and values of G heads, with sums for its gradients.

    The launches take `operands`: q, k and v themselves, or the arrays in which they are packed; and `masks`, the mask
    if there is one. `blocks` are the queries and keys of a block of every launch; without them the blocks are those of
    tensor cores.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    attrs: dict[str, Any]
    operands: tuple[Value, ...]
    masks: tuple[Value, ...] = ()
    blocks: tuple[int, int] = ()  # type: ignore[assignment]

    @property
    def is_packed(self) -> bool:
        """Whether heads are side by side in memory."""
        return "packed" in self.attrs

    @property
    def features(self) -> int:
        """The columns of blocks, where heads have fewer than tensor cores multiply best; 0: as many as heads have."""
        sizes = (self.q[3], self.v[3])
        if self.blocks or self.is_packed or min(self.q[2], self.k[2]) < LEAST_LENGTH or any(n % 8 for n in sizes):
            return 0
        most = max(sizes)
        return next((n for n in PACKED_FEATURES if most < n <= MOST_PADDED * most), 0)

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result of attention."""
        return (*self.q[:3], self.v[3])

    def place(self, x: Tensor, like: tuple[int, ...]) -> Tensor:
        """Heads as a launch takes them."""
        x = shape.reshape(x, shape=like)
        return shape.reshape(shape.permute(x, axes=HEADS_SECOND_ORDER), shape=self.fold(like)) if self.is_packed else x

    def take(self, x: Tensor, like: tuple[int, ...]) -> Tensor:
        """Heads [B, H, S, D] from what a launch gives."""
        if not self.is_packed:
            return shape.reshape(x, shape=like)
        apart = shape.reshape(x, shape=(like[0], like[2], like[1], like[3]))
        return shape.permute(apart, axes=HEADS_SECOND_ORDER)

    def fold(self, like: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of heads in memory."""
        return (like[0], like[2], like[1] * like[3]) if self.is_packed else like

    def list_sources(self, operands: tuple[Tensor, ...]) -> list[Tensor]:
        """The operands of a launch."""
        shapes = zip(operands, (self.q, self.k, self.v), strict=True)
        return list(operands) if self.is_packed else [shape.reshape(x, shape=like) for x, like in shapes]

    def list_masks(self, given: Sequence[Tensor]) -> list[Tensor | None]:
        """The mask operand of a launch [B or 1, H or 1, S or 1, T], or None."""
        return [shape.reshape(x, shape=view_as_rank4(tuple(x.shape))) for x in given] or [None]

    def attend(self, *operands: Tensor) -> tuple[Tensor, Tensor]:
        """The results of `attention_with_sums`, [B, H, S, E] and [B, H, S]."""
        sources, mask = self.list_sources(operands[:3]), self.list_masks(operands[3:])
        own = 2 * ROUND_ROWS if self.features or {self.q[3], self.v[3]} <= {64, 128} else ROUND_ROWS
        (rows, keys), dtype = self.blocks or (own, own), operands[0].dtype
        memories = [OutputMemory(TensorType(self.fold(self.result), dtype)), None]
        memories += [OutputMemory(TensorType(self.q[:3], f32))]
        grid, named = (*self.q[:2], ceil_divide(self.q[2], rows)), self.name_constants(rows, keys)
        out, sums = launch(attend, grid, *sources, *mask, None, *memories, **named, narrow=True)
        return self.take(out, self.result), sums

    def differentiate(self, *operands: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The results of `attention_gradients`."""
        sources, (out, sums, g), mask = operands[:3], operands[3:6], self.list_masks(operands[6:])
        each, dtype, result = self.q[:2], g.dtype, self.result
        g, out = (self.place(x, result) for x in (g, out))
        deltas = self.find_deltas(g, out)
        given = [*self.list_sources(sources), g, shape.reshape(sums, shape=self.q[:3]), deltas, *mask]
        by_head = [(*each, *x[2:]) for x in (self.k, self.v)]
        memories = [OutputMemory(TensorType(self.fold(like), dtype)) for like in (*by_head, self.q)]
        rows, keys = self.blocks or (ROUND_ROWS, OWN_ROWS)
        named = self.name_constants(rows, keys)
        found = launch(differentiate_keys, (*each, ceil_divide(self.k[2], keys)), *given, *memories[:2], **named)
        rows, keys = self.blocks or (OWN_ROWS, ROUND_ROWS)
        named = self.name_constants(rows, keys)
        dq = launch(differentiate_queries, (*each, ceil_divide(self.q[2], rows)), *given, memories[2], **named)
        dk, dv = (self.add_groups(self.take(x, like)) for x, like in zip(found, by_head, strict=True))
        return self.take(dq, self.q), dk, dv

    def name_constants(self, rows: int, keys: int) -> dict[str, Any]:
        """The constants of a launch by blocks of so many queries and keys."""
        return {**self.attrs, "BM": rows, "BN": keys, "features": self.features}

    def find_deltas(self, g: Tensor, out: Tensor) -> Tensor:
        """For each query the sum of the products of the gradient and the output, [B, H, S]."""
        batch, heads, length, features = self.result
        if self.is_packed:
            g, out = (shape.reshape(x, shape=(batch, length, heads, features)) for x in (g, out))
        found = reduce.sum(cast(g, dtype=f32) * cast(out, dtype=f32), axis=-1)
        return shape.permute(found, axes=(0, 2, 1)) if self.is_packed else found

    def add_groups(self, x: Tensor) -> Tensor:
        """Gradients by heads of queries, added up over those that share a head of keys."""
        heads, groups = self.q[1], self.k[1]
        if heads == groups:
            return x
        x = shape.reshape(x, shape=(self.q[0], groups, heads // groups, *x.shape[2:]))
        return cast(reduce.sum(cast(x, dtype=f32), axis=2), dtype=x.dtype)


def match_differentiable_attention(
    uses: UseDef, node: Node, causal: bool, scale: float, weights: DType, window: int
) -> DifferentiableAttention | None:
    """The attention of a node whose first operands are q, k and v, and whose last one may be a mask; None where its
    weights must be stored."""
    values, masks = node.args[:3], node.args[len(node.args) // 3 * 3 :]
    types = [get_tensor_type(v) for v in values]
    dtype = types[0].dtype
    if weights != dtype or any(t.dtype != dtype or t.policy is not None or t.accumulate != f32 for t in types):
        return None
    if any(t.rank > 4 or symbol_names(t.shape) for t in types) or scale <= 0:
        return None
    q, k, v = ((*(1,) * (4 - t.rank), *(int(n) for n in t.shape)) for t in types)
    if min(q[2], k[2]) < LEAST_LENGTH or q[0] != k[0] or q[1] % k[1]:
        return None
    masks = tuple(_find_narrow_mask(uses, x) for x in masks)
    if not all(broadcasts(view_as_rank4(get_shape(x)), (*q[:3], k[2])) for x in masks):
        return None
    attrs: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
    heads = [found for x in values if (found := _find_packed(uses, x)) is not None]
    if len(heads) < 3:
        return DifferentiableAttention(q, k, v, attrs, values, masks)
    places = ((x[3], each.first) for x, each in zip((q, k, v), heads, strict=True))
    attrs["packed"] = ((q[1], k[1]), *places)
    return DifferentiableAttention(q, k, v, attrs, tuple(each.source for each in heads), masks)


def _find_narrow_mask(uses: UseDef, x: Value) -> Value:
    """A mask, or what is repeated to it along axes other than that of the keys."""
    spread = uses.find(x, broadcast_to)
    return spread.args[0] if spread is not None and get_shape(spread.args[0])[-1:] == get_shape(x)[-1:] else x


def view_as_rank4(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """A shape of rank 4; a tensor of rank 3 has a batch of one."""
    return (1,) * (4 - len(shape)) + shape


def broadcasts(mask: tuple[Size, ...], scores: tuple[Size, ...]) -> bool:
    """Whether a mask has all keys, and along each other axis the full size or 1."""
    return mask[-1] == scores[-1] and all(m in (1, s) for m, s in zip(mask, scores, strict=True))


def _find_packed(uses: UseDef, x: Value) -> PackedHeads | None:
    """Heads [B, H, S, D] as columns of an array, if that is what is turned to them."""
    turned = uses.find(x, shape.permute)
    apart = uses.find(turned.args[0], shape.reshape) if turned is not None else None
    if apart is None or turned.attrs["axes"] != HEADS_SECOND_ORDER:  # type: ignore[union-attr]
        return None
    (batch, length, heads, features), source = get_shape(apart.out), apart.args[0]
    if features not in PACKED_FEATURES or get_shape(source) != (batch, length, heads * features):
        return None
    part = uses.find(source, shape.slice_)
    if part is None:
        return PackedHeads(source, 0)
    whole, first = get_shape(part.args[0]), part.attrs["start"][-1]
    plain = part.attrs["start"][:-1] == (0, 0) and set(part.attrs["step"]) == {1} and whole[:-1] == (batch, length)
    return PackedHeads(part.args[0], first // features) if plain and first % features == 0 else PackedHeads(source, 0)
