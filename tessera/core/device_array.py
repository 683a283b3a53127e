"""Device arrays: memory of a device with a shape and an element type, and the contract of a device's memory."""

from __future__ import annotations

import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, Location, user_location

LEGACY_STREAM = 0  # CUDA's default stream
SYNTHETIC_STREAMS = {None: LEGACY_STREAM, 1: LEGACY_STREAM}  # DLPack's and the CUDA array interface's names for it


class DeviceArray:
    """Contiguous row-major elements in the memory of a device.

    `owner` keeps the memory alive; memory that was allocated here returns to the list `free` when nothing refers to the
    array, behind what the streams `others` do with it. What writes the elements is queued on `stream`: another stream
    waits for it first (`DeviceMemory.order`). There is no `__array__`: NumPy never copies the elements to the host
    unasked.
    """

    __slots__ = (
        "__weakref__", "address", "dtype", "free", "home", "memory", "others", "owner", "shape", "stream",
    )  # fmt: skip

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype, owner: Any, memory: DeviceMemory, stream: int,
        free: list[Any] | None = None,
    ) -> None:  # fmt: skip
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.owner = owner
        self.memory = memory
        self.stream = self.home = stream
        self.free = free
        self.others: set[int] | None = None

    def __del__(self) -> None:
        if self.free is not None:
            if self.others is not None:
                self.memory.settle(self)
            self.free.append(self.owner)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def numpy(self) -> np.ndarray:
        """The elements, copied to the host after all that writes them."""
        return self.memory.copy_out(self)

    def __repr__(self) -> str:
        return f"DeviceArray({self.shape}, {self.dtype}, {self.memory.name})"


class Donated:
    """What a tensor holds after its memory was given to a call: the function's name and the place of the call."""

    __slots__ = ("call", "place")
    state = "donated"

    def __init__(self, call: str, place: Location) -> None:
        self.call, self.place = call, place

    def error(self) -> ArgumentError:
        """The error of a use of the tensor."""
        return ArgumentError(
            f"this tensor was donated to the call of {self.call} at {self.place}", location=user_location(),
            expected="a tensor that is not used after it was donated",
            suggestion=f"use the result of {self.call}, or leave the argument out of donate=",
        )  # fmt: skip


def count_holders(items: list[Any], place: int) -> int:
    """What refers to an item besides its list.

    >>> items = [np.zeros(2)]
    >>> kept = items[0]
    >>> count_holders(items, 0)
    1
    """
    return sys.getrefcount(items[place]) - LEAST_REFERENCES


LEAST_REFERENCES = 0
LEAST_REFERENCES = count_holders([object()], 0)  # those of the list and of the call, in this version of Python


# Blocks of a collective that runs beside kernels: each occupies a multiprocessor, and kernels that fill the device
# leave so many free meanwhile.
COMMUNICATION_BLOCKS = int(os.environ.get("TESSERA_COMMUNICATION_BLOCKS", 4))


