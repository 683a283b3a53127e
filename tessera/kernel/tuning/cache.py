"""What tuning has found, kept in a JSON file: processes read it at any time, and add to it one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.cache_folder import cache_folder
from tessera.errors import FileError
from tessera.file_lock import alone
from tessera.schedule_files import read_json, write_json


def default_file() -> Path:
    """autotune.json in the folder TESSERA_CACHE, or in the user's cache folder."""
    return cache_folder() / "autotune.json"


class TuningCache:
    """Entries by key. A file that is missing is empty; one that cannot be read is an error, not silently replaced.

    The schema of an entry: `config`, `latency_ms`, `trials`, and `about`, what the key stands for in words.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path).expanduser() if path else default_file()

    def get(self, key: str) -> dict[str, Any] | None:
        """The entry of a key, or None.

        Raises:
            FileError: the file is corrupt or of another schema.
        """
        found = self._entries().get(key)
        return found if isinstance(found, dict) else None

    def put(self, key: str, entry: Mapping[str, Any]) -> None:
        """Add or replace an entry; a file that cannot be written is warned of, for what was found holds without it."""
        try:
            with alone(self.path):
                write_json(self.path, {"entries": {**self._entries(), key: dict(entry)}})
        except OSError as error:
            text = f"what tuning found is not kept: {self.path} cannot be written ({error.strerror})"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def export(self, path: str | Path) -> Path:
        """Write every entry as a file that another machine can `merge`."""
        return write_json(path, {"entries": self._entries()})

    def merge(self, path: str | Path) -> int:
        """Take the entries of another file; of two for one key the faster stays. The number taken.

        Raises:
            FileError: the file is missing, corrupt or of another schema, or this one cannot be written.
        """
        given = TuningCache(path)
        if not given.path.exists():
            raise FileError(f"{path} cannot be read", received="no such file")
        found = given._entries()
        try:
            with alone(self.path):
                held = self._entries()
                taken = {k: e for k, e in found.items() if k not in held or e["latency_ms"] < held[k]["latency_ms"]}
                write_json(self.path, {"entries": {**held, **taken}})
        except OSError as error:
            raise FileError(f"{self.path} cannot be written", received=error.strerror) from None
        return len(taken)

    def _entries(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        entries = read_json(self.path, "entries")["entries"]
        if not isinstance(entries, dict):
            raise FileError(f"{self.path} holds no entries of tuning", received=type(entries).__name__)
        return entries
