"""Files of PyFlame: state dicts and other trees of tensors as safetensors files (`tessera.save`, `tessera.load`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tessera import tree as trees
from tessera.ir.tensor import Tensor as CoreTensor
from tessera.pyflame.creation import tensor
from tessera.pyflame.dtypes import as_dtype
from tessera.pyflame.tensor import Tensor, elements_of
from tessera.runtime import tensor_files


def save(data: Any, path: str | Path) -> Path:
    """Save tensors, arrays, numbers and strings in dicts, lists and tuples; the file is written whole or not at all.

    >>> import tempfile
    >>> import tessera.pyflame as pf
    >>> layer = pf.nn.Linear(3, 2)
    >>> name = save({"model": layer.state_dict(), "epoch": 4}, tempfile.mkdtemp() + "/last.safetensors")
    >>> found = load(name)
    >>> found["epoch"], bool((found["model"]["bias"].numpy() == layer.bias.numpy()).all())
    (4, True)

    Raises:
        ArgumentError: a leaf is no tensor, array, number or string, or two leaves have one path.
        FileError: there can be no file at the path.
    """
    return tensor_files.save(trees.map(lambda x: elements_of(x) if isinstance(x, Tensor) else x, data), path)


def load(path: str | Path) -> Any:
    """What `save` wrote, with tensors for its tensors and arrays; of other safetensors files the tensors by name.

    Raises:
        FileError: the file is missing, truncated or not a safetensors file.
        DTypeError: PyFlame does not have the type of a tensor.
    """
    found = tensor_files.load(path)
    return trees.map(lambda x: tensor(x, as_dtype(x.dtype)) if isinstance(x, CoreTensor) else x, found)
