"""Artifacts: a compiled program as a manifest and files, in memory and as a folder (design 6); sizes in its plan."""

from __future__ import annotations

import ctypes
import errno
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np

from tessera.core.errors import ArgumentError, ArtifactError, ShapeError
from tessera.core.io import is_trusted, lock_folder
from tessera.core.shapes import SizeConstraint, as_size, bind_program_sizes
from tessera.core.symbolic_dim import Dim, Size
from tessera.ir.core import Module, structural_hash

# Reading and writing.


SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
FieldCheck = Callable[[Any], bool]
SEAL_KEY = "sha256"  # the hash of the rest of the manifest; `files` has one for each file


@dataclass(frozen=True)
class Artifact:
    """A manifest and files by name. Equal content is written as equal bytes."""

    manifest: Mapping[str, Any]
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    folder: Path | None = field(default=None, compare=False)  # where it was read
    owned: bool = field(default=False, compare=False)  # read from a file that nobody but this user or root can write

    def text(self, name: str) -> str:
        """A file as text.

        Raises:
            ArtifactError: there is no such file, or it is not text.
        """
        if name not in self.files:
            raise ArtifactError(f"the artifact has no file {name}", expected=", ".join(sorted(self.files)))
        try:
            return encode_content(self.files[name]).decode()
        except UnicodeDecodeError as error:
            raise ArtifactError(f"the file {name} of the artifact is not UTF-8", received=str(error)) from None

    def is_owned(self, name: str) -> bool:
        """Whether it was read from where nobody but this user or root can have written the file of this name."""
        if self.folder is None:
            return self.owned
        return is_trusted(self.folder) and is_trusted(self.folder / name)

    def save(self, path: str | Path) -> Path:
        """Write the folder atomically: built in a temporary folder, then exchanged with `path` in one step.

        A kill at any moment leaves the old artifact or the new one, and so do several builders of one folder.

        Raises:
            ArtifactError: `path` exists and is not an artifact, or cannot be written.
        """
        target = Path(os.path.abspath(path))
        with lock_folder(target.parent):
            if target.exists() and not (target / MANIFEST).is_file():
                raise ArtifactError(f"{target} exists and is not an artifact", suggestion="choose another path")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _restore_folder(target)
            _remove_stale_folders(target)
            temporary = Path(tempfile.mkdtemp(prefix=_temporary_prefix(target), dir=target.parent))
        except OSError as error:
            raise _make_unwritable_error(target, error) from None
        try:
            self._write_files(temporary)
            _replace_folder(temporary, target)
        except OSError as error:
            raise _make_unwritable_error(target, error) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Path(path)

    def _write_files(self, folder: Path) -> None:
        folder.chmod(0o755)
        for name, content in self.files.items():
            file = folder / check_file_name(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode_content(content))
            file.chmod(0o644)
        (folder / MANIFEST).write_text(self.dump_manifest())

    def dump_manifest(self) -> str:
        """The manifest as it is written: with the hash of each file, and of the rest."""
        hashes = {name: hash_content(content) for name, content in self.files.items()}
        return seal_json({**self.manifest, "schema": SCHEMA_VERSION, "files": hashes})


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


def hash_json(item: Any) -> str:
    """The hash of JSON data, the same before and after it was written."""
    return hash_content(_dump_json(item))


def seal_json(manifest: Mapping[str, Any]) -> str:
    """A manifest as text, with the hash of its other fields."""
    return _dump_json({**manifest, SEAL_KEY: _compute_seal(manifest)})


def _compute_seal(manifest: Mapping[str, Any]) -> str:
    return hash_content(_dump_json({k: v for k, v in manifest.items() if k != SEAL_KEY}))


def check_file_name(name: str) -> str:
    """A name of a file in an artifact: a relative path that leads nowhere else.

    Raises:
        ArtifactError: it is none.
    """
    path = PurePosixPath(name)
    if not name.isprintable() or path.is_absolute() or ".." in path.parts or str(path) in (MANIFEST, "."):
        raise ArtifactError(f"{name!r} is not a valid file name in an artifact", expected="a relative path without ..")
    return name


