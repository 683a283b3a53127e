"""Decompositions: ops of one device or one backward pass as ops that the table has, where PyTorch has no rule for them.

An op that keeps private data for its backward op is taken apart together with it, so that neither meets the data of the
other's own implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from tessera.torch.aten import ATEN
from tessera.torch.recurrent_layers import LIBRARY, define_ops

aten = torch.ops.aten
Rule = Callable[..., Any]


@cache
def find_decompositions() -> dict[Any, Rule]:
    """PyTorch's core decompositions, without those of ops that the table has whole, and the rules of this module."""
    from torch._decomp import core_aten_decompositions

    core = {op: rule for op, rule in core_aten_decompositions().items() if str(op) not in ATEN}
    return {**core, **RULES}


# Bags of rows: the sum, the mean or the largest of the rows of each bag, which `offsets` start.

SUM, MEAN, MAX = 0, 1, 2


def embedding_bag(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scale_grad_by_freq: bool = False,
    mode: int = SUM, sparse: bool = False, per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """The rows of each bag combined, the bag of each index, the size of each bag, and the indices of the largest."""
    if scale_grad_by_freq or sparse:  # PyTorch's gradient has counts of its own, or is sparse
        return NotImplemented
    bags, count = offsets.shape[0] - int(include_last_offset), indices.shape[0]
    marks = torch.zeros(count + 1, dtype=offsets.dtype, device=offsets.device)
    bag = marks.index_add(0, offsets[:bags], torch.ones_like(offsets[:bags])).cumsum(0)[:count] - 1
    bag = bag.to(offsets.dtype)
    kept = indices != padding_idx
    sizes = torch.zeros_like(offsets[:bags]).index_add(0, bag, kept.to(offsets.dtype))
    rows = weight.index_select(0, indices)
    if mode == MAX:
        out, largest = _take_largest(rows, bag, kept, sizes, indices)
        return out, bag, sizes, largest
    wide = rows.float() if rows.element_size() < 4 else rows
    wide = wide if per_sample_weights is None else wide * per_sample_weights.to(wide.dtype).unsqueeze(1)
    zeros = torch.zeros((bags, weight.shape[1]), dtype=wide.dtype, device=weight.device)
    out = zeros.index_add(0, bag, torch.where(kept.unsqueeze(1), wide, 0.0))
    out = out / sizes.clamp(min=1).to(out.dtype).unsqueeze(1) if mode == MEAN else out
    return out.to(weight.dtype), bag, sizes, torch.zeros_like(sizes)


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


# Recurrent layers as the ops of cuDNN and oneDNN.

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")


def _get_op(mode: int, suffix: str = "") -> Rule:
    define_ops()
    return getattr(getattr(torch.ops, LIBRARY), MODES[mode] + suffix)


def _pack(mode: int, hx: torch.Tensor, cx: torch.Tensor | None) -> Any:
    return [hx, cx] if MODES[mode] == "lstm" else hx


def cudnn_rnn(
    x: torch.Tensor, weight: Sequence[torch.Tensor], weight_stride0: int, weight_buf: Any, hx: torch.Tensor,
    cx: torch.Tensor | None, mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool,
    dropout: float, train: bool, bidirectional: bool, batch_sizes: Sequence[int], dropout_state: Any,
) -> Any:  # fmt: skip
    """`_cudnn_rnn`: all layers in one op; the space that it reserves for its backward op is empty."""
    if batch_sizes or (dropout and train and num_layers > 1):
        return NotImplemented
    has_biases = weight_stride0 >= 4
    numbers = (has_biases, num_layers, 0.0, train, bidirectional, batch_first)
    out, *last = _get_op(mode)(x, _pack(mode, hx, cx), list(weight), *numbers)
    cy = last[1] if len(last) > 1 else x.new_empty(0)
    buffer = x.new_empty(0) if weight_buf is None else weight_buf.clone()
    return out, last[0], cy, x.new_empty(0, dtype=torch.uint8), buffer


def cudnn_rnn_backward(
    x: torch.Tensor, weight: Sequence[torch.Tensor], weight_stride0: int, weight_buf: Any, hx: torch.Tensor,
    cx: torch.Tensor | None, output: torch.Tensor, grad_output: Any, grad_hy: Any, grad_cy: Any, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: Sequence[int], dropout_state: Any, reserve: Any, output_mask: Sequence[bool],
) -> Any:  # fmt: skip
    """`_cudnn_rnn_backward`: the layers are computed again, since nothing is reserved."""
    if batch_sizes or (dropout and train and num_layers > 1):
        return NotImplemented
    states = [hx, cx] if cx is not None and MODES[mode] == "lstm" else [hx]
    given = [
        torch.zeros_like(like) if g is None else g
        for g, like in zip((grad_output, grad_hy, grad_cy), (output, *states), strict=False)
    ]
    numbers = (weight_stride0 >= 4, num_layers, 0.0, train, bidirectional, batch_first)
    found = _get_op(mode, "_backward")(given, x, _pack(mode, hx, cx), list(weight), *numbers)
    first = 1 + len(states)
    by_cx = found[2] if len(states) > 1 else x.new_empty(0)
    return found[0], found[1], by_cx, list(found[first:])


def mkldnn_rnn_layer(
    x: torch.Tensor, w0: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, hx: torch.Tensor,
    cx: torch.Tensor, reverse: bool, batch_sizes: Sequence[int], mode: int, hidden_size: int, num_layers: int,
    has_biases: bool, bidirectional: bool, batch_first: bool, train: bool,
) -> Any:  # fmt: skip
    """`mkldnn_rnn_layer`: one direction of one layer, here of inference, as PyTorch's own rule for LSTM emits it."""
    if batch_sizes or train or bidirectional or MODES[mode] != "lstm":
        return NotImplemented
    weights = [w0, w1, w2, w3] if has_biases else [w0, w1]
    time = 1 if batch_first else 0
    numbers = (has_biases, num_layers, 0.0, False, False, batch_first)
    out, hy, cy = _get_op(mode)(x.flip(time) if reverse else x, [hx, cx], weights, *numbers)
    return out.flip(time) if reverse else out, hy, cy, x.new_empty(0, dtype=torch.uint8)


RULES: dict[Any, Rule] = {
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten._embedding_bag_backward.default: embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: embedding_bag_weights_backward,
    aten._cudnn_rnn.default: cudnn_rnn,
    aten._cudnn_rnn_backward.default: cudnn_rnn_backward,
    aten.mkldnn_rnn_layer.default: mkldnn_rnn_layer,
}
