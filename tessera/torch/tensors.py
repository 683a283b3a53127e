"""Tensors of PyTorch as Tessera's, and back: element types, and arrays on the same memory where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tessera.core.errors import ArgumentError, DTypeError, user_location
from tessera.core.types import (
    DType,
    bf16,
    bool_,
    f16,
    f32,
    f64,
    fp8_e4m3,
    fp8_e5m2,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)  # fmt: skip
from tessera.ir.tensor import Tensor

DTYPES: dict[torch.dtype, DType] = {
    torch.float64: f64, torch.float32: f32, torch.float16: f16, torch.bfloat16: bf16, torch.bool: bool_,
    torch.float8_e4m3fn: fp8_e4m3, torch.float8_e5m2: fp8_e5m2, torch.int8: int8, torch.int16: int16,
    torch.int32: int32, torch.int64: int64, torch.uint8: uint8, torch.uint16: uint16, torch.uint32: uint32,
    torch.uint64: uint64,
}  # fmt: skip
"""Tessera's element types, by those of PyTorch; complex and quantised types are missing."""

_BACK = {own: theirs for theirs, own in DTYPES.items()}
# Types that NumPy reads through the integers of their width.
_CARRIERS = {
    torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8,
}  # fmt: skip


def find_dtype(dtype: torch.dtype) -> DType:
    """Tessera's element type for one of PyTorch.

    Raises:
        DTypeError: there is none, as for complex numbers.
    """
    if dtype not in DTYPES:
        raise DTypeError(
            f"{dtype} has no element type here", expected=", ".join(str(d) for d in DTYPES), received=str(dtype),
            suggestion="compute with the real and imaginary parts" if dtype.is_complex else None,
        )  # fmt: skip
    return DTYPES[dtype]


def find_torch_dtype(dtype: DType) -> torch.dtype:
    """PyTorch's element type for one of Tessera.

    Raises:
        DTypeError: there is none, as for fp6.
    """
    if dtype not in _BACK:
        raise DTypeError(
            f"PyTorch has no tensors of {dtype}", expected=", ".join(map(str, _BACK)), received=str(dtype),
            suggestion="cast it first: x.to(ts.f32)",
        )  # fmt: skip
    return _BACK[dtype]


def from_torch(x: torch.Tensor) -> Tensor:
    """A tensor of PyTorch as one of Tessera; it shares memory if it is on the CPU and in row-major order.

    Raises:
        ArgumentError: it is no tensor, or one without memory (device "meta").
        DTypeError: its element type or layout has no counterpart: complex, quantised, sparse or nested.
    """
    if not isinstance(x, torch.Tensor) or x.is_meta:
        raise ArgumentError(
            "this is no tensor of PyTorch with values", location=user_location(), expected="a torch.Tensor",
            received="a tensor on the device meta" if isinstance(x, torch.Tensor) else type(x).__name__,
        )  # fmt: skip
    if x.layout is not torch.strided or x.is_nested:
        raise DTypeError(
            "a nested tensor" if x.is_nested else "a sparse tensor", expected="a dense tensor",
            received=str(x.layout),
            suggestion="torch.nested.to_padded_tensor(x, 0)" if x.is_nested else "x.to_dense()",
        )  # fmt: skip
    dtype = find_dtype(x.dtype)
    plain = x.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if x.dtype in _CARRIERS:
        return Tensor(plain.view(_CARRIERS[x.dtype]).numpy().view(dtype.numpy))
    return Tensor(plain.numpy())


def to_torch(x: Any) -> torch.Tensor:
    """A tensor of Tessera as one of PyTorch on the CPU."""
    array, dtype = np.ascontiguousarray(x.numpy()), find_torch_dtype(x.dtype)
    array = array.reshape(x.shape)
    array = array if array.flags.writeable else array.copy()
    if dtype in _CARRIERS:
        return torch.from_numpy(array.view(np.int16 if dtype.itemsize == 2 else np.uint8)).view(dtype)
    return torch.from_numpy(array)
