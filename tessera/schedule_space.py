"""ScheduleSpace: the schedules that a search tries, said axis by axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tessera.errors import ArgumentError, here
from tessera.schedule import Schedule, canonical

Constraint = Callable[[Schedule], bool]
_NONE: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


@dataclass(frozen=True)
class ScheduleSpace:
    """Every combination of the values given, in a fixed order, that meets the constraints; each is a Schedule.

    `base` gives the fields that no axis varies. The methods return wider spaces and change nothing.

    >>> space = ScheduleSpace().block(m=[64, 128], n=[64]).warps([4, 8])
    >>> len(space), next(iter(space))
    (4, Schedule(block_m=64, block_n=64, warps=4))
    >>> [s.warps for s in space.where(lambda s: s.warps * 16 <= s.block_m)]
    [4, 4, 8]
    """

    base: Schedule = Schedule()
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _NONE)
    constraints: tuple[Constraint, ...] = ()

    def over(self, **choices: Sequence[Any] | Any) -> ScheduleSpace:
        """This space with fields of a Schedule varied: a sequence of values, or one value.

        Raises:
            ArgumentError: no such field, a value it cannot take, or no value at all.
        """
        added: dict[str, tuple[Any, ...]] = {}
        for name, values in choices.items():
            listed = tuple(values) if isinstance(values, (list, tuple, range)) else (values,)
            if not listed:
                raise ArgumentError(f"no value is given for {name}", location=here(), expected="at least one")
            held = [canonical({name: value}) for value in listed]
            added[next(iter(held[0]))] = tuple(next(iter(h.values())) for h in held)
        return ScheduleSpace(self.base, {**self.choices, **added}, self.constraints)

    def block(self, m: Any = None, n: Any = None, k: Any = None) -> ScheduleSpace:
        """Vary the block sizes."""
        return self.over(**{f"block_{a}": v for a, v in (("m", m), ("n", n), ("k", k)) if v is not None})

    def tile(self, m: Any = None, n: Any = None, k: Any = None) -> ScheduleSpace:
        """Vary the tile sizes."""
        return self.over(**{f"tile_{a}": v for a, v in (("m", m), ("n", n), ("k", k)) if v is not None})

    def k(self, sizes: Any) -> ScheduleSpace:
        """Vary the block size of k."""
        return self.over(block_k=sizes)

    def warps(self, counts: Any) -> ScheduleSpace:
        """Vary the number of warps."""
        return self.over(warps=counts)

    def stages(self, counts: Any) -> ScheduleSpace:
        """Vary the number of pipeline stages."""
        return self.over(stages=counts)

    def vector(self, widths: Any) -> ScheduleSpace:
        """Vary the vector width."""
        return self.over(vector=widths)

    def swizzle(self, patterns: Any) -> ScheduleSpace:
        """Vary the layout of shared memory."""
        return self.over(swizzle=patterns)

    def cluster(self, counts: Any) -> ScheduleSpace:
        """Vary the number of programs that share what they fetch."""
        return self.over(cluster=counts)

    def where(self, *constraints: Constraint) -> ScheduleSpace:
        """Only the schedules for which each constraint holds."""
        return ScheduleSpace(self.base, self.choices, (*self.constraints, *constraints))

    def __iter__(self) -> Iterator[Schedule]:
        for values in itertools.product(*self.choices.values()):
            made = self.base.derive(**dict(zip(self.choices, values, strict=True)))
            if all(holds(made) for holds in self.constraints):
                yield made

    def __len__(self) -> int:
        return sum(1 for _ in self)
