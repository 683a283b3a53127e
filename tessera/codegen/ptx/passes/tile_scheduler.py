"""Tile scheduler (CUTLASS): persistent kernels, rasterisation order, and thread-block clusters with multicast.

As many blocks as the GPU runs at once each work through a share of the grid. The order groups programs that read the
same blocks, and takes long programs first. Blocks of a cluster fetch what they share once for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.ptx.ops import (
    PREFETCHING,
    WARP_SPECIALISED,
    LaunchFacts,
    async_mma,
    gemm_mainloop,
    get_fact,
    set_facts,
)
from tessera.codegen.ptx.passes.layout_inference import static_shape
from tessera.codegen.ptx.table.warpgroup.tensor_map import (
    BOX_COLUMNS,
    SWIZZLE_ROWS,
    block_starts,
    count_fetched_rows,
    stage_bytes,
)
from tessera.codegen.ptx.text.builder import PtxBuilder, element_bytes
from tessera.core.errors import ResourceError
from tessera.core.symbolic_dim import ceil_divide
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.rules import Rules
from tessera.ops.dialects import control_flow, tile
from tessera.ops.tensor import basic, elementwise

if TYPE_CHECKING:
    from tessera.codegen.ptx.layout import ThreadTeam


# Tile scheduler (CUTLASS): persistent kernels, rasterisation order, and thread-block clusters with multicast.
#
# As many blocks as the GPU runs at once each work through a share of the grid. The order groups programs that read the
# same blocks, and takes long programs first. Blocks of a cluster fetch what they share once for all.


# Rasterisation order: programs that read the same blocks follow each other, and long programs come first.


L2_BYTES = 1 << 25  # bytes that stay in the L2 cache of a GPU while others pass through
CONCURRENT_PROGRAMS = 128  # about the number of programs that a GPU runs at once
monotonicity_rules = Rules("trend along the grid")  # rule(uses, node, axis): 1, 0, -1 or None


@dataclass(frozen=True)
class RasterOrder:
    """An order of the grid's axes, the fastest-varying first.

    `falling`: the last axis is walked from its end. `section`: the number of programs along the other axes for which
    the whole last axis is walked before the next section (0: all of them).
    """

    axes: tuple[int, ...]
    falling: bool = False
    section: int = 0


def choose_raster_order(function: Function, grid: Sequence[int]) -> RasterOrder | None:
    """The order for a function with `async_mma` products, or None if it has none.

    What they read is shared by programs along axes that its place does not depend on. Where there is one such axis, it
    is walked last, in sections of programs whose blocks a cache holds. Where a loop has more rounds the further along
    an axis its program is, that axis is walked last and from its end, in such sections.
    """
    reading = [n for n in function.body.walk() if n.op is async_mma]
    if not reading:
        return None
    uses = UseDef(function)
    bounds = [n.args[1] for n in function.body.nodes if n.op is control_flow.for_]
    known = find_grid_axes(uses, (v for n in reading for v in block_starts(n)))
    long = [a for a in range(len(grid)) if bounds and all(find_monotonicity(uses, v, a) == 1 for v in bounds)]
    shared = [a for a in range(len(grid)) if a not in known and a not in long]
    rest = [a for a in range(len(grid)) if a in known and a not in long]
    if not long and len(shared) == 1:
        # Measured: concurrent programs that all read the same rows are slower than those that read a few ranges.
        return RasterOrder((*rest, *shared), False, _choose_section(uses, reading, grid, rest, L2_BYTES // 2))
    if len(long) != 1:
        return RasterOrder((*shared, *rest, *long))
    if (
        math.prod(grid[a] for a in (*shared, *rest)) < CONCURRENT_PROGRAMS
    ):  # concurrent programs share their operands in any order
        return RasterOrder((*shared, *rest, *long), True)
    return RasterOrder((*shared, *rest, *long), True, _choose_section(uses, reading, grid, (*shared, *rest), L2_BYTES))


def _choose_section(uses: UseDef, reading: Sequence[Node], grid: Sequence[int], axes: Sequence[int], cache: int) -> int:
    """The largest divisor of the programs along some axes whose operands fit in a cache of so many bytes."""
    total, each = math.prod(grid[a] for a in axes), _bytes_read(uses, reading, grid)
    return max((n for n in range(1, total + 1) if total % n == 0 and n * each <= cache), default=1)


def _bytes_read(uses: UseDef, reading: Sequence[Node], grid: Sequence[int]) -> int:
    """An upper bound of the bytes that one program reads: an equal share of each array."""
    refs = {n.args[1]: n for n in reading}
    shares = (
        math.prod(static_shape(v))
        * element_bytes(v.type.dtype)
        // math.prod(grid[a] for a in find_grid_axes(uses, block_starts(n)))  # type: ignore[union-attr]
        for v, n in refs.items()
    )
    return sum(shares)


def find_grid_axes(uses: UseDef, values: Iterable[Value]) -> set[int]:
    """The axes of the grid that scalars depend on."""
    found, seen, left = set(), set(), list(values)
    while left:
        node = uses.get(left.pop())
        if node is None or node in seen:
            continue
        seen.add(node)
        left += node.args
        if node.op is tile.program_id:
            found.add(node.attrs["axis"])
    return found


def find_monotonicity(uses: UseDef, v: Value, axis: int) -> int | None:
    """Whether a scalar increases (1), is constant (0) or decreases (-1) along a grid axis; None if unknown."""
    node = uses.get(v)
    rule = monotonicity_rules.get(node.op) if node is not None else None
    return rule(uses, node, axis) if rule is not None else None


@monotonicity_rules(tile.program_id)
def _(uses: UseDef, node: Node, axis: int) -> int | None:
    return 1 if node.attrs["axis"] == axis else 0


@monotonicity_rules(basic.full)
def _(uses, node, axis):
    return 0


@monotonicity_rules(elementwise.add, elementwise.minimum, elementwise.maximum)
def _(uses, node, axis):
    x, y = (find_monotonicity(uses, v, axis) for v in node.args)
    return None if x is None or y is None or x * y < 0 else x or y


@monotonicity_rules(elementwise.sub)
def _(uses, node, axis):
    x, y = (find_monotonicity(uses, v, axis) for v in node.args)
    return None if x is None or y is None or x * y > 0 else x or -y


@monotonicity_rules(elementwise.mul)
def _(uses, node, axis):
    for v, other in (node.args, node.args[::-1]):
        factor = uses.get(other)
        if factor is not None and factor.op is basic.full:
            found, number = find_monotonicity(uses, v, axis), factor.attrs["value"]
            return found and found * ((number > 0) - (number < 0))
    return None


# Thread-block clusters with multicast: each block fetches a part of the shared operand and sends it to all blocks of
# the cluster. A stage is empty once the warp groups of all of them have read it.


CLUSTER_SIZES = (2, 4)


@dataclass(frozen=True)
class ThreadBlockCluster:
    """`size` neighbouring programs along a grid axis, which share one operand of the product (0: the left one)."""

    size: int
    axis: int
    side: int

    @property
    def mask(self) -> int:
        """The multicast mask: the blocks that receive a copy."""
        return (1 << self.size) - 1


def choose_requested_cluster(
    function: Function, ready: Function, grid: Sequence[int], able: bool
) -> ThreadBlockCluster:
    """The cluster that a Schedule requests by the attribute `cluster`.

    Raises:
        ResourceError: the function, as it is `ready`, its grid or the architecture (not `able`) do not allow it.
    """
    size = int(function.attrs["cluster"])
    found = find_cluster(ready, grid, size) if able else None
    if found is None:
        raise ResourceError(
            f"{function.name} cannot run in clusters of {size} programs",
            location=function.loc,
            expected="sm_90a; one loop of products that copies feed; "
            f"{' or '.join(map(str, CLUSTER_SIZES))} programs, which "
            "divide an axis of the grid along which one side of the product stays the same",
            received=f"a grid of {tuple(grid)}",
            suggestion="other block sizes, or a schedule without cluster",
        )
    return found


def find_cluster(function: Function, grid: Sequence[int], size: int) -> ThreadBlockCluster | None:
    """The cluster that saves most bytes for a function with a `gemm_mainloop`, or None if none is possible."""
    node = next((n for n in function.body.nodes if n.op is gemm_mainloop), None)
    if node is None or size not in CLUSTER_SIZES:
        return None
    found = list(_candidate_clusters(function, node, grid, size))
    return max(found, key=lambda each: stage_bytes(node)[each.side], default=None)


def _candidate_clusters(function: Function, node: Node, grid: Sequence[int], size: int) -> Iterator[ThreadBlockCluster]:
    uses = UseDef(function)
    places = [[node.args[5 + at] for at in node.attrs[side] if at >= 0] for side in ("left", "right")]
    axes = [find_grid_axes(uses, starts) for starts in places]
    for axis, count in enumerate(grid):
        for side in (0, 1):
            alone = axis in axes[1 - side] and axis not in axes[side]
            if alone and count % size == 0 and _count_parts(node, side) % size == 0:
                yield ThreadBlockCluster(size, axis, side)


def _count_parts(node: Node, side: int) -> int:
    """The parts into which multicast can split an operand of a stage: TMA boxes, or groups of eight rows."""
    rows, columns, _ = node.attrs["block"]
    if side == 0:
        if node.attrs["turned"]:
            return rows // BOX_COLUMNS
        return rows // SWIZZLE_ROWS if count_fetched_rows(node) == rows else 1
    return columns // SWIZZLE_ROWS if node.attrs["flipped"] else ceil_divide(columns, BOX_COLUMNS)


# Persistent kernels: as many blocks as the GPU runs at once, each with a share of the grid. The default order is bands
# of `BAND_ROWS` programs along the first axis, walked along the second: concurrent programs share rows and columns.


BAND_ROWS = 8


class TileScheduler:
    """Emits the persistent loop over a grid's programs."""

    def __init__(
        self,
        text: PtxBuilder,
        grid: Sequence[int],
        order: RasterOrder | None = None,
        cluster: ThreadBlockCluster | None = None,
        team: ThreadTeam | None = None,
    ) -> None:
        self.text, self.order, self.cluster = text, order, cluster
        self.team = team if team is not None and team.teams > 1 else None  # ping-pong teams, which alternate
        self.sizes = tuple(grid)
        # The loop is over clusters: over the first program of each.
        each = [cluster.size if cluster is not None and axis == cluster.axis else 1 for axis in range(len(grid))]
        self.grid = tuple(n // c for n, c in zip(grid, each, strict=True))
        self.total, self.band = math.prod(self.grid), BAND_ROWS // each[0]
        self._places: list[str] = []

    def size(self, axis: int) -> int:
        """The programs along an axis."""
        return self.sizes[axis] if axis < len(self.sizes) else 1

    def place(self, axis: int) -> str:
        """The current program id along an axis, as an index."""
        return self._places[axis] if axis < len(self._places) else "0"

    def begin(self) -> tuple[str, str, str]:
        """Begin the loop; returns what `end` needs."""
        text = self.text
        number = text.let("mov.u32", "b32", "%ctaid.x" if self.cluster is None else "%clusterid.x")
        if self.team is not None:
            step = text.let("mov.u32", "b32", "%nctaid.x")
            text.do("mad.lo.u32", number, self.team.team_index, step, number)
        head, done = text.new_label("program"), text.new_label("last")
        text.label(head)
        text.do(f"bra {done}", guard=text.let("setp.ge.u32", "pred", number, self.total))
        self._places = self._wide(number)
        return number, head, done

    @contextmanager
    def at(self, number: str) -> Iterator[None]:
        """Inside, program ids are those of another program."""
        before, self._places = self._places, self._wide(number)
        yield
        self._places = before

    def _wide(self, number: str) -> list[str]:
        """The program ids of a linear program number, as indices."""
        places = self._split(number)
        if self.cluster is not None:
            rank = self.text.let("mov.u32", "b32", "%cluster_ctarank")
            first = places[self.cluster.axis]
            places[self.cluster.axis] = self.text.let("mad.lo.u32", "b32", first, self.cluster.size, rank)
        return [self.text.let("cvt.u64.u32", "b64", each) for each in places]

    def end(self, loop: tuple[str, str, str]) -> None:
        """End the loop."""
        number, head, done = loop
        step = self.text.let("mov.u32", "b32", "%nctaid.x" if self.cluster is None else "%nclusterid.x")
        if self.team is not None:
            step = self.text.let("mul.lo.u32", "b32", step, self.team.teams)
        self.text.do("add.u32", number, number, step)
        self.text.do(f"bra {head}")
        self.text.label(done)

    def _split(self, number: str) -> list[str]:
        """Split a linear program number into program ids."""
        text = self.text
        if self.order is not None:
            return self._ordered(number, self.order)
        if len(self.grid) == 1:
            return [number]
        first, second = self.grid[:2]
        outer: list[str] = []
        rest = number
        if len(self.grid) == 3:
            outer = [text.let("div.u32", "b32", number, first * second)]
            rest = text.let("rem.u32", "b32", number, first * second)
        band = text.let("div.u32", "b32", rest, self.band * second)
        inside = text.let("rem.u32", "b32", rest, self.band * second)
        begin = text.let("mul.lo.u32", "b32", band, self.band)
        # The last band may be narrower.
        narrow = text.let("min.u32", "b32", text.let("sub.u32", "b32", first, begin), self.band)
        row = text.let("add.u32", "b32", begin, text.let("rem.u32", "b32", inside, narrow))
        return [row, text.let("div.u32", "b32", inside, narrow), *outer]

    def _ordered(self, number: str, order: RasterOrder) -> list[str]:
        """The program ids in a given order of the axes."""
        *axes, last = order.axes
        found = [""] * len(self.grid)
        total = math.prod(self.grid[a] for a in axes)
        section = order.section or total
        rest, inside = self._divided(number, section)
        outer, found[last] = self._divided(rest, self.grid[last])
        first = self.text.let("mad.lo.u32", "b32", outer, section, inside)
        for axis in axes:
            first, found[axis] = self._divided(first, self.grid[axis])
        if order.falling:
            found[last] = self.text.let("sub.u32", "b32", self.grid[last] - 1, found[last])
        return found

    def _divided(self, number: str, by: int) -> tuple[str, str]:
        """Quotient and remainder."""
        return tuple(self.text.let(f"{op}.u32", "b32", number, by) for op in ("div", "rem"))  # type: ignore[return-value]


# Rasterisation: the order in which a persistent kernel works through the grid, as a function attribute.


def choose_order(function: Function) -> Function:
    """The function with `ptx.raster`, if its kernel is persistent and another order than the default pays."""
    order = _find_order(function)
    if order is None:
        return function
    return set_facts(function, raster=(order.axes, order.falling, order.section))


def _find_order(function: Function) -> RasterOrder | None:
    kind, grid = get_fact(function, "kernel"), LaunchFacts.of(function).grid
    if kind == WARP_SPECIALISED:
        return choose_raster_order(function, grid)
    return RasterOrder(tuple(reversed(range(len(grid))))) if kind == PREFETCHING and len(grid) > 1 else None


def read_order(function: Function) -> RasterOrder | None:
    """The order that `choose_order` recorded; None: bands of neighbouring programs (the default)."""
    held = get_fact(function, "raster")
    return None if held is None else RasterOrder(*held)
