"""Op families of `benchmarks.breadth`: each draws its sizes, element types and axes, so that no point can be tuned for.

`FAMILIES` maps the name of a family to a function from a `Draw` to a `Case`. A family is added with `@family("name")`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

KNOWN = (
    7, 14, 17, 28, 32, 49, 56, 64, 77, 80, 96, 112, 128, 160, 197, 224, 256, 320, 384, 512, 576, 640, 768, 896, 1000,
    1024, 1280, 1500, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192, 11008, 14336, 16384, 28672, 32000, 32768,
    50257, 65536, 128256, 151936, 262144, 1000000,
)  # fmt: skip
"""Sizes of known models: images, widths, sequences, vocabularies."""


@dataclass(frozen=True)
class Case:
    """One drawn point: the same function for Tessera and for PyTorch, its inputs, and its arithmetic.

    `wrt` are the inputs whose gradients are computed; the last input is then the cotangent. `exact` says that results
    are compared for equality. `tolerance` is the largest error relative to the largest value, beside four times that of
    PyTorch eager. Of random results a `summary` is compared.
    """

    label: str
    ts: Callable[..., Any]
    torch: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    flops: float = 0.0
    wrt: tuple[int, ...] = ()
    exact: bool = False
    tolerance: float = 0.0
    summary: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None


@functools.cache
def _find_known(low: int, high: int) -> tuple[int, ...]:
    """The sizes of known models in a range."""
    return tuple(n for n in KNOWN if low <= n <= high)


@functools.cache
def _log(n: int) -> float:
    """NumPy's logarithm of a size: the draws of a seed depend on its last bit."""
    return float(np.log(n))


FAMILIES: dict[str, Callable[[Draw], Case]] = {}


def family(name: str) -> Callable[[Callable[[Draw], Case]], Callable[[Draw], Case]]:
    """Add a family."""

    def add(draw: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
        assert name not in FAMILIES, name
        FAMILIES[name] = draw
        return draw

    return add


class Draw:
    """The random choices of one case; `limit` is the most bytes of an array, `work` the most operations."""

    def __init__(self, seed: Sequence[int], limit: float, work: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.limit, self.work = limit, work
        self.random = torch.Generator().manual_seed(int(self.rng.integers(2**31)))

    def pick(self, *values: Any) -> Any:
        """One of the values."""
        return values[int(self.rng.integers(len(values)))]

    def size(self, low: int, high: int) -> int:
        """A size: log-uniform; in a third of all cases odd, and in another third one of a known model."""
        kind = self.rng.integers(3)
        if kind == 0 and (known := _find_known(low, high)):
            return self.pick(*known)
        drawn = int(round(np.exp(self.rng.uniform(_log(low), _log(high)))))
        return max(low, drawn - 1 + drawn % 2) if kind == 1 else drawn

    def shape(self, *ranges: tuple[int, int], item: int = 4, floor: float = 1 / 64) -> tuple[int, ...]:
        """Sizes in these ranges, whose product is at most `limit` bytes, and at least `floor` of it where possible."""
        best: tuple[int, ...] = ()
        for _ in range(200):
            drawn = tuple(self.size(*each) for each in ranges)
            held = math.prod(map(float, drawn)) * item / self.limit
            if floor <= held <= 1:
                return drawn
            if held <= 1 and (not best or math.prod(drawn) > math.prod(best)):
                best = drawn
        return best or tuple(low for low, _ in ranges)

    def product(self, *ranges: tuple[int, int], item: int = 4, batch: int = 1) -> tuple[int, ...]:
        """Sizes m, n, k of a product of at most `work` operations, whose three matrices are within `limit`."""
        found: tuple[int, ...] = ()
        for _ in range(500):
            m, n, k = (self.size(*each) for each in ranges)
            bytes_ = batch * max(m * n, m * k, n * k) * item
            share = 2.0 * m * n * k * batch / self.work
            if bytes_ <= self.limit and share <= 1:
                found = found if found and math.prod(found) > m * n * k else (m, n, k)
                if share > 1 / 64:
                    return m, n, k
        return found or tuple(low for low, _ in ranges)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.random).to(dtype)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Numbers in [0, 1)."""
        return torch.rand(shape, generator=self.random).to(dtype)

    def ints(self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.random).to(dtype)

    def floats(self) -> torch.dtype:
        """An element type of floats that programs use for activations."""
        return self.pick(torch.float32, torch.float32, torch.bfloat16, torch.float16)
