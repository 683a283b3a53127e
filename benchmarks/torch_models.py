#!/usr/bin/env python3
"""Model sweep: PyTorch models through `ts.torch.import_program`, their results against eager PyTorch.

    python benchmarks/torch_models.py transformers --out models.json
    python benchmarks/torch_models.py torchvision --seconds 200 --target llvm --out vision.json
    python benchmarks/torch_models.py kernelbench KERNELBENCH/KernelBench --list problems.json --out kernelbench.json

Models of `transformers` have small random configurations. Those of torchvision are its classification models with
random weights, on two images of 64 pixels a side, or of the size that a model needs. KernelBench's problems run at
reduced sizes: whole numbers from 64 that a problem assigns at its top level are divided by the largest of 16, 8,
4, 2, 1 at which PyTorch runs. A result counts as right if it is PyTorch's, or as close as PyTorch's to that of the
same model in float64. What draws random numbers is named, and compared by its types alone.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import json
import pathlib
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

import tessera as ts
from tessera.core.errors import TesseraError

BOUND = 1e-4  # the largest difference, in parts of the largest element
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}


# Models of transformers, by name: a function that makes the model and its inputs.


def make_transformers() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    import transformers as t

    words = torch.arange(12).reshape(1, 12) % 90 + 1
    image = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    sound = image.reshape(1, 8, -1)[:, :, :40]
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    clip_text = {**SMALL, "max_position_embeddings": 16, "eos_token_id": 98}
    whisper = t.WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    t5 = t.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    text = {"input_ids": words, "use_cache": False}
    llama = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return {
        "BERT": lambda: (t.BertModel(t.BertConfig(**SMALL)), {"input_ids": words}),
        "GPT-2": lambda: (t.GPT2LMHeadModel(t.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)), text),
        "Llama": lambda: (t.LlamaForCausalLM(t.LlamaConfig(**llama)), text),
        "Qwen2": lambda: (t.Qwen2ForCausalLM(t.Qwen2Config(**llama)), text),
        "T5": lambda: (
            t.T5ForConditionalGeneration(t5),
            {**text, "decoder_input_ids": words[:, :5]},
        ),
        "ViT": lambda: (t.ViTModel(t.ViTConfig(**vision)), {"pixel_values": image}),
        "Whisper": lambda: (
            t.WhisperForConditionalGeneration(whisper),
            {"input_features": sound, "decoder_input_ids": words[:, :5], "use_cache": False},
        ),
        "CLIP": lambda: (
            t.CLIPModel(t.CLIPConfig(text_config=clip_text, vision_config=vision, projection_dim=16)),
            {"input_ids": words, "pixel_values": image},
        ),
    }  # fmt: skip


# Classification models of torchvision, by name.

IMAGE_SIZES = {"inception": 96, "vit": 224, "maxvit": 224}


def make_torchvision() -> dict[str, Callable[[], tuple[Any, dict[str, Any]]]]:
    from torchvision import models

    def make(name: str) -> tuple[Any, dict[str, Any]]:
        size = next((n for word, n in IMAGE_SIZES.items() if name.startswith(word)), 64)
        return models.get_model(name, weights=None), {"": [torch.randn(2, 3, size, size)]}

    return {name: (lambda name=name: make(name)) for name in models.list_models(module=models)}


# Problems of KernelBench.


class Shrink(ast.NodeTransformer):
    """Divides whole numbers from 64 by a factor."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        value = node.value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 64:
            return ast.copy_location(ast.Constant(max(value // self.factor, 8)), node)
        return node


def load_problem(path: pathlib.Path, factor: int) -> dict[str, Any]:
    """The names of a problem's module, with smaller sizes; `lines` keep their numbers."""
    tree = ast.parse(path.read_text())
    tree.body = [Shrink(factor).visit(s) if isinstance(s, ast.Assign) else s for s in tree.body]
    names: dict[str, Any] = {"__name__": path.stem}
    exec(compile(ast.fix_missing_locations(tree), str(path), "exec"), names)  # noqa: S102
    return names


def make_problem(path: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """The model of a problem and its inputs, at the smallest sizes that run."""
    for factor in (16, 8, 4, 2, 1):
        try:
            names = load_problem(path, factor)
            torch.manual_seed(0)
            model, inputs = names["Model"](*names["get_init_inputs"]()), names["get_inputs"]()
            if sum(x.numel() for x in inputs if isinstance(x, torch.Tensor)) > 4e6 and factor > 1:
                inputs = [x[:1] if isinstance(x, torch.Tensor) and x.ndim > 1 else x for x in inputs]
            model(*inputs)
            return model, {"": inputs}
        except Exception:
            if factor == 1:
                raise
    raise AssertionError


# The comparison.


class TooSlow(Exception):
    """A model took longer than its limit."""


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def judge(found: Any, wanted: Any, random: bool = False) -> str:
    ours, theirs = ([x for x in tree_flatten(v)[0] if x is not None] for v in (found, wanted))
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    for own, want in zip(ours, theirs, strict=True):
        if not isinstance(want, torch.Tensor):
            continue
        got = ts.torch.to_torch(own)
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
        want = want.detach()
        if random or not want.numel():
            continue
        scale = float(want.abs().nan_to_num(0, 0, 0).max()) if want.dtype != torch.bool else 1.0
        if not torch.allclose(got.double(), want.double(), rtol=BOUND, atol=BOUND * max(scale, 1e-30), equal_nan=True):
            return f"largest difference {float((got.double() - want.double()).abs().max()):.3g} of {scale:.3g}"
    return ""


def check(make: Callable[[], tuple[Any, dict[str, Any]]], training: bool, target: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model, given = make()
    model = model.train(training)
    args, named = tuple(given.get("", ())), {k: v for k, v in given.items() if k}
    began = time.perf_counter()
    try:
        program = ts.torch.import_program(model, args, named, target=target)
    except TesseraError as error:
        return {"status": "refused", "why": str(error)[:1500]}
    ops = program.describe_ops()
    report: dict[str, Any] = {"ops": sum(ops.values()), "import_s": round(time.perf_counter() - began, 2)}
    with torch.no_grad():
        wanted = model(*args, **named)
    began = time.perf_counter()
    try:
        found = program(*args, **named)
    except TesseraError as error:
        return {**report, "status": "refused at the call", "why": str(error)[:1500]}
    report["call_s"] = round(time.perf_counter() - began, 2)
    random = sorted(op for op in ops if any(word in op for word in ("dropout", "rand", "bernoulli")))
    difference = judge(found, wanted, bool(random)) and judge_precisely(model, args, named, found, wanted)
    report["random"] = random
    return {**report, "status": "wrong" if difference else "right", **({"why": difference} if difference else {})}


def judge_precisely(model: Any, args: Any, named: Any, found: Any, wanted: Any) -> str:
    """Whether a result is farther from that in float64 than twice the distance of PyTorch's own."""
    widen = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(*tree_map(widen, args), **tree_map(widen, named))
    ours, theirs, best = (tree_flatten(v)[0] for v in (found, wanted, exact))
    for own, want, true in zip(ours, theirs, best, strict=True):
        mine, other = (float((x.double() - true).abs().max()) for x in (ts.torch.to_torch(own), want))
        if mine > 2 * other:
            return f"off by {mine:.3g} from float64, PyTorch by {other:.3g}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suite", choices=("transformers", "torchvision", "kernelbench"))
    parser.add_argument("folder", nargs="?", type=pathlib.Path)
    parser.add_argument("--list", type=pathlib.Path, help='JSON with {"visible": [paths]}')
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--seconds", type=int, default=90, help="limit of one model")
    parser.add_argument("--target")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.suite == "transformers":
        makers = make_transformers()
    elif args.suite == "torchvision":
        makers = make_torchvision()
    else:
        paths = [args.folder / p for p in json.loads(args.list.read_text())["visible"] if not p.startswith("level4")]
        makers = {"/".join(p.parts[-2:]): (lambda p=p: make_problem(p)) for p in paths}
    results: dict[str, Any] = {}
    for name, make in makers.items():
        if args.only and not any(word in name for word in args.only):
            continue
        began = time.monotonic()
        try:
            with limit(args.seconds):
                results[name] = check(make, args.suite == "kernelbench", args.target)
        except TooSlow:
            results[name] = {"status": "too slow"}
        except Exception as error:
            results[name] = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:600]}
        results[name]["s"] = round(time.monotonic() - began, 1)
        print(name, {k: str(v)[:300] for k, v in results[name].items()}, flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))
    print(dict(collections.Counter(r["status"] for r in results.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
