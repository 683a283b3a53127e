"""Op table: the decorator that fills the table of ATen ops, and the type promotion of ATen (`torch.result_type`).

A row is a function of Tessera values. Its parameters are those of the op's schema, in order, with the schema's
defaults; element types are Tessera's. What says where and how memory lies (device, layout, memory format, pinning) is
left out. This module and the rows do not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tessera.core.symbolic_dim import Dim
from tessera.core.types import DType, TensorType, bool_, f32, int16, int64
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast, dim_value, splat
from tessera.ops.tensor.coercion import is_narrow

Row = Callable[..., Any]
R = TypeVar("R", bound=Row)

ATEN: dict[str, Row] = {}
"""The table: the name of an op with its overload, as `aten.add.Tensor`, and its row."""


ATEN_FIRST: dict[str, Row] = {}
"""Rows of ops whose first result alone is used: they give `None` for the others."""


def aten(*names: str) -> Callable[[R], R]:
    """Decorate the row of these ops: `aten("add.Tensor")`."""

    def enter(row: R) -> R:
        for name in names:
            full = f"aten.{name}"
            if full in ATEN:
                raise ValueError(f"two rows for {full}")
            ATEN[full] = row
        return row

    return enter


def aten_first(*names: str) -> Callable[[R], R]:
    """Decorate the row of these ops where only their first result is used."""

    def enter(row: R) -> R:
        ATEN_FIRST.update({f"aten.{name}": row for name in names})
        return row

    return enter


# Type promotion.

_RANK = {"bool": 0, "uint": 1, "int": 1, "float": 2}
Number = bool | int | float


def join_dtypes(a: DType, b: DType) -> DType:
    """The element type that holds two others, as ATen has it: f16 with bf16 is f32, uint8 with int8 is int16.

    >>> join_dtypes(int64, f32)
    ts.f32
    """
    if a == b:
        return a
    low, high = sorted((a, b), key=lambda t: (_RANK[t.kind], t.bits, t.kind == "int"))
    if _RANK[low.kind] < _RANK[high.kind]:
        return high
    if high.kind == "float":
        return high if high.bits > low.bits else f32
    if low.kind == high.kind or high.kind == "int":
        return high if high.bits > low.bits else int16 if high.bits == 8 else int64
    return int64  # unsigned and wider than the signed one


def _join_all(dtypes: Sequence[DType]) -> DType | None:
    found: DType | None = None
    for each in dtypes:
        found = each if found is None else join_dtypes(found, each)
    return found


def _combine(first: DType | None, second: DType | None) -> DType | None:
    """The type of operands of which those of `first` decide, unless `second` is of a higher kind."""
    if first is None or second is None:
        return first or second
    return first if _RANK[first.kind] >= _RANK[second.kind] else join_dtypes(first, second)


def number_dtype(x: Number) -> DType:
    """The element type of a Python number: bool, int64 or f32."""
    return bool_ if isinstance(x, bool) else int64 if isinstance(x, (int, Dim)) else f32


def promote(*operands: Any) -> DType:
    """The element type that ATen computes operands in: tensors with axes decide, then scalars, then numbers.

    >>> promote(Tensor([1, 2]), 1.5), promote(Tensor([1.0]), 2)
    (ts.f32, ts.f32)
    """
    tensors = [x for x in operands if isinstance(x, Tensor)]
    numbers = _join_all([number_dtype(x) for x in operands if not isinstance(x, Tensor)])
    scalars = _join_all([t.dtype for t in tensors if not t.ndim])
    found = _combine(_join_all([t.dtype for t in tensors if t.ndim]), _combine(scalars, numbers))
    assert found is not None
    return found


def convert(x: Any, dtype: DType) -> Any:
    """A tensor in this element type; a number as a Python number of its kind."""
    if isinstance(x, Tensor):
        return x if x.dtype == dtype else cast(x, dtype=dtype)
    if isinstance(x, Dim):  # a symbolic size
        return cast(dim_value(size=x), dtype=dtype)
    return bool(x) if dtype.kind == "bool" else float(x) if dtype.is_float else int(x)


def unify(*operands: Any) -> list[Any]:
    """Operands in the element type that they promote to."""
    dtype = promote(*operands)
    return [convert(x, dtype) for x in operands]


def unify_floating(*operands: Any) -> list[Any]:
    """As `unify`; integers and bools become f32."""
    dtype = promote(*operands)
    return [convert(x, dtype if dtype.is_float else f32) for x in operands]


def floating(x: Tensor) -> Tensor:
    """A tensor of floats: integers and bools become f32."""
    return x if x.dtype.is_float else cast(x, dtype=f32)


def round_once(function: Callable[..., Any], operands: Sequence[Any]) -> Any:
    """A function of unified operands, computed in f32 and rounded once where a number meets 16-bit floats."""
    tensors = [x for x in operands if isinstance(x, Tensor)]
    narrow = tensors and len(tensors) < len(operands) and is_narrow(tensors[0].type)
    if not narrow:
        return function(*operands)
    dtype = tensors[0].dtype
    out = function(*(convert(x, f32) for x in operands))
    return cast(out, dtype=dtype) if out.dtype == f32 else out


def wide(x: Tensor) -> Tensor:
    """A float tensor in the type that ATen accumulates in: f32 for 16 bits."""
    return cast(x, dtype=x.type.compute) if is_narrow(x.type) else x


def narrow_to(x: Tensor, dtype: DType) -> Tensor:
    """A result rounded to an element type."""
    return x if x.dtype == dtype else cast(x, dtype=dtype)


def zeros(shape: Sequence[Any], dtype: DType) -> Tensor:
    """A tensor of zeros."""
    return splat(0, TensorType(tuple(shape), dtype))
