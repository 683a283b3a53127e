"""Prediction: step time and memory of a distributed program on up to thousands of devices, by discrete events (simpy).

Each rank runs its kernels in order. A collective begins when all ranks of its group have come, and ends for all at the
same time. With `overlap` a rank goes on until something needs the result, and its collectives follow each other. A
message is buffered: its sender goes on, and its receiver waits until it has come.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, CollectiveError, DeviceUnavailable, FileError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import TensorType
from tessera.dist.engines import run_as_rank
from tessera.dist.mesh import Mesh
from tessera.dist.partition import Partitioned
from tessera.dist.propagation import NVLINK, Link
from tessera.dist.rank_program import Compute, Item, RankProgram, hoist_collectives, make_program
from tessera.dist.ranks import PredictedWorld, RankContext, UnknownMessage
from tessera.dist.sharding import check_spec
from tessera.dist.spmd import Spmd, check_mesh, match_specs
from tessera.frontend.jit.tracing import Jit, leaf_type
from tessera.ops.tensor.argument_checks import check_function

MAX_RANKS = 4096
COMPARED_RANKS = 64  # up to so many, the program of each rank is traced
SHOWN_RANKS = 16  # in a timeline
MICRO = 1e6


@dataclass(frozen=True)
class Span:
    """What a rank does from one time to another: a kernel, a collective, or the wait for other ranks."""

    kind: str  # "compute", "communication" or "wait"
    label: str
    place: str
    start: float
    end: float


class Prediction:
    """What `ts.dist.simulate` gives: `seconds` of a step, `memory` of each device in bytes, and the timeline."""

    def __init__(self, name: str, mesh: Mesh, programs: Sequence[RankProgram], spans: Sequence[Sequence[Span]]) -> None:
        self.name, self.mesh, self.programs = name, mesh, list(programs)
        self._spans = [list(each) for each in spans]  # of each rank, or of one for all
        self.seconds = max((s.end for each in spans for s in each), default=0.0)

    @property
    def memory(self) -> np.ndarray:
        """The most bytes that each device holds: its arguments, and the values that are alive at one time."""
        return np.array([p.peak_bytes for p in self.programs], np.int64)

    def spans(self, rank: int) -> list[Span]:
        """What a rank does when.

        Raises:
            ArgumentError: the mesh has no such rank.
        """
        self.mesh.coordinate(rank)
        return self._spans[rank % len(self._spans)]

    def busy(self, kind: str = "compute") -> np.ndarray:
        """The seconds that each device spends on kernels, "communication" or "wait"."""
        found = [sum(s.end - s.start for s in each if s.kind == kind) for each in self._spans]
        return np.array(found * (self.mesh.size // len(found)))

    def save_trace(self, path: str | Path, ranks: Sequence[int] | None = None) -> None:
        """Write the timeline of some ranks (by default the first 16) as JSON for Perfetto and Chrome.

        Raises:
            FileError: the file cannot be written.
        """
        shown = set(range(min(self.mesh.size, SHOWN_RANKS)) if ranks is None else ranks)
        threads = {"compute": 0, "wait": 0, "communication": 1}
        events: list[dict[str, Any]] = []
        for rank in sorted(shown):
            name = f"rank {rank} {dict(zip(self.mesh.axis_names, self.mesh.coordinate(rank), strict=True))}"
            events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
            for tid, thread in ((0, "compute"), (1, "communication")):
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": thread}})
            for s in self.spans(rank):
                events.append(
                    {"ph": "X", "name": s.label, "cat": s.kind, "pid": rank, "tid": threads[s.kind],
                     "ts": s.start * MICRO, "dur": (s.end - s.start) * MICRO, "args": {"line": s.place}}
                )  # fmt: skip
        try:
            Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}", location=user_location()) from None

    def __str__(self) -> str:
        compute, moving, waiting = (self.busy(k).max() for k in ("compute", "communication", "wait"))
        return (
            f"{self.name} on {self.mesh.size} devices: {self.seconds * 1e3:.3f} ms a step (predicted); the longest of "
            f"a device: {compute * 1e3:.3f} ms of kernels, {moving * 1e3:.3f} ms of collectives, "
            f"{waiting * 1e3:.3f} ms of waiting for them; at most {self.memory.max() / 2**20:.1f} MiB of memory"
        )


def simulate(
    function: Any, mesh: Mesh, *args: Any, links: Mapping[str, Link] | None = None, compute: Compute | None = None,
    speeds: Mapping[int, float] | None = None, overlap: bool = False, **named: Any,
) -> Prediction:  # fmt: skip
    """The predicted time and memory of one call of a distributed program; nothing is computed.

    `function` is one of `ts.spmd` (or a function of a rank) or of `ts.dist.partition`; `args` are its arguments, or
    their types (`ts.Tensor[8, ts.f32]`), on the whole mesh. `links` are the connections along mesh axes (default
    `ts.dist.NVLINK`), `compute` the peaks of a device, `speeds` the speed of some ranks against the others (0.5: half
    as fast). With `overlap` collectives run beside kernels, from where their operands are computed until their results
    are needed, as in compiled programs on GPUs. Up to 64 ranks may run
    different programs; of more, rank 0 stands for all unless it sends or receives messages.

    >>> import tessera as ts
    >>> mesh = ts.Mesh((512, 8), ("dp", "tp"))
    >>> step = ts.spmd(lambda x: ts.all_reduce(x * 2.0), in_specs=ts.dist.P("dp"))
    >>> found = simulate(step, mesh, ts.Tensor[4096, 1024, ts.f32], links={"dp": ts.dist.NETWORK})
    >>> round(found.seconds * 1e6), int(found.memory[0])
    (483, 98304)

    Raises:
        ArgumentError: the mesh is no mesh or has more than 4,096 ranks, or links or speeds do not fit it.
        UnsupportedOpError: a loop ends by a computed value.
        CollectiveError: a rank waits for ever, for a message or for other ranks.
        DeviceUnavailable: simpy is missing.
    """
    check_mesh(mesh, "simulate")
    check_mesh_size(mesh)
    known = check_links(mesh, links)
    factors = check_speeds(mesh, speeds)
    body, local, name = _find_body(function, mesh, args, named)
    programs = trace_ranks(body, mesh, local, known, compute or Compute())
    if overlap:
        hoisted = {id(p): hoist_collectives(p) for p in programs}
        programs = [hoisted[id(p)] for p in programs]
    return Prediction(name, mesh, programs, run_events([p.items for p in programs], factors, overlap))


def check_mesh_size(mesh: Any) -> None:
    """Refuse a mesh that is too large to simulate.

    Raises:
        ArgumentError: it is.
    """
    if not isinstance(mesh, Mesh) or mesh.size > MAX_RANKS:
        raise ArgumentError(
            "simulate takes a mesh", location=user_location(), expected=f"a ts.Mesh of at most {MAX_RANKS} ranks",
            received=f"{mesh.size} ranks" if isinstance(mesh, Mesh) else repr(mesh),
        )  # fmt: skip


def check_links(mesh: Mesh, links: Mapping[str, Link] | None) -> dict[str, Link]:
    """The link of each mesh axis.

    Raises:
        ArgumentError: there is no such axis, or a link is none.
    """
    for axis, link in (links or {}).items():
        mesh.find_axes(axis)
        if not isinstance(link, Link) or not link.bandwidth > 0 or not link.latency >= 0:
            raise ArgumentError(
                f"the link of {axis!r} is none", location=user_location(), received=repr(link),
                expected="ts.dist.Link(bandwidth, latency), in bytes per second and seconds",
            )  # fmt: skip
    return {axis: (links or {}).get(axis, NVLINK) for axis in mesh.axis_names}


def check_speeds(mesh: Mesh, speeds: Mapping[int, float] | None) -> list[float]:
    """The speed of each rank.

    Raises:
        ArgumentError: there is no such rank, or a speed is not positive.
    """
    found = [1.0] * mesh.size
    for rank, speed in (speeds or {}).items():
        mesh.coordinate(rank)
        if not 0 < speed < float("inf"):
            raise ArgumentError(
                f"rank {rank} has no speed {speed}", location=user_location(), expected="a positive number"
            )
        found[rank] = float(speed)
    return found


def _find_body(function: Any, mesh: Mesh, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, Any, str]:
    """What a rank runs, its arguments as types, and the name of the function."""
    if isinstance(function, Partitioned):
        traced, _, run = function._compile(function.jit.bind(tuple(args), dict(named)))
        leaves = [*traced.function.params]
        whole = [v.type for v in leaves]
        return run.function, _cut_types(run, mesh, whole, {}), function.jit.name
    check_function(function, "simulate")
    spmd = function if isinstance(function, Spmd) else Spmd(function, mesh)
    return spmd.function, _cut_types(spmd, mesh, args, named), spmd.name


def _cut_types(spmd: Spmd, mesh: Mesh, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The arguments of a rank: types of the parts of tensors, and what is no tensor as it is."""
    listed = spmd.in_specs if isinstance(spmd.in_specs, (list, tuple)) else [spmd.in_specs] * len(args)
    if len(listed) != len(args):
        raise ArgumentError(
            f"{spmd.name} has {len(listed)} in_specs", location=user_location(),
            expected=f"one for each of {len(args)} arguments",
        )  # fmt: skip
    local = []
    for i, (value, specs) in enumerate(zip(args, listed, strict=True)):
        leaves = [_cut_type(*each, mesh) for each in match_specs(value, specs, f"argument {i} of {spmd.name}")]
        local.append(flatten(value, empty=True)[1].build(iter(leaves)))
    return local, dict(named)


