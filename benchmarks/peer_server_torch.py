"""A server of PyTorch models for `benchmarks.serving_peers`: starlette under uvicorn, the same protocol and batching.

    python -m benchmarks.peer_server_torch --models FOLDER --threads 2

It serves MiniLM's encoder over the inference protocol with binary tensors, in batches of up to 32 requests that arrive
within 2 ms, and the Llama in FOLDER/text over /v1/completions. Texts are generated in batches of up to 16 prompts,
padded on the left, with a key-value cache; requests of the benchmark all ask for as many tokens, so that no slot of a
batch waits for another. It prints its port.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.peer_minilm_torch import embed, model_folder


class Batcher:
    """Runs requests together: `run` takes a list of items and gives a list of results, in a thread."""

    def __init__(self, run: Callable[[list[Any]], list[Any]], most: int, timeout: float) -> None:
        self.run, self.most, self.timeout = run, most, timeout
        self.queue: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self.worker: asyncio.Task[None] | None = None

    async def __call__(self, item: Any) -> Any:
        """The result of one item."""
        if self.worker is None:
            self.worker = asyncio.create_task(self._work())
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((item, future))
        return await future

    async def _work(self) -> None:
        while True:
            held = [await self.queue.get()]
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self.timeout
            while len(held) < self.most:
                if not self.queue.empty():
                    held.append(self.queue.get_nowait())
                elif (left := deadline - loop.time()) > 0:
                    await asyncio.sleep(min(left, 0.0005))
                else:
                    break
            found = await asyncio.to_thread(self.run, [item for item, _ in held])
            for (_, future), result in zip(held, found, strict=True):
                if not future.done():
                    future.set_result(result)


def make_encoder() -> Callable[[list[Any]], list[Any]]:
    """MiniLM on a list of (ids, mask) rows of one length."""
    model = transformers.BertModel.from_pretrained(
        model_folder(), add_pooling_layer=False, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    def run(rows: list[Any]) -> list[Any]:
        ids, mask = (torch.from_numpy(np.concatenate([r[i] for r in rows])).long() for i in (0, 1))
        with torch.inference_mode():
            return list(embed(model, ids, mask).numpy()[:, None])

    return run


def make_generator(folder: Path) -> Callable[[list[Any]], list[Any]]:
    """Greedy continuations of a list of (prompt, number of tokens)."""
    import safetensors.torch
    import tokenizers

    config = json.loads((folder / "config.json").read_text())
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, "attn_implementation": "sdpa"})).eval()
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("rotary" in name for name in missing), (missing, unexpected)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def run(calls: list[Any]) -> list[Any]:
        prompts = [tokenizer.encode(text).ids for text, _ in calls]
        longest, most = max(map(len, prompts)), max(n for _, n in calls)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        found = generate(model, ids, mask, most)
        texts = [tokenizer.decode(row[:n]) for row, (_, n) in zip(found, calls, strict=True)]
        return [(t, len(p), n) for t, p, (_, n) in zip(texts, prompts, calls, strict=True)]

    return run


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor, most: int) -> list[list[int]]:
    """The most probable tokens: one step for the prompts, then one for each token."""
    cache, places = transformers.DynamicCache(), (mask.cumsum(1) - 1).clamp(min=0)
    given = []
    with torch.inference_mode():
        for _ in range(most):
            logits = model(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache,
                           use_cache=True, logits_to_keep=1).logits[:, -1]  # fmt: skip
            ids = logits.argmax(-1, keepdim=True)
            given.append(ids)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
            places = places[:, -1:] + 1
    return torch.cat(given, 1).tolist()


def make_app(folder: Path) -> Starlette:
    """The application."""
    encoder, generator = Batcher(make_encoder(), 32, 0.002), Batcher(make_generator(folder / "text"), 16, 0.002)

    async def infer(request: Request) -> Response:
        body = await request.body()
        size = int(request.headers["inference-header-content-length"])
        arrays, at = [], size
        for tensor in json.loads(body[:size])["inputs"]:
            count = int(np.prod(tensor["shape"]))
            arrays.append(np.frombuffer(body, np.int32, count, at).reshape(tensor["shape"]))
            at += 4 * count
        result = await encoder(tuple(arrays))
        head = json.dumps({"model_name": "embed", "outputs": [
            {"name": "out0", "datatype": "FP32", "shape": list(result.shape),
             "parameters": {"binary_data_size": result.nbytes}}]}).encode()  # fmt: skip
        return Response(head + result.tobytes(), headers={"Inference-Header-Content-Length": str(len(head))})

    async def complete(request: Request) -> Response:
        body = json.loads(await request.body())
        text, prompt, given = await generator((body["prompt"], body["max_tokens"]))
        usage = {"prompt_tokens": prompt, "completion_tokens": given, "total_tokens": prompt + given}
        choice = {"index": 0, "text": text, "finish_reason": "length", "logprobs": None}
        return JSONResponse({"object": "text_completion", "model": "text", "choices": [choice], "usage": usage})

    routes = [Route("/v2/models/embed/infer", infer, methods=["POST"]),
              Route("/v1/completions", complete, methods=["POST"])]  # fmt: skip
    return Starlette(routes=routes)


def main() -> None:
    """Serve until SIGTERM."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--models", type=Path, required=True)
    options.add_argument("--threads", type=int, default=2)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    app = make_app(chosen.models)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listener])


if __name__ == "__main__":
    main()
