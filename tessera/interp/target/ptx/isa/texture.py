"""Textures and surfaces: objects of the host that instructions address by handle, and the sampling of their texels.

Addressing and filtering are those of the CUDA C++ Programming Guide, "Texture Fetching": a linear filter weighs texels
with fractions of 8 bits, and so are the products of fractions on an H100.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tessera.core.errors import ArgumentError

ADDRESS_MODES = ("wrap", "mirror", "clamp_ogl", "clamp", "border")  # in the order of the ISA's numbers
FILTERS = ("point", "linear")
_FRACTION = 256  # steps between two texels
_HANDLE = 0x7E55 << 48  # the high bits of every handle: no address has them


@dataclass(frozen=True, eq=False)
class SamplerObject:
    """How a texture is read: address modes of x, y and z, filter, and whether coordinates are in [0, 1).

    Raises:
        ArgumentError: there is no such mode or filter, or the hardware does not have the combination.
    """

    address: tuple[str, ...] = ("clamp",) * 3
    filter: str = "point"
    normalized: bool = False
    border: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        for mode in self.address:
            if mode not in ADDRESS_MODES:
                raise ArgumentError("unknown address mode", expected=", ".join(ADDRESS_MODES), received=repr(mode))
            if mode in ("wrap", "mirror") and not self.normalized:
                raise ArgumentError(f"the address mode '{mode}' needs normalized coordinates", received="texels")
        if self.filter not in FILTERS:
            raise ArgumentError("unknown filter", expected=", ".join(FILTERS), received=repr(self.filter))
        if len(self.border) != 4:
            raise ArgumentError("a border has four components", received=self.border)

    def get_mode(self, axis: int) -> str:
        """The address mode of x, y or z; the last one given is that of the rest."""
        return self.address[min(axis, len(self.address) - 1)]


_POINT_SAMPLER = SamplerObject()


@dataclass(frozen=True, eq=False)
class TextureObject:
    """A texture argument: an array [[layer,] [[z,] y,] x [, channel]] and how it is read.

    Its last axis has the channels if there is more than one (1, 2 or 4). Integers are read as they are, or with
    `normalized_read` (1 or 2 bytes) as floats in [0, 1] or [-1, 1]. Reads by integer coordinates are 0 outside, also of
    textures of linear memory. A PTX parameter gets its handle of 64 bits.

    Raises:
        ArgumentError: the hardware has no such texture.

    >>> TextureObject(np.zeros((5, 6, 4), np.float32), channels=4).extent
    (6, 5)
    """

    array: np.ndarray
    channels: int = 1
    layered: bool = False
    sampler: SamplerObject = _POINT_SAMPLER
    normalized_read: bool = False

    def __post_init__(self) -> None:
        _check_texels(self.array, self.channels, self.layered)
        kind, size = self.array.dtype.kind, self.array.dtype.itemsize
        if self.normalized_read and (kind == "f" or size > 2):
            raise ArgumentError("normalized_read is for integers of 8 or 16 bits", received=str(self.array.dtype))
        if self.sampler.filter == "linear" and kind != "f" and not self.normalized_read:
            raise ArgumentError("a linear filter needs texels that are read as floats", received=str(self.array.dtype))

    @property
    def extent(self) -> tuple[int, ...]:
        """The sizes, x first, without layers and channels."""
        return _find_extent(self)

    @property
    def reads_floats(self) -> bool:
        """Whether a read gives floats."""
        return self.array.dtype.kind == "f" or self.normalized_read


@dataclass(frozen=True, eq=False)
class SurfaceObject:
    """A surface argument: an array [[layer,] [[z,] y,] x [, channel]] that kernels read and write in place.

    Raises:
        ArgumentError: the hardware has no such surface.

    >>> SurfaceObject(np.zeros((5, 6), np.float32)).extent
    (6, 5)
    """

    array: np.ndarray
    channels: int = 1
    layered: bool = False

    def __post_init__(self) -> None:
        _check_texels(self.array, self.channels, self.layered)

    @property
    def extent(self) -> tuple[int, ...]:
        """The sizes, x first, without layers and channels."""
        return _find_extent(self)


PtxObject = TextureObject | SurfaceObject | SamplerObject


def _check_texels(array: np.ndarray, channels: int, layered: bool) -> None:
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "iuf" or (kind == "f" and size not in (2, 4)) or size > 4:
        raise ArgumentError("texels are integers or floats of up to 32 bits", received=str(array.dtype))
    if not array.flags.c_contiguous:
        raise ArgumentError("a texture or surface needs a C-contiguous array")
    if channels not in (1, 2, 4) or (channels > 1 and array.shape[-1:] != (channels,)):
        raise ArgumentError(
            "a texel has 1, 2 or 4 channels, the last axis of the array if there is more than one",
            expected="1, 2 or 4", received=f"{channels} channels, shape {array.shape}",
        )  # fmt: skip
    dims = array.ndim - (channels > 1) - layered
    if not 1 <= dims <= (2 if layered else 3) or 0 in array.shape:
        raise ArgumentError("a texture or surface has one to three dimensions", received=f"shape {array.shape}")


def _find_extent(target: TextureObject | SurfaceObject) -> tuple[int, ...]:
    shape = target.array.shape[: target.array.ndim - (target.channels > 1)]
    return tuple(reversed(shape[target.layered :]))


def make_handle(index: int) -> int:
    """The handle of the object that is bound as number `index` in a launch."""
    return _HANDLE | index


def find_object_index(handle: int) -> int | None:
    """The number of a handle's object, or None if it is no handle."""
    return handle & 0xFFFFFFFF if handle >> 32 == _HANDLE >> 32 else None


