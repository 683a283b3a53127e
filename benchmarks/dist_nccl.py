"""The NCCL engine on the GPUs of one host: correctness against NumPy, speed against torch.distributed, training.

    python -m benchmarks.dist --engine nccl -n 2 --out results

Starts a process for each GPU. A step that takes longer than 25 s (some may: `SECONDS`) prints where, and all end.
NVLink multicast stays off. Rank 0 writes nccl.json into the folder after each step, so that what was measured is kept.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

STEP_SECONDS = 25  # of one step; a step that takes longer prints all stacks, and the process ends
SECONDS = {"training": 60, "step": 400, "products": 120, "products_async": 60, "copies": 90, "speed": 120}
SIZES = tuple(1 << n for n in (10, 14, 18, 20, 22, 24, 26, 28, 30))  # bytes of the operand on each rank
SMALL = 1 << 16
DTYPES = ("f32", "f64", "f16", "bf16", "int8", "int32", "int64", "uint8", "fp8_e4m3")
ROUNDS = 7
DEVICE = "cuda:0"
GPT_STEPS, BLOCKS = 4, 2


def launch(options: argparse.Namespace) -> int:
    """Start the ranks; the status of the first that fails."""
    from tessera.tools.cli.launch import run_on_gpus

    os.environ |= {
        "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "PYTHONUNBUFFERED": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # every process sees one GPU, which is its first
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.dist_nccl", "--out", str(options.out), *options.steps]
    return run_on_gpus(command, options.n)


class Report:
    """The results of the steps, written after each by rank 0."""

    def __init__(self, out: Path, rank: int) -> None:
        self.out, self.rank, self.found, self.start = out, rank, {}, time.monotonic()  # type: ignore[var-annotated]

    def log(self, *text: Any) -> None:
        """Print a line of rank 0, with the seconds since the start."""
        if self.rank == 0:
            print(f"[{time.monotonic() - self.start:6.1f} s]", *text, flush=True)

    def run(self, name: str, step: Callable[[], Any]) -> None:
        """Run a step; an error is its result."""
        self.log(name, "...")
        faulthandler.dump_traceback_later(SECONDS.get(name, STEP_SECONDS), exit=True)
        try:
            self.found[name] = step()
        except Exception:
            self.found[name] = {"error": traceback.format_exc()[-3000:]}
            print(f"rank {self.rank}: {name}: {traceback.format_exc()[-3000:]}", file=sys.stderr, flush=True)
        if self.rank == 0:
            (self.out / "nccl.json").write_text(json.dumps(self.found, indent=1))


def describe(world: Any) -> dict[str, Any]:
    """What runs here."""
    import torch

    smi = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader".split()
    gpus = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.split("\n")
    path = getattr(world.library, "get_library_path", lambda: "?")()
    return {
        "gpus": [g for g in gpus if g], "torch": torch.__version__, "torch_nccl": torch.cuda.nccl.version(),
        "nccl": world.library.get_version(), "library": str(path), "ranks": world.size,
    }  # fmt: skip


# Correctness.


def check_collectives(report: Report, world: Any) -> dict[str, Any]:
    """Every collective for every element type, on tensors of the GPU, against NumPy."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "dist"))
    from collective_cases import CASES, ROUNDED, skips

    import tessera as ts

    size, failed, count = ts.get_world_size(), [], 0
    mesh = ts.Mesh((1, size), ("one", "all"))
    for dtype in DTYPES:
        rng = np.random.default_rng(1)
        arrays = [ts.Tensor(rng.uniform(1, 3, (4, 8 * size)).astype("f4")).to(getattr(ts, dtype)) for _ in range(size)]
        mine = arrays[ts.get_rank()].to(DEVICE)
        for name, (call, wanted) in CASES.items():
            if skips(name, dtype) or name == "all_gather_into":
                continue
            count += 1
            rounded = name in ROUNDED and getattr(ts, dtype).is_float
            rtol = 4 * size * float(ts.finfo(getattr(ts, dtype)).eps) if rounded else 0
            try:
                found = call(mine, mesh.axis("all"))
                assert found.device == DEVICE, found.device
                want = wanted([a.numpy() for a in arrays])[ts.get_rank()]
                np.testing.assert_allclose(found.numpy().astype("f8"), want.astype("f8"), rtol=rtol)
            except Exception as error:
                failed.append(f"rank {ts.get_rank()} {name} {dtype}: {error}"[:400])
    everyone = [f for each in world.gather_objects(failed) for f in each]
    report.log(f"{count} cases, {len(everyone)} failed", *everyone[:5])
    return {"cases": count, "failed": everyone}


