"""Array interchange: converts numbers, lists and arrays of other libraries, in host or device memory, to elements of
tensors; DLPack import and export, the CUDA array interface.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tessera.core.device import GENERATOR_BY_DLPACK
from tessera.core.device_array import LEGACY_STREAM, SYNTHETIC_STREAMS, DeviceArray, DeviceMemory
from tessera.core.errors import ArgumentError, DeviceUnavailable, DTypeError, ShapeError, user_location
from tessera.core.hooks import find_device_memory
from tessera.core.queued_failures import wait_and_examine
from tessera.core.shapes import size_to_number
from tessera.core.symbolic_dim import Dim
from tessera.core.types import DType, as_dtype, bf16, check_integer_fits, fp4, fp6, fp6_e2m3, fp8_e4m3, fp8_e5m2

# DLPack: memory shared with other libraries, for the element types that NumPy's exchange lacks too.
#
# NumPy exchanges integers, bools and the usual floats. The others (bfloat16, fp8, fp6, fp4) travel as unsigned integers
# of their width on NumPy's side of the capsule, and under their own code on the other.
# Format: DLPack 1.1, `dlpack.h`.


UNSIGNED_CODE = 1
DLPACK_CODES: dict[DType, int] = {bf16: 4, fp8_e4m3: 10, fp8_e5m2: 12, fp6_e2m3: 15, fp6: 16, fp4: 17}
DTYPE_BY_CODE = {(code, dtype.numpy.itemsize * 8): dtype for dtype, code in DLPACK_CODES.items()}
NUMPY_CODES = (0, 1, 2, 6)  # signed, unsigned, float, bool: NumPy knows them
# Where the tensor begins in a capsule's structure, by the capsule's name; its type comes 20 bytes later.
TENSOR_OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 32}

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _DLDataType(ctypes.Structure):
    """DLDataType: the kind of an element, its bits, and its lanes."""

    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]  # noqa: RUF012


class _CapsuleSource:
    """An object that hands a capsule to `numpy.from_dlpack`."""

    def __init__(self, capsule: Any, device: Any) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


def find_capsule(capsule: Any) -> tuple[int, bytes]:
    """The address of a capsule's tensor (DLTensor), and the capsule's name."""
    name = _capsule_name(capsule)
    return _capsule_pointer(capsule, name) + TENSOR_OFFSETS[name], name


def _capsule_type(capsule: Any) -> _DLDataType:
    return _DLDataType.from_address(find_capsule(capsule)[0] + 20)


def request_capsule(source: Any, **named: Any) -> Any:
    """A versioned capsule, which says whether its memory is writable, if the library supports it."""
    try:
        return source.__dlpack__(max_version=(1, 1), **named)
    except (TypeError, BufferError):
        return source.__dlpack__(**named)


def check_no_gradient(value: Any) -> None:
    """Refuse another library's tensor that records gradients.

    Raises:
        ArgumentError: it does.
    """
    if getattr(value, "requires_grad", False):
        raise ArgumentError(
            "this tensor requires gradients, which do not reach its library's tape", location=user_location(),
            expected="a tensor without requires_grad", received=type(value).__name__,
            suggestion="pass x.detach(); or compile the PyTorch function: torch.compile(f, backend=ts.torch.backend)",
        )  # fmt: skip


def import_dlpack(source: Any) -> np.ndarray:
    """View another library's tensor in host memory as an array, without a copy.

    Raises:
        DTypeError: its element type is none of ours.
        ArgumentError: it requires gradients.
    """
    if not hasattr(source, "__dlpack__"):
        raise DTypeError(
            "this has no DLPack", location=user_location(), received=type(source).__name__, expected="an array"
        )
    check_no_gradient(source)
    capsule = request_capsule(source)
    found = _capsule_type(capsule)
    if found.code in NUMPY_CODES:
        return np.from_dlpack(_CapsuleSource(capsule, source.__dlpack_device__()))
    dtype = DTYPE_BY_CODE.get((found.code, found.bits))
    if dtype is None:
        raise DTypeError(f"DLPack type {found.code} of {found.bits} bits is none of ours", location=user_location())
    found.code = UNSIGNED_CODE
    return np.from_dlpack(_CapsuleSource(capsule, source.__dlpack_device__())).view(dtype.numpy)


def export_dlpack(array: np.ndarray, dtype: DType, **named: Any) -> Any:
    """Make a capsule of these elements for another library, without a copy where the memory is writable."""
    if not array.flags.writeable and named.get("copy") is not False:
        array = array.copy()  # DLPack cannot say that memory must not be written
    if dtype not in DLPACK_CODES:
        return array.__dlpack__(**named)
    capsule = array.view(f"u{array.itemsize}").__dlpack__(**named)
    _capsule_type(capsule).code = DLPACK_CODES[dtype]
    return capsule


# Conversion of arrays of any library, lists and numbers to elements of a tensor.


NON_NUMERIC_KINDS = "OUSmMc"  # NumPy's kinds: objects, text, times, complex numbers


def _make_ragged_error(data: Any, error: ValueError) -> ShapeError:
    """The error for lists that are no tensor, or for tensors of different shapes where one is expected."""
    if not isinstance(data, (list, tuple)) or not any(hasattr(part, "shape") for part in data):
        return ShapeError(f"these lists are no tensor: {error}", location=user_location(),
                          received=type(data).__name__)  # fmt: skip
    shapes = ", ".join(str(part.shape) if hasattr(part, "shape") else type(part).__name__ for part in data)
    return ShapeError(
        f"a {type(data).__name__} of {len(data)} values is given in place of a tensor", location=user_location(),
        expected="one tensor", received=f"shapes {shapes}", suggestion="take the part that is meant, as in value[0]",
    )  # fmt: skip


def to_array(data: Any, narrow: bool) -> np.ndarray:
    """The elements of another library's tensor, a number, or lists of numbers; with `narrow`, Python floats as f32."""
    if isinstance(data, (Dim, TypeVar)):
        return np.asarray(size_to_number(data))
    if hasattr(data, "__dlpack__") and not isinstance(data, np.generic):
        return _share(data)
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise _make_ragged_error(data, error) from None
    if array.dtype.kind in NON_NUMERIC_KINDS:
        raise DTypeError(
            f"{_describe_type(data, array)} is not a tensor or a number", received=shorten_repr(data),
            expected="a number, nested lists of numbers, an array or a tensor",
        )  # fmt: skip
    return array.astype(np.float32) if narrow and array.dtype == np.float64 and not hasattr(data, "dtype") else array


