"""Scripts: programs that commands run as Python runs them."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from tessera.core.errors import FileError


def run_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Run a Python program as the main program.

    Raises:
        FileError: there is no such file.
    """
    if not Path(path).is_file():
        raise FileError(f"there is no file {path}", expected="a Python program")
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