def check_others(report: Report) -> dict[str, bool]:
    """Large operands, NaN, asynchronous calls, messages, tensors of the host, compiled functions."""
    import tessera as ts

    rank, size = ts.get_rank(), ts.get_world_size()
    rows = [np.random.default_rng(r).standard_normal(1 << 20).astype("f4") for r in range(size)]
    total, x, before = np.sum(rows, 0), ts.Tensor(rows[rank]).to(DEVICE), (rank - 1) % size

    def near(found: Any, want: Any, rtol: float = 1e-5) -> bool:
        return np.allclose(found.numpy(), want, rtol=rtol, atol=1e-5)

    def run_async() -> bool:
        handle = ts.all_reduce_async(x)
        double = x * 2.0
        return near(handle.wait(), total) and near(double, rows[rank] * 2)

    def run_many() -> bool:
        handles = [ts.all_reduce_async(x * float(i)) for i in range(20)]
        return all(near(h.wait(), total * i) for i, h in enumerate(handles))

    def keep_nan() -> bool:
        nan = ts.Tensor(np.array([np.nan if rank == 0 else 1.0, rank], "f4")).to(DEVICE)
        want = np.array([np.nan, size - 1], "f4")
        return np.array_equal(ts.all_reduce(nan, "max").numpy(), want, equal_nan=True)

    def go_around() -> bool:
        shifted = x
        for _ in range(size):
            shifted = ts.dist.mesh_shift(shifted, 0)
        return np.array_equal(shifted.numpy(), rows[rank])

    def exchange_messages() -> bool:
        ts.send(x, dst=(rank + 1) % size, tag=2)
        ts.send(ts.full((3,), float(rank)), dst=(rank + 1) % size, tag=1)
        small = ts.recv((3,), src=before, tag=1).tolist()
        large = ts.recv(ts.zeros((1 << 20,)).to(DEVICE), src=before, tag=2)
        return small == [float(before)] * 3 and np.array_equal(large.numpy(), rows[before])

    def compile_it() -> bool:
        jitted = ts.jit(lambda x: ts.all_reduce(ts.exp(x) * 0.5) + 1.0, target="ptx")
        want = sum(np.exp(r) * np.float32(0.5) for r in rows) + 1
        return all(near(jitted(x), want, 1e-4) for _ in range(3))

    cases: dict[str, Callable[[], bool]] = {
        "large": lambda: near(ts.all_reduce(x), total),
        "repeated": lambda: all(near(ts.all_reduce(x * float(i)), total * i) for i in range(5)),
        "async": run_async,
        "many_async": run_many,
        "nan": keep_nan,
        "host": lambda: near(ts.all_reduce(ts.Tensor(rows[rank])), total),
        "ring": go_around,
        "jit": compile_it,
        "part": lambda: np.array_equal(ts.shard(x).numpy(), np.split(rows[rank], size)[rank]),
        "messages": exchange_messages,
    }
    found = {}
    for name, case in cases.items():
        report.log("case", name)
        found[name] = bool(case())
    return found


# Speed.


