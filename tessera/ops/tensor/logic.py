"""Logic: logical ops on elements, and comparisons of whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.core.types import bool_
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.tensor.argument_checks import check_arguments
from tessera.ops.tensor.coercion import composite
from tessera.ops.tensor.elementwise import (
    abs,
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    equal,
    less_equal,
    not_equal,
)
from tessera.ops.tensor.reduce import all, sum
from tessera.ops.tensor.scalar_functions import isfinite


def to_truth(x: Any) -> Tensor:
    """Whether each element is not zero; a bool is itself."""
    x = as_tensor(x)
    return x if x.dtype is bool_ else not_equal(x, 0)


def _apply_logical(join: Callable[[Any, Any], Tensor], x: Any, y: Any) -> Tensor:
    return join(to_truth(x), to_truth(y))


@check_arguments
def logical_and(x: Any, y: Any) -> Tensor:
    """Whether both elements are true (not zero).

    >>> logical_and([1, 0], [2, 3])
    Tensor([ True, False], bool)
    """
    return _apply_logical(bitwise_and, x, y)


@check_arguments
def logical_or(x: Any, y: Any) -> Tensor:
    """Whether at least one of both elements is true (not zero)."""
    return _apply_logical(bitwise_or, x, y)


@check_arguments
def logical_xor(x: Any, y: Any) -> Tensor:
    """Whether exactly one of both elements is true (not zero)."""
    return _apply_logical(bitwise_xor, x, y)


@check_arguments
def logical_not(x: Any) -> Tensor:
    """Whether each element is zero."""
    return bitwise_not(to_truth(x))


@composite
def isclose(x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Whether |x - y| ≤ atol + rtol · |y|; equal infinities are close, and NaNs if `equal_nan`.

    >>> isclose([1.0, 2.0], [1.0, 2.1])
    Tensor([ True, False], bool)
    """
    x, y = as_tensor(x), as_tensor(y)
    near = less_equal(abs(x - y), abs(y) * rtol + atol) & isfinite(y)
    found = near | equal(x, y)
    return found | (not_equal(x, x) & not_equal(y, y)) if equal_nan else found


@check_arguments
def allclose(x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Tensor:
    """Whether all elements are close: `isclose` and then `all`.

    >>> bool(allclose([1.0], [1.0000001]))
    True
    """
    return all(isclose(x, y, rtol, atol, equal_nan))


@check_arguments
def array_equal(x: Any, y: Any) -> Tensor:
    """Whether shapes and all elements are equal; NaN equals nothing."""
    x, y = as_tensor(x), as_tensor(y)
    return all(equal(x, y)) if x.shape == y.shape else Tensor(False)


@check_arguments
def count_nonzero(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """How many elements along `axis` (all when None) are not zero, as int64.

    >>> count_nonzero([[1, 0], [2, 3]], axis=1)
    Tensor([1, 2], int64)
    """
    return sum(to_truth(x), axis=axis, keepdims=keepdims)
