"""GPU probe of breadth: long rows, pools, scans, scatters and programs once refused, against PyTorch, in two minutes.

    python -m benchmarks.gpu_breadth_probe [--only REGEX] [--budget 110] [--out gpu_breadth_probe.json]
    python -m benchmarks.gpu_breadth_probe --small       # without a GPU: small sizes on the PTX emulator

The rows are fixed points of the families of `benchmarks.breadth`, whose measure, checks and ratio they use: the time of
the better of PyTorch eager and torch.compile over ours. When half of the budget is spent, torch.compile is left out,
and when all of it is, the remaining rows; the file says which.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tessera as ts
from benchmarks.breadth import Machine, measure, show, summarise
from benchmarks.breadth_families import Case
from benchmarks.machine import describe

Tensors = tuple[torch.Tensor, ...]
nn = torch.nn.functional


def mlp(cast: Callable[..., Any], relu: Callable[..., Any]) -> Callable[..., Any]:
    """A network of two layers, as a function of x and both weights."""
    return lambda x, a, b: cast(relu(x @ a) @ b)


class Probe:
    """The rows, with inputs on a device; `small` divides every long size."""

    def __init__(self, device: str, small: bool) -> None:
        self.device, self.small = device, small
        self.random = torch.Generator(device).manual_seed(0)

    def size(self, n: int) -> int:
        """A size, or a small one in its stead."""
        return n if not self.small else min(n, 8 + n % 11)

    def draw(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers."""
        sizes = tuple(map(self.size, shape))
        return torch.randn(sizes, device=self.device, generator=self.random).to(dtype)

    def places(self, count: int, limit: int) -> torch.Tensor:
        """Random indices."""
        size = (self.size(count),)
        return torch.randint(self.size(limit), size, device=self.device, generator=self.random)

    def rows(self) -> Iterator[tuple[str, Callable[[], Case]]]:
        """Each row's label, and the function that makes it."""
        for group in (self._order, self._reductions, self._scans, self._windows, self._scatters, self._once_refused):
            for label, own, theirs, inputs, *more in group():
                extra = more[0] if more else {}
                yield label, lambda o=own, t=theirs, i=inputs, label=label, e=extra: Case(label, o, t, i(), **e)

    def _order(self) -> Iterator[tuple[Any, ...]]:
        exact = {"exact": True}
        for m, n, k in ((1024, 32768, 8), (8, 1000003, 64), (65536, 1000, 5)):
            yield (
                f"top-{k} of {m}x{n}", lambda x, k=k: ts.topk(x, min(k, x.shape[-1]))[0],
                lambda x, k=k: x.topk(min(k, x.shape[-1])).values, lambda m=m, n=n: (self.draw(m, n),), exact,
            )  # fmt: skip
        for m, n in ((16384, 1000), (1024, 32768), (8, 1000003)):
            inputs = lambda m=m, n=n: (self.draw(m, n),)  # noqa: E731
            yield f"sort of {m}x{n}", lambda x: ts.sort(x, axis=-1), lambda x: x.sort(-1).values, inputs, exact

    def _reductions(self) -> Iterator[tuple[Any, ...]]:
        yield "sum of 2^26", ts.sum, torch.sum, lambda: (self.draw(1 << 26),)
        yield "sum of 67,108,859 bf16", ts.sum, torch.sum, lambda: (self.draw(67_108_859, dtype=torch.bfloat16),)
        for m, n in ((8192, 8192), (1_000_000, 64)):
            inputs = lambda m=m, n=n: (self.draw(m, n),)  # noqa: E731
            yield f"sum over axis 0 of {m}x{n}", lambda x: ts.sum(x, axis=0), lambda x: x.sum(0), inputs
        yield "softmax of 8x1000000", ts.softmax, lambda x: x.softmax(-1), lambda: (self.draw(8, 1_000_000),)
        yield (
            "variance of channels", lambda x: ts.var(x, axis=(0, 2, 3)), lambda x: x.var((0, 2, 3), correction=0),
            lambda: (self.draw(64, 256, 56, 56),),
        )  # fmt: skip

    def _scans(self) -> Iterator[tuple[Any, ...]]:
        for m, n in ((4096, 8192), (8, 4_000_000), (65536, 500)):
            inputs = lambda m=m, n=n: (self.draw(m, n),)  # noqa: E731
            yield f"cumsum of {m}x{n}", lambda x: ts.cumsum(x, axis=-1), lambda x: x.cumsum(-1), inputs
        inputs = lambda: (self.draw(8192, 4096),)  # noqa: E731
        yield "cumsum over axis 0 of 8192x4096", lambda x: ts.cumsum(x, axis=0), lambda x: x.cumsum(0), inputs

    def _windows(self) -> Iterator[tuple[Any, ...]]:
        inputs = lambda: (self.draw(64, 64, 112, 112),)  # noqa: E731
        yield "max pool 3x3", lambda x: ts.max_pool2d(x, 3, 2, 1), lambda x: nn.max_pool2d(x, 3, 2, 1), inputs
        yield "mean pool 2x2", lambda x: ts.avg_pool2d(x, 2), lambda x: nn.avg_pool2d(x, 2), inputs
        small = lambda: (self.draw(8, 64, 112, 112),)  # noqa: E731
        yield "max pool 7x7", lambda x: ts.max_pool2d(x, 7, 1), lambda x: nn.max_pool2d(x, 7, 1), small

    def _scatters(self) -> Iterator[tuple[Any, ...]]:
        for rows, width, count in ((50_000, 768, 65_536), (1_000_000, 16, 1_000_000), (1000, 256, 65_536)):
            inputs = lambda r=rows, w=width, c=count: (self.draw(r, w), self.places(c, r), self.draw(c, w))  # noqa: E731
            label = f"index_add of {count} rows to {rows}x{width}"
            yield label, lambda x, i, u: ts.index_add(x, 0, i, u), lambda x, i, u: x.index_add(0, i, u), inputs

    def _once_refused(self) -> Iterator[tuple[Any, ...]]:
        bf16 = torch.bfloat16
        yield (
            "bf16 convolution 3x3, 256 channels", lambda x, w: ts.conv2d(x, w, padding=1),
            lambda x, w: nn.conv2d(x, w, padding=1),
            lambda: (self.draw(32, 256, 56, 56, dtype=bf16), self.draw(256, 256, 3, 3, dtype=bf16)),
            {"flops": 2.0 * 32 * 56 * 56 * 256 * 256 * 9},
        )  # fmt: skip
        n, m = 8192, 2048
        yield (
            "gradient of a bf16 network of width 8192", mlp(lambda y: y, ts.relu), mlp(lambda y: y, torch.relu),
            lambda: tuple(self.draw(*s, dtype=bf16) for s in ((m, n), (n, n), (n, n), (m, n))),
            {"wrt": (0, 1, 2), "flops": 12.0 * m * n * n},
        )  # fmt: skip


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every row that was asked for; the file is written as it grows."""
    machine = Machine("ptx")
    machine.device = "cpu" if options.small else "cuda"
    probe, start = Probe(machine.device, options.small), time.perf_counter()
    limits = {"bytes": 1.0, "flops": 1.0} if options.small else machine.limits()
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"machine": describe(), "torch": torch.__version__, "limits": limits, "rows": rows}
    if not options.small:
        found["gpu"] = torch.cuda.get_device_name()
    for label, make in probe.rows():
        spent = time.perf_counter() - start
        if not re.search(options.only, label):
            continue
        if spent > options.budget:
            found.setdefault("left out", []).append(label)
            continue
        options.no_inductor, options.lock = options.small or spent > options.budget / 2, None
        row = {"family": "probe", **measure(machine, make(), options, limits)}
        rows.append(row)
        print(show(row), flush=True)
        found |= {"all": summarise(rows), "seconds": time.perf_counter() - start}
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="a regular expression of rows")
    parser.add_argument("--budget", type=float, default=110, help="seconds")
    parser.add_argument("--seconds", type=float, default=0.1, help="for the rounds of a row")
    parser.add_argument("--small", action="store_true", help="small sizes on the emulator, for checks alone")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.max_autotune = False
    os.environ.setdefault("TESSERA_THREADS", "2")
    warnings.filterwarnings("ignore")
    print(json.dumps(run_all(options)["all"], indent=1))


if __name__ == "__main__":
    main()
