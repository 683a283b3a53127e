"""An artifact: the compiled form of a program, in memory and as a folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tessera.errors import ArtifactError

SCHEMA = 1
MANIFEST = "manifest.json"
SEAL = "sha256"  # of the rest of the manifest, as `files` has one of each file


@dataclass(frozen=True)
class Artifact:
    """A manifest and files by name. The same content gives the same bytes."""

    manifest: Mapping[str, Any]
    files: Mapping[str, bytes | str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """A file as text.

        Raises:
            ArtifactError: there is no such file.
        """
        if name not in self.files:
            raise ArtifactError(f"the artifact has no file {name}", expected=", ".join(sorted(self.files)))
        return as_bytes(self.files[name]).decode()

    def save(self, path: str | Path) -> Path:
        """Write the folder, whole or not at all: built beside its place, then moved there.

        Raises:
            ArtifactError: something else is at `path`, or nothing can be written there.
        """
        target = Path(path)
        if target.exists() and not (target / MANIFEST).is_file():
            raise ArtifactError(f"{target} exists and is not an artifact", suggestion="choose another path")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        except OSError as error:
            raise _unwritable(target, error) from None
        try:
            self._fill(made)
            _move(made, target)
        except OSError as error:
            raise _unwritable(target, error) from None
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return target

    def _fill(self, folder: Path) -> None:
        folder.chmod(0o755)
        for name, content in self.files.items():
            file = folder / _safe(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(as_bytes(content))
        (folder / MANIFEST).write_text(_json(self._described()))

    def _described(self) -> dict[str, Any]:
        hashes = {name: sha256(content) for name, content in self.files.items()}
        described = {**self.manifest, "schema": SCHEMA, "files": hashes}
        return {**described, SEAL: _seal(described)}


def _unwritable(target: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"{target} cannot be written", received=error.strerror, suggestion="choose another path")


def as_bytes(content: bytes | str) -> bytes:
    """A file's content as bytes."""
    return content.encode() if isinstance(content, str) else content


def sha256(content: bytes | str) -> str:
    """The hash that the manifest holds of a file."""
    return hashlib.sha256(as_bytes(content)).hexdigest()


def _json(item: Any) -> str:
    return json.dumps(item, indent=1, sort_keys=True) + "\n"


def _seal(manifest: Mapping[str, Any]) -> str:
    return sha256(_json({k: v for k, v in manifest.items() if k != SEAL}))


def _safe(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or name == MANIFEST:
        raise ArtifactError(f"{name!r} is not a name for a file of an artifact")
    return name


def _move(made: Path, target: Path) -> None:
    """Put the new folder in place of an older one, which stays whole until then."""
    if not target.exists():
        made.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(old / "artifact")
    made.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def read(path: str | Path) -> Artifact:
    """The artifact in a folder, each file checked against its hash.

    Raises:
        ArtifactError: it is missing, corrupt, or of a newer schema.
    """
    folder = Path(path)
    manifest = _manifest(folder)
    files = {name: _checked(folder, name, digest) for name, digest in manifest.get("files", {}).items()}
    return Artifact(manifest, files)


def _manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        what = f"{folder} has no {MANIFEST}" if folder.is_dir() else f"there is no folder {folder}"
        raise ArtifactError(what, expected="a folder written by `tessera build`", suggestion="check the path")
    try:
        manifest = json.loads(file.read_text())
        schema = int(manifest["schema"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{file} is corrupt: {error!r}", suggestion="build the artifact again") from None
    if schema > SCHEMA:
        raise ArtifactError(
            f"{folder} has schema {schema}, newer than this version of Tessera reads ({SCHEMA})",
            expected=f"schema {SCHEMA} or older",
            received=f"schema {schema}",
            suggestion="upgrade tessera, or build the artifact again with this version",
        )
    if manifest.get(SEAL) != _seal(manifest):
        raise ArtifactError(
            f"{file} is not what was built", expected=f"sha256 {manifest.get(SEAL, 'of the rest')}",
            received=f"sha256 {_seal(manifest)}", suggestion="build the artifact again",
        )  # fmt: skip
    return manifest


def _checked(folder: Path, name: str, digest: str) -> bytes:
    file = folder / _safe(name)
    if not file.is_file():
        raise ArtifactError(f"{folder} lacks {name}", suggestion="build the artifact again")
    content = file.read_bytes()
    if sha256(content) != digest:
        raise ArtifactError(
            f"{file} is not what was built", expected=f"sha256 {digest}", received=f"sha256 {sha256(content)}",
            suggestion="build the artifact again",
        )  # fmt: skip
    return content
