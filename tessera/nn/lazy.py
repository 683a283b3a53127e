"""Lazy layers: layers that take the number of their input features from the first call (as in PyTorch)."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from tessera.nn.linear import Linear
from tessera.nn.module import Module, check_keywords
from tessera.nn.normalisation import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
)


class _Lazy(Module):
    """A layer without its first argument: the first call makes it one of `full` in place, with the size of its input.

    Until then it has no parameters, and compiled functions, optimizers and state dicts refuse it.
    """

    full: ClassVar[type[Module]]  # what the layer becomes
    space = 0  # axes of an input after that of its features
    lacks_shapes = True

    def __init__(self, *args: Any, **named: Any) -> None:
        check_keywords(self.full, named)
        try:
            inspect.signature(self.full.__init__).bind(self, 1, *args, **named)
        except TypeError as error:
            raise ArgumentError(
                f"{type(self).__name__}: {error}", location=user_location(),
                expected=f"the arguments of {self.full.__name__} without the first",
            ) from None  # fmt: skip
        self.given = args, tuple(named.items())

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Become the full layer, and call it.

        Raises:
            ArgumentError: the call is part of a compiled function.
            ShapeError: the input has no axis of features.
        """
        self._become_full(as_tensor(args[0]) if args else Tensor(0.0))
        return self(*args, **named)

    def _become_full(self, x: Tensor) -> None:
        if x.is_traced:
            self.require_shapes()
        if x.ndim < self.space + 1:
            raise ShapeError(f"the input of a {type(self).__name__} has no axis of features", location=user_location(),
                             received=str(x.type), expected=f"{self.space + 1} axes or more")  # fmt: skip
        args, named = self.given
        made = self.full(int(x.shape[self._find_axis(x)]), *args, **dict(named))
        made.training = self.training
        made.__dict__["_hooks"] = self._hooks
        del self.given
        object.__setattr__(self, "__class__", self.full)
        self.__dict__.update(made.__dict__)

    def _find_axis(self, x: Tensor) -> int:
        return x.ndim - 1 - self.space

    def extra_repr(self) -> str:
        """What was given."""
        args, named = self.given
        return ", ".join([*map(repr, args), *(f"{n}={v!r}" for n, v in named)])


class _LazyBatchNorm(_Lazy):
    def _find_axis(self, x: Tensor) -> int:
        return 1


class _LazyInstanceNorm(_Lazy):
    def __init__(
        self, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, track_running_stats: bool = True,
        **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(eps, momentum, affine, track_running_stats, **named)  # PyTorch's defaults of a lazy one


class LazyLinear(_Lazy):
    """`Linear`, whose first argument is the size of the first input.

    >>> layer = LazyLinear(3)
    >>> layer(Tensor([[1.0, 2.0]])).shape, layer
    ((1, 3), Linear(2, 3)  # 9 parameters)
    """

    full = Linear


class LazyConv1d(_Lazy):
    """`Conv1d`, whose first argument is the size of the first input."""

    full = Conv1d
    space = 1


class LazyConv2d(_Lazy):
    """`Conv2d`, whose first argument is the size of the first input."""

    full = Conv2d
    space = 2


class LazyConv3d(_Lazy):
    """`Conv3d`, whose first argument is the size of the first input."""

    full = Conv3d
    space = 3


class LazyConvTranspose1d(_Lazy):
    """`ConvTranspose1d`, whose first argument is the size of the first input."""

    full = ConvTranspose1d
    space = 1


class LazyConvTranspose2d(_Lazy):
    """`ConvTranspose2d`, whose first argument is the size of the first input."""

    full = ConvTranspose2d
    space = 2


class LazyConvTranspose3d(_Lazy):
    """`ConvTranspose3d`, whose first argument is the size of the first input."""

    full = ConvTranspose3d
    space = 3


class LazyBatchNorm1d(_LazyBatchNorm):
    """`BatchNorm1d`, whose first argument is the size of the first input."""

    full = BatchNorm1d
    space = 1


class LazyBatchNorm2d(_LazyBatchNorm):
    """`BatchNorm2d`, whose first argument is the size of the first input."""

    full = BatchNorm2d
    space = 1


class LazyBatchNorm3d(_LazyBatchNorm):
    """`BatchNorm3d`, whose first argument is the size of the first input."""

    full = BatchNorm3d
    space = 1


class LazyInstanceNorm1d(_LazyInstanceNorm):
    """`InstanceNorm1d`, whose first argument is the size of the first input."""

    full = InstanceNorm1d
    space = 1


class LazyInstanceNorm2d(_LazyInstanceNorm):
    """`InstanceNorm2d`, whose first argument is the size of the first input."""

    full = InstanceNorm2d
    space = 2


class LazyInstanceNorm3d(_LazyInstanceNorm):
    """`InstanceNorm3d`, whose first argument is the size of the first input."""

    full = InstanceNorm3d
    space = 3
