"""Allocations: the host memory behind the pointers of a launch, and which of its bytes are initialised.

A pointer into a tensor reaches the whole storage of the tensor, as on a GPU. Storages whose address a program has asked
for (`data_ptr()`) are also found through integers: kernels that read pointers from memory reach them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.interp.target.ptx import DevicePointer


def view_memory(address: int, size: int) -> np.ndarray:
    """The bytes at an address of this process, which must stay allocated while the array is used."""
    if not size:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def find_extent(array: np.ndarray) -> tuple[int, int]:
    """The first address of an array's elements, and the bytes up to the end of its last; strides may be negative."""
    low = high = array.__array_interface__["data"][0]
    for n, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min((n - 1) * stride, 0), high + max((n - 1) * stride, 0)
    return low, high + array.itemsize - low if array.size else 0


@dataclass
class _Storage:
    """A storage of PyTorch: it is alive while `reference` is not expired."""

    reference: Any
    address: int
    size: int
    initialised: np.ndarray | None = None

    @property
    def alive(self) -> bool:
        return not self.reference.expired()


@dataclass
class Allocations:
    """Storages by address: those whose address the program knows, and those that are not wholly initialised."""

    shared: dict[int, _Storage] = field(default_factory=dict)
    partial: dict[int, _Storage] = field(default_factory=dict)

    def expose(self, tensor: Any) -> None:
        """The program asks for the address of a tensor."""
        self._register(self.shared, tensor)

    def mark_uninitialised(self, tensor: Any) -> None:
        """A tensor is new and has no values."""
        storage = self._register(self.partial, tensor)
        if storage is not None:
            storage.initialised = np.zeros(storage.size, bool)

    def mark_initialised(self, tensor: Any) -> None:
        """The program writes a tensor, or a part of it that is not known."""
        if self.partial:
            self.partial.pop(tensor.untyped_storage().data_ptr(), None)

    def _register(self, table: dict[int, _Storage], tensor: Any) -> _Storage | None:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size:
            return None
        table[address] = _Storage(StorageWeakRef(storage), address, size)
        return table[address]

    def make_tensor_pointer(self, tensor: Any, name: str) -> DevicePointer:
        """The pointer to a tensor."""
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        found = self.partial.get(start)
        if found is not None and not (found.alive and found.size == size):
            del self.partial[start]
            found = None
        offset = tensor.storage_offset() * tensor.element_size()
        return DevicePointer(view_memory(start, size), offset, name, found.initialised if found else None)

    def find_address(self, address: int, name: str) -> DevicePointer | None:
        """The pointer that an integer is, if a storage that the program knows has this address."""
        for storage in self._list_alive():
            if storage.address <= address < storage.address + storage.size:
                return self._make_pointer(storage, address - storage.address, name)
        return None

    def find_reachable(self, pointers: Iterable[DevicePointer]) -> list[DevicePointer]:
        """The storages whose addresses are among the words of 64 bits in the memory of the pointers."""
        alive = self._list_alive()
        if not alive:
            return []
        found = {}
        for p in pointers:
            words = np.unique(p.array[: p.array.size // 8 * 8].view(np.uint64))
            for s in alive:
                if np.any((words >= s.address) & (words < s.address + s.size)):
                    found[s.address] = self._make_pointer(s, 0, f"the tensor at {s.address:#x}")
        return list(found.values())

    def _list_alive(self) -> list[_Storage]:
        self.shared = {k: s for k, s in self.shared.items() if s.alive}
        return list(self.shared.values())

    def _make_pointer(self, storage: _Storage, offset: int, name: str) -> DevicePointer:
        known = self.partial.get(storage.address)
        initialised = known.initialised if known is not None and known.alive else None
        return DevicePointer(view_memory(storage.address, storage.size), offset, name, initialised)
