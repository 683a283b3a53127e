"""Tensor methods: attaches operators and methods to Tensor from the op definitions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.types import BY_NAME
from tessera.ir.rules import ATTRIBUTE_ALIASES, REGISTRY, Op
from tessera.ir.tensor import TAPE_HOOK, Tensor, get_elements, move, wrap_array
from tessera.ops.api.numpy_protocol import PROTOCOLS
from tessera.ops.api.subscript import IndexUpdateHelper, subscript
from tessera.ops.tensor import (
    contractions,
    logic,
    matrices,
    nn,
    rearrange,
    reduce,
    scalar_functions,
    scatter,
    shape,
    sorting,
)
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import broadcast_to, cast
from tessera.ops.tensor.coercion import PYTHON_NUMBERS
from tessera.ops.tensor.contractions import matmul

OPERATORS: dict[str, Callable[..., Any]] = {
    "add": e.add,
    "sub": e.sub,
    "mul": e.mul,
    "truediv": e.div,
    "floordiv": e.floor_divide,
    "mod": e.remainder,
    "pow": e.pow,
    "matmul": matmul,
    "and": e.bitwise_and,
    "or": e.bitwise_or,
    "xor": e.bitwise_xor,
    "lshift": e.shift_left,
    "rshift": e.shift_right,
}
COMPARISON_OPERATORS = {
    "lt": e.less, "le": e.less_equal, "gt": e.greater, "ge": e.greater_equal, "eq": e.equal, "ne": e.not_equal,
}  # fmt: skip
ARRAY_LIKE = (Tensor, list, tuple, np.ndarray, np.generic)
UNARY_OPERATORS = {"neg": e.neg, "abs": e.abs, "invert": e.bitwise_not}
# The ops with `method=True` are methods too.
METHODS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        reduce.sum,
        reduce.mean,
        reduce.max,
        reduce.min,
        reduce.var,
        reduce.argmax,
        reduce.argmin,
        reduce.prod,
        reduce.any,
        reduce.all,
        reduce.std,
        reduce.logsumexp,
        reduce.norm,
        scalar_functions.clip,
        nn.softmax,
        nn.log_softmax,
        nn.relu,
        nn.gelu,
        nn.silu,
        scalar_functions.sigmoid,
        shape.transpose,
        shape.flatten,
        shape.squeeze,
        shape.gather,
        rearrange.flip,
        rearrange.roll,
        rearrange.repeat,
        rearrange.split,
        rearrange.unbind,
        matrices.moveaxis,
        rearrange.tril,
        rearrange.triu,
        matmul,
        sorting.sort,
        sorting.argsort,
        sorting.topk,
        reduce.cumsum,
        reduce.cumprod,
        rearrange.chunk,
        logic.isclose,
        logic.allclose,
        logic.count_nonzero,
        logic.logical_not,
        matrices.diagonal,
        matrices.trace,
        matrices.swapaxes,
        sorting.take,
        sorting.masked_fill,
        sorting.index_add,
        sorting.nonzero,
        scatter.scatter,
        scatter.scatter_add,
    )
}
METHODS |= {o.__name__: o for o in REGISTRY.values() if o.method}
METHODS |= {
    "unsqueeze": shape.expand_dims,
    "tile": rearrange.tiled,
    "dot": contractions.vecdot,
    "clamp": scalar_functions.clip,
    "eq": e.equal,
    "ne": e.not_equal,
    "lt": e.less,
    "le": e.less_equal,
    "gt": e.greater,
    "ge": e.greater_equal,
}


def _reflect_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(other, self)


def _make_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a method that accepts the other spellings of attributes (`dim`); ops do so themselves."""
    if isinstance(function, Op):
        return lambda self, *args, **named: function(self, *args, **named)
    known = inspect.signature(function).parameters
    other = {k: v for k, v in ATTRIBUTE_ALIASES.items() if v in known and k not in known}

    def method(self: Tensor, *args: Any, **named: Any) -> Any:
        return function(self, *args, **{other.get(k, k): v for k, v in named.items()})

    return method


def _make_equality(function: Callable[..., Any]) -> Callable[..., Any]:
    """`==` and `!=`; a tensor is not equal to None, text and other objects, by Python's default."""

    def method(self: Tensor, other: Any) -> Any:
        if other.__class__ in PYTHON_NUMBERS or isinstance(other, ARRAY_LIKE) or hasattr(other, "__array__"):
            return function(self, other)
        return NotImplemented

    return method


def _reshape(self: Tensor, *sizes: Any) -> Tensor:
    """The same elements with another shape, given as one tuple or as sizes."""
    return shape.reshape(self, shape=sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)


def _permute(self: Tensor, *dims: Any) -> Tensor:
    """The axes in another order, given as one tuple or as axes."""
    return shape.permute(self, axes=dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims)


