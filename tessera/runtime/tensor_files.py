"""Tensor files: pytrees of tensors saved to and loaded from safetensors files, whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, FileError, StateDictError, user_location
from tessera.core.io import as_path, import_safetensors, write_file
from tessera.core.pytree import flatten
from tessera.core.types import DType, as_dtype, bf16, bool_, f16, f32, f64, fp8_e4m3, fp8_e5m2
from tessera.ir.tensor import Tensor
from tessera.runtime.bundle_files import is_bundle_path
from tessera.runtime.bundles import BUNDLE_METHOD, Bundle, load_bundle
from tessera.runtime.loading import load as load_artifact

# The element types of safetensors; those that it lacks are stored as bytes, and named in the metadata.
FORMAT_TYPES: dict[str, DType] = {
    "F64": f64, "F32": f32, "F16": f16, "BF16": bf16, "F8_E4M3": fp8_e4m3, "F8_E5M2": fp8_e5m2, "BOOL": bool_,
    **{f"I{bits}": as_dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": as_dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}  # fmt: skip
_STORED = frozenset(FORMAT_TYPES.values())
METADATA = "tessera"  # the key of what a file holds besides its tensors
RESERVED = "__metadata__"  # the entry of the header that is no tensor
# Endings by which a reader takes a file for something else than a safetensors file.
FOREIGN_ENDINGS = {
    ".bundle": "a compiled program, as ts.bundle and ts.optimize make", ".npy": "an array of NumPy",
    ".npz": "arrays of NumPy", ".onnx": "a model of ONNX", ".gguf": "a language model",
}  # fmt: skip
CONSTANTS = (bool, int, float, str, type(None))


def save(tree: Any, path: str | Path, metadata: Mapping[str, Any] | None = None, format: str | None = None) -> Path:
    """Save a pytree of tensors, arrays, numbers and strings as a safetensors file, or a bundle, atomically.

    All element types are kept, bf16 and fp8 too. Dicts, lists and tuples come back as they are; of a module, a named
    tuple or a registered dataclass the file has the tensors by path (`load(path, like=...)` puts them back).

    >>> import tempfile
    >>> name = save({"w": Tensor([1.0]), "step": 3}, tempfile.mkdtemp() + "/state.safetensors")
    >>> load(name)
    {'step': 3, 'w': Tensor([1.], f32)}

    What `ts.bundle` compiled, or `ts.optimize`, is written as a bundle, with `metadata`: see `runtime.bundles`.
    `format` may name what is written: "bundle" or "safetensors".

    Raises:
        ArgumentError: a leaf is no tensor, array, number or string, or two leaves have one path; `metadata` is given
            for what is no bundle; `format` is another; the path is none, or its ending names another format.
        FileError: there can be no file at the path.
    """
    if isinstance(tree, (str, Path)) and not isinstance(path, (str, Path)):
        raise ArgumentError(
            "the path is given before the value", location=user_location(), expected="save(value, path)",
            received=f"save({str(tree)!r:.60}, {type(path).__name__})", suggestion=f"ts.save(value, {str(tree)!r:.60})",
        )  # fmt: skip
    path = as_path(path)
    compiled = hasattr(type(tree), BUNDLE_METHOD)
    if format not in (None, "bundle" if compiled else "safetensors"):
        raise ArgumentError(
            f"{type(tree).__name__} is not saved as {format}", location=user_location(),
            expected='format="bundle"' if compiled else 'format="safetensors"', received=repr(format),
            suggestion="ts.onnx.export writes ONNX, ts.deploy.standalone a C library, ts.export_web a page",
        )  # fmt: skip
    if compiled:
        bundle: Bundle = getattr(tree, BUNDLE_METHOD)()
        return bundle.save(path, metadata)
    if metadata is not None:
        raise ArgumentError(
            "metadata is for bundles", location=user_location(), received=f"{type(tree).__name__} and metadata",
            expected="what ts.bundle or ts.optimize made", suggestion="store it in the tree",
        )  # fmt: skip
    target = Path(path)
    if target.suffix in FOREIGN_ENDINGS:
        raise ArgumentError(
            f"{target.name} would hold tensors, and its ending names {FOREIGN_ENDINGS[target.suffix]}",
            location=user_location(), expected="*.safetensors", received=f"{type(tree).__name__}",
        )  # fmt: skip
    arrays: dict[str, np.ndarray] = {}
    constants: dict[str, Any] = {}
    types: dict[str, str] = {}
    for name, leaf in flatten(tree)[0]:
        if name == RESERVED:
            raise ArgumentError(
                f"a leaf has the path {name!r}, which safetensors keeps for itself", location=user_location(),
                suggestion="rename it",
            )  # fmt: skip
        if name in arrays or name in constants:
            raise ArgumentError(f"two leaves have the path {name!r}", location=user_location(), suggestion="rename one")
        if isinstance(leaf, CONSTANTS) and not isinstance(leaf, np.generic):
            constants[name] = leaf
        else:
            arrays[name], types[name] = _encode(name, leaf)
    about = {"tree": _describe(tree), "constants": constants, "types": types}
    metadata = {METADATA: json.dumps(about)} if tree is not None else None
    data = import_safetensors().numpy.save(arrays, metadata)
    write_file(target, lambda handle: handle.write(data))
    return target


def _encode(name: str, leaf: Any) -> tuple[np.ndarray, str]:
    """A leaf as an array that safetensors stores, and the name of its element type."""
    if not (isinstance(leaf, (Tensor, np.ndarray, np.generic)) or hasattr(leaf, "__array__")):
        raise ArgumentError(
            f"{name or 'the value'} cannot be saved", location=user_location(),
            expected="tensors, arrays, numbers and strings, in containers", received=type(leaf).__name__,
        )  # fmt: skip
    tensor = leaf if isinstance(leaf, Tensor) else Tensor(np.asarray(leaf))
    array = np.asarray(np.ascontiguousarray(tensor.numpy())).reshape(tensor.shape)
    if tensor.dtype in _STORED and array.dtype == tensor.dtype.numpy:
        return array, tensor.dtype.name
    raw = array.view(np.uint8) if array.ndim else array.reshape(1).view(np.uint8)
    return raw, f"{tensor.dtype.name}:{','.join(map(str, tensor.shape))}"


def _describe(tree: Any) -> Any:
    """The structure of a tree as JSON: null for a leaf; classes of users become dicts of what they hold."""
    if isinstance(tree, Mapping):
        return {"dict": [[k, _describe(tree[k])] for k in sorted(tree)]}
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return {"list" if isinstance(tree, list) else "tuple": [_describe(each) for each in tree]}
    leaves, shape = flatten(tree)
    if shape.kind is None:
        return None
    return {"paths": [name for name, _ in leaves]}


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        FileError: the file is missing, truncated or not a safetensors file.
    """
    return _read(path)[0]


