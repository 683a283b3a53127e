"""Random tensors from a counter-based generator (Philox): the same seed and position give the same bits at every
level.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np

from tessera.core.device import check_device
from tessera.core.effects import current_effect_scope, perform_effects
from tessera.core.errors import ArgumentError, DTypeError, EffectError, user_location
from tessera.core.shapes import as_size
from tessera.core.symbolic_dim import ABSTRACT_TRACE, Dim, Size
from tessera.core.types import DType, Policy, TensorType, as_dtype, f32, f64, int32, int64
from tessera.ir.builder import CURRENT_BUILDER, override_numerics
from tessera.ir.numerics.conversion import LOW_32_BITS, draw_random_bits, philox_4x32, round_to_format
from tessera.ir.numerics.error_model import ErrorSite
from tessera.ir.numerics.interval_arithmetic import IntervalArray
from tessera.ir.rules import STORAGE, error, op
from tessera.ir.tensor import Tensor, move
from tessera.ops.tensor.argument_checks import F, check_arguments, collect_sizes
from tessera.ops.tensor.basic import cast, coerce_plain, full, parse_shape
from tessera.ops.tensor.elementwise import cos, equal, less, log, sqrt, where
from tessera.ops.tensor.shape import count_elements, iota, reshape, slice_
from tessera.ops.tensor.sorting import argsort

RANDOM_STATE_NAMES = ("random_seed", "random_offset")  # of the hidden parameters of a compiled program
BLOCKS_OF_PART = 1 << 13  # of four words
UNIT_24, UNIT_53 = 2.0**-24, 2.0**-53


@dataclass(frozen=True)
class RandomUse:
    """What a call of a compiled program does to the default generator: draws `count` blocks, after `seed` if given.

    The state at the start is a hidden argument, that at the end a hidden result: static counts move it.
    """

    count: int
    seed: int | None = None
    drawn: bool = True  # the program has the state as its last two arguments

    def reserve(self) -> tuple[np.ndarray, ...]:
        """The generator's state as the last arguments of one call; the blocks of that call count as drawn."""
        with _LOCK:
            found, state = self.peek(), get_random_state()
            if self.seed is None:
                state.count += self.count
            else:
                state.restart(self.seed, self.count)
        return found

    def peek(self) -> tuple[np.ndarray, ...]:
        """The generator's state as the last arguments of a call that leaves it as it is."""
        state = get_random_state()
        return (_encode_word(state.seed), np.array(state.first + state.count, np.int64)) if self.drawn else ()


def _encode_word(seed: int) -> np.ndarray:
    """The low 64 bits of a seed."""
    return np.array(seed & (2**64 - 1), np.uint64).view(np.int64)


@dataclass(eq=False)
class RandomState:
    """The state of the default generator: a seed, the block of four words at which it started, and blocks drawn since.

    In a trace `seed` and `first` are values of the trace. `owner` names a body that is traced once and run several
    times; if it is a `loop`, one run after the other. A body without `first` (None) refuses draws.
    """

    seed: Any = 0
    first: Any = 0
    count: int = 0
    reseeded: bool = False  # by `manual_seed`: the state no longer depends on that at the start
    drawn: bool = False  # a draw depended on the state at the start
    owner: str = ""
    loop: bool = False

    def advance(self, blocks: int) -> Any:
        """The number of the next block, and count `blocks` of them as drawn."""
        self.drawn = self.drawn or not self.reseeded
        start = self.first + self.count
        self.count += blocks
        return start

    def restart(self, seed: Any, count: int = 0) -> None:
        """Continue as if `manual_seed(seed)` and `count` draws of a block had come last."""
        self.seed, self.first, self.count, self.reseeded = seed, 0, count, True

    def spread(self, body: RandomState, times: Any, reverse: bool = False) -> Tensor:
        """The first block of each of `times` runs of a body that was traced once, one run after the other.

        Raises:
            ArgumentError: the number of runs is symbolic.
        """
        static = isinstance(times, int)
        if not (static or ABSTRACT_TRACE.get()):
            raise ArgumentError(
                f"random numbers in {body.owner} of a symbolic number of steps", location=user_location(),
                expected="a static number", received=str(times),
            )  # fmt: skip
        start = self.advance(body.count * (times if static else 1))
        steps = iota(shape=(times,)) * body.count
        return (body.count * (times - 1) - steps if reverse else steps) + start

    def reserve(self, start: Any = None) -> Any:
        """The first block of a loop whose number of steps is known at run time only: it may draw LOOP_BLOCKS blocks.

        So the draws after the loop do not depend on its steps. `start` is where a loop outside of a trace began.
        """
        if start is None:
            return self.advance(LOOP_BLOCKS)
        if self.count != start:
            self.count = start + LOOP_BLOCKS
        return start

    def summarise(self) -> RandomUse:
        """What a program with this state at its end does to the generator, which it draws from or seeds."""
        return RandomUse(self.count, self.seed if self.reseeded else None, self.drawn)

    def check_not_reseeded(self) -> None:
        """Refuse a body that is run several times and seeds the generator.

        Raises:
            EffectError: it calls `manual_seed`.
        """
        if self.reseeded:
            raise EffectError(
                f"{self.owner} seeds the default generator", location=user_location(), received="manual_seed",
                expected="the same numbers in every step are no random ones", suggestion="seed it before",
            )  # fmt: skip

    def save(self) -> tuple[Any, Any, int, bool]:
        """What `restore` takes to continue from here."""
        return self.seed, self.first, self.count, self.reseeded

    def restore(self, saved: tuple[Any, Any, int, bool]) -> None:
        """Continue from a saved state."""
        self.seed, self.first, self.count, self.reseeded = saved


