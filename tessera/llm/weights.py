"""Decoder weights: a pytree built from named tensors, with every shape checked against the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, FileError, ShapeError, user_location
from tessera.ir.tensor import Tensor
from tessera.llm.config import DecoderConfig
from tessera.stdlib.quantised import QuantisedMatrix

LayerNames = dict[str, tuple[str, ...]]
Readers = Mapping[str, Callable[[], Any]]


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of one layer, by its name; matrices are [out, in]."""
    d, queries, keys = config.width, config.heads * config.head_size, config.kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (d,), "q.weight": (queries, d), "k.weight": (keys, d), "v.weight": (keys, d),
        "output.weight": (d, queries), "norm.weight": (d,), "up.weight": (config.hidden, d),
        "down.weight": (d, config.hidden),
    }  # fmt: skip
    if config.feed_forward == "gated":
        shapes["gate.weight"] = (config.hidden, d)
    if config.norm == "layer":
        shapes |= {"attention_norm.bias": (d,), "norm.bias": (d,)}
    return shapes


# Parameters that a layer may lack.
def _optional_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    d, queries, keys = config.width, config.heads * config.head_size, config.kv_heads * config.head_size
    return {
        "q.bias": (queries,), "k.bias": (keys,), "v.bias": (keys,), "output.bias": (d,), "up.bias": (config.hidden,),
        "down.bias": (d,), "q_norm.weight": (config.head_size,), "k_norm.weight": (config.head_size,),
    }  # fmt: skip


def build_weights(config: DecoderConfig, readers: Readers, names: Mapping[str, str]) -> dict[str, Any]:
    """The weights of a decoder as a pytree of tensors, from functions that read each parameter by its path.

    `names` are the names in the file, for errors. Matrices that multiply the same input become one: "qkv", "gate_up".

    Raises:
        FileError: a parameter is missing.
        ShapeError: one has another shape than the configuration says.
    """
    read = _CheckedReader(readers, names)
    d = config.width
    weights: dict[str, Any] = {"embedding": read("embedding.weight", (config.vocabulary, d))}
    if config.rotary is None:
        weights["positions"] = read("positions.weight", (config.context, d))
    weights["norm"] = {"weight": read("norm.weight", (d,))}
    if config.norm == "layer":
        weights["norm"]["bias"] = read("norm.bias", (d,))
    if "head.weight" in readers:
        weights["head"] = read("head.weight", (config.vocabulary, d))
    weights["layers"] = [_build_layer(config, read, f"layers.{i}.") for i in range(config.layers)]
    return weights


def list_shapes(config: DecoderConfig, biases: bool = False) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter that a decoder must have, by its path; with `biases` those of its products too."""
    shapes = {"embedding.weight": (config.vocabulary, config.width), "norm.weight": (config.width,)}
    shapes |= {f"layers.{i}.{n}": s for i in range(config.layers) for n, s in expected_shapes(config).items()}
    if config.rotary is None:
        shapes["positions.weight"] = (config.context, config.width)
    if config.norm == "layer":
        shapes["norm.bias"] = (config.width,)
    if biases:
        optional = {n: s for n, s in _optional_shapes(config).items() if n.endswith(".bias")}
        shapes |= {f"layers.{i}.{n}": s for i in range(config.layers) for n, s in optional.items()}
    return shapes


def draw_weights(config: DecoderConfig, seed: int = 0, scale: float = 0.05) -> dict[str, Any]:
    """Random weights of a configuration, for tests and measurements: normal numbers, norms near 1."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        made = scale * rng.standard_normal(shape, np.float32)
        return made + np.float32(1) if name.endswith("norm.weight") else made

    made = {name: draw(name, shape) for name, shape in list_shapes(config).items()}
    return build_weights(config, {n: partial(np.asarray, w) for n, w in made.items()}, {n: n for n in made})


def check_parts(config: DecoderConfig, weights: Any) -> None:
    """Raise the error of a pytree of weights that lacks a part which every decoder has.

    Raises:
        ArgumentError: a part is missing; it names the path.
    """
    wanted = ["embedding", "norm", "layers", *(["positions"] if config.rotary is None else [])]
    held = weights if isinstance(weights, Mapping) else {}
    layers = held.get("layers", ())
    missing = [name for name in wanted if name not in held]
    missing += [
        f"layers.{i}.{name}" for i, layer in enumerate(layers) for name in ("attention_norm", "output", "norm", "down")
        if name not in layer
    ]  # fmt: skip
    if missing:
        raise ArgumentError(
            f"the weights have no {', '.join(missing[:5])}", location=user_location(),
            expected="a dict as ts.llm.draw_weights makes it",
            received=f"a {type(weights).__name__}" + (f" with {', '.join(map(str, held))}" if held else ""),
        )  # fmt: skip


