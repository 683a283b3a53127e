"""The PTX target on a GPU against its peers, in pairs: ours and theirs in turn, medians of device-event times.

    python -m benchmarks.gpu [launch] [memory] [products] [fp8] [attention] [minilm] [pipelines] [gradients] [calls]

Needs a GPU, pycuda and PyTorch (with its Triton). Results are kept in results/gpu.json, the roofline beside each.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.machine import keep, kept
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime.driver_api import get_gpu
from tessera.runtime.program import prepare

ROUNDS, EACH = 9, 10
BYTES, HALF, BYTE = 4.8, 989.5, 1979.0  # the data sheet's TB/s, and TFLOP/s of dense bf16 and of 8-bit floats
SECTIONS = ("launch", "memory", "products", "fp8", "attention", "minilm", "pipelines", "gradients", "calls")
Run = Callable[[], Any]


def compiled(entry: Any, arguments: Any, grid: Any = None, group: int | None = None) -> Any:
    """An entry point compiled for the GPU at hand; the arguments are NumPy arrays of the right shapes and types."""
    program = prepare(entry, arguments, "ptx", grid, group)
    return BACKEND.runtime(BACKEND.emit(program.levels["tile"], {}))


def bound(program: Any, *tensors: torch.Tensor) -> Run:
    """A launch of a program on tensors, its inputs and then its outputs."""
    return program.bind([t.data_ptr() for t in tensors])


def milliseconds(run: Run, each: int = EACH) -> float:
    """The time of one call, of `each` calls in a row."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(each):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / each


def in_pairs(ours: Run, peers: dict[str, Run], rounds: int = ROUNDS, each: int = EACH) -> dict[str, float]:
    """Medians in milliseconds of ours and of every peer, measured in turn."""
    runs = {"tessera": ours, **peers}
    for run in runs.values():
        milliseconds(run, 3)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(milliseconds(run, each))
    return {name: statistics.median(found) for name, found in times.items()}


def result(
    name: str, times: dict[str, float], bytes_moved: float = 0, operations: float = 0, peak: float = HALF
) -> dict[str, Any]:
    """One figure: times, the ratio to the best peer (above 1: ours is faster), the rate reached, and its share of the
    data sheet's: of the memory's, or of `peak` operations."""
    best = min((t, n) for n, t in times.items() if n != "tessera")
    ours = times["tessera"]
    found = {"name": name, "milliseconds": times, "peer": best[1], "ratio": best[0] / ours}
    if bytes_moved:
        found["terabytes_per_second"] = bytes_moved / ours * 1e-9
    if operations:
        found["teraflops"] = operations / ours * 1e-9
    rate = found.get("terabytes_per_second") or found.get("teraflops")
    unit, most = ("TB/s", BYTES) if bytes_moved else ("TFLOP/s", peak)
    found["of_peak"] = rate / most
    shown = f"{rate:8.2f} {unit:8s} {found['of_peak']:5.0%}"
    print(f"{name:32s} {ours:9.4f} ms  {shown} {found['ratio']:6.2f} x {best[1]}", flush=True)
    return found


def main(sections: list[str]) -> None:
    """Measure the sections asked for, or all; what was kept of others stays."""
    torch.manual_seed(0)
    results: dict[str, Any] = {**kept("gpu"), "gpu": get_gpu().name, "torch": torch.__version__, "driver": _driver()}
    with get_gpu().active():
        for name in sections or SECTIONS:
            results[name] = importlib.import_module(f"benchmarks.gpu_{name}").measure()
            keep("gpu", results)


def _driver() -> str:
    major, minor = divmod(get_gpu().driver.get_driver_version(), 1000)
    return f"CUDA {major}.{minor // 10}"


if __name__ == "__main__":
    main(sys.argv[1:])
