"""A small GPT whose loss curve is the same on one device and under each kind of parallelism.

    python -m examples.dist.gpt                                          # all ranks simulated in this process
    tessera launch -n 4 examples/dist/gpt.py dp tp_dp pp zero3 ring      # four processes of MPI

Each strategy starts from the same parameters and batches, and prints the loss of every step (`steps=20`: of 20).
"""

import functools
import sys
from dataclasses import dataclass

import numpy as np

import tessera as ts
from tessera.dist import P


@dataclass(frozen=True)
class Config:
    """The sizes of the model."""

    vocabulary: int = 32
    width: int = 16
    heads: int = 4
    hidden: int = 32
    blocks: int = 4
    length: int = 8
    experts: int = 0
    target: str | None = None  # what computes the loss and its gradients: "llvm", "ptx" (a GPU), or the interpreter

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.width // self.heads


def init(config: Config, seed: int = 0):
    """The parameters: a dict of the embeddings, the blocks and the head."""
    rng = np.random.default_rng(seed)

    def weight(*shape):
        return ts.Tensor((rng.standard_normal(shape) / np.sqrt(shape[-2])).astype("f4"))

    def block():
        d, f, e = config.width, config.hidden, config.experts
        names = {name: weight(d, d) for name in ("wq", "wk", "wv", "wo")}
        norms = {"norm1": ts.ones((d,)), "norm2": ts.ones((d,))}
        if e:
            return {**names, **norms, "gate": weight(d, e), "w1": weight(e, d, f), "w2": weight(e, f, d)}
        return {**names, **norms, "w1": weight(d, f), "w2": weight(f, d)}

    embeddings = {"tokens": weight(config.vocabulary, config.width), "places": weight(config.length, config.width)}
    blocks = [block() for _ in range(config.blocks)]
    return {**embeddings, "blocks": blocks, "head": weight(config.width, config.vocabulary)}


def make_batch(config: Config, step: int, size: int = 8):
    """Sequences that count upwards from random places: something to learn."""
    start = np.random.default_rng(1000 + step).integers(0, config.vocabulary, (size, 1))
    tokens = (start + np.arange(config.length + 1) * 3) % config.vocabulary
    return ts.Tensor(tokens[:, :-1]), ts.Tensor(tokens[:, 1:])


# The model, from parts of its weights where an axis is given.


def attend(q, k, v):
    """Causal attention of one device."""
    return ts.scaled_dot_product_attention(q, k, v, causal=True)


def normalise(x, scale):
    return x * ts.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * scale


def mix(p, x, config, attention, tp):
    """The attention of a block; with `tp` this rank has some of the heads."""
    h = normalise(x, p["norm1"])
    batch, length = x.shape[:2]

    def heads(w):
        y = (h @ w).reshape((batch, length, -1, config.head_size))
        return ts.permute(y, axes=(0, 2, 1, 3))

    y = attention(heads(p["wq"]), heads(p["wk"]), heads(p["wv"]))
    y = ts.permute(y, axes=(0, 2, 1, 3)).reshape((batch, length, -1))
    return x + (ts.dist.row_parallel(y, p["wo"], axis=tp) if tp else y @ p["wo"])


def feed(p, x, config, tp, ep):
    """The perceptron of a block, or its experts on the ranks of `ep`."""
    h = normalise(x, p["norm2"])
    if ep:
        flat = h.reshape((-1, config.width))
        gates = ts.softmax(flat @ p["gate"], axis=-1)

        def experts(tokens):
            return ts.gelu(tokens @ p["w1"]) @ p["w2"]

        y = ts.dist.expert_parallel(flat, gates, experts, int(flat.shape[0]), axis=ep)
        return x + y.reshape(x.shape)
    y = ts.gelu(ts.dist.column_parallel(h, p["w1"]))
    return x + (ts.dist.row_parallel(y, p["w2"], axis=tp) if tp else y @ p["w2"])


def embed(params, tokens, first=0):
    """Embeddings of tokens whose first one has the position `first`."""
    return ts.embedding(params["tokens"], tokens) + params["places"][first : first + int(tokens.shape[1])]


def run_blocks(blocks, x, config, attention=attend, tp=None, ep=None):
    for p in blocks:
        x = feed(p, mix(p, x, config, attention, tp), config, tp, ep)
    return x