# Replacing a folder: the system exchanges two names in one step, so that there is an artifact at every moment.

REPLACE_ATTEMPTS = 16  # other builders of the same folder may come between
STALE_SECONDS = 3600  # a temporary folder of this age was left by a process that was killed


def _temporary_prefix(target: Path) -> str:
    return f".{target.name}.tessera-"


def _list_temporary_folders(target: Path) -> list[Path]:
    return sorted(target.parent.glob(glob.escape(_temporary_prefix(target)) + "*"))


def _restore_folder(target: Path) -> None:
    """Put back an artifact that a builder moved aside, and was killed before it put the new one there."""
    if target.exists() or not _list_temporary_folders(target):
        return
    with lock_folder(target.parent):
        for folder in _list_temporary_folders(target):
            if not target.exists() and (folder / "artifact" / MANIFEST).is_file():
                (folder / "artifact").rename(target)


def _remove_stale_folders(target: Path) -> None:
    for folder in _list_temporary_folders(target):
        with suppress(OSError):  # its builder has removed it
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(folder)


def _replace_folder(temporary: Path, target: Path) -> None:
    """Move the new folder to the target; the old one, if any, is then in its place."""
    for _ in range(REPLACE_ATTEMPTS):
        try:
            if not target.exists():
                temporary.rename(target)
            elif not exchange_folders(temporary, target):
                _move_aside(temporary, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
    raise OSError(errno.EBUSY, "other builders replace it all the time")


@cache
def _load_exchange() -> Callable[[bytes, bytes], int] | None:
    """The system call that exchanges two paths, or None where the C library has none."""
    if os.name != "posix":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "renameat2"):  # Linux: AT_FDCWD is -100, RENAME_EXCHANGE 2
        return lambda a, b: library.renameat2(-100, a, -100, b, 2)
    if hasattr(library, "renamex_np"):  # macOS: RENAME_SWAP is 2
        return lambda a, b: library.renamex_np(a, b, 2)
    return None


