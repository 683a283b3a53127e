"""Normalisation layers: batch, layer, RMS, group and instance norm."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32, f64, int64
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.linear import check_count
from tessera.nn.module import Module, Parameter
from tessera.ops.api.creation import full, ones, zeros
from tessera.ops.tensor import layers, nn
from tessera.ops.tensor.basic import cast, stop_gradient
from tessera.ops.tensor.reduce import mean as mean_of
from tessera.ops.tensor.reduce import var as variance_of
from tessera.ops.tensor.shape import expand_dims, squeeze


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
        track_running_stats: bool = True, dtype: Any = f32, *, bias: bool = True,
    ) -> None:  # fmt: skip
        self.num_features = check_count("num_features", num_features)
        self.eps, self.momentum, self.track_running_stats = eps, momentum, track_running_stats
        _set_affine(self, (num_features,), affine, bias, dtype)
        if track_running_stats:
            self.running_mean, self.running_var = (
                zeros((num_features,), dtype=dtype),
                ones((num_features,), dtype=dtype),
            )
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
            self._keep_statistics(x)
        return found

    def _keep_statistics(self, x: Tensor) -> None:
        """Let the statistics of a batch enter the running ones."""
        count, dtype = self.num_batches_tracked + 1, self.running_mean.dtype
        wide = f64 if dtype == f64 else f32  # an even share of many batches is no number of 16 bits
        share: Any = 1.0 / cast(count, dtype=wide) if self.momentum is None else self.momentum
        operands = stop_gradient(x), self.running_mean, self.running_var
        if self.momentum is None and dtype != wide:
            operands = tuple(cast(t, dtype=wide) for t in operands)
        new = nn.running_statistics(*operands, share)
        self.running_mean, self.running_var = (t if t.dtype == dtype else cast(t, dtype=dtype) for t in new)
        self.num_batches_tracked = count

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


def _set_affine(module: Module, shape: tuple[int, ...], affine: bool, bias: bool, dtype: Any) -> None:
    """Give a norm its weight and bias, or None."""
    module.weight = Parameter(ones(shape, dtype=dtype)) if affine else None
    module.bias = Parameter(zeros(shape, dtype=dtype)) if affine and bias else None


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
    """Division by the root mean square of the last axes, times weight (Zhang and Sennrich 2019).

    The axes are those of the shape `normalized_shape`. Without `eps` it is the machine epsilon of the input's type,
    that of f32 for narrower ones.

    >>> RMSNorm(4)(ones((2, 4))).shape
    (2, 4)
    """

    def __init__(
        self, normalized_shape: Any, eps: float | None = None, elementwise_affine: bool = True, dtype: Any = f32
    ) -> None:
        sizes = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
        if not sizes:
            raise ArgumentError("RMSNorm of no axes", location=user_location(), expected="one size or more")
        self.normalized_shape = tuple(check_count("normalized_shape", n) for n in sizes)
        self.eps = eps
        self.weight = Parameter(ones(self.normalized_shape, dtype=dtype)) if elementwise_affine else None

    def forward(self, x: Any) -> Tensor:
        """The normalised input."""
        x = check_last_axes(as_tensor(x), self.normalized_shape, "RMSNorm")
        eps = self.eps if self.eps is not None else 2.0**-52 if x.dtype == f64 else 2.0**-23
        axes = tuple(range(-len(self.normalized_shape), 0))
        found = nn.normalize(x, axis=axes if len(axes) > 1 else -1, eps=eps, center=False)
        return found if self.weight is None else found * self.weight

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.normalized_shape}, eps={self.eps}"


class GroupNorm(Module):
    """Normalisation over groups of channels of [N, C, ...] (Wu and He 2018), then weight and bias [C].

    >>> GroupNorm(2, 4)(zeros((1, 4, 3))).shape
    (1, 4, 3)

    Raises:
        ArgumentError: the channels are no multiple of the groups.
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, dtype: Any = f32, *,
        bias: bool = True,
    ) -> None:  # fmt: skip
        self.num_groups, self.num_channels = check_count("num_groups", num_groups), num_channels
        if check_count("num_channels", num_channels) % num_groups:
            raise ArgumentError(
                f"{num_channels} channels cannot be divided into {num_groups} groups", location=user_location()
            )
        self.eps = eps
        _set_affine(self, (num_channels,), affine, bias, dtype)

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


class InstanceNorm2d(BatchNorm2d):
    """Normalisation of each channel of each example of [N, C, H, W] (Ulyanov, Vedaldi and Lempitsky 2016).

    Inputs are also [C, H, W]. With `track_running_stats` it keeps running statistics in training mode, as `BatchNorm2d`
    does, and normalises by them in evaluation mode.

    >>> InstanceNorm2d(2)(zeros((3, 2, 4, 4))).shape
    (3, 2, 4, 4)
    """

    ranks = (3, 4)

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = False,
        track_running_stats: bool = False, dtype: Any = f32, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, dtype, bias=bias)

    def forward(self, x: Any) -> Tensor:
        """The normalised input."""
        x = as_tensor(x)
        single = x.ndim == self.ranks[0]
        given = x
        x = expand_dims(x, 0) if single else x
        if given.ndim not in self.ranks or x.shape[1] != self.num_features:
            raise ShapeError(
                f"{type(self).__name__} does not take this input", location=user_location(), received=str(given.type),
                expected=f"{self.ranks[1]} axes, with {self.num_features} channels on axis 1, or without N",
            )  # fmt: skip
        own = self.training or not self.track_running_stats
        mean, var = (None, None) if own else (self.running_mean, self.running_var)
        found = layers.instance_norm(x, mean, var, self.weight, self.bias, own, self.eps)
        if self.training and self.track_running_stats:
            self._keep_statistics(x)
        return squeeze(found, 0) if single else found

    def _keep_statistics(self, x: Tensor) -> None:
        """Let the means of the examples' statistics enter the running ones; without `momentum` these stay (PyTorch)."""
        axes, share = tuple(range(2, x.ndim)), self.momentum or 0.0
        x = stop_gradient(x)
        new = mean_of(x, axis=(0, *axes)), mean_of(variance_of(x, axis=axes, correction=1.0), axis=0)
        self.running_mean = self.running_mean * (1.0 - share) + new[0] * share
        self.running_var = self.running_var * (1.0 - share) + new[1] * share


class InstanceNorm1d(InstanceNorm2d):
    """Instance norm of [N, C, L]; see `InstanceNorm2d`."""

    ranks = (2, 3)


class InstanceNorm3d(InstanceNorm2d):
    """Instance norm of [N, C, D, H, W]; see `InstanceNorm2d`."""

    ranks = (4, 5)


class LocalResponseNorm(Module):
    """Division of each channel by a power of the squares of its `size` neighbours (Krizhevsky et al. 2012).

    >>> LocalResponseNorm(2)(zeros((1, 3, 4))).shape
    (1, 3, 4)
    """

    def __init__(self, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> None:
        self.size, self.alpha, self.beta, self.k = check_count("size", size), alpha, beta, k

    def forward(self, x: Any) -> Tensor:
        """The normalised input."""
        return layers.local_response_norm(as_tensor(x), self.size, self.alpha, self.beta, self.k)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, k={self.k}"
