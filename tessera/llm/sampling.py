"""Sampling: the next token from logits, greedy or drawn with temperature, top-k and top-p (Holtzman et al. 2020).

The random numbers are counter-based: request seed, position and token number decide them (Philox), so that a request
draws the same tokens alone, in a batch and with a draft model. The draw is the Gumbel-max trick.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, user_location
from tessera.core.types import f32, int32, int64
from tessera.ir.numerics.conversion import philox_4x32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.bits import bitcast
from tessera.ops.tensor.elementwise import equal, greater_equal, log, maximum, where
from tessera.ops.tensor.nn import softmax
from tessera.ops.tensor.reduce import argmax, sum
from tessera.ops.tensor.shape import expand_dims, iota, reshape, stack
from tessera.transforms.flow.control_flow import fori_loop

LOW_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    `temperature` 0 is greedy: the most probable token. `top_k` keeps the k most probable tokens (0: all), then `top_p`
    the fewest of them that together have this probability (1: all). `seed` decides the random numbers.

    >>> Sampling(temperature=0.8, top_p=0.95, seed=7).greedy
    False

    Raises:
        ArgumentError: a number is out of its range, or NaN.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, Any, Callable[[Any], bool], str], ...] = (
            ("temperature", (int, float), lambda x: 0 <= x < math.inf, "a finite number, 0 or more"),
            ("top_k", int, lambda x: x >= 0, "an integer, 0 or more"),
            ("top_p", (int, float), lambda x: 0 < x <= 1, "a number in (0, 1]"),
            ("seed", int, lambda x: -(2**63) <= x < 2**63, "an integer of 64 bits"),
        )
        for name, kinds, fits, expected in checks:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not fits(value):
                raise ArgumentError(
                    f"sampling with {name} {value!r}", location=user_location(), expected=expected, received=repr(value)
                )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature == 0


GREEDY = Sampling()


def choose_greedily(logits: Tensor) -> Tensor:
    """The most probable tokens: int32 of the shape of the logits [..., V] without the last axis."""
    return cast(argmax(logits, axis=-1), dtype=int32)


def draw_tokens(
    logits: Tensor, seeds: Tensor, places: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, *, cut: bool
) -> Tensor:
    """Tokens [B] drawn from logits [B, V] for the positions `places`; a temperature of 0 is greedy.

    All other operands are [B]: a seed of int64, a position, and the numbers of `Sampling`. Without `cut` the numbers
    top_k and top_p are not used.
    """
    warm = expand_dims(where(equal(temperature, 0.0), 1.0, temperature), -1)
    scaled = logits / warm
    noise = make_gumbel_noise(seeds, places, int(logits.shape[-1]))
    if cut:
        noise = where(find_kept(scaled, top_k, top_p), noise, -math.inf)
    drawn = argmax(scaled + noise, axis=-1)
    return cast(where(equal(temperature, 0.0), argmax(logits, axis=-1), drawn), dtype=int32)


def make_gumbel_noise(seeds: Tensor, places: Tensor, count: int) -> Tensor:
    """Standard Gumbel numbers [B, count]: those of token i depend on the seed, the position and i alone."""
    blocks = -(-count // 4)
    zero = iota(shape=(1, blocks), dtype=int64) * 0
    counter = (iota(shape=(1, blocks), dtype=int64), zero + expand_dims(cast(places, dtype=int64), -1), zero, zero)
    seeds = cast(seeds, dtype=int64)
    low, high = (expand_dims(s & LOW_32_BITS, -1) for s in (seeds, seeds >> 32))
    words = stack(philox_4x32(counter, (low, high)), axis=-1)
    flat = reshape(words, shape=(words.shape[0], 4 * blocks))[:, :count]
    uniform = (cast(flat >> 9, dtype=f32) + 0.5) * 2.0**-23  # in (0, 1), without 0 and 1
    return -log(-log(uniform))


def find_kept(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The mask of the tokens that top-k and then top-p keep; tokens of equal probability are kept together."""
    p = softmax(scaled, axis=-1)
    limit = where(equal(top_k, 0), p.shape[-1], top_k)
    least = find_threshold(lambda kept: sum(cast(kept, dtype=int32), axis=-1) >= limit, p)
    p = where(greater_equal(p, expand_dims(least, -1)), p, 0.0)
    p = p / sum(p, axis=-1, keepdims=True)
    least = find_threshold(lambda kept: greater_equal(sum(where(kept, p, 0.0), axis=-1), top_p), p)
    # Rounding may leave a sum below top_p however small the threshold is: then all tokens of top-k stay.
    return greater_equal(p, expand_dims(maximum(least, np.finfo(np.float32).tiny), -1))


def find_threshold(suffices: Callable[[Tensor], Tensor], p: Tensor) -> Tensor:
    """The largest threshold [B] such that the elements p >= threshold suffice; 0 where no threshold does.

    `suffices(mask)` is [B], and monotone. Floats of at least 0 are in the order of their bits, which a bisection finds.
    """
    shape = p.shape[:1]
    low = iota(shape=shape, dtype=int32) * 0
    high = low + 0x3F800001  # the bits after those of 1.0

    def halve(_: Any, bounds: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        low, high = bounds
        middle = low + (high - low) // 2
        kept = greater_equal(p, expand_dims(bitcast(middle, f32), -1))
        found = suffices(kept)
        return where(found, middle, low), where(found, high, middle)

    return bitcast(fori_loop(0, 30, halve, (low, high))[0], f32)