def _cut_type(name: str, leaf: Any, spec: Any, mesh: Mesh) -> Any:
    type = None if isinstance(leaf, (bool, str)) else leaf_type(leaf)
    if type is None or isinstance(leaf, (int, float)):
        return leaf
    if spec is None:
        return type
    shape = [int(n) for n in type.shape]
    dims = check_spec(spec, shape, mesh, name)
    return TensorType(tuple(n // mesh.count(d) for n, d in zip(shape, dims, strict=True)), type.dtype)


def trace_ranks(body: Any, mesh: Mesh, local: Any, links: Mapping[str, Link], compute: Compute) -> list[RankProgram]:
    """The program of each rank; those that are equal are one object."""
    world = PredictedWorld(mesh.size)
    found: dict[int, RankProgram] = {}
    waiting = [0]
    while waiting:  # a rank may receive what a rank after it sends: until that is traced, its type is not known
        later: list[int] = []
        known = len(world.types)
        for rank in waiting:
            try:
                found[rank] = trace_rank(body, mesh, local, links, compute, rank, world)
            except UnknownMessage as error:
                later.append(rank)
                unknown = error
        if waiting == [0] and mesh.size > 1 and (later or _differs(found[0], mesh)):
            later += range(1, mesh.size)
        elif len(later) == len(waiting) and len(world.types) == known:
            raise CollectiveError(str(unknown), location=user_location(), expected="a message for each recv")
        waiting = later
    first = found[0]
    return [p if (p := found.get(rank, first)) != first else first for rank in range(mesh.size)]


def _differs(program: RankProgram, mesh: Mesh) -> bool:
    """Whether other ranks may run another program than rank 0."""
    return mesh.size <= COMPARED_RANKS or any(item.message is not None for item in program.items)


def trace_rank(
    body: Any, mesh: Mesh, local: Any, links: Mapping[str, Link], compute: Compute, rank: int = 0,
    world: PredictedWorld | None = None,
) -> RankProgram:  # fmt: skip
    """The program of a rank."""
    args, named = local
    jit = body if isinstance(body, Jit) else Jit(body)
    predicted: Any = world or PredictedWorld(mesh.size)
    context = RankContext(rank, mesh, predicted)
    traced = run_as_rank(context, lambda: jit._trace(jit.bind(tuple(args), named)))
    return make_program(traced.function, mesh, rank, links, compute)


# Events.


def _import_simpy() -> Any:
    try:
        import simpy
    except ImportError:
        raise DeviceUnavailable(
            "the prediction of a timeline needs simpy", suggestion="pip install 'tessera[simulate]'"
        ) from None
    return simpy


class _Meeting:
    """A collective of a group: it begins when the last member has come."""

    def __init__(self, env: Any, count: int, seconds: float) -> None:
        self.env, self.left, self.seconds = env, count, seconds
        self.began = env.event()

    def join(self) -> None:
        """One more member has come."""
        self.left -= 1
        if not self.left:
            self.began.succeed()


def run_events(programs: Sequence[Sequence[Item]], speeds: Sequence[float], overlap: bool) -> list[list[Span]]:
    """What every rank does when; that of one rank where all run one program at one speed: they do the same."""
    same = len(set(speeds)) == 1 and all(p is programs[0] for p in programs)
    simpy = _import_simpy()
    env = simpy.Environment()
    meetings: dict[tuple[tuple[int, ...], int], _Meeting] = {}
    messages: dict[Any, Any] = defaultdict(lambda: simpy.Store(env))
    numbers = range(1 if same else len(programs))
    runs = [_RankRun(env, programs[r], speeds[r], meetings, messages, same) for r in numbers]
    for run in runs:
        env.process(run.run(overlap))
    env.run()
    for rank, run in enumerate(runs):
        if run.current is not None:
            raise CollectiveError(
                f"rank {rank} waits for ever: {_describe_wait(run.current)}", location=run.current.loc,
                expected="a message for each recv, and each collective on all ranks of its group",
            )  # fmt: skip
    return [run.spans for run in runs]


def _describe_wait(item: Item) -> str:
    """What a rank waits for at an item."""
    if item.message is None:
        return f"other ranks do not come to its {item.label}"
    return f"rank {item.message.source} sends no message with tag {item.message.tag}"


class _RankRun:
    """The events of one rank; `alone` if it stands for all."""

    def __init__(
        self, env: Any, items: Sequence[Item], speed: float, meetings: Any, messages: Any, alone: bool
    ) -> None:
        self.env, self.items, self.speed, self.alone = env, items, speed, alone
        self.meetings, self.messages = meetings, messages
        self.current: Item | None = None  # what it executes, until the end
        self.spans: list[Span] = []
        self.counts: dict[tuple[int, ...], int] = {}
        self.ends: dict[int, Any] = {}
        self.last: Any = None

    def run(self, overlap: bool) -> Iterator[Any]:
        """The kernels in order, with the waits for communication."""
        for number, item in enumerate(self.items):
            self.current = item
            if item.members:
                self.last = self.ends[number] = self.env.process(self._communicate(item, self.last, self._join(item)))
            elif item.message is not None:
                self.ends[number] = self._exchange(item)
            else:
                yield from self._compute(item)
                continue
            if not overlap:
                yield from self._wait(self.ends[number], item)
        for number, end in self.ends.items():
            self.current = self.items[number]
            yield from self._wait(end, self.items[number])
        self.current = None

    def _exchange(self, item: Item) -> Any:
        """Begin a message; the event after which this rank has what it receives, or may go on."""
        message = item.message
        assert message is not None
        box = self.messages[message.source, message.to, message.tag]
        if message.sends:
            self.env.process(self._deliver(item, box))
            return self.env.timeout(0)
        return box.get()

    def _deliver(self, item: Item, box: Any) -> Iterator[Any]:
        for needed in item.needs:
            if self.ends[needed] is not None:
                yield self.ends[needed]
        start = self.env.now
        yield self.env.timeout(item.seconds)
        self._note("communication", item, start, self.env.now)
        box.put(item)

    def _compute(self, item: Item) -> Iterator[Any]:
        for needed in item.needs:
            yield from self._wait(self.ends[needed], item)
        start = self.env.now
        yield self.env.timeout(item.seconds / self.speed)
        self._note("compute", item, start, self.env.now)

    def _wait(self, end: Any, item: Item) -> Iterator[Any]:
        if not end.processed:
            start = self.env.now
            yield end
            self._note("wait", item, start, self.env.now)

    def _join(self, item: Item) -> _Meeting:
        key = item.members, self.counts.get(item.members, 0)
        self.counts[item.members] = key[1] + 1
        if key not in self.meetings:
            self.meetings[key] = _Meeting(self.env, 1 if self.alone else len(item.members), item.seconds)
        return self.meetings[key]  # type: ignore[no-any-return]

    def _communicate(self, item: Item, before: Any, meeting: _Meeting) -> Iterator[Any]:
        for event in (*(self.ends[needed] for needed in item.needs), before):
            if event is not None:
                yield event
        meeting.join()
        yield meeting.began
        start = self.env.now
        yield self.env.timeout(meeting.seconds)
        self._note("communication", item, start, self.env.now)

    def _note(self, kind: str, item: Item, start: float, end: float) -> None:
        if end > start:
            self.spans.append(Span(kind, item.label, item.place, start, end))
