"""Profiles by CUDA events, checked on a GPU: kernels add up to their program, and torch.profiler sees the same times.

    python -m benchmarks.gpu_profile_check [--report FILE]

Needs a GPU, pycuda and PyTorch. Each line is a check with what was measured; the status is 0 if all hold. Three
programs are profiled: the sum of their kernels must be within 15 % of the program's own time (by events around a CUDA
graph that repeats it). A product of 4096^3 in bf16 and a softmax of 4096 x 4096 in f32 run under torch.profiler, too,
which gives each kernel's time from CUPTI: the two must agree within 10 % and 2 microseconds, the gap between two
kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tessera as ts
from benchmarks.gpu import bound, compiled, milliseconds
from benchmarks.machine import describe
from tessera.codegen.ptx.runtime.driver_api import get_gpu
from tessera.core.types import bf16
from tessera.runtime.program import prepare
from tessera.tools.cli.main import main as run_cli
from tessera.tools.profile import ProfileReport, profile_program

SUM_LIMIT, TORCH_LIMIT, GAP = 0.15, 0.10, 2e-6
N = 4096
CALLS = 20


def mlp(x: Any, w: Any, v: Any) -> Any:
    """Two products with a norm and an activation between them."""
    hidden = ts.gelu(ts.layer_norm(x) @ w)
    return ts.softmax(hidden @ v)


def scores(q: Any, k: Any, v: Any) -> Any:
    """Attention whose scores pass through memory."""
    return ts.softmax(ts.exp(q @ k.T * 0.01) * 0.5) @ v


def chain(x: Any, w: Any, v: Any) -> Any:
    """Short kernels."""
    return ts.cumsum(ts.softmax(x @ w), axis=0) @ v


def random(*shape: int) -> np.ndarray:
    """Numbers in bf16."""
    return (np.random.default_rng(0).standard_normal(shape, np.float32) * 0.05).astype(bf16.numpy)


PROGRAMS = {
    "mlp": (mlp, (8192, 1024), (1024, 4096), (4096, 1024)),
    "scores": (scores, (8192, 128), (8192, 128), (8192, 128)),
    "chain": (chain, (256, 256), (256, 256), (256, 256)),
}


def check_sums() -> Iterator[dict[str, Any]]:
    """The kernels of each program against the program itself."""
    for name, (function, *shapes) in PROGRAMS.items():
        report = profile_program(prepare(ts.jit(function), [random(*s) for s in shapes], "ptx"), "ptx")
        print(report)
        assert report.whole is not None
        off = report.total / report.whole - 1
        yield {
            "name": f"sum of kernels, {name}", "holds": _is_by_events(report) and abs(off) <= SUM_LIMIT,
            "kernels": report.total, "whole": report.whole, "off": off, "report": report.as_json(),
        }  # fmt: skip


def _is_by_events(report: ProfileReport) -> bool:
    places = all(k.location.file == __file__ and k.location.line for k in report.kernels)
    bounded = all(r.roofline is not None and r.bound for r in report.rows)
    return report.clock == "device events" and report.unit == "seconds" and places and bounded


def check_torch() -> Iterator[dict[str, Any]]:
    """The times of two programs of one kernel against those of torch.profiler, and of PyTorch's own kernels."""
    a, b = (torch.randn(N, N, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(N, N, device="cuda")
    yield from _compare(f"product {N}^3 bf16", lambda a, b: a @ b, [a, b], lambda: a @ b)
    yield from _compare(f"softmax {N} x {N} f32", ts.softmax, [x], lambda: torch.softmax(x, -1))


def _compare(
    name: str, function: Callable[..., Any], tensors: list[torch.Tensor], peer: Callable[[], torch.Tensor]
) -> Iterator[dict[str, Any]]:
    arrays = [np.zeros(tuple(t.shape), bf16.numpy if t.dtype == torch.bfloat16 else np.float32) for t in tensors]
    for array, tensor in zip(arrays, tensors, strict=True):
        array[...] = tensor.float().cpu().numpy().astype(array.dtype)
    jitted = ts.jit(function)
    report = profile_program(prepare(jitted, arrays, "ptx"), "ptx")
    print(report)
    want = peer()
    out = torch.empty_like(want)
    program = compiled(jitted, arrays)
    launch = bound(program, *tensors, out)
    launch()
    torch.cuda.synchronize()
    right = torch.allclose(out.float(), want.float(), rtol=2e-2, atol=2e-2 * want.abs().max().item())
    seen = profile_by_torch(launch, {k["kernel"] for k in program.describe_kernels()})
    theirs = profile_by_torch(peer, None)
    off = report.total - seen
    yield {
        "name": name, "holds": right and _times_agree(report.total, seen) and report.clock == "device events",
        "right": right, "by events": report.total, "by torch.profiler": seen, "off": off / seen if seen else None,
        "by torch's events": milliseconds(launch) * 1e-3, "PyTorch's own kernel": theirs,
        "roofline": report.rows[0].roofline, "report": report.as_json(),
    }  # fmt: skip


def _times_agree(ours: float, seen: float) -> bool:
    return seen > 0 and abs(ours - seen) <= TORCH_LIMIT * seen + GAP


def profile_by_torch(run: Callable[[], Any], names: set[str] | None) -> float:
    """The seconds of a call by CUPTI: the medians of its kernels (those of these names, or all), added up."""
    for _ in range(CALLS):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        events = json.loads(path.read_text())["traceEvents"]
    times: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "kernel" and (names is None or event["name"] in names):
            times.setdefault(event["name"], []).append(event["dur"] * 1e-6)
    for name, found in times.items():
        print(f"  torch.profiler: {name[:60]} {len(found)} x {statistics.median(found) * 1e6:.1f} µs")
    return sum(statistics.median(found) * len(found) / CALLS for found in times.values())


def check_commands() -> Iterator[dict[str, Any]]:
    """`tessera profile --target ptx` with its Chrome trace, and `@ts.profile` around a call on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        source, trace, plain = (Path(folder) / n for n in ("program.py", "x.trace.json", "x.json"))
        source.write_text(PROGRAM)
        status = run_cli(["profile", f"{source}:model", "--target", "ptx", "-o", str(trace), "-o", str(plain)])
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
        found = json.loads(plain.read_text())
    total = sum(e["dur"] for e in events) * 1e-6
    good = status == 0 and found["clock"] == "device events" and abs(total / found["total"] - 1) < 1e-6
    yield {"name": "tessera profile --target ptx", "holds": good, "kernels": len(events), "total": found["total"]}
    model = ts.jit(mlp, target="ptx")
    with ts.profile() as session:
        for _ in range(3):
            model(*[random(*s) for s in PROGRAMS["mlp"][1:]])
    (report,) = session.reports()
    detailed = ts.profile(level="detailed")
    with detailed:
        ts.jit(chain, target="ptx")(*[random(*s) for s in PROGRAMS["chain"][1:]])
    (counted,) = detailed.reports()
    print(counted)
    good = _is_by_events(report) and _is_by_events(counted) and "3 calls" in str(report.notes)
    yield {"name": "@ts.profile on the GPU", "holds": good, "notes": report.notes}


PROGRAM = """
import tessera as ts

@ts.example(lambda rng: (rng.standard_normal((4096, 1024), dtype="f4"), rng.standard_normal((1024, 1024), dtype="f4")))
@ts.jit
def model(x, w):
    return ts.softmax(ts.relu(x @ w))
"""


def main() -> int:
    """All checks; 0 if all hold."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--report", metavar="FILE", help="write the figures as JSON")
    report = options.parse_args().report
    torch.manual_seed(0)
    with get_gpu().active():
        found = [check for checks in (check_sums, check_torch, check_commands) for check in checks()]
    for check in found:
        rest = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in check.items() if k not in ("name", "report")}
        print("ok  " if check["holds"] else "FAIL", check["name"], rest)
    if report:
        about = {**describe(), "gpu": get_gpu().name, "torch": torch.__version__}
        Path(report).parent.mkdir(parents=True, exist_ok=True)
        Path(report).write_text(json.dumps({"machine": about, "results": found}, indent=1, default=str) + "\n")
    return 0 if all(check["holds"] for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
