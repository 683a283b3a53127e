"""Tensor: an array, or a value of a program being traced; `bind_op` applies an op to either."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.core.device import check_device
from tessera.core.device_array import DeviceArray, Donated
from tessera.core.effects import ALL_EFFECTS, perform_effects
from tessera.core.errors import ArgumentError, DTypeError, ShapeError, TesseraError, TraceError, user_location
from tessera.core.hooks import find_device_memory, record_on_tape, run_device_op
from tessera.core.shapes import as_size
from tessera.core.symbolic_dim import Size
from tessera.core.types import DType, Policy, TensorType, as_dtype, f32, find_number_dtype, find_policy, share_type
from tessera.ir.array_interchange import (
    apply_layout,
    check_integer_range,
    find_python_storage,
    import_device_array,
    is_on_device,
    to_array,
)
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.core import Value
from tessera.ir.numerics.conversion import convert
from tessera.ir.rules import Op

# Operator stubs: the operators and methods of Tensor that tessera/ops/api/methods.py attaches, declared for type
# checkers.


class OperatorStubs:
    """The operators and methods that are attached to Tensor."""

    __slots__ = ()

    if TYPE_CHECKING:

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


# Tensor: an array, or a value of a program being traced; `bind_op` applies an op to either.


_KEEP_TENSOR = (
    "compute with the tensor itself, which takes part in arithmetic as a number does; a size or an index that Python "
    "needs is a static argument (static_argnames)"
)


class Tensor(OperatorStubs):
    """A multi-dimensional array with an element type and numeric policy.

    `Tensor(data)` holds an array and computes at once; while `@ts.jit` traces, a Tensor stands for
    a value to come. `Tensor["B", 384, ts.f32]` is the type of such tensors, for annotations.

    `data` is a number, nested lists, a tensor, or an array, which is not copied. A tuple of ints is a shape:
    `Tensor((3, 4))` has zeros in f32 (`Tensor([3, 4])` has the elements 3 and 4). `dtype` is by default that of an
    array, f32 for Python floats and int64 for Python ints. `device` is where the elements
    lie: a device with a memory of its own ("cuda:0"), or host memory. `layout` ("row_major", "column_major") is how
    they lie there.

    Raises:
        DTypeError: there is no such element type, or integers are to have gradients.
        DeviceUnavailable: nothing here serves `device`.

    >>> x = Tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> x.shape, x.dtype
    ((2, 2), ts.f32)
    >>> Tensor((1, 3))
    Tensor([[0., 0., 0.]], f32)
    """

    __slots__ = ("__weakref__", "data", "grad", "history", "requires_grad", "type")
    __array_priority__ = 100
    __hash__ = object.__hash__

    def __init__(
        self,
        data: Any,
        dtype: DType | Policy | None = None,
        device: str | None = None,
        requires_grad: bool = False,
        layout: str = "row_major",
    ) -> None:
        self.grad: Tensor | None = None
        self.requires_grad = requires_grad
        if isinstance(data, Value):
            assert isinstance(data.type, TensorType)
            self.data: Any = data
            self.type: TensorType = data.type
            return
        if device is not None:
            check_device(device)
        if (placed := _find_device_array(data)) is not None and dtype is None:
            self.data, self.type = placed, share_type(placed.shape, as_dtype(placed.dtype))
            self.type = data.type if isinstance(data, Tensor) else self.type
            self._place(device)
            return
        data = data if placed is None else placed.numpy()
        data = _fill_shape(data) if data.__class__ is tuple and _is_shape(data) else data
        array = data if isinstance(data, np.ndarray) else None
        if isinstance(data, Tensor):
            array, dtype = data.numpy(), (data.type.policy or data.dtype) if dtype is None else dtype
        try:
            if array is None:
                array = place_in_pool(to_array(data, narrow=dtype is None))
            element = as_dtype(array.dtype if dtype is None else dtype)
        except TesseraError as error:
            raise error.at(user_location()) from None
        if requires_grad and not element.is_float:
            raise DTypeError(
                "only float tensors have gradients",
                location=user_location(),
                received=str(element),
                suggestion="cast to ts.f32",
            )
        if element.numpy != array.dtype:
            written = not isinstance(data, (np.ndarray, Tensor))
            array = convert(check_integer_range(array, element) if written else array, element)
        self.data = array if layout == "row_major" else apply_layout(array, layout)
        self.type = share_type(array.shape, element, find_policy(dtype))
        self._place(device)

    def _place(self, device: str | None) -> None:
        if device is not None:
            self.data = place_on_device(self, device)

    def __class_getitem__(cls, items: Any) -> Any:
        """The type `Tensor[dim, ..., element]`; without an element type it is f32."""
        listed = list(items) if isinstance(items, tuple) else [items]
        element: Any = f32
        if listed and (isinstance(listed[-1], DType) or find_policy(listed[-1]) is not None):
            element = listed.pop()
        shape = tuple(as_size(f"?{i}" if d == "?" else "..." if d is ... else d) for i, d in enumerate(listed))
        return TensorType(shape, as_dtype(element), find_policy(element))

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
    def size(self) -> Size:
        """The number of elements."""
        return math.prod(self.shape)  # type: ignore[type-var]

    @property
    def device(self) -> str:
        """The device that holds the elements: "cpu", the memory that the interpreters and the llvm target share, or
        that of a target with a memory of its own: "cuda:0", and "ptx" for the emulated GPU.
        """
        return self.data.memory.name if self.data.__class__ is DeviceArray else "cpu"

    @property
    def is_traced(self) -> bool:
        """Whether this is a value of a program being traced."""
        return isinstance(self.data, Value)

    def numpy(self) -> np.ndarray:
        """The elements as a NumPy array: those in host memory in place, those on a device as a copy.

        Raises:
            TraceError: the tensor is being traced and has no elements yet.
            ArgumentError: the tensor was donated to a call.
        """
        if self.data.__class__ is np.ndarray:
            return self.data
        self.refuse_traced("call a function of ts: NumPy's functions run on arrays, which exist after the trace")
        if self.data.__class__ is DeviceArray:
            return self.data.numpy()
        if isinstance(self.data, Donated):
            raise self.data.error()
        return self.data

    def refuse_traced(self, suggestion: str) -> None:
        """Refuse a tensor without elements, which a trace made.

        Raises:
            TraceError: it is one.
        """
        if self.is_traced and CURRENT_BUILDER.get() is None:
            raise TraceError(
                "a traced tensor is used after its trace has ended", location=user_location(),
                received=f"a traced tensor {self.type}", expected="a result of the traced function",
                suggestion="return it: what a list or an attribute keeps of a trace has no elements",
            )  # fmt: skip
        if self.is_traced:
            raise TraceError(
                "the value of a traced tensor was asked for",
                location=user_location(),
                expected="a program whose Python control flow does not depend on tensor values",
                received=f"a traced tensor {self.type}",
                suggestion=suggestion,
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"{self.dtype} elements cannot be seen as {np.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __copy__(self) -> Tensor:
        """Another tensor of the same elements; a traced one, which does not change, is its own copy."""
        return self if self.is_traced else _unpickle_tensor(self.numpy(), self.type, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """As `copy`, with memory of its own."""
        return self if self.is_traced else _unpickle_tensor(self.numpy().copy(), self.type, self.requires_grad)

    def __reduce__(self) -> Any:
        return _unpickle_tensor, (self.numpy(), self.type, self.requires_grad)

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form else str(self)

    def __bool__(self) -> bool:
        self.refuse_traced("use ts.where(condition, a, b) or ts.cond, or pass the value as a static argument")
        if self.size != 1:
            raise ShapeError(
                f"a tensor of {self.size} elements is not one truth value", location=user_location(),
                received=str(self.type), suggestion="write x.any() or x.all()",
            )  # fmt: skip
        return bool(self.item())

    def __contains__(self, value: Any) -> bool:
        """Whether an element equals the value, as in NumPy and PyTorch."""
        return bool((self == value).any())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        self.refuse_traced(_KEEP_TENSOR)
        return int(self.item())

    def __float__(self) -> float:
        self.refuse_traced(_KEEP_TENSOR)
        return float(self.item())

    def __index__(self) -> int:
        if not self.is_traced and self.dtype.is_integer and not self.shape:
            return int(self.numpy())
        self.refuse_traced(_KEEP_TENSOR)
        return self.numpy().__index__()

    def item(self) -> Any:
        """The only element as a Python number.

        Raises:
            ShapeError: there is not exactly one element.
        """
        if self.size != 1:
            raise ShapeError(
                "item() of a tensor that is not one element", location=user_location(), received=str(self.type)
            )
        self.refuse_traced(_KEEP_TENSOR)
        return wrap_array(self.numpy().reshape(()), self.type.with_shape(())).tolist()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers; a scalar as a number."""
        array = self.numpy()
        return array.tolist() if array.dtype.isbuiltin == 1 else array.astype(find_python_storage(self.dtype)).tolist()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a scalar tensor has no length")
        return int(self.shape[0])  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        if self.is_traced:
            return f"Tensor({self.type}, traced)"
        if isinstance(self.data, Donated):
            return f"Tensor({self.type}, {self.data.state})"
        text = np.array2string(self.numpy(), separator=", ", prefix="Tensor(")
        empty = f", shape={self.shape}" if not self.size and self.shape != (0,) else ""
        element = repr(self.type.policy).removeprefix("ts.") if self.type.policy else self.dtype
        grad = ", requires_grad=True" if self.requires_grad else ""
        place = "" if self.device == "cpu" else f', device="{self.device}"'
        return f"Tensor({text}, {element}{empty}{grad}{place})"


