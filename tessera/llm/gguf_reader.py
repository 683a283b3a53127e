"""GGUF reader: configuration, weights and tokenizer fields of a model file (llama.cpp), through the `gguf` package."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import DeviceUnavailable, FileError, user_location
from tessera.llm.config import DecoderConfig, read_gguf_config
from tessera.llm.gguf_blocks import READERS, read_blocks
from tessera.llm.weights import LayerNames, build_weights

# The names of the tensors of a layer after "blk.<number>.", and those of the parameters.
LAYER_NAMES: LayerNames = {
    "attention_norm": ("attn_norm",), "q": ("attn_q",), "k": ("attn_k",), "v": ("attn_v",), "qkv": ("attn_qkv",),
    "output": ("attn_output",), "q_norm": ("attn_q_norm",), "k_norm": ("attn_k_norm",), "norm": ("ffn_norm",),
    "gate": ("ffn_gate",), "up": ("ffn_up",), "down": ("ffn_down",),
}  # fmt: skip
MODEL_NAMES = {"embedding": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output"}


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file: its fields by name, and its tensors, read on demand from the mapped file."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def read(self, name: str) -> Any:
        """A tensor: an array, or a `QuantisedMatrix`.

        Raises:
            FileError: there is no such tensor, or its format is not supported.
        """
        found = self.tensors.get(name)
        if found is None:
            raise FileError(f"{self.path.name} has no tensor {name}", location=user_location(), expected=name)
        kind = found.tensor_type.name
        if kind not in READERS:
            raise FileError(
                f"tensor {name} of {self.path.name} has the format {kind}, which is not supported",
                location=user_location(), expected=", ".join(READERS), received=kind,
            )  # fmt: skip
        return read_blocks(kind, found.data)


def open_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file; its tensors are mapped, not read.

    Raises:
        DeviceUnavailable: the package `gguf` is not installed.
        FileError: the file is missing, no GGUF file, or truncated.
    """
    try:
        import gguf
    except ImportError as error:
        raise DeviceUnavailable("the package gguf is not installed", location=user_location(),
                                suggestion="pip install tessera[llm]") from error  # fmt: skip
    path = Path(path)
    if not path.is_file():
        raise FileError(f"there is no file {path.name}", location=user_location(), expected=str(path))
    try:
        reader = _make_reader(gguf)(path)
        fields = {name: functools.partial(field.contents) for name, field in reader.fields.items()}
    except Exception as error:  # the package raises ValueError, IndexError and others for what it cannot parse
        raise FileError(
            f"{path.name} is no whole GGUF file", location=user_location(), received=str(error) or type(error).__name__,
            expected="a GGUF file of version 2 or 3", suggestion="download it again",
        ) from error  # fmt: skip
    return GGUFFile(path, _Fields(fields), {t.name: t for t in reader.tensors})


def _make_reader(gguf: Any) -> Any:
    """The package's reader on a plain array of the mapped bytes: slices of `np.memmap` cost several times as much."""

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        """A reader whose bytes are a plain array."""

        @property
        def data(self) -> np.ndarray:
            """The mapped bytes."""
            return self._bytes

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._bytes = np.asarray(mapped)

    return Reader


class _Fields(Mapping[str, Any]):
    """The fields of a file, decoded on first access: vocabularies are long."""

    def __init__(self, readers: Mapping[str, Any]) -> None:
        self._readers, self._known = readers, {}  # type: ignore[var-annotated]

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._readers[name]()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def read_gguf(file: GGUFFile) -> tuple[DecoderConfig, dict[str, Any]]:
    """The configuration and the weights of a decoder in a GGUF file.

    Raises:
        ArgumentError: the architecture is not supported.
        FileError, ShapeError: a tensor is missing, unknown, or has another shape; it names the tensor.
    """
    embedding = file.read("token_embd.weight")
    config = read_gguf_config(file.fields, int(embedding.shape[0]))
    names = {}
    for number in range(config.layers):
        for ours, (theirs,) in LAYER_NAMES.items():
            for end in ("weight", "bias"):
                names[f"layers.{number}.{ours}.{end}"] = f"blk.{number}.{theirs}.{end}"
    for ours, theirs in MODEL_NAMES.items():
        names |= {f"{ours}.{end}": f"{theirs}.{end}" for end in ("weight", "bias")}
    present = {ours: theirs for ours, theirs in names.items() if theirs in file.tensors}
    unknown = sorted(set(file.tensors) - set(present.values()) - {"rope_freqs.weight"})
    if unknown or "rope_freqs.weight" in file.tensors:
        raise FileError(
            f"{file.path.name} has tensors that this decoder does not use", location=user_location(),
            received=", ".join(unknown[:5] or ["rope_freqs.weight"]),
        )  # fmt: skip
    return config, build_weights(
        config, {n: functools.partial(_read_whole, file, t) for n, t in present.items()}, present
    )


def _read_whole(file: GGUFFile, name: str) -> Any:
    tensor = file.read(name)
    return np.ascontiguousarray(tensor) if isinstance(tensor, np.ndarray) else tensor
