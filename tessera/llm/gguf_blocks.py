"""GGUF block formats: the bytes of a tensor as codes, scales and low values, without a change of any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tessera.core.types import bf16
from tessera.stdlib.quantised import QuantisedMatrix

SUPER_BLOCK = 256  # elements of a block of the K formats


def _f16(column: np.ndarray) -> np.ndarray:
    """Pairs of bytes at the end of the last axis as f16."""
    return np.ascontiguousarray(column).view(np.float16)


def _blocks(data: np.ndarray, size: int) -> np.ndarray:
    """The bytes of each row as [rows, blocks, bytes of a block]."""
    return data.reshape(data.shape[0], -1, size)


def _read_q4_0(data: np.ndarray) -> QuantisedMatrix:
    blocks = _blocks(data, 18)
    scale = _f16(blocks[..., :2])[..., 0]
    # code - 8: the low value is exact in f32, as 8 is a power of two.
    return QuantisedMatrix(blocks[..., 2:].reshape(len(data), -1), scale, -8 * scale.astype(np.float32))


def _read_q4_1(data: np.ndarray) -> QuantisedMatrix:
    blocks = _blocks(data, 20)
    return QuantisedMatrix(
        blocks[..., 4:].reshape(len(data), -1), _f16(blocks[..., :2])[..., 0], _f16(blocks[..., 2:4])[..., 0]
    )


def _read_q8_0(data: np.ndarray) -> QuantisedMatrix:
    blocks = _blocks(data, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return QuantisedMatrix(codes.reshape(len(data), -1), _f16(blocks[..., :2])[..., 0])


def _read_k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale and the low value of each of the 8 parts of 32 elements of a block of Q4_K or Q5_K, [rows, parts].

    12 bytes hold 8 scales and 8 minima of 6 bits: bytes 0 to 7 their low bits and, in the upper two bits of each, the
    high bits of the last four, whose low four bits are in bytes 8 to 11.
    """
    d, dmin = (_f16(blocks[..., i : i + 2]).astype(np.float32) for i in (0, 2))
    a, b, c = (blocks[..., 4 + i : 8 + i] for i in (0, 4, 8))
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=-1)
    least = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=-1)
    rows = len(blocks)
    return (d * scale.astype(np.float32)).reshape(rows, -1), -(dmin * least.astype(np.float32)).reshape(rows, -1)


def _split_halves(qs: np.ndarray) -> np.ndarray:
    """The 256 codes of 128 bytes: of each 32 bytes first the low halves, then the high ones; [rows, blocks, 8, 32]."""
    groups = qs.reshape(*qs.shape[:-1], 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=-2).reshape(*qs.shape[:-1], 8, 32)


def _read_q4_k(data: np.ndarray) -> QuantisedMatrix:
    blocks = _blocks(data, 144)
    codes = _split_halves(blocks[..., 16:])
    packed = codes[..., :16] | (codes[..., 16:] << 4)
    return QuantisedMatrix(packed.reshape(len(data), -1), *_read_k_scales(blocks))


def _read_q5_k(data: np.ndarray) -> QuantisedMatrix:
    blocks = _blocks(data, 176)
    high = (blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _split_halves(blocks[..., 48:]) | (high << 4)
    return QuantisedMatrix(codes.reshape(len(data), -1), *_read_k_scales(blocks))


def _read_q6_k(data: np.ndarray) -> QuantisedMatrix:
    blocks = _blocks(data, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*blocks.shape[:-1], 2, 4, 32)
    high = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = ((low | (high << 4)).astype(np.int8) - np.int8(32)).reshape(len(data), -1)
    parts = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    scale = _f16(blocks[..., 208:]).astype(np.float32) * parts
    return QuantisedMatrix(codes, scale.reshape(len(data), -1))


READERS: dict[str, Callable[[np.ndarray], Any]] = {
    "F32": lambda data: np.asarray(data, np.float32),
    "F16": lambda data: np.asarray(data, np.float16),
    "BF16": lambda data: np.ascontiguousarray(data).view(bf16.numpy),
    "Q4_0": _read_q4_0,
    "Q4_1": _read_q4_1,
    "Q8_0": _read_q8_0,
    "Q4_K": _read_q4_k,
    "Q5_K": _read_q5_k,
    "Q6_K": _read_q6_k,
}


def read_blocks(kind: str, data: np.ndarray) -> Any:
    """A tensor of a GGUF file: an array for f32, f16 and bf16, a `QuantisedMatrix` for the quantised formats."""
    return READERS[kind](data)
