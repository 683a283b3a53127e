"""Emulated programs: an artifact's text run by the PTX interpreter, on any machine."""

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
SWIZZLE_BYTES = 128
EMULATED_PROCESSORS = 3  # that entries which loop over programs are given, so that they do loop


def make_interpreter(artifact: Artifact) -> Callable[[Sequence[Any]], list[np.ndarray]]:
    """A function from arrays to outputs; arrays that the program writes are written."""
    plan = artifact.manifest["plan"]
    arguments, module = ArgumentBinder(plan), PtxModule(artifact.text(TEXT_FILE), TEXT_FILE)

    scalars = {i for i, p in enumerate(plan["params"]) if p["role"] == "scalar"}

    def run(arrays: Sequence[Any]) -> list[np.ndarray]:
        users, held = arguments.bind(arrays)
        given = [_scalar_argument(a) if i in scalars else a for i, a in enumerate(held)]
        workspace = np.zeros(plan["workspace"], np.uint8)
        execute_plan(find_steps(plan), _EmulatedPlanEngine(plan, given, workspace, module))
        return arguments.finish(users, held)

    return run


@dataclass
class _EmulatedPlanEngine(ArrayPlanEngine):
    """An engine whose launches run in the PTX interpreter."""

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
                extras = LaunchBuffers(entry, each["grid"][: each["rank"]])
                memories = extras.memories()
                given = [*maps, *(padded.get(i, a) for i, a in enumerate(args)), *memories.values()]
                self.module.launch(
                    each["kernel"], grid, entry["threads"], given, entry["shared"], cooperative="meeting" in entry
                )
                for i, array in padded.items():
                    args[i].reshape(-1).view(np.uint8)[...] = array[: args[i].nbytes]
                extras.finish(memories)


def choose_hardware_grid(launch: Mapping[str, Any], entry: Mapping[str, Any], processors: int) -> tuple[int, int, int]:
    """The grid as the hardware counts it: its first axis is the program's last.

    An entry that works through programs in a loop takes as many blocks as there are multiprocessors.
    """
    if entry.get("programs"):
        cluster = entry.get("cluster", 1)
        return (min(entry["programs"], max(processors // cluster, 1) * cluster), 1, 1)
    if entry.get("folded"):
        return (math.prod(launch["grid"]), 1, 1)
    grid = list(launch["grid"])[: launch["rank"]][::-1]
    return (*grid, 1, 1, 1)[:3]  # type: ignore[return-value]


def _pad_byte(array: np.ndarray) -> np.ndarray:
    """A copy of an array's bytes with one more: on a GPU there is always something behind an odd number of them."""
    return np.append(array.reshape(-1).view(np.uint8), np.uint8(0))


def make_tensor_map(described: Mapping[str, Any], array: np.ndarray) -> TensorMap:
    """A map of a parameter's memory, with the 128-byte swizzle."""
    typed = array.reshape(-1).view(as_dtype(described["dtype"]).numpy).reshape(described["shape"])
    return TensorMap(typed, tuple(described["box"]), SWIZZLE_BYTES)


def _scalar_argument(array: np.ndarray) -> Any:
    """A scalar parameter as the interpreter takes it: 16-bit floats and bools as their bits."""
    if array.dtype.itemsize < 4 and array.dtype.kind not in "iu":
        return int(array.view(f"u{array.dtype.itemsize}")[()])
    return array[()]
