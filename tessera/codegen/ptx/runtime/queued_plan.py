"""Queued plans: the steps of a program's plan as work on a stream of the GPU, its collectives on one beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tessera.codegen.plan_execution import PlanEngine, run_host_call
from tessera.codegen.ptx.runtime.device_memory import get_device_memory, synchronize_stream
from tessera.core.device_array import DeviceArray
from tessera.core.hooks import exchange_in_place, open_channels, start_in_place
from tessera.core.types import as_dtype
from tessera.ops.tensor.collectives import EXCHANGES

if TYPE_CHECKING:
    from tessera.codegen.ptx.runtime.gpu_program import GpuProgram

PERMUTE = "ts.collective_permute"


def open_plan_channels(calls: Sequence[Mapping[str, Any]], workspace: int) -> dict[int, Any]:
    """The channels of a plan's permutations by their numbers, for calls with a workspace.

    Its ranks agree on them. A result in the workspace has a channel: its address is the same in each call.
    """
    numbers, permutes = [number for number, call in enumerate(calls) if call["op"] == PERMUTE], []
    for number in numbers:
        out = calls[number]["args"][1]
        fixed = "param" not in out and not out.get("moves")
        size = math.prod(out["shape"]) * as_dtype(out["dtype"]).numpy.itemsize
        permutes.append((calls[number]["attrs"], workspace + out.get("offset", 0) if fixed else None, size))
    found = open_channels(permutes) if permutes else ()
    return {number: channel for number, channel in zip(numbers, found, strict=True) if channel is not None}


@dataclass
class QueuedPlan(PlanEngine):
    """A plan engine that queues launches on a stream; `given` holds an address or a number for each parameter."""

    program: GpuProgram
    given: Sequence[Any]
    stream: int
    workspace: int
    _marks: dict[int, tuple[int, Any]] = field(default_factory=dict)  # of collectives: ordinals, and what to wait for
    _reached: int = -1

    def launch(self, first: int, last: int) -> None:
        """Queue launches in order."""
        for each in self.program.launches[first:last]:
            if each:
                each.bind(self.argument, self.stream)()

    def holds(self, flag: int) -> bool:
        """Wait for the queued launches; whether a flag is set."""
        drv, found = self.program.device.driver, np.zeros(1, np.uint8)
        synchronize_stream(self.stream)
        drv.memcpy_dtoh(found, self.argument(self.program.flags[flag]))
        return bool(found[0])

    def call(self, number: int) -> None:
        """Queue a collective, or wait for the queued launches and run an op on the host."""
        drv, call = self.program.device.driver, self.program.calls[number]
        if self._exchange(number):
            return
        synchronize_stream(self.stream)
        arrays = [np.empty(arg["shape"], as_dtype(arg["dtype"]).numpy) for arg in call["args"]]
        addresses = [self.argument(arg) for arg in call["args"]]
        for array, address in zip(arrays[: call["operands"]], addresses, strict=False):
            if array.nbytes:
                drv.memcpy_dtoh(array.reshape(-1).view(np.uint8), address)
        run_host_call(call, arrays)
        for array, address in zip(arrays[call["operands"] :], addresses[call["operands"] :], strict=True):
            if array.nbytes:
                drv.memcpy_htod(address, array.reshape(-1).view(np.uint8))

    def _exchange(self, number: int) -> bool:
        """Queue a collective or a part of an array, where the engine of this rank works on the GPU."""
        if self.program.calls[number]["op"] not in EXCHANGES:
            return False
        return bool(exchange_in_place(*self._find_exchange(number)))

    def _find_exchange(self, number: int) -> tuple[str, DeviceArray, DeviceArray, Mapping[str, Any]]:
        memory, call = get_device_memory(), self.program.calls[number]
        x, out = (
            DeviceArray(self.argument(a), tuple(a["shape"]), as_dtype(a["dtype"]).numpy, None, memory, self.stream)
            for a in call["args"]
        )
        attrs = call["attrs"]
        if call["op"] == PERMUTE and (channel := self.program.find_channels(self.workspace).get(number)):
            attrs = {**attrs, "channel": channel}
        return call["op"].removeprefix("ts."), x, out, attrs

    def start(self, first: int, last: int) -> None:
        """Queue collectives beside the launches that follow; where the host computes them, they are complete."""
        mark = start_in_place([self._find_exchange(number) for number in range(first, last)], self.stream)
        if mark is None:
            super().start(first, last)
        else:
            self._marks |= dict.fromkeys(range(first, last), (first, mark))

    def wait(self, number: int) -> None:
        """Make the launches that follow wait for a collective, and so for those that began before it."""
        ordinal, mark = self._marks.pop(number, (-1, None))
        if ordinal > self._reached:
            self._reached = ordinal
            get_device_memory().wait(self.stream, mark)

    def argument(self, arg: Mapping[str, Any]) -> Any:
        """The address, or number, of an argument."""
        if "value" in arg:
            return arg["value"]
        start = self.given[arg["param"]] if "param" in arg else self.workspace
        offset = self.find_offset(arg)
        return start + offset if offset else start
