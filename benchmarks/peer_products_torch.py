"""PyTorch's products with a scattered sum: one after the other, and as one asynchronous op over symmetric memory.

    torchrun --nproc-per-node 2 benchmarks/peer_products_torch.py OUT

Each process sees all GPUs, as symmetric memory wants; `benchmarks.dist_training` has the same products of ours, in
which each process sees its own. Both run on one machine, one after the other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # noqa: F401  # its ops

SHAPES = ((8192, 8192, 4096), (8192, 14336, 4096), (16384, 28672, 8192))
ROUNDS, CALLS = 6, 20


def measure(run: Callable[[], Any]) -> float:
    """Milliseconds of a call: the best round of the slowest rank."""
    for _ in range(3):
        run()
    best = torch.full((ROUNDS,), 0.0, device="cuda")
    for i in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
        best[i] = (time.perf_counter() - start) / CALLS * 1e3
    dist.all_reduce(best, dist.ReduceOp.MAX)
    return float(best.min().item())


def main() -> None:
    """Measure all shapes; rank 0 writes them."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group, size, found = dist.group.WORLD.group_name, dist.get_world_size(), {}
    for m, k, n in SHAPES:
        torch.manual_seed(rank)
        x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16) / 64 for s in ((m, k // size), (k // size, n)))
        out = torch.empty(m // size, n, device="cuda", dtype=torch.bfloat16)

        def plain(x: Any = x, w: Any = w, out: Any = out) -> Any:
            dist.reduce_scatter_tensor(out, x @ w)
            return out

        def fused(x: Any = x, w: Any = w) -> Any:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)

        row: dict[str, Any] = {"plain": measure(plain), "product alone": measure(lambda x=x, w=w: x @ w)}
        try:
            row["async"] = measure(fused)
            row["difference"] = float((fused() - plain()).abs().max())
        except Exception as error:
            row["error"] = str(error)[-600:]
        found[f"{m}x{k}x{n}"] = row
        if rank == 0:
            print(m, k, n, row, flush=True)
            Path(sys.argv[1], "peer_products.json").write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
