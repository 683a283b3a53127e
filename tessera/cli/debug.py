"""`tessera debug`: step through an entry point or a program in the Tile interpreter, backwards too."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.cli.entries import Entry, find, inputs_of, program_of
from tessera.debug import checked, session
from tessera.device import INTERP
from tessera.errors import FileError
from tessera.tracing import Jit


def main(options: argparse.Namespace) -> int:
    """Step through what the command line names; an error of the program is shown there, and then ends with status 2."""
    with _checking(options.checked), session(_script(options)):
        if options.script:
            _run_script(options.entry, options.rest)
        else:
            entry = find(options.entry)
            _step_through(entry, inputs_of(entry, options.seed, options.input), options.level)
    return 0


def _step_through(entry: Entry, arguments: Any, level: str | None) -> None:
    """Run an entry at a level (a `ts.jit` function at the Graph level unless told otherwise) by its interpreter."""
    if isinstance(entry.function, Jit) and level in (None, "graph"):
        args, named = ((), arguments) if isinstance(arguments, Mapping) else (arguments, {})
        entry.function.stepped(*args, **named)
        return
    program_of(entry, arguments, INTERP).run(level or "tile")


@contextmanager
def _checking(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with checked(nan=True):
        yield


def _script(options: argparse.Namespace) -> str | None:
    """The commands that are given: those of -c, then those of the file; None for the terminal."""
    if options.commands is None and not options.command_text:
        return None
    if options.commands is not None and not Path(options.commands).is_file():
        raise FileError(f"there is no file {options.commands}", expected="a file with a command on each line")
    read = Path(options.commands).read_text() if options.commands else ""
    return "\n".join([*options.command_text, read])


def _run_script(path: str, arguments: list[str]) -> None:
    if not Path(path).is_file():
        raise FileError(f"there is no file {path}", expected="a Python program")
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
