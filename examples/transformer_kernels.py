"""A transformer block whose attention and norms are kernels of one's own, trained end to end.

    python -m examples.transformer_kernels [--target llvm] [--steps 40]

The block learns to copy each sequence's first token to every position. Reverse mode derives the backward kernels from
the forward ones; every launch is part of one compiled program.
"""

# mypy: disable-error-code="operator, attr-defined, index"

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

import tessera as ts
from tessera import tile

BATCH, LENGTH, WIDTH, HEADS, TOKENS = 8, 12, 32, 2, 11


@ts.kernel
def rms_norm(x, scale, out, *, BM: int = 8):
    """out = x / sqrt(mean square + eps) · scale for each row of x [R, C], on the grid (ceil(R / BM),)."""
    first = tile.program_id(0) * BM
    rows = tile.load(x[first : first + BM, :], edge="clip")
    root = tile.rsqrt(tile.sum(rows * rows, axis=1) / x.shape[1] + 1e-5)
    tile.store(out[first : first + BM, :], rows * root[:, None] * scale[:][None, :], edge="clip")


@ts.kernel
def attend(q, k, v, out, *, scale: float, BM: int = 4, BN: int = 4):
    """Causal attention with online softmax; q, k, v and out are [B, H, S, D], on the grid (B, H, ceil(S / BM))."""
    b, h, first = tile.program_id(0), tile.program_id(1), tile.program_id(2) * BM
    rows = first + tile.arange(0, BM)
    queries = tile.load(q[b, h, first : first + BM, :], edge="clip") * scale
    m, l, acc = tile.full((BM,), -math.inf), tile.zeros((BM,)), tile.zeros((BM, q.shape[3]))
    for start in tile.range(0, first + BM, BN):
        cols = start + tile.arange(0, BN)
        scores = queries @ tile.load(k[b, h, start : start + BN, :], edge="clip").T
        scores = tile.where(cols[None, :] <= rows[:, None], scores, -math.inf)
        high = tile.maximum(m, tile.max(scores, axis=1))
        weights, old = tile.exp(scores - high[:, None]), tile.exp(m - high)
        l = l * old + tile.sum(weights, axis=1)
        acc = acc * old[:, None] + weights @ tile.load(v[b, h, start : start + BN, :], edge="clip")
        m = high
    tile.store(out[b, h, first : first + BM, :], acc / l[:, None], edge="clip")


def normalise(x: Any, scale: Any) -> Any:
    """The norm of each position, by the kernel."""
    rows = x.reshape(-1, WIDTH)
    return ts.launch(rms_norm, lambda c: (-(-rows.shape[0] // c["BM"]),), rows, scale, ts.like(rows)).reshape(x.shape)


def mix(x: Any, w: Any) -> Any:
    """Attention between positions, by the kernel."""
    split = lambda t: t.reshape(BATCH, LENGTH, HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)  # noqa: E731
    q, k, v = (split(x @ w[name]) for name in ("q", "k", "v"))
    grid = lambda c: (BATCH, HEADS, -(-LENGTH // c["BM"]))  # noqa: E731
    found = ts.launch(attend, grid, q, k, v, ts.like(q), scale=(WIDTH // HEADS) ** -0.5)
    return found.permute(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH) @ w["o"]


def predict(w: dict[str, Any], tokens: Any) -> Any:
    """The logits of each position: one block between an embedding and a projection."""
    x = ts.embedding(w["embed"], tokens) + w["places"]
    x = x + mix(normalise(x, w["norm1"]), w)
    x = x + ts.gelu(normalise(x, w["norm2"]) @ w["up"]) @ w["down"]
    return x @ w["out"]


def loss(w: dict[str, Any], tokens: Any) -> Any:
    """Cross entropy of predicting the sequence's first token at every position."""
    logits = predict(w, tokens).reshape(-1, TOKENS)
    wanted = ts.broadcast_to(tokens[:, :1], shape=(BATCH, LENGTH)).reshape(-1)
    return ts.cross_entropy(logits, wanted)


def make_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights of the block."""
    generator = np.random.default_rng(seed)
    shapes = {
        "embed": (TOKENS, WIDTH), "places": (LENGTH, WIDTH), "up": (WIDTH, 64), "down": (64, WIDTH),
        "out": (WIDTH, TOKENS), **{name: (WIDTH, WIDTH) for name in "qkvo"},
    }  # fmt: skip
    made = {n: generator.standard_normal(s).astype("f4") * s[0] ** -0.5 for n, s in shapes.items()}
    return {**made, "norm1": np.ones(WIDTH, "f4"), "norm2": np.ones(WIDTH, "f4")}


def train(target: str, steps: int, rate: float = 0.3) -> list[float]:
    """The losses of gradient descent, one for each step; the whole step is one compiled program."""

    @ts.jit(target=target)
    def step(w: dict[str, Any], tokens: Any) -> Any:
        value, gradient = ts.value_and_grad(loss)(w, tokens)
        return value, {name: w[name] - rate * gradient[name] for name in w}

    weights: Any = make_weights()
    generator, losses = np.random.default_rng(1), []
    for _ in range(steps):
        value, weights = step(weights, generator.integers(0, TOKENS, (BATCH, LENGTH)))
        losses.append(float(value))
    return losses


def main() -> None:
    """Train and print the loss every few steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    for number, value in enumerate(train(options.target, options.steps)):
        if number % 20 == 0 or number == options.steps - 1:
            print(f"step {number:4d}  loss {value:.4f}")


if __name__ == "__main__":
    main()
