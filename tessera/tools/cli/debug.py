"""`tessera debug`: step through an entry point or a program in the Tile interpreter, backwards too."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tessera.core.device import INTERP
from tessera.core.errors import ArgumentError, FileError
from tessera.frontend.jit.tracing import Jit
from tessera.tools.cli.entry_points import EntryPoint, find_entry_point, make_inputs, prepare_program
from tessera.tools.cli.scripts import run_script
from tessera.tools.debug import checked, session


def main(options: argparse.Namespace) -> int:
    """Step through the program that the command line names; its error is shown there and gives exit status 2."""
    if options.rest and not options.script:
        raise ArgumentError("an entry point takes no arguments of a command line", expected="--script with them",
                            received=" ".join(options.rest))  # fmt: skip
    with _sanitizing(options.checked), session(_script(options)):
        if options.script:
            run_script(options.entry, options.rest)
        else:
            entry = find_entry_point(options.entry, options.size)
            _run_stepped(entry, make_inputs(entry, options.seed, options.input), options.level)
    return 0


def _run_stepped(entry: EntryPoint, arguments: Any, level: str | None) -> None:
    """Run an entry point in a level's interpreter (by default Graph for a `ts.jit` function)."""
    if isinstance(entry.function, Jit) and level in (None, "graph"):
        args, named = ((), arguments) if isinstance(arguments, Mapping) else (arguments, {})
        entry.function.stepped(*args, **named)
        return
    prepare_program(entry, arguments, INTERP).run(level or "tile")


@contextmanager
def _sanitizing(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with checked(nan=True):
        yield


def _script(options: argparse.Namespace) -> str | None:
    """The commands of -c, then those of the file; None for the terminal."""
    if options.commands is None and not options.command_text:
        return None
    if options.commands is not None and not Path(options.commands).is_file():
        raise FileError(f"there is no file {options.commands}", expected="a file with a command on each line")
    try:
        read = Path(options.commands).read_text() if options.commands else ""
    except UnicodeDecodeError as error:
        raise FileError(f"{options.commands} is not text", received=str(error)) from None
    return "\n".join([*options.command_text, read])
