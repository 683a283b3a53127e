"""The libraries `<kernels/tally/layout>` and `<kernels/tally/pe>`: PEs of a rectangle tell when all are done.

The kernel's code is closed: this one counts at the rectangle's north-east PE, where each message arrives as many cycles
later as there are hops, and takes no queue and no wavelet of the fabric.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import CslError
from tessera.interp.target.csl.values import NativeFunction, Value

FIELDS = ("kernel_height", "kernel_width", "phase2_tally", "colors", "output_color")


@dataclass
class Tally:
    """What the counting PE knows: who is done, what was counted, whether it has said so."""

    width: int
    height: int
    goal: int
    done: set[tuple[int, int]] = field(default_factory=set)
    total: int = 0
    told: bool = False

    @property
    def complete(self) -> bool:
        """Whether every PE is done and the goal of the second phase is met."""
        return len(self.done) == self.width * self.height and self.total >= self.goal


def layout_module(unit: Any, params: dict[str, Value]) -> dict[str, Value]:
    """`get_params(x, y)`: what a PE gives to `<kernels/tally/pe>`; the same for all."""
    lacking = [name for name in FIELDS if name not in params]
    if lacking:
        raise CslError("the parameters of <kernels/tally/layout> do not fit", expected=", ".join(FIELDS))
    run = NativeFunction("get_params", lambda unit, x, y: Value(t.ANON, dict(params)), comptime=True)
    return {"get_params": Value(t.Fn("", (None, None), t.ANON), run)}


def pe_module(unit: Any, params: dict[str, Value]) -> dict[str, Value]:
    """`signal_completion()`, `bump_tally(n)`, and `local_tally`: the total, on the north-east PE at the end.

    There the task `callback` is activated; without that parameter the total is sent on the output color.
    """
    given = params.get("tally_params")  # SDK 1.4 merges the fields into the parameters, 2.10 passes the struct
    params = {**given.data, **params} if given is not None else params
    width, height, goal = (int(params[name].data) for name in ("kernel_width", "kernel_height", "phase2_tally"))
    total = unit.variable("local_tally", t.U32, np.uint32(0))
    callback = params.get("callback")

    def finish(pe: Any, tally: Tally) -> None:
        if tally.told or not tally.complete:
            return
        tally.told = True
        pe.memory(total)[0] = tally.total
        if callback is not None:
            pe.activate(int(callback.data))
        else:
            pe.fabric.push(int(params["output_color"].data), [tally.total])

    def message(pe: Any, done: bool, count: int) -> None:
        grid = pe.fabric.node.fabric
        tally = grid.shared.setdefault("tally", Tally(width, height, goal))
        place, corner = (pe.x, pe.y), grid.nodes[width - 1, 0].pe

        def come() -> None:
            tally.total += count
            if done:
                tally.done.add(place)
            finish(corner, tally)

        pe.events.at(max(pe.clock, pe.events.now) + width - 1 - pe.x + pe.y, come)

    signal = NativeFunction("signal_completion", lambda pe: message(pe, True, 0), cycles=20, live=True)
    bump = NativeFunction("bump_tally", lambda pe, count: message(pe, False, int(count)), cycles=20, live=True)
    return {
        "local_tally": total,
        "signal_completion": Value(t.Fn("", (), t.VOID), signal),
        "bump_tally": Value(t.Fn("", (t.U32,), t.VOID), bump),
    }
