"""Entry points in files: `file.py`, `file.py:name`, and their inputs."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tessera.arrays import read_array
from tessera.errors import ArgumentError, FileError, Location, UnknownNameError
from tessera.example import Example
from tessera.kernel import Kernel
from tessera.program import Program, prepare
from tessera.tensor import Tensor
from tessera.tracing import Jit


@dataclass(frozen=True)
class Entry:
    """A kernel or jit function found in a file, and how to run it."""

    name: str
    function: Any
    example: Example | None


def find(text: str) -> Entry:
    """The entry point that "file.py" or "file.py:name" means.

    Raises:
        FileError: there is no such file. UnknownNameError: no such entry, or no telling which.
    """
    path, _, name = text.partition(":") if ".py:" in text else (text, "", "")
    entries = _entries(_load(path))
    if name:
        if name not in entries:
            close = difflib.get_close_matches(name, entries, 1)
            raise UnknownNameError(
                f"{path} has no entry point {name}",
                expected=", ".join(entries) or "a function under @ts.jit or @ts.kernel",
                suggestion=f"did you mean {path}:{close[0]}?" if close else None,
            )
        return entries[name]
    return _only(entries, path)


def _only(entries: dict[str, Entry], path: str) -> Entry:
    examples = [e for e in entries.values() if e.example] or list(entries.values())
    chosen = [e for e in examples if e.example and e.example.marked] or examples
    if len(chosen) == 1:
        return chosen[0]
    raise UnknownNameError(
        f"{path} has {len(chosen) or 'no'} entry points" + (", and none is marked" if chosen else ""),
        expected=", ".join(e.name for e in chosen) or "a function under @ts.jit or @ts.kernel with @ts.example",
        suggestion=f"name one: {path}:{chosen[0].name}" if chosen else None,
    )


def _load(path: str) -> ModuleType:
    file = Path(path)
    if file.is_dir() and (file / "model.py").is_file():
        file = file / "model.py"
    if not file.is_file():
        raise FileError(f"there is no file {path}", expected="a Python file or an artifact folder")
    spec = importlib.util.spec_from_file_location(f"tessera_entry_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    for folder in (str(Path.cwd()), str(file.resolve().parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        place = Location(error.filename or path, error.lineno or 0, error.offset or 0)
        raise FileError(f"{path} is not Python: {error.msg}", location=place) from None
    return module


def _entries(module: ModuleType) -> dict[str, Entry]:
    found = {}
    for name, value in vars(module).items():
        if isinstance(value, (Kernel, Jit)) and value.__module__ == module.__name__:
            found[name] = Entry(name, value, getattr(value, "example", None))
    return found


def inputs_of(entry: Entry, seed: int, files: Sequence[str] = ()) -> Any:
    """The arguments to run an entry with: its example's, with the first replaced by the files given."""
    arguments: Any = ()
    if entry.example is not None:
        arguments = entry.example.inputs(np.random.default_rng(seed))
    elif not files:
        raise ArgumentError(
            f"{entry.name} has no example inputs", suggestion="give --input X.npy for each, or add @ts.example(...)"
        )
    if not files:
        return arguments
    keys = list(arguments) if isinstance(arguments, dict) else list(range(len(arguments) or len(files)))
    if len(files) > len(keys):
        raise ArgumentError(f"{len(files)} inputs were given, {entry.name} takes {len(keys)}")
    given = dict(arguments) if isinstance(arguments, dict) else dict(enumerate(arguments))
    for key, file in zip(keys, files, strict=False):
        before = given.get(key)
        dtype = before.dtype if isinstance(before, (np.ndarray, Tensor)) else None
        given[key] = read_array(file, dtype)
    return given if isinstance(arguments, dict) else tuple(given[k] for k in keys)


def program_of(entry: Entry, arguments: Any, target: str) -> Program:
    """The entry with these arguments, ready to run at any level."""
    example = entry.example or Example(lambda rng: ())
    return prepare(entry.function, arguments, target, grid=example.grid, group=example.group)
