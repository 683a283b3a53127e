"""Permutations of compiled programs on the GPUs of one host: by copy engines and by NCCL, checked and timed.

    python -m benchmarks.dist --engine nccl -n 2 --out results copies

A program is called with inputs that change in place, so that its second call records a CUDA graph and the others replay
it. Bandwidth is that of a rank that sends and receives at the same time, alone and beside four products of 4096 by 4096
elements of bf16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import tessera as ts
from benchmarks.dist_training import ROUNDS, time_round
from tessera.dist import peer_copies
from tessera.dist.ranks import open_channels

SIZES = (1 << 16, 1 << 20, 1 << 22, 1 << 25)  # bytes on each rank
REPLAYS, CALLS = 50, 20
DEVICE = "cuda"
PRODUCT = 4096
Run = Callable[[], Any]


def measure_copies(world: Any, log: Any, wait: Run) -> dict[str, Any]:
    """Whether copy engines serve all ranks, what they handed over, and how fast."""
    members = tuple(range(world.size))
    served = world.copies.serve(members)
    found: dict[str, Any] = {"served": served, "reason": world.copies.reasons.get(members, "")}
    log("copy engines serve all ranks" if served else f"no copy engines: {found['reason']}")
    found["wrong"] = wrong = [each for size in SIZES for each in check_size(world, size)]
    log(f"{len(SIZES) * 2} programs of {REPLAYS} calls, wrong: {wrong[:5] or 'none'}")
    found["bandwidth"] = {str(size): measure_size(world, size, log, wait) for size in SIZES[1:]}
    return found


def check_size(world: Any, size: int) -> list[str]:
    """What a ring and a permutation with one end handed over wrong, or without copy engines."""
    import torch

    rank, count, wrong = ts.get_rank(), world.size, []
    start = np.arange(size // 4, dtype="f4") % 977
    x = torch.empty(size // 4, device=DEVICE)
    for name, pairs in (("ring", [(i, (i + 1) % count) for i in range(count)]), ("one end", [(0, count - 1)])):
        program = ts.jit(partial(_permute_between_kernels, pairs), target="ptx")
        source = next((here for here, there in pairs if there == rank), None)
        exchanges = count_exchanges()
        for number in range(REPLAYS):
            x.copy_(torch.from_numpy(start + (1000 * rank + number)))
            got = program(x).numpy()
            want = np.ones_like(start) if source is None else 2 * (start + (1000 * source + number)) + 1
            if not np.array_equal(got, want):
                wrong.append(f"rank {rank}, {name}, {size} bytes, call {number}: {np.sum(got != want)} elements")
        if world.copies.serve(tuple(range(count))) and not exchanges():
            wrong.append(f"rank {rank}, {name}, {size} bytes: NCCL made the permutation")
    return [each for everyone in world.gather_objects(wrong) for each in everyone]


def _permute_between_kernels(pairs: list[tuple[int, int]], x: Any) -> Any:
    """The result lies in the program's workspace, as a channel wants."""
    return ts.dist.collective_permute(x * 2.0, pairs) + 1.0


def count_exchanges() -> Callable[[], int]:
    """What tells how many exchanges were queued or recorded since."""
    queued: list[None] = []
    plain = getattr(peer_copies.Channel.exchange, "plain", peer_copies.Channel.exchange)

    def exchange(channel: Any, *given: Any) -> None:
        queued.append(None)
        plain(channel, *given)

    exchange.plain = plain  # type: ignore[attr-defined]
    peer_copies.Channel.exchange = exchange  # type: ignore[method-assign]
    return lambda: len(queued)


def measure_size(world: Any, size: int, log: Any, wait: Run) -> dict[str, Any]:
    """Microseconds of a ring's exchange, by copy engines and by NCCL, alone and beside products."""
    import torch

    memory, count = world.memory, world.size
    members = tuple(range(count))
    stream = memory.find_stream()
    x, out = (memory.empty((size,), np.dtype(np.uint8), stream) for _ in range(2))
    memory.clear(x, stream)
    attrs = {"pairs": tuple((i, (i + 1) % count) for i in members), "groups": (members,)}
    (channel,) = open_channels([(attrs, out.address, size)])
    a = torch.randn(PRODUCT, PRODUCT, device=DEVICE, dtype=torch.bfloat16)

    def multiply() -> None:
        for _ in range(4):
            torch.mm(a, a)

    def make(attrs: dict[str, Any], compute: Run) -> Run:
        def run() -> None:
            mark = world.start_together([("collective_permute", x, out, members, attrs)], stream)
            compute()
            memory.wait(stream, mark)

        return run

    runs: dict[str, Run] = {"products": multiply}
    for name, given in (("NCCL", attrs), *([("copies", attrs | {"channel": channel})] if channel else ())):
        runs[name] = make(given, lambda: None)
        runs[f"{name} beside products"] = make(given, multiply)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(1e6 * time_round(run, CALLS, wait))
    rows = [
        [max(t) for t in zip(*row, strict=True)] for row in zip(*world.gather_objects([*times.values()]), strict=True)
    ]
    row = {name: {"best": min(t), "median": statistics.median(t)} for name, t in zip(runs, rows, strict=True)}
    found: dict[str, Any] = {"microseconds": row}
    for name in ("NCCL", "copies") if channel else ("NCCL",):
        rate = size / row[name]["best"] / 1e3
        slower = row[f"{name} beside products"]["best"] / row["products"]["best"]
        found[name] = {"gb_s": rate, "products_beside": slower}
        shown = f"{row[name]['best']:.1f} us, {rate:.1f} GB/s; products take {slower:.3f} times as long"
        log(f"{size} bytes by {name}: {shown}")
    return found
