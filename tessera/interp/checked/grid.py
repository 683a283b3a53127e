"""Debug mode and the barrier of a whole grid: what was touched before it meets nothing that comes after."""

from __future__ import annotations

from tessera.interp.checked.monitor import Monitor
from tessera.interp.checked.report import Finding
from tessera.interp.grid_meeting import parted, present
from tessera.op import Rules
from tessera.ops import tile

rules = Rules("tile debug grid barrier")


@rules(tile.grid_barrier)
def _(monitor, machine, node, args, go):
    here = present(machine)
    if not here.all():
        error = parted(machine, here)
        monitor.found(Finding("grid barrier", error.message, node.loc, suggestion=error.suggestion), last=True)
    monitor.chunk.passed(machine, machine.group)
    _forget(monitor)
    return go()


def _forget(monitor: Monitor) -> None:
    """Programs are looked at anew: tiles of one program know of each other by epochs and clocks."""
    for region in monitor.regions:
        monitor.settle(region)
        for domain in region.domains:
            if domain.timeless:
                domain.slots = {}
