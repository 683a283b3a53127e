"""Functions of neural networks that are composed of ops: convolutions, pools, norms, resampling, distances, losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from conformance.case import Case
from conformance.inputs import tensor
from tessera.frontend.jit.tracing import Jit
from tessera.nn import sequence_losses
from tessera.ops.tensor import (
    activations,
    adaptive_pooling,
    convolution,
    layers,
    losses,
    metric_losses,
    nn,
    pooling,
    resampling,
)

X, IMAGE, VOLUME, SIGNAL = (3, 8), (2, 4, 6, 5), (1, 2, 4, 3, 5), (2, 4, 9)
CLASSES = np.array([2, 0, 7], np.int64)
SIGNS = np.where(tensor("signs", X) > 0, 1.0, -1.0).astype(np.float32)
# A program of each function, and its operands: shapes of f32 tensors, or arrays.
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "relu6": (lambda x: activations.relu6(x * 4.0), (X,)),
    "threshold": (lambda x: activations.threshold(x, 0.5, -1.0), (X,)),
    "prelu": (activations.prelu, (X, (8,))),
    "rrelu": (activations.rrelu, (X,)),
    "glu": (activations.glu, (X,)),
    "softmin": (activations.softmin, (X,)),
    "softplus-beta": (lambda x: nn.softplus(x, 2.0, 3.0), (X,)),
    "conv1d-same": (lambda x, w: convolution.conv1d(x, w, padding="same"), (SIGNAL, (3, 4, 3))),
    "conv3d": (lambda x, w: convolution.conv3d(x, w, stride=(1, 1, 2)), (VOLUME, (2, 2, 2, 2, 2))),
    "conv_transpose1d": (lambda x, w: convolution.conv_transpose1d(x, w, stride=2, padding=1), (SIGNAL, (4, 3, 3))),
    "conv_transpose2d": (
        lambda x, w: convolution.conv_transpose2d(x, w, None, 2, 1, 1, 2),
        (IMAGE, (4, 2, 2, 3)),
    ),
    "conv_transpose3d": (lambda x, w: convolution.conv_transpose3d(x, w), (VOLUME, (2, 1, 1, 2, 2))),
    "im2col": (lambda x: convolution.im2col(x, 2, padding=1, stride=2), (IMAGE,)),
    "col2im": (lambda x: convolution.col2im(x, (4, 5), (2, 3), stride=(2, 1)), ((2, 12, 6),)),
    "max_pool1d": (lambda x: pooling.max_pool1d(x, 3, 2, 1, return_indices=True), (SIGNAL,)),
    "max_pool2d": (lambda x: pooling.max_pool2d(x, 2, ceil_mode=True), (IMAGE,)),
    "max_pool3d": (lambda x: pooling.max_pool3d(x, 2, 1), (VOLUME,)),
    "avg_pool1d": (lambda x: pooling.avg_pool1d(x, 3, 2, 1, count_include_pad=False), (SIGNAL,)),
    "avg_pool2d": (lambda x: pooling.avg_pool2d(x, 3, 2, 1, ceil_mode=True), (IMAGE,)),
    "avg_pool3d": (lambda x: pooling.avg_pool3d(x, 2, 1), (VOLUME,)),
    "lp_pool1d": (lambda x: pooling.lp_pool1d(x + 3.0, 2.0, 3), (SIGNAL,)),
    "lp_pool2d": (lambda x: pooling.lp_pool2d(x + 3.0, 2.0, 2), (IMAGE,)),
    "lp_pool3d": (lambda x: pooling.lp_pool3d(x + 3.0, 1.0, 2), (VOLUME,)),
    "adaptive_avg_pool1d": (lambda x: adaptive_pooling.adaptive_avg_pool1d(x, 4), (SIGNAL,)),
    "adaptive_avg_pool2d": (lambda x: adaptive_pooling.adaptive_avg_pool2d(x, (3, 2)), (IMAGE,)),
    "adaptive_avg_pool3d": (lambda x: adaptive_pooling.adaptive_avg_pool3d(x, 2), (VOLUME,)),
    "adaptive_max_pool1d": (lambda x: adaptive_pooling.adaptive_max_pool1d(x, 4), (SIGNAL,)),
    "adaptive_max_pool2d": (lambda x: adaptive_pooling.adaptive_max_pool2d(x, (3, 2), True), (IMAGE,)),
    "adaptive_max_pool3d": (lambda x: adaptive_pooling.adaptive_max_pool3d(x, 2), (VOLUME,)),
    "fractional_max_pool2d": (
        lambda x: pooling.fractional_max_pool2d(x, 2, 3, samples=np.full((2, 4, 2), 0.3, "f4")),
        (IMAGE,),
    ),
    "max_unpool1d": (lambda x, i: pooling.max_unpool1d(x, i, 3), (SIGNAL, np.arange(72).reshape(SIGNAL) % 9 * 3)),
    "max_unpool2d": (
        lambda x, i: pooling.max_unpool2d(x, i, 1),
        (IMAGE, np.arange(240).reshape(IMAGE) * 7 % 30),
    ),
    "max_unpool3d": (
        lambda x, i: pooling.max_unpool3d(x, i, 1),
        (VOLUME, np.arange(120).reshape(VOLUME) * 7 % 60),
    ),
    "group_norm": (lambda x, w, b: layers.group_norm(x, 2, w, b), (IMAGE, (4,), (4,))),
    "instance_norm": (lambda x, w, b: layers.instance_norm(x, weight=w, bias=b), (IMAGE, (4,), (4,))),
    "local_response_norm": (lambda x: layers.local_response_norm(x, 3, 0.5), (IMAGE,)),
    "bilinear": (layers.bilinear, (X, X, (2, 8, 8))),
    "embedding_bag": (layers.embedding_bag, ((5, 4), np.array([[0, 4, 1], [3, 3, 2]]))),
    "interpolate-nearest": (lambda x: resampling.interpolate(x, (4, 9)), (IMAGE,)),
    "interpolate-bilinear": (lambda x: resampling.interpolate(x, (9, 3), mode="bilinear"), (IMAGE,)),
    "interpolate-bicubic": (lambda x: resampling.interpolate(x, (7, 4), mode="bicubic"), (IMAGE,)),
    "affine_grid": (lambda m: resampling.affine_grid(m, (2, 1, 3, 4)), ((2, 2, 3),)),
    # Points apart from whole places, where the bound of the floor is a whole element.
    "grid_sample": (resampling.grid_sample, (IMAGE, np.linspace(-1.2, 1.3, 24, dtype="f4").reshape(2, 3, 2, 2))),
    "pixel_shuffle": (lambda x: resampling.pixel_shuffle(x, 2), (IMAGE,)),
    "pixel_unshuffle": (lambda x: resampling.pixel_unshuffle(x[..., :4], 2), (IMAGE,)),
    "channel_shuffle": (lambda x: resampling.channel_shuffle(x, 2), (IMAGE,)),
    "cosine_similarity": (metric_losses.cosine_similarity, (X, X)),
    "pairwise_distance": (metric_losses.pairwise_distance, (X, X)),
    "pdist": (metric_losses.pdist, (X,)),
    "lp_normalize": (metric_losses.lp_normalize, (X,)),
    "smooth_l1_loss": (lambda x, y: losses.smooth_l1_loss(x, y, "none"), (X, X)),
    "soft_margin_loss": (lambda x, s: metric_losses.soft_margin_loss(x, s), (X, SIGNS)),
    "hinge_embedding_loss": (lambda x, s: metric_losses.hinge_embedding_loss(x, s), (X, SIGNS)),
    "poisson_nll_loss": (lambda x, y: metric_losses.poisson_nll_loss(x, y + 2.5, full=True), (X, X)),
    "gaussian_nll_loss": (lambda x, y, v: metric_losses.gaussian_nll_loss(x, y, v + 2.5), (X, X, X)),
    "margin_ranking_loss": (metric_losses.margin_ranking_loss, (X, X, SIGNS)),
    "cosine_embedding_loss": (
        lambda x, y, s: metric_losses.cosine_embedding_loss(x, y, s[:, 0]),
        (X, X, SIGNS),
    ),
    "triplet_margin_loss": (lambda x, y, z: metric_losses.triplet_margin_loss(x, y, z, 9.0, swap=True), (X, X, X)),
    "multi_margin_loss": (lambda x, y: metric_losses.multi_margin_loss(x, y, 2), (X, CLASSES)),
    "multilabel_margin_loss": (
        metric_losses.multilabel_margin_loss,
        ((2, 3), np.array([[1, -1, 0], [2, 0, -1]])),
    ),
    "multilabel_soft_margin_loss": (lambda x, y: metric_losses.multilabel_soft_margin_loss(x, y), (X, X)),
    "linear_cross_entropy": (lambda x, w, y: metric_losses.linear_cross_entropy(x, w, y), (X, (8, 8), CLASSES)),
    "nll_loss": (lambda x, y, w: losses.nll_loss(nn.log_softmax(x), y, w + 3.0), (X, CLASSES, (8,))),
    "cross_entropy": (lambda x, y: losses.cross_entropy(x, y, label_smoothing=0.1), (X, CLASSES)),
    "kl_div": (
        lambda x, y: losses.kl_div(nn.log_softmax(x), nn.log_softmax(y), "batchmean", log_target=True),
        (X, X),
    ),
    "ctc_loss": (
        lambda x, y: sequence_losses.ctc_loss(nn.log_softmax(x), y, [4, 3], [2, 1], reduction="sum"),
        ((4, 2, 3), np.array([[1, 2], [2, 0]])),
    ),
}


def cases() -> Iterator[Case]:
    """One case for each function."""
    for name, (program, operands) in PROGRAMS.items():
        yield _make_case(f"graph/networks/{name}", program, operands)


def _make_case(name: str, program: Any, operands: tuple[Any, ...]) -> Case:
    arrays = tuple(tensor(f"{name}-{i}", x) if isinstance(x, tuple) else x for i, x in enumerate(operands))
    calls: dict[int, Any] = {
        1: lambda x: program(x),
        2: lambda x, y: program(x, y),
        3: lambda x, y, z: program(x, y, z),
    }
    return Case(name, lambda: (Jit(calls[len(arrays)]), arrays))
