"""The decorators that make kernels: plain, with a schedule, or tuned by measuring."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tessera.kernel.kernel import Kernel, Options
from tessera.kernel.tuning import configurations as tuning
from tessera.kernel.tuning.configurations import Tuning
from tessera.kernel.tuning.search import Evolutionary
from tessera.ops.arguments import check_function
from tessera.schedule import Schedule


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    tile_shape: Sequence[int] | None = None,
    shared_memory: int = 0,
    num_warps: int = 4,
    autotune: bool = False,
    autotune_configs: Sequence[Mapping[str, Any]] | None = None,
    target: str | None = None,
) -> Any:
    """Make a kernel of a Python function; plain, or with options.

    >>> from tessera import Tensor, tile
    >>> @kernel
    ... def double(x: Tensor["N"]):
    ...     i = tile.program_id(0)
    ...     x[i] *= 2.0
    """
    shape = tuple(tile_shape or ())
    options = Options(shape, shared_memory, num_warps, autotune, tuple(autotune_configs or ()), target)
    make = functools.partial(_made, options=options)
    return make if function is None else make(function)


def with_schedule(schedule: Schedule, **options: Any) -> Callable[[Callable[..., Any]], Kernel]:
    """`@kernel.with_schedule(s)` and `@kernel.schedule(s)`: a kernel whose constants the schedule gives.

    Takes a Python function (with the options of @kernel) or a kernel.

    >>> @kernel.with_schedule(Schedule(block=64))
    ... def double(x, *, BM: int = 16):
    ...     i = tile.program_id(0) * BM
    ...     x[i : i + BM] *= 2.0
    >>> double.schedule
    Schedule(block_m=64)
    """

    def decorated(function: Callable[..., Any]) -> Kernel:
        made = function if isinstance(function, Kernel) else kernel(function, **options)
        return made.with_schedule(schedule)

    return decorated


def _made(function: Any, options: Options) -> Kernel:
    """A kernel; with `autotune` one that tries its configurations, or a few block sizes where it was given none."""
    check_function(function, "kernel")
    made = Kernel(function, options)
    if not options.autotune:
        return made
    configs = options.autotune_configs
    settings = tuning.tuning(configs=configs) if configs else tuning.automatic(made.parameters.constants)
    return tuned(made, settings) if settings else made


def tuned(made: Kernel, settings: Tuning) -> Kernel:
    """A kernel that tries configurations at the first launch with arguments of a kind; until then it has the first."""
    first = made.configured(settings.configs[0])
    return made.like(replace(first.options, tuning=settings, autotune=True))


def autotune(space: Any = None, *, options: Mapping[str, Any] | None = None, **settings: Any) -> Callable[..., Kernel]:
    """`@kernel.autotune(space=dict(BM=[64, 128]), ...)`: a kernel whose constants are chosen by measuring.

    Takes what `kernel.tuning.configurations.tuning` takes (`space` or `configs`, `constraints`, `metric`, `budget_ms`,
    `cache`, `samples`, `search`); `options` are those of @kernel. The first launch with arguments of new types runs
    every configuration on copies of them, on the kernel's own target, and the best is kept in a file.
    A grid must follow from the constants: `k[lambda c: (-(-n // c["BM"]),)]`. `k[grid].tune(...)` tells what was found.

    >>> @autotune(space={"BLOCK": [2, 4]}, cache=False)
    ... def double(x, *, BLOCK: int = 4):
    ...     i = tile.program_id(0) * BLOCK
    ...     x[i : i + BLOCK] *= 2.0
    >>> len(double.options.tuning.configs)
    2
    """

    def decorated(function: Callable[..., Any]) -> Kernel:
        made = function if isinstance(function, Kernel) else kernel(function, **(options or {}))
        return tuned(made, tuning.tuning(space, **settings))

    return decorated


def search_space(constraints: Sequence[Any] = (), **space: Any) -> Callable[..., Kernel]:
    """`@autotune.search_space(BM=[64, 128], constraints=[...])`: as `autotune(space=..., constraints=...)`."""
    return autotune(space, constraints=constraints)


def evolutionary(
    population_size: int = 50, generations: int = 20, mutation_rate: float = 0.1, crossover_rate: float = 0.7,
    seed: int = 0, space: Any = None, **settings: Any,
) -> Callable[[Callable[..., Any]], Kernel]:  # fmt: skip
    """`@autotune.evolutionary(population_size=50, generations=20)`: a genetic search (tessera/kernel/tuning/search.py).

    Without a `space` it searches a few sizes (16 to 128) for each constant that means a block, as `kernel.auto`.

    Raises:
        ArgumentError: a rate or size is none, or there is neither a space nor a constant that means a block.
    """
    search = Evolutionary(population_size, generations, mutation_rate, crossover_rate, seed)

    def decorated(function: Callable[..., Any]) -> Kernel:
        made = function if isinstance(function, Kernel) else kernel(function)
        searched = tuning.automatic_space(made.parameters.constants) if space is None else space
        return autotune(searched, search=search, **settings)(made)

    return decorated


def auto(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`@kernel.auto`: a kernel that tries a few sizes (16 to 128) for each constant that means a block."""
    return kernel(function, autotune=True, **options)


# `kernel` stays a function: these are its attributes, as the language spells them.
kernel.__dict__.update(with_schedule=with_schedule, schedule=with_schedule, autotune=autotune, auto=auto)
autotune.__dict__.update(search_space=search_space, evolutionary=evolutionary)
