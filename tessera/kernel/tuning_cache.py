"""What tuning has found, kept in a JSON file: read by every process, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from tessera.errors import FileError
from tessera.schedule_files import read_json, write_json

_LOCK = Lock()


def default_file() -> Path:
    """autotune.json in the folder TESSERA_CACHE, or in the user's cache folder."""
    given = os.environ.get("TESSERA_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return (Path(given) if given else Path(base) / "tessera") / "autotune.json"


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
        """Add or replace an entry."""
        with _LOCK:
            write_json(self.path, {"entries": {**self._entries(), key: dict(entry)}})

    def _entries(self) -> dict[str, Any]:
        if not self.path.exists():
            return {}
        entries = read_json(self.path, "entries")["entries"]
        if not isinstance(entries, dict):
            raise FileError(f"{self.path} holds no entries of tuning", received=type(entries).__name__)
        return entries
