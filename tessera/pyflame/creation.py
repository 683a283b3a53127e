"""Creation functions: lazy tensors of constants, random numbers and data (PyFlame API reference)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, user_location
from tessera.core.types import TensorType, f32
from tessera.ir.tensor import Tensor as CoreTensor
from tessera.ops.api import creation
from tessera.ops.tensor import random
from tessera.pyflame import dtypes
from tessera.pyflame.dtypes import DType
from tessera.pyflame.layouts import MeshLayout, check_layout
from tessera.pyflame.lazy_graph import Expression
from tessera.pyflame.tensor import Tensor, import_elements


def _read_shape(shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, (list, tuple)) else (shape,)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ShapeError(
                "this is not a shape", location=user_location(), received=repr(shape),
                expected="a list of sizes from 0 on, as in [3, 4]",
            )  # fmt: skip
    return tuple(int(size) for size in sizes)


def _make_leaf(
    label: str, shape: Any, dtype: Any, layout: Any, make: Callable[[TensorType], CoreTensor], requires_grad: bool
) -> Tensor:
    type = TensorType(_read_shape(shape), dtypes.as_dtype(dtype).value)
    found = Expression(type, label, make=lambda: make(type), layout=check_layout(layout))
    return Tensor(found, requires_grad)


def full(
    shape: Any, value: Any, dtype: Any = DType.float32, layout: MeshLayout | None = None, requires_grad: bool = False
) -> Tensor:
    """A tensor of one value.

    >>> full([2], -1, dtype=DType.int32).numpy().tolist()
    [-1, -1]

    Raises:
        ShapeError, DTypeError, ArgumentError: no shape, no element type, or a value that is not a number of the type.
    """
    if not isinstance(value, (bool, int, float, np.number)):
        raise ArgumentError(
            "the value is not a number", location=user_location(), received=repr(value), expected="a number"
        )
    element = dtypes.as_dtype(dtype).value
    if not element.is_float and isinstance(value, float) and value != int(value):
        raise DTypeError(
            f"{value} is not an element of {element}", location=user_location(), received=repr(value),
            expected="an integer", suggestion="dtype=pf.float32",
        )  # fmt: skip
    CoreTensor([value], dtype=element)  # the range of the type, at the user's line
    return _make_leaf("full", shape, dtype, layout, lambda t: creation.full(t.shape, value, t.dtype), requires_grad)


def zeros(
    shape: Any, dtype: Any = DType.float32, layout: MeshLayout | None = None, requires_grad: bool = False
) -> Tensor:
    """A tensor of zeros.

    >>> zeros([2, 2]).shape
    [2, 2]
    """
    return _make_leaf("zeros", shape, dtype, layout, lambda t: creation.zeros(t.shape, t.dtype), requires_grad)


def ones(
    shape: Any, dtype: Any = DType.float32, layout: MeshLayout | None = None, requires_grad: bool = False
) -> Tensor:
    """A tensor of ones.

    >>> ones([2], dtype=DType.int32).numpy().tolist()
    [1, 1]
    """
    return _make_leaf("ones", shape, dtype, layout, lambda t: creation.full(t.shape, 1, t.dtype), requires_grad)


def _make_draw(
    label: str, draw: Callable[..., CoreTensor], words: int, arguments: tuple[Any, Any, Any, bool]
) -> Tensor:
    """A leaf of random numbers: its part of the default generator's sequence is reserved now."""
    shape, dtype, layout, requires_grad = arguments
    element = dtypes.as_dtype(dtype)
    if not element.is_float:
        raise DTypeError(
            f"{label} makes floats", location=user_location(), received=repr(element), expected="a float type"
        )
    amount = words * math.prod(_read_shape(shape))
    seed, start = random.DEFAULT_GENERATOR.advance(-(-amount // 4))
    generator = random.Generator(seed)
    generator.offset = start
    return _make_leaf(label, shape, dtype, layout, lambda t: draw(t, generator), requires_grad)


def randn(
    shape: Any, dtype: Any = DType.float32, layout: MeshLayout | None = None, requires_grad: bool = False
) -> Tensor:
    """Normally distributed random numbers of mean 0 and variance 1; `manual_seed` repeats them.

    >>> randn([3, 4]).is_evaluated()
    False
    """
    return _make_draw(
        "randn", lambda t, g: random.randn(t.shape, t.dtype, generator=g), 2, (shape, dtype, layout, requires_grad)
    )


def rand(
    shape: Any, dtype: Any = DType.float32, layout: MeshLayout | None = None, requires_grad: bool = False
) -> Tensor:
    """Uniformly distributed random numbers in [0, 1); `manual_seed` repeats them.

    >>> bool(rand([1000]).numpy().max() < 1)
    True
    """
    return _make_draw("rand", _draw_uniform, 1, (shape, dtype, layout, requires_grad))


def _draw_uniform(type: TensorType, generator: random.Generator) -> CoreTensor:
    found = random.rand(type.shape, f32, generator=generator).numpy()
    if type.dtype is f32:
        return CoreTensor(found)
    narrow = found.astype(type.dtype.numpy)  # which may round to 1
    below = np.nextafter(type.dtype.numpy.type(1), type.dtype.numpy.type(0))
    return CoreTensor(np.where(narrow < 1, narrow, below))


def manual_seed(seed: int) -> None:
    """Restart the random numbers: of `randn`, `rand`, dropout and the initial weights of layers.

    >>> manual_seed(0); first = randn([2]).numpy(); manual_seed(0)
    >>> bool((randn([2]).numpy() == first).all())
    True
    """
    random.manual_seed(seed)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    dtype: Any = DType.float32,
    layout: MeshLayout | None = None,
) -> Tensor:
    """Numbers from `start` (0 if `end` is None) to before `end`.

    >>> arange(0, 10, 2).numpy().tolist()
    [0.0, 2.0, 4.0, 6.0, 8.0]

    Raises:
        ArgumentError: the step is 0, or an argument is not a finite number.
    """
    for value in (start, 0 if end is None else end, step):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not math.isfinite(value):
            raise ArgumentError(
                "arange of something that is not a number", location=user_location(), received=repr(value),
                expected="finite numbers",
            )  # fmt: skip
    if step == 0:
        raise ArgumentError("arange with a step of 0", location=user_location(), expected="a step other than 0")
    first, last = (0, start) if end is None else (start, end)
    element = dtypes.as_dtype(dtype).value
    found = CoreTensor(np.arange(first, last, step), dtype=element)
    return _make_leaf("arange", found.shape, dtype, layout, lambda t: found, False)


def tensor(data: Any, dtype: Any = None, layout: MeshLayout | None = None, requires_grad: bool = False) -> Tensor:
    """A tensor of a list, a number or an array, whose elements are copied.

    Lists of numbers become float32, lists of bools bool_; float64 arrays become float32.

    >>> tensor([[1, 2, 3], [4, 5, 6]])
    Tensor([[1., 2., 3.],
            [4., 5., 6.]], shape=[2, 3], dtype=float32)

    Raises:
        ShapeError: nested lists have different lengths.
        DTypeError: PyFlame does not have the element type, or a number does not fit it.
    """
    if isinstance(data, Tensor):
        data = data.numpy()
    try:
        found = import_elements(data, dtype)
    except TypeError as error:
        raise DTypeError(f"the data are not numbers: {error}", location=user_location(), received=repr(data)) from None
    return Tensor(Expression(found.type, "tensor", elements=found, layout=check_layout(layout)), requires_grad)


def from_numpy(arr: np.ndarray) -> Tensor:
    """A tensor of an array. Its elements are copied: a change of the array does not change what was recorded.

    >>> from_numpy(np.ones((3, 4), np.float32)).shape
    [3, 4]

    Raises:
        DTypeError: it is not an array, or PyFlame does not have its element type.
    """
    if not isinstance(arr, np.ndarray):
        raise DTypeError(
            "from_numpy of something that is not an array", location=user_location(), received=type(arr).__name__,
            expected="a NumPy array", suggestion="pf.tensor(data)",
        )  # fmt: skip
    return tensor(arr)
