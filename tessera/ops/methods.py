"""The operators and methods of Tensor, read from the op definitions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.device import check_device
from tessera.op import ALIASES, Op
from tessera.ops import (
    arithmetic,
    arrange,
    cumulative,
    functions,
    logic,
    matrices,
    nn,
    places,
    products,
    reduce,
    shape,
    sort,
    statistics,
    update,
)
from tessera.ops import elementwise as e
from tessera.ops.at import At
from tessera.ops.basic import broadcast_to, cast
from tessera.ops.coerce import NUMBERS
from tessera.ops.index import subscript
from tessera.ops.linalg import matmul
from tessera.ops.numpy_protocol import PROTOCOLS
from tessera.tensor import TAPE, Tensor, like
from tessera.types import BY_NAME

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
COMPARISONS = {
    "lt": e.less, "le": e.less_equal, "gt": e.greater, "ge": e.greater_equal, "eq": e.equal, "ne": e.not_equal,
}  # fmt: skip
DATA = (Tensor, list, tuple, np.ndarray, np.generic)
UNARY = {"neg": e.neg, "abs": e.abs, "invert": e.bitwise_not}
METHODS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        reduce.sum, reduce.mean, reduce.max, reduce.min, reduce.var, reduce.argmax, reduce.argmin,
        statistics.prod, statistics.any, statistics.all, statistics.std, statistics.logsumexp, statistics.norm,
        e.add, e.sub, e.mul, e.div, e.pow, e.exp, e.exp2, e.log, e.log2, e.sqrt, e.rsqrt, e.tanh, e.abs, e.neg, e.sin,
        e.cos, e.erf, e.floor, e.ceil, e.round, e.maximum, e.minimum, e.floor_divide, e.remainder,
        functions.tan, functions.sinh, functions.cosh, functions.log10, functions.log1p, functions.expm1,
        functions.sign, functions.trunc, functions.isnan, functions.isinf, functions.isfinite, functions.clip,
        nn.softmax, nn.log_softmax, nn.relu, nn.gelu, nn.silu, nn.sigmoid,
        shape.transpose, shape.flatten, shape.squeeze, shape.gather,
        arrange.flip, arrange.roll, arrange.repeat, arrange.split, arrange.unbind, matrices.moveaxis, arrange.tril,
        arrange.triu, matmul, sort.sort, sort.argsort, sort.topk, cumulative.cumsum, cumulative.cumprod,
        arrange.chunk, arithmetic.square, arithmetic.reciprocal, logic.isclose, logic.allclose, logic.count_nonzero,
        logic.logical_not, matrices.diagonal, matrices.trace, matrices.swapaxes, places.take, places.masked_fill,
        places.index_add, places.nonzero, update.scatter, update.scatter_add,
    )
}  # fmt: skip
METHODS |= {
    "unsqueeze": shape.expand_dims, "expand": broadcast_to, "tile": arrange.tiled, "dot": products.vecdot,
    "clamp": functions.clip,
    "eq": e.equal, "ne": e.not_equal, "lt": e.less, "le": e.less_equal, "gt": e.greater, "ge": e.greater_equal,
}  # fmt: skip


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(other, self)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a method; ops know the other spellings of attributes (`dim`) themselves."""
    if isinstance(function, Op):
        return lambda self, *args, **named: function(self, *args, **named)
    known = inspect.signature(function).parameters
    other = {k: v for k, v in ALIASES.items() if v in known and k not in known}

    def method(self: Tensor, *args: Any, **named: Any) -> Any:
        return function(self, *args, **{other.get(k, k): v for k, v in named.items()})

    return method


def _equality(function: Callable[..., Any]) -> Callable[..., Any]:
    """`==` and `!=`, which leave it to Python what a tensor is beside None, text and other objects: not equal."""

    def method(self: Tensor, other: Any) -> Any:
        if other.__class__ in NUMBERS or isinstance(other, DATA) or hasattr(other, "__array__"):
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
    """The tensor with another element type, on another device, or both; `x.to(ts.f16)`, `x.to("cpu")`.

    Raises:
        DeviceUnavailable: the device is not here.
    """
    if isinstance(target, str) and target not in BY_NAME:
        target, device = None, target
    if device is not None:
        check_device(device)
    wanted = dtype if target is None else target
    return self if wanted is None else cast(self, dtype=wanted)


def _cpu(self: Tensor) -> Tensor:
    """The tensor in host memory: itself."""
    return self


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
    """The same elements, with no gradient asked for."""
    return like(self.data, self.type) if not self.is_traced else Tensor(self.data)


def _clone(self: Tensor) -> Tensor:
    """A copy of the elements; a traced tensor is itself, since values do not change."""
    if self.is_traced:
        return self
    out = like(self.numpy().copy(), self.type)
    if self.requires_grad:  # gradients pass through a copy
        TAPE[0](cast, [self], {"dtype": self.dtype}, [out])
    return out


def _divmod(self: Tensor, other: Any) -> tuple[Tensor, Tensor]:
    return e.floor_divide(self, other), e.remainder(self, other)


def _contiguous(self: Tensor) -> Tensor:
    """The same elements in row-major order; itself where they lie so."""
    return self if self.is_traced or self.data.flags.c_contiguous else like(self.data.copy("C"), self.type)


def attach() -> None:
    """Give Tensor its operators and methods."""
    for name, function in OPERATORS.items():
        setattr(Tensor, f"__{name}__", _method(function))
        setattr(Tensor, f"__r{name}__", _swapped(function))
    for name, function in (COMPARISONS | UNARY).items():
        setattr(Tensor, f"__{name}__", (_equality if name in ("eq", "ne") else _method)(function))
    for name, function in METHODS.items():
        method = _method(function)
        method.__doc__ = function.__doc__
        setattr(Tensor, name, method)
    extra: dict[str, Any] = {
        "reshape": _reshape, "view": _reshape, "permute": _permute, "to": _to, "astype": _to, "cpu": _cpu,
        "cuda": _cuda, "to_device": _to_device, "contiguous": _contiguous, "detach": _detach, "clone": _clone,
        "at": property(At), "__pos__": _method(arithmetic.positive), "__divmod__": _method(_divmod),
        "__getitem__": subscript,
        "T": property(shape.transpose), "mT": property(shape.transpose), **PROTOCOLS,
    }  # fmt: skip
    for name, method in extra.items():
        setattr(Tensor, name, method)
