"""Lazy tensors: a tensor whose elements are computed when they are needed (PyFlame API reference, "Tensor Class")."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, TesseraError, user_location
from tessera.ir.array_interchange import check_integer_range
from tessera.ir.tensor import Tensor as CoreTensor
from tessera.ops.tensor.shape import expand_dims
from tessera.pyflame import dtypes
from tessera.pyflame.dtypes import DType
from tessera.pyflame.layouts import MeshLayout
from tessera.pyflame.lazy_graph import Expression, evaluate, record_call

Dims = int | Sequence[int] | None


class Tensor:
    """A tensor of a lazy graph.

    Calls on it are recorded. Its elements are computed by `eval()`, and by what needs them: `numpy()`, `item()`,
    printing an element, `backward`. `pf.tensor`, `pf.randn` and the other creation functions make one.
    """

    __slots__ = ("__weakref__", "_expression", "_wants_gradient", "grad")
    __array_priority__ = 200
    __hash__ = object.__hash__

    def __init__(self, expression: Expression, requires_grad: bool = False) -> None:
        if not isinstance(expression, Expression):
            raise ArgumentError(
                "Tensor is not made by its class", location=user_location(), received=type(expression).__name__,
                expected="data through pf.tensor, or a shape through pf.zeros", suggestion="pf.tensor(data)",
            )  # fmt: skip
        self._expression = expression
        self._wants_gradient = False
        self.grad: Tensor | None = None
        if expression.owner() is None:
            expression.own(self)
        if requires_grad:
            self.requires_grad_()

    # What is known without evaluation.

    @property
    def shape(self) -> list[int]:
        """The size of each axis."""
        return [int(n) for n in self._expression.type.shape]

    @property
    def dtype(self) -> DType:
        """The element type."""
        return dtypes.as_dtype(self._expression.type.dtype)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._expression.type.rank

    @property
    def numel(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def layout(self) -> MeshLayout:
        """The distribution over processing elements."""
        return self._expression.layout or MeshLayout.single_pe()

    @property
    def requires_grad(self) -> bool:
        """Whether `backward` computes a gradient of this, or through this for another tensor."""
        return self._wants_gradient or self._expression.needs_gradient

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, value: bool = True) -> Tensor:
        """Choose whether `backward` computes a gradient of this tensor.

        Raises:
            DTypeError: the elements are not floats.
            ArgumentError: the tensor is computed from others.
        """
        if value and not self.dtype.is_float:
            raise DTypeError(
                "only float tensors have gradients", location=user_location(), received=str(self.dtype),
                expected="pf.float32, pf.float16 or pf.bfloat16",
            )  # fmt: skip
        if self._expression.record is not None:
            raise ArgumentError(
                "requires_grad of a tensor that is computed from others", location=user_location(),
                received=self._expression.label, suggestion="set it on the tensors that this is computed from",
            )  # fmt: skip
        self._wants_gradient = bool(value)
        self._expression.constant = self._expression.constant and not value
        return self

    # Evaluation.

    def eval(self) -> Tensor:
        """Compute the elements now; returns this tensor."""
        evaluate([self._expression])
        return self

    def is_evaluated(self) -> bool:
        """Whether the elements are computed."""
        return self._expression.is_evaluated

    def numpy(self) -> np.ndarray:
        """The elements as a NumPy array of their own, computed now if need be."""
        return np.array(elements_of(self).numpy())

    def item(self) -> Any:
        """The only element as a Python number.

        Raises:
            ShapeError: there is not exactly one element.
        """
        if self.numel != 1:
            raise ShapeError(
                "item() of a tensor that is not one element", location=user_location(), received=f"shape {self.shape}",
                suggestion="select an element, as in x[0], or call numpy()",
            )  # fmt: skip
        return elements_of(self).item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers."""
        return elements_of(self).tolist()

    def detach(self) -> Tensor:
        """The same elements as a constant, through which no gradient goes."""
        found = Expression(
            self._expression.type, "detach", make=lambda: elements_of(self), layout=self._expression.layout,
            elements=self._expression.elements, constant=True,
        )  # fmt: skip
        return Tensor(found)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return builtins.bool(self.item())

    def __index__(self) -> int:
        if self.ndim or self.dtype.is_float:
            raise TypeError("only a scalar tensor of integers is an index")
        return int(self.item())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form else str(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ArgumentError(
            "tensors do not change in place", location=user_location(), received="x[...] = value",
            suggestion="make another tensor, as in pf.where(mask, value, x) or pf.cat([...])",
        )  # fmt: skip

    def __reduce__(self) -> Any:
        return _rebuild_tensor, (elements_of(self), self._expression.layout, self._wants_gradient)

    def __repr__(self) -> str:
        head = f"shape={self.shape}, dtype={self.dtype.name}"
        head += f", layout={self.layout!r}" if self._expression.layout else ""
        if self._expression.elements is None:
            return f"Tensor({self._expression.label}, {head}, lazy)"
        text = np.array2string(self._expression.elements.numpy(), separator=", ", prefix="Tensor(", threshold=100)
        return f"Tensor({text}, {head})"

    # Reductions and shapes.

    def sum(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The sum along axes."""
        return record("sum", lambda x: x.sum(axis=dim, keepdims=keepdim), self)

    def mean(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The mean along axes."""
        return record("mean", lambda x: x.mean(axis=dim, keepdims=keepdim), self)

    def max(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The maximum along axes; equal maxima share the gradient, as in `torch.amax`."""
        return record("max", lambda x: x.max(axis=dim, keepdims=keepdim), self)

    def min(self, dim: Dims = None, keepdim: bool = False) -> Tensor:
        """The minimum along axes; equal minima share the gradient, as in `torch.amin`."""
        return record("min", lambda x: x.min(axis=dim, keepdims=keepdim), self)

    def reshape(self, *new_shape: Any) -> Tensor:
        """The elements in another shape; one size may be -1."""
        shape = new_shape[0] if len(new_shape) == 1 else new_shape
        sizes = tuple(shape) if isinstance(shape, (list, tuple)) else (shape,)
        return record("reshape", lambda x: x.reshape(sizes), self)

    def transpose(self, dim0: int, dim1: int) -> Tensor:
        """Two axes swapped."""
        return record("transpose", lambda x: x.swapaxes(dim0, dim1), self)

    def squeeze(self, dim: Dims = None) -> Tensor:
        """Without axes of size 1: all, or those in `dim`; an axis of another size stays, as in PyTorch."""
        axes = self._axes_of_one(range(self.ndim) if dim is None else [dim] if isinstance(dim, int) else dim)
        return record("squeeze", lambda x: x.squeeze(axis=axes) if axes else x, self)

    def _axes_of_one(self, axes: Sequence[int]) -> tuple[int, ...]:
        for axis in axes:
            if isinstance(axis, bool) or not isinstance(axis, int) or not -self.ndim <= axis < max(self.ndim, 1):
                raise ShapeError(
                    f"there is no axis {axis!r}", location=user_location(), received=f"shape {self.shape}",
                    expected=f"an axis from {-self.ndim} to {self.ndim - 1}",
                )  # fmt: skip
        return tuple({a % self.ndim: None for a in axes if self.ndim and self.shape[a] == 1})

    def unsqueeze(self, dim: int) -> Tensor:
        """A new axis of size 1."""
        return record("unsqueeze", lambda x: expand_dims(x, dim), self)

    def to(self, dtype: Any) -> Tensor:
        """The elements in another type."""
        element = dtypes.as_dtype(dtype).value
        return record("to", lambda x: x.to(element), self)

    @property
    def T(self) -> Tensor:
        """The axes in reverse order."""
        return record("transpose", lambda x: x.permute(tuple(reversed(range(x.ndim)))), self)

    def __neg__(self) -> Tensor:
        return record("neg", lambda x: -x, self)  # type: ignore[no-any-return]

    def __abs__(self) -> Tensor:
        return record("abs", builtins.abs, self)  # type: ignore[no-any-return]

    def backward(self, grad_output: Any = None, retain_graph: bool = False) -> None:
        """`pf.autograd.backward` of this tensor."""
        BACKWARD_HOOK[0](self, grad_output, retain_graph)

    def __getitem__(self, index: Any) -> Tensor:
        tensors: list[Tensor] = []
        plan = _find_index_tensors(index, tensors)
        return record("getitem", lambda x, *found: x[_fill_index(plan, found)], self, *tensors)


# Set by tessera/pyflame/autograd.py, which is made of this module's tensors.
BACKWARD_HOOK: list[Callable[..., None]] = []


def _find_index_tensors(index: Any, tensors: list[Tensor]) -> Any:
    """A subscript with the positions of its tensors in place of them; the tensors are appended to a list."""
    if isinstance(index, tuple):
        return tuple(_find_index_tensors(i, tensors) for i in index)
    if not isinstance(index, Tensor):
        return index
    if index.dtype is DType.bool_:  # the size of the result depends on the elements
        return index.numpy()
    tensors.append(index)
    return _Slot(len(tensors) - 1)


class _Slot(int):
    """The position of a tensor in a subscript."""


def _fill_index(plan: Any, found: Sequence[CoreTensor]) -> Any:
    if isinstance(plan, tuple):
        return tuple(_fill_index(p, found) for p in plan)
    return found[plan] if isinstance(plan, _Slot) else plan


def _rebuild_tensor(elements: CoreTensor, layout: MeshLayout | None, requires_grad: bool) -> Tensor:
    """A leaf from a pickle, or as a copy."""
    return Tensor(Expression(elements.type, "tensor", elements=elements, layout=layout), requires_grad)


def elements_of(x: Tensor) -> CoreTensor:
    """The elements of a tensor as one of Tessera's, computed now if need be."""
    evaluate([x._expression])
    found = x._expression.elements
    assert found is not None
    return found


def expression_of(x: Any, what: str = "operand") -> Expression:
    """The expression of a tensor; an array of NumPy or Tessera becomes a leaf.

    Raises:
        DTypeError: it is something else.
    """
    if isinstance(x, Tensor):
        return x._expression
    if isinstance(x, (np.ndarray, np.generic, CoreTensor)):
        return Expression((found := import_elements(x)).type, "tensor", elements=found)
    raise DTypeError(
        f"the {what} is not a tensor", location=user_location(), expected="a tensor of PyFlame",
        received=f"{type(x).__name__} {x!r}"[:80], suggestion="pf.tensor(data)",
    )  # fmt: skip


def import_elements(data: Any, dtype: Any = None) -> CoreTensor:
    """Data as elements of a type that PyFlame has, in memory of their own.

    Without `dtype`, float64 becomes float32 and lists of numbers become float32; other arrays keep their type.

    Raises:
        DTypeError: there is no such element type, or an integer does not fit the type.
        ShapeError: nested lists have different lengths.
    """
    if isinstance(data, CoreTensor):
        data = data.numpy()
    array = data if isinstance(data, (np.ndarray, np.generic)) else None
    if array is None:
        try:
            array = np.array(data)
        except (ValueError, OverflowError) as error:
            raise ShapeError(
                f"the data are not an array: {error}",
                location=user_location(),
                expected="nested lists of equal lengths",
            ) from None
        dtype = _choose_number_type(array) if dtype is None else dtype
    dtype = DType.float32 if dtype is None and array.dtype == np.float64 else dtype
    element = dtypes.as_dtype(array.dtype if dtype is None else dtype).value
    try:
        return CoreTensor(np.array(check_integer_range(np.asarray(array), element)), dtype=element)
    except TesseraError as error:
        raise error.at(user_location()) from None


def _choose_number_type(array: np.ndarray) -> DType:
    if array.dtype.kind in "iuf":
        return DType.float32
    return dtypes.as_dtype(array.dtype)


def record(name: str, function: Callable[..., Any], *operands: Any, layout: MeshLayout | None = None) -> Any:
    """Record a call on tensors; its results in their container. A result that is an operand is that operand."""
    inputs = [expression_of(x) for x in operands]
    found, tree = record_call(name, function, inputs, layout)
    known = {id(x._expression): x for x in operands if isinstance(x, Tensor)}
    return tree.build(iter([known[id(e)] if id(e) in known else Tensor(e) for e in found]))


def _binary(name: str, function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The methods of an operator: with the tensor on the left, and on the right."""

    def forward(self: Tensor, other: Any) -> Any:
        if isinstance(other, (Tensor, np.ndarray, np.generic, CoreTensor)):
            return record(name, function, self, other)
        return record(name, lambda x: function(x, other), self) if _is_number(other) else NotImplemented

    def backward(self: Tensor, other: Any) -> Any:
        if isinstance(other, (np.ndarray, np.generic, CoreTensor)):
            return record(name, function, other, self)
        return record(name, lambda x: function(other, x), self) if _is_number(other) else NotImplemented

    return forward, backward


def _is_number(value: Any) -> bool:
    return isinstance(value, (builtins.bool, int, float))


_OPERATORS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("add", lambda x, y: x + y),
    "sub": ("sub", lambda x, y: x - y),
    "mul": ("mul", lambda x, y: x * y),
    "truediv": ("div", lambda x, y: x / y),
    "floordiv": ("floor_divide", lambda x, y: x // y),
    "mod": ("remainder", lambda x, y: x % y),
    "pow": ("pow", lambda x, y: x**y),
    "matmul": ("matmul", lambda x, y: x @ y),
}
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y, "eq": lambda x, y: x == y, "ne": lambda x, y: x != y,
}  # fmt: skip
for _method, (_name, _function) in _OPERATORS.items():
    _left, _right = _binary(_name, _function)
    setattr(Tensor, f"__{_method}__", _left)
    setattr(Tensor, f"__r{_method}__", _right)
for _method, _function in _COMPARISONS.items():
    setattr(Tensor, f"__{_method}__", _binary(_method, _function)[0])
