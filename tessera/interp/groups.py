"""What tiles of a group tell each other: the instance axis of tiles, moved and indexed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.errors import ExecutionError
from tessera.interp.machine import Machine
from tessera.numerics.bounded import Bounded, certain
from tessera.op import Rules
from tessera.ops import group

rules = Rules("tile groups")


@rules(group.collect)
def _(machine, node, args, run):
    width, rank, x = node.attrs["width"], machine.rank, args[0]
    _meet(machine, width)
    block = x.shape[rank:]
    lead = x.shape[:rank]
    if machine.group == 1 or lead[-1] == 1:  # the same in every tile
        return (x.reshape(*lead, 1, *block),)
    before, count = lead[:-1], lead[-1]
    if count == width:  # what one sees all see
        return (x.reshape(*before, 1, width, *block),)
    each = x.reshape(*before, count // width, 1, width, *block)
    seen = np.broadcast_to(each, (*before, count // width, width, width, *block))
    return (seen.reshape(*before, count, width, *block),)


@rules(group.exchange)
def _(machine, node, args, run):
    width, rank, x = node.attrs["width"], machine.rank, args[0]
    _meet(machine, width)
    if machine.group == 1 or x.shape[rank - 1] == 1:
        return (x,)
    me = np.arange(x.shape[rank - 1])
    lane = np.asarray(certain(args[1]))
    place = me - me % width + lane % width  # along the last instance axis
    index = place.reshape(place.shape + (1,) * (x.ndim - rank))
    return (_taken(x, index, rank - 1),)


@rules(group.meet)
def _(machine, node, args, run):
    # Instances run in step, so what came before is done; only a stretch that parts can go wrong.
    _meet(machine, node.attrs["width"], "meet")
    return ()


def _taken(x: Any, index: np.ndarray, axis: int) -> Any:
    if isinstance(x, Bounded):
        return Bounded(np.take_along_axis(x.value, index, axis), np.take_along_axis(x.radius, index, axis))
    return np.take_along_axis(x, index, axis)


def _meet(machine: Machine, width: int, what: str = "exchange values") -> None:
    """Check that each stretch of tiles is here whole or not at all."""
    if machine.group % width:
        raise ExecutionError(f"stretches of {width} tiles do not make up a group of {machine.group}")
    if machine.group == 1:
        return
    here = machine.count[-1]
    whole = machine.first[-1] % width == 0 and here % width == 0
    mask = machine.active
    if whole and mask is not None and mask.shape[-1] > 1:
        stretches = mask.reshape(*mask.shape[:-1], math.ceil(here / width), width)
        whole = bool((stretches == stretches[..., :1]).all())
    if not whole:
        raise ExecutionError(
            f"some tiles {what} and others of the same stretch do not",
            expected=f"all {width} tiles of a stretch at the same operation",
            received=f"a condition that differs between the {machine.group} tiles",
            suggestion="move it out of the `if` or loop whose condition differs between tiles",
        )
