"""Training and tensor-parallel products on the GPUs of one host, beside PyTorch's DDP, FSDP2 and asynchronous products.

    python -m benchmarks.dist --engine nccl -n 2 --out results step products

The model is a GPT of 350 million parameters (24 layers of width 1024) with batches of 8 x 1024 tokens on each GPU.
Every program computes in bf16; the optimizer holds f32 weights. Ours exchanges gradients in bf16, as `ddp, bf16` and
`fsdp2` do; `ddp` exchanges f32. `alone` is the step of one GPU without exchange, run by all GPUs at a time. Rounds
of all programs follow each other.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import tessera as ts
from benchmarks.training_steps import GptSizes, make_gpt
from tessera import nn, optim

SIZES = GptSizes(50304, 1024, 16, 24, 1024)
SMALL = GptSizes(256, 64, 4, 2, 32)
BATCH, STEPS, ROUNDS = 8, 6, 6
PEERS = ("alone", "ddp", "ddp, bf16", "fsdp2")
Run = Callable[[], Any]


def draw_batch(sizes: GptSizes, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a rank, and those that follow them."""
    rng = np.random.default_rng(rank)
    return rng.integers(0, sizes.vocabulary, (BATCH, sizes.length)), rng.integers(
        0, sizes.vocabulary, BATCH * sizes.length
    )


def make_own_model(sizes: GptSizes) -> Any:
    """The model of ours, the same on all ranks."""
    ts.manual_seed(0)
    model = make_gpt(nn, ts.scaled_dot_product_attention, partial(ts.gelu, approximate="tanh"), ts.arange, sizes)
    for table in (model.tokens, model.places):
        table.weight = nn.Parameter(0.02 * table.weight.numpy())
    return model


def make_own_step(model: Any, sizes: GptSizes, target: str, exchange: bool) -> Callable[[], float]:
    """A step of ours, as one rank: parameters and state are donated, and stay on the GPU."""
    optimizer = optim.AdamW(lr=1e-4, master_weights=True)

    def loss(model: Any, x: Any, y: Any) -> Any:
        logits = model(x)
        return ts.cross_entropy(logits.reshape(-1, logits.shape[-1]), y)

    @ts.jit(target=target, donate=("model", "state"))
    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        value, grads = ts.value_and_grad(loss)(model, x, y)
        if exchange:
            value, grads = ts.all_reduce(value, "mean"), ts.dist.reduce_gradients(grads)
        return value, *optimizer.update(model, grads, state)

    held = [model.to(ts.bf16), optimizer.init(model)]
    batch = [ts.tensor(a.astype(np.int32)).to(target) for a in draw_batch(sizes, ts.get_rank())]

    def run() -> float:
        model, state = held.pop(0), held.pop(0)
        value, *held[:] = step(model, state, *batch)
        return float(value.item())

    return run


def make_peer(kind: str, state: dict[str, np.ndarray], sizes: GptSizes, rank: int) -> Callable[[], float]:
    """A step of PyTorch: compiled, with the fused AdamW; `kind` is one of `PEERS`."""
    import torch
    import torch.nn.functional as f
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    arange = partial(torch.arange, device="cuda")
    model = make_gpt(torch.nn, f.scaled_dot_product_attention, partial(f.gelu, approximate="tanh"), arange, sizes)
    model.load_state_dict({n: torch.tensor(a) for n, a in state.items()})
    model = model.cuda()
    if kind.startswith("ddp"):
        model = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True, static_graph=True)
    if kind == "ddp, bf16":
        model.register_comm_hook(None, bf16_compress_hook)
    if kind == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = (torch.tensor(a, device="cuda") for a in draw_batch(sizes, rank))

    def compute_loss() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=kind != "fsdp2"):
            logits = model(x)
            return f.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), y)

    compiled = torch.compile(compute_loss, dynamic=False)

    def step() -> float:
        loss = compiled()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.item())

    return step


def time_round(run: Run, calls: int, wait: Run) -> float:
    """Seconds of one call, the slowest rank's start included."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait()
    return (time.perf_counter() - start) / calls


def compare(runs: dict[str, Run], calls: int, world: Any, wait: Run, log: Any) -> dict[str, Any]:
    """Milliseconds of each program: of the slowest rank, the best and the median of rounds that follow each other."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(1e3 * time_round(run, calls, wait))
    by_rank = world.gather_objects(list(times.values()))
    slowest = [[max(t) for t in zip(*rows, strict=True)] for rows in zip(*by_rank, strict=True)]
    found = {n: {"best": min(t), "median": statistics.median(t)} for n, t in zip(runs, slowest, strict=True)}
    log(", ".join(f"{n} {t['best']:.3f} ({t['median']:.3f}) ms" for n, t in found.items()))
    return found