# Sampling. Texels are arrays [layer, z, y, x, channel]; coordinates have one array for each dimension, x first.


def view_texels(target: TextureObject | SurfaceObject, raw: np.ndarray) -> np.ndarray:
    """The texels of an object in the bytes of its array."""
    x, y, z = (*target.extent, 1, 1)[:3]
    layers = target.array.shape[0] if target.layered else 1
    return raw[: target.array.nbytes].view(target.array.dtype).reshape(layers, z, y, x, target.channels)


def read_texels(
    texture: TextureObject, texels: np.ndarray, index: Sequence[np.ndarray], layer: np.ndarray,
    sampler: SamplerObject | None,
) -> np.ndarray:  # fmt: skip
    """The texels [n, channels] at integer coordinates, which the address modes bring inside; no sampler: 0 outside."""
    inside = np.ones(len(layer), bool)
    found = []
    for axis, (i, size) in enumerate(zip(index, texture.extent, strict=True)):
        mode = sampler.get_mode(axis) if sampler else "border"
        inside &= (i >= 0) & (i < size) if mode == "border" else True
        found.append(_wrap_index(i, size, mode))
    x, y, z = (*found, *(np.zeros_like(layer),) * 2)[:3]
    values = texels[np.clip(layer, 0, len(texels) - 1), z, y, x]
    if texture.normalized_read:
        values = np.maximum(values.astype("f4") / np.float32(np.iinfo(values.dtype).max), -1)
    elif texture.reads_floats:
        values = values.astype("f4")
    return np.where(inside[:, None], values, _make_border(texture, sampler) if sampler else values.dtype.type(0))


def _make_border(texture: TextureObject, sampler: SamplerObject) -> np.ndarray:
    """The border's components as the texture's type has them."""
    border = np.array(sampler.border[: texture.channels])
    if not texture.reads_floats:
        return np.zeros(texture.channels, texture.array.dtype)
    if not texture.normalized_read:
        return border.astype(texture.array.dtype).astype("f4")
    most = np.iinfo(texture.array.dtype).max
    lowest = 0 if texture.array.dtype.kind == "u" else -1
    return (np.ceil(np.clip(border, lowest, 1) * most - 0.5) / most).astype("f4")


