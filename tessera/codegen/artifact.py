"""Artifacts: a compiled program as a manifest and files, in memory and as a folder (design 6)."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

from tessera.core.errors import ArtifactError
from tessera.ir.core import Module, structural_hash

# Reading and writing.


SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
SEAL_KEY = "sha256"  # the hash of the rest of the manifest; `files` has one for each file


@dataclass(frozen=True)
class Artifact:
    """A manifest and files by name. Equal content is written as equal bytes."""

    manifest: Mapping[str, Any]
    files: Mapping[str, bytes | str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """A file as text.

        Raises:
            ArtifactError: there is no such file.
        """
        if name not in self.files:
            raise ArtifactError(f"the artifact has no file {name}", expected=", ".join(sorted(self.files)))
        return encode_content(self.files[name]).decode()

    def save(self, path: str | Path) -> Path:
        """Write the folder atomically: built in a temporary folder, then moved to `path`.

        Raises:
            ArtifactError: `path` exists and is not an artifact, or cannot be written.
        """
        target = Path(path)
        if target.exists() and not (target / MANIFEST).is_file():
            raise ArtifactError(f"{target} exists and is not an artifact", suggestion="choose another path")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        except OSError as error:
            raise _make_unwritable_error(target, error) from None
        try:
            self._write_files(temporary)
            _replace_folder(temporary, target)
        except OSError as error:
            raise _make_unwritable_error(target, error) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return target

    def _write_files(self, folder: Path) -> None:
        folder.chmod(0o755)
        for name, content in self.files.items():
            file = folder / _check_file_name(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode_content(content))
        (folder / MANIFEST).write_text(_dump_json(self._describe_manifest()))

    def _describe_manifest(self) -> dict[str, Any]:
        hashes = {name: hash_content(content) for name, content in self.files.items()}
        manifest = {**self.manifest, "schema": SCHEMA_VERSION, "files": hashes}
        return {**manifest, SEAL_KEY: _compute_seal(manifest)}


def _make_unwritable_error(target: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"{target} cannot be written", received=error.strerror, suggestion="choose another path")


def encode_content(content: bytes | str) -> bytes:
    """A file's content as bytes."""
    return content.encode() if isinstance(content, str) else content


def hash_content(content: bytes | str) -> str:
    """The hash of a file in the manifest."""
    return hashlib.sha256(encode_content(content)).hexdigest()


def _dump_json(item: Any) -> str:
    return json.dumps(item, indent=1, sort_keys=True) + "\n"


def _compute_seal(manifest: Mapping[str, Any]) -> str:
    return hash_content(_dump_json({k: v for k, v in manifest.items() if k != SEAL_KEY}))


def _check_file_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or name == MANIFEST:
        raise ArtifactError(f"{name!r} is not a valid file name in an artifact", expected="a relative path without ..")
    return name


def _replace_folder(temporary: Path, target: Path) -> None:
    """Move the new folder to the target, and remove the old one afterwards."""
    if not target.exists():
        temporary.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "artifact")
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def read_artifact(path: str | Path) -> Artifact:
    """The artifact in a folder, with every file checked against its hash.

    Raises:
        ArtifactError: it is missing, corrupt, or of a newer schema.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    files = {name: _read_checked_file(folder, name, digest) for name, digest in manifest.get("files", {}).items()}
    return Artifact(manifest, files)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        problem = f"{folder} has no {MANIFEST}" if folder.is_dir() else f"there is no folder {folder}"
        raise ArtifactError(problem, expected="a folder written by `tessera build`", suggestion="check the path")
    try:
        manifest = json.loads(file.read_text())
        schema = int(manifest["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{file} is corrupt: {error!r}", suggestion="build the artifact again") from None
    if schema > SCHEMA_VERSION:
        raise ArtifactError(
            f"{folder} has schema {schema}, newer than this version of Tessera reads ({SCHEMA_VERSION})",
            expected=f"schema {SCHEMA_VERSION} or older",
            received=f"schema {schema}",
            suggestion="upgrade tessera, or build the artifact again with this version",
        )
    if manifest.get(SEAL_KEY) != _compute_seal(manifest):
        raise ArtifactError(
            f"{file} has changed since it was built", expected=f"sha256 {manifest.get(SEAL_KEY, 'of the rest')}",
            received=f"sha256 {_compute_seal(manifest)}", suggestion="build the artifact again",
        )  # fmt: skip
    return manifest


def _read_checked_file(folder: Path, name: str, digest: str) -> bytes:
    file = folder / _check_file_name(name)
    if not file.is_file():
        raise ArtifactError(f"{folder} lacks {name}", suggestion="build the artifact again")
    content = file.read_bytes()
    if hash_content(content) != digest:
        raise ArtifactError(
            f"{file} has changed since it was built", expected=f"sha256 {digest}",
            received=f"sha256 {hash_content(content)}",
            suggestion="build the artifact again",
        )  # fmt: skip
    return content


# The manifest of a compiled program, on every target (design 6).


PARAMETER_FIELDS = ("name", "shape", "dtype")
ParameterList = Sequence[Mapping[str, Any]]


def build_manifest(
    target: str, module: Module, plan: Mapping[str, Any], text: str, sides: tuple[ParameterList, ParameterList],
    options: Mapping[str, Any], schedule: Any = None, tools: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """The manifest of a Tile module compiled to `text`: `sides` are its inputs and outputs, `tools` other packages."""
    inputs, outputs = ([{k: p[k] for k in PARAMETER_FIELDS} for p in side] for side in sides)
    return {
        "kind": "program",
        "target": target,
        "signature": {"inputs": inputs, "outputs": outputs},
        "plan": plan,
        "hashes": {"module": structural_hash(module), "text": hash_content(text)},
        "schedule": schedule,
        "options": dict(options),
        "tools": {package: _find_version(package) for package in ("tessera", "numpy", *tools)},
    }


def split_parameters(plan: Mapping[str, Any]) -> tuple[ParameterList, ParameterList]:
    """The inputs and the outputs of a launch plan."""
    params = plan["params"]
    return [p for p in params if p["role"] != "output"], [p for p in params if p["role"] == "output"]


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
