"""Times an MLP's forward and backward under PyTorch eager on the CPU: the peer of gradients.py; prints JSON."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

LAYERS, WIDTH, BATCH = 4, 1024, 256


Layers = list[tuple[torch.Tensor, torch.Tensor]]


def arrays() -> tuple[Layers, torch.Tensor, torch.Tensor]:
    """Weights and biases of each layer, inputs and targets: the same numbers as ours."""
    rng = np.random.default_rng(0)
    layers = [
        (torch.tensor(rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.03), torch.zeros(WIDTH))
        for _ in range(LAYERS)
    ]
    x, y = (torch.tensor(rng.normal(size=(BATCH, WIDTH)).astype(np.float32)) for _ in range(2))
    return [(w.requires_grad_(), b.requires_grad_()) for w, b in layers], x, y


def step(layers: Layers, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Forward and backward, into fresh gradients."""
    for p in (p for layer in layers for p in layer):
        p.grad = None
    for number, (w, b) in enumerate(layers):
        x = x @ w + b
        x = torch.relu(x) if number < LAYERS - 1 else x
    loss = ((x - y) ** 2).mean()
    loss.backward()
    return loss


def main() -> None:
    """Run the benchmark and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    layers, x, y = arrays()
    for _ in range(3):
        loss = step(layers, x, y)
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < given.seconds or len(times) < 10:
        start = time.perf_counter()
        loss = step(layers, x, y)
        times.append(time.perf_counter() - start)
    report = {"best": min(times), "median": sorted(times)[len(times) // 2], "loss": float(loss)}
    report |= {"norm": float(layers[0][0].grad.norm()), "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
