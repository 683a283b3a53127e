"""Sharded checkpoints: each rank writes its parts, a manifest says where they belong; loaded on a mesh of any shape.

A checkpoint is a folder of safetensors files and `manifest.json`. It is written under another name and exchanged with
the old one when it is complete, so that a reader finds a whole one at every moment.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tessera.codegen.artifact import exchange_folders
from tessera.core.errors import FileError, user_location
from tessera.core.io import import_safetensors
from tessera.core.pytree import flatten
from tessera.core.types import as_dtype
from tessera.dist.collectives import barrier
from tessera.dist.mesh import Mesh
from tessera.dist.ranks import CURRENT_RANK, require_rank
from tessera.dist.sharding import Dims, ShardSpec, check_spec, find_slices, global_shape
from tessera.dist.spmd import match_specs
from tessera.ir.tensor import Tensor, as_tensor

VERSION = 1
MANIFEST = "manifest.json"


def save_checkpoint(folder: str | Path, tree: Any, specs: Any = None) -> None:
    """Write this rank's parts of a pytree of tensors; every rank calls it. An older checkpoint is replaced at the end.

    `specs` are the shardings of the leaves: one for all, or a container like the tree. The first of the ranks that
    hold a part writes it.

    Raises:
        ArgumentError: the specs do not fit, or the caller is not a rank.
        FileError: a file cannot be written.
    """
    context, target = require_rank("save_checkpoint"), Path(folder)
    mesh, rank = context.mesh, context.rank
    partial = target.with_name(target.name + ".partial")
    leaves = match_specs(tree, specs, "")
    try:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()
        write_parts(partial, leaves, mesh, rank)
        barrier()
        if rank == 0:
            write_manifest(partial, leaves, mesh)
            replace_checkpoint(target, partial)
    except OSError as error:
        raise FileError(f"cannot write the checkpoint {target}: {error}", location=user_location()) from None
    barrier()


def _leaf_name(name: str) -> str:
    return name.lstrip(".") or "value"


def _dims(spec: ShardSpec | None, x: Tensor) -> Dims:
    return (spec or ShardSpec()).dims(x.ndim)


def _writers(dims: Dims, mesh: Mesh) -> list[int]:
    """The ranks that write parts of a tensor: of those that hold the same part the first."""
    used = {n for axes in dims for n in axes}
    return [
        r
        for r in range(mesh.size)
        if all(c == 0 for n, c in zip(mesh.axis_names, mesh.coordinate(r), strict=True) if n not in used)
    ]


def write_parts(folder: Path, leaves: list[tuple[str, Any, Any]], mesh: Mesh, rank: int) -> None:
    """Write the file of a rank, and its sum behind it."""
    own = {}
    for name, x, spec in leaves:
        x = as_tensor(x)
        if rank in _writers(_dims(spec, x), mesh):
            array = np.ascontiguousarray(x.numpy())
            own[_leaf_name(name)] = array.reshape(-1).view(np.uint8)  # bytes: element types that safetensors lacks too
    path = folder / f"rank-{rank:05d}.safetensors"
    try:
        import_safetensors().numpy.save_file(own, path)
    except import_safetensors().SafetensorError as error:
        raise OSError(str(error)) from None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    made = path.with_suffix(".sha256.new")
    made.write_text(digest)
    os.replace(made, path.with_suffix(".sha256"))  # who sees the file sees all of it


def write_manifest(folder: Path, leaves: list[tuple[str, Any, Any]], mesh: Mesh) -> None:
    """Write where the parts of all ranks belong; every rank has written its file."""
    tensors = {}
    for name, x, spec in leaves:
        x = as_tensor(x)
        dims = _dims(spec, x)
        shape = global_shape(x.shape, dims, mesh)  # type: ignore[arg-type]
        parts = [
            {"rank": r, "slices": [[s.start, s.stop] for s in find_slices(shape, dims, mesh, r)]}
            for r in _writers(dims, mesh)
        ]
        tensors[_leaf_name(name)] = {"shape": list(shape), "dtype": x.dtype.name, "parts": parts}
    digests = {p.stem: p.read_text() for p in sorted(folder.glob("*.sha256"))}
    for path in folder.glob("*.sha256"):
        path.unlink()
    document = {"version": VERSION, "mesh": mesh.shape, "files": digests, "tensors": tensors}
    (folder / MANIFEST).write_text(json.dumps(document, indent=1, sort_keys=True))


def replace_checkpoint(target: Path, partial: Path) -> None:
    """Put the new folder in place of the old one: in one step where the system can exchange two folders."""
    if target.is_dir() and exchange_folders(partial, target):
        shutil.rmtree(partial, ignore_errors=True)
        return
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(partial, target)
    except OSError:
        if old.exists():
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: str | Path, like: Any, specs: Any = None, mesh: Mesh | None = None) -> Any:
    """A pytree from a checkpoint, in the container of `like`: in a rank its parts by `specs`, else whole tensors.

    The mesh may have another shape than the one that wrote it. `like` gives the names alone: its leaves are not read.

    Raises:
        FileError: there is no checkpoint, it is damaged or of a newer version, or a tensor is missing from it.
        ShapeError: the ranks do not divide an axis.
    """
    context, target = CURRENT_RANK.get(), Path(folder)
    manifest = _read_manifest(target)
    files: dict[int, Mapping[str, np.ndarray]] = {}
    found = []
    for name, _, spec in match_specs(like, specs, ""):
        entry = manifest["tensors"].get(_leaf_name(name))
        if entry is None:
            raise FileError(
                f"the checkpoint {target} has no tensor {_leaf_name(name)}", location=user_location(),
                expected=", ".join(sorted(manifest["tensors"])[:8]),
            )  # fmt: skip
        whole = tuple(slice(0, n) for n in entry["shape"])
        if context is not None:
            on = mesh or context.mesh
            whole = find_slices(entry["shape"], check_spec(spec, entry["shape"], on, name), on, context.rank)
        found.append(_read_tensor(target, manifest, _leaf_name(name), entry, whole, files))
    return flatten(like, empty=True)[1].build(iter(found))


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        version = manifest["version"]
        assert isinstance(manifest["tensors"], dict) and isinstance(manifest["files"], dict)
    except OSError:
        raise FileError(f"there is no checkpoint {folder}", location=user_location()) from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise FileError(f"the manifest of the checkpoint {folder} is damaged", location=user_location()) from None
    if version != VERSION:
        raise FileError(
            f"the checkpoint {folder} is of version {version}", location=user_location(), expected=str(VERSION)
        )
    return manifest


def _read_file(folder: Path, manifest: Mapping[str, Any], rank: int) -> Mapping[str, np.ndarray]:
    path = folder / f"rank-{rank:05d}.safetensors"
    try:
        data = path.read_bytes()
    except OSError:
        raise FileError(f"the checkpoint {folder} lacks {path.name}", location=user_location()) from None
    if hashlib.sha256(data).hexdigest() != manifest["files"].get(path.stem):
        raise FileError(
            f"{path.name} of the checkpoint {folder} is damaged", location=user_location(),
            expected=f"the SHA-256 of {MANIFEST}", received=f"{len(data)} bytes with another",
            suggestion="take an older checkpoint",
        )  # fmt: skip
    return import_safetensors().numpy.load(data)  # type: ignore[no-any-return]


def _read_tensor(
    folder: Path, manifest: Mapping[str, Any], name: str, entry: Mapping[str, Any], wanted: tuple[slice, ...],
    files: dict[int, Mapping[str, np.ndarray]],
) -> Tensor:  # fmt: skip
    """The wanted part of a tensor, from the parts that overlap it."""
    dtype = as_dtype(entry["dtype"])
    out = np.empty([s.stop - s.start for s in wanted], dtype.numpy)
    filled = 0
    for part in entry["parts"]:
        held = [slice(*pair) for pair in part["slices"]]
        common = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(held, wanted, strict=True)]
        if any(s.start >= s.stop for s in common):
            continue
        rank = part["rank"]
        if rank not in files:
            files[rank] = _read_file(folder, manifest, rank)
        array = files[rank][name].view(dtype.numpy).reshape([s.stop - s.start for s in held])
        inner = tuple(slice(s.start - h.start, s.stop - h.start) for s, h in zip(common, held, strict=True))
        place = tuple(slice(s.start - w.start, s.stop - w.start) for s, w in zip(common, wanted, strict=True))
        out[place] = array[inner]
        filled += out[place].size
    if filled != out.size:
        raise FileError(
            f"the checkpoint {folder} has {filled} of {out.size} elements of {name}", location=user_location(),
            suggestion="take an older checkpoint",
        )  # fmt: skip
    return Tensor(out)
