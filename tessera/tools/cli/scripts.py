"""Scripts: programs that commands run as Python runs them."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

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


def run_emulated(session: AbstractContextManager[Any], path: str, arguments: Sequence[str]) -> None:
    """Run a program whose kernels execute in the PTX emulator, and print the reports of its launches."""
    with session as device:
        try:
            run_script(path, arguments)
        finally:
            for report in device.reports:
                print(report)
    if not device.launches:
        print(f"{path} launched no kernel")
