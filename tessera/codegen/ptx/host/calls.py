"""Calls of NVIDIA's driver that pycuda has none for, through ctypes; what they refuse is an error of ours."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from tessera.errors import DeviceUnavailable, ExecutionError, ResourceError

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2


@cache
def library() -> Any:
    """The driver's library.

    Raises:
        DeviceUnavailable: there is none.
    """
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DeviceUnavailable(
            f"NVIDIA's driver is not here: {error}", suggestion='run on the processor with "cpu"'
        ) from None


def call(name: str, *arguments: Any) -> None:
    """Make a call of the driver.

    Raises:
        DeviceUnavailable: the driver is missing, or has no such call.
        ResourceError: the GPU's memory is used up.
        ExecutionError: the driver refuses.
    """
    found = getattr(library(), name, None)
    if found is None:
        raise DeviceUnavailable(f"the driver has no {name}", expected="CUDA 12 or newer")
    status = found(*arguments)
    if status == OUT_OF_MEMORY:
        raise ResourceError(f"the GPU's memory is used up ({name})", suggestion="smaller inputs")
    if status:
        raise ExecutionError(f"the driver refuses {name}: {_named(status)}")


def _named(status: int) -> str:
    """What the driver calls an error."""
    text = ctypes.c_char_p()
    if getattr(library(), "cuGetErrorName", lambda *_: 1)(status, ctypes.byref(text)) or text.value is None:
        return f"error {status}"
    return text.value.decode()
