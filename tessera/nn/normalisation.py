"""Normalisation layers: batch, layer, RMS, group and instance norm."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32, int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.linear import check_count
from tessera.nn.module import Module, Parameter
from tessera.ops.api.creation import full, ones, zeros
from tessera.ops.tensor import layers, nn
from tessera.ops.tensor.basic import cast


class BatchNorm2d(Module):
    """Normalisation of each channel of [N, C, H, W] over the batch (Ioffe and Szegedy 2015), then weight and bias [C].

    In training mode it uses the statistics of the batch and updates its buffers `running_mean`, `running_var` and
    `num_batches_tracked`; in evaluation mode it uses these. `ts.jit` and `ts.value_and_grad` update the module that was
    passed, unless the function returns it with its new statistics. `momentum=None` averages all batches evenly.

    >>> layer = BatchNorm2d(2)
    >>> layer(zeros((4, 2, 3, 3))).shape, layer.num_batches_tracked
    ((4, 2, 3, 3), Tensor(1, int64))

    Raises:
        ShapeError: the rank or the number of channels is wrong, or there is one element for each channel.
    """

    ranks: tuple[int, ...] = (4,)

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, dtype: Any = f32,
    ) -> None:  # fmt: skip
        self.num_features = check_count("num_features", num_features)
        self.eps, self.momentum, self.track_running_stats = eps, momentum, track_running_stats
        shape = (num_features,)
        self.weight = Parameter(ones(shape, dtype=dtype)) if affine else None
        self.bias = Parameter(zeros(shape, dtype=dtype)) if affine else None
        if track_running_stats:
            self.running_mean, self.running_var = zeros(shape, dtype=dtype), ones(shape, dtype=dtype)
            self.num_batches_tracked = full((), 0, dtype=int64)

    def forward(self, x: Any) -> Tensor:
        """The normalised input."""
        x = as_tensor(x)
        self._check(x)
        tracked = self.track_running_stats
        batch = self.training or not tracked
        if batch and math.prod(x.shape) == x.shape[1] and self.training:
            raise ShapeError(
                "batch norm in training mode needs more than one element for each channel", location=user_location(),
                received=str(x.type), suggestion="call model.eval(), or use a larger batch",
            )  # fmt: skip
        mean, var = (self.running_mean, self.running_var) if tracked else (None, None)
        held = (None, None) if batch else (mean, var)
        found = nn.batch_norm(x, held[0], held[1], self.weight, self.bias, batch, eps=self.eps)
        if self.training and tracked:
            count = self.num_batches_tracked + 1
            share: Any = 1.0 / cast(count, dtype=f32) if self.momentum is None else self.momentum
            mean, var = nn.running_statistics(nn_stop(x), mean, var, share)
            self.running_mean, self.running_var, self.num_batches_tracked = mean, var, count
        return found

    def _check(self, x: Tensor) -> None:
        if x.ndim not in self.ranks or x.shape[1] != self.num_features:
            raise ShapeError(
                f"{type(self).__name__} does not take this input", location=user_location(),
                expected=f"{' or '.join(map(str, self.ranks))} axes, with {self.num_features} channels on axis 1",
                received=str(x.type),
            )  # fmt: skip

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


def nn_stop(x: Tensor) -> Tensor:
    """`x` without derivative: statistics are state."""
    from tessera.ops.tensor.basic import stop_gradient

    return stop_gradient(x)


class BatchNorm1d(BatchNorm2d):
    """Batch norm of [N, C] or [N, C, L]; see `BatchNorm2d`."""

    ranks = (2, 3)


class BatchNorm3d(BatchNorm2d):
    """Batch norm of [N, C, D, H, W]; see `BatchNorm2d`."""

    ranks = (5,)


class LayerNorm(Module):
    """Normalisation over the last axes, of shape `normalized_shape` (Ba, Kiros and Hinton 2016).

    >>> LayerNorm(4)(zeros((2, 3, 4))).shape
    (2, 3, 4)
    """

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True,
        dtype: Any = f32,
    ) -> None:  # fmt: skip
        listed = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
        self.normalized_shape = tuple(check_count("normalized_shape", n) for n in listed)
        self.eps = eps
        self.weight = Parameter(ones(self.normalized_shape, dtype=dtype)) if elementwise_affine else None
        self.bias = Parameter(zeros(self.normalized_shape, dtype=dtype)) if elementwise_affine and bias else None

    def forward(self, x: Any) -> Tensor:
        """The normalised input."""
        x = check_last_axes(as_tensor(x), self.normalized_shape, "LayerNorm")
        return nn.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.normalized_shape}, eps={self.eps}"


def check_last_axes(x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """An input whose last axes have a shape.

    Raises:
        ShapeError: they have another.
    """
    if x.ndim < len(shape) or tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise ShapeError(
            f"{name} does not take this input", location=user_location(), expected=f"last axes {list(shape)}",
            received=str(x.type),
        )  # fmt: skip
    return x


class RMSNorm(Module):
    """Division by the root mean square of the last axis, times weight (Zhang and Sennrich 2019).

    `eps` is PyTorch's default: the machine epsilon of f32.

    >>> RMSNorm(4)(ones((2, 4))).shape
    (2, 4)
    """

    def __init__(
        self, normalized_shape: Any, eps: float | None = None, elementwise_affine: bool = True, dtype: Any = f32
    ) -> None:
        sizes = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
        if len(sizes) != 1:
            raise ArgumentError("RMSNorm normalises one axis", location=user_location(), received=normalized_shape)
        self.size = check_count("normalized_shape", sizes[0])
        self.eps = 1.1920928955078125e-07 if eps is None else eps
        self.weight = Parameter(ones((self.size,), dtype=dtype)) if elementwise_affine else None

    def forward(self, x: Any) -> Tensor:
        """The normalised input."""
        x = check_last_axes(as_tensor(x), (self.size,), "RMSNorm")
        return nn.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """The size."""
        return f"{self.size}, eps={self.eps}"


class GroupNorm(Module):
    """Normalisation over groups of channels of [N, C, ...] (Wu and He 2018), then weight and bias [C].

    >>> GroupNorm(2, 4)(zeros((1, 4, 3))).shape
    (1, 4, 3)

    Raises:
        ArgumentError: the channels are no multiple of the groups.
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, dtype: Any = f32
    ) -> None:
        self.num_groups, self.num_channels = check_count("num_groups", num_groups), num_channels
        if check_count("num_channels", num_channels) % num_groups:
            raise ArgumentError(
                f"{num_channels} channels cannot be divided into {num_groups} groups", location=user_location()
            )
        self.eps = eps
        self.weight = Parameter(ones((num_channels,), dtype=dtype)) if affine else None
        self.bias = Parameter(zeros((num_channels,), dtype=dtype)) if affine else None

    def forward(self, x: Any) -> Tensor:
        """The normalised input."""
        x = as_tensor(x)
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            raise ShapeError(
                "GroupNorm does not take this input", location=user_location(), received=str(x.type),
                expected=f"[N, {self.num_channels}, ...]",
            )  # fmt: skip
        return layers.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}"


class InstanceNorm2d(Module):
    """Normalisation of each channel of each example of [N, C, H, W] (Ulyanov, Vedaldi and Lempitsky 2016)."""

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = False, dtype: Any = f32) -> None:
        self.num_features, self.eps = check_count("num_features", num_features), eps
        self.weight = Parameter(ones((num_features,), dtype=dtype)) if affine else None
        self.bias = Parameter(zeros((num_features,), dtype=dtype)) if affine else None

    def forward(self, x: Any) -> Tensor:
        """The normalised input."""
        x = as_tensor(x)
        if x.ndim < 3 or x.shape[1] != self.num_features:
            raise ShapeError(
                f"{type(self).__name__} does not take this input", location=user_location(), received=str(x.type),
                expected=f"[N, {self.num_features}, ...]",
            )  # fmt: skip
        return layers.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)