class DeviceMemory(ABC):
    """The memory of one device: its arrays, the copies to and from the host, and the streams that order its work.

    `name` is what `Tensor.device` says, `generator` the name of the generator whose programs run there,
    `dlpack_device` the device's type and number in DLPack. `copies_in` and `copies_out` count the copies between host
    and device.
    """

    name: str
    generator: str
    dlpack_device: tuple[int, int]
    copies_in = 0
    copies_out = 0
    # While a CUDA graph is recorded: arrays that it uses again each time, and that must live as long as it.
    recorded: list[DeviceArray] | None = None

    @cached_property
    def exchanging_graphs(self) -> WeakSet[Any]:
        """The CUDA graphs with collectives: communicators wait at their end until these are freed."""
        return WeakSet()

    @contextmanager
    def record(self) -> Iterator[list[DeviceArray]]:
        """A block in which a CUDA graph is recorded: the arrays that must live as long as it."""
        kept: list[DeviceArray] = []
        self.recorded = kept
        try:
            yield kept
        finally:
            self.recorded = None

    @abstractmethod
    def find_stream(self) -> int:
        """The stream on which the caller's other libraries queue their work."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> DeviceArray:
        """A new array that is used on a stream; what it holds means nothing.

        Raises:
            ResourceError: the memory is exhausted.
        """

    def prepare(self, shape: tuple[int, ...], dtype: np.dtype, stream: int) -> Callable[[], DeviceArray]:
        """What makes new arrays of one kind, as `empty` does."""
        return partial(self.empty, shape, dtype, stream)

    @abstractmethod
    def copy_in(self, array: np.ndarray, stream: int) -> DeviceArray:
        """A new array with the elements of an array of the host, which may change after the call."""

    @abstractmethod
    def copy_out(self, array: DeviceArray) -> np.ndarray:
        """The elements in a new array of the host."""

    def copy_out_after(self, array: DeviceArray, mark: Any, stream: int) -> np.ndarray:
        """The elements as they are at a mark of the array's stream, in a new array of the host.

        The copy is made by another stream: what is queued behind the mark goes on meanwhile.
        """
        self.wait(stream, mark)
        return self.copy_out(DeviceArray(array.address, array.shape, array.dtype, array, self, stream))

    @abstractmethod
    def clone(self, array: DeviceArray, stream: int) -> DeviceArray:
        """A copy within the device."""

    @abstractmethod
    def clear(self, array: DeviceArray, stream: int) -> None:
        """Set all bytes of an array to zero."""

    @abstractmethod
    def owns(self, array: DeviceArray) -> bool:
        """Whether an array has memory that was allocated here, and no other array has it."""

    @abstractmethod
    def settle(self, array: DeviceArray) -> None:
        """Make the stream that an array was allocated for wait for the other streams that used it."""

    @abstractmethod
    def keep_until_done(self, arrays: list[DeviceArray], stream: int) -> None:
        """Keep arrays of other libraries alive until what is queued on a stream has ended."""

    @abstractmethod
    def order(self, array: DeviceArray, stream: int) -> None:
        """Make a stream wait for what writes an array; the memory is reused after what the stream does from now on."""

    @abstractmethod
    def make_stream(self) -> int:
        """A new stream, which runs beside all others."""

    @abstractmethod
    def mark(self, stream: int) -> Any:
        """The end of what is queued on a stream by now, for `wait`."""

    @abstractmethod
    def wait(self, stream: int, mark: Any) -> None:
        """Make what a stream does from now on wait for a mark."""

    @abstractmethod
    def copy_rows(self, target: Rows, source: Rows, width: int, count: int, stream: int) -> None:
        """Copy `count` rows of `width` bytes between two places of this memory, or of mapped memory."""

    # Memory that processes of one host share: where a device has none, each of these refuses.

    def share(self, address: int) -> tuple[bytes, int]:
        """What lets another process of this host map the allocation that an address lies in, and the offset in it.

        Raises:
            DeviceUnavailable: this memory cannot be shared.
            ExecutionError: the driver refuses.
        """
        raise DeviceUnavailable(f"the memory of {self.name} is not shared with other processes")

    def map_shared(self, handle: bytes) -> int:
        """The address, in this process, of an allocation of another process.

        Raises:
            DeviceUnavailable, ExecutionError: as `share`.
        """
        raise DeviceUnavailable(f"{self.name} maps no memory of other processes")

    def unmap_shared(self, addresses: Sequence[int]) -> None:
        """Wait for all that is queued, and give up mapped allocations: their owners may free them afterwards."""
        raise DeviceUnavailable(f"{self.name} maps no memory of other processes")

    def write_word(self, address: int, value: int, stream: int) -> None:
        """Write 32 bits when all that is queued on a stream has been done, and is seen by other processes."""
        raise DeviceUnavailable(f"streams of {self.name} write no words")

    def wait_for_word(self, address: int, value: int, stream: int) -> None:
        """Make a stream wait until 32 bits have a value."""
        raise DeviceUnavailable(f"streams of {self.name} wait for no words")


class Rows(NamedTuple):
    """Rows of bytes in memory: the address of the first, and the bytes from one to the next."""

    address: int
    pitch: int
