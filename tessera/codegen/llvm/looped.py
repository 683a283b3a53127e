"""Plans with loops and branches on machine code: slots move as loops turn, flags are read where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from tessera.codegen.follow import follow
from tessera.codegen.hostcall import bytes_at, run_call, seen

Launch = Callable[[int, int], None]


class Looped:
    """The engine of one program: `slots` hold addresses, those of flags from `flags` on.

    `places` are (slot, argument) for each argument of the plan's launches and then for each flag.
    """

    def __init__(
        self, plan: Mapping[str, Any], slots: np.ndarray, flags: int, places: Iterable[tuple[int, Any]], launch: Launch
    ) -> None:
        self._steps, self._slots, self._flags, self.launch = plan["steps"], slots, flags, launch
        self._calls, start = [], flags + len(plan["flags"])
        for each in plan.get("calls", ()):
            self._calls.append((each, start))
            start += len(each["args"])
        found: dict[int, list[tuple[int, int]]] = {}
        for slot, arg in places:
            for loop, count in arg.get("moves", ()):
                found.setdefault(loop, []).append((slot, count))
        self._moves = {loop: np.array(pairs, np.intp).T for loop, pairs in found.items()}
        self._at = dict.fromkeys(found, 0)

    def run(self) -> None:
        """Follow the plan."""
        try:
            follow(self._steps, self)
        finally:
            for loop in self._at:
                self.turn(loop, 0)

    def turn(self, loop: int, index: int) -> None:
        """Move what moves with a loop."""
        if loop in self._moves:
            slots, counts = self._moves[loop]
            self._slots[slots] += (index - self._at[loop]) * counts
            self._at[loop] = index

    def call(self, number: int) -> None:
        """Run an op on the host, on the memory that its slots name."""
        found, start = self._calls[number]
        run_call(found, [seen(bytes_at(int(self._slots[start + i]), a), a) for i, a in enumerate(found["args"])])

    def holds(self, flag: int) -> bool:
        """Whether a flag is set."""
        return bool(ctypes.c_uint8.from_address(int(self._slots[self._flags + flag])).value)
