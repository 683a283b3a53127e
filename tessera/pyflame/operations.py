"""Operations of PyFlame as functions: activations, mathematics, reductions, shapes, products, combination."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.nn import activations
from tessera.ops.tensor import contractions, elementwise, nn, scalar_functions, shape
from tessera.pyflame.lazy_graph import evaluate
from tessera.pyflame.tensor import Dims, Tensor, record


def _as_tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else record("tensor", lambda t: t, x)


# Activations.


def relu(x: Tensor) -> Tensor:
    """max(0, x). The gradient at 0 is 0, as in PyTorch.

    >>> import tessera.pyflame as pf
    >>> relu(pf.tensor([-1, 0, 1, 2])).numpy().tolist()
    [0.0, 0.0, 1.0, 2.0]
    """
    return record("relu", activations.relu, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return record("sigmoid", scalar_functions.sigmoid, x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return record("tanh", elementwise.tanh, x)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal distribution function of x; `approximate="tanh"` is the other formula of PyTorch."""
    return record("gelu", lambda t: nn.gelu(t, approximate=approximate), x)


def silu(x: Tensor) -> Tensor:
    """x times sigmoid(x)."""
    return record("silu", nn.silu, x)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) divided by its sum along an axis."""
    return record("softmax", lambda t: nn.softmax(t, axis=dim), x)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of softmax, stable for large and small values."""
    return record("log_softmax", lambda t: nn.log_softmax(t, axis=dim), x)


# Mathematics.


def abs(x: Tensor) -> Tensor:
    """The absolute value."""
    return record("abs", elementwise.abs, x)


def sqrt(x: Tensor) -> Tensor:
    """The square root; NaN for negative values."""
    return record("sqrt", elementwise.sqrt, x)


def exp(x: Tensor) -> Tensor:
    """The exponential function."""
    return record("exp", elementwise.exp, x)


def log(x: Tensor) -> Tensor:
    """The natural logarithm; -inf for 0, NaN for negative values."""
    return record("log", elementwise.log, x)


def sin(x: Tensor) -> Tensor:
    """The sine."""
    return record("sin", elementwise.sin, x)


def cos(x: Tensor) -> Tensor:
    """The cosine."""
    return record("cos", elementwise.cos, x)


# Reductions and shapes: the methods of Tensor.


def sum(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The sum along axes."""
    return _as_tensor(x).sum(dim, keepdim)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean along axes."""
    return _as_tensor(x).mean(dim, keepdim)


def max(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The maximum along axes."""
    return _as_tensor(x).max(dim, keepdim)


def min(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The minimum along axes."""
    return _as_tensor(x).min(dim, keepdim)


def reshape(x: Tensor, new_shape: Sequence[int]) -> Tensor:
    """The elements in another shape; one size may be -1."""
    return _as_tensor(x).reshape(new_shape)


def transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Two axes swapped."""
    return _as_tensor(x).transpose(dim0, dim1)


def squeeze(x: Tensor, dim: Dims = None) -> Tensor:
    """Without axes of size 1."""
    return _as_tensor(x).squeeze(dim)


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """A new axis of size 1."""
    return _as_tensor(x).unsqueeze(dim)


# Products and combination.


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product of matrices [..., M, K] and [..., K, N].

    Raises:
        ShapeError: the sizes do not match.
    """
    return record("matmul", contractions.matmul, a, b)


def _check_list(tensors: Any, name: str) -> Sequence[Tensor]:
    if isinstance(tensors, (list, tuple)) and tensors:
        return tensors
    raise ArgumentError(
        f"{name} takes a list of tensors", location=user_location(), expected="a list of at least one tensor",
        received=type(tensors).__name__ if not isinstance(tensors, (list, tuple)) else "an empty list",
        suggestion=f"pf.{name}([a, b], dim=0)",
    )  # fmt: skip


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors joined along an axis.

    Raises:
        ShapeError: other sizes differ.
    """
    return record("cat", lambda *t: shape.concatenate(list(t), axis=dim), *_check_list(tensors, "cat"))


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Tensors of one shape joined along a new axis.

    Raises:
        ShapeError: the shapes differ.
    """
    return record("stack", lambda *t: shape.stack(list(t), axis=dim), *_check_list(tensors, "stack"))


def where(condition: Tensor, a: Any, b: Any) -> Tensor:
    """Elements of `a` where the condition is true, of `b` elsewhere; `a` and `b` may be numbers."""
    operands = [x for x in (condition, a, b) if not isinstance(x, (bool, int, float))]

    def choose(*found: Any) -> Any:
        left = iter(found)
        return elementwise.where(*(x if isinstance(x, (bool, int, float)) else next(left) for x in (condition, a, b)))

    return record("where", choose, *operands)


# Evaluation.


def is_lazy(tensor: Tensor) -> bool:
    """Whether a tensor is not evaluated yet."""
    _check_tensors((tensor,), "is_lazy")
    return not tensor.is_evaluated()


def eval(*tensors: Tensor) -> Any:
    """Evaluate tensors in one program; returns the tensor, or a tuple of several.

    >>> import tessera.pyflame as pf
    >>> x = pf.ones([2]) + 1.0
    >>> eval(x) is x, pf.is_lazy(x)
    (True, False)
    """
    _check_tensors(tensors, "eval")
    evaluate([x._expression for x in tensors])
    return tensors[0] if len(tensors) == 1 else tensors


def _check_tensors(tensors: Sequence[Any], name: str) -> None:
    for x in tensors:
        if not isinstance(x, Tensor):
            raise ArgumentError(
                f"{name} takes tensors", location=user_location(), received=f"{type(x).__name__} {x!r}"[:80],
                expected="tensors of PyFlame",
            )  # fmt: skip


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "relu": relu, "sigmoid": sigmoid, "tanh": tanh, "gelu": gelu, "silu": silu, "softmax": softmax,
    "log_softmax": log_softmax, "abs": abs, "sqrt": sqrt, "exp": exp, "log": log, "sin": sin, "cos": cos,
    "matmul": matmul,
}  # fmt: skip
for _name, _function in _FUNCTIONS.items():  # methods, as PyTorch has them
    setattr(Tensor, _name, _function)
