"""Schedules: tile sizes, warps, stages and hints of a kernel as a value, the space of schedules that a search tries,
and their JSON files.

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

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tessera.core.errors import ArgumentError, FileError, user_location
from tessera.core.io import hash_text, write_text

# JSON files of schedules and measurements.


SCHEMA = 1


def write_json(path: str | Path, content: dict[str, Any]) -> Path:
    """Replace the file at `path` in one step: a reader sees the old file or the new one, never a part."""
    import json  # late: 2 ms of `import tessera`

    target = Path(path).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{target} cannot be written", location=user_location(), received=error.strerror,
            suggestion="use another path",
        ) from None  # fmt: skip
    write_text(target, json.dumps({"schema": SCHEMA, **content}, indent=2, sort_keys=True) + "\n")
    return target


def read_json(path: str | Path, *keys: str) -> dict[str, Any]:
    """The file's content, which must hold `keys`.

    Raises:
        FileError: the file is missing, no JSON, of another schema, or lacks a key.
    """
    import json

    source = Path(path).expanduser()
    try:
        content = json.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read", received=error.strerror) from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not JSON", received=str(error), suggestion="save it again") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise FileError(f"{path} has another schema", expected=f"schema {SCHEMA}", received=found)
    missing = [k for k in keys if k not in content]
    if missing:
        raise FileError(f"{path} has no `{missing[0]}`", expected=", ".join(keys), received=", ".join(content))
    return content


# Schedule: tile sizes and hints of a kernel as a value.
#
# A schedule binds these constants of a kernel (`Schedule.constants`):
#
# | constant of the kernel | value |
# |---|---|
# | BM, TILE_M, tile_m | tile_m, or block_m where there is no tile_m (the same for N and K; BD counts as K) |
# | BLOCK_M, block_m | block_m, or tile_m where there is no block_m (the same for N and K) |
# | B, BLOCK, BLOCK_SIZE | as BM: the block of a kernel that has one axis |
# | WARPS, NUM_WARPS, warps, num_warps | warps, which is also the default group: 32 · warps tiles |
# | STAGES, NUM_STAGES, stages, num_stages | stages |
# | VECTOR, VECTOR_WIDTH, vector, vector_width | vector |
# | UNROLL, UNROLL_FACTOR; PREFETCH, PREFETCH_DISTANCE; SWIZZLE, SWIZZLE_PATTERN | unroll; prefetch; swizzle |
#
# Names are matched in upper and in lower case. A kernel that has none of the block constants sees the block
# as its `tile_shape`. `stages` is also how many blocks ahead a target fetches that makes a pipeline of a loop, and
# `cluster` how many neighbouring programs fetch together what they share, on a target that has such (ptx on sm_90a).


# Spellings of the specification, and the field that each means.
FIELD_ALIASES = {
    "vector_width": "vector",
    "unroll_factor": "unroll",
    "prefetch_distance": "prefetch",
    "swizzle_pattern": "swizzle",
    "num_warps": "warps",
    "num_stages": "stages",
    "tile_size": "tile_m",
}
SWIZZLES = ("none", "xor")
TILE_AXES = ("m", "n", "k")


@dataclass(frozen=True, init=False, repr=False)
class Schedule:
    """Tile sizes, warps, pipeline stages and hints; fields that are not set are left to the kernel.

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
        values = canonicalise_fields({**_name_axes("block", block), **given})
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
        found = (getattr(self, f"{first}_{a}") or getattr(self, f"{second}_{a}") for a in TILE_AXES)
        return tuple(size for size in found if size is not None)

    def derive(self, **changes: Any) -> Schedule:
        """This schedule with other values of some fields; None takes a field away."""
        return Schedule(
            **{**self.given, **canonicalise_fields({**_name_axes("block", changes.pop("block", None)), **changes})}
        )

    def __or__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        for name, value in other.given.items():
            own = getattr(self, name)
            if own is not None and own != value:
                raise ArgumentError(
                    f"two schedules differ in {name}", location=user_location(), expected=f"{name}={own}, as in {self}",
                    received=f"{name}={value}, as in {other}",
                    suggestion=f"say which holds: left.derive({name}={value!r})",
                )  # fmt: skip
        return Schedule(**{**self.given, **other.given})

    def with_block(self, m: int | None = None, n: int | None = None, k: int | None = None) -> Schedule:
        """This schedule with other block sizes; an axis left out keeps its own."""
        return self.derive(**_name_sizes("block", m, n, k))

    def with_tile(self, m: int | None = None, n: int | None = None, k: int | None = None) -> Schedule:
        """This schedule with other tile sizes; an axis left out keeps its own."""
        return self.derive(**_name_sizes("tile", m, n, k))

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
        """The values of the kernel's constants of these names under this schedule (see the table above)."""
        found = {name: self._constant(name) for name in names}
        return {k: v for k, v in found.items() if v is not None}

    def _constant(self, name: str) -> Any:
        for each in CONSTANT_FIELDS.get(
            name, CONSTANT_FIELDS.get(name.lower(), ()) if name.islower() or name.isupper() else ()
        ):
            if (value := getattr(self, each)) is not None:
                return value
        return None

    @property
    def digest(self) -> str:
        """A hash of the content: the same in every process and on every machine."""
        import json

        return hash_text(json.dumps(self.given, sort_keys=True))

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def __repr__(self) -> str:
        return f"Schedule({', '.join(f'{k}={v!r}' for k, v in self.given.items())})"

    def save(self, path: str | Path) -> Path:
        """Write this schedule as a JSON file, atomically."""
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


