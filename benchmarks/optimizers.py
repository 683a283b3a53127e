"""One step of each optimizer on the processor, against PyTorch's fused and foreach implementations.

    python -m benchmarks.optimizers [--threads 1]

Ours is one call of the compiled `optimizer.update` with its state donated; "launch" is the part of it that machine code
takes, which is what remains inside a compiled training step. Both sides are measured in turn, and the best of each
counts; the peer is the faster of PyTorch's implementations. With one thread the seconds are those of the processor,
which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import keep

ROUNDS, CALLS = 12, 8


def list_models() -> dict[str, list[tuple[int, ...]]]:
    """The shapes of the parameters of some models."""
    block = [(256,), (256,), (768, 256), (768,), (256, 256), (256,), (256,), (256,), (1024, 256), (1024,), (256, 1024),
             (256,)]  # fmt: skip
    return {
        "mlp": [(256, 784), (256,), (256, 256), (256,), (10, 256), (10,)],
        "gpt of 2 layers": [(128, 256), (64, 256), *block, *block, (256,), (256,), (128, 256), (128,)],
        "matrix of 4M": [(2048, 2048)],
    }


def make_pairs(torch: Any) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Each optimizer as ours and as PyTorch's."""
    from tessera import optim

    o = torch.optim
    return {
        "SGD momentum": (optim.SGD(lr=1e-3, momentum=0.9), lambda p, **k: o.SGD(p, lr=1e-3, momentum=0.9, **k)),
        "Adam": (optim.Adam(), o.Adam),
        "AdamW": (optim.AdamW(), o.AdamW),
        "RMSprop": (optim.RMSprop(), o.RMSprop),
        "Adagrad": (optim.Adagrad(), o.Adagrad),
    }


def make_ours(optimizer: Any, arrays: list[np.ndarray], grads: list[np.ndarray]) -> Callable[[], Any]:
    """A step of ours."""
    import tessera as ts

    held = {"params": [ts.tensor(a) for a in arrays]}
    held["state"] = optimizer.init(held["params"])
    given = [ts.tensor(g) for g in grads]
    update = ts.jit(optimizer.update, target="cpu", donate=("params", "state"))

    def step() -> None:
        params, state = held.pop("params"), held.pop("state")
        held["params"], held["state"] = update(params, given, state)

    return step


def make_peers(torch: Any, build: Any, arrays: list[np.ndarray], grads: list[np.ndarray]) -> dict[str, Any]:
    """A step of each of PyTorch's implementations."""
    made: dict[str, Callable[[], Any]] = {}
    for name in ("fused", "foreach"):
        params = [torch.nn.Parameter(torch.tensor(a)) for a in arrays]
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g)
        try:
            optimizer = build(params, **{name: True})
            optimizer.step()
        except (RuntimeError, TypeError):  # RMSprop has no fused implementation
            continue
        made[name] = optimizer.step
    return made


def watch_launches(clock: Callable[[], float]) -> list[float]:
    """The seconds that machine code takes, from now on."""
    from tessera.codegen.llvm.runtime.thread_pool import WorkerPool

    run, seconds = WorkerPool.run, list[float]()

    def timed(pool: Any, *args: Any) -> None:
        start = clock()
        run(pool, *args)
        seconds.append(clock() - start)

    WorkerPool.run = timed  # type: ignore[method-assign, assignment]
    return seconds


def compare(sides: dict[str, Callable[[], Any]], launches: list[float], clock: Callable[[], float]) -> dict[str, float]:
    """The best milliseconds of each side, measured in turn."""
    best = dict.fromkeys([*sides, "launch"], float("inf"))
    for _ in range(ROUNDS):
        for name, run in sides.items():
            for _ in range(CALLS):
                launches.clear()
                start = clock()
                run()
                best[name] = min(best[name], clock() - start)
                if launches:
                    best["launch"] = min(best["launch"], sum(launches))
    return {name: round(1e3 * seconds, 4) for name, seconds in best.items()}


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    os.environ["TESSERA_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    launches, rng, rows = watch_launches(clock), np.random.default_rng(0), []
    for model, shapes in list_models().items():
        arrays, grads = ([rng.standard_normal(s).astype(np.float32) for s in shapes] for _ in range(2))
        for name, (ours, build) in make_pairs(torch).items():
            step = make_ours(ours, arrays, grads)
            step()
            row = compare({"tessera": step, **make_peers(torch, build, arrays, grads)}, launches, clock)
            peer = min(row[n] for n in ("fused", "foreach") if n in row)
            ratios = {"ratio": round(peer / row["tessera"], 3), "ratio of the launch": round(peer / row["launch"], 3)}
            rows.append({"model": model, "optimizer": name, "threads": threads, "milliseconds": row, **ratios})
            print(f"{model:16} {name:14} {row} {ratios}", flush=True)
    print(keep("optimizers", {"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
