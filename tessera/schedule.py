"""Schedule: how a kernel is to be cut and run, as a value that is derived, merged, printed, hashed and saved.

A schedule binds the constants of a kernel that have its meaning (`Schedule.constants`):

| the kernel's constant | what it is given |
|---|---|
| BM, TILE_M, tile_m | tile_m, or block_m where there is no tile_m (the same for N and K; BD counts as K) |
| BLOCK_M, block_m | block_m, or tile_m where there is no block_m (the same for N and K) |
| B, BLOCK, BLOCK_SIZE | as BM: the block of a kernel that has one axis |
| WARPS, NUM_WARPS, warps, num_warps | warps, which is also the default group: 32 · warps tiles |
| STAGES, NUM_STAGES, stages, num_stages | stages |
| VECTOR, VECTOR_WIDTH, vector, vector_width | vector |
| UNROLL, UNROLL_FACTOR; PREFETCH, PREFETCH_DISTANCE; SWIZZLE, SWIZZLE_PATTERN | unroll; prefetch; swizzle |

Names are matched in upper and in lower case. A kernel that has none of the block constants sees the block
as its `tile_shape`. `stages` is also how many blocks ahead a target fetches that makes a pipeline of a loop, and
`cluster` how many neighbouring programs fetch together what they share, on a target that has such (ptx on sm_90a).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tessera.digest import digest
from tessera.errors import ArgumentError, FileError, here
from tessera.schedule_files import read_json, write_json

# Spellings of the specification, and the field that each means.
SPELLINGS = {
    "vector_width": "vector",
    "unroll_factor": "unroll",
    "prefetch_distance": "prefetch",
    "swizzle_pattern": "swizzle",
    "num_warps": "warps",
    "num_stages": "stages",
}
SWIZZLES = ("none", "xor")
AXES = ("m", "n", "k")


@dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """Tile sizes, warps, pipeline stages and hints; what is not given is left to the kernel.

    `block=(m, n, k)` is short for block_m, block_n and block_k; `vector_width`, `unroll_factor`,
    `prefetch_distance` and `swizzle_pattern` are other names of `vector`, `unroll`, `prefetch` and `swizzle`.

    Raises:
        ArgumentError: an unknown field, a size that is no positive int, or a swizzle that is not "xor" or "none".

    >>> base = Schedule(block=(128, 128), warps=8)
    >>> base.with_block(64, 64) | Schedule(stages=3)
    Schedule(block_m=64, block_n=64, warps=8, stages=3)
    """

    tile_m: int | None = None
    tile_n: int | None = None
    tile_k: int | None = None
    block_m: int | None = None
    block_n: int | None = None
    block_k: int | None = None
    warps: int | None = None
    stages: int | None = None
    vector: int | None = None
    unroll: int | None = None
    prefetch: int | None = None
    swizzle: str | None = None
    cluster: int | None = None

    def __init__(self, block: int | Sequence[int] | None = None, **given: Any) -> None:
        values = canonical({**_axes("block", block), **given})
        for each in fields(self):
            object.__setattr__(self, each.name, values.get(each.name))

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are set, in order."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in held.items() if v is not None}

    @property
    def block(self) -> tuple[int, ...]:
        """The block sizes that are set: of m, n and k."""
        return self._sizes("block", "tile")

    def _sizes(self, first: str, second: str) -> tuple[int, ...]:
        found = (getattr(self, f"{first}_{a}") or getattr(self, f"{second}_{a}") for a in AXES)
        return tuple(size for size in found if size is not None)

    def derive(self, **changes: Any) -> Schedule:
        """This schedule with other values of some fields; None takes a field away."""
        return Schedule(**{**self.given, **canonical({**_axes("block", changes.pop("block", None)), **changes})})

    def __or__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        for name, value in other.given.items():
            own = getattr(self, name)
            if own is not None and own != value:
                raise ArgumentError(
                    f"two schedules differ in {name}", location=here(), expected=f"{name}={own}, as in {self}",
                    received=f"{name}={value}, as in {other}",
                    suggestion=f"say which holds: left.derive({name}={value!r})",
                )  # fmt: skip
        return Schedule(**{**self.given, **other.given})

    def with_block(self, m: int | None = None, n: int | None = None, k: int | None = None) -> Schedule:
        """This schedule with other block sizes; an axis left out keeps its own."""
        return self.derive(**_named("block", m, n, k))

    def with_tile(self, m: int | None = None, n: int | None = None, k: int | None = None) -> Schedule:
        """This schedule with other tile sizes; an axis left out keeps its own."""
        return self.derive(**_named("tile", m, n, k))

    def with_warps(self, warps: int) -> Schedule:
        """This schedule with another number of warps."""
        return self.derive(warps=warps)

    def with_stages(self, stages: int) -> Schedule:
        """This schedule with another number of pipeline stages."""
        return self.derive(stages=stages)

    def with_vector(self, vector: int) -> Schedule:
        """This schedule with another vector width."""
        return self.derive(vector=vector)

    def with_unroll(self, unroll: int) -> Schedule:
        """This schedule with another unroll factor."""
        return self.derive(unroll=unroll)

    def with_prefetch(self, prefetch: int) -> Schedule:
        """This schedule with another prefetch distance."""
        return self.derive(prefetch=prefetch)

    def with_swizzle(self, swizzle: str) -> Schedule:
        """This schedule with another layout of shared memory: "xor" or "none"."""
        return self.derive(swizzle=swizzle)

    def with_cluster(self, cluster: int) -> Schedule:
        """This schedule with another number of programs that share what they fetch."""
        return self.derive(cluster=cluster)

    def constants(self, names: Iterable[str]) -> dict[str, Any]:
        """What this schedule gives the kernel's constants of these names (see the table above)."""
        found = {name: self._constant(name) for name in names}
        return {k: v for k, v in found.items() if v is not None}

    def _constant(self, name: str) -> Any:
        for each in MEANINGS.get(name, MEANINGS.get(name.lower(), ()) if name.islower() or name.isupper() else ()):
            if (value := getattr(self, each)) is not None:
                return value
        return None

    @property
    def digest(self) -> str:
        """A hash of the content: the same in every process and on every machine."""
        return digest(json.dumps(self.given, sort_keys=True))

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __repr__(self) -> str:
        return f"Schedule({', '.join(f'{k}={v!r}' for k, v in self.given.items())})"

    def save(self, path: str | Path) -> Path:
        """Write this schedule as a JSON file, whole or not at all."""
        return write_json(path, {"schedule": self.given})

    @classmethod
    def load(cls, path: str | Path) -> Schedule:
        """The schedule of a JSON file.

        Raises:
            FileError: the file is missing, corrupt, of another schema, or holds no schedule.
        """
        held = read_json(path, "schedule")["schedule"]
        try:
            return cls(**held)
        except (ArgumentError, TypeError) as error:
            detail = error.message if isinstance(error, ArgumentError) else "it is no set of fields"
            raise FileError(f"{path} holds no schedule: {detail}", received=held) from None


