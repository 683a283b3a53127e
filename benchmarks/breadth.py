"""Breadth: every family of ops at drawn sizes, types and axes, against PyTorch eager and torch.compile in one run.

    python -m benchmarks.breadth --target llvm --seed 0 [--only REGEX] [--draws 2] [--threads 2] [--out breadth.json]
    python -m benchmarks.breadth --target ptx --seed 0 --jobs 12  # on a machine with a GPU: compile side by side
    python -m benchmarks.breadth --picture a.json b.json          # geometric means and a picture of kept runs

`benchmarks/breadth_families/` is the table of families. Each draws its cases from the seed, so that no point can be
tuned for. f32 is f32 on both sides (no tf32). Ours and the peers are timed in alternation and the best of each counts;
the ratio is the time of the best peer over ours (above 1: ours is faster). The error of each is measured against
PyTorch in f64. `share` is the part of the machine's limit that is reached: its copy rate or its rate of f32 products,
both measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tessera as ts
from benchmarks.breadth_families import FAMILIES, Case, Draw
from benchmarks.machine import RESULTS, describe

Run = Callable[[], Any]
LIMITS = {"llvm": (float(1 << 26), 3e9), "ptx": (float(1 << 30), 2e12)}  # bytes of an array, operations of a case
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
TABLES = ("pointwise", "reductions", "indexing", "products")


class Machine:
    """Where the cases run: moves inputs there, waits for results, and times calls."""

    def __init__(self, target: str, processor_time: bool = False) -> None:
        self.target, self.device = target, "cuda" if target == "ptx" else "cpu"
        self.clock = time.process_time if processor_time else time.perf_counter

    def wait(self) -> None:
        """Wait until all work is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Run, calls: int) -> float:
        """Seconds of one of `calls` calls in a row."""
        self.wait()
        start = self.clock()
        for _ in range(calls):
            run()
        self.wait()
        return (self.clock() - start) / calls

    def limits(self) -> dict[str, float]:
        """The bytes and f32 operations a second that PyTorch reaches here: of a copy, and of a product."""
        scale = 1 << 24 if self.device == "cpu" else 1 << 28
        x, y = torch.ones(scale, device=self.device), torch.empty(scale, device=self.device)
        n = 1024 if self.device == "cpu" else 8192
        a = torch.ones(n, n, device=self.device)
        copy = min(self.seconds(lambda: y.copy_(x), 1) for _ in range(10))
        product = min(self.seconds(lambda: a @ a, 1) for _ in range(10))
        return {"bytes": 8.0 * scale / copy, "flops": 2.0 * n**3 / product}