def score(head, x, targets):
    """The mean cross entropy of all tokens."""
    logits = x @ head
    return ts.cross_entropy(logits.reshape((-1, int(logits.shape[-1]))), targets.reshape((-1,)))


# The strategies: each gives the losses of some steps.


def differentiate(loss, config):
    """The function that gives the loss and its gradients, compiled for the target of the model."""
    run = ts.value_and_grad(loss)
    return ts.jit(run, target=config.target) if config.target else run


def place(tree, config):
    """A tree of tensors where the target of the model computes."""
    return ts.tree.map(lambda x: x.to("ptx"), tree) if config.target == "ptx" else tree


def make_optimizer():
    return ts.optim.SGD(0.02, momentum=0.9)  # unlike Adam, it shows gradients of another scale


def train_ranks(config, steps, mesh, specs, loss, inputs):
    """Steps in the ranks of a mesh: `loss` gives the same mean loss on all of them."""

    def cut(value, spec):
        if isinstance(value, dict):
            return {k: cut(v, spec[k] if isinstance(spec, dict) else spec) for k, v in value.items()}
        if isinstance(value, list):
            return [
                cut(v, s) for v, s in zip(value, spec if isinstance(spec, list) else [spec] * len(value), strict=True)
            ]
        return value if spec is None else ts.shard(value, mesh, spec)

    @ts.spmd(mesh=mesh)
    def program():
        params = place(cut(init(config), specs), config)
        optimizer, losses = make_optimizer(), []
        state, run = place(optimizer.init(params), config), differentiate(loss, config)
        for step in range(steps):
            value, grads = run(params, *[cut(x, inputs) for x in make_batch(config, step)])
            params, state = optimizer.update(params, ts.dist.reduce_gradients(grads, specs, mesh), state)
            losses.append(value)
        return losses

    return [float(x) for x in program()]


def one(config, steps, engine=None, ranks=1):
    """One device (with experts: the same layer on a mesh of one)."""
    mesh = ts.Mesh(1, "all", engine="simulated")
    ep = "all" if config.experts else None

    def loss(params, tokens, targets):
        return score(params["head"], run_blocks(params["blocks"], embed(params, tokens), config, ep=ep), targets)

    return train_ranks(config, steps, mesh, None, loss, None)


def dp(config, steps, engine=None, ranks=4):
    """Data parallel: a part of the batch on each rank."""
    mesh = ts.Mesh(ranks, "dp", engine=engine)

    def loss(params, tokens, targets):
        x = run_blocks(params["blocks"], embed(params, tokens), config)
        return ts.all_reduce(score(params["head"], x, targets), "mean")

    return train_ranks(config, steps, mesh, None, loss, P("dp"))


