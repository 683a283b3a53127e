"""Parts of device arrays: equal parts along an axis, as strided rows of bytes that a device copies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tessera.core.device_array import DeviceArray, Rows


def find_shape(kind: str, shape: tuple[int, ...], count: int, attrs: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a collective's result.

    >>> find_shape("all_gather", (2, 3), 4, {"axis": -2})
    (8, 3)
    """
    sizes = list(shape)
    if kind in ("all_gather", "gather_to"):
        sizes[attrs["axis"]] *= count
    elif kind in ("reduce_scatter", "scatter_from"):
        sizes[attrs["axis"]] //= count
    elif kind == "all_to_all":
        sizes[attrs["split"]] //= count
        sizes[attrs["join"]] *= count
    return tuple(sizes)


class PartsOfAxis:
    """The equal parts of an array along an axis: as columns of the array, and one after the other."""

    def __init__(self, whole: DeviceArray, axis: int, count: int) -> None:
        at = axis % len(whole.shape)
        self.outer = math.prod(whole.shape[:at])
        self.pitch = whole.nbytes // max(self.outer, 1)
        self.width = self.pitch // count

    def columns(self, whole: DeviceArray, number: int) -> Rows:
        """The rows of a part of the array."""
        return Rows(whole.address + number * self.width, self.pitch)

    def rows(self, packed: DeviceArray, number: int) -> Rows:
        """The rows of a part among packed ones."""
        return Rows(packed.address + number * self.width * self.outer, self.width)


def cut_device_part(
    x: DeviceArray, out: DeviceArray | None, axis: int, number: int, count: int, stream: int
) -> DeviceArray:
    """Part `number` of `count` along an axis, in a new array or in `out`."""
    if out is None:
        out = x.memory.empty(find_shape("scatter_from", x.shape, count, {"axis": axis}), x.dtype, stream)
    split = PartsOfAxis(x, axis, count)
    x.memory.copy_rows(Rows(out.address, split.width), split.columns(x, number), split.width, split.outer, stream)
    return out


def place_device_part(
    x: DeviceArray, out: DeviceArray | None, axis: int, number: int, count: int, stream: int
) -> DeviceArray:
    """Zeros with `x` as part `number` of `count` along an axis, in a new array or in `out`."""
    if out is None:
        out = x.memory.empty(find_shape("all_gather", x.shape, count, {"axis": axis}), x.dtype, stream)
    x.memory.clear(out, stream)
    split = PartsOfAxis(out, axis, count)
    x.memory.copy_rows(split.columns(out, number), Rows(x.address, split.width), split.width, split.outer, stream)
    return out
