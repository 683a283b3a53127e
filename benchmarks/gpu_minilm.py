"""MiniLM, batch 256 x 128 tokens in bf16, against PyTorch with torch.compile on the same GPU.

Its weights are random ones of the model's shapes: neither side's time depends on them. The share of each kernel in
the time is kept with the figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.gpu import compiled, in_pairs, result
from benchmarks.minilm import FLOPS_PER_TOKEN
from examples.minilm import model
from examples.minilm.weights import Config
from tessera.codegen.ptx.runtime.event_timing import measure_kernel_times
from tessera.core.pytree import flatten
from tessera.core.types import bf16

BATCH, LENGTH = 256, 128
SIZES = Config()


def measure() -> list[dict[str, Any]]:
    """Both in turn, and where the time goes."""
    ids = torch.randint(1000, SIZES.vocabulary, (BATCH, LENGTH), device="cuda", dtype=torch.int32)
    mask = torch.ones_like(ids)
    mask[:, LENGTH - LENGTH // 8 :] = 0
    weights = random_weights()
    tensors = [x for _, x in flatten((weights, ids, mask))[0]]
    tensors.append(torch.full((BATCH, SIZES.hidden), float("nan"), device="cuda"))
    program = compiled(model.encode, [_like(weights), *_like([ids, mask])])
    given = [t.data_ptr() for t in tensors]
    ours = program.bind(given)
    ours()
    norms = torch.linalg.vector_norm(tensors[-1], dim=1)
    assert torch.allclose(norms, torch.ones_like(norms), atol=1e-4), "embeddings are not of unit length"
    peers = dict(_peers(ids, mask))
    times = in_pairs(ours, peers, 5, 5)
    operations = FLOPS_PER_TOKEN * BATCH * LENGTH
    shares: Counter[str] = Counter()
    for name, milliseconds in measure_kernel_times(program, given):
        shares[name] += milliseconds  # type: ignore[assignment]
    for name, milliseconds in shares.most_common():
        print(f"    {name:28s} {milliseconds:8.4f} ms")
    found = result(f"MiniLM {BATCH} x {LENGTH} bf16", times, operations=operations)
    return [{**found, "kernels": dict(shares.most_common())}]


def random_weights() -> dict[str, Any]:
    """Weights as the model takes them, each linear layer's [in, out]."""
    hidden, inner = SIZES.hidden, SIZES.intermediate

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * shape[0] ** -0.5

    def norm() -> dict[str, torch.Tensor]:
        return {"weight": 1 + random(hidden), "bias": random(hidden)}

    def linear(rows: int, columns: int) -> dict[str, torch.Tensor]:
        return {"weight": random(rows, columns), "bias": random(columns)}

    def layer() -> dict[str, Any]:
        square = {name: linear(hidden, hidden) for name in ("query", "key", "value", "output")}
        wide = {"up": linear(hidden, inner), "down": linear(inner, hidden)}
        return {**square, **wide, "norm1": norm(), "norm2": norm()}

    rows = {"word": SIZES.vocabulary, "position": SIZES.positions, "type": 2}
    tables = {name: random(count, hidden) for name, count in rows.items()}
    return {"embeddings": {**tables, "norm": norm()}, "layers": [layer() for _ in range(SIZES.layers)]}


def _like(tree: Any) -> Any:
    """Arrays of the same shapes and types that take no memory."""
    if isinstance(tree, dict):
        return {name: _like(each) for name, each in tree.items()}
    if isinstance(tree, list):
        return [_like(each) for each in tree]
    element = bf16.numpy if tree.dtype == torch.bfloat16 else np.int32
    return np.lib.stride_tricks.as_strided(np.zeros(1, element), tuple(tree.shape), (0,) * tree.ndim)


def _peers(ids: torch.Tensor, mask: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The same encoder by transformers: as torch.compile leaves it, and with its kernels in a CUDA graph."""
    sizes = transformers.BertConfig(
        vocab_size=SIZES.vocabulary, hidden_size=SIZES.hidden, num_hidden_layers=SIZES.layers,
        num_attention_heads=SIZES.heads, intermediate_size=SIZES.intermediate,
    )  # fmt: skip
    bert = transformers.BertModel(sizes, add_pooling_layer=False).eval().to("cuda", torch.bfloat16)

    def embed() -> torch.Tensor:
        hidden = bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean.float(), dim=1)

    for name, options in {"torch.compile": {}, "torch.compile, graph": {"mode": "reduce-overhead"}}.items():
        yield name, _inferring(torch.compile(embed, dynamic=False, **options))


def _inferring(run: Callable[[], Any]) -> Callable[[], Any]:
    def inferred() -> None:
        with torch.inference_mode():
            run()

    return inferred
