"""Arguments of a Triton launch: the values that the compiled kernel's parameters get, by Triton's signature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tessera.core.errors import ArgumentError, UnsupportedOpError
from tessera.cuda.allocations import Allocations, find_extent, view_memory
from tessera.cuda.torch_device import is_tensor
from tessera.interp.target.ptx import DevicePointer, TensorMap

_SCALARS = {
    f"{sign}{bits}": f"{kind}{bits // 8}" for sign, kind in (("i", "i"), ("u", "u")) for bits in (8, 16, 32, 64)
}
_SCALARS |= {"i1": "u1", "u1": "u1", "fp16": "f2", "fp32": "f4", "f32": "f4", "fp64": "f8", "f64": "f8"}
_BF16 = np.dtype(ml_dtypes.bfloat16)
# The element types of a descriptor, by the numbers that Triton's compiler records.
_DESCRIPTOR_TYPES = ("u1", "u2", "u4", "i4", "u8", "i8", "f2", "f4", "f4", "f8", _BF16, "f4", "f4")
_SWIZZLES = (0, 32, 64, 128)


class NumpyArgument:
    """A NumPy array as Triton's launcher wants it: with `data_ptr`."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.array.__array_interface__["data"][0]

    def stride(self, axis: int | None = None) -> Any:
        """The strides in elements, as in PyTorch."""
        steps = tuple(s // self.array.itemsize for s in self.array.strides)
        return steps if axis is None else steps[axis]

    def element_size(self) -> int:
        """The bytes of an element."""
        return self.array.itemsize


@dataclass
class ArgumentEncoder:
    """Encodes the arguments of a launch; `descriptors` is the compiler's metadata of tensor descriptors, in order.

    `described` are the tensors that the kernel reaches through descriptors.
    """

    allocations: Allocations
    descriptors: Sequence[Mapping[str, Any]] = ()
    names: Sequence[str] = ()
    described: list[DevicePointer] = field(default_factory=list)
    _used: int = field(default=0, init=False)

    def encode(self, signature: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """The arguments of the entry, without those of `constexpr` parameters."""
        self._used = 0
        names = [*self.names, *("?" * (len(signature) - len(self.names)))]
        return [a for t, v, n in zip(signature, values, names, strict=True) for a in self._encode_one(t, v, n)]

    def _encode_one(self, type: Any, value: Any, name: str) -> Iterator[Any]:
        if isinstance(type, tuple):
            for i, (t, v) in enumerate(zip(type, value, strict=True)):
                yield from self._encode_one(t, v, f"{name}[{i}]")
        elif type.startswith("tensordesc"):
            yield from self._encode_descriptor(value, name)
        elif type[0] == "*" or type == "nvTmaDesc":
            yield self.make_pointer(value, name)
        elif type != "constexpr":
            yield _encode_scalar(type, value, name)

    def make_pointer(self, value: Any, name: str) -> Any:
        """A pointer argument: a tensor, a NumPy array, an address, or what wraps one of them."""
        while not (is_tensor(value) or isinstance(value, NumpyArgument)) and hasattr(value, "base"):
            value = value.base
        if is_tensor(value):
            if value.device.type != "cpu":
                raise ArgumentError(f"{name} is on device {value.device}", expected="a tensor on the CPU")
            return self.allocations.make_tensor_pointer(value, _describe(name, value.dtype, value.shape))
        if isinstance(value, NumpyArgument):
            low, size = find_extent(value.array)
            memory = view_memory(low, size)
            memory.flags.writeable = memory.flags.writeable and value.array.flags.writeable
            return DevicePointer(memory, value.data_ptr() - low, _describe(name, value.dtype, value.shape))
        if value is None:
            return 0
        if hasattr(value, "data_ptr"):
            value = value.data_ptr()
        if not isinstance(value, int):
            raise ArgumentError(
                f"{name} is no pointer", expected="a tensor, a NumPy array or an address", received=repr(value)
            )
        return self.allocations.find_address(value, name) or value

    def _encode_descriptor(self, value: Any, name: str) -> Iterator[Any]:
        pointer, rank = self.make_pointer(value.base, name), len(value.shape)
        shape = [np.int32(n) for n in value.shape]
        strides = [np.int64(n) for n in value.strides]
        if not self.descriptors:
            yield pointer
            yield from (np.int64(n) for n in (*value.shape, *value.strides))
            yield from (bytes([value.padding == "nan"]), bytes([value.round_f32_to_tf32]))
        else:
            meta = self.descriptors[self._used]
            self._used += 1
            self.described.append(pointer)
            yield _make_tensor_map(value, meta, pointer, rank, name)
        yield from (*shape, *strides)


def _make_tensor_map(value: Any, meta: Mapping[str, Any], pointer: DevicePointer, rank: int, name: str) -> TensorMap:
    if meta.get("is_im2col") or value.round_f32_to_tf32:
        what = "of images (im2col)" if meta.get("is_im2col") else "that rounds to tf32"
        raise UnsupportedOpError(f"{name} is a tensor descriptor {what}, which the emulator does not have")
    dtype = np.dtype(_DESCRIPTOR_TYPES[meta["elem_type"]])
    shape = tuple(int(n) for n in value.shape)
    if meta["fp4_padded"]:
        raise UnsupportedOpError(f"{name} is a tensor descriptor of padded fp4, which the emulator does not have")
    rest = pointer.array[pointer.offset :]
    return TensorMap(
        rest[: rest.size // dtype.itemsize * dtype.itemsize].view(dtype),
        tuple(int(n) for n in meta["block_size"]),
        _SWIZZLES[meta["swizzle"]],
        value.padding == "nan",
        shape,
        tuple(int(s) * meta["elem_size"] for s in value.strides[: rank - 1]),
    )


def _encode_scalar(type: str, value: Any, name: str) -> bytes:
    if type not in _SCALARS and type != "bf16":
        raise ArgumentError(f"{name} has the type {type}", expected=f"one of {', '.join(_SCALARS)}")
    dtype = _BF16 if type == "bf16" else np.dtype(_SCALARS[type])
    if dtype.kind == "u" and isinstance(value, int) and value < 0:
        value %= 1 << 8 * dtype.itemsize
    return np.array(value, dtype).tobytes()


def _describe(name: str, dtype: Any, shape: Sequence[int]) -> str:
    return f"{name} ({str(dtype).rpartition('.')[2]}{[int(n) for n in shape]})"
