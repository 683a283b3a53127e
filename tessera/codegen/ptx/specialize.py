"""An entry whose threads have different work: warp groups that multiply, and one thread that fetches for them.

Both loop over the programs of the grid, so that the next program's blocks are fetched while one's results are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessera.codegen.ptx.arrange import arrange
from tessera.codegen.ptx.entry import Entry, bind_parameters, finished
from tessera.codegen.ptx.fetch import fetch, maps_of, stage_bytes
from tessera.codegen.ptx.infer import sizes
from tessera.codegen.ptx.kernel import Kernel
from tessera.codegen.ptx.ops import product_loop
from tessera.codegen.ptx.persistent import Persistent
from tessera.codegen.ptx.pipeline import early
from tessera.codegen.ptx.ring import Ring
from tessera.codegen.ptx.team import Team
from tessera.codegen.ptx.text import Files, Text
from tessera.codegen.ptx.unload import drained, room_for, stores_of
from tessera.codegen.ptx.warpgroup import GROUP, HEIGHT
from tessera.ir.core import Function, Node, Value

VECTOR = 8
# Registers of a thread that fetches and of one that multiplies, where two groups of the latter share the file.
FEW, MANY = 40, 232


def specialized(
    function: Function, loop: Node, files: Files | None, grid: Sequence[int], apart: bool, stages: int
) -> Entry:
    """A function with one `product_loop` at its top, as an entry."""
    text = Text(files)
    groups = min(2, loop.attrs["block"][0] // HEIGHT)
    team = Team(text, GROUP * groups, 1, helpers=GROUP)
    kernel = Kernel(arrange(function, team.threads, VECTOR), text, team, VECTOR, grid, apart)
    kernel.rank = len(grid)
    bind_parameters(kernel, ())
    params = dict(kernel.values)
    node = next(n for n in kernel.function.body.nodes if n.op is product_loop)
    maps = [*maps_of(kernel, node)]
    stores = list(stores_of(kernel, len(maps)))
    maps += [m for _, m in stores]
    kernel.maps = tuple(_map_address(text, f"{function.name}_map{m.index}") for m in maps)
    kernel.unloads = {store: kernel.maps[m.index] for store, m in stores}
    kernel.ring = Ring(text, kernel.room, stages, sum(stage_bytes(node)), groups, room_for(groups) if stores else 0)
    kernel.ring.prepare(team.thread)
    fetching, end = text.new_label("helper"), text.new_label("end")
    text.do(f"bra {fetching}", guard=text.let("setp.ge.u32", "pred", team.thread, team.threads))
    _multiplying(kernel, grid)
    text.do(f"bra {end}")
    text.label(fetching)
    _fetching(kernel, grid, params, end)
    text.label(end)
    text.line("ret")
    described = [m.described(_ref(kernel, m.param).dtype.name, _shape(kernel, m.param)) for m in maps]
    total = 1
    for n in grid:
        total *= n
    return finished(kernel, described, total)


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
    if kernel.ring.groups > 1:
        kernel.text.do("setmaxnreg.inc.sync.aligned.u32", MANY)
    kernel.walker = kernel.ring.walk(0)
    kernel.hazards.around(kernel.function.body)
    _each_program(kernel, grid, lambda: kernel.run(kernel.function.body))
    if kernel.unloads:
        drained(kernel)


def _fetching(kernel: Kernel, grid: Sequence[int], params: dict[Value, tuple[str, ...]], end: str) -> None:
    """What the first of the helpers does: places by scalar arithmetic, and the copies."""
    text, ring = kernel.text, kernel.ring
    assert ring is not None
    if ring.groups > 1:
        text.do("setmaxnreg.dec.sync.aligned.u32", FEW)
    text.do(f"bra {end}", guard=text.let("setp.ne.u32", "pred", kernel.team.thread, kernel.team.threads))
    walker = ring.walk(1)  # a stage is empty at first

    def program() -> None:
        kernel.values = dict(params)
        for node in kernel.function.body.nodes:
            if node.op is product_loop:
                fetch(kernel, node, walker)
                return
            if early(node):
                kernel.emit(node)

    _each_program(kernel, grid, program)


def _each_program(kernel: Kernel, grid: Sequence[int], body: Callable[[], None]) -> None:
    kernel.persistent = Persistent(kernel.text, grid)
    loop = kernel.persistent.begin()
    body()
    kernel.persistent.end(loop)
