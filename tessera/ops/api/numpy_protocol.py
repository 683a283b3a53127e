"""NumPy protocols (NEP 13, NEP 18): np.exp(t), np.add(a, t), np.sum(t) run Tessera's ops; other functions receive
arrays."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, TraceError, user_location
from tessera.core.pytree import map_leaves
from tessera.ir.array_interchange import CUDA_DEVICE, describe_cuda_array, export_device_array, export_dlpack
from tessera.ir.tensor import Tensor
from tessera.ops.api import creation
from tessera.ops.tensor import contractions, decompositions, logic, matrices, rearrange, reduce, sorting
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor import reduce as r
from tessera.ops.tensor import scalar_functions as a
from tessera.ops.tensor import scalar_functions as f
from tessera.ops.tensor import shape as s
from tessera.ops.tensor.basic import broadcast_to
from tessera.ops.tensor.contractions import einsum, matmul
from tessera.ops.tensor.scalar_functions import nextafter

UFUNCS: dict[Any, Callable[..., Any]] = {
    np.add: e.add, np.subtract: e.sub, np.multiply: e.mul, np.divide: e.div, np.floor_divide: e.floor_divide,
    np.remainder: e.remainder, np.power: e.pow, np.matmul: matmul, np.negative: e.neg, np.absolute: e.abs,
    np.maximum: e.maximum, np.minimum: e.minimum, np.exp: e.exp, np.exp2: e.exp2, np.log: e.log, np.log2: e.log2,
    np.log10: f.log10, np.log1p: f.log1p, np.expm1: f.expm1, np.sqrt: e.sqrt, np.tanh: e.tanh, np.sin: e.sin,
    np.cos: e.cos, np.tan: f.tan, np.sinh: f.sinh, np.cosh: f.cosh, np.arctan2: f.atan2, np.floor: e.floor,
    np.ceil: e.ceil, np.rint: e.round, np.trunc: f.trunc, np.sign: f.sign, np.isnan: f.isnan, np.isinf: f.isinf,
    np.isfinite: f.isfinite, np.square: a.square, np.reciprocal: a.reciprocal, np.hypot: a.hypot,
    np.logaddexp: a.logaddexp, np.copysign: a.copysign, np.nextafter: nextafter,
    np.signbit: a.signbit, np.arcsinh: a.asinh, np.arccosh: a.acosh,
    np.arctanh: a.atanh, np.arcsin: f.asin, np.arccos: f.acos, np.arctan: f.atan, np.logical_and: logic.logical_and,
    np.logical_or: logic.logical_or, np.logical_xor: logic.logical_xor, np.logical_not: logic.logical_not,
    np.less: e.less, np.less_equal: e.less_equal, np.greater: e.greater,
    np.greater_equal: e.greater_equal, np.equal: e.equal, np.not_equal: e.not_equal, np.bitwise_and: e.bitwise_and,
    np.bitwise_or: e.bitwise_or, np.bitwise_xor: e.bitwise_xor, np.invert: e.bitwise_not,
    np.left_shift: e.shift_left, np.right_shift: e.shift_right,
}  # fmt: skip
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: r.sum,
    np.mean: r.mean,
    np.max: r.max,
    np.min: r.min,
    np.prod: reduce.prod,
    np.any: reduce.any,
    np.all: reduce.all,
    np.argmax: r.argmax,
    np.argmin: r.argmin,
    np.where: e.where,
    np.concatenate: s.concatenate,
    np.stack: s.stack,
    np.reshape: s.reshape,
    np.expand_dims: s.expand_dims,
    np.squeeze: s.squeeze,
    np.flip: rearrange.flip,
    np.roll: rearrange.roll,
    np.tile: rearrange.tiled,
    np.tril: rearrange.tril,
    np.triu: rearrange.triu,
    np.broadcast_to: lambda x, shape: broadcast_to(x, shape=shape),
    np.clip: f.clip,
    np.einsum: einsum,
    np.outer: contractions.outer,
    np.kron: contractions.kron,
    np.moveaxis: matrices.moveaxis,
    np.swapaxes: matrices.swapaxes,
    np.zeros_like: lambda x: creation.zeros_like(x),
    np.ones_like: lambda x: creation.ones_like(x),
    np.full_like: lambda x, value: creation.full_like(x, value),
    np.transpose: lambda x, axes=None: s.permute(x, axes=axes or range(x.ndim)[::-1]),
    np.var: lambda x, axis=None, *, keepdims=False: r.var(x, axis=axis, keepdims=keepdims),
    np.std: lambda x, axis=None, *, keepdims=False: reduce.std(x, axis=axis, keepdims=keepdims),
    np.sort: lambda x, axis=-1: sorting.sort(x, axis=axis),
    np.argsort: lambda x, axis=-1: sorting.argsort(x, axis=axis),
    np.cumsum: lambda x, axis=None: reduce.cumsum(*_flatten_for_axis(x, axis)),
    np.cumprod: lambda x, axis=None: reduce.cumprod(*_flatten_for_axis(x, axis)),
    np.linalg.inv: decompositions.inv,
    np.linalg.det: decompositions.det,
    np.linalg.solve: decompositions.solve,
    np.linalg.cholesky: decompositions.cholesky,
    np.linalg.eigh: decompositions.eigh,
}


def _flatten_for_axis(x: Tensor, axis: int | None) -> tuple[Tensor, int]:
    """A tensor and an axis; without an axis, the flattened tensor and axis 0."""
    return (s.reshape(x, shape=(-1,)), 0) if axis is None else (x, axis)


def array_ufunc(self: Tensor, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
    """A NumPy function of elements: the op of that name if there is one, else NumPy's own on the arrays."""
    known = UFUNCS.get(ufunc)
    if known is not None and method == "__call__" and not named:
        return known(*inputs)
    return getattr(ufunc, method)(*_to_arrays(inputs), **_to_arrays(named))


