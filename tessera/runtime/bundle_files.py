"""Bundle file: artifacts of several targets and sizes in one zip file, reproducible, and checked when it is read.

    bundle.json                     the index: variants, members with their SHA-256 and size, metadata, a seal
    variants/<name>/manifest.json   the artifact of one target and set of sizes, file by file
    variants/<name>/kernels.ll      …

Members are stored without compression: none is larger than the file, so that no file can expand to fill the memory.
Equal files of several variants are one member. Nothing is unpacked to disk, and nothing is executed here.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.codegen.artifact import (
    MANIFEST,
    SEAL_KEY,
    check_file_name,
    find_version,
    has_fields,
    hash_content,
    is_count,
    is_table,
    is_text,
    parse_manifest,
    seal_json,
)
from tessera.core.errors import ArtifactError, FileError
from tessera.core.io import write_file

INDEX = "bundle.json"
BUNDLE_SCHEMA = 1
OLDEST_READER = "0.1.0"  # the first version of Tessera that reads this schema
SUFFIX = ".bundle"
ZIP_MAGIC = b"PK\x03\x04"
MAX_MEMBERS, MAX_INDEX_BYTES = 1 << 16, 1 << 26
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date of the format: a file says nothing of when it was made
_CHUNK = 1 << 20
_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What the zip reader raises on a damaged file.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, struct.error, ValueError, EOFError, OSError, NotImplementedError,
    RuntimeError, OverflowError, MemoryError,
)  # fmt: skip


def is_bundle_path(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a bundle: a zip file, or a name with the suffix of bundles."""
    file = Path(path)
    if not file.is_file():
        return file.suffix == SUFFIX and not file.is_dir()
    with open(file, "rb") as handle:
        return handle.read(len(ZIP_MAGIC)) == ZIP_MAGIC or file.suffix == SUFFIX


def check_variant_name(name: str) -> str:
    """The name of a variant, which is a folder in the file.

    Raises:
        ArtifactError: it has other characters than letters, digits, `.`, `_` and `-`.
    """
    if not _VARIANT_NAME.fullmatch(name):
        raise ArtifactError(f"{name!r} is not a name of a variant", expected="letters, digits, dots, - and _")
    return name


def write_bundle_file(path: str | Path, variants: Mapping[str, Mapping[str, bytes]], index: Mapping[str, Any]) -> Path:
    """Write a bundle atomically: for each variant its files by name, and the other fields of the index.

    Raises:
        FileError: there can be no file at the path.
    """
    members: dict[str, bytes] = {}
    homes: dict[str, str] = {}  # the member of each content, by hash
    listed: dict[str, dict[str, str]] = {}
    for variant, files in sorted(variants.items()):
        listed[check_variant_name(variant)] = {}
        for name, content in sorted(files.items()):
            member = homes.setdefault(hash_content(content), f"variants/{variant}/{_check_name(name)}")
            members[member] = content
            listed[variant][name] = member
    described = {
        **index,
        "kind": "bundle",
        "schema": BUNDLE_SCHEMA,
        "oldest_reader": OLDEST_READER,
        "written_by": find_version("tessera"),
        "members": {m: {SEAL_KEY: hash_content(c), "bytes": len(c)} for m, c in members.items()},
        "variants": {v: {**index["variants"][v], "files": files} for v, files in listed.items()},
    }

    def fill(handle: Any) -> None:
        with zipfile.ZipFile(handle, "w", zipfile.ZIP_STORED) as archive:
            for name, content in [(INDEX, seal_json(described).encode()), *sorted(members.items())]:
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.create_system, entry.external_attr = 3, 0o644 << 16  # as on Unix, wherever it is written
                archive.writestr(entry, content)

    write_file(path, fill)
    return Path(path)


def _check_name(name: str) -> str:
    return name if name == MANIFEST else check_file_name(name)


@dataclass(frozen=True)
class BundleFile:
    """What was read of a bundle: its index, and the members that were asked for.

    `owned`: nobody but this user or root can have written the file.
    """

    index: Mapping[str, Any]
    members: Mapping[str, bytes]
    owned: bool = False

    def take_files(self, variant: str) -> dict[str, bytes]:
        """The files of a variant by name."""
        return {name: self.members[member] for name, member in self.index["variants"][variant]["files"].items()}


Choose = Callable[[Mapping[str, Any]], Collection[str]]


def read_bundle_file(path: str | Path, choose: Choose) -> BundleFile:
    """Read the variants of a bundle that `choose(index)` names; all other members are checked, too.

    Raises:
        FileError: there is no such file.
        ArtifactError: it is no bundle, damaged, changed since it was written, or of a newer schema or version.
    """
    file = Path(path)
    if not file.is_file():
        what = f"{file} is a folder" if file.is_dir() else f"there is no file {file}"
        raise FileError(what, expected="a bundle written by ts.save", suggestion="check the path")
    try:
        with open(file, "rb") as handle, zipfile.ZipFile(handle) as archive:
            found = os.fstat(handle.fileno())
            owned = os.name != "posix" or (found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022)
            entries = _list_entries(archive, found.st_size, file)
            index = _read_index(archive, entries, file)
            wanted = {m for name in choose(index) for m in index["variants"][name]["files"].values()}
            members = {m: content for m in index["members"] if (content := _read_member(archive, m, index, m in wanted))
                       is not None}  # fmt: skip
    except _ZIP_ERRORS as error:
        raise _make_damage_error(file, f"{type(error).__name__}: {error}") from None
    return BundleFile(index, members, owned)


