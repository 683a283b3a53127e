"""Where the values of a tile function are made and used, in program order, with the loops around."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.ir.core import Block, Function, Node, Value
from tessera.ops import control
from tessera.ops.tile import grid_barrier
from tessera.types import RefType

LOOPS = (control.for_, control.while_)


@dataclass(frozen=True, eq=False)
class Site:
    """A node in its place: its number in program order, and the last number of each loop around it."""

    node: Node
    number: int
    loops: tuple[Node, ...]


class Uses:
    """The sites of a function: of every node, of every value's uses, and of writes to each memory."""

    def __init__(self, function: Function) -> None:
        self.sites: list[Site] = []
        self.made: dict[Value, Site] = {}
        self.used: dict[Value, list[Site]] = defaultdict(list)
        self.ends: dict[Node, int] = {}
        self.owners: dict[Value, tuple[Node, int]] = {}  # of a loop's carried parameters: the loop, the place
        self.writes: dict[Value, list[Site]] = defaultdict(list)
        self._refs = [p for p in function.params if isinstance(p.type, RefType)]
        self._block(function.body, ())

    def _block(self, block: Block, loops: tuple[Node, ...]) -> None:
        for node in block.nodes:
            site = Site(node, len(self.sites), loops)
            self.sites.append(site)
            for v in node.args:
                self.used[v].append(site)
            for v in node.results:
                self.made[v] = site
            if "write" in node.op.effects:
                self.writes[node.args[0]].append(site)
            if node.op is grid_barrier:  # other programs may have written any of them
                for ref in self._refs:
                    self.writes[ref].append(site)
            for region in node.regions:
                self._region(site, region)
            self.ends[node] = len(self.sites)

    def _region(self, site: Site, region: Block) -> None:
        inner = (*site.loops, site.node) if site.node.op in LOOPS else site.loops
        for place, param in enumerate(region.params):
            self.made[param] = Site(site.node, site.number, inner)
            carried = place - (site.node.op is control.for_)
            if carried >= 0:
                self.owners[param] = (site.node, carried)
        self._block(region, inner)
        # What a region hands back is used at its end.
        end = Site(site.node, len(self.sites), inner)
        self.sites.append(end)
        for v in region.results:
            self.used[v].append(end)

    def last(self, made: Site, use: Site) -> int:
        """The last moment at which this use reads: a loop that the value was not made in repeats it."""
        outer = [n for n in use.loops if n not in made.loops]
        return self.ends[outer[0]] if outer else use.number

    def backwards(self) -> Iterator[Site]:
        """The sites of nodes with results, last first."""
        return (s for s in reversed(self.sites) if self.is_made_at(s))

    def is_made_at(self, site: Site) -> bool:
        """Whether a site is that of a node with results (not the end of one of its regions)."""
        return bool(site.node.results) and self.made[site.node.results[0]] is site
