"""What changes a descriptor: the same at compile time and while a program runs."""

from __future__ import annotations

from typing import Any

from tessera.interp.target.csl.values import Global, Mem1d


def increment_dsd_offset(d: Any, count: int) -> Any:
    """`@increment_dsd_offset`, by bytes."""
    return d._replace(byte=d.byte + count)


def set_dsd_length(d: Any, extent: int) -> Any:
    """`@set_dsd_length`."""
    return d._replace(extent=extent)


def set_dsd_stride(d: Mem1d, stride: int) -> Mem1d:
    """`@set_dsd_stride`."""
    return d._replace(stride=stride)


def set_dsd_base_addr(d: Any, base: Any) -> Any:
    """`@set_dsd_base_addr`; the offset of the descriptor goes as well."""
    array, index = base
    return d._replace(array=array, byte=index * itemsize(array))


def itemsize(array: Any) -> int:
    """Bytes of one cell of an array, or of a global that no PE holds yet."""
    if isinstance(array, Global):
        return array.type.dtype.itemsize
    return array.dtype.itemsize


CHANGES = {f.__name__: f for f in (increment_dsd_offset, set_dsd_length, set_dsd_stride, set_dsd_base_addr)}