def measure_steps(world: Any, log: Any, wait: Run, tiny: bool = False) -> dict[str, Any]:
    """Steps of one GPU and of all, ours and PyTorch's."""
    sizes, rank = SMALL if tiny else SIZES, ts.get_rank()
    state = {n: t.numpy() for n, t in make_own_model(sizes).state_dict().items()}
    makers: dict[str, Callable[[], Run]] = {
        "alone": lambda: make_own_step(make_own_model(sizes), sizes, "ptx", False),
        "data parallel": lambda: make_own_step(make_own_model(sizes), sizes, "ptx", True),
        **{f"torch {kind}": partial(make_peer, kind, state, sizes, rank) for kind in PEERS},
    }
    runs: dict[str, Run] = {}
    found: dict[str, Any] = {"losses": {}}
    for name, make in makers.items():
        start = time.monotonic()
        try:
            run = make()
            losses = [run() for _ in range(8)]
        except Exception as error:
            log(name, type(error).__name__, str(error)[:600])
            found[name] = {"error": str(error)[-2000:]}
            continue
        runs[name], found["losses"][name] = run, losses
        log(f"{name}: prepared in {time.monotonic() - start:.1f} s, losses {[round(v, 4) for v in losses]}")
    found["milliseconds"] = times = compare(runs, STEPS, world, wait, log)
    best = {n: t["best"] for n, t in times.items()}
    try:
        found |= predict_step(sizes, world, best)
    except ts.errors.DeviceUnavailable as error:  # simpy is missing
        found["prediction"] = {"error": str(error)}
    if "data parallel" in best:
        found["speedup over one GPU"] = world.size * best["alone"] / best["data parallel"]
        found |= {f"ratio to {n}": best[n] / best["data parallel"] for n in best if n.startswith("torch ")}
    log({k: round(v, 3) for k, v in found.items() if isinstance(v, float)}, found["prediction"])
    return found


