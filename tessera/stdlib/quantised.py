"""Block quantisation (GGML): products with matrices of 4 to 8 bits, dequantised in the kernel that multiplies them.

A matrix [N, K] is cut into blocks of adjacent elements of a row. Element = code · scale + low, with one scale and
one low value (or none) for each block, computed in f32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from tessera.core.errors import DTypeError, ShapeError, library_caller_location
from tessera.core.types import TensorType, as_dtype, f32, int8, uint8
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import bitwise_and, shift_right
from tessera.ops.tensor.shape import concatenate, expand_dims, gather, reshape

# mypy: disable-error-code="operator, attr-defined, index"

PACKED_BLOCK = 32  # elements of a block whose codes lie two in a byte
HALF = PACKED_BLOCK // 2


class QuantisedMatrix(NamedTuple):
    """A matrix [N, K] in blocks: element = code · scale + low; a container of tensors for `jit` and its like.

    `codes` are int8 or uint8 [N, K], or uint8 [N, K / 2] with 16 bytes for each block of 32: byte j then holds the code
    of element j in its low half and that of element 16 + j in its high half (GGML's Q4_0 and Q4_1). `scale` and `low`
    are [N, K / block] of f16, bf16 or f32; `low` None means 0. uint8 codes in blocks of 16 are always two in a byte.
    """

    codes: Any
    scale: Any
    low: Any = None

    @property
    def packed(self) -> bool:
        """Whether a byte holds two codes."""
        return as_dtype(self.codes.dtype) == uint8 and self.codes.shape[-1] == self.scale.shape[-1] * HALF

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.codes.shape[0], self.codes.shape[-1] * (2 if self.packed else 1)

    @property
    def block(self) -> int:
        """The number of elements that share a scale."""
        return self.shape[1] // self.scale.shape[-1]


def check_matrix(matrix: QuantisedMatrix) -> None:
    """Refuse a matrix whose parts do not fit.

    Raises:
        ShapeError, DTypeError: they do not.
    """
    where = library_caller_location()
    parts = [p for p in (matrix.scale, matrix.low) if p is not None]
    rows, bytes_ = matrix.codes.shape if len(matrix.codes.shape) == 2 else (-1, 0)
    blocks = matrix.scale.shape[-1] if len(matrix.scale.shape) == 2 else 0
    if rows < 1 or not blocks or any(tuple(p.shape) != (rows, blocks) for p in parts) or bytes_ % blocks:
        raise ShapeError(
            "the parts of a quantised matrix do not fit", location=where,
            expected="codes [N, K] or [N, K / 2], scale and low [N, K / block]",
            received=", ".join(str(tuple(p.shape)) for p in (matrix.codes, *parts)),
        )  # fmt: skip
    if as_dtype(matrix.codes.dtype) not in (int8, uint8):
        raise DTypeError(
            "the codes of a quantised matrix have another type", location=where, expected="int8 or uint8",
            received=str(as_dtype(matrix.codes.dtype)),
        )  # fmt: skip
    for part in parts:
        if not as_dtype(part.dtype).is_float:
            raise DTypeError(
                "the scales of a quantised matrix are no floats", location=where, received=str(as_dtype(part.dtype))
            )


@kernel
def packed_rows(x, codes, scale, low, out, *, BN: int = 32, BB: int = 1):
    """out[m] = W x[m] for few rows m: the grid is (ceil(N / BN),); x is [M, blocks, 2, 16], codes [N, 16 · blocks].

    Each step decodes BB blocks of BN rows once, and multiplies them with all rows of x.
    """
    n = tile.program_id(0) * BN
    acc = tile.zeros((x.shape[0], BN, BB, 16), f32)
    for b in tile.range(0, x.shape[1], BB):
        c = tile.reshape(tile.load(codes[n : n + BN, b * 16 : (b + BB) * 16], edge="clip"), (BN, BB, 16))
        s = tile.cast(tile.load(scale[n : n + BN, b : b + BB], edge="clip"), f32)[None, :, :, None]
        first = tile.load(x[0 : x.shape[0], b : b + BB, 0, 0:16], edge="clip")[:, None, :, :]
        second = tile.load(x[0 : x.shape[0], b : b + BB, 1, 0:16], edge="clip")[:, None, :, :]
        t = tile.cast(c & 15, f32)[None] * first + tile.cast(c >> 4, f32)[None] * second
        if low is None:
            acc += t * s
        else:
            below = tile.cast(tile.load(low[n : n + BN, b : b + BB], edge="clip"), f32)[None, :, :, None]
            acc += t * s + below * (first + second)
    y = tile.sum(tile.sum(acc, axis=2), axis=2)
    tile.store(out[0 : x.shape[0], n : n + BN], tile.cast(y, out.dtype), edge="clip")


@kernel
def byte_rows(x, codes, scale, low, out, *, BN: int = 32, BB: int = 1):
    """As `packed_rows` for codes of one byte: x is [M, blocks, block], codes [N, blocks, block]."""
    n = tile.program_id(0) * BN
    size = x.shape[2]
    acc = tile.zeros((x.shape[0], BN, BB, size), f32)
    for b in tile.range(0, x.shape[1], BB):
        c = tile.load(codes[n : n + BN, b : b + BB, 0:size], edge="clip")
        s = tile.cast(tile.load(scale[n : n + BN, b : b + BB], edge="clip"), f32)[None, :, :, None]
        v = tile.load(x[0 : x.shape[0], b : b + BB, 0:size], edge="clip")[:, None, :, :]
        if low is None:
            acc += tile.cast(c, f32)[None] * v * s
        else:
            below = tile.cast(tile.load(low[n : n + BN, b : b + BB], edge="clip"), f32)[None, :, :, None]
            acc += (tile.cast(c, f32)[None] * s + below) * v
    y = tile.sum(tile.sum(acc, axis=2), axis=2)
    tile.store(out[0 : x.shape[0], n : n + BN], tile.cast(y, out.dtype), edge="clip")


@kernel
def packed_product(x, codes, scale, low, out, *, BM: int = 64, BN: int = 64, BB: int = 4):
    """out = x Wᵀ for many rows: the grid is (ceil(M / BM), ceil(N / BN)); operands as for `packed_rows`.

    Each step decodes BB blocks of BN rows to f32, and multiplies them as two matrices, of the low and the high halves.
    """
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), f32)
    for b in tile.range(0, x.shape[1], BB):
        c = tile.reshape(tile.load(codes[n : n + BN, b * 16 : (b + BB) * 16], edge="clip"), (BN, BB, 16))
        s = tile.cast(tile.load(scale[n : n + BN, b : b + BB], edge="clip"), f32)[:, :, None]
        below: Any = 0.0
        if low is not None:
            below = tile.cast(tile.load(low[n : n + BN, b : b + BB], edge="clip"), f32)[:, :, None]
        first = tile.reshape(tile.cast(c & 15, f32) * s + below, (BN, BB * 16))
        second = tile.reshape(tile.cast(c >> 4, f32) * s + below, (BN, BB * 16))
        left = tile.reshape(tile.load(x[m : m + BM, b : b + BB, 0, 0:16], edge="clip"), (BM, BB * 16))
        right = tile.reshape(tile.load(x[m : m + BM, b : b + BB, 1, 0:16], edge="clip"), (BM, BB * 16))
        acc += tile.dot(left, tile.transpose(first)) + tile.dot(right, tile.transpose(second))
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


@kernel
def byte_product(x, codes, scale, low, out, *, BM: int = 64, BN: int = 64, BB: int = 4):
    """As `packed_product` for codes of one byte; operands as for `byte_rows`."""
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    size = x.shape[2]
    acc = tile.zeros((BM, BN), f32)
    for b in tile.range(0, x.shape[1], BB):
        c = tile.cast(tile.load(codes[n : n + BN, b : b + BB, 0:size], edge="clip"), f32)
        w = c * tile.cast(tile.load(scale[n : n + BN, b : b + BB], edge="clip"), f32)[:, :, None]
        if low is not None:
            w = w + tile.cast(tile.load(low[n : n + BN, b : b + BB], edge="clip"), f32)[:, :, None]
        left = tile.reshape(tile.load(x[m : m + BM, b : b + BB, 0:size], edge="clip"), (BM, BB * size))
        acc += tile.dot(left, tile.transpose(tile.reshape(w, (BN, BB * size))))
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


# From this many rows of x, blocks are decoded to matrices and multiplied; below, they are multiplied as they lie.
MANY_ROWS = 9


# What one step of a program decodes: rows of W, and blocks of each; None: what suits processors.
PRODUCT_STEP: ContextVar[tuple[int, int] | None] = ContextVar("product step", default=None)
GPU_STEP = (4, 16)
CPU_STEP = (8, 1)
STREAMED_STEP = (1, 2)  # for matrices that come from memory: row by row, as their bytes lie
STREAMED_BYTES = 1 << 22


@contextmanager
def use_product_step(rows: int, blocks: int) -> Iterator[None]:
    """In the block, products with few rows of x decode so many rows of W, and blocks of each, at a time.

    The default, `CPU_STEP` or `STREAMED_STEP`, suits processors; `GPU_STEP` suits GPUs.
    """
    token = PRODUCT_STEP.set((rows, blocks))
    try:
        yield
    finally:
        PRODUCT_STEP.reset(token)


def quantised_matmul(x: Any, matrix: QuantisedMatrix) -> Tensor:
    """x Wᵀ for x [..., K] of f32 and a quantised matrix W [N, K]: [..., N] of f32, summed in f32.

    The codes are read as they lie and dequantised in the kernel: up to 8 rows of x are multiplied by blocks of codes,
    more by decoded blocks as matrices.

    Raises:
        DTypeError, ShapeError: the operands do not fit.

    >>> import numpy as np
    >>> w = QuantisedMatrix(np.full((2, 16), 0x21, np.uint8), np.float16([[1], [2]]), np.float16([[0], [0.5]]))
    >>> quantised_matmul(np.ones((1, 32), np.float32), w)
    Tensor([[ 48., 112.]], f32)
    """
    x = as_tensor(x)
    check_matrix(matrix)
    n, k = matrix.shape
    if x.dtype != f32:
        raise DTypeError("a quantised product takes f32", location=library_caller_location(), received=str(x.type),
                         expected="f32", suggestion="x.to(ts.f32)")  # fmt: skip
    if not x.ndim or x.shape[-1] != k:
        raise ShapeError("the operands of a quantised product do not fit", location=library_caller_location(),
                         expected=f"x [..., {k}]", received=str(x.type))  # fmt: skip
    lead, m = x.shape[:-1], math.prod(x.shape[:-1])
    out = OutputMemory(TensorType((m, n), f32))
    count = matrix.scale.shape[-1]
    if matrix.packed:
        x, codes, few, many = reshape(x, shape=(m, count, 2, HALF)), matrix.codes, packed_rows, packed_product
    else:
        shape = (n, count, matrix.block)
        x, codes, few, many = (
            reshape(x, shape=(m, count, matrix.block)),
            matrix.codes.reshape(shape),
            byte_rows,
            byte_product,
        )
    if not m:
        return reshape(zeros((m, n)), shape=(*lead, n))
    if m < MANY_ROWS:
        rows, blocks = PRODUCT_STEP.get() or _choose_step(matrix)
        grid: Any = lambda c: (tile.cdiv(n, c["BN"]),)  # noqa: E731
        y = launch(few, grid, x, codes, matrix.scale, matrix.low, out=out, BN=rows, BB=blocks)
    else:
        grid = lambda c: (tile.cdiv(m, c["BM"]), tile.cdiv(n, c["BN"]))  # noqa: E731
        y = launch(many, grid, x, codes, matrix.scale, matrix.low, out=out)
    return reshape(y, shape=(*lead, n))


def _choose_step(matrix: QuantisedMatrix) -> tuple[int, int]:
    """What a step decodes on a processor. Codes of a byte are limited by memory, packed ones by their decoding."""
    streamed = not matrix.packed and math.prod(matrix.codes.shape) >= STREAMED_BYTES
    return STREAMED_STEP if streamed and matrix.scale.shape[-1] % STREAMED_STEP[1] == 0 else CPU_STEP


def dequantise(matrix: QuantisedMatrix) -> Tensor:
    """The elements of a quantised matrix: [N, K] of f32.

    >>> import numpy as np
    >>> dequantise(QuantisedMatrix(np.int8([[1, -2]]), np.float32([[0.5]])))
    Tensor([[ 0.5, -1. ]], f32)
    """
    check_matrix(matrix)
    return _decode(*(None if p is None else as_tensor(p) for p in matrix), shape=matrix.shape, packed=matrix.packed)


def take_rows(matrix: QuantisedMatrix, indices: Any) -> Tensor:
    """The rows of a quantised matrix at integer indices, dequantised: [..., K] of f32 (an embedding)."""
    check_matrix(matrix)
    indices = as_tensor(indices)
    parts = [None if p is None else gather(as_tensor(p), reshape(indices, shape=(-1,)), axis=0) for p in matrix]
    count, k = math.prod(indices.shape), matrix.shape[1]
    rows = _decode(*parts, shape=(count, k), packed=matrix.packed)
    return reshape(rows, shape=(*indices.shape, k))


def _decode(codes: Any, scale: Any, low: Any, *, shape: tuple[int, int], packed: bool) -> Tensor:
    """Codes, scales and low values of some rows as elements."""
    n, count = scale.shape
    if packed:
        halves = [bitwise_and(codes, 15), shift_right(codes, 4)]
        codes = concatenate([reshape(h, shape=(n, count, 1, HALF)) for h in halves], axis=2)
    found = cast(reshape(codes, shape=(n, count, shape[1] // count)), dtype=f32)
    found = found * expand_dims(cast(scale, dtype=f32), -1)
    found = found if low is None else found + expand_dims(cast(low, dtype=f32), -1)
    return reshape(found, shape=shape)
