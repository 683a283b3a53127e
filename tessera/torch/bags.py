"""Bags of rows: the sum, the mean or the largest of the rows of each bag, which `offsets` start (`EmbeddingBag`).

Sums and means are one op, `tessera_bags::add`, whose row walks each bag. The rest are ops of ATen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten
LIBRARY = "tessera_bags"
LIBRARIES: list[Any] = []  # an op ends with the object that defined it
SUM, MEAN, MAX = 0, 1, 2


@functools.cache
def define_op() -> Any:
    """The op of sums and means, which is defined once in a process."""
    library = torch.library.Library(LIBRARY, "DEF")
    LIBRARIES.append(library)
    library.define(
        "add(Tensor weight, Tensor indices, Tensor offsets, Tensor? weights, SymInt bags, bool mean, int padding_idx) "
        "-> Tensor"
    )
    library.impl("add", _add, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{LIBRARY}::add", _infer, lib=library)
    return getattr(torch.ops, LIBRARY).add


def _add(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, weights: Any, bags: int, mean: bool,
    padding: int,
) -> Any:  # fmt: skip
    mode, has_last = MEAN if mean else SUM, bags < offsets.shape[0]
    return aten._embedding_bag_forward_only(weight, indices, offsets, False, mode, False, weights, has_last, padding)[0]


def _infer(weight: torch.Tensor, indices: Any, offsets: Any, weights: Any, bags: int, *rest: Any) -> torch.Tensor:
    return weight.new_empty((bags, weight.shape[1]))


def embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False,
    mode: int = SUM, sparse: bool = False, per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """The rows of each bag combined, the bag of each index, the size of each bag, and the indices of the largest."""
    if scale_grad_by_freq or sparse:  # PyTorch's gradient has counts of its own, or is sparse
        return NotImplemented
    bags, count = offsets.shape[0] - int(include_last_offset), indices.shape[0]
    place = torch.arange(count, dtype=offsets.dtype, device=offsets.device)
    bag = (torch.searchsorted(offsets[:bags], place, right=True) - 1).to(offsets.dtype)
    kept = indices != padding_idx
    sizes = torch.zeros_like(offsets[:bags]).index_add(0, bag, kept.to(offsets.dtype))
    if mode == MAX:
        rows = weight.index_select(0, indices)
        out, largest = _take_largest(rows, bag, kept, sizes, indices)
        return out, bag, sizes, largest
    out = define_op()(weight, indices, offsets, per_sample_weights, bags, mode == MEAN, padding_idx)
    return out, bag, sizes, torch.zeros_like(sizes)


def _take_largest(
    rows: torch.Tensor, bag: torch.Tensor, kept: torch.Tensor, sizes: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    count, width = rows.shape
    rows = torch.where(kept.unsqueeze(1), rows, -float("inf"))
    where = bag.to(torch.int64).unsqueeze(1).expand(count, width)
    least = torch.full((sizes.shape[0], width), -float("inf"), dtype=rows.dtype, device=rows.device)
    out = least.scatter_reduce(0, where, rows, "amax")
    places = torch.arange(count, device=rows.device).unsqueeze(1)
    winners = torch.where((rows == out.index_select(0, bag)) & kept.unsqueeze(1), places, count)
    first = torch.full((sizes.shape[0], width), count, device=rows.device).scatter_reduce(0, where, winners, "amin")
    filled = (sizes > 0).unsqueeze(1)
    chosen = torch.cat([indices, indices.new_zeros(1)])
    return torch.where(filled, out, 0.0), chosen.index_select(0, first.reshape(-1)).reshape(first.shape)


def embedding_bag_backward(
    grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, offset2bag: torch.Tensor, bag_size: torch.Tensor,
    maximum_indices: torch.Tensor, num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool,
    per_sample_weights: torch.Tensor | None, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """The gradient of the weight of `embedding_bag`."""
    if scale_grad_by_freq or sparse:
        return NotImplemented
    if mode == MAX:
        filled = (bag_size > 0).unsqueeze(1)
        zeros = torch.zeros((num_weights, grad.shape[1]), dtype=grad.dtype, device=grad.device)
        return zeros.scatter_add(0, maximum_indices.to(torch.int64), torch.where(filled, grad, 0.0))
    rows = grad.index_select(0, offset2bag)
    if mode == MEAN:
        rows = rows / bag_size.clamp(min=1).index_select(0, offset2bag).to(rows.dtype).unsqueeze(1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    return aten.embedding_dense_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


def embedding_bag_weights_backward(
    grad: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, offset2bag: torch.Tensor,
    mode: int, padding_idx: int = -1,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the weights of samples of `embedding_bag`."""
    products = grad.index_select(0, offset2bag) * weight.index_select(0, indices)
    return torch.where(indices != padding_idx, products.sum(1), 0.0)