def _map_constants() -> Mapping[str, tuple[str, ...]]:
    own = ("warps", "stages", "vector", "unroll", "prefetch", "swizzle")
    found: dict[str, tuple[str, ...]] = {name: (name,) for name in own}
    found |= {other: (field,) for other, field in FIELD_ALIASES.items()}
    for axis in TILE_AXES:
        tile, block = f"tile_{axis}", f"block_{axis}"
        found |= {f"B{axis.upper()}": (tile, block), tile: (tile, block), block: (block, tile)}
    return {**found, "BD": found["BK"], **{name: found["BM"] for name in ("B", "BLOCK", "BLOCK_SIZE")}}


CONSTANT_FIELDS = _map_constants()
FIELD_NAMES = tuple(f.name for f in fields(Schedule))


def canonicalise_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check fields, and replace aliases by field names."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        field = FIELD_ALIASES.get(name, name)
        if field not in FIELD_NAMES:
            raise ArgumentError(
                f"a schedule has no field `{name}`", location=user_location(), expected=", ".join(FIELD_NAMES)
            )
        if field in values and values[field] != value:
            raise ArgumentError(
                f"{field} is given twice", location=user_location(), received=f"{values[field]} and {value}"
            )
        values[field] = _check_field(field, value)
    return values


def _check_field(field: str, value: Any) -> Any:
    if value is None:
        return None
    if field == "swizzle":
        valid, expected = value in SWIZZLES, " or ".join(map(repr, SWIZZLES))
    else:
        valid, expected = type(value) is int and value > 0, "a positive int"
    if not valid:
        raise ArgumentError(f"{field}={value!r} is no {field}", location=user_location(), expected=expected)
    return value


def _name_axes(prefix: str, sizes: int | Sequence[int] | None) -> dict[str, int]:
    if sizes is None:
        return {}
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    if not 1 <= len(listed) <= len(TILE_AXES):
        raise ArgumentError(
            f"{prefix}={sizes!r} has {len(listed)} sizes", location=user_location(), expected="m[, n[, k]]"
        )
    return {f"{prefix}_{axis}": size for axis, size in zip(TILE_AXES, listed, strict=False)}


def _name_sizes(prefix: str, *sizes: int | None) -> dict[str, int]:
    return {f"{prefix}_{axis}": size for axis, size in zip(TILE_AXES, sizes, strict=True) if size is not None}


# ScheduleSpace: the schedules that a search tries.


ScheduleConstraint = Callable[[Schedule], bool]
_NO_CHOICES: Mapping[str, tuple[Any, ...]] = MappingProxyType({})


# The schedule of the kernels that are launched in a block.
ACTIVE_SCHEDULE: ContextVar[Schedule | None] = ContextVar("schedule of a block", default=None)


@contextmanager
def use_schedule(given: Schedule | None = None, **changes: Any) -> Iterator[Schedule]:
    """Launch the kernels of this block with a schedule: its fields replace those of their own schedules.

    `given` is a Schedule; `changes` are fields of one, as in `ts.schedule(tile_size=128, warps=8)`. Blocks may be
    nested. Constants of a call take precedence. Programs of `ts.jit` are fused and tiled by the compiler, but for the
    kernels that they launch.

    >>> with use_schedule(warps=8) as found:
    ...     found
    Schedule(warps=8)

    Raises:
        ArgumentError: there is no such field.
    """
    found = (ACTIVE_SCHEDULE.get() or Schedule()).derive(**{**(given.given if given else {}), **changes})
    token = ACTIVE_SCHEDULE.set(found)
    try:
        yield found
    finally:
        ACTIVE_SCHEDULE.reset(token)


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
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: _NO_CHOICES)
    constraints: tuple[ScheduleConstraint, ...] = ()

    def over(self, **choices: Sequence[Any] | Any) -> ScheduleSpace:
        """This space with fields of a Schedule varied: a sequence of values, or one value.

        Raises:
            ArgumentError: no such field, a value it cannot take, or no value at all.
        """
        added: dict[str, tuple[Any, ...]] = {}
        for name, values in choices.items():
            listed = tuple(values) if isinstance(values, (list, tuple, range)) else (values,)
            if not listed:
                raise ArgumentError(f"no value is given for {name}", location=user_location(), expected="at least one")
            held = [canonicalise_fields({name: value}) for value in listed]
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

    def where(self, *constraints: ScheduleConstraint) -> ScheduleSpace:
        """Only the schedules for which each constraint holds."""
        return ScheduleSpace(self.base, self.choices, (*self.constraints, *constraints))

    def __iter__(self) -> Iterator[Schedule]:
        for values in itertools.product(*self.choices.values()):
            made = self.base.derive(**dict(zip(self.choices, values, strict=True)))
            if all(holds(made) for holds in self.constraints):
                yield made

    def __len__(self) -> int:
        return sum(1 for _ in self)
