"""Which branches of a group wait at mbarriers, or for parities, that differ between its tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tessera.interp.affine import Affine
from tessera.interp.machine import Machine
from tessera.interp.memory import Memory
from tessera.ir.core import Node, Value
from tessera.numerics.bounded import Bounded
from tessera.passes.differing import Differing


def uneven(machine: Machine, node: Node, env: Mapping[Value, Any]) -> bool:
    """Whether a wait inside a branch may be at another mbarrier, or for another parity, in each tile.

    What `env` does not have is a constant.
    """
    found = Differing({v for region in node.regions for v in region.free if v in env and _differs(machine, env[v])})
    for region in node.regions:
        found.walk(region)
    return found.uneven


def _differs(machine: Machine, held: Any) -> bool:
    """Whether a value differs between the tiles of a group."""
    if isinstance(held, Affine):
        return bool(held.steps[-1])
    array = held.array if isinstance(held, Memory) else held
    array = array.value if isinstance(array, Bounded) else array
    own = not isinstance(held, Memory) or held.lead > 0
    return own and array.ndim >= machine.rank and array.shape[machine.rank - 1] > 1
