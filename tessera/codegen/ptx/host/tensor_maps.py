"""Tensor maps for the GPU: pycuda has no call for them, so the driver's own is made through `calls`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

from tessera.codegen.ptx.host.calls import call
from tessera.types import as_dtype

# Where the driver puts the first parameter that is aligned to 64 bytes: the bank of parameters begins at byte 528 on
# compute capability 9.0, and 576 is the next multiple. pycuda packs parameters without regard to that.
FIRST = 48
BYTES, ALIGN = 128, 64
# CUtensorMapDataType; a copy moves the bits of an 8-bit element as an integer's.
TYPES = {"f16": 6, "f32": 7, "bf16": 9, "int8": 0, "uint8": 0, "fp8_e4m3": 0, "fp8_e5m2": 0}
SWIZZLE_128, PROMOTE_128, NONE = 3, 2, 0


def encode(described: Mapping[str, Any], address: int) -> bytes:
    """The 128 bytes of a map of row-major memory at an address, with the 128-byte swizzle; outside reads as 0.

    Raises:
        ExecutionError: the driver does not take such a map.
    """
    shape, box = list(described["shape"])[::-1], list(described["box"])[::-1]
    each, rank = as_dtype(described["dtype"]).numpy.itemsize, len(shape)
    strides = [math.prod(shape[: axis + 1]) * each for axis in range(rank - 1)]
    room = ctypes.create_string_buffer(BYTES + ALIGN)
    place = (ctypes.addressof(room) + ALIGN - 1) & -ALIGN
    wide, narrow = ctypes.c_uint64, ctypes.c_uint32
    call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(place), TYPES[described["dtype"]], narrow(rank),
        ctypes.c_void_p(address),
        (wide * rank)(*shape), (wide * max(rank - 1, 1))(*strides), (narrow * rank)(*box),
        (narrow * rank)(*([1] * rank)), NONE, SWIZZLE_128, PROMOTE_128, NONE,
    )  # fmt: skip
    return ctypes.string_at(place, BYTES)


def letters(count: int) -> str:
    """How that many maps begin the parameters of a prepared launch."""
    return f"{FIRST}x" + f"{BYTES}s" * count if count else ""