def exchange_folders(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or its file system cannot."""
    exchange = _load_exchange()
    if exchange is None:
        return False
    if exchange(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _move_aside(temporary: Path, target: Path) -> None:
    """Replace by two renames, on a file system without exchange: `_restore_folder` mends a kill between them."""
    with lock_folder(target.parent):
        old = Path(tempfile.mkdtemp(prefix=_temporary_prefix(target), dir=target.parent))
        try:
            target.rename(old / "artifact")
            temporary.rename(target)
        finally:
            shutil.rmtree(old, ignore_errors=True)


def read_artifact(path: str | Path) -> Artifact:
    """The artifact in a folder, with every file checked against its hash.

    Raises:
        ArtifactError: it is missing, corrupt, or of a newer schema.
    """
    folder = Path(path)
    _restore_folder(folder)
    for _ in range(REPLACE_ATTEMPTS):
        before = _identify_folder(folder)
        try:
            manifest = _read_manifest(folder)
            files = {name: _read_checked_file(folder, name, digest) for name, digest in manifest["files"].items()}
            return Artifact(manifest, files, folder)
        except ArtifactError:
            if _identify_folder(folder) == before:
                raise  # else a builder replaced the folder while it was read
    raise ArtifactError(f"{folder} is replaced all the time", suggestion="load it when its builders have ended")


def _identify_folder(folder: Path) -> tuple[int, int] | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not file.is_file():
        problem = f"{folder} has no {MANIFEST}" if folder.is_dir() else f"there is no folder {folder}"
        raise ArtifactError(problem, expected="a folder written by `tessera build`", suggestion="check the path")
    return parse_manifest(_read_member(folder, MANIFEST), str(file), MANIFEST_FIELDS)


def parse_manifest(content: bytes, where: str, fields: Mapping[str, FieldCheck], newest: int = SCHEMA_VERSION) -> Any:
    """The manifest in a file, checked: its schema, the hash of its fields, and those that are given.

    Raises:
        ArtifactError: it is corrupt, changed, or of a newer schema than `newest`.
    """
    try:
        manifest = json.loads(content)
        schema = int(manifest["schema"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{where} is corrupt: {error!r}", suggestion="build the artifact again") from None
    if schema > newest:
        raise ArtifactError(
            f"{where} has schema {schema}, newer than this version of Tessera reads ({newest})",
            expected=f"schema {newest} or older",
            received=f"schema {schema}",
            suggestion="upgrade tessera, or build the artifact again with this version",
        )
    if manifest.get(SEAL_KEY) != _compute_seal(manifest):
        raise ArtifactError(
            f"{where} has changed since it was built", expected=f"sha256 {manifest.get(SEAL_KEY, 'of the rest')}",
            received=f"sha256 {_compute_seal(manifest)}", suggestion="build the artifact again",
        )  # fmt: skip
    check_fields(manifest, fields, "the manifest")
    return manifest


def _read_member(folder: Path, name: str) -> bytes:
    """A file of the folder itself; a link may name anything, and is refused."""
    file = folder / name
    if file.resolve() != folder.resolve() / name:
        raise ArtifactError(f"{file} is a link", expected="a file in the folder", suggestion="copy the file there")
    if not file.is_file():
        raise ArtifactError(f"{folder} lacks {name}", suggestion="build the artifact again")
    try:
        return file.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read", received=error.strerror, suggestion="check its mode") from None


def _read_checked_file(folder: Path, name: str, digest: str) -> bytes:
    file = folder / check_file_name(name)
    content = _read_member(folder, name)
    if hash_content(content) != digest:
        raise ArtifactError(
            f"{file} has changed since it was built", expected=f"sha256 {digest}",
            received=f"sha256 {hash_content(content)}",
            suggestion="build the artifact again",
        )  # fmt: skip
    return content


# Checking JSON data: a seal shows accidents alone, since whoever edits a manifest can seal it again.

MAX_COUNT = 1 << 62


def is_text(value: Any) -> bool:
    """Whether JSON data is a text."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Whether JSON data is a whole number from 0 to what 64 bits hold."""
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_list(item: FieldCheck) -> FieldCheck:
    """A check for a list of such items."""
    return lambda value: isinstance(value, list) and all(map(item, value))


def is_table(item: FieldCheck) -> FieldCheck:
    """A check for an object whose values are such items."""
    return lambda value: isinstance(value, dict) and all(map(item, value.values()))


def has_fields(**fields: FieldCheck) -> FieldCheck:
    """A check for an object with these fields, and perhaps more."""
    return lambda value: isinstance(value, dict) and all(k in value and check(value[k]) for k, check in fields.items())


def check_fields(data: Mapping[str, Any], fields: Mapping[str, FieldCheck], what: str) -> None:
    """Check the fields of an object.

    Raises:
        ArtifactError: one is missing or of another type; it is named.
    """
    wrong = next((k for k, check in fields.items() if k not in data or not check(data[k])), None)
    if wrong is not None:
        raise ArtifactError(
            f"{what} has no valid `{wrong}`", expected=", ".join(fields),
            received=repr(data.get(wrong, "nothing"))[:200],
            suggestion="build the artifact again",
        )  # fmt: skip


MANIFEST_FIELDS = {"files": is_table(is_text)}


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
        "tools": {package: find_version(package) for package in ("tessera", "numpy", *tools)},
    }


def split_parameters(plan: Mapping[str, Any]) -> tuple[ParameterList, ParameterList]:
    """The inputs and the outputs of a launch plan."""
    params = plan["params"]
    return [p for p in params if p["role"] != "output"], [p for p in params if p["role"] == "output"]


@cache
def find_version(package: str) -> str:
    """The installed version of a package, or "unknown"."""
    from importlib import metadata  # loads the parsers of mail and archives

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


# Symbolic plans: a host plan whose sizes are expressions, and its binding to the sizes of a call.
#
# In the JSON data of a plan `{"size": "4*B"}` stands where a plan of known sizes has a number. `bind_plan` replaces
# each by its value, so that everything that executes a plan sees numbers alone.