class WeakTensor(Tensor):
    """A traced Python number, or what ops make of such numbers alone: beside tensors it takes their element type, as a
    number in the program does (weak types, as in JAX)."""

    __slots__ = ()


def bind_op(op: Op, operands: Sequence[Tensor], attrs: Mapping[str, Any]) -> Any:
    """Record an op in the open trace, or run it where no operand is traced."""
    builder = CURRENT_BUILDER.get()
    types = tuple(t.type for t in operands)
    try:
        if op.canonical is not None:
            attrs = op.canonical(*types, **attrs)
        if op.effects and (named := op.effects & ALL_EFFECTS):
            perform_effects(named)
        if builder is None:
            found = _run_op(op, operands, types, attrs)
            if any(t.requires_grad for t in operands):
                record_on_tape(op, operands, attrs, found)
            return _unwrap_single(found)
        values = [t.data if t.is_traced else builder.capture(get_elements(t), t) for t in operands]
        node = builder.add(op, values, attrs)
    except TesseraError as error:
        raise error.at(user_location()) from None
    return _unwrap_single([Tensor(v) for v in node.results])


def _run_op(op: Op, operands: Sequence[Tensor], types: tuple, attrs: Mapping[str, Any]) -> list[Tensor]:
    if any([t.data.__class__ is DeviceArray for t in operands]):
        return run_device_op(op, operands, attrs)  # type: ignore[no-any-return]
    arrays = [t.numpy() for t in operands]
    results = op.result_types(types, attrs)
    for result in results:
        for size in getattr(result, "shape", ()):
            if not isinstance(size, int):
                int(size)  # a size known by name alone: this says so
    if _takes_numbers(op, arrays, (*types, *results)):  # a number again, which may meet operands of any device
        made = op.execute(types, results, attrs, [np.asarray(a[(0,) * a.ndim]) for a in arrays])
        made = tuple(np.broadcast_to(a, t.shape) for a, t in zip(made, results, strict=True))  # type: ignore[arg-type]
    else:
        made = op.execute(types, results, attrs, arrays)
    found = [wrap_array(a, t) for a, t in zip(made, results, strict=True)]
    for observe in RESULT_OBSERVERS:
        observe(op, operands, found)
    return found


