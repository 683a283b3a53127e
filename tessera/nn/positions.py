"""Positions: rotary embeddings (RoPE), ALiBi biases, and sinusoidal and learned position embeddings."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import f32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn import initialisation as init
from tessera.nn.linear import check_count
from tessera.nn.module import Module, Parameter
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import cos, sin
from tessera.ops.tensor.shape import concatenate, expand_dims, iota, reshape, slice_, stack


def rotate_positions(x: Any, positions: Any, base: float = 10000.0, interleaved: bool = False) -> Tensor:
    """Rotary position embedding of `x` [..., S, D], D even: pairs of features turn by position / base^(2i/D).

    `positions` are integers [S], or broadcast to x's axes before D. A pair is (i, i + D/2), as in Llama, or, where
    `interleaved`, (2i, 2i + 1), as in GPT-J (Su et al. 2021).

    >>> rotate_positions([[1.0, 0.0]], Tensor([0]))
    Tensor([[1., 0.]], f32)

    Raises:
        ShapeError: D is odd.
    """
    x = as_tensor(x)
    size = x.shape[-1] if x.ndim else 1
    if size % 2:
        raise ShapeError(
            "rotary positions need pairs of features", location=user_location(), expected="an even last axis",
            received=str(x.type),
        )  # fmt: skip
    steps = Tensor((float(base) ** (-np.arange(0, size, 2, dtype=np.float64) / size)).astype(np.float32))
    angle = expand_dims(cast(as_tensor(positions), dtype=f32), -1) * steps
    turn_cos, turn_sin = (cast(f(angle), dtype=x.dtype) for f in (cos, sin))
    if interleaved:
        pairs = reshape(x, shape=(*x.shape[:-1], size // 2, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        return reshape(stack([a * turn_cos - b * turn_sin, b * turn_cos + a * turn_sin], axis=-1), shape=x.shape)
    a, b = x[..., : size // 2], x[..., size // 2 :]
    return concatenate([a * turn_cos - b * turn_sin, b * turn_cos + a * turn_sin], axis=-1)


class RotaryEmbedding(Module):
    """Rotary positions as a module: see `rotate_positions`. `offset` is the position of the first row.

    >>> RotaryEmbedding(4)(init.uniform((2, 3, 4))).shape
    (2, 3, 4)
    """

    def __init__(self, size: int, base: float = 10000.0, interleaved: bool = False) -> None:
        if check_count("size", size) % 2:
            raise ArgumentError(f"size is {size}", location=user_location(), expected="an even number")
        self.size, self.base, self.interleaved = size, base, interleaved

    def forward(self, x: Any, offset: Any = 0) -> Tensor:
        """`x` [..., S, size], turned."""
        x = as_tensor(x)
        return rotate_positions(x, iota(shape=(x.shape[-2],)) + offset, self.base, self.interleaved)


def alibi_slopes(heads: int) -> Tensor:
    """The slope of each head (Press, Smith and Lewis 2022): 2^(-8 i / n) for n heads, n a power of two.

    For other numbers, the slopes of the next power below and every second of the next above.

    >>> alibi_slopes(2)
    Tensor([0.0625    , 0.00390625], f32)
    """

    def list_slopes(count: int) -> list[float]:
        start = 2.0 ** (-8.0 / count)
        return [start ** (i + 1) for i in range(count)]

    power = 1 << (check_count("heads", heads).bit_length() - 1)
    slopes = list_slopes(power) + list_slopes(2 * power)[::2][: heads - power]
    return Tensor(np.array(slopes, np.float32))


def alibi_bias(heads: int, queries: int, keys: int | None = None) -> Tensor:
    """The bias [heads, queries, keys] of ALiBi for causal attention: slope · (key - query), the last query at the end.

    It is the `mask` of `ts.scaled_dot_product_attention`, together with `causal=True`.

    >>> alibi_bias(1, 2)
    Tensor([[[ 0.        ,  0.00390625],
             [-0.00390625,  0.        ]]], f32)
    """
    keys = queries if keys is None else keys
    rows = iota(shape=(queries, keys), axis=0) + (keys - queries)
    distance = cast(iota(shape=(queries, keys), axis=1) - rows, dtype=f32)
    return reshape(alibi_slopes(heads), shape=(heads, 1, 1)) * distance


class SinusoidalPositions(Module):
    """Adds sines and cosines of positions to [..., S, size] (Vaswani et al. 2017).

    >>> SinusoidalPositions(4)([[0.0, 0.0, 0.0, 0.0]])
    Tensor([[0., 1., 0., 1.]], f32)
    """

    def __init__(self, size: int) -> None:
        if check_count("size", size) % 2:
            raise ArgumentError(f"size is {size}", location=user_location(), expected="an even number")
        self.size = size

    def forward(self, x: Any) -> Tensor:
        """`x` plus the positions."""
        x = as_tensor(x)
        rates = np.exp(np.arange(0, self.size, 2) * (-math.log(10000.0) / self.size))
        angles = np.arange(x.shape[-2])[:, None] * rates
        table = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(x.shape[-2], self.size)
        return x + Tensor(table.astype(np.float32)).to(x.dtype)


class LearnedPositions(Module):
    """Adds a trained vector for each position to [..., S, size], S up to `length`.

    >>> LearnedPositions(8, 4)(init.uniform((2, 3, 4))).shape
    (2, 3, 4)

    Raises:
        ShapeError: the sequence is longer than `length`.
    """

    weight: Any

    def __init__(self, length: int, size: int, dtype: Any = f32) -> None:
        self.length = check_count("length", length)
        self.weight = Parameter(init.normal((length, check_count("size", size)), std=0.02, dtype=dtype))

    def forward(self, x: Any, offset: int = 0) -> Tensor:
        """`x` plus the vectors of its positions."""
        x = as_tensor(x)
        end = offset + x.shape[-2]
        if end > self.length:
            raise ShapeError(
                "the sequence is too long", location=user_location(), expected=f"at most {self.length} positions",
                received=str(end),
            )  # fmt: skip
        return x + slice_(self.weight, start=(offset, 0), stop=(end, self.weight.shape[1]))
