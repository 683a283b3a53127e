"""Clusters: blocks of threads that work on neighbouring programs, and fetch what those share once for all (multicast).

Each block fetches its part of the shared side and sends it to every block of the cluster. A stage is then empty when
the warp groups of all of them have read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tessera.codegen.ptx.entries.fetch import EIGHT, INNER, present, stage_bytes
from tessera.codegen.ptx.ops import product_loop
from tessera.codegen.ptx.passes.order import axes_of
from tessera.errors import ResourceError
from tessera.ir.core import Function, Node

SIZES = (2, 4)


@dataclass(frozen=True)
class Cluster:
    """So many programs side by side along an axis of the grid, which share a side of the product (0: the left one)."""

    size: int
    axis: int
    side: int

    @property
    def mask(self) -> int:
        """The blocks that a copy is sent to."""
        return (1 << self.size) - 1


def asked_cluster(function: Function, ready: Function, grid: Sequence[int], able: bool) -> Cluster | None:
    """The cluster that a Schedule asks for, or None where it asks for none.

    Raises:
        ResourceError: the function, as it is `ready`, its grid or the architecture (not `able`) do not allow it.
    """
    size = int(function.attrs.get("cluster", 1))
    if size == 1:
        return None
    found = cluster_of(ready, grid, size) if able else None
    if found is None:
        raise ResourceError(
            f"{function.name} cannot run in clusters of {size} programs", location=function.loc,
            expected=f"sm_90a; one loop of products that copies feed; {' or '.join(map(str, SIZES))} programs, which "
            "divide an axis of the grid along which one side of the product stays the same",
            received=f"a grid of {tuple(grid)}", suggestion="other block sizes, or a schedule without cluster",
        )  # fmt: skip
    return found


def cluster_of(function: Function, grid: Sequence[int], size: int) -> Cluster | None:
    """The cluster for a function with a `product_loop` that saves most, or None if none fits."""
    node = next((n for n in function.body.nodes if n.op is product_loop), None)
    if node is None or size not in SIZES:
        return None
    found = list(_fitting(function, node, grid, size))
    return max(found, key=lambda each: stage_bytes(node)[each.side], default=None)


def _fitting(function: Function, node: Node, grid: Sequence[int], size: int) -> Iterator[Cluster]:
    producers = {v: n for n in function.body.walk() for v in n.results}
    places = [[node.args[5 + at] for at in node.attrs[side] if at >= 0] for side in ("left", "right")]
    axes = [axes_of(producers, starts) for starts in places]
    for axis, count in enumerate(grid):
        for side in (0, 1):
            alone = axis in axes[1 - side] and axis not in axes[side]
            if alone and count % size == 0 and _parts(node, side) % size == 0:
                yield Cluster(size, axis, side)


def _parts(node: Node, side: int) -> int:
    """Into how many parts a side of a stage can be cut: boxes side by side, or eight rows each."""
    rows, columns, _ = node.attrs["block"]
    if side == 0:
        if node.attrs["turned"]:
            return rows // INNER
        return rows // EIGHT if present(node) == rows else 1
    return columns // (EIGHT if node.attrs["flipped"] else INNER)
