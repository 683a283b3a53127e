"""Pools and dropout: layers without parameters, with PyTorch's names and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import to_python_numbers
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.convolution import spread_sizes, take_batch
from tessera.nn.module import Module
from tessera.ops.tensor import adaptive_pooling, layers, nn, pooling
from tessera.ops.tensor.reduce import mean
from tessera.ops.tensor.shape import squeeze


class _Pool(Module):
    """A function of windows of [N, C, spatial axes]."""

    rank = 2
    function: Callable[..., Any]

    def forward(self, x: Any) -> Any:
        """The pooled batch of inputs, or one input without N."""
        x, single = take_batch(as_tensor(x), self.rank, None, type(self).__name__)
        found = type(self).function(x, *self.args)
        if isinstance(found, tuple):
            return tuple(squeeze(part, 0) for part in found) if single else found
        return squeeze(found, 0) if single else found

    def spread_window(self, kernel_size: Any, stride: Any, padding: Any) -> tuple[tuple[int, ...], ...]:
        """The window, its steps (those of the window where None) and the padding, one number for each axis."""
        kernel = spread_sizes("kernel_size", kernel_size, self.rank, 1)
        steps = spread_sizes("stride", kernel if stride is None else stride, self.rank, 1)
        return kernel, steps, check_padding(padding, kernel)

    def extra_repr(self) -> str:
        """The sizes."""
        return ", ".join(map(str, self.args))


class MaxPool2d(_Pool):
    """The largest element of each window of [N, C, H, W].

    With `return_indices` the call gives (values, places), each place counted along the flattened spatial axes.

    >>> MaxPool2d(2)([[[[1.0, 2.0], [3.0, 4.0]]]])
    Tensor([[[[4.]]]], f32)

    Raises:
        ArgumentError: an option is out of range.
    """

    function: Callable[..., Any] = staticmethod(pooling.max_pool2d)

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:  # fmt: skip
        window = self.spread_window(kernel_size, stride, padding)
        reach = spread_sizes("dilation", dilation, self.rank, 1)
        self.args = (*window, reach, bool(ceil_mode), bool(return_indices))


def check_padding(padding: Any, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """The padding of a pool: at most half of the window.

    Raises:
        ArgumentError: it is more.
    """
    sizes = spread_sizes("padding", padding, len(kernel))
    if any(2 * p > k for p, k in zip(sizes, kernel, strict=True)):
        raise ArgumentError(
            f"padding is {padding}", location=user_location(), expected=f"at most half of the window {kernel}"
        )
    return sizes


class MaxPool1d(MaxPool2d):
    """The largest element of each window of [N, C, L]; see `MaxPool2d`."""

    rank = 1
    function = staticmethod(pooling.max_pool1d)


class MaxPool3d(MaxPool2d):
    """The largest element of each window of [N, C, D, H, W]; see `MaxPool2d`."""

    rank = 3
    function = staticmethod(pooling.max_pool3d)


class AvgPool2d(_Pool):
    """The mean of each window of [N, C, H, W]; without `count_include_pad` the padding does not count.

    `divisor_override` replaces the number of elements.

    >>> AvgPool2d(2)([[[[1.0, 2.0], [3.0, 4.0]]]])
    Tensor([[[[2.5]]]], f32)

    Raises:
        ArgumentError: an option is out of range.
    """

    function: Callable[..., Any] = staticmethod(pooling.avg_pool2d)

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> None:  # fmt: skip
        window = self.spread_window(kernel_size, stride, padding)
        divisor = () if divisor_override is None else (_check_divisor(divisor_override),)
        self.args = (*window, bool(ceil_mode), bool(count_include_pad), *divisor)


def _check_divisor(divisor: Any) -> int:
    divisor = to_python_numbers(divisor)
    if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor == 0:
        raise ArgumentError(
            f"divisor_override is {divisor!r}", location=user_location(), expected="an integer other than 0"
        )
    return divisor


class AvgPool1d(AvgPool2d):
    """The mean of each window of [N, C, L]; see `AvgPool2d`."""

    rank = 1
    function = staticmethod(pooling.avg_pool1d)

    def __init__(
        self, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad)


class AvgPool3d(AvgPool2d):
    """The mean of each window of [N, C, D, H, W]; see `AvgPool2d`."""

    rank = 3
    function = staticmethod(pooling.avg_pool3d)


class AdaptiveAvgPool2d(_Pool):
    """The mean of as many windows of [N, C, H, W] as `output_size` says; None keeps the size of its axis.

    >>> AdaptiveAvgPool2d(1)([[[[1.0, 2.0], [3.0, 4.0]]]])
    Tensor([[[[2.5]]]], f32)
    """

    function = staticmethod(adaptive_pooling.adaptive_avg_pool2d)

    def __init__(self, output_size: Any) -> None:
        sizes = output_size if isinstance(output_size, (tuple, list)) else (output_size,) * self.rank
        if len(sizes) != self.rank:
            raise ArgumentError(
                f"output_size is {output_size!r}", location=user_location(), expected=f"a number or {self.rank} of them"
            )
        self.args: tuple[Any, ...] = (
            tuple(n if n is None else spread_sizes("output_size", n, 1, 1)[0] for n in sizes),
        )


class AdaptiveAvgPool1d(AdaptiveAvgPool2d):
    """The mean of as many windows of [N, C, L] as `output_size` says."""

    rank = 1
    function = staticmethod(adaptive_pooling.adaptive_avg_pool1d)


class AdaptiveAvgPool3d(AdaptiveAvgPool2d):
    """The mean of as many windows of [N, C, D, H, W] as `output_size` says."""

    rank = 3
    function = staticmethod(adaptive_pooling.adaptive_avg_pool3d)


class AdaptiveMaxPool2d(AdaptiveAvgPool2d):
    """The largest element of as many windows of [N, C, H, W] as `output_size` says.

    With `return_indices` the call gives (values, places), each place counted along the flattened spatial axes.
    """

    function: Callable[..., Any] = staticmethod(adaptive_pooling.adaptive_max_pool2d)

    def __init__(self, output_size: Any, return_indices: bool = False) -> None:
        super().__init__(output_size)
        self.args = (*self.args, bool(return_indices))


class AdaptiveMaxPool1d(AdaptiveMaxPool2d):
    """The largest element of as many windows of [N, C, L] as `output_size` says; see `AdaptiveMaxPool2d`."""

    rank = 1
    function = staticmethod(adaptive_pooling.adaptive_max_pool1d)


class AdaptiveMaxPool3d(AdaptiveMaxPool2d):
    """The largest element of as many windows of [N, C, D, H, W] as `output_size` says; see `AdaptiveMaxPool2d`."""

    rank = 3
    function = staticmethod(adaptive_pooling.adaptive_max_pool3d)


class LPPool2d(_Pool):
    """The `norm_type`-norm of each window of [N, C, H, W].

    >>> LPPool2d(2, (1, 2))([[[[3.0, 4.0]]]])
    Tensor([[[[5.]]]], f32)
    """

    function = staticmethod(pooling.lp_pool2d)

    def __init__(self, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False) -> None:
        kernel, steps, _ = self.spread_window(kernel_size, stride, 0)
        self.args = (float(norm_type), kernel, steps, bool(ceil_mode))


class LPPool1d(LPPool2d):
    """The `norm_type`-norm of each window of [N, C, L]; see `LPPool2d`."""

    rank = 1
    function = staticmethod(pooling.lp_pool1d)


class LPPool3d(LPPool2d):
    """The `norm_type`-norm of each window of [N, C, D, H, W]; see `LPPool2d`."""

    rank = 3
    function = staticmethod(pooling.lp_pool3d)


class GlobalAvgPool2d(Module):
    """The mean of each channel: [N, C, H, W] to [N, C, 1, 1].

    >>> GlobalAvgPool2d()([[[[1.0, 2.0], [3.0, 4.0]]]])
    Tensor([[[[2.5]]]], f32)
    """

    def forward(self, x: Any) -> Tensor:
        """The means."""
        x, single = take_batch(as_tensor(x), 2, None, "GlobalAvgPool2d")
        found = mean(x, axis=(2, 3), keepdims=True)
        return squeeze(found, 0) if single else found


# Dropout.


def check_probability(p: Any) -> float:
    """The probability of a dropout.

    Raises:
        ArgumentError: it is not from 0 to 1.
    """
    p = to_python_numbers(p)
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0.0 <= p <= 1.0:
        raise ArgumentError(f"dropout with probability {p!r}", location=user_location(), expected="0 to 1")
    return float(p)


class Dropout(Module):
    """Each element is 0 with probability `p`, and the others are scaled by 1 / (1 - p), in training mode.

    The mask comes from the default generator (`ts.manual_seed`), whose counter a compiled program advances.

    >>> Dropout(0.5).eval()([1.0, 2.0])
    Tensor([1., 2.], f32)

    Raises:
        ArgumentError: `p` is not in [0, 1].
    """

    function: Callable[..., Tensor] = staticmethod(nn.dropout)

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        self.p = check_probability(p)

    def forward(self, x: Any) -> Tensor:
        """The input with some elements dropped."""
        return type(self).function(as_tensor(x), self.p, training=self.training)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"


class Dropout1d(Dropout):
    """Each channel of [N, C, L] is 0 with probability `p`; see `Dropout`."""

    function = staticmethod(layers.dropout1d)


class Dropout2d(Dropout):
    """Each channel of [N, C, H, W] is 0 with probability `p`; see `Dropout`."""

    function = staticmethod(layers.dropout2d)


class Dropout3d(Dropout):
    """Each channel of [N, C, D, H, W] is 0 with probability `p`; see `Dropout`."""

    function = staticmethod(layers.dropout3d)


class AlphaDropout(Dropout):
    """Dropout that keeps the mean and variance of `SELU` layers (Klambauer et al. 2017)."""

    function = staticmethod(layers.alpha_dropout)


class FeatureAlphaDropout(Dropout):
    """`AlphaDropout` of whole channels of [N, C, ...]."""

    function = staticmethod(layers.feature_alpha_dropout)
