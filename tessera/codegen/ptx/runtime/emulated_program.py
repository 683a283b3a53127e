"""Emulated programs: the PTX emulator runs an artifact's text on any machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.host_plan import ArgumentBinder, ArrayPlanEngine, execute_plan, find_steps
from tessera.codegen.ptx.runtime.launch_buffers import LaunchBuffers
from tessera.core.types import as_dtype
from tessera.interp.target.ptx import PtxModule
from tessera.interp.target.ptx.isa.tensor_map import TensorMap

TEXT_FILE = "kernels.ptx"
EMULATOR_NAME = "the PTX emulator (no GPU here)"
SWIZZLE_BYTES = 128
EMULATED_PROCESSORS = 3  # multiprocessors of the emulated GPU: so few that persistent kernels loop


class EmulatedProgram:
    """An artifact whose text the emulator runs."""

    def __init__(self, artifact: Artifact) -> None:
        self.where = EMULATOR_NAME
        self._run = make_emulator(artifact)

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray]:
        """The outputs; arrays that the program writes are written."""
        return self._run(arrays)


def make_emulator(artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function from arrays to outputs; it writes the arrays that the program writes."""
    plan = artifact.manifest["plan"]
    arguments, module = ArgumentBinder(plan), PtxModule(artifact.text(TEXT_FILE), TEXT_FILE)
    scalars = {i for i, p in enumerate(plan["params"]) if p["role"] == "scalar"}

    def run(arrays: Sequence[Any]) -> list[np.ndarray]:
        users, bound = arguments.bind(arrays)
        values = [_scalar_argument(a) if i in scalars else a for i, a in enumerate(bound)]
        workspace = np.zeros(plan["workspace"], np.uint8)
        execute_plan(find_steps(plan), _EmulatedPlanEngine(plan, values, workspace, module))
        return arguments.finish(users, bound)

    return run


@dataclass
class _EmulatedPlanEngine(ArrayPlanEngine):
    """An engine whose launches run in the PTX emulator."""

    module: PtxModule

    def launch(self, first: int, last: int) -> None:
        """Run launches in order."""
        for each in self.plan["launches"][first:last]:
            entry = self.plan["entries"][each["kernel"]]
            if 0 not in each["grid"]:
                args = [self.argument(a) for a in each["args"]]
                padded = {i: _pad_byte(args[i]) for i in entry.get("halves", ())}
                maps = [make_tensor_map(m, args[m["param"]]) for m in entry.get("maps", ())]
                grid = choose_hardware_grid(each, entry, EMULATED_PROCESSORS)
                launch_buffers = LaunchBuffers(entry, each["grid"][: each["rank"]])
                buffers = launch_buffers.allocate()
                values = [*maps, *(padded.get(i, a) for i, a in enumerate(args)), *buffers.values()]
                self.module.launch(
                    each["kernel"], grid, entry["threads"], values, entry["shared"], cooperative="meeting" in entry
                )
                for i, array in padded.items():
                    args[i].reshape(-1).view(np.uint8)[...] = array[: args[i].nbytes]
                launch_buffers.check(buffers)


def choose_hardware_grid(launch: Mapping[str, Any], entry: Mapping[str, Any], processors: int) -> tuple[int, int, int]:
    """The hardware grid: its first axis is the program grid's last, which varies fastest.

    A persistent kernel launches one block for each multiprocessor.
    """
    if entry.get("programs"):
        cluster = entry.get("cluster", 1)
        return (min(entry["programs"], max(processors // cluster, 1) * cluster), 1, 1)
    if entry.get("folded"):
        return (math.prod(launch["grid"]), 1, 1)
    grid = list(launch["grid"])[: launch["rank"]][::-1]
    return (*grid, 1, 1, 1)[:3]  # type: ignore[return-value]


def _pad_byte(array: np.ndarray) -> np.ndarray:
    """A copy of an array with one byte more, as allocations on a GPU have: 16-bit atomics access the last byte."""
    return np.append(array.reshape(-1).view(np.uint8), np.uint8(0))


def make_tensor_map(described: Mapping[str, Any], array: np.ndarray) -> TensorMap:
    """The TMA descriptor of a parameter's memory, with the 128-byte swizzle."""
    typed = array.reshape(-1).view(as_dtype(described["dtype"]).numpy).reshape(described["shape"])
    return TensorMap(typed, tuple(described["box"]), SWIZZLE_BYTES)


def _scalar_argument(array: np.ndarray) -> Any:
    """A scalar argument for the emulator: small floats and bools as their bits."""
    if array.dtype.itemsize < 4 and array.dtype.kind not in "iu":
        return int(array.view(f"u{array.dtype.itemsize}")[()])
    return array[()]
