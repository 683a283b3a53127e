"""A file that one process, and one thread of it, changes at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """For the body of a `with`, the only one who changes the file at `path`; others that ask wait for it.

    What is locked is a file beside it, since the file itself is replaced as a whole. It stays there, empty; the system
    frees it where a process ends before it is done.

    Raises:
        OSError: the folder cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, alone(Path(folder) / "a.json"):
    ...     print([p.name for p in Path(folder).iterdir()])
    ['a.json.lock']
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "wb") as file:
        _lock(file)
        yield