# Blocks of four words kept for a loop with a condition: more than its steps draw, and a small part of the 2^64.
LOOP_BLOCKS = 2**36

TRACED_RANDOM_STATE: ContextVar[RandomState | None] = ContextVar("random state", default=None)
_LOOP_STATE: ContextVar[RandomState | None] = ContextVar("random state of a loop", default=None)


@contextmanager
def trace_random_state(state: RandomState) -> Iterator[RandomState]:
    """Within a trace: the default generator has this state, and outside of it the state that it had before."""
    tokens = TRACED_RANDOM_STATE.set(state), _LOOP_STATE.set(state if state.loop else _LOOP_STATE.get())
    try:
        yield state
    finally:
        TRACED_RANDOM_STATE.reset(tokens[0])
        _LOOP_STATE.reset(tokens[1])


def get_random_state() -> RandomState:
    """The state of the default generator: of the trace in progress, else of this process."""
    return TRACED_RANDOM_STATE.get() or _PROCESS_STATE


def outside_numerics(function: F) -> F:
    """Decorate a function that draws: a numeric context does not apply inside, where 32 bits become a number."""

    @functools.wraps(function)
    def draw(*args: Any, **named: Any) -> Any:
        with override_numerics(None):
            return function(*args, **named)

    return draw  # type: ignore[return-value]