def predict_step(sizes: GptSizes, world: Any, best: dict[str, float]) -> dict[str, Any]:
    """The predicted milliseconds of our steps, from measured peaks: a copy, a product, an all_reduce."""
    from tessera.dist import Compute, Link, simulate

    n, x, small, large = 8192, *(ts.ones((k,)).to("ptx") for k in (1 << 28, 256, 1 << 25))
    a = ts.tensor(np.random.default_rng(0).standard_normal((n, n)).astype("f4")).to(ts.bf16).to("ptx")
    copy, product = ts.jit(lambda x: x + 1.0, target="ptx"), ts.jit(lambda a: a @ a, target="ptx")

    def best_of(run: Run) -> float:
        import torch

        run()
        times = [time_round(run, 10, torch.cuda.synchronize) for _ in range(4)]
        return min(max(each) for each in zip(*world.gather_objects(times), strict=True))

    latency, moved = (best_of(lambda v=v: ts.all_reduce(v)) for v in (small, large))
    share = 2 * (1 - 1 / world.size)
    link = Link(share * (1 << 27) / (moved - latency), latency / (2 * (world.size - 1)))
    bandwidth, matrix = 2 * (1 << 30) / best_of(lambda: copy(x)), 2 * n**3 / best_of(lambda: product(a))
    compute = Compute(matrix=matrix, flops=60e12, bandwidth=bandwidth, launch=1.5e-6)
    model = make_own_model(sizes)
    optimizer = optim.AdamW(lr=1e-4, master_weights=True)

    def step(exchange: bool, model: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(model: Any) -> Any:
            logits = model(x)
            return ts.cross_entropy(logits.reshape(-1, logits.shape[-1]), y)

        value, grads = ts.value_and_grad(loss)(model)
        grads = ts.dist.reduce_gradients(grads) if exchange else grads
        return value, *optimizer.update(model, grads, state)

    state = optimizer.init(model)
    given = (
        model.to(ts.bf16),
        state,
        ts.Tensor[BATCH, sizes.length, ts.int32],
        ts.Tensor[BATCH * sizes.length, ts.int32],
    )
    mesh, found = ts.Mesh(world.size, "ranks"), {"matrix": matrix, "bandwidth": bandwidth, "link": link.bandwidth}
    for name, exchange in (("alone", False), ("data parallel", True)):
        predicted = simulate(
            partial(step, exchange), mesh, *given, links={"ranks": link}, compute=compute, overlap=True
        )
        found[name] = 1e3 * predicted.seconds
        if name in best:
            found[f"{name}, error"] = 1e3 * predicted.seconds / best[name] - 1
    return {"prediction": found}


SHAPES = ((8192, 8192, 4096), (8192, 14336, 4096), (16384, 28672, 8192))  # M, K of all ranks, N


def measure_products(world: Any, log: Any, wait: Run, asynchronous: bool = False) -> dict[str, Any]:
    """Products with rows of the weight on each rank, whose sum is scattered: ours in parts, PyTorch's as two calls.

    `asynchronous` compares with PyTorch's asynchronous op, too, and leaves out the parts that are not the default.
    """
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {}
    for m, k, n in SHAPES:
        rng = np.random.default_rng(ts.get_rank())
        part = k // world.size
        arrays = [rng.standard_normal(s).astype("f4") / 64 for s in ((m, part), (part, n))]
        x, w = (ts.tensor(a).to(ts.bf16).to("ptx") for a in arrays)
        tx, tw = (torch.tensor(a, device="cuda").bfloat16() for a in arrays)
        out = torch.empty(m // world.size, n, device="cuda", dtype=torch.bfloat16)

        def plain(tx: Any = tx, tw: Any = tw, out: Any = out) -> Any:
            dist.reduce_scatter_tensor(out, tx @ tw)
            return out

        runs: dict[str, Run] = {"torch": plain, "torch product alone": lambda tx=tx, tw=tw: tx @ tw}
        if asynchronous:
            runs["torch asynchronous"] = make_asynchronous(tx, tw)
        for parts in (None,) if asynchronous else (None, "ranks", 1, 2, 4, 8):
            program = ts.jit(partial(_multiply, parts=parts), target="ptx")
            runs[f"parts {parts}"] = lambda program=program, x=x, w=w: program(x, w)
        for run in runs.values():
            for _ in range(3):
                run()
        wanted = plain().float().cpu().numpy()
        far = {name: _find_difference(run(), wanted) for name, run in runs.items() if name != "torch product alone"}
        row = compare(runs, 20, world, wait, partial(log, m, k, n))
        log("greatest difference from torch:", {name: round(each, 5) for name, each in far.items()})
        found[f"{m}x{k}x{n}"] = {"milliseconds": row, "difference": far}
    members = tuple(range(world.size))
    found["copy engines"] = (
        "serve all ranks" if world.copies.serve(members) else world.copies.reasons.get(members, "one rank")
    )
    log("copy engines:", found["copy engines"])
    return found


def make_asynchronous(x: Any, w: Any) -> Run:
    """PyTorch's product with a scattered sum, whose parts copy engines exchange."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name
    if enable := getattr(symmetric, "enable_symm_mem_for_group", None):  # newer versions need no such call
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group)
    return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", 0, group)


def _find_difference(found: Any, wanted: np.ndarray) -> float:
    array = found.numpy().astype("f4") if isinstance(found, ts.Tensor) else found.float().cpu().numpy()
    return float(np.abs(array - wanted).max())


def _multiply(x: Any, w: Any, parts: int | str | None) -> Any:
    return ts.dist.row_parallel(x, w, scatter=True, parts=parts)


LIMITS = (2, 4, 8, 16, 0)  # blocks of NCCL; 0: as many as it takes


def measure_blocks(world: Any, log: Any, wait: Run) -> dict[str, Any]:
    """Bus bandwidth of an all_reduce of 64 MiB by communicators of so many blocks."""
    from tessera.dist import nccl

    x = ts.ones((1 << 24,)).to("ptx").data
    out = world.memory.empty(x.shape, x.dtype, 0)
    found = {}
    for blocks in LIMITS:
        name = f"{nccl.BESIDE} {blocks}"
        before, nccl.COMMUNICATION_BLOCKS = nccl.COMMUNICATION_BLOCKS, blocks
        world._join, join = partial(_join_with, world, blocks), world._join
        try:
            members = tuple(range(world.size))
            run = lambda name=name, members=members: world.run("all_reduce", x, out, members, {"kind": "sum"}, 0, name)  # noqa: E731
            run()
            seconds = min(time_round(run, 20, wait) for _ in range(4))
            found[str(blocks)] = 2 * (1 - 1 / world.size) * x.nbytes / seconds / 1e9
        finally:
            nccl.COMMUNICATION_BLOCKS, world._join = before, join
    log({k: round(v, 1) for k, v in found.items()}, "GB/s")
    return found


def _join_with(world: Any, blocks: int, count: int, id: Any, number: int, name: str) -> Any:
    config = world.library.Config()
    if blocks:
        config.max_ctas = blocks
    return world.library.comm_init_rank_config(count, id, number, config.ptr)
