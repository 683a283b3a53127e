"""GEMM with a fused epilogue (bias, activation): single, batched, grouped, and quantised (int8, fp8) with scales."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, library_caller_location
from tessera.core.shapes import broadcast
from tessera.core.symbolic_dim import Size, ceil_divide
from tessera.core.types import DType, as_dtype, f32, fp8_e4m3, fp8_e5m2, int8
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import broadcast_to
from tessera.stdlib.routine import (
    check_array,
    check_same_dtype,
    check_shape,
    compute,
    is_recorded,
    routine,
)

# Activations that a product applies before the store, selected at compile time.


# mypy: disable-error-code="operator, attr-defined, index"


def relu(x):
    """ReLU: `x` where it is positive, else 0."""
    return tile.maximum(x, 0.0)


def silu(x):
    """SiLU: `x` times its logistic function."""
    return x / (1.0 + tile.exp(-x))


def gelu(x):
    """GELU: `x` times the normal distribution function at `x` (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1.0 + tile.erf(x * math.sqrt(0.5)))


def sigmoid(x):
    """The logistic function."""
    return 1.0 / (1.0 + tile.exp(-x))


ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "relu": relu, "silu": silu, "gelu": gelu, "sigmoid": sigmoid, "tanh": tile.tanh,
}  # fmt: skip


