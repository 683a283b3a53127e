"""Parallel layers: weights, experts or sequences cut over ranks (Megatron, GShard, ring attention).

Each function runs in the ranks of an SPMD function, on this rank's parts.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32, f64, int64
from tessera.dist.collectives import all_reduce, all_to_all, collective_permute, reduce_scatter
from tessera.dist.mesh import MeshAxis
from tessera.dist.ranks import current_axes, get_rank, has_copy_engines
from tessera.dist.routing import route_function
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import full, zeros
from tessera.ops.tensor.basic import cast, fusion_barrier
from tessera.ops.tensor.contractions import einsum, matmul
from tessera.ops.tensor.elementwise import equal, exp, greater_equal, maximum, where
from tessera.ops.tensor.matrices import matrix_transpose
from tessera.ops.tensor.rearrange import one_hot
from tessera.ops.tensor.reduce import argmax, cumsum, max, sum
from tessera.ops.tensor.shape import concatenate, expand_dims, iota, reshape, squeeze

# Tensor parallelism: a product with columns of the weight on each rank, then one with rows of the next weight.


def column_parallel(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """`x` [..., K] times this rank's columns of a weight [K, N / ranks], plus this rank's part of the bias.

    Shapes: [..., N / ranks]. Nothing is sent: the parts of the result stay where they are.

    Raises:
        ShapeError: the operands do not fit.
    """
    y = matmul(x, weight)
    return y if bias is None else y + bias


def row_parallel(
    x: Any, weight: Any, bias: Any = None, axis: Any = None, scatter: bool = False, parts: int | str | None = None
) -> Tensor:  # fmt: skip
    """This rank's part of `x` [..., K / ranks] times its rows of a weight [K / ranks, N], summed over the ranks.

    Shapes: [..., N], for each rank; `bias` [N] is added once. `axis` is the mesh axis. With `scatter` each rank gets its
    part of the sum along the first axis (sequence parallelism: Korthikanti et al. 2022). In compiled programs the ranks
    exchange a part of the product while they compute the next (collective matmul: Wang et al. 2023). `parts` says which:

    - a number: so many parts of the rows of every rank, each reduced and scattered by itself.
    - "ranks": the rows of one rank after the other. Each block is sent to its owner, which adds what it receives to its
      own, in f32 or wider and in the order of the ranks.

    By default the form that a model of their time finds fastest: "ranks" where copy engines send the blocks.

    Raises:
        ShapeError: the operands do not fit, or the first axis has no equal parts.
        ArgumentError: the mesh has no such axis, or the caller is not a rank; `parts` is neither.
    """
    if scatter:
        y = _multiply_and_scatter(as_tensor(x), as_tensor(weight), axis, parts)
    else:
        y = all_reduce(matmul(x, weight), "sum", axis=axis)
    return y if bias is None else y + bias


# What a GPU multiplies in a second, and the bytes that it moves (H200s: `benchmarks/results/dist_nccl.json`): NCCL alone
# and beside products, copy engines beside products, and kernels in memory; the seconds of a copy's handshake.
PRODUCT_RATE = 750e12
NCCL_RATE, NCCL_RATE_BESIDE, COPY_RATE, MEMORY_RATE, HANDSHAKE = 270e9, 40e9, 350e9, 3.5e12, 20e-6
OVERLAPPED_PARTS = 4
RANKS = "ranks"


def _choose_parts(x: Tensor, weight: Tensor, where: MeshAxis) -> int | str:
    """The form that takes least time: the first of those that take as long."""
    if not all(isinstance(n, int) for n in (*x.shape, *weight.shape)):
        return 1
    rows, ranks, width = int(x.shape[0]), where.size, int(weight.shape[-1])
    product = 2 * math.prod(map(int, x.shape)) * width / PRODUCT_RATE
    block = math.prod(map(int, x.shape[:-1])) * width * x.dtype.numpy.itemsize / ranks
    seconds: dict[int | str, float] = {1: product + (ranks - 1) * block / NCCL_RATE}
    if rows % (ranks * OVERLAPPED_PARTS) == 0:
        beside = (ranks - 1) * block / NCCL_RATE_BESIDE
        part = product + (OVERLAPPED_PARTS - 1) * builtins.max(product, beside) + (ranks - 1) * block / NCCL_RATE
        seconds[OVERLAPPED_PARTS] = part / OVERLAPPED_PARTS
    if ranks > 1 and x.is_traced and has_copy_engines(where):
        sent = builtins.max(product / ranks, block / COPY_RATE + HANDSHAKE)
        seconds[RANKS] = product / ranks + (ranks - 1) * sent + (ranks + 1) * block / MEMORY_RATE
    return min(seconds, key=lambda parts: seconds[parts])


def _multiply_and_scatter(x: Tensor, weight: Tensor, axis: Any, parts: int | str | None) -> Tensor:
    """The product in parts, which are exchanged while the next is computed."""
    where_ = current_axes(None, axis, "row_parallel")
    rows = int(x.shape[0]) if x.ndim > 1 else 0
    if not (parts is None or parts == RANKS or isinstance(parts, int)):
        raise ArgumentError(
            "the parts of row_parallel are unknown", location=user_location(), expected='a number, or "ranks"',
            received=repr(parts),
        )  # fmt: skip
    count = parts if isinstance(parts, int) else 1
    if count < 1 or not rows or rows % (where_.size * count):
        raise ShapeError(
            f"the rows of row_parallel have no {count} equal parts on each of {where_.size} ranks",
            location=user_location(), expected=f"x [M, ..., K], M a multiple of {where_.size * builtins.max(count, 1)}",
            received=f"{x.type}, parts={parts}",
        )  # fmt: skip
    parts = _choose_parts(x, weight, where_) if parts is None else parts
    if isinstance(parts, str):
        return _multiply_and_send(x, weight, where_)
    size = rows // (where_.size * parts)
    split = reshape(x, shape=(where_.size, parts, size, *x.shape[1:]))
    found = []
    for part in range(parts):
        y = matmul(split[:, part], weight)
        found.append(reduce_scatter(reshape(y, shape=(-1, *y.shape[2:])), axis=0, mesh=where_))
    return found[0] if parts == 1 else concatenate(found, axis=0)


def _multiply_and_send(x: Tensor, weight: Tensor, where_: MeshAxis) -> Tensor:
    """The rows of the other ranks, each block sent to its owner while the next is computed, then those of this rank."""
    me, ranks = get_rank(where_), where_.size
    size = int(x.shape[0]) // ranks

    def multiply(owner: int) -> Tensor:
        return matmul(x[owner * size : (owner + 1) * size], weight)

    terms: dict[int, Tensor] = {}
    for shift in range(1, ranks):
        block, pairs = multiply((me + shift) % ranks), [(i, (i + shift) % ranks) for i in range(ranks)]
        terms[(me - shift) % ranks] = collective_permute(block, pairs, where_)
    own = multiply(me)
    if ranks == 1:
        return own
    terms[me] = fusion_barrier(own)  # a product that adds to itself what is received would wait for it first
    wide = f32 if own.dtype.is_float and own.dtype.numpy.itemsize < 4 else own.dtype
    total = functools.reduce(operator.add, [cast(terms[rank], dtype=wide) for rank in range(ranks)])
    return cast(total, dtype=own.dtype)


# Context parallelism: each rank has a part of the sequence; keys and values travel around the ring.


def ring_attention(
    q: Any, k: Any, v: Any, axis: Any = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """Attention over a sequence that is cut over the ranks of a mesh axis (Liu, Zaharia and Abbeel 2023).

    Shapes: `q`, `k` and `v` [..., S / ranks, D], in the order of the ranks; the result as `q`. Each rank adds the block
    of keys that it has to an online softmax, and passes it to its neighbour, as often as there are ranks. Computed in
    f32, or in f64 for operands of f64.

    Raises:
        ShapeError: `q`, `k` and `v` differ in shape where they must not.
        ArgumentError: the mesh has no such axis, or the caller is not a rank.
    """
    q, k, v = as_tensor(q), as_tensor(k), as_tensor(v)
    if k.shape != v.shape or q.ndim < 2 or (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]):
        raise ShapeError(
            "the operands of ring_attention do not fit", location=user_location(),
            expected="q [..., S, D], and k and v [..., T, D]", received=f"{q.type}, {k.type} and {v.type}",
        )  # fmt: skip
    where_ = current_axes(None, axis, "ring_attention")
    me, ranks = get_rank(where_), where_.size
    scale = 1.0 / math.sqrt(int(q.shape[-1])) if scale is None else scale
    dtype = f64 if q.dtype == f64 else f32
    wide, rows = cast(q, dtype=dtype) * scale, (*q.shape[:-1], 1)
    top, total, out = full(rows, -math.inf, dtype=dtype), zeros(rows, dtype=dtype), zeros(q.shape, dtype=dtype)
    ring = [(i, (i + 1) % ranks) for i in range(ranks)]
    for step in range(ranks):
        owner = (me - step) % ranks
        top, total, out = _add_block(wide, k, v, (top, total, out), (me, owner) if causal else None)
        if step + 1 < ranks:
            k, v = (collective_permute(x, ring, where_) for x in (k, v))
    return cast(out / total, dtype=q.dtype)


def _add_block(q: Tensor, k: Tensor, v: Tensor, state: Any, places: tuple[int, int] | None) -> Any:
    """One step of the online softmax; `places` are the positions of q and k in the sequence, for a causal mask."""
    top, total, out = state
    scores = matmul(q, matrix_transpose(cast(k, dtype=q.dtype)))
    if places is not None:
        rows = iota(shape=(q.shape[-2], 1), axis=0) + places[0] * int(q.shape[-2])
        columns = iota(shape=(1, k.shape[-2]), axis=1) + places[1] * int(k.shape[-2])
        scores = where(greater_equal(rows, columns), scores, -math.inf)
    new = maximum(top, max(scores, axis=-1, keepdims=True))
    # A row that has seen no key yet has the maximum -inf: its terms are 0, not NaN.
    base = where(equal(new, -math.inf), 0.0, new)
    weights, decay = exp(scores - base), exp(top - base)
    total = total * decay + sum(weights, axis=-1, keepdims=True)
    return new, total, out * decay + matmul(weights, cast(v, dtype=q.dtype))


# Expert parallelism: tokens travel to the rank of their expert and back.


def expert_parallel(x: Any, gates: Any = None, experts: Any = None, capacity: int = 0, axis: Any = None) -> Any:
    """A mixture of experts whose experts are cut over the ranks of a mesh axis (GShard; the best expert of each token).

    `x` [T, D] are this rank's tokens, `gates` [T, E] their probabilities of all E experts. `experts` maps
    [E / ranks, tokens, D] to the same shape: the experts of this rank on the tokens that came to each. One expert takes
    up to `capacity` tokens of one rank; the result is zero for a token beyond them. Shapes: as `x`.

    With a function alone this is a decorator: `ts.all_to_all(x, indices, src_axis="batch", dst_axis="expert")` in it
    gives the tokens of each of `self.experts`, and `ts.all_to_all(results, weights, src_axis="expert",
    dst_axis="batch")` the weighted sum for each token.

    Raises:
        ShapeError: the gates do not fit the tokens, or the ranks do not divide the experts.
        ArgumentError: the mesh has no such axis, or the caller is not a rank.
    """
    if gates is None and experts is None and callable(x):
        return route_function(x)
    x, gates = as_tensor(x), as_tensor(gates)
    where_ = current_axes(None, axis, "expert_parallel")
    if x.ndim != 2 or gates.ndim != 2 or gates.shape[0] != x.shape[0] or gates.shape[1] % where_.size:
        raise ShapeError(
            "the gates of expert_parallel do not fit", location=user_location(),
            expected=f"x [T, D] and gates [T, E], E a multiple of {where_.size}", received=f"{x.type} and {gates.type}",
        )  # fmt: skip
    if capacity < 1:
        raise ArgumentError("an expert takes at least one token", location=user_location(), received=str(capacity))
    place, weight = _route(gates, capacity)
    sent = einsum("tec,td->ecd", cast(place, dtype=x.dtype), x)
    mine = all_to_all(sent, where_, split_axis=0, concat_axis=1)  # [E / ranks, ranks * capacity, D]
    back = all_to_all(experts(mine), where_, split_axis=1, concat_axis=0)
    return einsum("tec,ecd->td", cast(place, dtype=x.dtype) * reshape(weight, shape=(-1, 1, 1)), back)


def _route(gates: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """One-hot places [T, E, capacity] of the tokens at their best experts, and the gate of each token [T]."""
    count = int(gates.shape[1])
    best = argmax(gates, axis=1)
    chosen = one_hot(best, count, dtype=int64)
    number = sum(cumsum(chosen, axis=0) * chosen, axis=1) - 1  # the number of this token at its expert
    fits = cast(equal(expand_dims(number, 1), iota(shape=(1, capacity), axis=1)), dtype=gates.dtype)
    place = expand_dims(cast(chosen, dtype=gates.dtype), 2) * expand_dims(fits, 1)
    return place, squeeze(max(gates, axis=1, keepdims=True), 1)
