"""Function attributes of the PTX level: facts that a pass records for later passes and for emission.

They are part of the IR: the printer writes them, the parser reads them, and no pass keeps state beside the module.

| attribute | recorded by | meaning |
|---|---|---|
| `ptx.arch` | launch analysis | the architecture, as in ".target" |
| `ptx.grids` | launch analysis | the grid of each launch, all of one rank |
| `ptx.noalias` | launch analysis | in no launch does a written array share memory with another argument |
| `ptx.alignments` | launch analysis | for each parameter, a number of bytes that its address is a multiple of |
| `ptx.rounding` | launch analysis | present if a result has a rounding policy: passes then leave the function alone |
| `ptx.kernel` | kernel selection | `uniform`, `warp_specialised` or `prefetching` |
| `ptx.stages` | kernel selection | the stages of the ring buffer in shared memory |
| `ptx.cluster` | kernel selection | size, grid axis and multicast operand of a thread-block cluster |
| `ptx.threads` | thread mapping | the threads that work on one tile |
| `ptx.teams` | thread mapping | the teams of a block that work on tiles of their own (2: ping-pong) |
| `ptx.vector` | thread mapping | neighbouring elements that a thread holds |
| `ptx.resident` | thread mapping | blocks that a multiprocessor should hold at once; 0: any |
| `ptx.raster` | rasterisation | of a persistent kernel: axes, whether the last falls, and the programs of a section |
| `ptx.layouts` | layout assignment | the distributed layouts of the function's blocks |
| `ptx.value_layouts` | layout assignment | for each value in order the index of its layout, or - for a ref |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tessera.ir.core import Attrs, Function

PREFIX = "ptx."
UNIFORM, WARP_SPECIALISED, PREFETCHING = "uniform", "warp_specialised", "prefetching"


def set_facts(function: Function, **facts: Any) -> Function:
    """The function with these facts as attributes."""
    return replace(function, attrs=Attrs({**function.attrs, **{PREFIX + k: v for k, v in facts.items()}}))


def get_fact(function: Function, name: str, default: Any = None) -> Any:
    """A fact that an earlier pass recorded, or the default."""
    return function.attrs.get(PREFIX + name, default)


@dataclass(frozen=True)
class LaunchFacts:
    """What launch analysis knows of a function."""

    arch: str
    grids: tuple[tuple[int, ...], ...]
    noalias: bool
    alignments: tuple[int, ...]

    @classmethod
    def of(cls, function: Function) -> LaunchFacts:
        """The facts that a function's attributes hold."""
        return cls(*(get_fact(function, name) for name in ("arch", "grids", "noalias", "alignments")))

    @property
    def grid(self) -> tuple[int, ...]:
        """The first grid; empty for a function that is never launched."""
        return self.grids[0] if self.grids else ()
