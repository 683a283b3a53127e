"""Memory shared with other libraries through DLPack, for the element types NumPy's own exchange lacks too.

NumPy exchanges integers, bools and the usual floats. The others (bfloat16, fp8, fp6, fp4) travel as unsigned integers
of their width on NumPy's side of the capsule, and under their own code on the other.
Format: DLPack 1.1, `dlpack.h`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tessera.errors import DTypeError, here
from tessera.types import DType, bf16, fp4, fp6, fp6_e2m3, fp8_e4m3, fp8_e5m2

UNSIGNED = 1
CODES: dict[DType, int] = {bf16: 4, fp8_e4m3: 10, fp8_e5m2: 12, fp6_e2m3: 15, fp6: 16, fp4: 17}
BY_CODE = {(code, dtype.numpy.itemsize * 8): dtype for dtype, code in CODES.items()}
BASIC = (0, 1, 2, 6)  # signed, unsigned, float, bool: NumPy knows them
# Where the tensor begins in a capsule's structure, by the capsule's name; its type comes 20 bytes later.
STARTS = {b"dltensor": 0, b"dltensor_versioned": 32}

_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Type(ctypes.Structure):
    """DLDataType: what kind of element, its bits, and how many lie in one place."""

    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]  # noqa: RUF012


class _Source:
    """A capsule in the hands of `numpy.from_dlpack`."""

    def __init__(self, capsule: Any, device: Any) -> None:
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


def _type_of(capsule: Any) -> _Type:
    name = _name(capsule)
    return _Type.from_address(_pointer(capsule, name) + STARTS[name] + 20)


def _asked(source: Any) -> Any:
    """A capsule that says whether its memory may be written, if the library makes such."""
    try:
        return source.__dlpack__(max_version=(1, 1))
    except (TypeError, BufferError):
        return source.__dlpack__()


def taken(source: Any) -> np.ndarray:
    """The array that another library's tensor in host memory is, without a copy.

    Raises:
        DTypeError: its element type is none of ours.
    """
    if not hasattr(source, "__dlpack__"):
        raise DTypeError("this has no DLPack", location=here(), received=type(source).__name__, expected="an array")
    capsule = _asked(source)
    found = _type_of(capsule)
    if found.code in BASIC:
        return np.from_dlpack(_Source(capsule, source.__dlpack_device__()))
    dtype = BY_CODE.get((found.code, found.bits))
    if dtype is None:
        raise DTypeError(f"DLPack type {found.code} of {found.bits} bits is none of ours", location=here())
    found.code = UNSIGNED
    return np.from_dlpack(_Source(capsule, source.__dlpack_device__())).view(dtype.numpy)


def given(array: np.ndarray, dtype: DType, **named: Any) -> Any:
    """A capsule of these elements for another library, without a copy where the memory may be written."""
    if not array.flags.writeable and named.get("copy") is not False:
        array = array.copy()  # DLPack cannot say that memory must not be written
    if dtype not in CODES:
        return array.__dlpack__(**named)
    capsule = array.view(f"u{array.itemsize}").__dlpack__(**named)
    _type_of(capsule).code = CODES[dtype]
    return capsule
