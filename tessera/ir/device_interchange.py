"""Device interchange: arrays of PyTorch, CuPy, JAX and others in a device's memory, seen in place through DLPack or the
CUDA array interface, and capsules of device arrays for them. Formats: DLPack 1.1, `dlpack.h`; CUDA array interface 3.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.device import GENERATOR_BY_DLPACK
from tessera.core.device_array import LEGACY_STREAM, SYNTHETIC_STREAMS, DeviceArray, DeviceMemory
from tessera.core.errors import ArgumentError, DeviceUnavailable, DTypeError, user_location
from tessera.core.hooks import find_device_memory
from tessera.core.types import DType, as_dtype
from tessera.ir.array_interchange import (
    DLPACK_CODES,
    DTYPE_BY_CODE,
    NUMPY_CODES,
    find_capsule,
    request_capsule,
)

CUDA_DEVICE = 2  # the device type of DLPack
POINTER_ALIGN = 16  # bytes: kernels access memory in words of up to this size
HOST_DEVICES = (1, 3)  # DLPack: memory of the processor, and such memory pinned for a GPU
NUMPY_KINDS = {0: "i", 1: "u", 2: "f", 6: "b"}  # DLPack's type codes


class _DLTensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


@dataclass(frozen=True)
class ArrayReader:
    """How arrays of another library's class are read without a protocol, which costs less.

    `kind` gives a hashable key of the shape and element type of an array that is used in place; None for one that is
    not: it takes the general way. `address` gives the address of its first element.
    """

    kind: Callable[[Any], Hashable]
    address: Callable[[Any], int]


# The readers of classes that were seen in a call.
READERS: dict[type, ArrayReader] = {}


def _torch_kind(x: Any) -> Hashable:
    plain = x.is_cuda and x.is_contiguous() and not x.requires_grad and not x.is_neg()
    return (x.dtype, x.shape) if plain and not x.data_ptr() % POINTER_ALIGN else None


def _cupy_kind(x: Any) -> Hashable:
    plain = x.flags.c_contiguous and not x.data.ptr % POINTER_ALIGN
    return ("cupy", x.dtype, x.shape) if plain else None


_READERS_BY_NAME = {
    ("torch", "Tensor"): ArrayReader(_torch_kind, lambda x: x.data_ptr()),
    ("torch.nn.parameter", "Parameter"): ArrayReader(_torch_kind, lambda x: x.data_ptr()),
    ("cupy", "ndarray"): ArrayReader(_cupy_kind, lambda x: x.data.ptr),
}


def is_on_device(value: Any) -> bool:
    """Whether a value is another library's array in the memory of a device."""
    device = getattr(value, "__dlpack_device__", None)
    if device is not None:
        return int(device()[0]) not in HOST_DEVICES
    return hasattr(value, "__cuda_array_interface__")


def import_device_array(value: Any, stream: int | None = None) -> DeviceArray:
    """See another library's array in place; it is ready on the stream, by default the caller's current one.

    Elements that are not contiguous, or begin at an address that kernels cannot use, are copied within the device.

    Raises:
        DeviceUnavailable: no generator serves its device.
        DTypeError: its element type is none of ours.
        ArgumentError: it requires gradients, or it is not contiguous and its library cannot change that.
    """
    if getattr(value, "requires_grad", False):
        raise ArgumentError(
            "this tensor requires gradients, which do not reach its library's tape", location=user_location(),
            expected="a tensor without requires_grad", received=type(value).__name__, suggestion="pass x.detach()",
        )  # fmt: skip
    device = getattr(value, "__dlpack_device__", None)
    memory = _find_memory(tuple(int(n) for n in device()) if device is not None else (CUDA_DEVICE, 0))
    stream = memory.find_stream() if stream is None else stream
    found = _read_capsule(value, memory, stream) if device is not None else _read_interface(value, memory, stream)
    cls = value.__class__
    if (reader := _READERS_BY_NAME.get((cls.__module__, cls.__name__))) is not None:
        READERS[cls] = reader
    return memory.clone(found, stream) if found.address % POINTER_ALIGN else found


def _find_memory(device: tuple[int, ...]) -> DeviceMemory:
    generator = GENERATOR_BY_DLPACK.get(device[0])
    if generator is None:
        raise DeviceUnavailable(
            f"an array on a device that nothing here serves: type {device[0]} of DLPack", location=user_location(),
            expected="an array on a CUDA device, or in host memory", suggestion="copy it to the host first",
        )  # fmt: skip
    memory = find_device_memory(generator)
    if device[1] != memory.dlpack_device[1]:
        raise ArgumentError(
            f"an array on device {device[1]}", location=user_location(), expected=f"an array on {memory.name}",
            suggestion="move it there first",
        )  # fmt: skip
    return memory


