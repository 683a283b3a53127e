"""Block quantisation (GGML): products with matrices of 4 to 8 bits, dequantised in the kernel that multiplies them.

A matrix [N, K] is cut into blocks of adjacent elements of a row. Element = code · scale + low, with one scale and
one low value (or none) for each block, computed in f32.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from tessera.core.errors import DTypeError, ShapeError, library_caller_location
from tessera.core.types import TensorType, as_dtype, f32, int8, uint8
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.tensor import Tensor, as_tensor
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import bitwise_and, shift_right
from tessera.ops.tensor.reduce import sum as sum_
from tessera.ops.tensor.shape import concatenate, expand_dims, gather, permute, reshape
from tessera.stdlib.quantised_kernels import (
    byte_product,
    byte_rows,
    gpu_byte_product,
    gpu_byte_rows,
    gpu_packed_product,
    gpu_packed_rows,
    packed_product,
    packed_rows,
)
from tessera.stdlib.routine import is_for_gpu

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


# From this many rows of x, blocks are decoded to matrices and multiplied; below, they are multiplied as they lie.
MANY_ROWS = 5
MANY_ROWS_OF_GPUS = 9
COLUMN_STEPS = (8, 16, 32)  # the rows of x that a program of a processor multiplies, from the fewest that hold all

# What one step of a program on a GPU decodes: rows of W, and blocks of each; None: what suits the target.
PRODUCT_STEP: ContextVar[tuple[int, int] | None] = ContextVar("product step", default=None)
GPU_STEP = (4, 16)
MOST_STEP_ROWS, LEAST_PROGRAMS = 16, 1024  # of W in a step, and of a launch with more than `GPU_STEP`


@contextmanager
def use_product_step(rows: int, blocks: int) -> Iterator[None]:
    """In the block, products take the kernels of GPUs on every target, with steps of so many rows of W, and blocks.

    By default the target decides: ptx takes the kernels of GPUs with `GPU_STEP`, all others those of processors.
    """
    token = PRODUCT_STEP.set((rows, blocks))
    try:
        yield
    finally:
        PRODUCT_STEP.reset(token)


def quantised_matmul(x: Any, matrix: QuantisedMatrix) -> Tensor:
    """x Wᵀ for x [..., K] of f32 and a quantised matrix W [N, K]: [..., N] of f32, summed in f32.

    The codes are read as they lie and dequantised in the kernel: few rows of x are multiplied by blocks of codes,
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
    if not m:
        return reshape(zeros((m, n)), shape=(*lead, n))
    step = _choose_gpu_step()
    if m == 1 and step is GPU_STEP:
        return reshape(multiply_row(reshape(x, shape=(k,)), matrix), shape=(*lead, n))
    rows = reshape(x, shape=(m, k))
    y = _multiply_on_processor(rows, matrix) if step is None else _multiply_on_gpu(rows, matrix, step)
    return reshape(y, shape=(*lead, n))


def _choose_gpu_step() -> tuple[int, int] | None:
    """What a step on a GPU decodes; None where the kernels of processors run."""
    return PRODUCT_STEP.get() or (GPU_STEP if is_for_gpu() else None)


def _multiply_on_processor(x: Tensor, matrix: QuantisedMatrix) -> Tensor:
    """The product of rows x [M, K] by the kernels of processors."""
    m, n = x.shape[0], matrix.shape[0]
    codes, blocks = _split_blocks(x, matrix)
    if m < MANY_ROWS:
        return launch(packed_rows if matrix.packed else byte_rows, lambda c: (tile.cdiv(n, c["BN"]),), blocks, codes,
                      matrix.scale, matrix.low, out=OutputMemory(TensorType((m, n), f32)))  # fmt: skip
    step = next((s for s in COLUMN_STEPS if m <= s), COLUMN_STEPS[-1])
    y = launch(
        packed_product if matrix.packed else byte_product,
        lambda c: (tile.cdiv(n, c["BN"]), tile.cdiv(m, c["BM"])), permute(x, axes=(1, 0)), codes, matrix.scale,
        matrix.low, out=OutputMemory(TensorType((n, m), f32)), BM=step,
    )  # fmt: skip
    return permute(y, axes=(1, 0))


def _multiply_on_gpu(x: Tensor, matrix: QuantisedMatrix, step: tuple[int, int]) -> Tensor:
    """The product of rows x [M, K] by the kernels of GPUs; `step` is what a step decodes where M is small."""
    m, n = x.shape[0], matrix.shape[0]
    codes, blocks = _split_blocks(x, matrix)
    out = OutputMemory(TensorType((m, n), f32))
    if m < MANY_ROWS_OF_GPUS:
        rows = step[0]
        while step is GPU_STEP and rows < MOST_STEP_ROWS and n // (2 * rows) >= LEAST_PROGRAMS:
            rows *= 2  # each thread loads more at once
        return launch(gpu_packed_rows if matrix.packed else gpu_byte_rows, lambda c: (tile.cdiv(n, c["BN"]),), blocks,
                      codes, matrix.scale, matrix.low, out=out, BN=rows, BB=step[1])  # fmt: skip
    return launch(gpu_packed_product if matrix.packed else gpu_byte_product,
                  lambda c: (tile.cdiv(m, c["BM"]), tile.cdiv(n, c["BN"])), blocks, codes, matrix.scale, matrix.low,
                  out=out)  # fmt: skip


def multiply_row(x: Tensor, matrix: QuantisedMatrix) -> Tensor:
    """The product of one row x [K] as sums over the blocks of each row of W: [N].

    The kernels of reductions have no loop for it, and take in what makes x and what follows.
    """
    n, count = matrix.scale.shape
    codes, scale = reshape(as_tensor(matrix.codes), shape=(n, count, -1)), cast(as_tensor(matrix.scale), dtype=f32)
    if matrix.packed:
        halves = reshape(x, shape=(count, 2, HALF))
        pairs = [
            (cast(bitwise_and(codes, 15), dtype=f32), halves[:, 0]),
            (cast(shift_right(codes, 4), dtype=f32), halves[:, 1]),
        ]
    else:
        pairs = [(cast(codes, dtype=f32), reshape(x, shape=(count, matrix.block)))]
    products = [c * expand_dims(v, 0) for c, v in pairs]
    found = sum_(functools.reduce(operator.add, products), axis=2) * scale
    if matrix.low is not None:
        totals = functools.reduce(operator.add, [sum_(v, axis=1) for _, v in pairs])
        found = found + cast(as_tensor(matrix.low), dtype=f32) * expand_dims(totals, 0)
    return sum_(found, axis=1)


def _split_blocks(x: Tensor, matrix: QuantisedMatrix) -> tuple[Any, Tensor]:
    """The codes, those of a byte as [N, blocks, block], and x as [M, blocks, 2, 16] or [M, blocks, block]."""
    m, (n, count) = x.shape[0], matrix.scale.shape
    if matrix.packed:
        return matrix.codes, reshape(x, shape=(m, count, 2, HALF))
    return matrix.codes.reshape((n, count, matrix.block)), reshape(x, shape=(m, count, matrix.block))


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
