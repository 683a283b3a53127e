"""Attention launches: attention of a Graph as one launch of a flash attention kernel (Dao et al. 2022), or in parts.

The kernels take refs of [batch, heads, length, width]. Queries of grouped heads are folded, few queries share the keys.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

from tessera.core.symbolic_dim import Dim, Size, proves_at_most, round_up, symbol_names
from tessera.core.types import DType, RefType, f32
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import LibraryLaunch, LibraryLowering, LoweringPlan, library_lowerings, library_rules
from tessera.ops.tensor import (
    attention,
    attention_gradients,
    shape,
)
from tessera.ops.tensor.basic import full
from tessera.stdlib.attention import specialise_attention
from tessera.stdlib.attention_gradients import (
    MOST_FEATURES,
    DifferentiableAttention,
    broadcasts,
    match_differentiable_attention,
    view_as_rank4,
)
from tessera.stdlib.split_keys import match_split_attention

RANK = 4
MIN_BLOCK = 16  # the smallest rows and columns of a block
DEEP_HEADS, DEEPEST_HEADS = {64, 128}, {256}  # features of heads whose blocks differ; the deepest have half the keys
# Heads whose features are padded, and how much at most: short and long ones, by their positions.
PADDED = ((1024, 2.0), (100, 1.8))
WIDE_BLOCKS = (64, 64)  # queries and keys of the blocks of gradients in f32
# The features of heads of f32, and the scores from which on they are not stored (measured; of 8 GB for want of memory).
LEAST_WIDE_SCORES = ((32, 1 << 21), (64, 1 << 28), (MOST_FEATURES, 1 << 31))
MOST_STORED, LEAST_STORED_KEYS, LEAST_PROGRAMS = 1 << 31, 256, 96  # scores, and keys from which on they are stored
LEAST_WIDE = 64  # features of heads of f32 beyond which blocks have fewer keys


@library_rules(attention.scaled_dot_product_attention)
def _(node: Node, plan: LoweringPlan) -> LibraryLaunch | None:
    return _make_launch(node, plan, turned=False)


@library_lowerings(attention.scaled_dot_product_attention)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """Attention of few queries: those of a group of heads as the rows of one head, and long keys in parts."""
    return _fold_queries(node) or _split_keys(node, plan)


def _fold_queries(node: Node) -> LibraryLowering | None:
    """The queries of a group of heads as the rows of one head, where each head has few: keys are read once."""
    q, k = (get_shape(v) for v in node.args[:2])
    mask = get_shape(node.args[3]) if len(node.args) > 3 else ()
    if not _shares_keys(q, k) or node.attrs["causal"] or node.attrs["window"] or (mask and q[-2] != 1):
        return None
    if len(mask) > 2 and mask[-3] not in (1, q[-3]):
        return None
    attrs = {name: value for name, value in node.attrs.items() if name != "enable_gqa"}

    def attend(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        folded = [_fold_heads(m, int(k.shape[-3])) if m.ndim > 2 and m.shape[-3] != 1 else m for m in masks]
        return shape.reshape(
            attention.scaled_dot_product_attention(_fold_heads(q, int(k.shape[-3])), k, v, *folded, **attrs),
            shape=get_shape(node.out),
        )

    return LibraryLowering(node.args, attend)


def _split_keys(node: Node, plan: LoweringPlan) -> LibraryLowering | None:
    """Attention of few queries over long keys in parts, where a target has many programs to run."""
    shapes = [view_as_rank4(get_shape(v)) for v in node.args]
    if not plan.tensor_cores or node.attrs["causal"] or node.attrs["window"] or not _is_supported(node, shapes):
        return None
    (q, k, v), dtype = shapes[:3], get_tensor_type(node.args[0]).dtype
    plain = q[1] == k[1] and all(get_tensor_type(x).policy is None for x in (*node.args, node.out))
    found = match_split_attention(q, k, v, dtype) if plain else None
    if found is None:
        return None
    attrs = {**node.attrs, "softcap": node.attrs["softcap"] or 0.0}

    def attend(*operands: Tensor) -> Tensor:
        q, k, v, *masks = (shape.reshape(x, shape=s) for x, s in zip(operands, shapes, strict=True))
        return shape.reshape(found.compute(q, k, v, masks[0] if masks else None, attrs), shape=get_shape(node.out))

    return LibraryLowering(node.args, attend)


@library_lowerings(attention_gradients.attention_with_sums, attention_gradients.attention_gradients)
def _(node: Node, uses: UseDef, plan: LoweringPlan) -> LibraryLowering | None:
    """Attention with its gradients, whose weights are computed again: in 16 bits where a target has tensor cores, on
    processors where no cache holds the scores."""
    forward = node.op is attention_gradients.attention_with_sums
    if forward and not uses.count_uses(node.results[1]):
        return LibraryLowering(node.args, partial(_attend_without_sums, node))
    found, wide = match_differentiable_attention(uses, node, **node.attrs), get_tensor_type(node.args[0]).dtype == f32
    if found is None or not (_suits_tensor_cores(found, node) if plan.tensor_cores else _streams_scores(found, plan)):
        return None
    if plan.tensor_cores and wide:
        found = replace(found, blocks=WIDE_BLOCKS)
    if not plan.tensor_cores:
        rows = (plan.flash_m, found.q[2], plan.flash_least, plan.flash_rows_cost)
        keys = (plan.flash_n, found.k[2], MIN_BLOCK, plan.flash_keys_cost)
        rows_, keys_ = (_choose_block_length(*each, found.attrs["causal"]) for each in (rows, keys))
        found = replace(found, blocks=(rows_, keys_))

    def compute(*operands: Tensor) -> tuple[Tensor, ...]:
        results = found.attend(*operands) if forward else found.differentiate(*operands)
        return tuple(shape.reshape(x, shape=get_shape(v)) for x, v in zip(results, node.results, strict=True))

    return LibraryLowering((*found.operands, *node.args[3 : len(node.args) // 3 * 3], *found.masks), compute)


def _attend_without_sums(node: Node, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """The results of `attention_with_sums` where nothing needs the sums: no gradient follows."""
    out = attention.scaled_dot_product_attention(*operands, **node.attrs, softcap=0.0)
    sums = get_tensor_type(node.results[1])
    return out, full(shape=sums.shape, value=0.0, dtype=sums.dtype)


def _suits_tensor_cores(found: DifferentiableAttention, node: Node) -> bool:
    """Whether tensor cores compute the products: of f32 in parts, where scores would take long to store and read."""
    dtype, features = get_tensor_type(node.args[0]).dtype, max(found.q[3], found.v[3])
    if dtype == f32:
        least = next((n for most, n in LEAST_WIDE_SCORES if features <= most), None)
        return least is not None and math.prod(found.q[:3]) * found.k[2] >= least
    return dtype.bits == 16 and features <= MOST_FEATURES


def _streams_scores(found: DifferentiableAttention, plan: LoweringPlan) -> bool:
    """Whether no cache of a core holds the scores, which each product would then read from memory."""
    return plan.streamed is not None and math.prod(found.q[:3]) * found.k[2] >= plan.streamed


def _shares_keys(q: tuple[Size, ...], k: tuple[Size, ...]) -> bool:
    """Whether several heads of a few queries each share a head of keys."""
    if min(len(q), len(k)) < 3 or symbol_names((*q[-3:], k[-3])) or 0 in (*q[-3:], k[-3]):
        return False
    return int(q[-3]) > int(k[-3]) and int(q[-2]) < MIN_BLOCK


def _fold_heads(x: Tensor, heads: int) -> Tensor:
    """[..., H, S, D] as [..., heads, H / heads · S, D]."""
    *outer, count, length, width = x.shape
    return shape.reshape(x, shape=(*outer, heads, int(count) // heads * length, width))


@library_rules(attention.positional_attention)
def _(node: Node, plan: LoweringPlan) -> LibraryLaunch | None:
    return _make_launch(node, plan, turned=True)


def _make_launch(node: Node, plan: LoweringPlan, turned: bool) -> LibraryLaunch | None:
    """The flash kernel for a node whose head axis precedes the position axis or, `turned`, follows it."""
    shapes = [view_as_rank4(get_shape(v)) for v in node.args]
    result = view_as_rank4(get_shape(node.out))
    heads_first = [_swap_heads(s) if turned and i < 3 else s for i, s in enumerate(shapes)]
    dtype = get_tensor_type(node.args[0]).dtype
    if not _is_supported(node, heads_first) or _is_decoding(heads_first, dtype, plan):
        return None
    if plan.tensor_cores and dtype == f32 and _stores_scores(heads_first, plan):
        return None
    names = ("q", "k", "v", "mask")
    types = {n: _make_ref(v, s) for n, v, s in zip(names, node.args, shapes, strict=False)}
    types["out"] = _make_ref(node.out, result)
    widths = {heads_first[0][3], heads_first[2][3]}
    features = _pad_features(plan, widths, (heads_first[0][2], heads_first[1][2])) if _rounds_weights(node) else 0
    rows, columns = _choose_blocks(plan, {features} if features else widths, _rounds_weights(node))
    (length, keys), causal = (s[2] for s in heads_first[:2]), bool(node.attrs["causal"])
    blocks: dict[str, Any] = {
        "BM": _choose_block_length(rows, length, plan.flash_least, plan.flash_rows_cost, causal),
        "BN": _choose_block_length(columns, keys, MIN_BLOCK, plan.flash_keys_cost, causal),
    }
    attrs = {k: v for k, v in node.attrs.items() if k not in ("weights", "enable_gqa")}
    module = specialise_attention(
        types, **attrs, narrow=_rounds_weights(node), turned=turned, features=features, **blocks
    )
    function = module.functions[1]
    return LibraryLaunch(function, tuple(function.attrs["grid"]), tuple(shapes), result)


def _pad_features(plan: LoweringPlan, widths: set[Size], lengths: tuple[Size, Size]) -> int:
    """The features of long heads' blocks that warp-specialised products take, where heads have fewer; 0: as they are.

    Tensor maps fill the others with zeros, where rows begin at multiples of 16 bytes.
    """
    if not plan.flash_deep or not all(isinstance(n, int) for n in (*widths, *lengths)):
        return 0
    sizes, length = [int(n) for n in widths], min(int(n) for n in lengths)  # type: ignore[call-overload]
    if any(n % 8 for n in sizes) or widths <= DEEP_HEADS or widths == DEEPEST_HEADS:
        return 0
    factor = next((most for least, most in PADDED if length >= least), 0.0)
    return next((n for n in (64, 128, 256) if max(sizes) <= n <= factor * max(sizes)), 0)


def _choose_blocks(plan: LoweringPlan, widths: set[Size], rounded: bool) -> tuple[int, int]:
    """The queries and keys of a block, by the features of a head; `rounded`: weights are as narrow as values."""
    if plan.flash_deep and rounded and widths <= DEEP_HEADS:
        return plan.flash_deep, plan.flash_deep
    if plan.flash_deep and rounded and widths == DEEPEST_HEADS:
        return plan.flash_deep, plan.flash_deep // 2
    if plan.flash_deep and not rounded and any(isinstance(n, int) and n > LEAST_WIDE for n in widths):
        return plan.flash_m, plan.flash_n // 2  # so that two programs are on a multiprocessor
    return plan.flash_m, plan.flash_n


def _is_decoding(shapes: list[tuple[Size, ...]], dtype: DType, plan: LoweringPlan) -> bool:
    """Whether each key serves so few queries that their products are reductions, which read the keys once."""
    q, k = shapes[:2]
    slow = not plan.tensor_cores or dtype == f32  # as a product of blocks
    return slow and proves_at_most(q[2] * (q[1] // k[1]), plan.vector_products)


def _stores_scores(shapes: list[tuple[Size, ...]], plan: LoweringPlan) -> bool:
    """Whether products of f32 in parts, of stored scores, take less time than blocks of many features: measured where
    there are many keys, or too few queries for the programs that a GPU runs at once."""
    q, k, v = shapes[:3]
    if symbol_names((*q, *k, *v)) or max(int(q[3]), int(v[3])) <= MOST_FEATURES:
        return False
    rows = math.prod(int(n) for n in q[:3])
    few = rows <= LEAST_PROGRAMS * plan.flash_m
    return rows * int(k[2]) < MOST_STORED and (few or int(k[2]) >= LEAST_STORED_KEYS)


def _choose_block_length(block: int, length: Size, least: int, cost: int, causal: bool) -> int:
    """The block size: at most the next power of two of a length that is a number or, where blocks have a cost, the
    multiple of the least size whose blocks take least time.

    A block costs as much as so many elements of its own, and a causal one computes about half a block of scores that
    are masked for each block along the other axis.
    """
    if isinstance(length, Dim):
        return block
    if not cost:
        return min(block, max(least, 1 << (length - 1).bit_length()))
    first = min(block // 2, round_up(length, least))
    return min(range(first, 2 * block, least), key=lambda n: -(-length // n) * (n + cost) + n * causal)


def _swap_heads(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return (shape[0], shape[2], shape[1], shape[3])


def _is_supported(node: Node, shapes: list[tuple[Size, ...]]) -> bool:
    """Whether the kernel computes this node: its types, ranks and sizes, with the head axis first."""
    q, k, v = shapes[:3]
    if any(len(get_shape(x)) > RANK or 0 in get_shape(x) for x in node.args):
        return False
    if any(x.type.dtype != f32 for x in node.args) and not _is_small_float(node):
        return False
    if any(get_tensor_type(x).accumulate != f32 for x in node.args[:3]):
        return False
    if any(x.type.dtype == f32 and get_tensor_type(x).policy is not None for x in node.args):  # of the sums, too
        return False
    if node.attrs["weights"] not in (f32, node.args[2].type.dtype):
        return False
    if any(symbol_names((x[1], x[3])) for x in shapes[:3]):  # heads and features are numbers
        return False
    fits = q[0] == k[0] == v[0] and k[1] == v[1] and q[1] % k[1] == 0
    return fits and all(broadcasts(m, (*q[:3], k[2])) for m in shapes[3:])


def _rounds_weights(node: Node) -> bool:
    """Whether weights are rounded to the type of v."""
    return node.attrs["weights"] != f32


def _is_small_float(node: Node) -> bool:
    dtypes = {x.type.dtype for x in node.args}
    return len(dtypes) == 1 and all(d.is_float and d.bits == 16 for d in dtypes)


def _make_ref(value: Value, shape: tuple[Size, ...]) -> RefType:
    type = get_tensor_type(value)
    return RefType(shape, type.dtype, policy=type.policy)