def _meanings() -> Mapping[str, tuple[str, ...]]:
    own = ("warps", "stages", "vector", "unroll", "prefetch", "swizzle")
    found: dict[str, tuple[str, ...]] = {name: (name,) for name in own}
    found |= {other: (field,) for other, field in SPELLINGS.items()}
    for axis in AXES:
        tile, block = f"tile_{axis}", f"block_{axis}"
        found |= {f"B{axis.upper()}": (tile, block), tile: (tile, block), block: (block, tile)}
    return {**found, "BD": found["BK"], **{name: found["BM"] for name in ("B", "BLOCK", "BLOCK_SIZE")}}


MEANINGS = _meanings()
NAMES = tuple(f.name for f in fields(Schedule))


def canonical(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under their own names, checked."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = SPELLINGS.get(name, name)
        if field not in NAMES:
            raise ArgumentError(f"a schedule has no field `{name}`", location=here(), expected=", ".join(NAMES))
        if values.get(field, value) != value:
            raise ArgumentError(f"{field} is given twice", location=here(), received=f"{values[field]} and {value}")
        values[field] = _checked(field, value)
    return values


def _checked(field: str, value: Any) -> Any:
    if value is None:
        return None
    if field == "swizzle":
        valid, expected = value in SWIZZLES, " or ".join(map(repr, SWIZZLES))
    else:
        valid, expected = type(value) is int and value > 0, "a positive int"
    if not valid:
        raise ArgumentError(f"{field}={value!r} is no {field}", location=here(), expected=expected)
    return value


def _axes(prefix: str, sizes: int | Sequence[int] | None) -> dict[str, int]:
    if sizes is None:
        return {}
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    if not 1 <= len(listed) <= len(AXES):
        raise ArgumentError(f"{prefix}={sizes!r} has {len(listed)} sizes", location=here(), expected="m[, n[, k]]")
    return {f"{prefix}_{axis}": size for axis, size in zip(AXES, listed, strict=False)}


def _named(prefix: str, *sizes: int | None) -> dict[str, int]:
    return {f"{prefix}_{axis}": size for axis, size in zip(AXES, sizes, strict=True) if size is not None}