class _CheckedReader:
    """Reads parameters by path, and checks their shapes."""

    def __init__(self, readers: Readers, names: Mapping[str, str]) -> None:
        self.readers, self.names = readers, names

    def __contains__(self, path: str) -> bool:
        return path in self.readers

    def __call__(self, path: str, shape: tuple[int, ...]) -> Any:
        if path not in self.readers:
            raise FileError(f"the weights have no parameter {path}", location=user_location(), expected=str(shape))
        found = self.readers[path]()
        if tuple(found.shape) != shape:
            raise ShapeError(
                f"parameter {path} ({self.names[path]}) has another shape", location=user_location(),
                expected=str(shape), received=str(tuple(found.shape)),
            )  # fmt: skip
        return found


def _build_layer(config: DecoderConfig, read: _CheckedReader, prefix: str) -> dict[str, Any]:
    shapes = expected_shapes(config)
    if f"{prefix}qkv.weight" in read:
        found = _split_merged(config, read, prefix)
        shapes = {n: s for n, s in shapes.items() if n[:2] not in ("q.", "k.", "v.")}
    else:
        found = {}
    optional = {n: s for n, s in _optional_shapes(config).items() if prefix + n in read}
    found |= {n: read(prefix + n, s) for n, s in {**shapes, **optional}.items()}
    layer: dict[str, Any] = {}
    for name, value in found.items():
        part, kind = name.split(".")
        layer.setdefault(part, {})[kind] = value
    _merge(layer, ("q", "k", "v"), "qkv")
    if "gate" in layer:
        _merge(layer, ("gate", "up"), "gate_up")
    return layer


def _split_merged(config: DecoderConfig, read: _CheckedReader, prefix: str) -> dict[str, Any]:
    """q, k and v of a file in which they are one matrix."""
    sizes = [config.heads * config.head_size, *[config.kv_heads * config.head_size] * 2]
    ends = np.cumsum([0, *sizes])
    found: dict[str, Any] = {}
    for kind, shape in (("weight", (ends[-1], config.width)), ("bias", (ends[-1],))):
        if kind == "weight" or f"{prefix}qkv.bias" in read:
            whole = read(f"{prefix}qkv.{kind}", tuple(int(n) for n in shape))
            parts = [_take_part(whole, a, b) for a, b in zip(ends, ends[1:], strict=False)]
            found |= {f"{n}.{kind}": p for n, p in zip("qkv", parts, strict=True)}
    return found


def _take_part(x: Any, first: int, last: int) -> Any:
    """Some rows of a matrix, which may be quantised."""
    if isinstance(x, QuantisedMatrix):
        return QuantisedMatrix(*(None if p is None else p[first:last] for p in x))
    return x[first:last]


def _merge(layer: dict[str, Any], names: tuple[str, ...], merged: str) -> None:
    """Replace matrices that multiply the same input by one, if their formats are equal."""
    parts = [layer[n]["weight"] for n in names]
    if len({_format_of(p) for p in parts}) > 1 or any(
        ("bias" in layer[n]) != ("bias" in layer[names[0]]) for n in names
    ):
        return
    whole: dict[str, Any] = {"weight": _concatenate(parts)}
    if "bias" in layer[names[0]]:
        whole["bias"] = np.concatenate([layer[n]["bias"] for n in names])
    for n in names:
        del layer[n]
    layer[merged] = whole


def _format_of(x: Any) -> Any:
    return tuple(None if p is None else (p.shape[1:], p.dtype) for p in (x if isinstance(x, QuantisedMatrix) else [x]))


def _concatenate(parts: list[Any]) -> Any:
    if not isinstance(parts[0], QuantisedMatrix):
        return np.concatenate(parts)
    return QuantisedMatrix(*(None if p[0] is None else np.concatenate(p) for p in zip(*parts, strict=True)))


def to_tensors(weights: Any, device: str | None = None) -> Any:
    """The same pytree with every array as a tensor, on a device if one is given."""
    if isinstance(weights, dict):
        return {n: to_tensors(w, device) for n, w in weights.items()}
    if isinstance(weights, list):
        return [to_tensors(w, device) for w in weights]
    if isinstance(weights, QuantisedMatrix):
        return QuantisedMatrix(*(None if p is None else to_tensors(p, device) for p in weights))
    held = Tensor(np.ascontiguousarray(weights)) if isinstance(weights, np.ndarray) else weights
    return held.to(device) if device else held
