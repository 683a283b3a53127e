"""Language models by PyTorch, the peers of `benchmarks.gpu_llm`: decoders with a static cache, a GPT-2 training step.

Decoding runs eagerly over the part of the cache that is filled, and compiled over the whole cache, the step captured as
one CUDA graph. The functions also run on a processor, at small sizes and without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tessera.core.types import bf16
from tessera.llm.config import DecoderConfig

Run = Callable[[], Any]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def to_torch(weights: Any, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A pytree of arrays as tensors of PyTorch on a device, of bf16 or f32."""
    if isinstance(weights, dict):
        return {n: to_torch(w, device, dtype) for n, w in weights.items()}
    if isinstance(weights, list):
        return [to_torch(w, device, dtype) for w in weights]
    if dtype == torch.float32:
        return torch.from_numpy(np.array(weights, dtype=np.float32)).to(device)
    bits = np.ascontiguousarray(weights, dtype=bf16.numpy).view(np.uint16)
    return torch.from_numpy(bits).to(device).view(torch.bfloat16)


class PeerDecoder:
    """The decoder of a configuration, in bf16 or f32, with a cache [batch, heads, room, head size] for each layer."""

    def __init__(
        self, config: DecoderConfig, weights: Any, device: str, batch: int, room: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.config, self.device, self.batch, self.room = config, device, batch, room
        self.weights = to_torch(weights, device, dtype)
        shape = (batch, config.kv_heads, room, config.head_size)
        make = lambda: torch.zeros(shape, device=device, dtype=dtype)  # noqa: E731
        self.keys, self.values = ([make() for _ in range(config.layers)] for _ in range(2))
        self.tokens = torch.zeros(batch, 1, device=device, dtype=torch.long)
        self.place = torch.zeros(1, device=device, dtype=torch.long)
        powers = torch.arange(0, config.head_size, 2, device=device).float() / config.head_size
        self.frequency = config.rope_base**-powers
        self.columns = torch.arange(room, device=device)

    def normalise(self, x: torch.Tensor, part: dict[str, torch.Tensor]) -> torch.Tensor:
        """Layer norm or RMS norm over the features."""
        shape = (x.shape[-1],)
        if self.config.norm == "layer":
            return F.layer_norm(x, shape, part["weight"], part["bias"], self.config.eps)
        return F.rms_norm(x, shape, part["weight"], self.config.eps)

    def rotate(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Rotary positions of heads [B, n, S, D]; angles [S, D / 2]."""
        c, s = angles.cos(), angles.sin()
        if self.config.rotary == "pairs":
            a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
            return torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2).to(x.dtype)
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

    def feed_forward(self, x: torch.Tensor, layer: dict[str, Any]) -> torch.Tensor:
        """GELU between two products, or SwiGLU."""
        if self.config.feed_forward == "gelu":
            return _multiply(F.gelu(_multiply(x, layer["up"]), approximate="tanh"), layer["down"])
        if "gate_up" in layer:
            gate, up = _multiply(x, layer["gate_up"]).chunk(2, -1)
        else:
            gate, up = _multiply(x, layer["gate"]), _multiply(x, layer["up"])
        return _multiply(F.silu(gate) * up, layer["down"])

    def run(self, tokens: torch.Tensor, places: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The logits [B, V] after the last of tokens [B, S] at `places` [S]."""
        config, w = self.config, self.weights
        counts = (config.heads, config.kv_heads, config.kv_heads)
        x = F.embedding(tokens, w["embedding"])
        x = x + w["positions"][places] if config.rotary is None else x
        angles = places.float()[:, None] * self.frequency
        for i, layer in enumerate(w["layers"]):
            h = self.normalise(x, layer["attention_norm"])
            if "qkv" in layer:
                parts = _multiply(h, layer["qkv"]).split([n * config.head_size for n in counts], -1)
            else:
                parts = [_multiply(h, layer[n]) for n in "qkv"]
            q, k, v = (p.unflatten(-1, (n, -1)).transpose(1, 2) for p, n in zip(parts, counts, strict=True))
            if config.rotary is not None:
                q, k = self.rotate(q, angles), self.rotate(k, angles)
            x = x + _multiply(attend(i, q, k, v).transpose(1, 2).flatten(2), layer["output"])
            x = x + self.feed_forward(self.normalise(x, layer["norm"]), layer)
        return F.linear(self.normalise(x[:, -1], w["norm"]), w.get("head", w["embedding"]))

    def prefill(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits after a prompt [B, S], whose keys and values become the start of the cache."""

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys[i][:, :, : k.shape[2]].copy_(k)
            self.values[i][:, :, : v.shape[2]].copy_(v)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

        return self.run(tokens, torch.arange(tokens.shape[1], device=self.device), attend)

    def step(self, place: int) -> torch.Tensor:
        """The most probable tokens after `self.tokens`, eagerly: attention reads what is filled of the cache."""

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys[i][:, :, place : place + 1].copy_(k)
            self.values[i][:, :, place : place + 1].copy_(v)
            k, v = self.keys[i][:, :, : place + 1], self.values[i][:, :, : place + 1]
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

        self.tokens = self.run(self.tokens, torch.tensor([place], device=self.device), attend).argmax(-1, keepdim=True)
        return self.tokens

    def choose(self) -> torch.Tensor:
        """The most probable tokens after `self.tokens` at `self.place`: attention reads the whole cache, masked."""
        config = self.config
        group = config.heads // config.kv_heads

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys[i].index_copy_(2, self.place, k)
            self.values[i].index_copy_(2, self.place, v)
            q = q.reshape(self.batch, config.kv_heads, group, config.head_size)
            scores = (q @ self.keys[i].transpose(2, 3)).float() * config.head_size**-0.5
            weights = scores.masked_fill(self.columns > self.place, float("-inf")).softmax(-1).to(q.dtype)
            return (weights @ self.values[i]).reshape(self.batch, config.heads, 1, config.head_size)

        return self.run(self.tokens, self.place, attend).argmax(-1, keepdim=True)

    def capture(self) -> Run:
        """The compiled step, on a GPU as one CUDA graph: it takes `self.tokens`, replaces them and advances."""
        choose = torch.compile(self.choose, fullgraph=True, dynamic=False)

        def advance() -> None:
            self.tokens.copy_(choose())
            self.place.add_(1)

        if self.device == "cpu":
            return advance
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.place.zero_()
                advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            advance()
        return graph.replay


def _multiply(x: torch.Tensor, part: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(x, part["weight"], part.get("bias"))


def make_training_step(model: Any, x: np.ndarray, y: np.ndarray, device: str, compiled: bool) -> Callable[[], float]:
    """A step under bf16 autocast with the fused AdamW on weights in f32; it gives the loss."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    given, wanted = torch.tensor(x, device=device), torch.tensor(y, device=device)

    def compute_loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(given)
            return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), wanted)

    run = torch.compile(compute_loss, dynamic=False) if compiled else compute_loss

    def step() -> float:
        loss = run()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step