def _takes_numbers(op: Op, arrays: Sequence[np.ndarray], types: Sequence[Any]) -> bool:
    """Whether a pointwise op has arrays as operands of which each is one number in memory; no type has a policy, since
    stochastic rounding depends on the place.
    """
    if not op.pointwise or any([a.size == 0 or any(a.strides) for a in arrays]):
        return False
    return any([a.ndim for a in arrays]) and all([t.policy is None for t in types])


# What sees the operands and results of ops that execute at once: the checks of ts.debug.
RESULT_OBSERVERS: list[Callable[[Op, Sequence[Tensor], Sequence[Tensor]], None]] = []
# The allocator of new arrays (tessera/runtime/storage/memory_pool.py), or None for NumPy's own memory.
POOL_PLACEMENT: ContextVar[Callable[[np.ndarray], np.ndarray] | None] = ContextVar("owner", default=None)


def place_in_pool(array: np.ndarray) -> np.ndarray:
    """Move an array to the memory pool in use."""
    owner = POOL_PLACEMENT.get()
    return array if owner is None else owner(array)


_new, _get_pool = object.__new__, POOL_PLACEMENT.get


def wrap_array(array: Any, type: Any) -> Tensor:
    """A tensor of these elements with a type that matches them."""
    out = _new(Tensor)  # `Tensor(...)` would look at what is known already
    if array.__class__ is not DeviceArray:
        array = array if array.__class__ is np.ndarray else np.asarray(array)
        owner = _get_pool()
        array = array if owner is None else owner(array)
    out.data = array
    out.type = type
    out.grad, out.requires_grad = None, False
    return out


