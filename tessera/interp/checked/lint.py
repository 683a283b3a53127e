"""Advice about memory traffic: bank conflicts, and accesses that do not coalesce, counted for each access."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tessera.interp.checked import lanes
from tessera.interp.checked.access import Access
from tessera.interp.checked.lanes import Traffic
from tessera.interp.checked.report import Finding
from tessera.interp.machine import Machine
from tessera.ir.core import Node
from tessera.types import GLOBAL, SHARED, RefType

if TYPE_CHECKING:
    from tessera.interp.checked.monitor import Monitor

# An access to global memory is reported if it touches at least so many times the sectors it needs.
WASTE = 2
_Key = tuple[Node, str]


class Lint:
    """The traffic of each access in a launch, by node and space."""

    def __init__(self) -> None:
        self.seen: dict[_Key, Traffic] = {}
        self.names: dict[_Key, str] = {}

    def access(self, machine: Machine, access: Access, ref: RefType, swizzle: str) -> None:
        """Count an access."""
        if ref.space not in (GLOBAL, SHARED):
            return
        offset, active = lanes.offsets(machine, access)
        size = access.memory.array.itemsize
        if ref.space == SHARED:
            found = lanes.banks(lanes.swizzled(access, offset, swizzle), active, size)
        else:
            found = lanes.sectors(offset, active, size)
        key = (access.node, ref.space)
        self.seen[key] = self.seen.get(key, Traffic(0, 0, 0, 0)) + found
        self.names[key] = access.memory.name

    def report(self, monitor: Monitor) -> None:
        """A piece of advice for each access that wastes turns or sectors."""
        for (node, space), traffic in self.seen.items():
            make = _conflicts if space == SHARED else _scattered
            finding = make(node, self.names[node, space], traffic)
            if finding is not None:
                monitor.found(replace(finding, location=node.loc))
        self.__init__()  # type: ignore[misc]


def _conflicts(node: Node, name: str, traffic: Traffic) -> Finding | None:
    if not traffic.excess:
        return None
    message = (
        f"bank conflicts on {name}: up to {traffic.worst} different words in one bank; "
        f"{traffic.taken} turns for {traffic.warps} warps where {traffic.least} would do"
    )
    suggestion = 'pad the rows by one element, or alloc_shared(..., swizzle="xor")'
    return Finding("bank conflict", message, node.loc, suggestion=suggestion)


def _scattered(node: Node, name: str, traffic: Traffic) -> Finding | None:
    if traffic.taken < WASTE * traffic.least or traffic.taken <= traffic.warps:
        return None
    message = (
        f"accesses to {name} do not coalesce: {traffic.taken} sectors of 32 bytes for {traffic.warps} warps where "
        f"{traffic.least} would hold what is used"
    )
    return Finding("uncoalesced", message, node.loc, suggestion="let neighbouring lanes touch neighbouring elements")