def _wrap_index(i: np.ndarray, size: int, mode: str) -> np.ndarray:
    """An index inside the texture."""
    if mode == "wrap":
        return i % size
    if mode == "mirror":
        folded = i % (2 * size)
        return np.where(folded < size, folded, 2 * size - 1 - folded)
    return np.clip(i, 0, size - 1)


def _scale_coordinate(x: np.ndarray, size: int, mode: str, normalized: bool) -> np.ndarray:
    """A coordinate in texels; not a number is 0."""
    x = np.where(np.isnan(x), np.float32(0), x)
    if not normalized:
        return np.clip(x, -(2.0**30), 2.0**30)
    if mode == "wrap":
        x = x - np.floor(x)
    elif mode == "mirror":  # the index is folded, so that a footprint runs backwards in every second copy
        x = x - 2 * np.floor(x / 2)
    return np.clip(x * np.float32(size), -(2.0**30), 2.0**30)


def find_footprint(
    texture: TextureObject, coordinates: Sequence[np.ndarray], sampler: SamplerObject, linear: bool
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The first texel of each dimension, and the weight of the next one in parts of 256 (0 for a point filter)."""
    first, weights = [], []
    for axis, (x, size) in enumerate(zip(coordinates, texture.extent, strict=True)):
        at = _scale_coordinate(x, size, sampler.get_mode(axis), sampler.normalized)
        if not linear:
            first.append(np.floor(at).astype(np.int64))
            weights.append(np.zeros(len(at)))
            continue
        fixed = np.floor(at.astype("f8") * _FRACTION + 0.5).astype(np.int64) - _FRACTION // 2
        first.append(fixed // _FRACTION)
        weights.append((fixed % _FRACTION).astype("f8"))
    return first, weights


def sample(
    texture: TextureObject, texels: np.ndarray, coordinates: Sequence[np.ndarray], layer: np.ndarray,
    sampler: SamplerObject, offsets: Sequence[np.ndarray],
) -> np.ndarray:  # fmt: skip
    """The filtered texels [n, 4] at float coordinates; channels that the texture lacks are 0.

    >>> one = TextureObject(np.arange(4, dtype=np.float32), sampler=SamplerObject(filter="linear"))
    >>> at = [np.array([1.0, 2.75], np.float32)]
    >>> sample(one, view_texels(one, one.array.view("u1")), at, np.zeros(2, int), one.sampler, ())[:, 0].tolist()
    [0.5, 2.25]
    """
    linear = sampler.filter == "linear" and texture.reads_floats
    first, weights = find_footprint(texture, coordinates, sampler, linear)
    if offsets:
        first = [i + o for i, o in zip(first, offsets, strict=False)]
    if not linear:
        return pad_channels(read_texels(texture, texels, first, layer, sampler))
    total = np.zeros((len(layer), texture.channels))
    for corner, weight in _weigh_corners(weights):
        at = [i + c for i, c in zip(first, corner, strict=True)]
        total += weight[:, None] * read_texels(texture, texels, at, layer, sampler)
    return pad_channels((total / _FRACTION).astype("f4"))


def _weigh_corners(fractions: Sequence[np.ndarray]) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """The texels around a place and their weights: whole numbers with the sum 256.

    A weight is split along x, then z, then y, and each part is rounded. So an H100 weighs in one and two dimensions; in
    three, 1 of 25 results differs by one part in 256.
    """
    order = (0, 2, 1)[: len(fractions)] if len(fractions) == 3 else range(len(fractions))
    for corner in itertools.product((0, 1), repeat=len(fractions)):
        weight: np.ndarray | float = float(_FRACTION)
        for axis in order:
            share = weight * fractions[axis] / _FRACTION
            far = np.floor(share + 0.5) if corner[0] else np.ceil(share - 0.5)
            far = fractions[axis] if axis == 0 else far
            weight = far if corner[axis] else weight - far
        yield corner, np.asarray(weight)


def pad_channels(values: np.ndarray) -> np.ndarray:
    """Four channels: those that are missing are 0."""
    return np.pad(values, ((0, 0), (0, 4 - values.shape[1])))
