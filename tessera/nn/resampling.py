"""Resampling layers: Upsample, shuffles of pixels and channels, windows as columns, and pools that go back or draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.convolution import spread_sizes, take_batch
from tessera.nn.module import Module
from tessera.ops.tensor import convolution, pooling, resampling
from tessera.ops.tensor.shape import squeeze


class Upsample(Module):
    """[N, C, spatial axes] resampled to `size` or by `scale_factor`; the modes are those of `ts.interpolate`.

    >>> Upsample(scale_factor=2)([[[1.0, 3.0]]])
    Tensor([[[1., 1., 3., 3.]]], f32)

    Raises:
        ArgumentError: both or none of `size` and `scale_factor` are given.
    """

    def __init__(
        self, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> None:  # fmt: skip
        if (size is None) == (scale_factor is None):
            raise ArgumentError("Upsample takes one size", location=user_location(), expected="size or scale_factor")
        self.size = tuple(size) if isinstance(size, list) else size
        self.scale_factor = tuple(scale_factor) if isinstance(scale_factor, list) else scale_factor
        self.mode, self.align_corners = mode, bool(align_corners)
        self.recompute_scale_factor = bool(recompute_scale_factor)

    def forward(self, x: Any) -> Tensor:
        """The resampled batch."""
        return resampling.interpolate(
            as_tensor(x), self.size, self.scale_factor, self.mode, self.align_corners, self.recompute_scale_factor
        )

    def extra_repr(self) -> str:
        """The options."""
        what = f"size={self.size}" if self.size is not None else f"scale_factor={self.scale_factor}"
        return f"{what}, mode={self.mode!r}"


class UpsamplingNearest2d(Upsample):
    """Images [N, C, H, W] enlarged by repeating elements; see `Upsample`."""

    def __init__(self, size: Any = None, scale_factor: Any = None) -> None:
        super().__init__(size, scale_factor)


class UpsamplingBilinear2d(Upsample):
    """Images [N, C, H, W] enlarged linearly, with the corners in place; see `Upsample`."""

    def __init__(self, size: Any = None, scale_factor: Any = None) -> None:
        super().__init__(size, scale_factor, "bilinear", True)


class PixelShuffle(Module):
    """[..., C·r², H, W] as [..., C, H·r, W·r] (Shi et al. 2016).

    >>> PixelShuffle(2)([[[1.0]], [[2.0]], [[3.0]], [[4.0]]])
    Tensor([[[1., 2.],
             [3., 4.]]], f32)
    """

    def __init__(self, upscale_factor: int) -> None:
        self.upscale_factor = upscale_factor

    def forward(self, x: Any) -> Tensor:
        """The larger images."""
        return resampling.pixel_shuffle(x, self.upscale_factor)


class PixelUnshuffle(Module):
    """The inverse of `PixelShuffle`."""

    def __init__(self, downscale_factor: int) -> None:
        self.downscale_factor = downscale_factor

    def forward(self, x: Any) -> Tensor:
        """The smaller images."""
        return resampling.pixel_unshuffle(x, self.downscale_factor)


class ChannelShuffle(Module):
    """[N, C, ...] with its channels, in `groups` of equal size, interleaved (Zhang et al. 2018)."""

    def __init__(self, groups: int) -> None:
        self.groups = groups

    def forward(self, x: Any) -> Tensor:
        """The reordered channels."""
        return resampling.channel_shuffle(x, self.groups)


class Unfold(Module):
    """The windows of images [N, C, H, W] as columns: [N, C·KH·KW, windows].

    >>> Unfold((1, 2))([[[[1.0, 2.0, 4.0]]]])
    Tensor([[[1., 2.],
             [2., 4.]]], f32)
    """

    def __init__(self, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> None:
        self.args = (
            spread_sizes("kernel_size", kernel_size, 2, 1), spread_sizes("dilation", dilation, 2, 1),
            spread_sizes("padding", padding, 2), spread_sizes("stride", stride, 2, 1),
        )  # fmt: skip

    def forward(self, x: Any) -> Tensor:
        """The columns."""
        x, single = take_batch(as_tensor(x), 2, None, type(self).__name__)
        found = convolution.im2col(x, *self.args)
        return squeeze(found, 0) if single else found


class Fold(Module):
    """The sum of columns [N, C·KH·KW, windows] at the places that `Unfold` takes them from: [N, C, H, W].

    >>> Fold((1, 3), (1, 2))([[[1.0, 2.0], [10.0, 20.0]]])
    Tensor([[[[ 1., 12., 20.]]]], f32)
    """

    def __init__(
        self, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
    ) -> None:
        self.args = (
            spread_sizes("output_size", output_size, 2, 1), spread_sizes("kernel_size", kernel_size, 2, 1),
            spread_sizes("dilation", dilation, 2, 1), spread_sizes("padding", padding, 2),
            spread_sizes("stride", stride, 2, 1),
        )  # fmt: skip

    def forward(self, x: Any) -> Tensor:
        """The images."""
        x = as_tensor(x)
        found = convolution.col2im(x[None] if x.ndim == 2 else x, *self.args)
        return squeeze(found, 0) if x.ndim == 2 else found


class MaxUnpool2d(Module):
    """The values of `MaxPool2d` at their places, zeros elsewhere: `unpool(values, places)`.

    >>> values, places = [[[[4.0]]]], Tensor([[[[3]]]])
    >>> MaxUnpool2d(2)(values, places)
    Tensor([[[[0., 0.],
              [0., 4.]]]], f32)
    """

    rank = 2
    function: Callable[..., Tensor] = staticmethod(pooling.max_unpool2d)

    def __init__(self, kernel_size: Any, stride: Any = None, padding: Any = 0) -> None:
        kernel = spread_sizes("kernel_size", kernel_size, self.rank, 1)
        steps = spread_sizes("stride", kernel if stride is None else stride, self.rank, 1)
        self.args = (kernel, steps, spread_sizes("padding", padding, self.rank))

    def forward(self, x: Any, indices: Any, output_size: Any = None) -> Tensor:
        """The larger input."""
        x, single = take_batch(as_tensor(x), self.rank, None, type(self).__name__)
        places = as_tensor(indices)[None] if single else as_tensor(indices)
        sizes = None if output_size is None else tuple(output_size)[-self.rank :]
        found = type(self).function(x, places, *self.args, output_size=sizes)
        return squeeze(found, 0) if single else found


class MaxUnpool1d(MaxUnpool2d):
    """The values of `MaxPool1d` at their places; see `MaxUnpool2d`."""

    rank = 1
    function = staticmethod(pooling.max_unpool1d)


class MaxUnpool3d(MaxUnpool2d):
    """The values of `MaxPool3d` at their places; see `MaxUnpool2d`."""

    rank = 3
    function = staticmethod(pooling.max_unpool3d)