class Generator:
    """A stream of random numbers: a seed and a position.

    Draws from it made while tracing are fixed by the trace; to draw anew on each call, draw from the default generator,
    whose state is an argument and a result of a compiled program, or pass the seed as an argument and make the
    generator inside: `Generator(seed)` takes an integer tensor too.

    >>> Generator(7).words(4).tolist() == Generator(7).words(4).tolist()
    True
    """

    def __init__(self, seed: Any = 0) -> None:
        self.seed = seed
        self.offset: Any = 0
        self._frame = current_effect_scope()
        self._loop = _LOOP_STATE.get()

    def advance(self, blocks: int) -> tuple[Any, Any]:
        """The seed and the number of the next block of four words; `blocks` of them are drawn."""
        loop = _LOOP_STATE.get()
        if loop is not self._loop and loop is not None:
            raise _repeated_draw_error(loop.owner)
        start = self.offset
        self.offset += blocks
        return self.seed, start

    @outside_numerics
    def words(self, amount: Size) -> Tensor:
        """The next `amount` random 32-bit words, as int64; `amount` is symbolic only where types alone are traced.

        Raises:
            EffectError: it is called in a pure function, or in a loop that would repeat the same words.
        """
        if current_effect_scope() is not self._frame:  # a generator local to the traced function has no effect outside
            perform_effects(("random",))
        if isinstance(amount, Dim):
            self.advance(1)
            return full(shape=(amount,), value=0, dtype=int64)
        seed, first = self.advance(-(-amount // 4))
        if not isinstance(seed, Tensor) and isinstance(first, int) and CURRENT_BUILDER.get() is None:
            return _draw_at_once(int(seed), first, amount)
        return _draw_words(seed if isinstance(seed, Tensor) else int(seed), first, amount)

    @outside_numerics
    def uniform(self, amount: Size, dtype: DType) -> Tensor:
        """The next `amount` multiples of 2^-24 (f64: 2^-53) in [0, 1)."""
        if dtype is not f64:
            return cast(self.words(amount) >> 8, dtype=f32) * UNIT_24
        words = reshape(self.words(2 * amount), shape=(amount, 2))
        high, low = (reshape(slice_(words, start=(0, i), stop=(amount, i + 1)), shape=(amount,)) for i in (0, 1))
        return cast((high >> 5) * 2**26 + (low >> 6), dtype=f64) * UNIT_53


def _draw_words(seed: Any, first: Any, amount: int) -> Tensor:
    """So many words from block `first` on.

    Each element computes its block and takes one word of it, so that all is pointwise: it is fused with what uses it.
    """
    whole = -(-amount // 4) * 4
    place = iota(shape=(whole,))
    counter = place // 4 + first
    zero = full(shape=(whole,), value=0, dtype=int64)
    *found, word = philox_4x32((counter & LOW_32_BITS, counter >> 32, zero, zero), _split_seed(seed))
    for number, other in enumerate(found):
        word = where(equal(place % 4, number), other, word)
    return word if whole == amount else slice_(word, start=(0,), stop=(amount,))


def _draw_at_once(seed: int, first: int, amount: int) -> Tensor:
    """As `_draw_words`, of known numbers, in parts: what the rounds compute stays in a cache."""
    blocks = -(-amount // 4)
    words = np.empty((blocks, 4), np.int64)
    for start in range(0, blocks, BLOCKS_OF_PART):
        part = words[start : start + BLOCKS_OF_PART]
        counter = np.arange(first + start, first + start + len(part))
        zero = np.zeros_like(counter)
        found = philox_4x32((counter & LOW_32_BITS, counter >> 32, zero, zero), _split_seed(seed))
        for column, word in enumerate(found):
            part[:, column] = word
    return Tensor(words.reshape(-1)[:amount])


def _split_seed(seed: Any) -> tuple[Any, Any]:
    return seed & LOW_32_BITS, (seed >> 32) & LOW_32_BITS


def _repeated_draw_error(owner: str) -> EffectError:
    return EffectError(
        f"{owner} has the effect 'random'", location=user_location(),
        expected="the same numbers in every step are no random ones", received="random",
        suggestion="make a generator of each step's own: ts.Generator(seed), with the seeds among xs or in the state",
    )  # fmt: skip


class DefaultGenerator(Generator):
    """The generator of draws that name none; each trace has its own state of it (`RandomState`)."""

    def __init__(self) -> None:
        """A generator whose state is that of the process, or of the trace in progress."""
        self._frame = None

    @property
    def seed(self) -> Any:  # type: ignore[override]
        """The seed; in a trace a value of it."""
        state = get_random_state()
        state.drawn = state.drawn or not state.reseeded
        return state.seed

    @property
    def offset(self) -> Any:  # type: ignore[override]
        """The number of the next block of four words; in a trace a value of it."""
        return get_random_state().advance(0)

    def advance(self, blocks: int) -> tuple[Any, Any]:
        """The seed and the number of the next block of four words; `blocks` of them are drawn."""
        state = get_random_state()
        if state.first is None:
            raise _repeated_draw_error(state.owner)
        with _LOCK:
            return state.seed, state.advance(blocks)


_LOCK = Lock()
_PROCESS_STATE = RandomState()
DEFAULT_GENERATOR = DefaultGenerator()


@check_arguments
def manual_seed(seed: int) -> Generator:
    """Restart the default generator from `seed`; returns it."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise ArgumentError("a seed is an integer", location=user_location(), received=repr(seed))
    get_random_state().restart(int(seed))
    return DEFAULT_GENERATOR


def _prepare_draw(shape: Any, dtype: Any, device: str | None, floats: bool = True) -> tuple[tuple[int, ...], DType]:
    if device is not None:
        check_device(device)
    element = as_dtype(dtype)
    if element.is_float != floats:
        raise DTypeError("the distribution has other element types", location=user_location(), received=str(element),
                         expected="a float type" if floats else "an integer type")  # fmt: skip
    sizes = parse_shape(shape, as_size)
    if not (ABSTRACT_TRACE.get() or all(isinstance(s, int) for s in sizes)):
        raise ArgumentError(
            "random tensors need static sizes", location=user_location(), received=str(sizes),
            suggestion="of a model with dropout, build model.eval(); or give the sizes as numbers, without dynamic=",
        )  # fmt: skip
    return sizes, element  # type: ignore[return-value]


def _take_generator(generator: Any) -> Generator:
    """The generator of a call: the default one where it names none.

    Raises:
        ArgumentError: it is no generator.
    """
    if generator is None:
        return DEFAULT_GENERATOR
    if not isinstance(generator, Generator):
        raise ArgumentError(
            f"generator is {generator!r}", location=user_location(), expected="a ts.Generator",
            suggestion="write ts.Generator(seed)",
        )  # fmt: skip
    return generator


@check_arguments
@collect_sizes
@outside_numerics
def rand(shape: Any, dtype: DType = f32, device: str | None = None, generator: Generator | None = None) -> Tensor:
    """Uniformly distributed numbers in [0, 1), rounded to `dtype` (narrower types than f32 may round to 1).

    >>> rand((2, 2), generator=Generator(1)).shape, rand(2, 3).shape
    ((2, 2), (2, 3))
    """
    sizes, element = _prepare_draw(shape, dtype, device)
    drawn = _take_generator(generator).uniform(count_elements(sizes), element)
    return move(cast(reshape(drawn, shape=sizes), dtype=element), device)


@check_arguments
@collect_sizes
@outside_numerics
def randn(shape: Any, dtype: DType = f32, device: str | None = None, generator: Generator | None = None) -> Tensor:
    """Normally distributed numbers of mean 0 and variance 1 (Box and Muller 1958, from two uniform ones each).

    >>> bool(randn(1000, generator=Generator(1)).mean() < 0.1)
    True
    """
    sizes, element = _prepare_draw(shape, dtype, device)
    amount = count_elements(sizes)
    pairs = reshape(_take_generator(generator).uniform(2 * amount, element), shape=(2, amount))
    first, second = (reshape(slice_(pairs, start=(i, 0), stop=(i + 1, amount)), shape=sizes) for i in (0, 1))
    normal = sqrt(log(1.0 - first) * -2.0) * cos(second * (2 * math.pi))
    return move(cast(normal, dtype=element), device)


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
    words = _take_generator(generator).words(count_elements(sizes))
    return move(cast(reshape(((words * span) >> 32) + low, shape=sizes), dtype=element), device)


@check_arguments
@outside_numerics
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
    symbolic = isinstance(n, Dim) and ABSTRACT_TRACE.get()
    if not (symbolic or (isinstance(n, (int, np.integer)) and n >= 0)):
        raise ArgumentError(f"a permutation of {n!r} numbers", location=user_location(), expected="a count ≥ 0")
    return argsort(_take_generator(generator).words(n))


# Stochastic rounding: an op that rounds by a random draw, and the draws, in place of a policy clause below Graph.


def drop_stochastic_clause(policy: Policy | None) -> Policy | None:
    """A policy without its stochastic clause, for values that are already rounded."""
    return policy if policy is None else replace(policy, rounding="nearest", seed=0)


def _infer_rounded(x: TensorType, draw: TensorType, *, dtype: Policy) -> TensorType:
    return TensorType(x.shape, dtype.storage, drop_stochastic_clause(dtype))


@op(infer=_infer_rounded, coerce=coerce_plain, numerics=STORAGE, pointwise=True)
def round_by_chance(x: Any, draw: Any, *, dtype: Policy) -> Any:
    """`x`, of type f64, rounded to a policy's storage: up if `draw`, 53 random bits, is below the distance from below.

    The distance counts in steps of 2^-53 of that between the two neighbours.
    """
    return round_to_format(x, dtype.storage, "stochastic", dtype.saturate, dtype.denormals == "flush", draw=draw)


@error(round_by_chance)
def _(site: ErrorSite, x: IntervalArray, draw: IntervalArray, *, dtype: Policy) -> IntervalArray:
    result = replace(site.results[0], policy=dtype)
    return replace(site, results=(result,)).stored(x.value, x.radius)


def draw_rounding_bits(shape: tuple[int, ...], seed: int, first: Any = 0) -> Tensor:
    """The 53 random bits of each element of a tensor: the same as those of the interpreter's rounding.

    `first` is the index of the first element, where the tensor is a part of a larger one.
    """
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    place = full(shape=shape, value=0, dtype=int64)
    for axis, step in enumerate(steps):
        place = place + iota(shape=shape, axis=axis) * step
    if not isinstance(first, int) or first:
        place = place + first
    return draw_random_bits(place, seed)