def _read(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    file = Path(path)
    if not file.is_file():
        what = f"{file} is a folder" if file.is_dir() else f"there is no file {file}"
        raise FileError(what, location=user_location(), expected="a .safetensors file", suggestion="check the path")
    package = import_safetensors()
    data = file.read_bytes()
    try:
        found = package.deserialize(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header.get(RESERVED, {}).get(METADATA, "null"))
        types = (about or {}).get("types", {})
        return {n: _decode(n, entry, types.get(n, "")) for n, entry in found}, about
    except (package.SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{file} is not a complete safetensors file", location=user_location(),
            received=f"{len(data)} bytes: {error}", suggestion=_suggest_reader(data),
        ) from None  # fmt: skip


# The first bytes of files of other formats, and how they are read.
OTHER_FORMATS = {
    b"\x93NUMPY": "this is an array of NumPy: np.load",
    b"PK\x03\x04": "this is an archive, as of torch.save or np.savez: load it there, and save its tensors by ts.save",
    b"GGUF": "this is a GGUF file: ts.llm.load",
}


def _suggest_reader(data: bytes) -> str:
    found = (text for start, text in OTHER_FORMATS.items() if data.startswith(start))
    return next(found, "save it again; a copy may be truncated")


def _decode(name: str, entry: Mapping[str, Any], note: str) -> Tensor:
    if entry["dtype"] not in FORMAT_TYPES:
        raise ValueError(f"{name} has the element type {entry['dtype']}")
    kind, colon, shape = note.partition(":")
    dtype = as_dtype(kind) if colon else FORMAT_TYPES[entry["dtype"]]
    sizes = [int(n) for n in shape.split(",") if n] if colon else entry["shape"]
    array = np.frombuffer(entry["data"], dtype.numpy)
    if array.size != math.prod(sizes):
        raise ValueError(f"{name} has {array.size} elements for the shape {sizes}")
    return Tensor(array.reshape(sizes), dtype)


def load(path: str | Path, *args: Any, like: Any = None, **named: Any) -> Any:
    """Load what `ts.save` wrote into a file, or the artifact that `ts.build` wrote into a folder.

    A bundle is ready to run: see `tessera.runtime.bundles.load_bundle` for its other arguments, such as `target`.

    A file gives the pytree that was saved; any other safetensors file gives its tensors by name. With `like`, a pytree
    of the same structure (a module, a dataclass), the tensors come back in its containers, checked one by one. A folder
    is an artifact: see `tessera.runtime.loading.load` for its other arguments.

    Raises:
        FileError: the file is missing, truncated or not a safetensors file.
        StateDictError: with `like`, entries are missing, extra, or of another shape or element type.
        ArtifactError: the folder is missing, corrupt, or of a newer schema than this version reads.
    """
    is_path = isinstance(path, (str, os.PathLike))
    if is_path:
        path = as_path(path)
    if is_path and is_bundle_path(path):
        return load_bundle(path, *args, **named)
    if not is_path or not (Path(path).is_file() or Path(path).suffix == ".safetensors"):
        return load_artifact(path, *args, **named)
    tensors, about = _read(path)
    leaves = {**tensors, **(about or {}).get("constants", {})}
    if like is not None:
        return fit_tree(leaves, like, str(path))
    if about is None:
        return leaves
    try:
        return _rebuild(about["tree"], leaves, "")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise FileError(
            f"the structure in {path} does not fit its tensors", location=user_location(), suggestion="save it again"
        ) from None


def _rebuild(tree: Any, leaves: Mapping[str, Any], path: str) -> Any:
    def child(key: Any, each: Any) -> Any:
        return _rebuild(each, leaves, f"{path}.{key}" if path else str(key))

    if tree is None:
        return leaves[path]
    ((kind, parts),) = tree.items()
    if kind == "dict":
        return {key: child(key, each) for key, each in parts}
    if kind == "paths":
        return {name: leaves[f"{path}.{name}" if path else name] for name in parts}
    found = [child(i, each) for i, each in enumerate(parts)]
    return found if kind == "list" else tuple(found)


def fit_tree(leaves: Mapping[str, Any], like: Any, name: str) -> Any:
    """The containers of `like` with these leaves, by path.

    Raises:
        StateDictError: entries are missing, extra, or of another shape or element type.
    """
    wanted, tree = flatten(like)
    known = {path for path, _ in wanted}
    problems = [f"{path} is missing" for path in sorted(known - leaves.keys())]
    problems += [f"{path} is extra" for path in sorted(leaves.keys() - known)]
    problems += [p for path, old in wanted if path in leaves and (p := _compare(path, leaves[path], old))]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateDictError(f"{name} does not fit: {'; '.join(problems[:8])}{more}", location=user_location())
    return tree.build(iter([leaves[path] for path, _ in wanted]))


def _compare(path: str, new: Any, old: Any) -> str:
    if not hasattr(old, "shape") or not hasattr(old, "dtype"):
        return "" if not isinstance(new, Tensor) else f"{path} is a tensor, expected {type(old).__name__}"
    if not isinstance(new, Tensor):
        return f"{path} is a {type(new).__name__}, expected a tensor"
    if tuple(new.shape) != tuple(old.shape):
        return f"{path} has shape {list(new.shape)}, expected {list(old.shape)}"
    return "" if new.dtype == as_dtype(old.dtype) else f"{path} holds {new.dtype}, expected {as_dtype(old.dtype)}"