def _read_capsule(value: Any, memory: DeviceMemory, stream: int) -> DeviceArray:
    capsule = request_capsule(value, stream=1 if stream == LEGACY_STREAM else stream)
    address, _ = find_capsule(capsule)
    found = _DLTensor.from_address(address)
    shape = tuple(found.shape[: found.ndim])
    dtype = _find_dtype(found.code, found.bits, found.lanes)
    if found.strides and not _is_contiguous(shape, found.strides[: found.ndim]):
        return _read_capsule(_make_contiguous(value), memory, stream)
    return DeviceArray((found.data or 0) + found.byte_offset, shape, dtype.numpy, capsule, memory, stream)


def _find_dtype(code: int, bits: int, lanes: int) -> DType:
    if lanes == 1 and code in NUMPY_CODES:
        return as_dtype(np.dtype(f"{NUMPY_KINDS[code]}{bits // 8}"))
    if lanes != 1 or (code, bits) not in DTYPE_BY_CODE:
        raise DTypeError(
            f"DLPack type {code} of {bits} bits and {lanes} lanes is none of ours", location=user_location()
        )
    return DTYPE_BY_CODE[code, bits]


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _make_contiguous(value: Any) -> Any:
    """A contiguous copy by the array's own library.

    Raises:
        ArgumentError: the library has none.
    """
    if hasattr(value, "contiguous"):
        return value.contiguous()
    if hasattr(value, "flags") and hasattr(value, "copy"):
        return value.copy(order="C")
    raise ArgumentError(
        "an array that is not contiguous", location=user_location(), received=type(value).__name__,
        expected="row-major contiguous elements", suggestion="pass a contiguous copy",
    )  # fmt: skip


def _read_interface(value: Any, memory: DeviceMemory, stream: int) -> DeviceArray:
    described = value.__cuda_array_interface__
    dtype = as_dtype(np.dtype(described["typestr"])).numpy
    shape, strides = tuple(described["shape"]), described.get("strides")
    if strides is not None and not _is_contiguous(shape, [s / dtype.itemsize for s in strides]):
        return _read_interface(_make_contiguous(value), memory, stream)
    made_on = described.get("stream")  # None: the elements are ready
    found = DeviceArray(described["data"][0] or 0, shape, dtype, value, memory, stream)
    if made_on is not None:
        found.stream = SYNTHETIC_STREAMS.get(made_on, made_on)
        memory.order(found, stream)
    return found


class _Pointer:
    """Memory that NumPy describes and never reads: what it makes of it is exported, and keeps the array alive."""

    def __init__(self, array: DeviceArray) -> None:
        self.array = array
        letter = array.dtype.str if array.dtype.isbuiltin == 1 else f"|u{array.dtype.itemsize}"
        self.__array_interface__ = {
            "shape": array.shape, "typestr": letter, "data": (array.address, False), "version": 3,
        }  # fmt: skip


def export_device_array(
    array: DeviceArray, dtype: DType, stream: Any = None, max_version: Any = None, copy: bool | None = None
) -> Any:
    """Make a DLPack capsule for another library, whose stream waits for the elements (-1: it does not wait)."""
    memory = array.memory
    target = SYNTHETIC_STREAMS.get(stream, stream)
    if copy:
        array = memory.clone(array, array.stream)
    if target != -1 and target != array.stream:
        memory.order(array, target)
    seen = np.asarray(_Pointer(array))
    capsule = seen.__dlpack__() if max_version is None else seen.__dlpack__(max_version=max_version)
    address, _ = find_capsule(capsule)
    found = _DLTensor.from_address(address)
    found.device_type, found.device_id = memory.dlpack_device
    found.code = DLPACK_CODES.get(dtype, found.code)
    return capsule


def describe_cuda_array(array: DeviceArray) -> dict[str, Any]:
    """The CUDA array interface of an array; types that NumPy has no letter for (bf16, fp8) go as their bits."""
    letter = array.dtype.str if array.dtype.isbuiltin == 1 else f"|u{array.dtype.itemsize}"
    return {
        "shape": array.shape, "typestr": letter, "data": (array.address if math.prod(array.shape) else 0, False),
        "version": 3, "strides": None, "stream": array.stream or 1,
    }  # fmt: skip