def _make_damage_error(file: Path, received: str) -> ArtifactError:
    return ArtifactError(
        f"{file} is not a complete bundle", expected="a file written by ts.save", received=received[:200],
        suggestion="save it again; a copy may be truncated",
    )  # fmt: skip


def _list_entries(archive: zipfile.ZipFile, size: int, file: Path) -> dict[str, zipfile.ZipInfo]:
    """The members of a file by name, each as this module writes them."""
    found: dict[str, zipfile.ZipInfo] = {}
    listed = archive.infolist()
    if len(listed) > MAX_MEMBERS:
        raise _make_damage_error(file, f"{len(listed)} members, more than {MAX_MEMBERS}")
    for entry in listed:
        name = entry.orig_filename
        if name in found or name != entry.filename:
            raise _make_damage_error(file, f"two members with the name {name!r}, or a name with other characters")
        if (reader := _find_reader(name)) is not None:
            raise FileError(f"{file} is no bundle: {reader[0]} wrote it", expected="a file written by ts.save",
                            suggestion=reader[1])  # fmt: skip
        if name != INDEX and not (name.startswith("variants/") and _is_plain(name)):
            raise _make_damage_error(file, f"the member {name!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise _make_damage_error(file, f"the member {name!r} is compressed or encrypted")
        found[name] = entry
    if sum(entry.file_size for entry in listed) > size:
        raise _make_damage_error(file, "members that overlap")
    return found


def _find_reader(member: str) -> tuple[str, str] | None:
    """Of a zip file of another library, told by a member: the library, and how to read it."""
    if member.endswith("/data.pkl"):
        return "PyTorch", "model.load_state_dict(torch.load(path)); ts.save writes it for ts.load"
    return ("NumPy", "np.load(path)") if member.endswith(".npy") and "/" not in member else None


def _is_plain(name: str) -> bool:
    parts = name.split("/")
    return name.isprintable() and not any(part in ("", ".", "..") for part in parts) and "\\" not in name


_INDEX_FIELDS = {
    "kind": lambda value: value == "bundle",
    "oldest_reader": is_text,
    "entry": is_text,
    "metadata": has_fields(),
    "requirements": has_fields(memory=is_count),
    "members": is_table(has_fields(**{SEAL_KEY: is_text, "bytes": is_count})),
    "variants": is_table(has_fields(target=is_text, files=is_table(is_text), performance=has_fields())),
}


def _read_index(archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], file: Path) -> Mapping[str, Any]:
    """The index, checked against the members of the file."""
    if INDEX not in entries:
        raise ArtifactError(f"{file} is no bundle: it has no {INDEX}", expected="a file written by ts.save")
    if entries[INDEX].file_size > MAX_INDEX_BYTES:
        raise _make_damage_error(file, f"an index of {entries[INDEX].file_size} bytes")
    index: Mapping[str, Any] = parse_manifest(
        archive.read(entries[INDEX]), f"{INDEX} of {file}", _INDEX_FIELDS, BUNDLE_SCHEMA
    )
    _check_version(index["oldest_reader"], file)
    held, named = entries.keys() - {INDEX}, index["members"].keys()
    if held != named:
        raise _make_damage_error(file, f"the member {min(held ^ named)}, which the index or the file lacks")
    for name, variant in index["variants"].items():
        check_variant_name(name)
        lacking = [m for m in variant["files"].values() if m not in named]
        if lacking or not variant["files"].keys() >= {"manifest.json"}:
            raise _make_damage_error(file, f"the variant {name} without {(*lacking, 'manifest.json')[0]}")
    return index


def _check_version(oldest: str, file: Path) -> None:
    own = find_version("tessera")
    if _parse_version(own) and _parse_version(oldest) > _parse_version(own):
        raise ArtifactError(
            f"{file} needs a newer version of Tessera", expected=f"tessera {oldest} or newer", received=own,
            suggestion="pip install --upgrade tessera, or save it again with this version",
        )  # fmt: skip


def _parse_version(text: str) -> tuple[int, ...]:
    """The numbers of a version; () where it has none.

    >>> _parse_version("0.10.2.dev1")
    (0, 10, 2)
    """
    found = re.match(r"\d{1,9}(\.\d{1,9})*", text)
    return tuple(int(n) for n in found[0].split(".")) if found else ()


def _read_member(archive: zipfile.ZipFile, name: str, index: Mapping[str, Any], keep: bool) -> bytes | None:
    """A member with its hash checked; None where its content is not wanted."""
    digest, parts = hashlib.sha256(), []
    with archive.open(name) as handle:
        while part := handle.read(_CHUNK):
            digest.update(part)
            if keep:
                parts.append(part)
    expected = index["members"][name][SEAL_KEY]
    if digest.hexdigest() != expected:
        raise ArtifactError(
            f"the member {name} has changed since it was saved", expected=f"sha256 {expected}",
            received=f"sha256 {digest.hexdigest()}", suggestion="save it again",
        )  # fmt: skip
    return b"".join(parts) if keep else None
