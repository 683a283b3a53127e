"""Tensor: an array, or the name of a value in a program being traced; and `bind`, which joins ops to both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.errors import DTypeError, TesseraError, TraceError, here
from tessera.ir.builder import CURRENT
from tessera.ir.core import Value
from tessera.op import Op
from tessera.shapes import Size, as_size
from tessera.types import DType, Policy, TensorType, as_dtype, f32


class Tensor:
    """A multi-dimensional array with an element type and numeric policy.

    `Tensor(data)` holds an array and computes at once; while `@ts.jit` traces, a Tensor stands for
    a value to come. `Tensor["B", 384, ts.f32]` is the type of such tensors, for annotations.

    >>> x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> x.shape, x.dtype
    ((2, 2), ts.f32)
    """

    __slots__ = ("data", "type")
    __array_priority__ = 100
    __hash__ = object.__hash__

    def __init__(self, data: Any, dtype: DType | Policy | None = None) -> None:
        if isinstance(data, Value):
            assert isinstance(data.type, TensorType)
            self.data: Any = data
            self.type: TensorType = data.type
            return
        array = data.numpy() if isinstance(data, Tensor) else data
        if not isinstance(array, np.ndarray):
            array = np.asarray(array)
            if dtype is None and array.dtype == np.float64 and not isinstance(data, np.generic):
                array = array.astype(np.float32)  # Python floats are f32, as everywhere in the language
        element = as_dtype(array.dtype if dtype is None else dtype)
        self.data = array.astype(element.numpy, copy=False)
        self.type = TensorType(array.shape, element, dtype if isinstance(dtype, Policy) else None)

    def __class_getitem__(cls, items: Any) -> Any:
        """The type `Tensor[dim, ..., element]`; without an element type it is f32."""
        listed = list(items) if isinstance(items, tuple) else [items]
        element: Any = f32
        if listed and isinstance(listed[-1], (DType, Policy)):
            element = listed.pop()
        shape = tuple(as_size(f"?{i}" if d == "?" else d) for i, d in enumerate(listed))
        policy = element if isinstance(element, Policy) else None
        return TensorType(shape, as_dtype(element), policy)

    @property
    def shape(self) -> tuple[Size, ...]:
        """The size of each axis."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.type.rank

    @property
    def is_traced(self) -> bool:
        """Whether this stands for a value of a program being traced."""
        return isinstance(self.data, Value)

    def numpy(self) -> np.ndarray:
        """The elements as a NumPy array.

        Raises:
            TraceError: the tensor is being traced and has no elements yet.
        """
        if self.is_traced:
            raise TraceError(
                "the value of a traced tensor was asked for",
                location=here(),
                expected="a program whose Python control flow does not depend on tensor values",
                received=f"a traced tensor {self.type}",
                suggestion="use ts.where(condition, a, b), or pass the value as a static argument",
            )
        return self.data

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array.astype(dtype) if dtype is not None else array

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __index__(self) -> int:
        if not self.is_traced and self.dtype.is_integer and not self.shape:
            return int(self.data)
        return self.numpy().__index__()

    def item(self) -> Any:
        """The only element as a Python number."""
        return self.numpy().item()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return int(self.shape[0])  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    if TYPE_CHECKING:  # tessera/ops/methods.py attaches these

        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, index: Any) -> Tensor: ...
        def __neg__(self) -> Tensor: ...
        def __abs__(self) -> Tensor: ...
        def __invert__(self) -> Tensor: ...
        def __lt__(self, other: Any) -> Tensor: ...
        def __le__(self, other: Any) -> Tensor: ...
        def __gt__(self, other: Any) -> Tensor: ...
        def __ge__(self, other: Any) -> Tensor: ...
        def __add__(self, other: Any) -> Tensor: ...
        def __radd__(self, other: Any) -> Tensor: ...
        def __sub__(self, other: Any) -> Tensor: ...
        def __rsub__(self, other: Any) -> Tensor: ...
        def __mul__(self, other: Any) -> Tensor: ...
        def __rmul__(self, other: Any) -> Tensor: ...
        def __truediv__(self, other: Any) -> Tensor: ...
        def __rtruediv__(self, other: Any) -> Tensor: ...
        def __floordiv__(self, other: Any) -> Tensor: ...
        def __rfloordiv__(self, other: Any) -> Tensor: ...
        def __mod__(self, other: Any) -> Tensor: ...
        def __rmod__(self, other: Any) -> Tensor: ...
        def __pow__(self, other: Any) -> Tensor: ...
        def __rpow__(self, other: Any) -> Tensor: ...
        def __matmul__(self, other: Any) -> Tensor: ...
        def __rmatmul__(self, other: Any) -> Tensor: ...
        def __and__(self, other: Any) -> Tensor: ...
        def __rand__(self, other: Any) -> Tensor: ...
        def __or__(self, other: Any) -> Tensor: ...
        def __ror__(self, other: Any) -> Tensor: ...
        def __xor__(self, other: Any) -> Tensor: ...
        def __rxor__(self, other: Any) -> Tensor: ...
        def __lshift__(self, other: Any) -> Tensor: ...
        def __rlshift__(self, other: Any) -> Tensor: ...
        def __rshift__(self, other: Any) -> Tensor: ...
        def __rrshift__(self, other: Any) -> Tensor: ...

    def __repr__(self) -> str:
        if self.is_traced:
            return f"Tensor({self.type}, traced)"
        return f"Tensor({np.array2string(self.data, separator=', ', prefix='Tensor(')}, {self.dtype})"


def bind(op: Op, operands: Sequence[Tensor], attrs: Mapping[str, Any]) -> Any:
    """Record an op in the open trace, or run it where no operand is traced."""
    builder = CURRENT.get()
    types = tuple(t.type for t in operands)
    try:
        if op.canonical is not None:
            attrs = op.canonical(*types, **attrs)
        if builder is None:
            return _pack(_run(op, operands, types, attrs))
        values = [t.data if t.is_traced else builder.capture(t.data) for t in operands]
        node = builder.add(op, values, attrs)
    except TesseraError as error:
        raise error.at(here()) from None
    return _pack([Tensor(v) for v in node.results])


def _run(op: Op, operands: Sequence[Tensor], types: tuple, attrs: Mapping[str, Any]) -> list[Tensor]:
    arrays = [t.numpy() for t in operands]
    results = op.result_types(types, attrs)
    return [_typed(a, t) for a, t in zip(op.execute(types, results, attrs, arrays), results, strict=True)]


def _typed(array: Any, type: Any) -> Tensor:
    out = Tensor(np.asarray(array))
    out.type = type
    return out


def _pack(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def as_tensor(value: Any, like: TensorType | None = None) -> Tensor:
    """A value as a tensor; a Python number takes the element type of `like`.

    An int stays an integer beside an integer; a float beside an integer is f32.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)) and like is not None:
        return Tensor(np.asarray(value).astype(_number_type(value, like.dtype).numpy))
    try:
        return Tensor(value)
    except (TypeError, ValueError):
        raise DTypeError(f"{type(value).__name__} is not a tensor or a number", received=repr(value)) from None


def _number_type(value: bool | int | float, beside: DType) -> DType:
    fits = beside.is_float or (beside.is_integer and isinstance(value, int))  # a bool is an int here: 0 or 1
    return beside if fits else as_dtype(type(value))
