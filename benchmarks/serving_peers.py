"""Serving beside PyTorch: throughput of MiniLM embeddings and of generation, over HTTP, in paired alternation.

    python -m benchmarks.serving_peers --json benchmarks/results/serving_peers.json

Both servers run at once: `tessera serve`, and the same models in PyTorch behind starlette and uvicorn with the same
batching (`benchmarks/peer_server_torch.py`). Clients ask the one and then the other, for some seconds each and several
times; while one is asked the other is idle. A ratio is that of the two neighbouring measurements: of the answers a
second, and of the processor seconds of the server for each answer, which other programs on the machine disturb less.
Answers are compared: embeddings to 1e-4, texts token by token (weights are random, so that a difference would show).

MiniLM (all-MiniLM-L6-v2, f32): one row of 64 tokens a request, binary tensors. Generation: a Llama of 12 layers of
width 576 in f32 with random weights, prompts of 5 to 60 characters, 32 tokens each, greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.serving import SENTENCES, run_clients, write_small_model

LENGTH = 64
SIZES = {"width": 576, "hidden": 1536, "layers": 12, "heads": 9, "kv_heads": 3}
Ask = Callable[[Any, random.Random], Awaitable[tuple[int, bool, int]]]


def make_models(folder: Path) -> None:
    """The encoder as an artifact of any batch and length, and the language model as safetensors."""
    import tessera as ts
    from examples.minilm import model, text

    ids, mask = text.encode(text.lines("sentences.txt")[:2], LENGTH)
    ts.build(model.encode, model.parameters(), ids, mask, out=folder / "embed", weights=["params"], dynamic=True)
    write_small_model(folder / "text", **SIZES)


@contextlib.contextmanager
def start_servers(folder: Path, threads: int, slots: int) -> Iterator[dict[str, tuple[int, int]]]:
    """The port and the process of both servers."""
    environment = {**os.environ, "TESSERA_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    ours = [sys.executable, "-m", "tessera.tools.cli", "serve", f"embed={folder / 'embed'}", f"text={folder / 'text'}",
            "--port", "0", "--max-batch", "32", "--slots", str(slots), "--longest", "128", "--max-queue",
            "1024"]  # fmt: skip
    theirs = [sys.executable, "-m", "benchmarks.peer_server_torch", "--models", str(folder), "--threads", str(threads)]
    first = subprocess.Popen(ours, stderr=subprocess.PIPE, text=True, env=environment)
    second = subprocess.Popen(theirs, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = first.stderr.readline()  # type: ignore[union-attr]
        while line and '"message": "serving"' not in line:
            line = first.stderr.readline()  # type: ignore[union-attr]
        port = second.stdout.readline()  # type: ignore[union-attr]
        if not line or not port:
            raise SystemExit("a server did not start")
        yield {"tessera": (json.loads(line)["port"], first.pid), "torch": (int(port), second.pid)}
    finally:
        for each in (first, second):
            each.terminate()
            each.wait(60)


def ask_embeddings(want: list[Any], rows: list[tuple[np.ndarray, np.ndarray]]) -> Ask:
    """Requests for the embedding of one sentence; the first answer for each sentence is kept in `want`."""

    async def ask(session: Any, rng: random.Random) -> tuple[int, bool, int]:
        i = rng.randrange(len(rows))
        size = {"binary_data_size": 4 * LENGTH}
        tensors = [{"name": n, "shape": [1, LENGTH], "datatype": "INT32", "parameters": size} for n in ("ids", "mask")]
        head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
        answer = await session.post("/v2/models/embed/infer", content=head + b"".join(a.tobytes() for a in rows[i]),
                                    headers={"Inference-Header-Content-Length": str(len(head))})  # fmt: skip
        if answer.status_code != 200:
            return answer.status_code, False, 0
        start = int(answer.headers["inference-header-content-length"])
        found = np.frombuffer(answer.content[start:], np.float32)
        if want[i] is None:
            want[i] = found
        return 200, bool(np.allclose(found, want[i], atol=1e-4)), 0

    return ask


def ask_texts(want: dict[str, str], most: int) -> Ask:
    """Greedy completions; the first answer for each prompt is kept in `want`."""

    async def ask(session: Any, rng: random.Random) -> tuple[int, bool, int]:
        prompt = rng.choice(SENTENCES)
        body = {"model": "text", "prompt": prompt, "max_tokens": most, "temperature": 0}
        answer = await session.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return answer.status_code, False, 0
        found = answer.json()
        text = found["choices"][0]["text"]
        return 200, want.setdefault(prompt, text) == text, found["usage"]["completion_tokens"]

    return ask


def read_processor_seconds(pid: int) -> float:
    """The processor seconds of a process so far, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(servers: dict[str, tuple[int, int]], ask: Ask, clients: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Ask both servers in alternation, and describe each and their ratio."""
    held: dict[str, list[Any]] = {name: [] for name in servers}
    spent: dict[str, list[float]] = {name: [] for name in servers}
    for port, pid in servers.values():  # warm
        asyncio.run(run_clients(clients, min(seconds, 5), ask, port, pid, 0))
    for number in range(rounds):
        for name in sorted(servers, reverse=bool(number % 2)):
            port, pid = servers[name]
            before = read_processor_seconds(pid)
            held[name].append(asyncio.run(run_clients(clients, seconds, ask, port, pid, 0)))
            spent[name].append((read_processor_seconds(pid) - before) / max(len(held[name][-1].seconds), 1))
    rates = {n: [len(r.seconds) / r.elapsed for r in found] for n, found in held.items()}
    ratios = [a / b for a, b in zip(rates["tessera"], rates["torch"], strict=True)]
    costs = [b / a for a, b in zip(spent["tessera"], spent["torch"], strict=True)]
    report: dict[str, Any] = {
        "ratio": round(statistics.median(ratios), 3), "ratios": [round(r, 3) for r in ratios],
        "processor_ratio": round(statistics.median(costs), 3), "processor_ratios": [round(r, 3) for r in costs],
    }  # fmt: skip
    for name, found in held.items():
        times = np.concatenate([r.seconds for r in found])
        report[name] = {
            "per_second": [round(r, 2) for r in rates[name]],
            "processor_ms": [round(1e3 * s, 2) for s in spent[name]], "wrong": sum(r.wrong for r in found),
            "statuses": sorted({s for r in found for s in r.statuses}), "answers": len(times),
            "p50_ms": round(1e3 * float(np.percentile(times, 50)), 1),
            "p99_ms": round(1e3 * float(np.percentile(times, 99)), 1),
        }  # fmt: skip
    return report


def main() -> int:
    """Run the comparison and print the figures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--clients", type=int, default=32)
    options.add_argument("--seconds", type=float, default=15)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--tokens", type=int, default=32)
    options.add_argument("--slots", type=int, default=16)
    options.add_argument("--only", choices=("embedding", "generation"))
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    from examples.minilm import text

    sentences = text.lines("sentences.txt")
    rows = [text.encode([s], LENGTH) for s in sentences]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(folder)
        with start_servers(folder, chosen.threads, chosen.slots) as servers:
            asks = {"embedding": ask_embeddings([None] * len(rows), rows), "generation": ask_texts({}, chosen.tokens)}
            found = {n: compare(servers, ask, chosen.clients, chosen.seconds, chosen.rounds)
                     for n, ask in asks.items() if chosen.only in (None, n)}  # fmt: skip
    report = {"machine": describe(), "load_average": list(os.getloadavg()), "clients": chosen.clients,
              "seconds": chosen.seconds, "threads": chosen.threads, **found}  # fmt: skip
    print(json.dumps(report, indent=1, default=str))
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1, default=str) + "\n")
    return int(any(r[s]["wrong"] or r[s]["statuses"] != ["200"] for r in found.values() for s in ("tessera", "torch")))


if __name__ == "__main__":
    sys.exit(main())
