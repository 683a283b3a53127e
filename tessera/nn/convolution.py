"""Convolutions and transposed convolutions in one to three dimensions, with PyTorch's weights and first values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn import initialisation as init
from tessera.nn.linear import check_count
from tessera.nn.module import Module, Parameter
from tessera.nn.padding import EXTENSIONS, pad_axes
from tessera.ops.tensor import convolution
from tessera.ops.tensor.shape import expand_dims, squeeze


def spread_sizes(name: str, value: Any, rank: int, least: int = 0) -> tuple[int, ...]:
    """One size for each spatial axis, from a number or a sequence.

    >>> spread_sizes("stride", 2, 3)
    (2, 2, 2)

    Raises:
        ArgumentError: there are too many or too few, or one is no integer or too small.
    """
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,) * rank
    if len(sizes) != rank:
        raise ArgumentError(f"{name} is {value!r}", location=user_location(), expected=f"an integer or {rank} of them")
    return tuple(check_count(name, s, least) for s in sizes)


def take_batch(x: Tensor, rank: int, channels: int | None, name: str) -> tuple[Tensor, bool]:
    """An input with a batch axis, and whether it was added.

    Raises:
        ShapeError: the rank or the number of channels is wrong.
    """
    letters = "DHW"[3 - rank :] if rank < 4 else ""
    shape = f"[N, {channels if channels is not None else 'C'}, {', '.join(letters)}]"
    if x.ndim not in (rank + 1, rank + 2) or (channels is not None and x.shape[-rank - 1] != channels):
        raise ShapeError(
            f"{name} does not take this input", location=user_location(), expected=f"{shape}, or without N",
            received=str(x.type),
        )  # fmt: skip
    return (x, False) if x.ndim == rank + 2 else (expand_dims(x, 0), True)


def check_padding_mode(mode: str, known: tuple[str, ...]) -> str:
    """A mode of padding that a layer has.

    Raises:
        ArgumentError: it has no such mode.
    """
    if mode not in known:
        raise ArgumentError(f"padding_mode is {mode!r}", location=user_location(), expected=", ".join(known))
    return mode


class _Convolution(Module):
    """What convolutions share: sizes, groups, the weight and the bias."""

    rank = 2
    function: Callable[..., Tensor]
    transposed = False

    def _set_up(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any, dilation: Any, groups: int,
        bias: bool, dtype: Any,
    ) -> None:  # fmt: skip
        self.in_channels, self.out_channels = (
            check_count("in_channels", in_channels), check_count("out_channels", out_channels)
        )  # fmt: skip
        self.groups = check_count("groups", groups)
        self.kernel_size = spread_sizes("kernel_size", kernel_size, self.rank, 1)
        self.stride = spread_sizes("stride", stride, self.rank, 1)
        self.dilation = spread_sizes("dilation", dilation, self.rank, 1)
        if in_channels % groups or out_channels % groups:
            raise ArgumentError(
                f"groups is {groups}", location=user_location(),
                expected=f"a divisor of {in_channels} and {out_channels} channels",
            )  # fmt: skip
        pair = (in_channels, out_channels // groups) if self.transposed else (out_channels, in_channels // groups)
        shape = (*pair, *self.kernel_size)
        self.weight = Parameter(init.kaiming_uniform(shape, math.sqrt(5.0), dtype))
        fan = init.count_fans(shape)[0]
        self.bias = Parameter(init.bias_of(fan, (out_channels,), dtype)) if bias else None

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"


class Conv2d(_Convolution):
    """A convolution of images [N, in_channels, H, W], with weight [out_channels, in_channels / groups, KH, KW].

    `padding` is a number for each axis, "same" (with stride 1) or "valid"; `padding_mode` says what it holds: "zeros",
    "reflect", "replicate" or "circular".

    >>> from tessera.ops.api.creation import zeros
    >>> Conv2d(3, 8, 3, padding=1)(zeros((2, 3, 5, 5))).shape
    (2, 8, 5, 5)

    Raises:
        ArgumentError: an option is out of range.
    """

    function = staticmethod(convolution.conv2d)

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, padding_mode: str = "zeros", dtype: Any = f32,
    ) -> None:  # fmt: skip
        self._set_up(in_channels, out_channels, kernel_size, stride, dilation, groups, bias, dtype)
        self.padding = self._read_padding(padding)
        self.padding_mode = check_padding_mode(padding_mode, ("zeros", *EXTENSIONS))

    def _read_padding(self, padding: Any) -> tuple[tuple[int, int], ...]:
        """The zeros before and after each axis."""
        if padding == "same":
            if any(s != 1 for s in self.stride):
                raise ArgumentError('padding="same" needs stride 1', location=user_location(), received=self.stride)
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return tuple((t // 2, t - t // 2) for t in totals)
        if isinstance(padding, str) and padding != "valid":
            raise ArgumentError(
                f"padding is {padding!r}", location=user_location(), expected='a number, "same" or "valid"'
            )
        sizes = spread_sizes("padding", 0 if padding == "valid" else padding, self.rank)
        return tuple((p, p) for p in sizes)

    def forward(self, x: Any) -> Tensor:
        """The convolution of a batch of inputs, or of one."""
        x, single = take_batch(as_tensor(x), self.rank, self.in_channels, type(self).__name__)
        padding: Any = tuple(p for p, _ in self.padding)
        if self.padding_mode != "zeros" or any(a != b for a, b in self.padding):
            x, padding = pad_axes(x, self.padding, self.padding_mode), 0
        options = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups, "padding": padding}
        found = type(self).function(x, self.weight, self.bias, **options)
        return squeeze(found, 0) if single else found


class Conv1d(Conv2d):
    """A convolution of sequences [N, in_channels, L]; see `Conv2d`.

    >>> from tessera.ops.api.creation import zeros
    >>> Conv1d(3, 8, 3)(zeros((2, 3, 5))).shape
    (2, 8, 3)
    """

    rank = 1
    function = staticmethod(convolution.conv1d)


class Conv3d(Conv2d):
    """A convolution of volumes [N, in_channels, D, H, W]; see `Conv2d`.

    >>> from tessera.ops.api.creation import zeros
    >>> Conv3d(1, 2, 3)(zeros((1, 1, 3, 4, 5))).shape
    (1, 2, 1, 2, 3)
    """

    rank = 3
    function = staticmethod(convolution.conv3d)


class ConvTranspose2d(_Convolution):
    """The transpose of a convolution, with weight [in_channels, out_channels / groups, KH, KW].

    >>> from tessera.ops.api.creation import zeros
    >>> ConvTranspose2d(3, 8, 2, stride=2)(zeros((1, 3, 4, 4))).shape
    (1, 8, 8, 8)

    Raises:
        ArgumentError: an option is out of range.
    """

    transposed = True
    function = staticmethod(convolution.conv_transpose2d)

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, bias: bool = True, dilation: Any = 1, padding_mode: str = "zeros",
        dtype: Any = f32,
    ) -> None:  # fmt: skip
        check_padding_mode(padding_mode, ("zeros",))
        self._set_up(in_channels, out_channels, kernel_size, stride, dilation, groups, bias, dtype)
        self.padding = spread_sizes("padding", padding, self.rank)
        self.output_padding = spread_sizes("output_padding", output_padding, self.rank)

    def forward(self, x: Any, output_size: Any = None) -> Tensor:
        """The transposed convolution of a batch of inputs, or of one; `output_size` determines the output padding.

        Raises:
            ArgumentError: no output padding gives that size.
        """
        x, single = take_batch(as_tensor(x), self.rank, self.in_channels, type(self).__name__)
        more = self.output_padding if output_size is None else self._find_output_padding(x.shape[2:], output_size)
        found = type(self).function(
            x, self.weight, self.bias, stride=self.stride, padding=self.padding, output_padding=more,
            groups=self.groups, dilation=self.dilation,
        )  # fmt: skip
        return squeeze(found, 0) if single else found

    def _find_output_padding(self, sizes: Sequence[Any], output_size: Any) -> tuple[int, ...]:
        """What the least sizes lack of those that are asked for, which may have the axes of batch and channels too."""
        wanted = tuple(output_size)[-self.rank :]
        axes = zip(sizes, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in axes]
        more = tuple(w - n for w, n in zip(wanted, least, strict=False))
        if len(more) != self.rank or any(not 0 <= m < s for m, s in zip(more, self.stride, strict=True)):
            most = [n + s - 1 for n, s in zip(least, self.stride, strict=True)]
            raise ArgumentError(
                "no output padding gives this size", location=user_location(), received=f"output_size={output_size}",
                expected=f"sizes from {least} to {most}",
            )  # fmt: skip
        return more


class ConvTranspose1d(ConvTranspose2d):
    """The transpose of a convolution of sequences; see `ConvTranspose2d`."""

    rank = 1
    function = staticmethod(convolution.conv_transpose1d)


class ConvTranspose3d(ConvTranspose2d):
    """The transpose of a convolution of volumes; see `ConvTranspose2d`."""

    rank = 3
    function = staticmethod(convolution.conv_transpose3d)