SIZE_KEY = "size"
MAX_SIZE_TEXT = 1 << 14  # characters: offsets in a workspace are sums over many buffers
MAX_BOUND_PLANS = 16  # the bound plans that a program keeps: each has a workspace


def describe_size(size: Size) -> Any:
    """A size as JSON data."""
    return {SIZE_KEY: repr(size)} if isinstance(size, Dim) else int(size)


def parse_size(data: Any) -> Size:
    """A size from JSON data.

    Raises:
        ArtifactError: the data is no size.
    """
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    try:
        if isinstance(data, Mapping) and set(data) == {SIZE_KEY} and len(data[SIZE_KEY]) < MAX_SIZE_TEXT:
            return as_size(data[SIZE_KEY])
    except (ShapeError, TypeError, ValueError, ArithmeticError, RecursionError):
        pass
    raise ArtifactError(f"{data!r:.100} is not a size", suggestion="build the artifact again")


def bind_plan(plan: Any, sizes: Mapping[str, int]) -> Any:
    """The plan with the value of each size.

    >>> bind_plan({"grid": [{"size": "B"}, 1]}, {"B": 3})
    {'grid': [3, 1]}
    """
    if isinstance(plan, Mapping):
        if set(plan) == {SIZE_KEY}:
            return _evaluate(plan, sizes)
        return {k: bind_plan(v, sizes) for k, v in plan.items()}
    return [bind_plan(v, sizes) for v in plan] if isinstance(plan, (list, tuple)) else plan


def _evaluate(data: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    size = parse_size(data)
    try:
        value = size.evaluate(sizes) if isinstance(size, Dim) else size
    except (ShapeError, ArithmeticError):  # a division by zero
        value = size
    if isinstance(value, Dim):
        raise ArtifactError(f"the plan has no size {value}", suggestion="build the artifact again")
    return value


class SizeBinder:
    """Finds the sizes of a call from the shapes of its arrays, and checks the constraints of the program."""

    def __init__(self, plan: Mapping[str, Any], lines: Mapping[str, str] = MappingProxyType({})) -> None:
        inputs = [p for p in plan["params"] if p["role"] != "output"]
        self.names = [str(p["name"]) for p in inputs]
        self.patterns = [tuple(parse_size(n) for n in p["shape"]) for p in inputs]
        self.constraints = [SizeConstraint(text, lines.get(text, "")) for text in plan.get("constraints", ())]

    def bind(self, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
        """The sizes of a call.

        Raises:
            ArgumentError: there are more or fewer arrays than parameters.
            ShapeError: as `bind_program_sizes`.
        """
        if len(shapes) != len(self.patterns):
            raise ArgumentError("wrong number of arguments", expected=len(self.patterns), received=len(shapes))
        return bind_program_sizes(self.names, self.patterns, shapes, self.constraints)


P = TypeVar("P")


class BoundPlans(Generic[P]):
    """What a runtime makes of a plan, for the sizes of each call; the plans of the latest sizes are kept.

    `make(plan)` takes a plan of known sizes; a plan without symbolic sizes is made once, at the start.
    """

    def __init__(self, plan: Mapping[str, Any], make: Callable[[Mapping[str, Any]], P]) -> None:
        self._plan = plan
        self._binder = SizeBinder(plan) if "sizes" in plan else None
        self.only = make(plan) if self._binder is None else None
        # `make` may hold the owner of this object, which is then freed only by the garbage collector.
        self._make = None if self._binder is None else make
        self._made: OrderedDict[tuple[tuple[int, ...], ...], P] = OrderedDict()

    def find(self, arrays: Sequence[Any]) -> P:
        """What was made for the sizes of these arrays."""
        if self.only is not None:
            return self.only
        shapes = tuple([a.shape if a.__class__ is np.ndarray else np.shape(a) for a in arrays])
        found = self._made.get(shapes)
        if found is None:
            assert self._binder is not None and self._make is not None
            found = self._made[shapes] = self._make(bind_plan(self._plan, self._binder.bind(shapes)))
            if len(self._made) > MAX_BOUND_PLANS:
                self._made.popitem(last=False)
        return found
