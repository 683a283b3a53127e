"""Padding: layers that extend spatial axes by a constant, a reflection, the edge or the other end, as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.module import Module
from tessera.ops.tensor.basic import broadcast_to
from tessera.ops.tensor.rearrange import flip, narrow, pad
from tessera.ops.tensor.shape import concatenate

Sides = Sequence[tuple[int, int]]


def pad_axes(x: Tensor, sides: Sides, mode: str, value: float = 0.0) -> Tensor:
    """`x` with its last axes extended by (before, after) elements each; negative counts cut elements off.

    `mode` is "zeros" (or "constant", with `value`), "reflect" (without the element at the edge), "replicate" or
    "circular".

    >>> pad_axes(Tensor([1.0, 2.0, 3.0]), [(2, 1)], "reflect")
    Tensor([3., 2., 1., 2., 3., 2.], f32)

    Raises:
        ArgumentError: there is no such mode.
        ShapeError: an axis has too few elements.
    """
    first = x.ndim - len(sides)
    for i, (before, after) in enumerate(sides):
        if before < 0 or after < 0:
            low, high = max(-before, 0), x.shape[first + i] - max(-after, 0)
            if isinstance(high, int) and high < low:
                raise _make_size_error(mode, (before, after), first + i, x)
            x = narrow(x, first + i, low, high)
    wide = [(max(before, 0), max(after, 0)) for before, after in sides]
    if mode in ("zeros", "constant"):
        return pad(x, (*((0, 0),) * first, *wide), value) if any(map(any, wide)) else x
    if mode not in EXTENSIONS:
        raise ArgumentError(
            f"padding_mode is {mode!r}", location=user_location(), expected=f"zeros, {', '.join(EXTENSIONS)}"
        )
    for i, side in enumerate(wide):
        if any(side):
            x = _extend(x, first + i, side, mode)
    return x


def _extend(x: Tensor, axis: int, side: tuple[int, int], mode: str) -> Tensor:
    """`x` with one axis extended on both sides."""
    function, spare = EXTENSIONS[mode]
    size = x.shape[axis]
    if isinstance(size, int) and (size < 1 or (spare is not None and max(side) > size - spare)):
        raise _make_size_error(mode, side, axis, x)
    before, after = (function(x, axis, count, end) if count else None for end, count in enumerate(side))
    return concatenate([part for part in (before, x, after) if part is not None], axis=axis)


def _make_size_error(mode: str, side: tuple[int, int], axis: int, x: Tensor) -> ShapeError:
    return ShapeError(
        f"axis {axis} has too few elements for padding {side}", location=user_location(), received=str(x.type),
        expected=f"more elements, for the mode {mode!r}",
    )  # fmt: skip


def _reflect(x: Tensor, axis: int, count: int, end: int) -> Tensor:
    size = x.shape[axis]
    return flip(narrow(x, axis, size - 1 - count, size - 1) if end else narrow(x, axis, 1, count + 1), axis)


def _replicate(x: Tensor, axis: int, count: int, end: int) -> Tensor:
    size = x.shape[axis]
    edge = narrow(x, axis, size - 1, size) if end else narrow(x, axis, 0, 1)
    return broadcast_to(edge, shape=(*x.shape[:axis], count, *x.shape[axis + 1 :]))


def _wrap(x: Tensor, axis: int, count: int, end: int) -> Tensor:
    size = x.shape[axis]
    return narrow(x, axis, 0, count) if end else narrow(x, axis, size - count, size)


# For each mode: the elements that extend an axis, and by how many they are fewer than those of the axis.
EXTENSIONS: dict[str, tuple[Callable[..., Tensor], int | None]] = {
    "reflect": (_reflect, 1), "replicate": (_replicate, None), "circular": (_wrap, 0),
}  # fmt: skip


def read_sides(padding: Any, rank: int) -> tuple[tuple[int, int], ...]:
    """Pairs for the spatial axes, the first axis first, from a number or PyTorch's list, whose last axis is first.

    >>> read_sides((1, 2, 3, 4), 2)
    ((3, 4), (1, 2))

    Raises:
        ArgumentError: there are too many or too few numbers, or one is no integer.
    """
    given = tuple(padding) if isinstance(padding, (tuple, list)) else (padding,) * (2 * rank)
    if len(given) != 2 * rank or any(isinstance(n, bool) or not hasattr(n, "__index__") for n in given):
        raise ArgumentError(
            f"padding is {padding!r}", location=user_location(), expected=f"an integer or {2 * rank} of them"
        )
    sizes = [int(n) for n in given]
    return tuple((sizes[2 * i], sizes[2 * i + 1]) for i in reversed(range(rank)))


class _Pad(Module):
    """Extends the spatial axes of [N, C, ...] or [C, ...]: `padding` is a number or (left, right, top, bottom, ...)."""

    rank = 2
    mode = "constant"
    value = 0.0

    def __init__(self, padding: Any) -> None:
        self.padding = read_sides(padding, self.rank)

    def forward(self, x: Any) -> Tensor:
        """The extended input."""
        x = as_tensor(x)
        if x.ndim not in (self.rank + 1, self.rank + 2):
            raise ShapeError(
                f"{type(self).__name__} does not take this input", location=user_location(),
                expected=f"{self.rank} spatial axes after [N, C] or [C]", received=str(x.type),
            )  # fmt: skip
        return pad_axes(x, self.padding, self.mode, self.value)

    def extra_repr(self) -> str:
        """The sizes."""
        return str(self.padding)


class ConstantPad2d(_Pad):
    """Images with `value` around them: `padding` is a number or (left, right, top, bottom).

    >>> ConstantPad2d((1, 0, 0, 0), 5.0)([[[1.0, 2.0]]])
    Tensor([[[5., 1., 2.]]], f32)
    """

    def __init__(self, padding: Any, value: float) -> None:
        super().__init__(padding)
        self.value = value


class ConstantPad1d(ConstantPad2d):
    """Sequences with `value` around them; see `ConstantPad2d`."""

    rank = 1


class ConstantPad3d(ConstantPad2d):
    """Volumes with `value` around them; see `ConstantPad2d`."""

    rank = 3


def _make(kind: str, mode: str, rank: int, what: str) -> type[_Pad]:
    name = f"{kind}{rank}d"
    return type(name, (_Pad,), {"rank": rank, "mode": mode, "__doc__": what, "__module__": __name__})


ZeroPad1d, ZeroPad2d, ZeroPad3d = (
    _make("ZeroPad", "constant", n, "Spatial axes extended by zeros.") for n in (1, 2, 3)
)
ReflectionPad1d, ReflectionPad2d, ReflectionPad3d = (
    _make("ReflectionPad", "reflect", n, "Spatial axes extended by their reflection, without the edge.")
    for n in (1, 2, 3)
)
ReplicationPad1d, ReplicationPad2d, ReplicationPad3d = (
    _make("ReplicationPad", "replicate", n, "Spatial axes extended by the element at the edge.") for n in (1, 2, 3)
)
CircularPad1d, CircularPad2d, CircularPad3d = (
    _make("CircularPad", "circular", n, "Spatial axes extended by their other end.") for n in (1, 2, 3)
)
