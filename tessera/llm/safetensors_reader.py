"""Safetensors reader: configuration, weights and tokenizer of a model folder in the layout of the Hugging Face Hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import FileError, user_location
from tessera.ir.tensor import Tensor, get_elements
from tessera.llm.config import DecoderConfig, read_config
from tessera.llm.tokenizer import Tokenizer, read_tokenizer
from tessera.llm.weights import build_weights
from tessera.runtime.tensor_files import load_tensors

# The names of tensors after "model.layers.<number>." (GPT-2: "h.<number>."), and those of the parameters.
LLAMA_LAYER = {
    "input_layernorm": "attention_norm", "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v",
    "self_attn.o_proj": "output", "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
    "post_attention_layernorm": "norm", "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
}  # fmt: skip
LLAMA_MODEL = {"embed_tokens": "embedding", "norm": "norm", "lm_head": "head"}
GPT2_LAYER = {
    "ln_1": "attention_norm", "attn.c_attn": "qkv", "attn.c_proj": "output", "ln_2": "norm", "mlp.c_fc": "up",
    "mlp.c_proj": "down",
}  # fmt: skip
GPT2_MODEL = {"wte": "embedding", "wpe": "positions", "ln_f": "norm", "lm_head": "head"}
GPT2_TRANSPOSED = ("qkv", "output", "up", "down")  # stored as [in, out]
# Buffers that are no weights.
IGNORED = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq")


def read_state(config: DecoderConfig, state: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a decoder in a state dict with the names of `transformers`, as arrays.

    Raises:
        FileError: a parameter is missing, or a tensor is none of the decoder's; it names them.
        ShapeError: a parameter has another shape.
    """
    gpt2 = config.rotary is None
    names: dict[str, str] = {}
    unknown = []
    for theirs in state:
        ours = _translate(theirs, gpt2)
        if ours is None:
            unknown += [] if theirs.endswith(IGNORED) else [theirs]
        else:
            names[ours] = theirs
    if unknown:
        raise FileError(
            "the weights have tensors that this decoder does not use", location=user_location(),
            received=", ".join(sorted(unknown)[:5]),
        )  # fmt: skip
    if "head.weight" in names and _is_same(state, names["head.weight"], names.get("embedding.weight")):
        del names["head.weight"]
    readers = {ours: _make_reader(state, theirs, gpt2, ours) for ours, theirs in names.items()}
    return build_weights(config, readers, names)


def _is_same(state: Mapping[str, Any], one: str, other: str | None) -> bool:
    """Whether two tensors of a state are equal: a tied head was stored twice."""
    if other is None or state[one].shape != state[other].shape:
        return False
    return state[one] is state[other] or np.array_equal(_to_array(state[one]), _to_array(state[other]))


def _to_array(x: Any) -> np.ndarray:
    return np.asarray(get_elements(x) if isinstance(x, Tensor) else x)


def _translate(name: str, gpt2: bool) -> str | None:
    """The path of a parameter: "model.layers.3.mlp.up_proj.weight" is "layers.3.up.weight"; None for another name."""
    layer, model = (GPT2_LAYER, GPT2_MODEL) if gpt2 else (LLAMA_LAYER, LLAMA_MODEL)
    stem, _, kind = name.removeprefix("transformer." if gpt2 else "model.").rpartition(".")
    marker = "h." if gpt2 else "layers."
    if not stem.startswith(marker):
        return f"{model[stem]}.{kind}" if stem in model else None
    number, _, part = stem.removeprefix(marker).partition(".")
    return f"layers.{number}.{layer[part]}.{kind}" if number.isdecimal() and part in layer else None


def _make_reader(state: Mapping[str, Any], name: str, gpt2: bool, path: str) -> Callable[[], Any]:
    turned = gpt2 and path.endswith(".weight") and path.split(".")[-2] in GPT2_TRANSPOSED
    return lambda: np.ascontiguousarray(_to_array(state[name]).T) if turned else _to_array(state[name])


def read_folder(folder: Path) -> tuple[DecoderConfig, dict[str, Any], Tokenizer | None]:
    """The configuration, the weights and the tokenizer (if there is one) of a model folder.

    Raises:
        ArgumentError: the architecture is not supported.
        FileError, ShapeError: a file is missing or broken, or a parameter does not fit; it is named.
    """
    fields = read_json(folder / "config.json")
    config = read_config(fields)
    listed = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if listed.is_file():
        places = read_json(listed).get("weight_map")
        if not isinstance(places, dict):
            raise FileError(f"{listed.name} has no weight_map", location=user_location(), expected=str(listed))
        files = sorted({str(f) for f in places.values()})
    state: dict[str, Any] = {}
    for name in files:
        if Path(name).name != name:
            raise FileError(f"{listed.name} names a file outside its folder", location=user_location(), received=name)
        state |= load_tensors(folder / name)
    return config, read_state(config, state), _read_tokenizer(folder)


def _read_tokenizer(folder: Path) -> Tokenizer | None:
    if not (folder / "tokenizer.json").is_file():
        return None
    settings = folder / "tokenizer_config.json"
    template = read_json(settings).get("chat_template") if settings.is_file() else None
    return read_tokenizer(folder / "tokenizer.json", template if isinstance(template, str) else None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object in a file.

    Raises:
        FileError: the file is missing, or holds no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"there is no file {path.name}", location=user_location(), expected=str(path)) from error
    except ValueError as error:
        raise FileError(f"{path.name} is not JSON", location=user_location(), received=str(error)) from error
    if not isinstance(found, dict):
        raise FileError(f"{path.name} is no JSON object", location=user_location(), received=type(found).__name__)
    return found
