"""An entry whose threads have different work: warp groups that multiply, and one thread that fetches for them.

Both loop over the programs of the grid, so that the next program's blocks are fetched while one's results are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.entries.abreast import TEAMS, abreast, begin_turns, rounds
from tessera.codegen.ptx.entries.cluster import Cluster
from tessera.codegen.ptx.entries.feed import FETCHED, Feed, fetched_bytes, maps_of_streams
from tessera.codegen.ptx.entries.fetch import Map, blank, fetch, maps_of, stage_bytes
from tessera.codegen.ptx.entries.persistent import Persistent
from tessera.codegen.ptx.entries.ring import Ring
from tessera.codegen.ptx.entries.unload import drained, room_for, stores_of
from tessera.codegen.ptx.entries.warpgroup import GROUP, HEIGHT
from tessera.codegen.ptx.entry import Entry, bind_parameters, finished
from tessera.codegen.ptx.kernel import Kernel
from tessera.codegen.ptx.ops import product_loop, resident, streamed
from tessera.codegen.ptx.passes.arrange import arrange
from tessera.codegen.ptx.passes.hoist import loads_first
from tessera.codegen.ptx.passes.infer import sizes
from tessera.codegen.ptx.passes.order import order_of
from tessera.codegen.ptx.passes.pipeline import early
from tessera.codegen.ptx.team import Team
from tessera.codegen.ptx.text import Files, Text
from tessera.ir.core import Function, Node, Value

VECTOR = 8
# Registers of a thread that fetches and of one that multiplies, where there are so many of the latter: together no
# more than all threads begin with, or those that want more wait for ever.
SHARES = {256: (40, 232), 512: (32, 112)}
FEW_LOADED = 1024  # elements that may be loaded before the products are made, which leave few registers
KEPT = 2  # blocks that stay: one for the program under way, one for the next
SPECIAL = (product_loop, *FETCHED)


@dataclass(frozen=True)
class Work:
    """What there is to fetch: by which maps, how many bytes a stage holds, and what the thread does for a program."""

    maps: Sequence[Map]
    stage: int
    program: Callable[[], None]


def special(function: Function) -> bool:
    """Whether a function has work for threads of different kinds."""
    return any(node.op in SPECIAL for node in function.body.walk())


def specialized(
    function: Function, files: Files | None, grid: Sequence[int], apart: bool, stages: int,
    cluster: Cluster | None = None,
) -> Entry:  # fmt: skip
    """A function with a `product_loop` or `streamed` products as an entry."""
    text, function = Text(files), loads_first(function, FEW_LOADED)
    own = abreast(function, grid) if cluster is None else 0
    teams, groups = (TEAMS, own) if own else (1, min(2, _rows(function) // HEIGHT))
    team = Team(text, GROUP * groups, 1, helpers=GROUP, teams=teams)
    kernel = Kernel(arrange(function, team.threads, VECTOR), text, team, VECTOR, grid, apart)
    kernel.rank, kernel.cluster = len(grid), cluster
    bind_parameters(kernel, ())
    work = (_loop_work if any(n.op is product_loop for n in kernel.function.body.nodes) else _stream_work)(kernel)
    stores = list(stores_of(kernel, len(work.maps)))
    maps = [*work.maps, *(m for _, m in stores)]
    kernel.maps = tuple(_map_address(text, f"{function.name}_map{m.index}") for m in maps)
    kernel.unloads = {store: kernel.maps[m.index] for store, m in stores}
    more, blocks = room_for(team) if stores else 0, cluster.size if cluster is not None else 1
    kernel.ring = Ring(text, kernel.room, stages, work.stage, groups, more, blocks)
    _roles(kernel, grid, work)
    described = [m.described(_ref(kernel, m.param).dtype.name, _shape(kernel, m.param)) for m in maps]
    return finished(kernel, described, math.prod(grid))


def _roles(kernel: Kernel, grid: Sequence[int], work: Work) -> None:
    """The text: each kind of thread on its way."""
    text, team, ring = kernel.text, kernel.team, kernel.ring
    assert ring is not None
    own = {n: Ring(text, kernel.room, KEPT, fetched_bytes(n), ring.groups) for n in _residents(kernel)}
    for each in own.values():
        each.begin(team.number)
    for node in kernel.function.body.nodes:
        if node.op is product_loop:
            blank(kernel, node)
    ring.prepare(team.number)
    fetching, end = text.new_label("helper"), text.new_label("end")
    params = dict(kernel.values)
    text.do(f"bra {fetching}", guard=text.let("setp.ge.u32", "pred", team.number, team.working))
    kernel.kept = {n: each.walk(0) for n, each in own.items()}
    _multiplying(kernel, grid)
    text.do(f"bra {end}")
    text.label(fetching)
    kernel.values = params
    kernel.kept = {n: each.walk(1) for n, each in own.items()}
    _fetching(kernel, grid, work, end)
    text.label(end)
    ring.end()
    text.line("ret")


def _rows(function: Function) -> int:
    """The rows of the blocks that are multiplied."""
    return next(sizes(n.out)[0] for n in function.body.walk() if n.op in (product_loop, streamed))


def _residents(kernel: Kernel) -> list[Node]:
    return [n for n in kernel.function.body.nodes if n.op is resident]


def _loop_work(kernel: Kernel) -> Work:
    """The work of a `product_loop`."""
    node = next(n for n in kernel.function.body.nodes if n.op is product_loop)
    assert kernel.ring is None

    def program() -> None:
        assert kernel.walker is not None
        for each in kernel.function.body.nodes:
            if each is node:
                fetch(kernel, node, kernel.walker)
                return
            if early(each):
                kernel.emit(each)

    return Work(maps_of(kernel, node), sum(stage_bytes(node)), program)


def _stream_work(kernel: Kernel) -> Work:
    """The work of `streamed` products."""
    maps = maps_of_streams(kernel.function)

    def program() -> None:
        assert kernel.walker is not None
        Feed(kernel, kernel.walker, maps, kernel.kept).run(kernel.function.body)

    stage = max(fetched_bytes(n) for n in maps if n.op is streamed)
    return Work(list(dict.fromkeys(maps.values())), stage, program)


def _ref(kernel: Kernel, param: int):  # type: ignore[no-untyped-def]
    return kernel.function.params[param].type


def _shape(kernel: Kernel, param: int) -> tuple[int, ...]:
    return sizes(kernel.function.params[param])


def _map_address(text: Text, name: str) -> str:
    with text.first():
        place = text.let("mov.b64", "b64", name)
        address = text.let("cvta.param.u64", "b64", place)
        text.do("prefetch.tensormap", f"[{address}]")
    return address


def _multiplying(kernel: Kernel, grid: Sequence[int]) -> None:
    """What the warp groups do: the whole function, program after program."""
    assert kernel.ring is not None
    team, function = kernel.team, kernel.function
    if team.working > GROUP:
        kernel.text.do("setmaxnreg.inc.sync.aligned.u32", SHARES[team.working][1])
    kernel.walker = walker = kernel.ring.walk(0)
    others = 0
    if team.teams > 1:
        others = rounds(function, next(n for n in function.body.nodes if n.op is product_loop)) or 0
        walker.skip(others, kernel.text.let("setp.ne.u32", "pred", team.index, 0))
        begin_turns(team)
    kernel.hazards.around(function.body)

    def program() -> None:
        kernel.run(function.body)
        walker.skip(others)

    _each_program(kernel, grid, program, team)
    if kernel.unloads:
        drained(kernel)


def _fetching(kernel: Kernel, grid: Sequence[int], work: Work, end: str) -> None:
    """What the first of the helpers does: places by scalar arithmetic, and the copies."""
    text, ring = kernel.text, kernel.ring
    assert ring is not None
    if kernel.team.working > GROUP:
        text.do("setmaxnreg.dec.sync.aligned.u32", SHARES[kernel.team.working][0])
    text.do(f"bra {end}", guard=text.let("setp.ne.u32", "pred", kernel.team.number, kernel.team.working))
    kernel.walker = ring.walk(1)  # a stage is empty at first
    params: dict[Value, tuple[str, ...]] = dict(kernel.values)

    def program() -> None:
        kernel.values = dict(params)
        work.program()

    _each_program(kernel, grid, program)


def _each_program(kernel: Kernel, grid: Sequence[int], body: Callable[[], None], team: Team | None = None) -> None:
    kernel.persistent = Persistent(kernel.text, grid, order_of(kernel.function, grid), kernel.cluster, team)
    loop = kernel.persistent.begin()
    body()
    kernel.persistent.end(loop)
