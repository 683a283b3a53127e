"""The operators and methods of Tensor, read from the op definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.ops import elementwise as e
from tessera.ops import nn, reduce, shape
from tessera.ops.basic import cast
from tessera.ops.index import subscript
from tessera.ops.linalg import matmul
from tessera.tensor import Tensor

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
UNARY = {"neg": e.neg, "abs": e.abs, "invert": e.bitwise_not}
METHODS: dict[str, Callable[..., Any]] = {
    "sum": reduce.sum,
    "mean": reduce.mean,
    "max": reduce.max,
    "min": reduce.min,
    "var": reduce.var,
    "argmax": reduce.argmax,
    "argmin": reduce.argmin,
    "exp": e.exp,
    "log": e.log,
    "sqrt": e.sqrt,
    "tanh": e.tanh,
    "abs": e.abs,
    "softmax": nn.softmax,
    "transpose": shape.transpose,
    "flatten": shape.flatten,
    "squeeze": shape.squeeze,
    "unsqueeze": shape.expand_dims,
}


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(other, self)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **named: function(self, *args, **named)


def _reshape(self: Tensor, *sizes: Any) -> Tensor:
    """The same elements with another shape, given as one tuple or as sizes."""
    return shape.reshape(self, shape=sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)


def _permute(self: Tensor, *dims: Any) -> Tensor:
    """The axes in another order, given as one tuple or as axes."""
    return shape.permute(self, axes=dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims)


def _to(self: Tensor, dtype: Any) -> Tensor:
    """The elements converted to `dtype`."""
    return cast(self, dtype=dtype)


def attach() -> None:
    """Give Tensor its operators and methods."""
    for name, function in OPERATORS.items():
        setattr(Tensor, f"__{name}__", _method(function))
        setattr(Tensor, f"__r{name}__", _swapped(function))
    for name, function in (COMPARISONS | UNARY).items():
        setattr(Tensor, f"__{name}__", _method(function))
    for name, function in METHODS.items():
        method = _method(function)
        method.__doc__ = function.__doc__
        setattr(Tensor, name, method)
    extra: dict[str, Any] = {"reshape": _reshape, "view": _reshape, "permute": _permute, "to": _to, "astype": _to}
    for name, method in extra.items():
        setattr(Tensor, name, method)
    setattr(Tensor, "__getitem__", subscript)  # noqa: B010
    setattr(Tensor, "T", property(shape.transpose))  # noqa: B010
