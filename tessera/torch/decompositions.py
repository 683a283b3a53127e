"""Decompositions: ops of one device or one backward pass as ops that the table has, where PyTorch has no rule for them.

An op that keeps private data for its backward op is taken apart together with it, so that neither meets the data of the
other's own implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from tessera.torch import bags
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
    aten._embedding_bag.default: bags.embedding_bag,
    aten._embedding_bag_forward_only.default: bags.embedding_bag,
    aten._embedding_bag_backward.default: bags.embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: bags.embedding_bag_weights_backward,
    aten._cudnn_rnn.default: cudnn_rnn,
    aten._cudnn_rnn_backward.default: cudnn_rnn_backward,
    aten.mkldnn_rnn_layer.default: mkldnn_rnn_layer,
}