def resolve_activation(activation: str | Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The activation of a name; a function of a block is returned unchanged.

    Raises:
        ArgumentError: the name of the activation is unknown.
    """
    if activation is None or callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ArgumentError(
            f'"{activation}" is not an activation', location=library_caller_location(), expected=", ".join(ACTIVATIONS),
            suggestion="or a function of a block, written as in a kernel",
        )  # fmt: skip
    return ACTIVATIONS[activation]


# Matrix products with an epilogue: single, batched, and grouped by rows.


Activation = str | Callable[..., Any] | None


@kernel
def product(a, b, bias, out, *, activation=None, BM: int = 64, BN: int = 64, BK: int = 64):
    """out[g] = activation(a[g] b[g] + bias), on the grid (ceil(M / BM), ceil(N / BN), G).

    a is [G or 1, M, K], b [G or 1, K, N], bias [N] or None, out [G, M, N]. The sum over K, the bias and
    the activation are in the accumulation type (f32 for floats of 16 bits), rounded once into out.
    """
    m, n, g = tile.program_id(0) * BM, tile.program_id(1) * BN, tile.program_id(2)
    ga, gb = 0 if a.shape[0] == 1 else g, 0 if b.shape[0] == 1 else g
    acc = zero_accumulator(a, (BM, BN))
    for k in tile.range(0, a.shape[2], BK):
        left = tile.load(a[ga, m : m + BM, k : k + BK], edge="clip")
        acc += tile.dot(left, tile.load(b[gb, k : k + BK, n : n + BN], edge="clip"))
    y = apply_epilogue(acc, bias, n, activation, BN)
    tile.store(out[g, m : m + BM, n : n + BN], tile.cast(y, out.dtype), edge="clip")


def zero_accumulator(a, shape):
    """A zero accumulator for products of elements of `a`, of their accumulation type."""
    return tile.zeros(shape, a.type.accumulate)


def apply_epilogue(acc, bias, n, activation, BN):
    """The epilogue between sum and store: the bias of the columns, then the activation."""
    if bias is not None:
        acc = acc + tile.cast(tile.load(bias[n : n + BN], edge="clip"), acc.dtype)[None, :]
    return acc if activation is None else activation(acc)


@routine(product)
def matmul(kernel: Any, a: Any, b: Any, bias: Any = None, *, activation: Activation = None) -> np.ndarray:
    """activation(a b + bias), for a [M, K] and b [K, N] of one float type and bias [N]; the result is [M, N] of it.

    `activation` is "relu", "gelu", "silu", "sigmoid", "tanh", None, or a function of a block, written as in a kernel.
    Bias and activation are applied to the accumulator, before it is rounded.

    Raises:
        ArgumentError: the activation is unknown.
        DTypeError: the types differ, or are not floats.
        ShapeError: the shapes do not fit.

    >>> a = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
    >>> matmul(a, np.eye(2, dtype=np.float32), activation="relu")
    array([[1., 0.],
           [3., 4.]], dtype=float32)
    """
    a, b = check_array(a, "a"), check_array(b, "b")
    if a.ndim != 2 or b.ndim != 2:
        raise ShapeError("matmul takes two matrices", location=library_caller_location(), expected="[M, K] and [K, N]",
                         received=f"{a.shape} and {b.shape}", suggestion="batched_matmul takes more axes")  # fmt: skip
    return _launch_batch(kernel, a, b, bias, activation)


@routine(product)
def batched_matmul(kernel: Any, a: Any, b: Any, bias: Any = None, *, activation: Activation = None) -> np.ndarray:
    """activation(a b + bias) for each pair of matrices: a [..., M, K] and b [..., K, N], leading axes broadcast.

    Types, bias [N] and activation are as in `matmul`.

    Raises:
        ArgumentError, DTypeError, ShapeError: as in `matmul`.

    >>> a, b = np.ones((3, 1, 2), np.float32), np.full((2, 1), 5.0, np.float32)
    >>> batched_matmul(a, b).ravel()
    array([10., 10., 10.], dtype=float32)
    """
    return _launch_batch(kernel, check_array(a, "a"), check_array(b, "b"), bias, activation)


def _launch_batch(kernel: Any, a: Any, b: Any, bias: Any, activation: Activation) -> Any:
    bias = None if bias is None else check_array(bias, "bias")
    check_same_dtype(a=a, b=b, bias=bias)
    if min(a.ndim, b.ndim) < 2 or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            "the matrices do not fit",
            location=library_caller_location(),
            expected="[..., M, K] and [..., K, N]",
            received=f"{a.shape} and {b.shape}",
        )
    check_shape(bias, "bias", b.shape[-1:])
    lead = _broadcast_batch_shape(a.shape[:-2], b.shape[:-2])
    count, m, n = math.prod(lead), a.shape[-2], b.shape[-1]
    grid = lambda c: (ceil_divide(m, c["BM"]), ceil_divide(n, c["BN"]), count)  # noqa: E731
    operands = (_flatten_batch(a, lead), _flatten_batch(b, lead), bias)
    out = compute(kernel, grid, (count, m, n), a.dtype, *operands, activation=resolve_activation(activation))
    return out.reshape(*lead, m, n)


def _broadcast_batch_shape(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...]:
    try:
        return broadcast(a, b)
    except ShapeError:
        raise ShapeError(
            "the leading axes do not fit", location=library_caller_location(), received=f"{a} and {b}"
        ) from None


def _flatten_batch(x: Any, lead: tuple[Size, ...]) -> Any:
    """The matrices of a batch merged to one axis; a matrix shared by all keeps size 1."""
    if math.prod(x.shape[:-2]) == 1:
        return x.reshape(1, *x.shape[-2:])
    whole = (*lead, *x.shape[-2:])
    spread = broadcast_to(x, shape=whole) if isinstance(x, Tensor) else np.broadcast_to(x, whole)
    return spread.reshape(math.prod(lead), *x.shape[-2:])


@kernel
def group_product(a, b, bias, ends, out, *, activation=None, BM: int = 64, BN: int = 64, BK: int = 64):
    """out[r] = activation(a[r] b[g] + bias[g]) for the rows r of each group g.

    a is [R, K], b [G, K, N], bias [G, N] or None, out [R, N]; group g holds the rows from ends[g] to before
    ends[g + 1]. The grid is (ceil(rows of the largest group / BM), ceil(N / BN), G).
    """
    g, n = tile.program_id(2), tile.program_id(1) * BN
    m, end = ends[g] + tile.program_id(0) * BM, ends[g + 1]
    if m < end:
        acc = zero_accumulator(a, (BM, BN))
        for k in tile.range(0, a.shape[1], BK):
            left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
            acc += tile.dot(left, tile.load(b[g, k : k + BK, n : n + BN], edge="clip"))
        y = apply_epilogue(acc, None if bias is None else bias[g], n, activation, BN)
        own = (m + tile.arange(0, BM) < end)[:, None]
        tile.store(out[m : m + BM, n : n + BN], tile.cast(y, out.dtype), mask=own, edge="clip")


@routine(group_product)
def grouped_matmul(
    kernel: Any, a: Any, b: Any, sizes: Sequence[int], bias: Any = None, *, activation: Activation = None
) -> np.ndarray:
    """Rows of `a` times the matrix of their group: the experts of a mixture, each with its tokens.

    a is [R, K], its first sizes[0] rows are group 0 and so on; b is [G, K, N], bias [G, N] or None. The
    result is [R, N]. Types and activation are as in `matmul`; groups may be empty.

    Raises:
        ArgumentError, DTypeError: as in `matmul`.
        ShapeError: the shapes do not fit, or the sizes do not sum to R.

    >>> a, b = np.ones((3, 1), np.float32), np.array([[[10.0]], [[20.0]]], np.float32)
    >>> grouped_matmul(a, b, [1, 2]).ravel()
    array([10., 20., 20.], dtype=float32)
    """
    a, b, bias = check_array(a, "a"), check_array(b, "b"), None if bias is None else check_array(bias, "bias")
    check_same_dtype(a=a, b=b, bias=bias)
    counts = np.asarray(sizes, np.int64)
    fits = a.ndim == 2 and b.ndim == 3 and a.shape[1] == b.shape[1] and counts.shape == b.shape[:1]
    if not fits or counts.min(initial=0) < 0 or counts.sum() != a.shape[0]:
        raise ShapeError("the groups do not fit", location=library_caller_location(),
                         expected="a [R, K], b [G, K, N], G sizes that sum to R",
                         received=f"{a.shape}, {b.shape}, sizes {counts.tolist()}")  # fmt: skip
    groups, _, n = b.shape
    check_shape(bias, "bias", (groups, n))
    ends = np.concatenate([[0], np.cumsum(counts)])
    grid = lambda c: (ceil_divide(int(counts.max()), c["BM"]), ceil_divide(n, c["BN"]), groups)  # noqa: E731
    found = resolve_activation(activation)
    return compute(kernel, grid, (a.shape[0], n), a.dtype, a, b, bias, ends, activation=found)


# Matrix product of quantised operands: int8 or fp8 elements with a scale for each row and column.


QUANTIZED_TYPES = (int8, fp8_e4m3, fp8_e5m2)


@kernel
def scaled_product(a, b, row_scale, col_scale, bias, out, *, activation=None, BM: int = 64, BN: int = 64, BK: int = 64):
    """out = activation((a b) · row_scale · col_scale + bias), on the grid (ceil(M / BM), ceil(N / BN)).

    a is [M, K], b [K, N], of int8 (summed exactly in int32) or fp8 (in f32); row_scale [M], col_scale [N]
    and bias [N] (or None) are f32, out [M, N] is a float type.
    """
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = zero_accumulator(a, (BM, BN))
    for k in tile.range(0, a.shape[1], BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        acc += tile.dot(left, tile.load(b[k : k + BK, n : n + BN], edge="clip"))
    rows = tile.load(row_scale[m : m + BM], edge="clip")[:, None]
    y = tile.cast(acc, f32) * rows * tile.load(col_scale[n : n + BN], edge="clip")[None, :]
    tile.store(
        out[m : m + BM, n : n + BN], tile.cast(apply_epilogue(y, bias, n, activation, BN), out.dtype), edge="clip"
    )


@routine(scaled_product)
def quantized_matmul(
    kernel: Any, a: Any, b: Any, a_scale: Any = 1.0, b_scale: Any = 1.0, bias: Any = None, *,
    activation: Activation = None, out_dtype: DType = f32,
) -> np.ndarray:  # fmt: skip
    """activation((a b) · a_scale · b_scale + bias) of `out_dtype`, for a [M, K] and b [K, N] of int8 or fp8.

    `a_scale` is a number or [M] (one for each row of a), `b_scale` a number or [N] (one for each column of b):
    the divisors by which a and b were quantised. Products of int8 are summed exactly in int32 (K up
    to 131,071), those of fp8 in f32. The rest is f32, rounded once.

    Raises:
        DTypeError: the types differ, or are not int8, fp8_e4m3 or fp8_e5m2.
        ShapeError: the shapes do not fit.
        UnsupportedOpError: the target does not have the type.

    >>> a, b = np.array([[100, -50]], np.int8), np.array([[1], [2]], np.int8)
    >>> quantized_matmul(a + 0, b, a_scale=0.5, b_scale=[2.0], bias=[1.0])
    array([[1.]], dtype=float32)
    """
    a, b = (x if is_recorded(x) else np.asarray(x) for x in (a, b))
    if as_dtype(a.dtype) != as_dtype(b.dtype) or as_dtype(a.dtype) not in QUANTIZED_TYPES:
        raise DTypeError("the operands do not have the same quantised type", location=library_caller_location(),
                         expected="one of " + ", ".join(map(str, QUANTIZED_TYPES)),
                         received=f"{as_dtype(a.dtype)} and {as_dtype(b.dtype)}")  # fmt: skip
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ShapeError("the matrices do not fit", location=library_caller_location(), expected="[M, K] and [K, N]",
                         received=f"{a.shape} and {b.shape}")  # fmt: skip
    m, n = a.shape[0], b.shape[1]
    scales = _expand_scale(a_scale, "a_scale", m), _expand_scale(b_scale, "b_scale", n)
    added = None if bias is None else _expand_scale(bias, "bias", n)
    grid = lambda constants: (ceil_divide(m, constants["BM"]), ceil_divide(n, constants["BN"]))  # noqa: E731
    return compute(kernel, grid, (m, n), out_dtype, a, b, *scales, added, activation=resolve_activation(activation))


def _expand_scale(scale: Any, name: str, size: int) -> Any:
    """Scales as f32, one for each of `size` rows or columns."""
    if is_recorded(scale):
        return broadcast_to(scale.to(f32), shape=(size,))
    held = check_array(np.asarray(scale, np.float32), name)
    held = np.full(size, held) if held.ndim == 0 else held
    check_shape(held, name, (size,))
    return held
