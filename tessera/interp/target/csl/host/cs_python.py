"""cs_python: runs a Python script with the simulator's `cerebras` modules on its path."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from tessera.core.errors import FileError, TesseraError
from tessera.interp.target.csl.host import modules_folder


def main(arguments: Sequence[str]) -> int:
    """Run a script (or `-c code`, `-m module`) with this process's interpreter, as Python does.

    The exit status is the script's, or 1 with a message instead of a traceback for an error of the simulated program.
    """
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        words.pop(0)  # options of the Python interpreter
    if not words:
        print("usage: cs_python script.py [argument …]", file=sys.stderr)
        return 2
    sys.path.insert(1, str(modules_folder()))
    try:
        _run_script(words)
    except TesseraError as error:
        print(restore_paths(str(error)), file=sys.stderr)
        return 1
    return 0


def restore_paths(text: str) -> str:
    """The message with the names of the user's files instead of those of `cslc`'s copies."""
    runtime = sys.modules.get("tessera.interp.target.csl.host.runtime")
    for folder in runtime.RUNS if runtime else ():
        text = text.replace(f"{folder}/src/", "/")
    return text


def _run_script(words: list[str]) -> None:
    first, rest = words[0], words[1:]
    if first in ("-c", "-m") and not rest:
        raise FileError(f"{first} names nothing to run", expected="code after -c, a module after -m")
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        sys.path.insert(0, "")
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        if not Path(first).exists():
            raise FileError(f"no such script: {first}")
        sys.argv = words
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