def _share(source: Any) -> np.ndarray:
    """`import_dlpack`, with an error for what its library does not hand out, as sparse elements."""
    try:
        return import_dlpack(source)
    except (BufferError, ValueError) as error:
        raise ArgumentError(
            f"this tensor cannot be shared: {error}", location=user_location(), received=type(source).__name__,
            expected="dense elements in memory",
        ) from None  # fmt: skip


def _describe_type(data: Any, array: np.ndarray) -> str:
    """The type that was received: of the value, or of the first element of a list that is no number."""
    first = next((x for x in array.flat if not isinstance(x, (bool, int, float))), data) if array.size else data
    return type(first if isinstance(data, (list, tuple)) else data).__name__


def shorten_repr(value: Any) -> str:
    """What an error shows of a value: one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) < 60 else text[:57] + "..."


def apply_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """The same elements in the other order in memory.

    Raises:
        ArgumentError: there is no such layout.
    """
    if layout != "column_major":
        raise ArgumentError(
            f"there is no layout {layout!r}", location=user_location(), expected='"row_major" or "column_major"'
        )  # fmt: skip
    return np.asfortranarray(array)


def find_python_storage(dtype: DType) -> Any:
    """The NumPy type that holds such elements and that Python knows."""
    return np.float64 if dtype.is_float else np.int64


def check_integer_range(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Check that an integer type holds the numbers that a user wrote.

    Raises:
        DTypeError: it cannot hold one of them.
    """
    if dtype.is_integer and array.dtype.kind in "iu" and array.size:
        check_integer_fits(int(array.min()), dtype)
        check_integer_fits(int(array.max()), dtype)
    return array


# Device memory: arrays of PyTorch, CuPy, JAX and others in a device's memory, seen in place through DLPack or the CUDA
# array interface, and capsules of device arrays for them. Formats: DLPack 1.1, `dlpack.h`; CUDA array interface 3.


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
    check_no_gradient(value)
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
    """Make a DLPack capsule for another library, whose stream waits for the elements (-1: it does not wait).

    Raises:
        TesseraError: a launch before it failed; one that may still report a failure is waited for.
    """
    memory = array.memory
    wait_and_examine(array.stream)
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
    """The CUDA array interface of an array; types that NumPy has no letter for (bf16, fp8) go as their bits.

    Raises:
        TesseraError: a launch before it failed; one that may still report a failure is waited for.
    """
    wait_and_examine(array.stream)
    letter = array.dtype.str if array.dtype.isbuiltin == 1 else f"|u{array.dtype.itemsize}"
    return {
        "shape": array.shape, "typestr": letter, "data": (array.address if math.prod(array.shape) else 0, False),
        "version": 3, "strides": None, "stream": array.stream or 1,
    }  # fmt: skip