def _to(self: Tensor, target: Any = None, dtype: Any = None, device: str | None = None) -> Tensor:
    """The tensor with another element type, on another device, or both; `x.to(ts.f16)`, `x.to("cuda:0")`.

    The elements are copied where they lie in another memory; `x.to(y.device)` brings two tensors together.

    Raises:
        DeviceUnavailable: the device is not available.
    """
    if isinstance(target, str) and target not in BY_NAME:
        target, device = None, target
    wanted = dtype if target is None else target
    out = self if wanted is None else cast(self, dtype=wanted)
    return out if device is None else move(out, device)


def _cpu(self: Tensor) -> Tensor:
    """The tensor in host memory: itself, or a copy of one on a device."""
    return move(self, "cpu")


def _cuda(self: Tensor, index: int = 0) -> Tensor:
    """The tensor on a GPU.

    Raises:
        DeviceUnavailable: there is none.
    """
    return _to(self, device=f"cuda:{index}")


def _to_device(self: Tensor, device: str, /, *, stream: Any = None) -> Tensor:
    """The tensor on another device, as the array API standard spells it."""
    return _to(self, device=device)


def _detach(self: Tensor) -> Tensor:
    """The same elements, without `requires_grad`."""
    return wrap_array(get_elements(self), self.type) if not self.is_traced else Tensor(self.data)


def _clone(self: Tensor) -> Tensor:
    """A copy of the elements; in a trace another tensor of the same value, since values are immutable."""
    if self.data.__class__ is DeviceArray:
        out = wrap_array(self.data.memory.clone(self.data, self.data.stream), self.type)
    else:
        out = Tensor(self.data) if self.is_traced else wrap_array(self.numpy().copy(), self.type)
    if self.requires_grad:  # gradients pass through a copy
        TAPE_HOOK[0](cast, [self], {"dtype": self.dtype}, [out])
    return out


def _divmod(self: Tensor, other: Any) -> tuple[Tensor, Tensor]:
    return e.floor_divide(self, other), e.remainder(self, other)


def _contiguous(self: Tensor) -> Tensor:
    """The tensor in row-major order; itself if it already is."""
    return self if self.is_traced or self.data.flags.c_contiguous else wrap_array(self.data.copy("C"), self.type)


def _expand(self: Tensor, *sizes: Any) -> Tensor:
    """The tensor broadcast to a shape, given as one tuple or as sizes; -1 keeps the size of an axis."""
    wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    kept = (1,) * (len(wanted) - self.ndim) + tuple(self.shape)
    return broadcast_to(self, shape=tuple(k if w == -1 else w for w, k in zip(wanted, kept, strict=False)))


# Methods of PyTorch's tensors, and what to write instead: for the error of a name that is not here.
_ELEMENT_TYPES = {
    "float": "f32", "double": "f64", "half": "f16", "bfloat16": "bf16", "int": "int32", "long": "int64",
    "short": "int16", "byte": "uint8", "char": "int8", "bool": "bool",
}  # fmt: skip
SPELLINGS = {
    **{name: f"x.to(ts.{own})" for name, own in _ELEMENT_TYPES.items()},
    "dim": "x.ndim",
    "element_size": "x.dtype.bits // 8",
    "is_cuda": "x.device",
    "mm": "x @ y",
    "new_zeros": "ts.zeros(shape, dtype=x.dtype)",
    "numel": "x.size",
    "register_hook": "ts.custom_vjp",
    "requires_grad_": "ts.tensor(data, requires_grad=True)",
    "t": "x.T",
}


def _missing_attribute(self: Tensor, name: str) -> Any:
    """Explain an attribute that tensors do not have."""
    plain = name.removesuffix("_")
    hint = SPELLINGS.get(name)
    if hint is None and plain != name and hasattr(Tensor, plain):
        hint = f"x = x.{plain}(...): tensors do not change in place"
    raise AttributeError(f"a tensor has no {name!r}" + (f"; write {hint}" if hint else ""), name=name, obj=self)


def attach_methods() -> None:
    """Give Tensor its operators and methods."""
    for name, function in OPERATORS.items():
        setattr(Tensor, f"__{name}__", _make_method(function))
        setattr(Tensor, f"__r{name}__", _reflect_operator(function))
    for name, function in (COMPARISON_OPERATORS | UNARY_OPERATORS).items():
        setattr(Tensor, f"__{name}__", (_make_equality if name in ("eq", "ne") else _make_method)(function))
    for name, function in METHODS.items():
        method = _make_method(function)
        method.__doc__ = function.__doc__
        setattr(Tensor, name, method)
    extra: dict[str, Any] = {
        "reshape": _reshape,
        "view": _reshape,
        "expand": _expand,
        "__getattr__": _missing_attribute,
        "permute": _permute,
        "to": _to,
        "astype": _to,
        "cpu": _cpu,
        "cuda": _cuda,
        "to_device": _to_device,
        "contiguous": _contiguous,
        "detach": _detach,
        "clone": _clone,
        "at": property(IndexUpdateHelper),
        "__pos__": _make_method(scalar_functions.positive),
        "__divmod__": _make_method(_divmod),
        "__getitem__": subscript,
        "T": property(shape.transpose),
        "mT": property(shape.transpose),
        **PROTOCOLS,
    }
    for name, method in extra.items():
        setattr(Tensor, name, method)