def _unpickle_tensor(array: np.ndarray, type: TensorType, requires_grad: bool) -> Tensor:
    out = wrap_array(array, type)
    out.requires_grad = requires_grad
    return out


def _unwrap_single(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def get_elements(tensor: Tensor) -> np.ndarray | DeviceArray:
    """The elements of a tensor where they lie: an array of the host or of a device.

    Raises:
        TraceError, ArgumentError: there are none: the tensor is being traced, or was donated.
    """
    return tensor.data if tensor.data.__class__ is DeviceArray else tensor.numpy()


def _find_device_array(data: Any) -> DeviceArray | None:
    """The elements of a tensor or of another library's array that lie on a device; None where they do not."""
    if data.__class__ is DeviceArray:
        return data  # type: ignore[no-any-return]
    if isinstance(data, Tensor):
        return data.data if data.data.__class__ is DeviceArray else None
    plain = isinstance(data, (np.ndarray, list, tuple, int, float))
    return None if plain or not is_on_device(data) else import_device_array(data)


def place_on_device(tensor: Tensor, device: str) -> Any:
    """The elements of a tensor on a device: those that lie there already in place, others as a copy.

    Raises:
        DeviceUnavailable: nothing here serves the device.
        ArgumentError: the tensor requires gradients, which do not follow a copy.
    """
    check_device(device)
    memory = find_device_memory(device)
    if tensor.is_traced:
        return tensor.data
    elements = get_elements(tensor)
    if memory is (elements.memory if isinstance(elements, DeviceArray) else None):
        return elements
    if tensor.requires_grad:
        raise ArgumentError(
            "a tensor that requires gradients is moved", location=user_location(), received=str(tensor.type),
            expected="a tensor without requires_grad", suggestion="move it first: ts.tensor(data, device=..., "
            "requires_grad=True)",
        )  # fmt: skip
    return tensor.numpy() if memory is None else memory.copy_in(tensor.numpy(), memory.find_stream())


def move(tensor: Tensor, device: str | None) -> Tensor:
    """A tensor on a device; None keeps it in place.

    Raises:
        DeviceUnavailable, ArgumentError: as `place_on_device`.
    """
    if device is None:
        return tensor
    placed = place_on_device(tensor, device)
    return tensor if placed is tensor.data else wrap_array(placed, tensor.type)


def _is_shape(sizes: tuple[Any, ...]) -> bool:
    return bool(sizes) and all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) for n in sizes)


def _fill_shape(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros of a shape, in f32."""
    if min(shape) < 0:
        raise ShapeError(
            f"a size of {min(shape)}", location=user_location(), expected="sizes from 0 on", received=str(shape),
            suggestion="write a list for the elements themselves: ts.Tensor([1, -1])",
        )  # fmt: skip
    return np.zeros(shape, np.float32)


def as_tensor(value: Any, like: TensorType | None = None) -> Tensor:
    """A value as a tensor; a Python number takes the element type of `like`.

    An int stays an integer beside an integer; a float beside an integer is f32.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (bool, int, float)) and like is not None:
        return Tensor(np.asarray(value).astype(find_number_dtype(value, like.dtype).numpy))
    try:
        return Tensor(list(value) if value.__class__ is tuple else value)  # its elements, not a shape
    except TesseraError:
        raise
    except (TypeError, ValueError):
        raise DTypeError(f"{type(value).__name__} is not a tensor or a number", received=repr(value)) from None