def time_calls(run: Callable[[], Any], calls: int) -> float:
    """Seconds of one call, host and GPU together."""
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def make_runs(size: int, world: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """Each collective by PyTorch, by this package, and by the engine alone into the memory of a result."""
    import torch
    import torch.distributed as dist

    import tessera as ts

    count, elements = world.size, size // 4
    given, out = (torch.ones(elements, device="cuda") for _ in range(2))
    whole, part = torch.empty(elements * count, device="cuda"), torch.empty(elements // count, device="cuda")
    x = ts.ones((elements,)).to(DEVICE)
    members, memory = tuple(range(count)), world.memory
    ends = {"all_reduce": elements, "all_gather": elements * count, "reduce_scatter": elements // count}
    results = {k: memory.empty((n,), np.dtype("f4"), 0) for k, n in {**ends, "all_to_all": elements}.items()}
    attrs: dict[str, dict[str, Any]] = {
        "all_reduce": {"kind": "sum"}, "all_gather": {"axis": -1}, "reduce_scatter": {"kind": "sum", "axis": -1},
        "all_to_all": {"split": -1, "join": -1},
    }  # fmt: skip
    theirs = {
        "all_reduce": lambda: dist.all_reduce(given),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, given),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, given),
        "all_to_all": lambda: dist.all_to_all_single(out, given),
    }
    calls = {name: getattr(ts, name) for name in theirs}
    ours = {name: (lambda f=call: f(x)) for name, call in calls.items()}
    alone = {n: (lambda n=n: world.run(n, x.data, results[n], members, attrs[n], 0)) for n in theirs}
    found = {n: {"torch": theirs[n], "tessera": ours[n], "engine": alone[n]} for n in theirs}
    found["all_reduce"]["in place"] = lambda: world.run("all_reduce", x.data, x.data, members, attrs["all_reduce"], 0)
    return found


def measure(report: Report, world: Any) -> dict[str, Any]:
    """Microseconds, bus bandwidth and ratios for each size; rounds of all three follow each other."""
    found: dict[str, Any] = {}
    for size in SIZES:
        for name, runs in make_runs(size, world).items():
            calls = max(20, min(200, (1 << 26) // size))
            times: dict[str, list[float]] = {who: [] for who in runs}
            for _ in range(ROUNDS):
                for who, run in runs.items():
                    times[who].append(time_calls(run, calls) * 1e6)
            slowest = [max(t) for t in zip(*world.gather_objects([t for w in times.values() for t in w]), strict=True)]
            rows = dict(zip(times, (slowest[i : i + ROUNDS][1:] for i in range(0, len(slowest), ROUNDS)), strict=True))
            row = {who: {"best": min(t), "median": statistics.median(t)} for who, t in rows.items()}
            moved = {"all_reduce": 2 * size, "all_gather": size * world.size}.get(name, size) * (1 - 1 / world.size)
            gb = {who: moved / (each["best"] * 1e3) for who, each in row.items()}
            ratio = {who: row["torch"]["best"] / each["best"] for who, each in row.items() if who != "torch"}
            found.setdefault(name, {})[str(size)] = {"microseconds": row, "bus_gb_s": gb, "speed_over_torch": ratio}
            shown = ", ".join(f"{w} {e['best']:.1f} us {gb[w]:.1f} GB/s" for w, e in row.items())
            report.log(f"{name} {size} B: {shown}; x{ratio['tessera']:.3f} x{ratio['engine']:.3f}")
    return found


def measure_overlap() -> dict[str, float]:
    """Microseconds of a 64 MiB all_reduce, of products, and of both with the collective asynchronous."""
    import torch

    import tessera as ts

    x = ts.ones((1 << 24,)).to(DEVICE)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def compute() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def both() -> None:
        handle = ts.all_reduce_async(x)
        compute()
        handle.wait()

    runs = {"all_reduce": lambda: ts.all_reduce(x), "products": compute, "both": both}
    return {name: min(time_calls(run, 10) for _ in range(5)) * 1e6 for name, run in runs.items()}


def validate_prediction(report: Report, world: Any) -> dict[str, Any]:
    """A program of products and collectives, measured and predicted from what its parts take alone."""
    import tessera as ts
    from tessera.dist import Compute, Link, simulate

    n, count = 4096, world.size
    rng = np.random.default_rng(0)
    x, w = (ts.Tensor(rng.standard_normal((n, n)).astype("f4") / 64).to(ts.bf16).to(DEVICE) for _ in range(2))

    def layer(x: Any, w: Any) -> Any:
        return ts.relu(x @ w)

    def program(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = ts.all_reduce(layer(x, w), "mean")
        return x

    def best(run: Callable[[], Any]) -> float:
        run()
        times = [time_calls(run, 20) for _ in range(5)]
        return min(max(each) for each in zip(*world.gather_objects(times), strict=True))

    one, whole = ts.jit(layer, target="ptx"), ts.jit(program, target="ptx")
    small, large = (ts.ones((k,)).to(DEVICE) for k in (256, 1 << 25))
    kernel, latency = best(lambda: one(x, w)), best(lambda: ts.all_reduce(small))
    moved = best(lambda: ts.all_reduce(large))
    share = 2 * (count - 1) / count
    link = Link(share * (1 << 27) / (moved - latency), latency / (2 * min(count - 1, 2 * (count - 1).bit_length())))
    compute = Compute(matrix=2 * n**3 / kernel, flops=1e15, bandwidth=1e15, launch=0.0)
    mesh = ts.Mesh(count, "ranks")
    types = (ts.Tensor[n, n, ts.bf16],) * 2
    predicted = simulate(program, mesh, *types, links={"ranks": link}, compute=compute).seconds
    measured = best(lambda: whole(x, w))
    found = {"kernel": kernel, "latency": latency, "bandwidth": link.bandwidth, "measured": measured}
    found |= {"predicted": predicted, "error": predicted / measured - 1}
    report.log(found)
    return found


# Training.


def train(report: Report, world: Any) -> dict[str, Any]:
    """The GPT example with NCCL on tensors of the host and on the GPU, against one device in the simulator."""
    from examples.dist import gpt

    found: dict[str, Any] = {}
    for name in ("dp", "tp_dp", "zero3", "ring", "pp"):
        for target in (None, "ptx"):
            if target and name == "pp":
                continue  # its activations travel by messages, which arrive in host memory
            config = gpt.Config(target=target, blocks=BLOCKS)
            start = time.monotonic()
            try:
                alone = gpt.one(gpt.Config(blocks=BLOCKS), GPT_STEPS)
                losses = gpt.STRATEGIES[name](config, GPT_STEPS, "nccl", ranks=world.size)
                far = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
                found[f"{name} {target or 'host'}"] = {"losses": losses, "one": alone, "difference": far}
                took = time.monotonic() - start
                report.log(f"{name} {target or 'host'}: difference {far:.1e}, {took:.1f} s")
            except Exception:
                found[f"{name} {target or 'host'}"] = {"error": traceback.format_exc()[-2000:]}
                report.log(name, target, traceback.format_exc()[-2000:])
    return found


def work(options: argparse.Namespace) -> None:
    """All steps, as one rank."""
    faulthandler.dump_traceback_later(2 * STEP_SECONDS, exit=True)
    rank, size = int(os.environ["TESSERA_RANK"]), int(os.environ["TESSERA_WORLD_SIZE"])
    report = Report(options.out, rank)
    report.log("importing torch")
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    store = f"file://{os.environ['TESSERA_RENDEZVOUS']}/torch"
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=size)
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    report.log("torch.distributed is ready; importing tessera")
    import tessera as ts
    from benchmarks import dist_copies, dist_training
    from tessera.dist.engines import load_world

    world = load_world("nccl", False)
    mesh = ts.Mesh(size, "ranks", engine="nccl")
    report.log("joining NCCL")

    def wait() -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def in_ranks(step: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: ts.spmd(step, mesh=mesh, out_specs="ranks")()[rank]

    steps: dict[str, Callable[[], Any]] = {
        "machine": lambda: describe(world),
        "collectives": in_ranks(lambda: check_collectives(report, world)),
        "speed": in_ranks(lambda: measure(report, world)),
        "overlap": in_ranks(measure_overlap),
        "prediction": in_ranks(lambda: validate_prediction(report, world)),
        "training": lambda: train(report, world),
        "blocks": in_ranks(lambda: dist_training.measure_blocks(world, report.log, wait)),
        "copies": in_ranks(lambda: dist_copies.measure_copies(world, report.log, wait)),
        "products": in_ranks(lambda: dist_training.measure_products(world, report.log, wait)),
        "step": in_ranks(lambda: dist_training.measure_steps(world, report.log, wait)),
        "others": in_ranks(lambda: check_others(report)),
        # The last: PyTorch's asynchronous op may not run where every process sees one GPU.
        "products_async": in_ranks(lambda: dist_training.measure_products(world, report.log, wait, asynchronous=True)),
    }
    for name, step in steps.items():
        if not options.steps or name in options.steps:
            report.run(name, step)
            if name in ("machine", "others", "overlap"):
                report.log(name, report.found[name])
    report.log("done")
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(10, exit=True)
    world.close()
    dist.destroy_process_group()


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("steps", nargs="*")
    work(parser.parse_args())


if __name__ == "__main__":
    main()
