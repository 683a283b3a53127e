"""Row normalisation: layer normalisation, RMS normalisation and softmax over the last axis."""

# mypy: disable-error-code="operator, attr-defined, index"

import math
from typing import Any

import numpy as np

from tessera.core.symbolic_dim import ceil_divide
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.tile_api import tile
from tessera.frontend.kernel.tile_api.online_softmax import finite_maximum
from tessera.stdlib.routine import (
    check_array,
    check_same_dtype,
    check_shape,
    compute,
    compute_dtype,
    flatten_rows,
    routine,
)


@kernel
def normalize_rows(x, weight, bias, out, *, eps: float, center: bool, BM: int = 8, BN: int = 512):
    """out = (x - mean) / sqrt(mean square + eps) · weight + bias for each row, on the grid (ceil(rows / BM),).

    x and out are [R, C]; weight and bias are [C] or None; without `center` the mean is taken as 0. The sums are
    computed in f32 (f64 for f64) in blocks of BN columns, the mean before the squares, to avoid cancellation.
    """
    C = x.shape[1]
    first, dtype = tile.program_id(0) * BM, compute_dtype(x.dtype)
    mean = tile.zeros((BM,), dtype)
    if center:
        for start in tile.range(0, C, BN):
            mean += tile.sum(load_block(x, first, start, BM, BN, dtype), axis=1)
        mean = mean / C
    square = tile.zeros((BM,), dtype)
    for start in tile.range(0, C, BN):
        inside = start + tile.arange(0, BN) < C
        d = tile.where(inside[None, :], load_block(x, first, start, BM, BN, dtype) - mean[:, None], 0.0)
        square += tile.sum(d * d, axis=1)
    scale = tile.rsqrt(square / C + eps)
    for start in tile.range(0, C, BN):
        y = (load_block(x, first, start, BM, BN, dtype) - mean[:, None]) * scale[:, None]
        if weight is not None:
            y = y * tile.cast(tile.load(weight[start : start + BN], edge="clip"), dtype)[None, :]
        if bias is not None:
            y = y + tile.cast(tile.load(bias[start : start + BN], edge="clip"), dtype)[None, :]
        tile.store(out[first : first + BM, start : start + BN], tile.cast(y, out.dtype), edge="clip")


def load_block(x, first, start, BM, BN, dtype):
    """A block of a matrix in the compute type; zeros outside."""
    return tile.cast(tile.load(x[first : first + BM, start : start + BN], edge="clip"), dtype)


@routine(normalize_rows)
def efficient_layernorm(kernel: Any, x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> np.ndarray:
    """Layer normalisation over the last axis (Ba, Kiros and Hinton 2016), of the type and shape of `x`.

    `x` is [..., C] of a float type, `weight` and `bias` are [C] of the same type, or None. The variance is
    the mean of squared distances from the mean (no correction).

    Raises:
        DTypeError: an argument does not have the float type of `x`.
        ShapeError: `weight` or `bias` is not [C].

    >>> efficient_layernorm(np.array([[1.0, 3.0, 1.0, 3.0]], np.float32), eps=0.0)
    array([[-1.,  1., -1.,  1.]], dtype=float32)
    """
    return _launch_normalisation(kernel, x, weight, bias, eps, center=True)


@routine(normalize_rows)
def rms_norm(kernel: Any, x: Any, weight: Any = None, *, eps: float = 1e-5) -> np.ndarray:
    """Root mean square normalisation over the last axis (Zhang and Sennrich 2019), of the type and shape of `x`.

    `x` is [..., C] of a float type, `weight` is [C] of the same type, or None.

    Raises:
        DTypeError: an argument does not have the float type of `x`.
        ShapeError: `weight` is not [C].

    >>> rms_norm(np.array([3.0, 4.0, 0.0, 0.0], np.float32), eps=0.0)
    array([1.2, 1.6, 0. , 0. ], dtype=float32)
    """
    return _launch_normalisation(kernel, x, weight, None, eps, center=False)


def _launch_normalisation(kernel: Any, x: Any, weight: Any, bias: Any, eps: float, center: bool) -> np.ndarray:
    x = check_array(x, "x")
    weight, bias = (None if p is None else check_array(p, n) for p, n in ((weight, "weight"), (bias, "bias")))
    check_same_dtype(x=x, weight=weight, bias=bias)
    rows = flatten_rows(x)
    check_shape(weight, "weight", rows.shape[1:])
    check_shape(bias, "bias", rows.shape[1:])
    out = compute(kernel, _row_grid(rows), rows.shape, x.dtype, rows, weight, bias, eps=float(eps), center=center)
    return out.reshape(x.shape)


def _row_grid(rows: Any) -> Any:
    return lambda constants: (ceil_divide(rows.shape[0], constants["BM"]),)


@kernel
def softmax_rows(x, out, *, BM: int = 8, BN: int = 512):
    """out = softmax of each row of x [R, C], on the grid (ceil(R / BM),): one pass for the sums, one to write."""
    C = x.shape[1]
    first, dtype = tile.program_id(0) * BM, compute_dtype(x.dtype)
    m, l = tile.full((BM,), -math.inf, dtype), tile.zeros((BM,), dtype)
    for start in tile.range(0, C, BN):
        inside = start + tile.arange(0, BN) < C
        values = tile.where(inside[None, :], load_block(x, first, start, BM, BN, dtype), -math.inf)
        high = tile.maximum(m, tile.max(values, axis=1))
        # All values so far are minus infinity: avoid its difference with itself.
        l = l * tile.exp(m - finite_maximum(high)) + tile.sum(tile.exp(values - finite_maximum(high)[:, None]), axis=1)
        m = high
    for start in tile.range(0, C, BN):
        y = tile.exp(load_block(x, first, start, BM, BN, dtype) - m[:, None]) / l[:, None]
        tile.store(out[first : first + BM, start : start + BN], tile.cast(y, out.dtype), edge="clip")


@routine(softmax_rows)
def stable_softmax(kernel: Any, x: Any) -> np.ndarray:
    """Softmax over the last axis, relative to the maximum (Milakov and Gimelshein 2018).

    `x` is [..., C] of a float type; the result has its type and shape. A row of minus infinities gives NaN.

    Raises:
        DTypeError: `x` does not have a float type.

    >>> stable_softmax(np.array([1000.0, 1000.0, -np.inf], np.float32))
    array([0.5, 0.5, 0. ], dtype=float32)
    """
    x = check_array(x, "x")
    rows = flatten_rows(x)
    return compute(kernel, _row_grid(rows), rows.shape, x.dtype, rows).reshape(x.shape)
