"""Call overhead of torch.compile's backends: a module of few elements, forward without gradients.

    python -m benchmarks.torch_overhead [--backends aot_eager tessera inductor] [--out overhead.json]

Microseconds of processor time of a call on one thread, the least of several rounds. `eager` is the module itself.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tessera as ts

ROUNDS, CALLS = 15, 400


class Chain(torch.nn.Module):
    """A linear layer and some pointwise ops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result for a batch."""
        return torch.nn.functional.gelu(self.linear(x)) * 2 + x


def measure(call: Callable[[Any], Any], x: torch.Tensor) -> float:
    """Microseconds of a call."""
    call(x)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(CALLS):
            call(x)
        best = min(best, (time.thread_time() - start) / CALLS)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", nargs="+", default=["aot_eager", "tessera"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(4, 8)
    with torch.no_grad():
        found = {"eager": measure(model, x)}
        for name in args.backends:
            torch._dynamo.reset()
            backend = ts.torch.backend if name == "tessera" else name
            found[name] = measure(torch.compile(model, backend=backend), x)
    for name, value in found.items():
        print(f"{name:12} {value:7.2f} us")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
