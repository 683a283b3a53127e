"""Training steps on the processor, against PyTorch eager with its fused AdamW.

    python -m benchmarks.training_steps [--threads 1]

Both sides start from the same weights, and their first losses are compared. Steps are measured in turn, and the best of
each counts; with one thread the seconds are those of the processor, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import keep

ROUNDS = 20


def make_mlp(n: Any) -> Any:
    """784, 256, 256, 10, of either library."""
    return n.Sequential(n.Linear(784, 256), n.ReLU(), n.Linear(256, 256), n.ReLU(), n.Linear(256, 10))


class GptSizes(NamedTuple):
    """The sizes of a GPT."""

    vocabulary: int = 128
    width: int = 256
    heads: int = 8
    layers: int = 2
    length: int = 64


SMALL = GptSizes()


def make_gpt(
    n: Any, attend: Callable[..., Any], gelu: Callable[..., Any], arange: Callable[[int], Any],
    sizes: GptSizes = SMALL,
) -> Any:  # fmt: skip
    """A GPT of either library, whose head is the embedding of tokens; `arange` gives the positions."""
    width = sizes.width

    class Block(n.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = n.LayerNorm(width), n.LayerNorm(width)
            self.qkv, self.out = n.Linear(width, 3 * width), n.Linear(width, width)
            self.up, self.down = n.Linear(width, 4 * width), n.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            size = (*x.shape[:2], sizes.heads, width // sizes.heads)
            whole = self.qkv(self.first(x))
            parts = [whole[..., i * width : (i + 1) * width] for i in range(3)]
            heads = [p.reshape(size).permute(0, 2, 1, 3) for p in parts]
            x = x + self.out(attend(*heads, is_causal=True).permute(0, 2, 1, 3).reshape(x.shape))
            return x + self.down(gelu(self.up(self.second(x))))

    class Gpt(n.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = n.Embedding(sizes.vocabulary, width), n.Embedding(sizes.length, width)
            self.blocks = n.Sequential(*[Block() for _ in range(sizes.layers)])
            self.norm = n.LayerNorm(width)

        def forward(self, codes: Any) -> Any:
            x = self.blocks(self.tokens(codes) + self.places(arange(sizes.length)))
            return self.norm(x) @ self.tokens.weight.T

    return Gpt()


def list_cases(torch: Any) -> dict[str, Callable[[], tuple[Any, Any, np.ndarray, np.ndarray]]]:
    """Each model of ours and of PyTorch's, with a batch."""
    import tessera as ts
    from tessera import nn

    rng = np.random.default_rng(0)

    def mlp(size: int) -> Callable[[], Any]:
        return lambda: (
            make_mlp(nn), make_mlp(torch.nn), rng.standard_normal((size, 784)).astype(np.float32),
            rng.integers(0, 10, size),
        )  # fmt: skip

    def gpt() -> Any:
        f = torch.nn.functional
        ours = make_gpt(nn, ts.scaled_dot_product_attention, ts.gelu, ts.arange)
        sizes = SMALL
        codes = rng.integers(0, sizes.vocabulary, (16, sizes.length))
        targets = rng.integers(0, sizes.vocabulary, 16 * sizes.length)
        return ours, make_gpt(torch.nn, f.scaled_dot_product_attention, f.gelu, torch.arange), codes, targets

    return {"mlp, batch 32": mlp(32), "mlp, batch 128": mlp(128), "mlp, batch 512": mlp(512), "gpt, batch 16 x 64": gpt}


def make_ours(model: Any, x: np.ndarray, y: np.ndarray) -> Callable[[], float]:
    """A step of ours."""
    import tessera as ts
    from tessera import optim

    optimizer = optim.AdamW(lr=1e-3)

    def loss(model: Any, x: Any, y: Any) -> Any:
        logits = model(x)
        return ts.cross_entropy(logits.reshape(-1, logits.shape[-1]), y)

    @ts.jit(target="cpu", donate=("model", "state"))
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = ts.value_and_grad(loss)(model, x, y)
        return value, *optimizer.update(model, grads, state)

    held, batch = [model, optimizer.init(model)], (ts.tensor(x), ts.tensor(y))

    def run() -> float:
        model, state = held.pop(0), held.pop(0)
        value, *held[:] = step(model, state, *batch)
        return float(value.item())

    return run


def make_peer(torch: Any, model: Any, x: np.ndarray, y: np.ndarray) -> Callable[[], float]:
    """A step of PyTorch's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    given, wanted = torch.tensor(x), torch.tensor(y)

    def run() -> float:
        optimizer.zero_grad()
        logits = model(given)
        value = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), wanted)
        value.backward()
        optimizer.step()
        return float(value.item())

    return run


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    os.environ["TESSERA_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    clock, rows = time.thread_time if threads == 1 else time.perf_counter, []
    for name, build in list_cases(torch).items():
        ours, peer, x, y = build()
        peer.load_state_dict({n: torch.tensor(t.numpy()) for n, t in ours.state_dict().items()})
        steps = {"tessera": make_ours(ours, x, y), "torch": make_peer(torch, peer, x, y)}
        first = {side: run() for side, run in steps.items()}
        assert abs(first["tessera"] - first["torch"]) < 1e-4 * first["torch"], first
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(ROUNDS):
            for side, run in steps.items():
                start = clock()
                run()
                best[side] = min(best[side], clock() - start)
        row = {"model": name, "threads": threads, "milliseconds": {s: round(1e3 * t, 3) for s, t in best.items()}}
        rows.append({**row, "ratio": round(best["torch"] / best["tessera"], 3)})
        print(rows[-1], flush=True)
    clock_name = "processor seconds" if threads == 1 else "seconds"
    print(keep("training_steps", {"torch": torch.__version__, "clock": clock_name, "rows": rows}))


if __name__ == "__main__":
    main()
