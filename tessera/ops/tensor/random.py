"""Random tensors from a counter-based generator (Philox): the same seed and position give the same bits at every
level."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.device import check_device
from tessera.core.effects import current_effect_scope, perform_effects
from tessera.core.errors import ArgumentError, DTypeError, user_location
from tessera.core.shapes import as_size
from tessera.core.types import DType, as_dtype, f32, f64, int32, int64
from tessera.ir.numerics.philox import LOW_32_BITS, philox_4x32
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.argument_checks import check_arguments, parse_shape
from tessera.ops.tensor.basic import cast, full
from tessera.ops.tensor.elementwise import cos, less, log, sqrt
from tessera.ops.tensor.shape import concatenate, count_elements, expand_dims, iota, reshape, slice_
from tessera.ops.tensor.sorting import argsort

UNIT_24, UNIT_53 = 2.0**-24, 2.0**-53


class Generator:
    """A stream of random numbers: a seed and a position.

    Draws made while tracing are fixed by the trace; to draw anew on each call, pass the seed as an argument and make
    the generator inside: `Generator(seed)` takes an integer tensor too.

    >>> Generator(7).words(4).tolist() == Generator(7).words(4).tolist()
    True
    """

    def __init__(self, seed: Any = 0) -> None:
        self.seed = seed
        self.offset = 0
        self._frame = current_effect_scope()

    def words(self, amount: int) -> Tensor:
        """The next `amount` random 32-bit words, as int64."""
        if current_effect_scope() is not self._frame:  # a generator local to the traced function has no effect outside
            perform_effects(("random",))
        blocks = -(-amount // 4)
        counter = iota(shape=(blocks,)) + self.offset
        self.offset += blocks
        zero = full(shape=(blocks,), value=0, dtype=int64)
        seed = self.seed if isinstance(self.seed, Tensor) else int(self.seed)
        found = philox_4x32(
            (counter & LOW_32_BITS, counter >> 32, zero, zero), (seed & LOW_32_BITS, (seed >> 32) & LOW_32_BITS)
        )
        flat = reshape(concatenate([expand_dims(w, 1) for w in found], axis=1), shape=(4 * blocks,))
        return flat if 4 * blocks == amount else slice_(flat, start=(0,), stop=(amount,))

    def uniform(self, amount: int, dtype: DType) -> Tensor:
        """The next `amount` multiples of 2^-24 (f64: 2^-53) in [0, 1)."""
        if dtype is not f64:
            return cast(self.words(amount) >> 8, dtype=f32) * UNIT_24
        words = reshape(self.words(2 * amount), shape=(amount, 2))
        high, low = (reshape(slice_(words, start=(0, i), stop=(amount, i + 1)), shape=(amount,)) for i in (0, 1))
        return cast((high >> 5) * 2**26 + (low >> 6), dtype=f64) * UNIT_53


DEFAULT_GENERATOR = Generator(0)


@check_arguments
def manual_seed(seed: int) -> Generator:
    """Restart the default generator from `seed`; returns it."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise ArgumentError("a seed is an integer", location=user_location(), received=repr(seed))
    DEFAULT_GENERATOR.seed, DEFAULT_GENERATOR.offset = int(seed), 0
    return DEFAULT_GENERATOR


def _prepare_draw(shape: Any, dtype: Any, device: str | None, floats: bool = True) -> tuple[tuple[int, ...], DType]:
    if device is not None:
        check_device(device)
    element = as_dtype(dtype)
    if element.is_float != floats:
        raise DTypeError("the distribution has other element types", location=user_location(), received=str(element),
                         expected="a float type" if floats else "an integer type")  # fmt: skip
    sizes = parse_shape(shape, as_size)
    if not all(isinstance(s, int) for s in sizes):
        raise ArgumentError("random tensors need static sizes", location=user_location(), received=str(sizes))
    return sizes, element  # type: ignore[return-value]


@check_arguments
def rand(shape: Any, dtype: DType = f32, device: str | None = None, generator: Generator | None = None) -> Tensor:
    """Uniformly distributed numbers in [0, 1), rounded to `dtype` (narrower types than f32 may round to 1).

    >>> rand((2, 2), generator=Generator(1)).shape
    (2, 2)
    """
    sizes, element = _prepare_draw(shape, dtype, device)
    return cast(
        reshape((generator or DEFAULT_GENERATOR).uniform(int(count_elements(sizes)), element), shape=sizes),
        dtype=element,
    )


@check_arguments
def randn(shape: Any, dtype: DType = f32, device: str | None = None, generator: Generator | None = None) -> Tensor:
    """Normally distributed numbers of mean 0 and variance 1 (Box and Muller 1958, from two uniform ones each).

    >>> bool(randn(1000, generator=Generator(1)).mean() < 0.1)
    True
    """
    sizes, element = _prepare_draw(shape, dtype, device)
    amount = int(count_elements(sizes))
    pairs = reshape((generator or DEFAULT_GENERATOR).uniform(2 * amount, element), shape=(2, amount))
    first, second = (reshape(slice_(pairs, start=(i, 0), stop=(i + 1, amount)), shape=sizes) for i in (0, 1))
    normal = sqrt(log(1.0 - first) * -2.0) * cos(second * (2 * math.pi))
    return cast(normal, dtype=element)


@check_arguments
def randint(
    low: int,
    high: int,
    shape: Any,
    dtype: DType = int32,
    device: str | None = None,
    generator: Generator | None = None,
) -> Tensor:
    """Uniformly distributed integers from `low` to `high` - 1, with a bias below (high - low) / 2^32.

    >>> randint(0, 10, 1000, generator=Generator(1)).max().item()
    9

    Raises:
        ArgumentError: the range is empty or wider than 2^31.
    """
    sizes, element = _prepare_draw(shape, dtype, device, floats=False)
    span = high - low
    if not 0 < span <= 2**31:
        raise ArgumentError(
            f"randint from {low} to {high}", location=user_location(), expected="a range of 1 to 2^31 numbers"
        )
    words = (generator or DEFAULT_GENERATOR).words(int(count_elements(sizes)))
    return cast(reshape(((words * span) >> 32) + low, shape=sizes), dtype=element)


@check_arguments
def bernoulli(p: Any, shape: Any = None, generator: Generator | None = None) -> Tensor:
    """True with probability `p`, a number or one for each element, else False.

    >>> bernoulli(1.0, (2,)), bernoulli(Tensor([0.0, 1.0]))
    (Tensor([ True,  True], bool), Tensor([False,  True], bool))

    Raises:
        ArgumentError: `p` is a number outside [0, 1], or no shape is known.
    """
    if isinstance(p, Tensor):
        sizes = p.shape if shape is None else shape
    elif isinstance(p, (int, float)) and 0 <= p <= 1 and shape is not None:
        sizes = shape
    else:
        raise ArgumentError(f"bernoulli of probability {p}", location=user_location(), expected="0 to 1, and a shape")
    return less(rand(sizes, generator=generator), p)


@check_arguments
def permutation(n: int, generator: Generator | None = None) -> Tensor:
    """The numbers from 0 to `n` - 1 in random order (int64).

    >>> sorted(permutation(5).tolist())
    [0, 1, 2, 3, 4]
    """
    if not isinstance(n, (int, np.integer)) or n < 0:
        raise ArgumentError(f"a permutation of {n!r} numbers", location=user_location(), expected="a count ≥ 0")
    return argsort((generator or DEFAULT_GENERATOR).words(n))
