"""What the tests of serving share: small models, clients without sockets, and servers on loopback."""

import asyncio
import contextlib
import threading

import httpx
import numpy as np
import tokenizers

import tessera as ts
from tessera.llm import Completion, DecoderConfig, GenerationScheduler, LanguageModel, Tokenizer, draw_weights
from tessera.llm.sampling import GREEDY
from tessera.serving.options import ServerOptions
from tessera.serving.server import _make_server

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
CONFIG = DecoderConfig(
    vocabulary=96, width=32, layers=1, heads=4, kv_heads=2, head_size=8, hidden=48, context=128, end_tokens=(95,)
)  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"


@ts.jit
def score(x: ts.Tensor["B", 4], w):
    """A softmax of scores, and the sums of rows."""
    return ts.softmax(x @ w), ts.sum(x, axis=1)


def want_scores(x):
    """What NumPy says that `score` gives."""
    e = np.exp(x @ WEIGHT - (x @ WEIGHT).max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True), x.sum(axis=1)


def build_scores(folder, dynamic=True, rows=2):
    """The artifact of `score`."""
    return ts.build(score, np.ones((rows, 4), np.float32), WEIGHT, out=folder, weights=["w"], dynamic=dynamic or None)


def make_language_model():
    """A decoder of characters with random weights."""
    model = tokenizers.models.BPE(vocab={chr(32 + i): i for i in range(95)} | {"<end>": 95}, merges=[])
    inner = tokenizers.Tokenizer(model)
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens([tokenizers.AddedToken("<end>", normalized=False, special=True)])
    weights = draw_weights(CONFIG, seed=3, scale=0.5)
    return LanguageModel(CONFIG, weights, Tokenizer(inner, TEMPLATE), target="interp", page_size=16)


def complete_alone(model, prompt, count, sampling=GREEDY, stop=None):
    """The completion of a prompt alone, by the programs that a server of four slots compiles, too."""
    scheduler = GenerationScheduler(model, slots=4, longest=128)
    found = scheduler.submit(model.tokenizer.encode(prompt), count, sampling)
    scheduler.run()
    tokens = [t for t in found.tokens if t not in model.config.end_tokens]
    for n in range(1, len(tokens) + 1):
        text = model.tokenizer.decode(tokens[:n])
        if stop and stop in text:
            return Completion(tokens[:n], text[: text.index(stop)], "stop")
    return Completion(tokens, model.tokenizer.decode(tokens), found.reason)


def call(app, *requests, headers=None):
    """The responses to requests (method, path, arguments of httpx), sent together and without a socket."""

    async def send():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            return await asyncio.gather(*(client.request(m, path, **named) for m, path, named in requests))

    return asyncio.run(send())


def get(app, path, **named):
    """The response to a GET."""
    return call(app, ("GET", path, named))[0]


def post(app, path, **named):
    """The response to a POST."""
    return call(app, ("POST", path, named))[0]


@contextlib.contextmanager
def serve(app, options=None):
    """The port on loopback of a server in a thread, which drains at the end."""
    server = _make_server(app, options or ServerOptions(drain_timeout=5))
    server.config.port = 0
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
