"""Matrix product of quantised operands: int8 or fp8 elements with a scale for each row and column."""

# mypy: disable-error-code="operator, attr-defined, index"

from typing import Any

import numpy as np

from tessera.errors import DTypeError, ShapeError, outside
from tessera.kernel import kernel, tile
from tessera.stdlib.activations import activation_of
from tessera.stdlib.products import Activation, epilogue, zeros_for
from tessera.stdlib.routine import array, blocks, routine, shaped
from tessera.tensor import Tensor
from tessera.types import DType, as_dtype, f32, fp8_e4m3, fp8_e5m2, int8

TYPES = (int8, fp8_e4m3, fp8_e5m2)


@kernel
def scaled_product(a, b, row_scale, col_scale, bias, out, *, activation=None, BM: int = 64, BN: int = 64, BK: int = 64):
    """out = activation((a b) · row_scale · col_scale + bias), on the grid (ceil(M / BM), ceil(N / BN)).

    a is [M, K], b [K, N], of int8 (summed exactly in int32) or fp8 (in f32); row_scale [M], col_scale [N]
    and bias [N] (or None) are f32, out [M, N] is a float type.
    """
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = zeros_for(a, (BM, BN))
    for k in tile.range(0, a.shape[1], BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        acc += tile.dot(left, tile.load(b[k : k + BK, n : n + BN], edge="clip"))
    rows = tile.load(row_scale[m : m + BM], edge="clip")[:, None]
    y = tile.cast(acc, f32) * rows * tile.load(col_scale[n : n + BN], edge="clip")[None, :]
    tile.store(out[m : m + BM, n : n + BN], tile.cast(epilogue(y, bias, n, activation, BN), out.dtype), edge="clip")


@routine(scaled_product)
def quantized_matmul(
    kernel: Any, a: Any, b: Any, a_scale: Any = 1.0, b_scale: Any = 1.0, bias: Any = None, *,
    activation: Activation = None, out_dtype: DType = f32,
) -> np.ndarray:  # fmt: skip
    """activation((a b) · a_scale · b_scale + bias) of `out_dtype`, for a [M, K] and b [K, N] of int8 or fp8.

    `a_scale` is a number or [M] (one for each row of a), `b_scale` a number or [N] (one for each column of b):
    they are what was divided by when a and b were quantised. Products of int8 are summed exactly in int32 (K up
    to 131,071), those of fp8 in f32. The rest is f32, rounded once.

    Raises:
        DTypeError: the types differ, or are not int8, fp8_e4m3 or fp8_e5m2.
        ShapeError: the shapes do not fit.
        UnsupportedOpError: the target has no such type.

    >>> a, b = np.array([[100, -50]], np.int8), np.array([[1], [2]], np.int8)
    >>> quantized_matmul(a + 0, b, a_scale=0.5, b_scale=[2.0], bias=[1.0])
    array([[1.]], dtype=float32)
    """
    a, b = (x.numpy() if isinstance(x, Tensor) else np.asarray(x) for x in (a, b))
    if a.dtype != b.dtype or as_dtype(a.dtype) not in TYPES:
        raise DTypeError("the operands are not quantised alike", location=outside(),
                         expected="one of " + ", ".join(map(str, TYPES)),
                         received=f"{as_dtype(a.dtype)} and {as_dtype(b.dtype)}")  # fmt: skip
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ShapeError("the matrices do not fit", location=outside(), expected="[M, K] and [K, N]",
                         received=f"{a.shape} and {b.shape}")  # fmt: skip
    m, n = a.shape[0], b.shape[1]
    scales = _scale(a_scale, "a_scale", m), _scale(b_scale, "b_scale", n)
    added = None if bias is None else _scale(bias, "bias", n)
    out = np.zeros((m, n), out_dtype.numpy)
    if out.size:
        grid = lambda constants: (blocks(m, constants["BM"]), blocks(n, constants["BN"]))  # noqa: E731
        kernel[grid](a, b, *scales, added, out, activation=activation_of(activation))
    return out


def _scale(scale: Any, name: str, size: int) -> np.ndarray:
    """Scales as f32, one for each of `size` rows or columns."""
    held = array(np.asarray(scale, np.float32), name)
    held = np.full(size, held) if held.ndim == 0 else held
    shaped(held, name, (size,))
    return held
