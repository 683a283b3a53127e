"""Devices: names of devices, the generator that serves each, the default device, and the memory that an array spans."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import numpy as np

from tessera.core.errors import DeviceUnavailable, as_text, user_location
from tessera.core.hooks import list_generators

# Array memory: the addresses that the elements of a NumPy array occupy.


def _ask_address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def array_address(array: np.ndarray) -> int:
    """The address of the first element.

    It is the first field of an array, after the header of every object (PyArrayObject_fields of NumPy's C interface,
    the same in every release). To read it there is ten times as fast as `__array_interface__`.

    >>> pair = np.zeros(2, np.int32)
    >>> array_address(pair[1:]) - array_address(pair)
    4
    """
    return _read_word(id(array) + _HEADER_BYTES).value or 0


_read_word, _HEADER_BYTES = ctypes.c_void_p.from_address, object.__basicsize__


def _has_numpy_layout() -> bool:
    whole = np.arange(8.0)
    return all(array_address(a) == _ask_address(a) for a in (whole, whole[3:], whole[::-1]))


if sys.implementation.name != "cpython" or not _has_numpy_layout():
    array_address = _ask_address


def array_span(array: np.ndarray) -> tuple[int, int]:
    """The lowest address of an element, and the address past the highest."""
    steps = [s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)]
    base = array_address(array)
    return base + sum(s for s in steps if s < 0), base + sum(s for s in steps if s > 0) + array.itemsize


# Devices: names of devices, the generator that serves each, and the default device.


INTERP = "interp"
# The generator for each device name of the user; "interp" needs none.
GENERATORS_OF_THIS_PACKAGE = ("llvm", "ptx", "csl")  # as in setup.cfg
GENERATOR_BY_DEVICE = {"cpu": "llvm", "llvm": "llvm", "wse": "csl", INTERP: INTERP}
GENERATOR_BY_DLPACK = {2: "ptx"}  # by the device type of DLPack, of those with a memory of their own
# What a thread of this package calls before it ends; a module with something to release in each thread appends to it.
THREAD_ENDINGS: list[Callable[[], None]] = []
_default: ContextVar[str] = ContextVar("device", default=INTERP)


def default_device() -> str:
    """The default device: "interp", unless `set_default_device` has set another."""
    return _default.get()


def set_default_device(device: str) -> None:
    """Make `device` ("interp", "cpu", "cuda:0", "wse", or a generator's name) the default.

    Raises:
        DeviceUnavailable: nothing here serves it.
    """
    check_device(device)
    _default.set(find_generator_name(device))


@contextmanager
def device(name: str) -> Iterator[str]:
    """A context with another default device: `with ts.device("cpu"): y = f(x)`.

    >>> with device("cpu") as name:
    ...     default_device()
    'llvm'

    Raises:
        DeviceUnavailable: nothing here serves it.
    """
    check_device(name)
    token = _default.set(find_generator_name(name))
    try:
        yield name
    finally:
        _default.reset(token)


def find_generator_name(device: str) -> str:
    """The generator for a device.

    Raises:
        ArgumentError: it is no name. DeviceUnavailable: nothing installed serves it.
    """
    device = as_text(device, "the target")
    if device == "gpu" or device.startswith("gpu:"):  # another spelling
        device = f"cuda{device.removeprefix('gpu')}"
    if device in ("cuda", "cuda:0") and count_gpus():
        return "ptx"
    if device.startswith("cuda"):
        raise DeviceUnavailable(
            f"the device {device} is not available", location=user_location(),
            expected="one of " + ", ".join(_list_device_names()),
            suggestion='run on this machine\'s processor with "cpu", or in the interpreter with "interp"',
        )  # fmt: skip
    return GENERATOR_BY_DEVICE.get(device, device)


def _list_device_names() -> list[str]:
    """The names that a user may choose: the devices, and every installed generator."""
    return list(dict.fromkeys([*GENERATOR_BY_DEVICE, *list_generators()]))


def check_device(device: str) -> None:
    """Raise an error for a device that no generator serves.

    Raises:
        DeviceUnavailable: it is none, or not here.
    """
    name = find_generator_name(device)
    kind = name.partition(":")[0]
    # A search of the installed packages takes longer than to make a tensor.
    if name != INTERP and kind not in GENERATORS_OF_THIS_PACKAGE and kind not in list_generators():
        raise DeviceUnavailable(
            f"the device {device} is not available", location=user_location(),
            expected="one of " + ", ".join(_list_device_names()),
        )  # fmt: skip


def shares_host_memory(device: str) -> bool:
    """Whether programs on a device address the memory of the host. A GPU has memory of its own.

    Raises:
        DeviceUnavailable: nothing installed serves the device.
    """
    return find_generator_name(device) != "ptx" or not count_gpus()


@cache
def count_gpus() -> int:
    """The NVIDIA GPUs of this machine, as its driver counts them; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    answered = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if answered else 0