def torch_run(case: Case, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> Run:
    """A call of a function of PyTorch: its result, or its gradients."""
    if not case.wrt:
        return lambda: function(*inputs)
    given = [x.detach().clone().requires_grad_() if i in case.wrt else x for i, x in enumerate(inputs[:-1])]
    leaves = [given[i] for i in case.wrt]
    return lambda: torch.autograd.grad(function(*given), leaves, inputs[-1])


def own_run(case: Case, inputs: tuple[torch.Tensor, ...], target: str) -> Run:
    """A call of Tessera's function, as a user writes it."""
    function = case.ts
    if case.wrt:

        def inner(*args: Any) -> Any:
            return ts.sum(case.ts(*args[:-1]) * args[-1])

        function = ts.grad(inner, argnums=list(case.wrt))
    step = ts.jit(function, target=target)
    given = [ts.from_dlpack(x) for x in inputs]
    return lambda: step(*given)


def leaves(result: Any) -> list[torch.Tensor]:
    """The results of a call, in order, as tensors of PyTorch."""
    if isinstance(result, (tuple, list)):
        return [leaf for each in result for leaf in leaves(each)]
    return [result if isinstance(result, torch.Tensor) else torch.from_dlpack(result)]


def reference(case: Case, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor] | None:
    """What PyTorch computes in f64; None where it has no such function."""
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    try:
        return leaves(torch_run(case, case.torch, wide)())
    except (RuntimeError, NotImplementedError):
        return None


def error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value; infinite where shapes or special values differ."""
    worst = 0.0
    for g, w in zip(got, wanted, strict=True):
        if g.shape != w.shape:
            return math.inf
        g, w = g.detach().double(), w.detach().double()
        if not torch.equal(g.isfinite(), w.isfinite()):
            return math.inf
        difference = torch.where(w.isfinite(), g - w, 0).abs()
        if difference.numel():
            worst = max(worst, difference.max().item() / max(w[w.isfinite()].abs().max().item(), 1e-30))
    return worst


def judge(case: Case, inputs: tuple[torch.Tensor, ...], got: list[torch.Tensor]) -> dict[str, Any]:
    """The error of ours and of eager, and whether ours is right."""
    eager = leaves(torch_run(case, case.torch, inputs)())
    if case.exact:
        return {"error": error(got, eager), "right": all(torch.equal(g, w) for g, w in zip(got, eager, strict=True))}
    wanted = reference(case, inputs) or eager
    if case.summary is not None:
        got, eager, wanted = (case.summary(each) for each in (got, eager, wanted))
    own, theirs = error(got, wanted), error(eager, wanted)
    dtype = next((e.dtype for e in eager if e.is_floating_point()), torch.float32)
    least = min((TOLERANCES.get(x.dtype, 0.1) for x in (*eager, *inputs) if x.is_floating_point()), default=0.0)
    allowed = max(case.tolerance, TOLERANCES.get(dtype, 0.1), least, 4 * theirs)
    return {"error": own, "eager_error": theirs, "right": own <= allowed}


def timed(machine: Machine, runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """The best milliseconds of each run, in alternation."""
    calls, best = {}, {}
    for name, run in runs.items():
        once = min(machine.seconds(run, 1) for _ in range(2))
        calls[name], best[name] = max(1, min(1000, int(2e-3 / max(once, 1e-7)))), math.inf
    start, rounds = time.perf_counter(), 0
    while rounds < 5 or (time.perf_counter() - start < seconds and rounds < 200):
        for name, run in runs.items():
            best[name] = min(best[name], machine.seconds(run, calls[name]))
        rounds += 1
    return {name: 1e3 * value for name, value in best.items()}


def inductor(case: Case, inputs: tuple[torch.Tensor, ...], mode: str | None) -> Run:
    """The function compiled by PyTorch, called once."""
    torch._dynamo.reset()
    run = torch_run(case, torch.compile(case.torch, dynamic=False, mode=mode), inputs)
    run()
    return run


def measure(machine: Machine, case: Case, options: argparse.Namespace, limits: dict[str, float]) -> dict[str, Any]:
    """One row: whether the case is right, its times, its ratio and its share of the machine's limit."""
    inputs = tuple(x.to(machine.device) for x in case.inputs)
    row: dict[str, Any] = {"case": case.label}
    try:
        run = own_run(case, inputs, machine.target)
        start = time.perf_counter()
        got = leaves(run())
        row["first_seconds"] = time.perf_counter() - start
    except (ts.TesseraError, MemoryError) as failure:
        return {**row, "refused": f"{type(failure).__name__}: {str(failure).splitlines()[0]}"}
    with alone(options.lock):
        row |= judge(case, inputs, [g.to(machine.device) for g in got])
    runs = {"tessera": run, "eager": torch_run(case, case.torch, inputs)}
    for mode in (
        () if options.no_inductor else (None, *(("max-autotune-no-cudagraphs",) if options.max_autotune else ()))
    ):
        try:
            runs["inductor" if mode is None else "max-autotune"] = inductor(case, inputs, mode)
        except Exception as failure:  # a peer's failure is a finding, and no reason to stop
            row["peer_failure"] = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    with alone(options.lock, still=True):
        row["milliseconds"] = found = timed(machine, runs, options.seconds)
    peer = min((name for name in found if name != "tessera"), key=found.__getitem__)
    moved = sum(x.numel() * x.element_size() for x in (*inputs, *got))
    ideal = max(moved / limits["bytes"], case.flops / limits["flops"])
    row |= {"peer": peer, "ratio": found[peer] / found["tessera"], "share": 1e3 * ideal / found["tessera"]}
    return row


@contextlib.contextmanager
def alone(lock: Path | None, still: bool = False) -> Iterator[None]:
    """The block runs while no other child of `--jobs` is in such a block; `still`: while no other child runs at all."""
    with contextlib.nullcontext() if lock is None else lock.open("w") as held:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        others = [int(f.stem) for f in lock.parent.glob("*.pid")] if lock is not None and still else []
        signal_all([pid for pid in others if pid != os.getpid()], signal.SIGSTOP)
        try:
            yield
        finally:
            signal_all([pid for pid in others if pid != os.getpid()], signal.SIGCONT)


def signal_all(processes: list[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The geometric mean, the worst and the share at 1.0 or more; a refused or wrong row counts as no ratio."""
    good = [r["ratio"] for r in rows if "ratio" in r and r.get("right")]
    return {
        "rows": len(rows),
        "refused": sum("refused" in r for r in rows),
        "wrong": sum(not r.get("right", True) for r in rows),
        "geometric_mean": statistics.geometric_mean(good) if good else None,
        "worst": min(good, default=None),
        "at_least_1": sum(r >= 1 for r in good) / len(rows) if rows else None,
        "at_least_0.8": sum(r >= 0.8 for r in good) / len(rows) if rows else None,
    }


def show(row: dict[str, Any]) -> str:
    """One line for one row."""
    if "refused" in row:
        return f"{'refused':>8}  {row['family']:34} {row['case']}: {row['refused'][:120]}"
    wrong = "" if row["right"] else f"  WRONG by {row['error']:.1e}"
    times = "  ".join(f"{name} {value:.3f}" for name, value in row["milliseconds"].items())
    return f"{row['ratio']:8.2f}  {row['family']:34} {row['case']}: {times} ms, {row['share']:.0%}{wrong}"


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every family that was asked for, row by row; the file is written as it grows."""
    machine = Machine(options.target, options.processor_time)
    with alone(options.lock):
        limits = machine.limits()
    if options.lock is not None:
        (options.lock.parent / f"{os.getpid()}.pid").touch()
    rows: list[dict[str, Any]] = []
    found = {"machine": describe(), "torch": torch.__version__, "seed": options.seed, "target": options.target}
    found |= {"threads": options.threads, "limits": limits, "rows": rows, "processor_time": options.processor_time}
    if machine.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    names = [name for name in FAMILIES if re.search(options.only, name)]
    cases = [(name, number) for name in names for number in range(options.draws)]
    for name, number in cases[options.part[0] :: options.part[1]]:
        bytes_, work = LIMITS[options.target]
        case = FAMILIES[name](Draw((options.seed, number, zlib.crc32(name.encode())), bytes_, work))
        row = {"family": name, **measure(machine, case, options, limits)}
        if machine.device == "cuda":
            torch.cuda.empty_cache()  # other children need the memory
        rows.append(row)
        print(show(row), flush=True)
        found["all"] = summarise(rows)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def run_jobs(options: argparse.Namespace) -> dict[str, Any]:
    """`run_all` in several processes, each with every so many-th case; one at a time checks and times on the device."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{n}.json") for n in range(options.jobs)]
        own = ["--jobs", "1", "--lock", str(Path(folder, "lock"))]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.breadth", *sys.argv[1:], *own, "--part", str(n), str(options.jobs)]
                + ["--out", str(out)],
                env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": str(options.threads)},
            )
            for n, out in enumerate(outs)
        ]
        end, running = time.monotonic() + options.budget, children
        while running and time.monotonic() < end:
            time.sleep(0.2)
            left = [child for child in running if child.poll() is None]
            if len(left) < len(running):  # one that failed while it timed leaves the others stopped
                signal_all([child.pid for child in left], signal.SIGCONT)
            running = left
        for child in children:
            child.kill()
        parts = [json.loads(out.read_text()) for out in outs if out.exists()]
    found = {**parts[0], "jobs": options.jobs, "rows": [row for part in parts for row in part["rows"]]}
    found["rows"].sort(key=lambda row: list(FAMILIES).index(row["family"]))
    found["all"] = summarise(found["rows"])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def picture(files: list[Path], out: Path) -> None:
    """The ratio of every family over several runs: a dot a draw, a bar the geometric mean."""
    import matplotlib.pyplot as plt  # type: ignore[import-not-found]

    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["family"], []).extend([row["ratio"]] if row.get("right") and "ratio" in row else [])
    means = {name: statistics.geometric_mean(v) for name, v in ratios.items() if v}
    names = sorted(means, key=means.__getitem__)
    figure, axes = plt.subplots(figsize=(9, 0.19 * len(names) + 1.5))
    axes.barh(names, [means[n] - 1 for n in names], left=1, color=["#3a7" if means[n] >= 1 else "#c55" for n in names])
    for place, name in enumerate(names):
        axes.plot(ratios[name], [place] * len(ratios[name]), "k.", markersize=3)
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=6)
    total = summarise(rows)
    axes.set_title(
        f"{total['rows']} draws: geometric mean {total['geometric_mean']:.2f}, at least 1.0: {total['at_least_1']:.0%}"
    )
    axes.set_xlabel("time of the better of PyTorch eager and torch.compile / ours")
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", choices=sorted(LIMITS), default="llvm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=2, help="cases of each family")
    parser.add_argument("--only", default="", help="a regular expression of families")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for the rounds of a case")
    parser.add_argument(
        "--processor-time", action="store_true", help="count the time of the process's threads: for a loaded machine"
    )
    parser.add_argument("--no-inductor", action="store_true", help="PyTorch eager alone is the peer")
    parser.add_argument("--max-autotune", action="store_true", help="torch.compile tunes, too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile side by side, for a GPU")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="--jobs: seconds after which the rest is left out"
    )
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--picture", type=Path, nargs="+", help="kept runs: draw them, measure nothing")
    options = parser.parse_args()
    if options.processor_time and (options.target != "llvm" or options.threads != 1):
        parser.error("--processor-time is for --target llvm with --threads 1: threads that wait count, a GPU does not")
    if options.picture:
        picture(options.picture, options.out or RESULTS / "breadth.svg")
        print(json.dumps(summarise([r for f in options.picture for r in json.loads(f.read_text())["rows"]]), indent=1))
        return
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = False  # f32 is f32 on both sides; PyTorch's products have no tf32 by default
    os.environ["TESSERA_THREADS"] = str(options.threads)  # read when the first program runs
    warnings.filterwarnings("ignore")
    for table in TABLES:
        importlib.import_module(f"benchmarks.breadth_families.{table}")
    run = run_jobs if options.jobs > 1 else run_all
    print(json.dumps(run(options)["all"], indent=1))


if __name__ == "__main__":
    main()
