"""Where Tessera keeps what it may make again: object code, and what tuning found."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder TESSERA_CACHE, or one in the user's cache folder; it need not be there yet."""
    given = os.environ.get("TESSERA_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(given) if given else Path(base) / "tessera"
