"""Decoder configuration: the sizes and choices of a decoder-only transformer, read from GGUF fields or config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, user_location


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: Llama, Qwen and GPT-2 are choices of norms, positions and feed-forward networks.

    `rotary` is "halves" (element i turns with i + D / 2), "pairs" (2i with 2i + 1), or None: learned positions.
    `norm` is "rms" or "layer", `feed_forward` "gated" (SwiGLU) or "gelu" (GPT-2's, by tanh). `window` 0 means that
    attention sees the whole context.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    context: int
    rope_base: float = 10000.0
    eps: float = 1e-5
    rotary: str | None = "halves"
    norm: str = "rms"
    feed_forward: str = "gated"
    window: int = 0
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "width", "layers", "heads", "kv_heads", "head_size", "hidden", "context")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ArgumentError(
                    f"a decoder with {name} {value!r}", location=user_location(), expected="a positive integer"
                )
        choices = {"rotary": ("halves", "pairs", None), "norm": ("rms", "layer"), "feed_forward": ("gated", "gelu")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ArgumentError(f"a decoder with {name} {getattr(self, name)!r}", location=user_location(),
                                    expected=", ".join(map(repr, known)))  # fmt: skip
        if self.rotary is not None and self.head_size % 2:
            raise ArgumentError("rotary positions need an even head_size", location=user_location(),
                                received=self.head_size)  # fmt: skip
        if not (0 < self.eps < math.inf and 0 < self.rope_base < math.inf and self.window >= 0):
            raise ArgumentError(
                "a decoder with numbers out of their range", location=user_location(),
                expected="eps and rope_base positive and finite, window 0 or more",
                received=f"eps {self.eps}, rope_base {self.rope_base}, window {self.window}",
            )  # fmt: skip
        if self.heads % self.kv_heads:
            raise ArgumentError(
                "the heads of queries cannot share the heads of keys", location=user_location(),
                expected=f"a multiple of {self.kv_heads}", received=self.heads,
            )  # fmt: skip


# Names of the fields in a GGUF file, after the architecture.
_GGUF_SIZES = {
    "width": "embedding_length", "layers": "block_count", "heads": "attention.head_count",
    "hidden": "feed_forward_length", "context": "context_length",
}  # fmt: skip
GGUF_ROTARY = {"llama": "pairs", "qwen2": "halves", "qwen3": "halves", "gpt2": None}


def read_gguf_config(fields: Mapping[str, Any], vocabulary: int) -> DecoderConfig:
    """The configuration in the fields of a GGUF file.

    Raises:
        ArgumentError: the architecture is unknown, or a field is missing.
    """
    family = fields.get("general.architecture")
    if family not in GGUF_ROTARY:
        raise ArgumentError(
            f"GGUF architecture {family!r} is not supported", location=user_location(), expected=", ".join(GGUF_ROTARY)
        )
    sizes = {ours: _take(fields, f"{family}.{theirs}") for ours, theirs in _GGUF_SIZES.items()}
    heads, width = int(sizes["heads"]), int(sizes["width"])
    layered = family == "gpt2"
    eps = f"{family}.attention.layer_norm_{'' if layered else 'rms_'}epsilon"
    end = fields.get("tokenizer.ggml.eos_token_id")
    return DecoderConfig(
        vocabulary=vocabulary, width=width, layers=int(sizes["layers"]), heads=heads,
        kv_heads=int(fields.get(f"{family}.attention.head_count_kv", heads)),
        head_size=int(fields.get(f"{family}.attention.key_length", width // heads)),
        hidden=int(sizes["hidden"]), context=int(sizes["context"]),
        rope_base=float(fields.get(f"{family}.rope.freq_base", 10000.0)), eps=float(_take(fields, eps)),
        rotary=GGUF_ROTARY[family], norm="layer" if layered else "rms", feed_forward="gelu" if layered else "gated",
        end_tokens=() if end is None else (int(end),),
    )  # fmt: skip


def read_config(config: Mapping[str, Any]) -> DecoderConfig:
    """The configuration in a `config.json` of GPT-2, Llama, Mistral, Qwen2 or Qwen3.

    Raises:
        ArgumentError: the model type is unknown, or asks for what these decoders do not have.
    """
    family = config.get("model_type")
    if family == "gpt2":
        return _read_gpt2(config)
    if family not in ("llama", "mistral", "qwen2", "qwen3"):
        raise ArgumentError(f"model type {family!r} is not supported", location=user_location(),
                            expected="gpt2, llama, mistral, qwen2, qwen3")  # fmt: skip
    if config.get("hidden_act", "silu") != "silu":
        raise ArgumentError(f"the activation {config['hidden_act']!r} is not supported", location=user_location(),
                            expected="silu")  # fmt: skip
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise ArgumentError("scaled rotary positions are not supported", location=user_location(), received=scaling)
    heads, width = int(_take(config, "num_attention_heads")), int(_take(config, "hidden_size"))
    windowed = config.get("use_sliding_window", family == "mistral")
    return DecoderConfig(
        vocabulary=int(_take(config, "vocab_size")), width=width, layers=int(_take(config, "num_hidden_layers")),
        heads=heads, kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or width // heads), hidden=int(_take(config, "intermediate_size")),
        context=int(config.get("max_position_embeddings", 2048)),
        rope_base=float(config.get("rope_theta") or scaling.get("rope_theta") or 10000.0),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        window=int(config.get("sliding_window") or 0) if windowed else 0, end_tokens=_end_tokens(config),
    )  # fmt: skip


def _read_gpt2(config: Mapping[str, Any]) -> DecoderConfig:
    width, heads = int(_take(config, "n_embd")), int(_take(config, "n_head"))
    if config.get("activation_function", "gelu_new") != "gelu_new":
        raise ArgumentError(f"the activation {config['activation_function']!r} is not supported",
                            location=user_location(), expected="gelu_new")  # fmt: skip
    return DecoderConfig(
        vocabulary=int(_take(config, "vocab_size")), width=width, layers=int(_take(config, "n_layer")), heads=heads,
        kv_heads=heads, head_size=width // heads, hidden=int(config.get("n_inner") or 4 * width),
        context=int(_take(config, "n_positions")), eps=float(config.get("layer_norm_epsilon", 1e-5)), rotary=None,
        norm="layer", feed_forward="gelu", end_tokens=_end_tokens(config),
    )  # fmt: skip


def _end_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    end = config.get("eos_token_id")
    return () if end is None else tuple(end) if isinstance(end, (list, tuple)) else (int(end),)


def _take(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ArgumentError(f"the configuration has no {name}", location=user_location(), expected=name)
    return fields[name]
