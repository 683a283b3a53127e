"""Collectives over MPI against bare mpi4py on the same buffers, in the same run.

    python -m benchmarks.dist -n 4 [--json results.json]          # as processes of MPI
    python -m benchmarks.dist --engine nccl -n 2 --out results    # on GPUs, against torch.distributed: dist_nccl.py

Rounds of ours and of bare mpi4py follow each other, and the slowest rank counts. The best and the median of each are
kept, since other work on the machine disturbs rounds at random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from benchmarks import dist_nccl
from benchmarks.machine import describe
from tessera.dist.mpi import count_launched
from tessera.tools.cli.launch import find_launcher

SIZES = (1 << 10, 1 << 16, 1 << 22)  # bytes of the operand on each rank
COMM: Any = None  # set by main: MPI.COMM_WORLD


def make_pairs(size: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Each collective as a call of ours in a rank, and as one of mpi4py."""
    count = COMM.Get_size()
    x = np.random.default_rng(COMM.Get_rank()).random(size // 4, np.float32)
    tensor, all_of_it, part = ts.Tensor(x), np.empty(x.size * count, np.float32), np.empty(x.size // count, np.float32)
    out = np.empty_like(x)
    return {
        "all_reduce": (lambda: ts.all_reduce(tensor), lambda: COMM.Allreduce(x, out)),
        "all_gather": (lambda: ts.all_gather(tensor), lambda: COMM.Allgather(x, all_of_it)),
        "reduce_scatter": (lambda: ts.reduce_scatter(tensor), lambda: COMM.Reduce_scatter_block(x, part)),
        "all_to_all": (lambda: ts.all_to_all(tensor), lambda: COMM.Alltoall(x, out)),
        "broadcast": (lambda: ts.broadcast(tensor), lambda: COMM.Bcast(out)),
    }


def time_round(run: Callable[[], Any], calls: int) -> float:
    """Seconds of one call, of the slowest rank."""
    COMM.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return float(max(COMM.allgather(time.perf_counter() - start))) / calls


def compare(size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds of each collective, ours and bare, and their ratios."""
    found = {}
    for name, (ours, bare) in make_pairs(size).items():
        calls = max(1, min(50, (1 << 22) // size))
        times = [(time_round(ours, calls), time_round(bare, calls)) for _ in range(rounds)][1:]
        a, b = ([t[i] * 1e6 for t in times] for i in (0, 1))
        row = {"ours_best": min(a), "bare_best": min(b), "ours_median": statistics.median(a)}
        row |= {"bare_median": statistics.median(b), "ratio_best": min(a) / min(b)}
        found[name] = row | {"ratio_median": row["ours_median"] / row["bare_median"]}
    return found


def main() -> None:
    """Measure all sizes; rank 0 prints them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=("mpi", "nccl"), default="mpi")
    parser.add_argument("-n", type=int, default=0, help="the number of processes (4), or of GPUs (2)")
    parser.add_argument("--out", type=Path, default=Path("results"), help="nccl: the folder of nccl.json")
    parser.add_argument("steps", nargs="*", help="nccl: some steps alone")
    options = parser.parse_args()
    options.n = options.n or (2 if options.engine == "nccl" else 4)
    if options.engine == "nccl":
        sys.exit(dist_nccl.launch(options))
    if count_launched() == 1:
        command = [find_launcher(), "-n", str(options.n), sys.executable, "-m", "benchmarks.dist", *sys.argv[1:]]
        sys.exit(subprocess.call(command))
    measure_mpi(options)


def measure_mpi(options: argparse.Namespace) -> None:
    """As one process of MPI: ours and bare mpi4py."""
    global COMM
    from mpi4py import MPI

    COMM = MPI.COMM_WORLD
    mesh = ts.Mesh(COMM.Get_size(), "ranks", engine="mpi")
    run = ts.spmd(lambda: {str(n): compare(n, options.rounds) for n in SIZES}, mesh=mesh)
    results = run()
    if COMM.Get_rank() == 0:
        for size, rows in results.items():
            for name, row in rows.items():
                print(f"{size:>8} B {name:15}", " ".join(f"{k} {v:.4g}" for k, v in row.items()), flush=True)
        if options.json:
            found = {"machine": describe(), "ranks": COMM.Get_size(), "microseconds": results}
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