def array_function(self: Tensor, function: Any, types: Any, args: Any, named: Any) -> Any:
    """A NumPy function: the op of that name if there is one and it takes these arguments, else NumPy's own."""
    known = FUNCTIONS.get(function)
    if known is not None:
        try:
            return known(*args, **named)
        except (ArgumentError, TypeError):  # arguments that only NumPy has, such as `out`
            pass
    return function(*_to_arrays(args), **_to_arrays(named))


def _to_arrays(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.numpy() if isinstance(leaf, Tensor) else leaf, value)


def export_tensor(
    self: Tensor, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
) -> Any:
    """The elements for another library, without a copy where the memory may be written.

    Those on a device are ready on the consumer's `stream`, and stay there.
    """
    if self.data.__class__ is DeviceArray:
        if dl_device is not None and tuple(dl_device) != self.data.memory.dlpack_device:
            raise BufferError(f"the elements lie on {self.device}")
        return export_device_array(self.data, self.dtype, stream, max_version, copy)
    asked = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
    return export_dlpack(self.numpy(), self.dtype, **{k: v for k, v in asked.items() if v is not None})


def as_complex(self: Tensor) -> complex:
    """The only element as a complex number."""
    return complex(float(self))


def dlpack_device(self: Tensor) -> tuple[int, int]:
    """DLPack's name for the memory of the elements: type and number of the device."""
    return self.data.memory.dlpack_device if self.data.__class__ is DeviceArray else (1, 0)


def cuda_array_interface(self: Tensor) -> dict[str, Any]:
    """The CUDA array interface of elements on a GPU.

    Raises:
        AttributeError: they lie elsewhere.
    """
    if self.data.__class__ is not DeviceArray or self.data.memory.dlpack_device[0] != CUDA_DEVICE:
        raise AttributeError(f"a tensor on {self.device} has no __cuda_array_interface__")
    return describe_cuda_array(self.data)


def stats(self: Tensor) -> dict[str, Any]:
    """A summary of the elements: count, smallest, largest, mean and deviation of the finite ones, and what is not.

    >>> Tensor([1.0, 3.0, float("nan")]).stats()
    {'shape': (3,), 'dtype': 'f32', 'min': 1.0, 'max': 3.0, 'mean': 2.0, 'std': 1.0, 'zeros': 0, 'nan': 1, 'inf': 0}
    """
    wide = self.numpy().astype(np.float64)
    finite = wide[np.isfinite(wide)]
    found = {n: float(getattr(np, n)(finite)) if finite.size else None for n in ("min", "max", "mean", "std")}
    return {
        "shape": self.shape, "dtype": self.dtype.name, **found, "zeros": int((wide == 0).sum()),
        "nan": int(np.isnan(wide).sum()), "inf": int(np.isinf(wide).sum()),
    }  # fmt: skip


def layout(self: Tensor) -> str:
    """The memory layout of the elements: "row_major", "column_major" or "strided"; traced ones are row-major."""
    flags = None if self.is_traced or self.data.__class__ is DeviceArray else self.numpy().flags
    if flags is None or flags.c_contiguous:
        return "row_major"
    return "column_major" if flags.f_contiguous else "strided"


def nbytes(self: Tensor) -> Any:
    """The bytes that the elements take in memory."""
    return self.size * self.dtype.numpy.itemsize


def refuse_item_assignment(self: Tensor, *index: Any) -> Any:
    """Refuse `x[i] = v`: tensors do not change."""
    raise TraceError(
        "tensors do not change in place", location=user_location(), received=str(self.type),
        suggestion="take the changed tensor: y = x.at[index].set(value)",
    )  # fmt: skip


def array_namespace(self: Tensor, /, *, api_version: str | None = None) -> Any:
    """The module of functions with the names of the array API standard."""
    return import_module("tessera.array_api")


PROTOCOLS: dict[str, Any] = {
    "__array_ufunc__": array_ufunc,
    "__array_function__": array_function,
    "__array_namespace__": array_namespace,
    "__complex__": as_complex,
    "__dlpack__": export_tensor,
    "__dlpack_device__": dlpack_device,
    "__cuda_array_interface__": property(cuda_array_interface),
    "__setitem__": refuse_item_assignment,
    "stats": stats,
    "layout": property(layout),
    "nbytes": property(nbytes),
}