def tp_dp(config, steps, engine=None, ranks=4):
    """Tensor parallel in pairs of ranks, data parallel over the pairs."""
    mesh = ts.Mesh((ranks // 2, 2), ("dp", "tp"), engine=engine)
    column, row = P(None, "tp"), P("tp")
    block = {"wq": column, "wk": column, "wv": column, "wo": row, "w1": column, "w2": row, "norm1": None, "norm2": None}
    specs = {"tokens": None, "places": None, "blocks": [block] * config.blocks, "head": None}

    def loss(params, tokens, targets):
        x = run_blocks(params["blocks"], embed(params, tokens), config, tp="tp")
        return ts.all_reduce(score(params["head"], x, targets), "mean", axis="dp")

    return train_ranks(config, steps, mesh, specs, loss, P("dp"))


def ep(config, steps, engine=None, ranks=4):
    """Expert parallel: experts and a part of the batch on each rank."""
    mesh = ts.Mesh(ranks, "ep", engine=engine)
    block = {**dict.fromkeys(("wq", "wk", "wv", "wo", "norm1", "norm2", "gate")), "w1": P("ep"), "w2": P("ep")}
    specs = {"tokens": None, "places": None, "blocks": [block] * config.blocks, "head": None}

    def loss(params, tokens, targets):
        x = run_blocks(params["blocks"], embed(params, tokens), config, ep="ep")
        return ts.all_reduce(score(params["head"], x, targets), "mean")

    return train_ranks(config, steps, mesh, specs, loss, P("ep"))


def ring(config, steps, engine=None, ranks=4):
    """Context parallel: a part of every sequence on each rank, and ring attention."""
    mesh = ts.Mesh(ranks, "cp", engine=engine)

    def attention(q, k, v):
        return ts.dist.ring_attention(q, k, v, axis="cp", causal=True)

    def loss(params, tokens, targets):
        first = ts.get_rank() * int(tokens.shape[1])
        x = run_blocks(params["blocks"], embed(params, tokens, first), config, attention)
        return ts.all_reduce(score(params["head"], x, targets), "mean")

    return train_ranks(config, steps, mesh, None, loss, P(None, "cp"))


def pp(config, steps, engine=None, ranks=2, schedule="1f1b", microbatches=4, chunks=1):
    """Pipeline parallel: blocks in order on the ranks, micro-batches through them."""
    mesh = ts.Mesh(ranks, "pp", engine=engine)
    count = ranks * chunks
    each = config.blocks // count

    def make_stage(number):
        def stage(p, x):
            x = embed(p, x) if number == 0 else x
            return run_blocks(p["blocks"], x, config)

        def last(p, x):
            return stage(p, x) @ p["head"]

        return last if number == count - 1 else stage

    def take(params, number):
        part = {"blocks": params["blocks"][number * each : (number + 1) * each]}
        part |= {k: params[k] for k in ("tokens", "places") if number == 0}
        return part | {k: params[k] for k in ("head",) if number == count - 1}

    def loss(logits, targets):
        return ts.cross_entropy(logits.reshape((-1, config.vocabulary)), targets.reshape((-1,)))

    @ts.spmd(mesh=mesh)
    def program():
        pipeline = ts.dist.Pipeline([make_stage(i) for i in range(count)], loss, microbatches, schedule)
        params = [take(init(config), number) for number in pipeline.own_stages()]
        optimizer, losses = make_optimizer(), []
        state = optimizer.init(params)
        for step in range(steps):
            value, grads = pipeline.value_and_grad(params, *make_batch(config, step))
            params, state = optimizer.update(params, grads, state)
            losses.append(value)
        return losses

    return [float(x) for x in program()]


def zero(config, steps, engine=None, ranks=4, stage=3):
    """Data parallel with ZeRO: the optimizer's state, gradients and parameters in parts."""
    mesh = ts.Mesh(ranks, "dp", engine=engine)

    def loss(params, tokens, targets):
        return score(params["head"], run_blocks(params["blocks"], embed(params, tokens), config), targets)

    @ts.spmd(mesh=mesh)
    def program():
        optimizer = ts.dist.ZeroOptimizer(make_optimizer(), stage)
        params, losses = place(init(config), config), []
        params = optimizer.shard(params) if stage == 3 else params
        state = place(optimizer.init(params), config)
        run = differentiate((lambda p, *b: loss(optimizer.gather(p), *b)) if stage == 3 else loss, config)
        for step in range(steps):
            value, grads = run(params, *[ts.shard(x, mesh) for x in make_batch(config, step)])
            params, state = optimizer.update(params, grads, state)
            losses.append(ts.all_reduce(value, "mean"))
        return losses

    return [float(x) for x in program()]


STRATEGIES = {
    "one": one,
    "dp": dp,
    "tp_dp": tp_dp,
    "pp": pp,
    **{f"zero{stage}": lambda *args, stage=stage, **named: zero(*args, stage=stage, **named) for stage in (1, 2, 3)},
    "ep": ep,
    "ring": ring,
}


def make_config(name):
    """Small sizes; the experts of `ep`."""
    return Config(experts=4 if name == "ep" else 0)


def main(names, steps=5):
    """Print the losses of each strategy and their distance from one device."""
    import os

    ranks = next((int(os.environ[v]) for v in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if v in os.environ), 4)
    first = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == 0
    train_alone = functools.cache(one)  # most strategies have the same model
    for name in names:
        config = make_config(name)
        alone = train_alone(config, steps)
        found = STRATEGIES[name](config, steps, ranks=ranks)
        if first:
            far = max(abs(a - b) for a, b in zip(alone, found, strict=True))
            print(f"{name:7}", " ".join(f"{x:.5f}" for x in found), f"  |difference| <= {far:.1e}", flush=True)


if __name__ == "__main__":
    counts = [a.removeprefix("steps=") for a in sys.argv[1:] if a.startswith("steps=")]
    main([a for a in sys.argv[1:] if not a.startswith("steps=")] or list(STRATEGIES), *map(int, counts))
