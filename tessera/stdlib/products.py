"""Matrix products with an epilogue: one, a batch of them, and one for each group of rows."""

# mypy: disable-error-code="operator, attr-defined, index"

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tessera.errors import ShapeError, outside
from tessera.kernel import kernel, tile
from tessera.stdlib.activations import activation_of
from tessera.stdlib.routine import array, blocks, routine, same_dtype, shaped

Activation = str | Callable[..., Any] | None


@kernel
def product(a, b, bias, out, *, activation=None, BM: int = 64, BN: int = 64, BK: int = 64):
    """out[g] = activation(a[g] b[g] + bias), on the grid (ceil(M / BM), ceil(N / BN), G).

    a is [G or 1, M, K], b [G or 1, K, N], bias [N] or None, out [G, M, N]. The sum over K, the bias and
    the activation are in the accumulation type (f32 for floats of 16 bits), rounded once into out.
    """
    m, n, g = tile.program_id(0) * BM, tile.program_id(1) * BN, tile.program_id(2)
    ga, gb = g if a.shape[0] > 1 else 0, g if b.shape[0] > 1 else 0
    acc = zeros_for(a, (BM, BN))
    for k in tile.range(0, a.shape[2], BK):
        left = tile.load(a[ga, m : m + BM, k : k + BK], edge="clip")
        acc += tile.dot(left, tile.load(b[gb, k : k + BK, n : n + BN], edge="clip"))
    y = epilogue(acc, bias, n, activation, BN)
    tile.store(out[g, m : m + BM, n : n + BN], tile.cast(y, out.dtype), edge="clip")


def zeros_for(a, shape):
    """Where the products of elements of `a` are summed: a block of their accumulation type."""
    return tile.zeros(shape, a.type.accumulate)


def epilogue(acc, bias, n, activation, BN):
    """What comes between the sum and the store: the columns' bias, then the activation."""
    if bias is not None:
        acc = acc + tile.cast(tile.load(bias[n : n + BN], edge="clip"), acc.dtype)[None, :]
    return acc if activation is None else activation(acc)


@routine(product)
def matmul(kernel: Any, a: Any, b: Any, bias: Any = None, *, activation: Activation = None) -> np.ndarray:
    """activation(a b + bias), for a [M, K] and b [K, N] of one float type and bias [N]; the result is [M, N] of it.

    `activation` is "relu", "gelu", "silu", "sigmoid", "tanh", None, or a function of a block as a kernel has it.
    Bias and activation are applied to the wide sum, before it is rounded.

    Raises:
        ArgumentError: there is no such activation.
        DTypeError: the types differ, or are no floats.
        ShapeError: the shapes do not fit.

    >>> a = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
    >>> matmul(a, np.eye(2, dtype=np.float32), activation="relu")
    array([[1., 0.],
           [3., 4.]], dtype=float32)
    """
    a, b = array(a, "a"), array(b, "b")
    if a.ndim != 2 or b.ndim != 2:
        raise ShapeError("matmul takes two matrices", location=outside(), expected="[M, K] and [K, N]",
                         received=f"{a.shape} and {b.shape}", suggestion="batched_matmul takes more axes")  # fmt: skip
    return _batch(kernel, a, b, bias, activation)


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
    return _batch(kernel, array(a, "a"), array(b, "b"), bias, activation)


def _batch(kernel: Any, a: np.ndarray, b: np.ndarray, bias: Any, activation: Activation) -> np.ndarray:
    bias = None if bias is None else array(bias, "bias")
    same_dtype(a=a, b=b, bias=bias)
    if min(a.ndim, b.ndim) < 2 or a.shape[-1] != b.shape[-2]:
        raise ShapeError("the matrices do not fit", location=outside(), expected="[..., M, K] and [..., K, N]",
                         received=f"{a.shape} and {b.shape}")  # fmt: skip
    shaped(bias, "bias", b.shape[-1:])
    lead = _lead(a.shape[:-2], b.shape[:-2])
    out = np.zeros((int(np.prod(lead)), a.shape[-2], b.shape[-1]), a.dtype)
    if out.size:
        _, m, n = out.shape
        grid = lambda c: (blocks(m, c["BM"]), blocks(n, c["BN"]), len(out))  # noqa: E731
        kernel[grid](_flat(a, lead), _flat(b, lead), bias, out, activation=activation_of(activation))
    return out.reshape(*lead, *out.shape[1:])


def _lead(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ShapeError("the leading axes do not fit", location=outside(), received=f"{a} and {b}") from None


def _flat(x: np.ndarray, lead: tuple[int, ...]) -> np.ndarray:
    """The matrices of a batch along one axis; one that serves all of them stays one."""
    if int(np.prod(x.shape[:-2])) == 1:
        return x.reshape(1, *x.shape[-2:])
    return np.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, *x.shape[-2:])


@kernel
def group_product(a, b, bias, ends, out, *, activation=None, BM: int = 64, BN: int = 64, BK: int = 64):
    """out[r] = activation(a[r] b[g] + bias[g]) for the rows r of each group g.

    a is [R, K], b [G, K, N], bias [G, N] or None, out [R, N]; group g holds the rows from ends[g] to before
    ends[g + 1]. The grid is (ceil(rows of the largest group / BM), ceil(N / BN), G).
    """
    g, n = tile.program_id(2), tile.program_id(1) * BN
    m, end = ends[g] + tile.program_id(0) * BM, ends[g + 1]
    if m < end:
        acc = zeros_for(a, (BM, BN))
        for k in tile.range(0, a.shape[1], BK):
            left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
            acc += tile.dot(left, tile.load(b[g, k : k + BK, n : n + BN], edge="clip"))
        y = epilogue(acc, None if bias is None else bias[g], n, activation, BN)
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
    a, b, bias = array(a, "a"), array(b, "b"), None if bias is None else array(bias, "bias")
    same_dtype(a=a, b=b, bias=bias)
    counts = np.asarray(sizes, np.int64)
    fits = a.ndim == 2 and b.ndim == 3 and a.shape[1] == b.shape[1] and counts.shape == b.shape[:1]
    if not fits or counts.min(initial=0) < 0 or counts.sum() != len(a):
        raise ShapeError("the groups do not fit", location=outside(),
                         expected="a [R, K], b [G, K, N], G sizes that sum to R",
                         received=f"{a.shape}, {b.shape}, sizes {counts.tolist()}")  # fmt: skip
    groups, _, n = b.shape
    shaped(bias, "bias", (groups, n))
    out = np.zeros((len(a), n), a.dtype)
    if out.size:
        ends = np.concatenate([[0], np.cumsum(counts)])
        grid = lambda c: (blocks(int(counts.max()), c["BM"]), blocks(n, c["BN"]), groups)  # noqa: E731
        kernel[grid](a, b, bias, ends, out, activation=activation_of(activation))
    return out
